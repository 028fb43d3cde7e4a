"""A block that was reported as stored survives ``kill -9`` at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, sample_keys

#: Blocks of one life: more than it can store before it is killed.
_LIFE = 1_000_000


class Nursery:
    """Starts storing processes and kills them."""

    def __init__(self) -> None:
        program = Path(__file__).parent / "children" / "killed_store.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def live_and_die(
        self, root: Path, seed: int, first: int, pause: float, after: int = 1
    ) -> tuple[dict[int, int], set[int]]:
        """Kill a process ``pause`` seconds after it has reported ``after`` blocks.

        Returns sizes by number of the blocks that it reported as stored, and the
        numbers that it deleted.
        """
        print(seed, first, root, file=self.stdin, flush=True)
        stored: dict[int, int] = {}
        deleted: set[int] = set()
        timer: threading.Timer | None = None
        pid = 0
        for line in self.stdout:
            word = line.split()
            if word[0] == "pid":
                pid = int(word[1])
            elif word[0] == "dead":
                break
            elif word[0].startswith("-"):
                deleted.add(int(word[0][1:]))
            else:
                stored[int(word[0][1:])] = int(word[1])
            if timer is None and pid and len(stored) >= after:
                timer = threading.Timer(pause, os.kill, (pid, signal.SIGKILL))
                timer.start()
        else:
            raise AssertionError("the nursery died")
        for number in deleted:
            stored.pop(number, None)
        return stored, deleted

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()
        self.process.kill()
        self.process.wait()


def check(root: Path, namespace: Namespace, expected: dict[int, int]) -> None:
    """Open the root as a new process would and load every expected block."""
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    assert store.wait_recovered(60)
    assert store.state is State.READY
    for size in set(expected.values()):
        numbers = [number for number, its in expected.items() if its == size]
        outcomes = StoreDriver(store, size=size).load(numbers)
        lost = [n for n, outcome in zip(numbers, outcomes, strict=True) if outcome != Outcome.OK]
        assert not lost, f"reported as stored and not there after a kill: {lost}"
    # What it had no time to report is there as a whole or not at all.
    last = max(expected, default=0)
    for number in range(last + 1, last + 40):
        (size,) = store.sizes(sample_keys([number])).tolist()
        if size >= 0:
            assert StoreDriver(store, size=size).load([number]) == [Outcome.OK]
    assert store.counters().load_outcomes.get("corrupt", 0) == 0
    assert store.close()


@pytest.mark.parametrize(
    "kills", [pytest.param(30, id="quick"), pytest.param(500, id="full", marks=pytest.mark.full)]
)
def test_reported_blocks_survive_kill_9(root: Path, namespace: Namespace, kills: int) -> None:
    choice = random.Random(kills)
    everything: dict[int, int] = {}
    with closing(Nursery()) as nursery:
        for life in range(kills):
            pause = choice.uniform(0.0, 0.05)
            stored, deleted = nursery.live_and_die(root, life, life * _LIFE, pause)
            assert stored or deleted
            check(root, namespace, stored)
            everything |= stored
            if len(everything) > 20_000:  # keep the disk small
                check(root, namespace, everything)
                FilesystemTarget(root).purge(namespace.hex)
                everything = {}
    check(root, namespace, everything)


def test_killed_while_it_starts(tmp_path: Path, namespace: Namespace) -> None:
    # The probe, the marker, the namespace's document, the lock, the headers: whatever
    # was half done is not in the way of the next start.
    with closing(Nursery()) as nursery:
        for attempt in range(30):
            root = tmp_path / f"kv{attempt % 6}"
            stored, _ = nursery.live_and_die(root, attempt, attempt * _LIFE, attempt * 3e-4, 0)
            check(root, namespace, stored)
    for attempt in range(6):
        store = BlockStore(namespace, [FilesystemTarget(tmp_path / f"kv{attempt}")], io_workers=1)
        driver = StoreDriver(store)
        assert driver.store(range(3)) == [Outcome.OK] * 3
        assert driver.load(range(3)) == [Outcome.OK] * 3
        assert store.close()
