"""Agents and the engines that start them, as processes of a test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.agent import AgentState, agent_status
from lifeboat_cache.registry.host import process_start

__all__ = ["CLI", "Engine", "Start", "agent_home", "engines", "gone", "running", "until"]

#: Runs ``lifeboat-cache``.
CLI = "import sys; from lifeboat_cache.cli.main import main; sys.exit(main())"

Start = Callable[..., "Engine"]

_ENGINE = (
    Path(__file__).resolve().parents[2]
    / "packages/lifeboatcache-core/tests/children/agent_engine.py"
)


def until(what: Callable[[], Any], wanted: str) -> Any:
    """Ask until the answer is true; it never is if something is broken."""
    give_up = time.monotonic() + 300
    while not (answer := what()):
        assert time.monotonic() < give_up, f"waited in vain: {wanted}"
        time.sleep(0.02)
    return answer


class Engine:
    """An engine's process; see ``children/agent_engine.py``."""

    def __init__(self, home: Path, lease: float, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_ENGINE), str(home), str(lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ},
        )

    def tell(self, command: str) -> None:
        """Give it a command."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        """Its answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine died with {self.process.wait()}"
        return json.loads(line)

    def ask(self, command: str) -> Any:
        """Give it a command and return the answer."""
        self.tell(command)
        return self.hear()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait()


@contextlib.contextmanager
def agent_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path | None = None
) -> Iterator[Path]:
    """A home directory; whatever agents it has in the end are killed.

    With ``kernel_home`` it has the kernels of that home: no agent compiles any.
    """
    home = tmp_path / "home"
    if kernel_home is not None:
        home.mkdir(mode=0o700)
        # Tests run side by side, and 9402 and 9400 may be somebody else's.
        (home / "lifeboat.yaml").write_text(
            "telemetry: {prometheus: {port: 0}}\ndashboard: {enabled: false}\n"
        )
        shutil.copytree(kernel_home / "kernels", home / "kernels", symlinks=True)
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    try:
        yield home
    finally:
        # Those that were replaced, and their compilers, too.
        for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
            command = _command_line(pid)
            if b"lifeboat_cache/agent/__main__.py" in command and bytes(home) in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def engines(home: Path) -> Iterator[Start]:
    """Starts engines; kills them in the end."""
    started: list[Engine] = []

    def start(lease: float = 30, **environ: str) -> Engine:
        engine = Engine(home, lease, environ)
        started.append(engine)
        assert engine.hear() == "there"
        return engine

    try:
        yield start
    finally:
        for engine in started:
            engine.end()


def running(home: Path) -> int:
    """Wait for an agent that works; return its pid."""

    def pid() -> int:
        status = agent_status(home)
        works = status.state is AgentState.RUNNING and status.document["state"] == "watching"
        return status.pid if works else 0

    return int(until(pid, "an agent that works"))


def gone(pid: int) -> bool:
    """Whether no process, not even a dead one that nobody has reaped, has that pid."""
    return process_start(pid) == 0
