"""A janitor killed at any step: the next one completes, and nothing is wrong meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from janitors import THEN, Block, Clock, chain, janitor, leave, names, run_until_quiet, verified

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

SIZE = 64 << 10
BLOCKS = 27
SETTINGS: dict[str, Any] = {"low": 0.6, "merge_count": 4}
OK, MISSING = Outcome.OK, Outcome.MISSING

#: Steps that a janitor must have gone through for this to mean anything.
STEPS = {
    "bury",
    "reclaim",
    "remove",
    "removed",
    "marked",
    "evict",
    "copy",
    "copied",
    "summary",
    "summarized",
    "unlink",
    "unlinked",
    "publish",
}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory on a fast filesystem, if there is one: a thousand flushes are slow."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def prepare(root: Path, namespace: Namespace) -> None:
    """Small segments, deleted blocks, blocks that were used, a prefix to evict."""
    for first in range(0, BLOCKS, 3):
        leave(root, chain(first, 3, THEN + first), namespace, SIZE)
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    driver = StoreDriver(store, size=SIZE)
    assert all(driver.delete(range(9, 15)))
    store.touch(driver.keys(range(3)))
    assert store.close()


def die_at(count: int, root: Path, clock: Clock, capacity: int | None) -> tuple[bool, str]:
    """Run a janitor in a process that ends at its ``count``-th step; whether it did, and where."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        left = count

        def step(name: str) -> None:
            nonlocal left
            os.write(writing, f"{name}\n".encode())
            left -= 1
            if not left:
                os._exit(9)

        try:
            one = janitor(root, clock, capacity=capacity, **SETTINGS)
            one.estate.on_step = step
            for _ in range(4):
                one.run_once()
                clock.tick(100)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as stream:
        steps = stream.read().split()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    return code == 9, " ".join(steps)


@pytest.mark.parametrize("evict", [False, True], ids=["kept", "evicted"])
def test_killed_at_every_step(memory: Path, namespace: Namespace, evict: bool) -> None:
    origin = memory / "origin"
    prepare(origin, namespace)
    capacity = 20 * SIZE if evict else None
    seen: set[str] = set()
    count = 0
    killed = True
    while killed:
        count += 1
        root = memory / f"kv{count}"
        shutil.copytree(origin, root)
        clock = Clock(4e9)
        killed, steps = die_at(count, root, clock, capacity)
        seen |= set(steps.split())
        before = verified(root)
        clock.tick(1000)
        one = janitor(root, clock, capacity=capacity, **SETTINGS)
        reports = run_until_quiet(one, clock, 5)
        last = reports[-1]
        assert last.copied_blocks == last.evicted_blocks == last.writers_removed == 0
        # Of those that the killed one had copied, both may be there.
        assert last.used_after <= (capacity or 2 * BLOCKS * SIZE)
        live = verified(root)
        assert live <= before or not killed
        store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
        assert store.wait_recovered(60)
        outcomes = StoreDriver(store, size=SIZE).load(range(BLOCKS))
        assert store.counters().bad_entries == 0
        assert store.close()
        assert outcomes[9:15] == [MISSING] * 6
        assert outcomes[:3] == [OK] * 3, (count, steps, reports)
        if not evict:
            assert outcomes.count(OK) == BLOCKS - 6, steps
        # Merging them takes room, and then a run more.
        assert len(names(root, "segment")) < 8, steps
        assert len(names(root, "journal")) < 8, steps
        shutil.rmtree(root)
    assert seen >= (STEPS - {"copy", "copied", "summarized"} if evict else STEPS)
    assert count > 40


def test_killed_between_cutting_and_unlinking(root: Path, namespace: Namespace) -> None:
    leave(root, [Block(1)], namespace, SIZE)
    (segment,) = root.glob("*/*.segment")
    os.truncate(segment, 0)
    clock = Clock()
    run_until_quiet(janitor(root, clock), clock)
    assert not segment.exists()
    assert not names(root, "journal")


def test_killed_between_journal_and_the_rest(root: Path, namespace: Namespace) -> None:
    leave(root, [Block(1)], namespace, SIZE)
    for path in root.glob("*/*.journal"):
        path.unlink()
    clock = Clock()
    run_until_quiet(janitor(root, clock), clock)
    assert not names(root, "segment")
    assert not names(root, "lock")


def test_a_writer_killed_before_its_first_entry_leaves_nothing(
    root: Path, namespace: Namespace
) -> None:
    leave(root, [Block(1)], namespace, SIZE)
    (journal,) = root.glob("*/*.journal")
    os.truncate(journal, 4096 + 100)  # the entry is torn
    clock = Clock()
    run_until_quiet(janitor(root, clock), clock)
    assert not names(root, "segment")
    assert not names(root, "journal")
