"""Nodes that share a directory: processes with host names and wall clocks of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["DAY", "SCALE", "Node", "nodes", "until"]

DAY = 86400.0

#: A lease of 300 s takes 6 s, and looking for what others have stored 0.04 s.
SCALE = 0.02

#: No test of ours waits so long for something that comes.
_PATIENCE_S = 90.0


class Node:
    """One node, asked with :meth:`ask`.

    Parameters
    ----------
    root
        The shared directory.
    name
        Its host name.
    clock
        By how many seconds its wall clock is wrong.
    settings
        See ``node_process.py``.
    """

    def __init__(self, root: Path, name: str, *, clock: float = 0.0, **settings: object) -> None:
        self.name = name
        values = {"name": name, "clock": clock, "scale": SCALE, "size": 8192, **settings}
        program = Path(__file__).with_name("node_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(root), json.dumps(values)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def tell(self, command: str, given: object = None) -> None:
        """Ask without waiting for the answer."""
        assert self.process.stdin is not None
        print(json.dumps([command, given]), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} has died: {self.process.wait(30)}"
        return json.loads(line)

    def ask(self, command: str, given: object = None) -> Any:
        """Have something done, and wait for it."""
        self.tell(command, given)
        return self.hear()

    def good(self, first: int, last: int) -> list[int]:
        """Store blocks; which of them are reported stored."""
        outcomes = self.ask("store", [first, last])
        kept = ("OK", "PRESENT")
        return [n for n, said in zip(range(first, last), outcomes, strict=True) if said in kept]

    def finds(self, numbers: list[int]) -> bool:
        """Whether it finds all blocks, within a while, and loads them right."""
        return until(lambda: set(self.ask("load", numbers)) == {"OK"})

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, as a power switch would."""
        self.process.kill()
        self.process.wait(30)


@contextmanager
def nodes(root: Path, *names: str, **settings: object) -> Iterator[list[Node]]:
    """Nodes whose clocks are days apart; a list that more can be put into."""
    started = [
        Node(root, name, clock=(at - 1) * 400 * DAY, **settings) for at, name in enumerate(names)
    ]
    try:
        for node in started:
            assert node.hear() in ("ready", "recovering")
        yield started
    finally:
        for node in started:
            node.process.kill()
            node.process.wait(30)


def until(condition: Callable[[], bool]) -> bool:
    """Whether a condition holds within a while."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
