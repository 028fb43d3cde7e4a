"""The agent's process: who starts it, when it ends, and what becomes of it when it dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import CLI, Start, agent_home, engines, gone, running, until
from faultkit.disks import faulty_disk

from lifeboat_cache.agent import AgentState, agent_status, ensure_agent, logfile
from lifeboat_cache.agent import starter as starter_module
from lifeboat_cache.agent import status as status_module
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.registry import processes


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path) -> Iterator[Path]:
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        yield home


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    with engines(home) as start:
        yield start


def starts(home: Path) -> int:
    return (home / "agent.log").read_text().count(" starts: ")


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


def test_home_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with agent_home(tmp_path, monkeypatch) as home:
        assert ensure_agent(home / "of" / "mine", lease_s=0.1).alive
        for made in (home / "of" / "mine", home / "of" / "mine" / "run"):
            assert stat.S_IMODE(made.stat().st_mode) == 0o700, made
        until(lambda: agent_status(home / "of" / "mine").state is AgentState.ABSENT, "its end")


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


def test_variables_of_the_configuration_reach_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache.agent.environment import child_environment

    (tmp_path / "base.yaml").write_text("storage: {fallback_local: {path: '${SCRATCH}/kv'}}\n")
    (tmp_path / "c.yaml").write_text("extends: base.yaml\n")
    environ = {"SCRATCH": "/s", "OTHER": "o", "LIFEBOAT_CACHE_CONFIG": "c.yaml"}
    monkeypatch.chdir(tmp_path)
    kept = child_environment(environ, home, None)
    # The engine may be anywhere, the agent is in /.
    assert kept["LIFEBOAT_CACHE_CONFIG"] == str(tmp_path / "c.yaml")
    assert set(kept) == {"SCRATCH", "LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_HOME"}


def test_blocked_signals_of_the_engine_do_not_make_it_deaf(home: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        assert ensure_agent(home).alive
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    pid = running(home)
    os.kill(pid, signal.SIGTERM)
    until(lambda: gone(pid), "its end")


def test_start_without_waiting(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ensure_agent(home, wait=False).state is AgentState.STARTING
    pid = running(home)
    until(lambda: ensure_agent(home, wait=False).pid == pid, "what the call before found")
    os.kill(pid, signal.SIGTERM)
    until(lambda: gone(pid), "its end")
    # Why it failed is told later.
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    until(lambda: "/nowhere/python" in ensure_agent(home, wait=False).reason, "the reason")
    thread = starter_module._starter
    assert thread is not None
    thread.join(120)
    assert not thread.is_alive()


def test_home_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    asked: list[Path] = []

    def look(places: AgentPlaces, hung_after_s: float) -> status_module.AgentStatus:
        asked.append(places.home)
        answer.wait()
        return status_module.AgentStatus(AgentState.RUNNING)

    monkeypatch.setattr(starter_module, "status_at", look)
    try:
        for _ in range(3):
            assert ensure_agent(tmp_path, wait=False).state is AgentState.STARTING
        assert asked == [tmp_path]  # one thread waits, not one for every call
    finally:
        answer.set()
        thread = starter_module._starter
        assert thread is not None
        thread.join(120)
    assert ensure_agent(tmp_path, wait=False).state is AgentState.RUNNING
    thread = starter_module._starter
    assert thread is not None
    thread.join(120)


def test_home_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(starter_module, "_said", {})
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


def test_it_is_not_started_again_and_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(starter_module, "_said", {})
    most = status_module.MOST_STARTS
    states = [ensure_agent(home).state for _ in range(most + 3)]
    assert states == [AgentState.FAILED] * most + [AgentState.BACKOFF] * 3
    # Who asks is told, and the log is not filled.
    assert f"{most} times" in agent_status(home).reason
    assert caplog.text.count("cannot be started") == caplog.text.count(f"{most} times") == 1
    # Some time later it is tried again.
    later = status_module.clock() + status_module.STARTS_S + 1
    monkeypatch.setattr(status_module, "clock", lambda: later)
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
    # It did not die, so it does not count among the starts that failed.
    assert not AgentPlaces.of(home).history.exists()
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


def test_newer_release_replaces_an_older_agent(
    home: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.ask("ensure")
    old = running(home)
    assert ensure_agent(home).pid == old
    monkeypatch.setattr(starter_module, "__version__", "999.0")
    assert ensure_agent(home, lease_s=600).state is AgentState.STARTING
    until(lambda: gone(old), "the end of the older one")
    assert running(home) != old
    monkeypatch.setattr(starter_module, "__version__", "0.0.1")
    assert ensure_agent(home).state is AgentState.RUNNING


# --- kernels -----------------------------------------------------------------------------------


def test_kernels_that_are_there_are_used(home: Path, start: Start) -> None:
    engine = start()
    engine.ask("ensure")
    until(lambda: agent_status(home).document.get("kernels") == "ready", "kernels")
    assert engine.ask("kernels")


@pytest.mark.full
def test_kernels_are_compiled_first_and_for_other_environments_too(
    home: Path, start: Start
) -> None:
    shutil.rmtree(home / "kernels")
    engine = start()
    assert not engine.ask("kernels")
    engine.ask("ensure")
    until(lambda: agent_status(home).document.get("kernels") == "ready", "kernels")
    assert engine.ask("kernels")
    # Code that was made for other settings of the compiler does not fit.
    other = start(NUMBA_OPT="2")
    assert not other.ask("kernels")
    assert other.ask("ensure") == ["running", ""]
    until(lambda: other.ask("kernels"), "kernels of the other environment")
    assert len(list((home / "kernels").glob("*/complete.json"))) == 2
    until(lambda: not list((home / "kernels").glob("*.building")), "the end of the compiler")
    assert starts(home) == 1


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


def test_run_directory_that_is_removed(home: Path, start: Start) -> None:
    engine = start()
    engine.ask("ensure")
    old = running(home)
    shutil.rmtree(home / "run")
    until(lambda: gone(old), "the end of an agent that nobody can see")
    until(lambda: engine.ask("ensure")[0] == "running", "another")
    assert running(home) != old


def test_agent_on_a_full_disk_is_not_taken_for_dead(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent_home(small_disk, monkeypatch) as home, engines(home) as start:
        start().ask("ensure")
        pid = running(home)
        fill = [
            "dd", "if=/dev/zero", f"of={small_disk / 'fill'}", "bs=4096",
            "oflag=append", "conv=notrunc",
        ]  # fmt: skip

        def silent() -> bool:
            # Again and again: the agent gives up what it was compiling.
            filled = subprocess.run(fill, capture_output=True, text=True, check=False)
            assert "No space left" in filled.stderr
            return agent_status(home).age > 6

        until(silent, "a heartbeat that cannot be written")
        status = agent_status(home, hung_after_s=4)
        assert status.alive
        assert ensure_agent(home, hung_after_s=4).alive
        (small_disk / "fill").unlink()
        until(lambda: agent_status(home).age < 4, "a heartbeat")
        assert running(home) == pid


def test_pass_that_never_ends_does_not_delay_the_end(
    home: Path, start: Start, tmp_path: Path
) -> None:
    with faulty_disk(tmp_path) as disk, disk.dead():
        dead = disk.root
        engine = start()
        facts = {"name": "dead", "location": str(dead), "capacity_bytes": 1, "reserve_bytes": 0}
        assert engine.ask(f"target {json.dumps({**facts, 'direct_io': 'auto'})}")
        engine.ask("ensure")
        pid = running(home)

        def under_way() -> bool:
            targets = agent_status(home).document["targets"]
            return any(item["path"] == str(dead) and item["pass_s"] for item in targets)

        until(under_way, "a pass over the dead target")
        assert engine.ask("ensure") == ["running", ""]
        os.kill(pid, signal.SIGTERM)
        until(lambda: gone(pid), "its end")
        assert agent_status(home).state is AgentState.ABSENT


def test_log_stays_small(tmp_path: Path) -> None:
    program = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "from lifeboat_cache.agent.logfile import log_to_file\n"
        "log_to_file(Path(sys.argv[1]))\n"
        "for number in range(30_000):\n"
        "    logging.getLogger('lifeboat_cache').info('%06d %s', number, 'x' * 50)\n"
        "print('printed')\n"
    )
    log = tmp_path / "agent.log"
    subprocess.run(
        [sys.executable, "-c", program, str(log)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
        timeout=120,
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["agent.log", "agent.log.1"]
    for file in tmp_path.iterdir():
        assert file.stat().st_size <= logfile.MAX_BYTES
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    last, printed = log.read_text().splitlines()[-2:]
    assert "029999" in last
    assert printed == "printed"


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
