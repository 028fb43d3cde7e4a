"""What ``dev.py demo`` prints, and what it calls a success."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from devkit import demo, recipes
from devkit.places import ROOT, dev_home
from devkit.shell import DevError
from long_prompt import long_prompt
from vllm_server import ServerError

from lifeboat_cache.agent import AgentState, agent_status

_KEYS = [
    "prompt_tokens",
    "cold_s",
    "restart_without_s",
    "restart_with_s",
    "restored_tokens",
    "same_text",
    "disk_bytes",
]
_GOOD = demo._Result(4283, 8.0, 7.5, 0.5, 4224, same_text=True, disk_bytes=97_000_000)


@pytest.fixture(params=demo.TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tier whose environment and model are made up."""
    monkeypatch.setenv("LIFEBOAT_DEV_HOME", str(tmp_path))
    stand_in = SimpleNamespace(make=lambda: tmp_path / "python")
    monkeypatch.setattr(recipes, "vllm", lambda: stand_in)
    monkeypatch.setattr(demo, "make_model", lambda: tmp_path / "model")
    monkeypatch.setattr(demo, "_measure", lambda _: _GOOD)
    return str(request.param)


def test_json_is_one_line_with_the_promised_keys(
    tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run_demo(tier, as_json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert list(json.loads(line)) == _KEYS


def test_table_shows_every_number_and_where_to_look(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run_demo(tier, as_json=False) == 0
    shown = capsys.readouterr().out
    for number in ("4,283", "8.00 s", "7.50 s", "0.50 s", "4,224", "97.0 MB", "same as"):
        assert number in shown
    assert str(tmp_path / "demo" / tier) in shown
    for name in ("ls", "status", "doctor"):
        assert (f"lifeboat-cache {name}" in shown) == (tier == "lifeboat")
    assert (tmp_path / "demo" / tier / "lifeboat.yaml").exists() == (tier == "lifeboat")


@pytest.mark.parametrize("good", [True, False])
def test_what_an_earlier_run_left_goes_and_agents_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bool, tier: str
) -> None:
    home = tmp_path / "demo" / tier
    for name in ("kv", "logs", "run", "kernels"):
        (home / name).mkdir(parents=True)
        (home / name / "file").touch()
    (home / "agent.log").touch()
    commands: list[list[str]] = []

    def measure(stage: demo._Stage) -> demo._Result:
        assert {path.name for path in stage.home.iterdir()} <= {"kernels", "lifeboat.yaml"}
        assert (stage.home / "kernels" / "file").exists(), "compiling them takes a while"
        (stage.home / "run").mkdir()
        if good:
            return _GOOD
        raise ServerError("no luck")

    monkeypatch.setattr(demo, "_measure", measure)
    monkeypatch.setattr(demo, "run", commands.append)
    try:
        demo.run_demo(tier, as_json=True)
    except DevError:
        assert not good
    else:
        assert good
    agents = [f"LIFEBOAT_CACHE_HOME={home}", str(tmp_path / "lifeboat-cache"), "agent", "--stop"]
    assert [command[1:] for command in commands] == [agents] * 2 * (tier == "lifeboat")


@pytest.mark.parametrize(
    "bad",
    [dataclasses.replace(_GOOD, same_text=False), dataclasses.replace(_GOOD, restored_tokens=0)],
    ids=["text", "nothing restored"],
)
def test_bad_result_is_a_failure(
    tier: str, bad: demo._Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_measure", lambda _: bad)
    assert demo.run_demo(tier, as_json=True) == 1


def test_failed_server_ends_with_the_place_of_the_logs(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ServerError("no luck")

    monkeypatch.setattr(demo, "_measure", fail)
    with pytest.raises(DevError, match="no luck") as caught:
        demo.run_demo(tier, as_json=True)
    assert str(tmp_path / "demo" / tier) in str(caught.value)


_WAITS = """
import time
try:
    print("there", flush=True)
    time.sleep(60)
finally:
    print("the server is stopped", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "inside"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGHUP, True),
    ],
)
def test_a_command_that_is_told_to_end_ends_what_it_has_started(
    tmp_path: Path, number: signal.Signals, inside: bool
) -> None:
    """In the process itself, as the demonstration, or in one ``inside``, as tests."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "import dev\nfrom devkit.shell import try_run\n"
        f"waits, inside = {_WAITS!r}, {inside}\n"
        "def command(arguments):\n"
        "    return try_run([sys.executable, '-c', waits]) if inside else exec(waits)\n"
        "dev.commands._demo = command\n"
        "sys.exit(dev.main())\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program), "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(number)
        assert process.stdout.read() == "the server is stopped\n"
    assert process.returncode == 128 + number


def test_nothing_stored_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="nothing was stored"):
        demo._wait_until_stored(tmp_path, quiet_s=0.1, timeout_s=0.5)


def test_bytes_are_those_on_disk(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with (tmp_path / "below" / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(bytes(4096))
    assert 4096 <= demo._bytes_below(tmp_path) < 1 << 19


def test_prompt_never_changes() -> None:
    assert long_prompt(3) == long_prompt(3)
    assert long_prompt(3)[:60] != long_prompt(3, seed=2)[:60]
    assert len(long_prompt()) > 16_000


@pytest.mark.full
@pytest.mark.engine
def test_demo_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "dev.py"), "demo", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == _KEYS
    assert result["prompt_tokens"] >= 4_000
    assert result["restored_tokens"] >= 0.95 * (result["prompt_tokens"] // 256 * 256)
    assert result["same_text"] is True
    assert result["disk_bytes"] > 0
    home = dev_home() / "demo" / "lifeboat"
    assert agent_status(home).state is AgentState.ABSENT, "it is not left to its lease"
