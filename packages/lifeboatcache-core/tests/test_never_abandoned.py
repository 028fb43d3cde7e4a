"""Memory of a job belongs to the store until the job is reported, and not after."""

from __future__ import annotations

import gc
import importlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import payload_of, sample_keys

SIZE = 8192


class Gate:
    """Holds system calls until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


class GatedTarget(FilesystemTarget):
    """A directory on a disk that can be made to hang."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads, self.writes = Gate(), Gate()


@pytest.fixture
def target(root: Path, kernels_off: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedTarget]:
    # The calls of the twin can be held in here; those of the native threads are held by a
    # filesystem, in `tests/faults`.
    made = GatedTarget(root)

    def gated(module: str, name: str, gate: Gate) -> None:
        inner = getattr(importlib.import_module(module), name)

        def call(*arguments: Any) -> Any:
            gate.pass_through()
            return inner(*arguments)

        monkeypatch.setattr(f"{module}.{name}", call)

    gated("lifeboat_cache.store.io_python", "read_into", made.reads)
    gated("lifeboat_cache.store.io_python", "write_from", made.writes)
    gated("lifeboat_cache.targets.segment_writer", "seal_entries", made.writes)
    yield made
    made.reads.open.set()
    made.writes.open.set()


@pytest.fixture
def store(target: GatedTarget, namespace: Namespace) -> Iterator[BlockStore]:
    """A store with one I/O thread and blocks 0 … 3."""
    made = BlockStore(namespace, [target], io_workers=1)
    assert made.wait_recovered(60)
    keys = sample_keys(range(4))
    batch = BlockBatch(keys, BlockBuffers.from_buffers([payload_of(key, SIZE) for key in keys]))
    job = made.store(batch)
    assert job.wait(60)
    assert job.ok
    made.poll()
    yield made
    target.reads.open.set()
    target.writes.open.set()
    made.close()


Memory = list[npt.NDArray[np.uint8]]


def loading(store: BlockStore, numbers: Sequence[int]) -> tuple[Job, Memory]:
    memory: Memory = [np.zeros(SIZE, dtype=np.uint8) for _ in numbers]
    return store.load(BlockBatch(sample_keys(numbers), BlockBuffers.from_buffers(memory))), memory


def holds(memory: Memory, numbers: Sequence[int]) -> bool:
    expected = [payload_of(key, SIZE) for key in sample_keys(numbers)]
    return [block.tobytes() for block in memory] == expected


def untouched(memory: Memory) -> bool:
    return all(not block.any() for block in memory)


def test_a_load_is_not_reported_before_its_system_call_returned(
    store: BlockStore, target: GatedTarget
) -> None:
    target.reads.shut()
    job, memory = loading(store, [0, 1])
    assert target.reads.reached.wait(60)
    for cancel in (False, True):
        assert not store.drain(0.05, cancel=cancel)
        assert not job.done()
        assert not job.ok
        assert store.busy()
        assert store.poll() == []
    target.reads.open.set()
    assert job.wait(60)
    assert job.ok
    assert store.poll() == [job]
    assert store.drain(60)
    assert holds(memory, [0, 1])


def test_a_store_is_not_reported_before_its_system_call_returned(
    store: BlockStore, target: GatedTarget
) -> None:
    target.writes.shut()
    keys = sample_keys([8])
    job = store.store(BlockBatch(keys, BlockBuffers.from_buffers([payload_of(keys[0], SIZE)])))
    assert target.writes.reached.wait(60)
    for cancel in (False, True):
        assert not store.drain(0.05, cancel=cancel)
        assert not job.done()
    assert store.lookup(keys).tolist() == [0]
    target.writes.open.set()
    assert job.wait(60)
    assert job.ok
    assert store.lookup(keys).tolist() == [1]


def test_closing_says_when_memory_may_still_be_written(
    store: BlockStore, target: GatedTarget, caplog: pytest.LogCaptureFixture
) -> None:
    target.reads.shut()
    stuck, stuck_memory = loading(store, [0, 1])
    assert target.reads.reached.wait(60)
    queued, queued_memory = loading(store, [2, 3])
    with caplog.at_level(logging.WARNING, "lifeboat_cache"):
        assert not store.close(timeout=0.05)
    assert "has not answered" in caplog.text
    assert not stuck.done()
    assert not store.close(timeout=0.05)
    assert untouched(stuck_memory)

    target.reads.open.set()
    assert stuck.wait(60)
    # What had begun ends properly; what had not is not begun any more.
    assert stuck.ok
    assert holds(stuck_memory, [0, 1])
    assert queued.wait(60)
    assert queued.outcomes.tolist() == [Outcome.CANCELLED] * 2
    assert untouched(queued_memory)
    assert store.close()


def test_cancelling_leaves_the_memory_of_queued_loads_alone(
    store: BlockStore, target: GatedTarget
) -> None:
    target.reads.shut()
    stuck, stuck_memory = loading(store, [0, 1])
    assert target.reads.reached.wait(60)
    queued, queued_memory = loading(store, [2, 3])
    drained: list[bool] = []
    draining = threading.Thread(target=lambda: drained.append(store.drain(60, cancel=True)))
    draining.start()
    assert not queued.wait(0.05)
    target.reads.open.set()
    draining.join()
    assert drained == [True]
    assert stuck.ok
    assert holds(stuck_memory, [0, 1])
    assert queued.outcomes.tolist() == [Outcome.CANCELLED] * 2
    assert untouched(queued_memory)
    # The store goes on afterwards.
    job, memory = loading(store, [2, 3])
    assert job.wait(60)
    assert holds(memory, [2, 3])


def test_memory_is_held_until_the_job_is_done_and_not_longer(
    store: BlockStore, target: GatedTarget
) -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    memory = np.zeros(SIZE, dtype=np.uint8)
    buffers = BlockBuffers.from_rows(memory.ctypes.data, SIZE, [0], SIZE, owner)
    target.reads.shut()
    job = store.load(BlockBatch(sample_keys([0]), buffers))
    del owner, buffers
    assert target.reads.reached.wait(60)
    gc.collect()
    assert alive() is not None
    target.reads.open.set()
    assert job.wait(60)
    assert job.ok
    # The I/O thread lets go right after it reports.
    other, _ = loading(store, [1])
    assert other.wait(60)
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="let go"):
        _ = job.batch


def test_deleted_blocks_are_gone_from_storage_after_a_drain(
    store: BlockStore, target: GatedTarget, namespace: Namespace
) -> None:
    target.writes.shut()
    assert store.delete(sample_keys([1])).tolist() == [True]
    assert store.lookup(sample_keys(range(4))).tolist() == [1, 0, 1, 1]
    assert target.writes.reached.wait(60)
    assert not store.drain(0.05)
    target.writes.open.set()
    assert store.close()
    again = BlockStore(namespace, [FilesystemTarget(Path(target.location))], io_workers=1)
    assert again.wait_recovered(60)
    assert again.lookup(sample_keys(range(4))).tolist() == [1, 0, 1, 1]
    assert again.close()
