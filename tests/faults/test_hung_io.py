"""Storage that does not answer: nothing is reported too early, and nobody waits who need not."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from faultkit.disks import FaultyDisk

from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Job,
    Lookup,
    Namespace,
    Outcome,
    State,
)
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, aligned_memory, payload_of, sample_keys

Open = Callable[..., StoreDriver]
Memory = list[npt.NDArray[np.uint8]]

OK, CANCELLED = Outcome.OK, Outcome.CANCELLED

pytestmark = pytest.mark.usefixtures("both_kernels")

SIZE = 64 << 10

#: Reads of payloads, and those of the headers that come before.
READ = {"op": "read", "match": "segment$", "do": "hang", "bytes": [4096, 1 << 40]}
HEADER = {"op": "read", "match": "segment$", "do": "hang", "bytes": [0, 4096]}
WRITE = {"op": "write", "match": "segment$", "do": "hang"}
JOURNAL = {"op": "write", "match": "journal$", "do": "hang"}


def loading(driver: StoreDriver, numbers: Sequence[int]) -> tuple[Job, Memory]:
    """A load under way into memory full of 7s."""
    memory = [aligned_memory(driver.size) for _ in numbers]
    for block in memory:
        block[:] = 7
    batch = BlockBatch(driver.keys(numbers), BlockBuffers.from_buffers(memory))
    return driver.block_store.load(batch), memory


def storing(driver: StoreDriver, numbers: Sequence[int]) -> tuple[Job, Memory]:
    """A store under way."""
    memory = [aligned_memory(driver.size) for _ in numbers]
    for block, key in zip(memory, driver.keys(numbers), strict=True):
        block[:] = np.frombuffer(payload_of(key, driver.size), dtype=np.uint8)
    batch = BlockBatch(driver.keys(numbers), BlockBuffers.from_buffers(memory))
    return driver.block_store.store(batch), memory


def holds(memory: Memory, numbers: Sequence[int]) -> bool:
    return all(
        block.tobytes() == payload_of(key, block.nbytes)
        for block, key in zip(memory, sample_keys(numbers), strict=True)
    )


def reuse(memory: Memory) -> None:
    """Somebody else's blocks move into the slots."""
    for block in memory:
        block[:] = 9


def untouched(memory: Memory, value: int = 9) -> bool:
    return all(bool((block == value).all()) for block in memory)


@pytest.fixture
def driver(open_driver: Open, faulty: FaultyDisk) -> StoreDriver:
    """A store with blocks 0 … 15."""
    made = open_driver(faulty.root, size=SIZE, io_workers=4)
    assert made.store(range(16)) == [OK] * 16
    return made


def test_slot_of_a_read_that_hangs_past_its_deadline(
    driver: StoreDriver, faulty: FaultyDisk
) -> None:
    faulty.rules(READ | {"times": 1})
    job, memory = loading(driver, [0, 1, 2])
    faulty.wait_hanging()
    faulty.rules()
    # The deadline passes. As long as the memory may still be written, the job is not done.
    for cancel in (False, True):
        assert not driver.block_store.drain(0.05, cancel=cancel)
        assert not job.done()
        assert driver.block_store.busy()
    faulty.release()
    assert job.wait(60)
    assert job.ok
    assert holds(memory, [0, 1, 2])
    # Once it is reported, the slots belong to somebody else, and stay as they are.
    reuse(memory)
    assert driver.load(range(16)) == [OK] * 16
    assert driver.block_store.close()
    assert untouched(memory)


@pytest.mark.parametrize("number", [0, errno.EIO])
def test_closing_while_a_read_hangs_is_honest(
    driver: StoreDriver, faulty: FaultyDisk, number: int
) -> None:
    faulty.rules(READ)
    job, memory = loading(driver, range(16))
    faulty.wait_hanging()
    for _ in range(2):
        assert not driver.block_store.close(timeout=0.05), "memory is still in use"
        assert not job.done()
    faulty.rules()
    faulty.release(number)
    assert job.wait(60)
    for value, block, key in zip(
        job.outcomes.tolist(), memory, driver.keys(range(16)), strict=True
    ):
        assert value in (OK, Outcome.FAILED, CANCELLED)
        assert value != OK or block.tobytes() == payload_of(key, SIZE)
    reuse(memory)
    assert driver.block_store.close()
    time.sleep(0.1)
    assert untouched(memory)


def test_files_are_let_go_once_the_storage_has_answered(
    driver: StoreDriver, faulty: FaultyDisk
) -> None:
    faulty.rules(READ | {"times": 1})
    job, _ = loading(driver, [0])
    faulty.wait_hanging()
    assert not driver.block_store.close(timeout=0.05)
    faulty.rules()
    faulty.release()
    assert job.wait(60)
    assert driver.block_store.close()
    held = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    assert not [name for name in held if name.startswith(str(faulty.mount))]


def test_memory_of_a_cancelled_load_is_not_touched_afterwards(
    open_driver: Open, faulty: FaultyDisk
) -> None:
    driver = open_driver(faulty.root, size=SIZE, io_workers=1)
    assert driver.store(range(16)) == [OK] * 16
    faulty.rules(READ | {"times": 1})
    stuck, stuck_memory = loading(driver, [0])
    faulty.wait_hanging()
    queued = [loading(driver, [number]) for number in range(1, 16)]
    done: list[bool] = []
    cancelling = threading.Thread(
        target=lambda: done.append(driver.block_store.drain(60, cancel=True))
    )
    cancelling.start()
    time.sleep(0.05)
    for job, memory in queued:
        if job.done() and not job.ok:
            reuse(memory)
    faulty.release()
    cancelling.join()
    assert done == [True]
    assert stuck.ok
    assert holds(stuck_memory, [0])
    for number, (job, memory) in enumerate(queued, start=1):
        assert job.done()
        assert job.ok or job.outcomes.tolist() == [CANCELLED]
        assert holds(memory, [number]) if job.ok else (untouched(memory) or untouched(memory, 7))
    assert CANCELLED in {job.outcomes.tolist()[0] for job, _ in queued}
    # Nothing is left behind that would write later, and the store goes on.
    for _, memory in queued:
        reuse(memory)
    assert driver.load(range(16)) == [OK] * 16
    assert all(untouched(memory) for _, memory in queued)


@pytest.mark.parametrize("rule", [WRITE, JOURNAL], ids=["payload", "journal"])
def test_store_is_not_reported_while_a_write_hangs(
    driver: StoreDriver, faulty: FaultyDisk, rule: dict[str, object]
) -> None:
    faulty.rules(rule | {"times": 1})
    job, memory = storing(driver, [100, 101])
    faulty.wait_hanging()
    for cancel in (False, True):
        assert not driver.block_store.drain(0.05, cancel=cancel)
        assert not job.done()
    assert driver.lookup([100, 101]) == [Lookup.MISS] * 2
    # Loads do not stand in line behind it.
    assert driver.load(range(16)) == [OK] * 16
    faulty.release()
    assert job.wait(60)
    assert job.ok
    reuse(memory)
    assert driver.load([100, 101]) == [OK] * 2


@pytest.mark.parametrize("rule", [WRITE, JOURNAL], ids=["payload", "journal"])
def test_write_that_fails_after_it_hung(
    driver: StoreDriver, faulty: FaultyDisk, rule: dict[str, object]
) -> None:
    faulty.rules(rule | {"times": 1})
    job, _ = storing(driver, [100, 101])
    faulty.wait_hanging()
    faulty.release(errno.EIO)
    assert job.wait(60)
    assert job.outcomes.tolist() == [Outcome.FAILED] * 2
    assert driver.store([100, 101]) == [OK] * 2
    assert driver.load([*range(16), 100, 101]) == [OK] * 18


@pytest.mark.parametrize("rule", [READ, HEADER], ids=["payload", "header"])
def test_one_read_that_hangs_does_not_stop_the_others(
    driver: StoreDriver, faulty: FaultyDisk, rule: dict[str, object]
) -> None:
    faulty.rules(rule | {"times": 1})
    job, memory = loading(driver, [0])
    faulty.wait_hanging()
    assert driver.load(range(16)) == [OK] * 16
    assert driver.store(range(200, 204)) == [OK] * 4
    assert not job.done()
    faulty.release()
    assert job.wait(60)
    assert holds(memory, [0])


@pytest.mark.parametrize(
    ("op", "match"),
    [("lookup", "kv$"), ("opendir", ""), ("read", "json$"), ("open", "journal$"),
     ("read", "journal$"), ("getattr", "segment$")],
)  # fmt: skip
def test_starting_on_storage_that_hangs(
    driver: StoreDriver, faulty: FaultyDisk, namespace: Namespace, op: str, match: str
) -> None:
    assert driver.block_store.close()
    faulty.rules({"op": op, "match": match, "do": "hang"})
    begin = time.monotonic()
    store = BlockStore(namespace, [FilesystemTarget(faulty.root)], io_workers=2)
    try:
        starting = StoreDriver(store, size=SIZE)
        assert starting.lookup(range(16)) == [Lookup.RETRY] * 16
        job, _ = storing(starting, [300])
        assert not store.wait_recovered(0.2)
        assert time.monotonic() - begin < 30, "the engine waited for storage"
    finally:
        faulty.rules()
        faulty.release()
    assert store.wait_recovered(60)
    assert store.state is State.READY
    assert job.wait(60)
    assert starting.load([*range(16), 300]) == [OK] * 17
    assert store.close()


def test_giving_up_a_store_whose_storage_never_answered(
    driver: StoreDriver, faulty: FaultyDisk, namespace: Namespace
) -> None:
    assert driver.block_store.close()
    faulty.rules({"op": "lookup", "match": "kv$", "do": "hang"})
    store = BlockStore(namespace, [FilesystemTarget(faulty.root)], io_workers=2)
    job, memory = storing(StoreDriver(store, size=SIZE), [300])
    faulty.wait_hanging()
    assert store.close(timeout=0.1), "no system call touches anybody's memory"
    assert job.wait(60)
    assert job.outcomes.tolist() == [CANCELLED]
    reuse(memory)
    faulty.rules()
    faulty.release()
    again = BlockStore(namespace, [FilesystemTarget(faulty.root)], io_workers=2)
    assert again.wait_recovered(60)
    assert StoreDriver(again, size=SIZE).load(range(16)) == [OK] * 16
    assert again.lookup(sample_keys([300])).tolist() == [Lookup.MISS]
    assert again.close()


def test_journals_that_hang_while_others_are_followed(
    driver: StoreDriver, faulty: FaultyDisk, open_driver: Open
) -> None:
    # The other writer stores; looking at its journal hangs, and nothing else does.
    other = open_driver(faulty.root, size=SIZE)
    assert other.store([500]) == [OK]
    faulty.rules({"op": "read", "match": "journal$", "do": "hang"})
    faulty.wait_hanging()
    assert driver.load(range(16)) == [OK] * 16
    assert driver.store([501]) == [OK]
    assert driver.load([501]) == [OK]
    faulty.rules()
    faulty.release()
    give_up = time.monotonic() + 60
    while driver.lookup([500]) != [Lookup.HIT]:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_deleting_while_the_journal_hangs(driver: StoreDriver, faulty: FaultyDisk) -> None:
    faulty.rules(JOURNAL)
    assert driver.delete([3]) == [True]
    assert driver.lookup([3]) == [Lookup.MISS]
    faulty.wait_hanging()
    assert not driver.block_store.drain(0.05)
    assert driver.load([2]) == [OK]
    faulty.rules()
    faulty.release()
    assert driver.block_store.drain(60)
