"""`lifeboat-cache check`: what it prints, its exit codes, its JSON, its interruption."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.cli.main import main
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, flip_byte

SIZE = 8192

#: Waits with the first run until it is told to end, so that no test depends on time.
_SLOW = """
import sys, threading
from lifeboat_cache.check import payloads
from lifeboat_cache.cli.main import main
read, first = payloads.read_into, threading.Event()
def slow(fd, pieces, offset):
    if not first.is_set():
        first.set()
        print("reading", file=sys.stderr, flush=True)
        sys.stdin.readline()
    return read(fd, pieces, offset)
payloads.read_into = slow
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    (home / "lifeboat.yaml").write_text(
        "storage:\n"
        "  tiers:\n"
        "    - {name: one, type: filesystem, path: $LIFEBOAT_CACHE_HOME/one, min_free_gb: 0}\n"
        "    - {name: two, type: filesystem, path: $LIFEBOAT_CACHE_HOME/two, enabled: false}\n"
        "  fallback_local: {min_free_gb: 0}\n"
    )
    return home


def fill(root: Path, model: str = "small", count: int = 3) -> Namespace:
    namespace = Namespace.from_identity({"engine": "test", "model": model})
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    assert store.wait_recovered(60)
    assert StoreDriver(store, size=SIZE).store(range(count)) == [Outcome.OK] * count
    assert store.close()
    return namespace


def damage(root: Path, namespace: Namespace) -> None:
    (segment,) = (root / namespace.directory).glob("*.segment")
    flip_byte(segment, 4096)


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["check", *args]) == code
    captured = capsys.readouterr()
    assert "\r" not in captured.err  # no progress: this is no terminal
    return captured.out


def start(*args: str, program: str = "", **options: Any) -> subprocess.Popen[str]:
    code = program or "import sys; from lifeboat_cache.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, "check", *args],
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        **options,
    )


def test_nothing_is_there(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    text = run(capsys)
    assert f"one: {home}/one\n  nothing to check" in text
    assert "Nothing is wrong." in text
    assert not (home / "one").exists()


def test_a_target_that_cannot_be_checked_is_not_called_sound(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    (home / "one").write_text("a file in the place of the directory")
    assert main(["check"]) == 2
    captured = capsys.readouterr()
    assert "Nothing is wrong in what could be checked." in captured.out
    assert f"error: one: {home}/one cannot be read (Not a directory): check" in captured.err


def test_from_damage_to_repair(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    space = fill(home / "one")
    assert "3 blocks verified" in run(capsys)
    damage(home / "one", space)
    text = run(capsys, code=1)
    assert "2 blocks verified" in text
    assert "1 bad" in text
    assert "fault  " in text
    assert ".segment: record-corrupt" in text
    assert "-> run: lifeboat-cache check --repair" in text
    assert "1 fault. Nothing was changed." in text
    text = run(capsys, "--repair", code=1)
    assert "fixed  " in text
    assert "1 fault, repaired." in text
    text = run(capsys, "--repair")
    assert "Nothing is wrong." in text
    assert "1 declared dead" in text


def test_what_cannot_be_repaired_is_said(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    fill(home / "one")
    (home / "one/photo\x1b.jpg").write_bytes(b"x")
    text = run(capsys, "--repair", code=1)
    assert "photo?.jpg: foreign-file" in text
    assert "-> move it elsewhere" in text
    assert "1 fault: 0 repaired, 1 left." in text


def test_json(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    space = fill(home / "one")
    damage(home / "one", space)
    document = json.loads(run(capsys, "--json", code=1))
    assert {key: document[key] for key in ("status", "repair", "interrupted")} == {
        "status": "faulty",
        "repair": False,
        "interrupted": False,
    }
    assert [target["name"] for target in document["targets"]] == ["one", "two", "fallback_local"]
    (namespace,) = document["targets"][0]["namespaces"]
    (finding,) = namespace.pop("findings")
    assert namespace == {
        "directory": space.directory,
        "digest": space.hex,
        "writers": 1,
        "alive": 0,
        "verified_bytes": 2 * SIZE,
        "records": {
            "verified": 2,
            "bad": 1,
            "unreadable": 0,
            "dead": 0,
            "gone": 0,
            "unknown": 0,
            "newer": 0,
            "keyed": 0,
        },
    }
    path = finding.pop("path")
    assert (home / "one" / path).suffix == ".segment"
    assert finding == {
        "kind": "record-corrupt",
        "level": "fault",
        "count": 1,
        "detail": "the stored bytes do not match their checksum",
        "remedy": "run: lifeboat-cache check --repair",
        "repaired": False,
    }
    assert json.loads(run(capsys, "--json", "--repair", code=1))["status"] == "repaired"
    assert json.loads(run(capsys, "--json"))["status"] == "ok"


def test_the_json_is_described(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    damage(home / "one", fill(home / "one"))
    page = (Path(__file__).parents[3] / "docs/troubleshooting.md").read_text()

    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {name for item in value.values() for name in names(item)}
        return (
            {name for item in value for name in names(item)} if isinstance(value, list) else set()
        )

    for name in names(json.loads(run(capsys, "--json", code=1))):
        assert f"`{name}`" in page, name


def test_quiet_prints_faults_only(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    space = fill(home / "one")
    assert run(capsys, "--quiet") == ""
    damage(home / "one", space)
    lines = run(capsys, "--quiet", code=1).splitlines()
    assert len(lines) == 2
    assert "record-corrupt" in lines[0]


def test_only_the_namespaces_named(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    spaces = [fill(home / "one", model) for model in ("a", "b")]
    fill(home / "two", "c")
    damage(home / "one", spaces[1])
    assert spaces[1].directory[:12] not in run(capsys, spaces[0].hex[:8])
    # By its whole name, in capitals, and several.
    run(capsys, spaces[1].hex.upper(), code=1)
    text = run(capsys, *(space.hex[:8] for space in spaces), code=1)
    assert all(space.directory[:12] in text for space in spaces)


@pytest.mark.parametrize("prefix", ["zz", ""])
def test_unknown_namespace(capsys: pytest.CaptureFixture[str], home: Path, prefix: str) -> None:
    fill(home / "one")
    assert main(["check", prefix]) == 2
    assert "no namespace starts with" in capsys.readouterr().err


def test_ambiguous_namespace(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    fill(home / "one")
    for last in "01":
        (home / "one" / ("ab" * 15 + f"a{last}")).mkdir()
    assert main(["check", "aba"]) == 2
    assert "Write more" in capsys.readouterr().err


def test_a_disabled_target_is_checked(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    damage(home / "two", fill(home / "two"))
    assert "record-corrupt" in run(capsys, code=1)


def test_target_that_cannot_be_checked(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    fill(home / "one")
    (home / "two").mkdir()
    (home / "two/photo.jpg").write_bytes(b"x")
    assert main(["check"]) == 2
    captured = capsys.readouterr()
    assert "3 blocks verified" in captured.out
    assert "lifeboat-cache: error: two: " in captured.err
    assert main(["check", "--json"]) == 2
    problems = [t["problem"] for t in json.loads(capsys.readouterr().out)["targets"]]
    assert [bool(problem) for problem in problems] == [False, True, False]


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_on_a_terminal(home: Path, quiet: bool) -> None:
    fill(home / "one", count=20)
    leader, follower = pty.openpty()
    process = start(*["--quiet"] * quiet, stderr=follower, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=120)
    os.write(follower, b"end")
    shown = os.read(leader, 100_000).decode()
    os.close(leader)
    os.close(follower)
    assert process.returncode == 0
    assert ("verified" in shown and "%" in shown) != quiet
    assert "%" not in output


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted_it_says_what_it_found(home: Path, as_json: bool) -> None:
    spaces = sorted((fill(home / "one", model) for model in "ab"), key=lambda s: s.directory)
    # The first namespace has been looked at when the second is interrupted.
    (home / "one" / spaces[0].directory / "photo.jpg").write_bytes(b"x")
    process = start(
        *["--json"] * as_json,
        program=_SLOW,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    assert process.stderr.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate("\n", timeout=120)
    assert process.returncode == 130
    assert errors == ""
    if as_json:
        document = json.loads(output)
        assert document["interrupted"]
        assert document["targets"][0]["namespaces"][0]["findings"]
    else:
        assert "photo.jpg: foreign-file" in output
        assert "Interrupted: this is what was found so far." in output
