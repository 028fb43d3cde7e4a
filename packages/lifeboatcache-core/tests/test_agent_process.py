"""The agent's process: who starts it, when it ends, and what becomes of it when it dies."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.agent import AgentState, agent_status, ensure_agent
from lifeboat_cache.agent import starter as starter_module
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.registry import processes
from lifeboat_cache.registry.host import process_start

CLI = "import sys; from lifeboat_cache.cli.main import main; sys.exit(main())"

Start = Callable[..., "Engine"]


def until(what: Callable[[], Any], wanted: str) -> Any:
    """Ask until the answer is true; it never is if something is broken."""
    give_up = time.monotonic() + 90
    while not (answer := what()):
        assert time.monotonic() < give_up, f"waited in vain: {wanted}"
        time.sleep(0.02)
    return answer


class Engine:
    """An engine's process; see ``children/agent_engine.py``."""

    def __init__(self, home: Path, lease: float) -> None:
        program = Path(__file__).parent / "children" / "agent_engine.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(home), str(lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine died with {self.process.wait()}"
        return json.loads(line)

    def ask(self, command: str) -> Any:
        self.tell(command)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory; whatever agent it has in the end is killed."""
    home = tmp_path / "home"
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    seen: set[int] = set()
    yield home
    # Those that were replaced too.
    for entry in processes(home):
        if entry.role == "agent" and entry.alive:
            seen.add(entry.pid)
    seen.add(agent_status(home).pid if home.exists() else 0)
    for pid in seen - {0}:
        if b"lifeboat_cache/agent/__main__.py" in _command_line(pid):
            os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    started: list[Engine] = []

    def make(lease: float = 600) -> Engine:
        engine = Engine(home, lease)
        started.append(engine)
        assert engine.hear() == "there"
        return engine

    yield make
    for engine in started:
        engine.end()


def running(home: Path) -> int:
    """Wait for an agent that works; return its pid."""

    def pid() -> int:
        status = agent_status(home)
        works = status.state is AgentState.RUNNING and status.document["state"] == "watching"
        return status.pid if works else 0

    return int(until(pid, "an agent that works"))


def starts(home: Path) -> int:
    return (home / "agent.log").read_text().count(" starts: ")


def gone(pid: int) -> bool:
    return process_start(pid) == 0


# --- starting ----------------------------------------------------------------------------------


def test_eight_engines_at_once_start_one(home: Path, start: Start) -> None:
    engines = [start() for _ in range(8)]
    for engine in engines:
        engine.tell("ensure")
    states = [engine.hear()[0] for engine in engines]
    assert set(states) <= {"starting", "running"}
    pid = running(home)
    assert [engine.ask("ensure") for engine in engines] == [["running", ""]] * 8
    assert starts(home) == 1
    assert agent_status(home).document["engines"] == 8
    assert running(home) == pid


def test_it_has_nothing_of_the_engine(home: Path, start: Start, tmp_path: Path) -> None:
    engine = start()
    secret = tmp_path / "device"
    engine.ask(f"open {secret}")
    engine.ask("ensure")
    pid = running(home)
    # Its files: nothing but the log, /dev/null and what is its own.
    links = {int(fd.name): os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    assert links[0] == os.devnull
    assert links[1] == links[2] == str(home / "agent.log")
    theirs = [
        link
        for fd, link in links.items()
        if fd > 2 and not link.startswith((str(home), "pipe:", "socket:", "anon_inode:"))
    ]
    assert theirs == []
    assert str(secret) not in links.values()
    # Its own session and process group: Ctrl-C at the engine's terminal does not reach it.
    assert os.getsid(pid) != os.getsid(engine.process.pid)
    assert os.getpgid(pid) != os.getpgid(engine.process.pid)
    # Not among the engine's children, the dead ones included.
    assert engine.ask("children") == []
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert os.sched_getaffinity(pid) == set(range(os.cpu_count() or 1))
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"LIFEBOAT_CACHE_HOME={home}".encode() in environment
    assert stat.S_IMODE((home / "agent.log").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_it_does_not_take_over_the_engines_environment(home: Path) -> None:
    from lifeboat_cache.agent.environment import child_environment

    environ = {
        "PATH": "/bin",
        "HOME": "/h",
        "CUDA_VISIBLE_DEVICES": "0",
        "VLLM_USE_V1": "1",
        "HF_TOKEN": "secret",
        "LIFEBOAT_CACHE_NAMESPACE_SALT": "s",
        "LIFEBOAT_CACHE": "1",
        "VIRTUAL_ENV": "/v",
        "NUMBA_CPU_NAME": "generic",
    }
    kept = child_environment(environ, home, Path("/c.yaml"))
    assert set(environ) - set(kept) == {"CUDA_VISIBLE_DEVICES", "VLLM_USE_V1", "HF_TOKEN"}
    assert kept["LIFEBOAT_CACHE_HOME"] == str(home)
    assert kept["LIFEBOAT_CACHE_CONFIG"] == "/c.yaml"


def test_blocked_signals_of_the_engine_do_not_make_it_deaf(home: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        assert ensure_agent(home).alive
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    pid = running(home)
    os.kill(pid, signal.SIGTERM)
    until(lambda: gone(pid), "its end")


def test_home_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    status = ensure_agent(tmp_path / "file" / "home")
    assert status.state is AgentState.FAILED
    assert "LIFEBOAT_CACHE_HOME" in status.reason
    assert "cannot be started" in caplog.text


def test_home_on_a_read_only_disk(small_disk: Path) -> None:
    home = small_disk / "home"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    status = ensure_agent(home)
    assert status.state is AgentState.FAILED
    assert "Read-only" in status.reason


@pytest.mark.parametrize("interpreter", ["", "/nowhere/python"])
def test_no_interpreter(home: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    status = ensure_agent(home)
    assert status.state is AgentState.FAILED
    assert "lifeboat-cache agent" in status.reason


def test_no_process_can_be_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    status = ensure_agent(home)
    assert status.state is AgentState.FAILED
    assert "Resource temporarily unavailable" in status.reason


def test_it_is_not_started_again_and_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    states = [ensure_agent(home).state for _ in range(starter_module._MOST_STARTS + 3)]
    assert (
        states[: starter_module._MOST_STARTS] == [AgentState.FAILED] * starter_module._MOST_STARTS
    )
    assert set(states[starter_module._MOST_STARTS :]) == {AgentState.BACKOFF}
    # Some time later it is.
    later = starter_module.clock() + 601
    monkeypatch.setattr(starter_module, "clock", lambda: later)
    assert ensure_agent(home).state is AgentState.FAILED


def test_foreign_package_is_not_run(home: Path, tmp_path: Path, start: Start) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "lifeboat_cache").mkdir(parents=True)
    (foreign / "lifeboat_cache" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    path = os.pathsep.join([str(foreign), *filter(None, sys.path)])
    program = Path(starter_module.__file__).with_name("__main__.py")
    done = subprocess.run(
        [sys.executable, "-P", str(program), "--home", str(home)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "hidden by another distribution" in done.stderr
    assert not (tmp_path / "ran").exists()


# --- ending ------------------------------------------------------------------------------------


def test_it_ends_after_the_last_engine(home: Path, start: Start) -> None:
    first, second = start(lease=1), start(lease=1)
    first.ask("ensure")
    pid = running(home)
    first.end()
    # One engine is enough, killed ones do not count.
    until(lambda: agent_status(home).document["engines"] == 1, "one engine")
    time.sleep(2)
    assert not gone(pid)
    second.end()
    until(lambda: gone(pid), "its end")
    status = agent_status(home)
    assert status.state is AgentState.ABSENT
    assert "no engine" in status.reason
    # The next engine starts another at once.
    third = start()
    third.ask("ensure")
    assert running(home) != pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told(home: Path, start: Start, number: signal.Signals) -> None:
    engine = start()
    engine.ask("ensure")
    pid = running(home)
    os.kill(pid, number)
    until(lambda: gone(pid), "its end")
    assert agent_status(home).state is AgentState.ABSENT
    assert number.name in agent_status(home).reason
    assert not [entry for entry in processes(home) if entry.role == "agent" and entry.alive]


# --- dying and hanging -------------------------------------------------------------------------


def test_killed_agent_is_started_again_by_another_engine(home: Path, start: Start) -> None:
    first, second = start(), start()
    first.ask("ensure")
    pid = running(home)
    first.end()
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), "its death")
    assert agent_status(home).state is AgentState.DIED
    assert second.ask("ensure")[0] == "starting"
    assert running(home) not in (0, pid)
    assert starts(home) == 2


def test_stopped_agent_is_replaced_and_goes_when_it_wakes(home: Path, start: Start) -> None:
    engine = start()
    engine.ask("ensure")
    old = running(home)
    os.kill(old, signal.SIGSTOP)
    try:
        # Not before the silence has lasted.
        assert engine.ask("ensure") == ["running", ""]
        until(lambda: agent_status(home, hung_after_s=4).state is AgentState.HUNG, "silence")
        assert engine.ask("ensure 4")[0] == "starting"
        until(lambda: agent_status(home).pid not in (0, old), "another")
        new = running(home)
        assert not gone(old)
        assert engine.ask("ensure")[0] == "running"
    finally:
        os.kill(old, signal.SIGCONT)
    until(lambda: gone(old), "the end of the one that was replaced")
    assert "another agent has taken its place" in (home / "agent.log").read_text()
    # It has taken nothing with it.
    assert running(home) == new
    assert engine.ask("ensure") == ["running", ""]


# --- the operator's agent ----------------------------------------------------------------------


def operate(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLI, "agent", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_operators_agent_takes_over_and_stays(home: Path, start: Start) -> None:
    engine = start(lease=1)
    engine.ask("ensure")
    old = running(home)
    operated = operate(home)
    try:
        until(lambda: agent_status(home).pid == operated.pid, "the operator's agent")
        until(lambda: gone(old), "the end of the other")
        assert agent_status(home).operated
        assert engine.ask("ensure")[0] in ("running", "starting")
        engine.end()
        running(home)
        time.sleep(2)
        assert running(home) == operated.pid
        # There is one.
        second = operate(home)
        _, complaint = second.communicate(timeout=90)
        assert second.returncode == 2
        assert "--stop" in complaint
        stopped = operate(home, "--stop")
        out, _ = stopped.communicate(timeout=90)
        assert stopped.returncode == 0
        assert str(operated.pid) in out
        _, log = operated.communicate(timeout=90)
        assert operated.returncode == 0
        assert "told to end (SIGTERM)" in log
    finally:
        operated.kill()
        operated.communicate()
    assert agent_status(home).state is AgentState.ABSENT
    again = operate(home, "--stop")
    out, _ = again.communicate(timeout=90)
    assert (again.returncode, "No agent runs" in out) == (0, True)


# --- commands start none -----------------------------------------------------------------------


@pytest.mark.parametrize("command", [["ls"], ["config", "show"], ["doctor"], ["check"]])
def test_commands_start_no_agent(home: Path, command: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-c", CLI, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert not (home / "agent.log").exists()
    assert not AgentPlaces.of(home).lock.exists()
