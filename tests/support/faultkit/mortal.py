"""Processes that store, load or tidy until they are killed.

Run as a program it imports once and then starts a copy of itself for every line on stdin,
``["writer", seed, first, root]`` or ``["janitor", capacity, grace, root]``. A writer says
what became of its blocks: ``+NUMBER SIZE`` (the store reported it as good) and
``-NUMBER SIZE`` (it asked for its deletion), many jobs being under way at any time.
:class:`Nursery` is the other end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Life", "Nursery"]

#: Bytes of blocks: aligned, odd, tiny, and large enough to be cut into parts.
SIZES = (1, 100, 4096, 5000, 8192, 8192, 20_000, 65_536, 65_536, 300_000)


class Life:
    """What one writer has said before it was killed."""

    def __init__(self) -> None:
        self.stored: dict[int, int] = {}
        self.deleted: set[int] = set()

    def hear(self, line: str) -> None:
        """Take in one line."""
        word, size = line.split()
        if word[0] == "-":
            self.deleted.add(int(word[1:]))
            self.stored.pop(int(word[1:]), None)
        elif int(word[1:]) not in self.deleted:
            self.stored[int(word[1:])] = int(size)


class Nursery:
    """Starts processes of one kind at a time and kills them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live_and_die(self, what: list[Any], pause: float, after: int = 1) -> Life:
        """Start a process and kill it ``pause`` seconds after its line number ``after``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        life, said, pid = Life(), 0, 0
        timer: threading.Timer | None = None
        for line in self.process.stdout:
            if line.startswith("pid"):
                pid = int(line.split()[1])
            elif line.startswith("dead"):
                killed = int(line.split()[1])
                assert killed == signal.SIGKILL, f"it died by itself: {killed}"
                return life
            elif line[0] in "+-" and line.endswith("\n"):
                life.hear(line)
                said += 1
            else:
                said += 1
            if timer is None and pid and said >= after:
                timer = threading.Timer(pause, os.kill, (pid, signal.SIGKILL))
                timer.start()
        raise AssertionError("the nursery died")

    def close(self) -> None:
        """End it."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.kill()
        self.process.wait()


def _write(seed: int, number: int, root: str) -> NoReturn:
    from lifeboat_cache.interface import BlockBatch, BlockBuffers, BlockStore, Job, Namespace
    from lifeboat_cache.targets.filesystem import FilesystemTarget
    from lifeboat_cache.testing import cut_at, payload_of, sample_keys

    choice = random.Random(seed)
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    store = BlockStore(namespace, [FilesystemTarget(Path(root))], io_workers=3)
    store.wait_recovered(60)
    under_way: dict[Job, tuple[range, int]] = {}
    while True:
        while len(under_way) < 6:
            size = choice.choice(SIZES)
            numbers = range(number, number + choice.randint(1, 24))
            number = numbers.stop
            cuts = sorted(
                {choice.randrange(1, size) for _ in range(choice.randint(0, 3))} if size > 8 else ()
            )
            keys = sample_keys(numbers)
            memory = [cut_at(payload_of(key, size), cuts) for key in keys]
            job = store.store(BlockBatch(keys, BlockBuffers.from_buffers(memory)))
            under_way[job] = (numbers, size)
        next(iter(under_way)).wait(60)
        for job in store.poll():
            numbers, size = under_way.pop(job)
            good = [
                n
                for n, value in zip(numbers, job.outcomes.tolist(), strict=True)
                if value in (1, 2)
            ]
            if good:
                os.write(1, "".join(f"+{n} {size}\n" for n in good).encode())
            if good and choice.random() < 0.1:
                os.write(1, f"-{good[0]} {size}\n".encode())
                store.delete(sample_keys([good[0]]))
            if choice.random() < 0.2:
                store.touch(sample_keys(numbers))


def _tidy(capacity: int, grace: float, root: str) -> NoReturn:
    from lifeboat_cache.janitor import Janitor, JanitorPolicy
    from lifeboat_cache.targets.filesystem import FilesystemTarget

    def say(step: str) -> None:
        os.write(1, f"step {step}\n".encode())

    policy = JanitorPolicy(
        grace_s=grace, young_s=0.0, punch_bytes=4096, small_bytes=4 << 20, merge_count=3,
        margin_bytes=0, summary_s=0.0,
    )  # fmt: skip
    janitor = Janitor(
        FilesystemTarget(Path(root), capacity=capacity),
        policy=policy,
        on_step=say,
    )
    while True:
        janitor.run_once()


def _main() -> None:
    from lifeboat_cache import kernels
    from lifeboat_cache.janitor import Janitor  # noqa: F401 - before any fork
    from lifeboat_cache.testing import StoreDriver  # noqa: F401

    kernels.load()
    for line in sys.stdin:
        kind, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            {"writer": _write, "janitor": _tidy}[kind](*arguments)
        os.write(1, f"pid {child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"dead {os.waitstatus_to_exitcode(status) * -1}\n".encode())


if __name__ == "__main__":
    _main()
