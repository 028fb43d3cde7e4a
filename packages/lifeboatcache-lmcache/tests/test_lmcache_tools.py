"""The self-test, the checks of the doctor, and the server's arguments and leases."""

from __future__ import annotations

import argparse
import configparser
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lifeboat_cache.cli.parser import build_parser
from lifeboat_cache.config import load_config
from lifeboat_cache.doctor import DoctorContext
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.integrations import lmcache_doctor, lmcache_selftest
from lifeboat_cache.integrations.lmcache_arguments import server_arguments
from lifeboat_cache.integrations.lmcache_identity import ModelTag, read_tag, tagged
from lifeboat_cache.integrations.lmcache_leases import ServerPlaces, hold_lease
from lifeboat_cache.integrations.lmcache_versions import is_tested, parse_release


def test_the_selftest_passes_and_leaves_nothing(home: Path) -> None:
    before = set(home.rglob("*"))
    report = lmcache_selftest.run(argparse.Namespace(config=None, keep=False))
    assert report.exit_code == 0, report.to_json()
    assert [step.name for step in report.steps] == [
        "version", "interface", "store", "restart", "layout",
    ]  # fmt: skip
    assert {path for path in home.rglob("*") if path.is_file()} <= before


def test_the_selftest_fails_where_wrong_bytes_come_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch, "equal", lambda one, other: False)
    report = lmcache_selftest.run(argparse.Namespace(config=None, keep=False))
    assert report.exit_code == 1
    assert report.steps[-1].name == "restart"
    assert "wrong bytes" in report.steps[-1].summary


def test_the_doctor_on_what_is_installed(home: Path) -> None:
    context = DoctorContext(os.environ, load_config())
    found = {check.name: check for check in lmcache_doctor.checks(context)}
    assert {name: check.status for name, check in found.items()} == {
        "LMCache: version": "ok",
        "LMCache: server": "ok",
    }
    assert lmcache_doctor.check_engine("0.6.1").status == "fail"
    assert lmcache_doctor.check_engine("").status == "skip"


def test_the_doctor_says_that_the_mode_lacks_lmcache(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "lifeboat.yaml").write_text("engine: {vllm_mode: lmcache}")
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"vllm": ["vllm"]})
    context = DoctorContext(os.environ, load_config())
    (check,) = lmcache_doctor.check_mode(context, "")
    assert check.status == "fail"
    assert "pip install" in check.remedy


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.5.6", True), ("0.5.6.post1", True), ("0.5.7", False), ("0.6.0", False), ("x", False)],
)
def test_versions(version: str, tested: bool) -> None:
    assert is_tested(version) is tested
    assert (parse_release(version) is None) is (version == "x")


def test_a_tag_is_read_back() -> None:
    tag = ModelTag("0123456789abcdef" * 2, recurrent=True)
    assert read_tag(tagged("org/name-1.5", tag)) == ("org/name-1.5", tag)
    assert read_tag("org/name-1.5") == ("org/name-1.5", None)


def test_a_server_listens_on_this_host_only_and_what_is_given_wins(home: Path) -> None:
    config = load_config().config
    plain = server_arguments(config)
    pairs = dict(zip(plain[::2], plain[1::2], strict=True))
    assert pairs["--host"] == pairs["--http-host"] == "127.0.0.1"
    assert (pairs["--port"], pairs["--http-port"], pairs["--prometheus-port"]) == (
        "6555", "6556", "6557",
    )  # fmt: skip
    other = ["--l2-adapter", '{"type": "fs"}', "--http-host=0.0.0.0", "--port", "7000"]
    given = server_arguments(config, other)
    assert given[-len(other) :] == other
    assert given.count("--http-host") == 0
    assert given[given.index("--http-port") + 1] == "7001"
    assert given.count("--l2-adapter") == 2
    with pytest.raises(ConfigError, match="--port"):
        server_arguments(config, ["--port", "none"])


def test_the_systemd_unit_of_the_docs_starts_what_there_is(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "lmcache.md").read_text()
    unit = text.partition("```ini\n")[2].partition("```")[0]
    parsed = configparser.ConfigParser(strict=True)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit)
    service = parsed["Service"]
    for name in ("ExecStart", "ExecStartPost"):
        command, *arguments = shlex.split(service[name])
        assert Path(command).name == "lifeboat-cache"
        assert build_parser().parse_args(arguments).func
    checker = shutil.which("systemd-analyze")
    if checker is None:
        return
    here = unit.replace(command, "/bin/true").replace("User=llm\n", "")
    (tmp_path / "lmcache.service").write_text(here)
    done = subprocess.run(
        [checker, "verify", str(tmp_path / "lmcache.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "lmcache.service" not in done.stderr, done.stderr


def test_a_lease_ends_with_its_process(home: Path) -> None:
    places = ServerPlaces(home, 7000)
    assert not places.in_use()
    script = """
        import sys
        from pathlib import Path
        from lifeboat_cache.integrations.lmcache_leases import ServerPlaces, hold_lease
        hold_lease(ServerPlaces(Path(sys.argv[1]), 7000))
        print("held", flush=True)
        sys.stdin.read()
    """
    import textwrap

    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    assert places.in_use()
    child.kill()
    child.wait()
    assert not places.in_use()
    assert not list(places.directory.glob("*.lease"))


def test_a_process_sees_its_own_lease_and_keeps_it(home: Path) -> None:
    places = ServerPlaces(home, 7001)
    hold_lease(places)
    hold_lease(places)
    assert len(list(places.directory.glob("*.lease"))) == 1
    assert places.in_use()
    check = (
        "import sys; from pathlib import Path; "
        "from lifeboat_cache.integrations.lmcache_leases import ServerPlaces; "
        "sys.exit(not ServerPlaces(Path(sys.argv[1]), 7001).in_use())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", check, str(home)]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_a_server_that_does_not_start_is_an_error_that_says_why(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache.integrations.lmcache_starter import ServerError, ensure_server

    loaded = load_config()
    # By the time the server reads it, the configuration is another one.
    (home / "lifeboat.yaml").write_text("storage: 7")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with pytest.raises(ServerError, match="storage"):
        ensure_server(loaded, 7002, wait_s=60)
