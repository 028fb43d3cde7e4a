"""Stores that are used wrongly, or run short of what the system gives."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store import native_pool
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.store.native_pool import NativePool
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, aligned_memory, sample_keys

OK = Outcome.OK

Open = Callable[..., StoreDriver]


def batch_of(count: int, size: int = 8192) -> BlockBatch:
    memory = [aligned_memory(size) for _ in range(count)]
    return BlockBatch(sample_keys(range(count)), BlockBuffers.from_buffers(memory))


def descriptors() -> int:
    """Open descriptors, once the pools of earlier tests have let go of theirs."""
    for pool in list(native_pool._alive):
        pool._released.wait(10)
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_callbacks_that_raise_anything_hold_up_nobody(
    both_kernels: bool, open_driver: Open, error: type[BaseException]
) -> None:
    driver = open_driver()
    assert driver.block_store._executor.native is both_kernels

    def refuse(job: Job) -> None:
        raise error("from a callback")

    assert driver.store(range(4)) == [OK] * 4
    # More of them than there are threads.
    jobs = [driver.block_store.load(batch_of(4), on_done=refuse) for _ in range(12)]
    jobs += [driver.block_store.store(batch_of(9), on_done=refuse) for _ in range(12)]
    assert all(job.wait(60) for job in jobs)
    assert driver.block_store.drain(60)
    assert driver.load(range(4)) == [OK] * 4


def test_interrupting_the_callback_of_a_refusal_is_heard(open_driver: Open) -> None:
    driver = open_driver()

    def refuse(job: Job) -> None:
        raise KeyboardInterrupt

    nowhere = BlockBuffers.from_buffers([bytes(8192)])
    with pytest.raises(KeyboardInterrupt):
        driver.block_store.load(BlockBatch(sample_keys([1]), nowhere), on_done=refuse)
    assert driver.block_store.drain(60)


def test_a_job_for_which_there_is_no_memory_ends(
    open_driver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = open_driver()
    assert driver.block_store._executor.native
    assert driver.store(range(4)) == [OK] * 4

    def none_left(task: IoTask) -> int:
        raise MemoryError

    monkeypatch.setattr(IoTask, "address", none_left)
    assert driver.load(range(4)) == [OK] * 4
    assert driver.store(range(4, 8)) == [OK] * 4
    monkeypatch.undo()
    assert driver.load(range(8)) == [OK] * 8


def test_a_job_ends_that_cannot_be_counted(
    both_kernels: bool, open_driver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is given a copy of a block then, which takes memory."""
    driver = open_driver()

    def none_left(*_: object) -> None:
        raise MemoryError

    for name in ("stored", "loaded"):
        monkeypatch.setattr(driver.block_store._policy.counts, name, none_left)
    assert driver.store(range(40)) == [OK] * 40
    assert driver.load(range(40)) == [OK] * 40
    assert driver.block_store.drain(60)
    assert driver.block_store.close()


@pytest.mark.parametrize("fails", ["pipe", "thread 1", "thread 2", "native"])
def test_native_threads_that_cannot_be_started_leave_nothing(
    kernel_home: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    assert kernel_home.is_dir()
    before = descriptors()
    started: list[threading.Thread] = []
    start, pipe = threading.Thread.start, os.pipe
    pipes = 0

    def start_some(thread: threading.Thread) -> None:
        started.append(thread)
        if fails == f"thread {len(started)}":
            raise RuntimeError("can't start new thread")
        start(thread)

    def open_some() -> tuple[int, int]:
        nonlocal pipes
        pipes += 1
        if fails == "pipe" and pipes == 3:
            raise OSError(24, "Too many open files")
        return pipe()

    def start_none(pool: NativePool, address: int) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(threading.Thread, "start", start_some)
    monkeypatch.setattr(os, "pipe", open_some)
    if fails == "native":
        monkeypatch.setattr(NativePool, "_start", start_none)
    with pytest.raises((OSError, RuntimeError)):
        NativePool(2, lambda tasks: None)
    for thread in started:
        if thread.ident is not None:
            thread.join(60)
            assert not thread.is_alive()
    assert descriptors() == before


def test_a_store_without_native_threads_works_and_does_not_try_again(
    open_driver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail(pool: NativePool, threads: int, finished: object) -> None:
        tries.append(pool)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(NativePool, "__init__", fail)
    driver = open_driver()
    assert driver.store(range(4)) == [OK] * 4
    driver.block_store._executor.upgrade()
    assert driver.load(range(4)) == [OK] * 4
    assert len(tries) == 1


def test_a_store_makes_do_with_the_threads_there_are(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    before = threading.active_count()

    def start_few(thread: threading.Thread) -> None:
        few = ("lifeboat-io-0", "lifeboat-io-1", *allowed)
        if thread.name.startswith("lifeboat-") and thread.name not in few:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    allowed: tuple[str, ...] = ()
    with pytest.raises(RuntimeError):
        BlockStore(namespace, [FilesystemTarget(root)])
    for thread in threading.enumerate():
        if thread.name.startswith("lifeboat-io"):
            thread.join(60)
    assert threading.active_count() == before
    allowed = ("lifeboat-store",)
    store = BlockStore(namespace, [FilesystemTarget(root)])
    assert store.wait_recovered(60)
    driver = StoreDriver(store)
    assert driver.store(range(4)) == [OK] * 4
    assert driver.load(range(4)) == [OK] * 4
    assert store.state is State.READY
    assert store.close()


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_blocks_of_4_gib_are_refused_and_harm_nobody(
    both_kernels: bool, open_driver: Open, root: Path, direct: str
) -> None:
    driver = open_driver(target=FilesystemTarget(root, direct_io=direct))  # type: ignore[arg-type]
    assert driver.store(range(4)) == [OK] * 4
    piece = aligned_memory(4 << 20)
    memory = [aligned_memory(8192), [piece] * 1025, aligned_memory(8192), [piece] * 1024]
    batch = BlockBatch(sample_keys(range(4, 8)), BlockBuffers.from_buffers(memory))
    job = driver.block_store.store(batch, on_done=lambda _: None)
    assert job.wait(60)
    assert job.outcomes.tolist() == [OK, Outcome.FAILED, OK, Outcome.FAILED]
    assert driver.lookup([4, 5, 6, 7]) == [Lookup.HIT, Lookup.MISS, Lookup.HIT, Lookup.MISS]
    assert FilesystemTarget(root).usage().used < 1 << 20
    # What is there under the key of a block that is refused stays.
    batch = BlockBatch(sample_keys([1]), BlockBuffers.from_buffers([[piece] * 1025]))
    job = driver.block_store.store(batch, on_done=lambda _: None)
    assert job.wait(60)
    assert driver.load(range(4)) == [OK] * 4


def test_a_forked_child_finds_an_empty_store_whatever_others_held(open_driver: Open) -> None:
    driver = open_driver(size=4096)
    store = driver.block_store
    assert driver.store(range(200)) == [OK] * 200
    keys = driver.keys(range(200))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            store.lookup(keys, pin=True)
            store.unpin(keys)
            store.touch(keys)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(12):
            child = os.fork()
            if not child:
                signal.alarm(60)  # a child that hangs is a failure
                try:
                    good = (
                        store.state is State.CLOSED
                        and not store.lookup(keys, pin=True).any()
                        and not store.delete(keys).any()
                        and (store.sizes(keys) == -1).all()
                        and not len(store)
                        and not store.keys()
                        and not store.undone_deletions()
                        and not store.poll()
                        and store.queue()["jobs"] == 0
                        and store.drain(1)
                        and store.close()
                    )
                    store.touch(keys)
                    store.unpin(keys)
                    store.counters()
                    os._exit(0 if good else 1)
                except BaseException:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert driver.load(range(200)) == [OK] * 200


def test_numbers_that_are_none_in_documents(root: Path, namespace: Namespace) -> None:
    store = BlockStore(namespace, [FilesystemTarget(root, capacity=1 << 30)])
    assert store.wait_recovered(60)
    driver = StoreDriver(store)
    assert driver.store(range(4)) == [OK] * 4
    (root / "usage.json").write_text(
        f'{{"format": 1, "time": {time.time()}, "used": 1e999, "settled": 1e999, "known": {{}}}}'
    )
    (root / namespace.directory / f"{bytes(15).hex()}01.lock").write_text(
        '{"pid": Infinity, "host": "h", "core": "x", "started": 1}'
    )
    target = FilesystemTarget(root, capacity=1 << 30)
    assert sum(writer.blocks for info in target.namespaces() for writer in info.writers) == 4
    other = BlockStore(namespace, [target])
    assert other.wait_recovered(60)
    assert StoreDriver(other).store(range(4, 8)) == [OK] * 4
    assert other.close()
    assert store.close()
    (root / "lifeboat-cache.json").write_text('{"format": Infinity}')
    refused = BlockStore(namespace, [FilesystemTarget(root)])
    assert refused.wait_recovered(60)
    assert refused.state is State.DISABLED
    assert "is damaged" in refused.reason
    assert refused.close()


def test_pieces_and_blocks_without_bytes(both_kernels: bool, open_driver: Open) -> None:
    del both_kernels
    rng = np.random.default_rng(3)
    parts = rng.integers(0, 256, 100_000, dtype=np.uint8)
    empty = parts[:0]
    blocks = [
        [],
        [empty],
        [empty] * 3000 + [parts[:7]] + [empty] * 3000,
        [parts[i : i + 1] for i in range(20_000)],
        [],
        [parts[:4096], empty, parts[:4096]],
        [empty, empty],
    ]
    store = open_driver().block_store
    keys = sample_keys(range(len(blocks)))
    memory = [[np.zeros_like(piece) for piece in pieces] for pieces in blocks]
    for kind, source in (("store", blocks), ("load", memory)):
        batch = BlockBatch(keys, BlockBuffers.from_buffers(source))
        job = getattr(store, kind)(batch, on_done=lambda _: None)
        assert job.wait(60)
        assert job.outcomes.tolist() == [OK] * len(blocks)
    for pieces, read in zip(blocks, memory, strict=True):
        assert b"".join(p.tobytes() for p in pieces) == b"".join(p.tobytes() for p in read)
