"""Who serves the dashboard, and when it ends: the agent's child, or the command."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import CLI, until
from vllm_server import free_port


def answers(port: int, path: str = "/healthz") -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as found:
            return bool(found.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def configure(home: Path, **dashboard: Any) -> None:
    # What cannot be compiled is not compiled: the agent of a test has better things to do.
    (home / "kernels").touch()
    pairs = ", ".join(f"{name}: {value}" for name, value in dashboard.items())
    new = home / "new.yaml"
    new.write_text(f"telemetry: {{prometheus: {{port: 0}}}}\ndashboard: {{{pairs}}}\n")
    os.replace(new, home / "lifeboat.yaml")


Run = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Iterator[Run]:
    """Runs a command; what it logs is in ``log``."""
    started = []
    with contextlib.ExitStack() as stack:

        def start(command: str) -> subprocess.Popen[str]:
            log = stack.enter_context((tmp_path / "log").open("a"))
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = subprocess.Popen(
                [sys.executable, "-c", CLI, command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env=environ,
            )  # fmt: skip
            started.append(process)
            return process

        yield start
        for process in started:
            process.kill()
            process.wait()


def log_of(tmp_path: Path) -> str:
    return (tmp_path / "log").read_text()


def test_the_agent_serves_it_and_it_ends_with_the_agent(
    home: Path, tmp_path: Path, run: Run
) -> None:
    port = free_port()
    configure(home, port=port)
    agent = run("agent")
    until(lambda: answers(port), "the dashboard")
    until(lambda: f"is served at http://127.0.0.1:{port}" in log_of(tmp_path), "a line")
    # One per node: a second one says where the first is.
    other = run("dashboard")
    assert other.wait(60) == 2
    assert "another dashboard may have it already" in log_of(tmp_path)
    agent.kill()
    agent.wait()
    until(lambda: not answers(port), "its end with the agent")


@pytest.mark.full
def test_it_is_started_again_and_follows_its_configuration(home: Path, run: Run) -> None:
    port = free_port()
    configure(home, port=port)
    agent = run("agent")
    until(lambda: answers(port), "the dashboard")
    # Killed, it is started again.
    (child,) = children(agent.pid, "lifeboat_cache/dashboard")
    os.kill(child, signal.SIGKILL)
    until(lambda: children(agent.pid, "lifeboat_cache/dashboard") not in ([], [child]), "another")
    until(lambda: answers(port), "the dashboard again")
    # Another port: it moves. Switched off: it ends.
    moved = free_port()
    configure(home, port=moved)
    until(lambda: answers(moved) and not answers(port), "the move")
    configure(home, port=moved, enabled="false")
    until(lambda: not answers(moved), "its end")
    configure(home, port=moved)
    until(lambda: answers(moved), "the dashboard once more")


def children(pid: int, name: str) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in found
        if name in Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
    ]


def test_a_taken_port_stops_nothing(home: Path, tmp_path: Path, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        configure(home, port=taken.getsockname()[1])
        agent = run("agent")
        until(lambda: "choose another dashboard.port" in log_of(tmp_path), "the line")
    assert agent.poll() is None


def test_others_are_served_only_with_a_token(home: Path, tmp_path: Path, run: Run) -> None:
    port = free_port()
    configure(home, port=port, host="0.0.0.0")
    agent = run("agent")
    until(lambda: "there is no token" in log_of(tmp_path), "the line")
    assert not answers(port)
    alone = run("dashboard")
    assert alone.wait(60) == 2
    configure(home, port=port, host="0.0.0.0", auth_token="'a-token-of-24-characters'")
    until(lambda: answers(port), "the dashboard")
    assert not answers(port, "/api/overview")
    assert "a-token-of" not in log_of(tmp_path)
    agent.terminate()
    assert agent.wait(30) == 0
    until(lambda: not answers(port), "its end")


def test_alone_it_serves_until_interrupted(home: Path, tmp_path: Path, run: Run) -> None:
    port = free_port()
    configure(home, port=port)
    alone = run("dashboard")
    until(lambda: answers(port, "/api/overview?token=never-logged"), "the dashboard")
    assert (home / "dashboard" / "history").stat().st_mode & 0o077 == 0
    alone.send_signal(signal.SIGINT)
    alone.wait(30)
    assert not answers(port)
    assert "never-logged" not in log_of(tmp_path)
