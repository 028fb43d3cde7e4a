"""A store that cannot work says why, answers misses and ends every job."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.errors import IdentityError, StoreClosedError, TargetError
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, sample_keys


class Identification:
    """A namespace that becomes known, or not, when the test says so."""

    def __init__(self, result: Namespace | Exception) -> None:
        self.result = result
        self.go_on = threading.Event()

    def __call__(self) -> Namespace:
        assert self.go_on.wait(60)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def batch(number: int) -> BlockBatch:
    return BlockBatch(sample_keys([number]), BlockBuffers.from_buffers([bytearray(4096)]))


def state_of(store: BlockStore) -> State:
    return store.state


def ended(job: Job) -> list[int]:
    assert job.wait(60)
    outcomes: list[int] = job.outcomes.tolist()
    return outcomes


def test_model_that_cannot_be_identified(root: Path) -> None:
    find = Identification(IdentityError("layer 3 is on the meta device: load the weights first"))
    store = BlockStore(find, [FilesystemTarget(root)], io_workers=1)
    assert state_of(store) is State.OPENING
    assert store.lookup(sample_keys(range(3))).tolist() == [Lookup.RETRY] * 3
    assert ended(store.load(batch(1))) == [Outcome.MISSING]
    waiting = [store.store(batch(number)) for number in range(3)]
    assert not any(job.wait(0.02) for job in waiting)
    find.go_on.set()
    for job in waiting:
        assert ended(job) == [Outcome.DISABLED]
    assert store.wait_recovered(60)
    assert state_of(store) is State.DISABLED
    assert store.reason == "layer 3 is on the meta device: load the weights first"
    assert store.namespace is None
    assert store.lookup(sample_keys(range(3))).tolist() == [Lookup.MISS] * 3
    assert ended(store.store(batch(9))) == [Outcome.DISABLED]
    assert ended(store.load(batch(9))) == [Outcome.MISSING]
    assert store.counters().store_outcomes == {"disabled": 4}
    assert len(store.poll()) == 6
    assert store.drain(60)
    assert not root.exists()
    assert store.close()


def test_fault_of_the_function_that_identifies(root: Path) -> None:
    find = Identification(RuntimeError("boom"))
    store = BlockStore(find, [FilesystemTarget(root)], io_workers=1)
    job = store.store(batch(1))
    find.go_on.set()
    assert ended(job) == [Outcome.DISABLED]
    assert store.wait_recovered(60)
    assert state_of(store) is State.DISABLED
    assert "boom" in store.reason
    assert store.close()


def test_stores_that_came_before_the_namespace_are_kept(root: Path, namespace: Namespace) -> None:
    find = Identification(namespace)
    store = BlockStore(find, [FilesystemTarget(root)], io_workers=1)
    reported: list[Job] = []
    jobs = [store.store(batch(number), reported.append) for number in range(3)]
    find.go_on.set()
    for job in jobs:
        assert ended(job) == [Outcome.OK]
    assert store.drain(60)
    assert reported == jobs
    assert store.wait_recovered(60)
    assert store.lookup(sample_keys(range(4))).tolist() == [Lookup.HIT] * 3 + [Lookup.MISS]
    assert store.close()


@pytest.mark.parametrize("cancel", [False, True])
def test_draining_before_the_namespace_is_known(
    root: Path, namespace: Namespace, cancel: bool
) -> None:
    find = Identification(namespace)
    store = BlockStore(find, [FilesystemTarget(root)], io_workers=1)
    job = store.store(batch(1))
    assert store.drain(0.02, cancel=cancel) is cancel
    assert job.done() is cancel
    find.go_on.set()
    assert ended(job) == [Outcome.CANCELLED if cancel else Outcome.OK]
    assert ended(store.store(batch(2))) == [Outcome.OK]
    assert store.close()


def test_closing_before_the_namespace_is_known(root: Path, namespace: Namespace) -> None:
    find = Identification(namespace)
    store = BlockStore(find, [FilesystemTarget(root)], io_workers=1)
    job = store.store(batch(1))
    assert store.close(timeout=0.02)
    assert ended(job) == [Outcome.CANCELLED]
    assert state_of(store) is State.CLOSED
    find.go_on.set()
    assert store.wait_recovered(60)
    assert state_of(store) is State.CLOSED
    assert store.close()


def test_no_target_is_configured(namespace: Namespace) -> None:
    store = BlockStore(namespace, [], io_workers=1)
    assert store.wait_recovered(60)
    assert state_of(store) is State.DISABLED
    assert "none is configured" in store.reason
    assert store.close()


def test_every_target_is_named_with_its_reason(namespace: Namespace, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    targets: list[Target] = [
        FilesystemTarget(tmp_path / "a", name="first"),
        FilesystemTarget(tmp_path / "b", name="second"),
    ]
    store = BlockStore(namespace, targets, io_workers=1)
    assert store.wait_recovered(60)
    assert state_of(store) is State.DISABLED
    for part in ("first: ", "second: ", "holds other files", "lifeboat-cache doctor"):
        assert part in store.reason
    assert store.close()


def test_fault_while_journals_are_read(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, skip: bytes | None = None) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr("lifeboat_cache.targets.segment_reader.SegmentReader.poll", broken)
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    assert state_of(store) is State.DISABLED
    assert store.lookup(sample_keys([1])).tolist() == [Lookup.MISS]
    assert ended(store.store(batch(1))) == [Outcome.DISABLED]
    assert store.close()


def test_target_that_raises_is_a_failure_and_not_a_crash(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    assert ended(store.store(batch(1))) == [Outcome.OK]

    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError

    for method, call in (
        ("segment_reader.SegmentReader.open_segment", store.load),
        ("segment_writer.SegmentWriter.reserve", store.store),
        ("segment_writer.SegmentWriter.commit", store.store),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"lifeboat_cache.targets.{method}", broken)
            assert ended(call(batch(1 if call == store.load else 2))) == [Outcome.FAILED]
    assert ended(store.load(batch(1))) == [Outcome.OK]
    assert ended(store.store(batch(2))) == [Outcome.OK]
    assert store.close()


def test_writer_that_cannot_start_is_tried_again_later(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def refuses(self: object, of: Namespace) -> None:
        attempts.append(of)
        raise TargetError(13, "not today")

    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    with monkeypatch.context() as patch:
        patch.setattr(FilesystemTarget, "writer", refuses)
        for number in range(5):
            assert ended(store.store(batch(number))) == [Outcome.FAILED]
    assert len(attempts) == 1, "a disk in trouble is not asked for every job"
    monkeypatch.setattr(store._storage, "_writer_retry", 0.0)
    assert ended(store.store(batch(1))) == [Outcome.OK]
    assert store.close()


def test_trouble_that_goes_on_is_said_once(
    root: Path,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(self: object, of: Namespace) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", f"{time.monotonic()}.lock")

    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    monkeypatch.setattr(FilesystemTarget, "writer", full)
    for number in range(5):
        store._storage._writer_retry = 0.0
        assert ended(store.store(batch(number))) == [Outcome.FAILED]
    assert store.close()
    assert len([r for r in caplog.records if "cannot write to" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    ("capacity", "reserve", "remedy"), [(1, 0, "capacity_gb"), (None, 1 << 60, "min_free_gb")]
)
def test_a_full_store_says_so_once(
    root: Path,
    namespace: Namespace,
    caplog: pytest.LogCaptureFixture,
    capacity: int | None,
    reserve: int,
    remedy: str,
) -> None:
    target = FilesystemTarget(root, capacity=capacity, reserve=reserve)
    store = BlockStore(namespace, [target], io_workers=1)
    assert store.wait_recovered(60)
    for number in range(5):
        assert ended(store.store(batch(number))) in ([Outcome.FULL], [Outcome.RESERVE])
    assert store.close()
    (line,) = (r.getMessage() for r in caplog.records if "not kept" in r.getMessage())
    assert remedy in line


def test_callback_that_raises_does_not_stop_the_store(root: Path, namespace: Namespace) -> None:
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)

    def broken(job: Job) -> None:
        raise ValueError("of the adapter")

    assert ended(store.store(batch(1), broken)) == [Outcome.OK]
    assert store.drain(60)
    assert ended(store.load(batch(1))) == [Outcome.OK]
    assert len(store.poll()) == 1
    assert store.close()


def test_closed_store(open_driver: Callable[..., StoreDriver]) -> None:
    driver = open_driver()
    assert driver.store([1]) == [Outcome.OK]
    store = driver.block_store
    assert store.close()
    assert store.close()
    assert state_of(store) is State.CLOSED
    assert driver.lookup([1]) == [Lookup.MISS]
    assert driver.delete([1]) == [False]
    for call in (store.store, store.load):
        with pytest.raises(StoreClosedError, match="open a new one"):
            call(batch(1))
    assert open_driver().load([1]) == [Outcome.OK]


def test_waiting_for_a_job_and_polling_agree(
    open_driver: Callable[..., StoreDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Job.publish

    def slowly(self: Job) -> None:
        publish(self)
        time.sleep(0.02)  # the waiter runs first

    monkeypatch.setattr(Job, "publish", slowly)
    store = open_driver().block_store
    for number in range(5):
        job = store.store(batch(number))
        assert job.wait(60)
        assert store.poll() == [job]
        assert not store.busy()


def test_loading_into_memory_that_is_not_writable(open_driver: Callable[..., StoreDriver]) -> None:
    driver = open_driver(size=4096)
    assert driver.store([1]) == [Outcome.OK]
    frozen = bytes(4096)
    job = driver.block_store.load(BlockBatch(sample_keys([1]), BlockBuffers.from_buffers([frozen])))
    assert ended(job) == [Outcome.MISMATCH]
    assert frozen == bytes(4096)
    assert driver.load([1]) == [Outcome.OK]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_shortage_of_the_process_does_not_forget_blocks(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    assert ended(store.store(batch(1))) == [Outcome.OK]

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, "not now")

    with monkeypatch.context() as patch:
        patch.setattr("lifeboat_cache.targets.segment_reader.SegmentReader.open_segment", refuse)
        assert ended(store.load(batch(1))) == [Outcome.FAILED]
    assert ended(store.load(batch(1))) == [Outcome.OK]
    assert store.close()
