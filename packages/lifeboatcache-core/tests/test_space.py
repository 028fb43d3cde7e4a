"""Full targets and full disks: stores are dropped and counted, loads go on, space heals."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lifeboat_cache import kernels
from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.format.access import ACCESS
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store import storage
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.targets import segment_writer
from lifeboat_cache.targets.direct import write_from
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.segment_reader import SegmentReader
from lifeboat_cache.testing import (
    StoreDriver,
    aligned_memory,
    cut_at,
    payload_of,
    sample_keys,
    sample_records,
)

Open = Callable[..., StoreDriver]

OK, PRESENT, FULL, RESERVE = Outcome.OK, Outcome.PRESENT, Outcome.FULL, Outcome.RESERVE

PAGE = 4096


class OverConfidentTarget(FilesystemTarget):
    """Sees space that somebody else takes at the same moment."""

    def _free(self) -> int:
        return 1 << 40


@pytest.fixture
def filler(small_disk: Path) -> Iterator[Callable[[int], None]]:
    """Fills the small disk up to a number of pages; called again, it changes that number."""
    fd = os.open(small_disk / "filler", os.O_CREAT | os.O_WRONLY)

    def leave(pages: int) -> None:
        os.ftruncate(fd, 0)
        free = os.statvfs(small_disk).f_bfree
        if free > pages:
            os.posix_fallocate(fd, 0, (free - pages) * PAGE)

    yield leave
    os.close(fd)


def test_capacity_drops_and_counts_stores(open_driver: Open, root: Path) -> None:
    size = 256 << 10
    driver = open_driver(target=FilesystemTarget(root, capacity=1 << 20), size=size)
    outcomes = [driver.store([number])[0] for number in range(6)]
    stored = outcomes.count(OK)
    assert 2 <= stored <= 3
    assert outcomes == [OK] * stored + [FULL] * (6 - stored)
    assert driver.load(range(6)) == [OK] * stored + [Outcome.MISSING] * (6 - stored)
    counters = driver.block_store.counters()
    assert counters.store_outcomes == {"ok": stored, "full": 6 - stored}
    assert counters.bytes_stored == stored * size
    assert driver.block_store.close()

    target = FilesystemTarget(root, capacity=1 << 20)
    again = open_driver(target=target, size=size)
    assert again.store([9]) == [FULL]
    assert again.load(range(stored)) == [OK] * stored
    assert again.block_store.namespace is not None
    target.purge(again.block_store.namespace.hex)
    assert again.store([9]) == [OK]
    assert again.load([0, 9]) == [Outcome.MISSING, OK]


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("limit", ["capacity", "reserve"])
def test_a_burst_keeps_to_the_limits(open_driver: Open, root: Path, limit: str) -> None:
    # Much more is handed over than what may be stored before anything is on the disk.
    root.mkdir()
    room, size = 48 << 20, 1 << 20
    if limit == "capacity":
        target = FilesystemTarget(root, capacity=room)
    else:
        target = SmallDisk(root, reserve=1 << 30, free=(1 << 30) + room)
    store = open_driver(target=target).block_store
    memory = aligned_memory(size)
    jobs = []
    for first in range(0, 200, 20):
        keys = sample_keys(range(first, first + 20))
        buffers = BlockBuffers.from_buffers([memory] * 20)
        jobs.append(store.store(BlockBatch(keys, buffers), on_done=lambda _: None))
    assert all(job.wait(60) for job in jobs)
    outcomes = np.concatenate([job.outcomes for job in jobs])
    refusal = FULL if limit == "capacity" else RESERVE
    assert set(outcomes.tolist()) == {OK, refusal}
    used = sum(file.stat().st_blocks * 512 for file in root.glob("*/*.segment"))
    assert room // 2 < used <= room + (4 << 20)
    # Nothing is under way any more, and nothing counts twice.
    assert target._under_way == 0


class SmallDisk(FilesystemTarget):
    """A target whose disk has a certain number of bytes free in the beginning."""

    def __init__(self, root: Path, *, reserve: int, free: int) -> None:
        super().__init__(root, reserve=reserve)
        self._free_at_first = free

    def _free(self) -> int:
        # As a disk does: what is on it by now.
        used = sum(file.stat().st_blocks * 512 for file in self.root.glob("*/*.segment"))
        return self._free_at_first - used


def test_reserve_drops_and_counts_stores(open_driver: Open, root: Path) -> None:
    open_driver().store(range(2))
    driver = open_driver(target=FilesystemTarget(root, reserve=1 << 60))
    assert driver.store(range(4)) == [PRESENT, PRESENT, RESERVE, RESERVE]
    assert driver.load(range(4)) == [OK, OK, Outcome.MISSING, Outcome.MISSING]
    assert driver.block_store.counters().store_outcomes == {"present": 2, "reserve": 2}


@pytest.mark.parametrize("size", [64 << 10, 50_000])
def test_disk_that_fills_in_the_middle_of_a_batch(
    open_driver: Open,
    small_disk: Path,
    filler: Callable[[int], None],
    size: int,
) -> None:
    root = small_disk / "kv"
    target = OverConfidentTarget(root)
    driver = open_driver(target=target, size=size, io_workers=1)
    filler(900)
    outcomes = driver.store(range(100))
    stored = [number for number in range(100) if outcomes[number] is OK]
    assert set(outcomes) == {OK, RESERVE}
    assert 40 < len(stored) < 100
    assert [o is OK for o in driver.load(range(100))] == [o is OK for o in outcomes]
    # What could not be written does not hold space.
    kept = len(stored) * -(-size // PAGE) * PAGE
    assert kept <= target.usage().used <= kept + 16 * PAGE

    # Nothing is stored while it is full, everything once there is space.
    filler(0)
    assert set(driver.store(range(200, 210))) == {RESERVE}
    filler(1 << 20)
    assert driver.store([200]) == [OK]
    assert driver.load([200]) == [OK]
    assert driver.block_store.close()

    again = open_driver(target=FilesystemTarget(root), size=size)
    assert again.block_store.counters().bad_entries == 0
    assert again.load([*stored, 200]) == [OK] * (len(stored) + 1)


@pytest.mark.parametrize("pages", range(12))
def test_every_page_can_be_the_last(
    open_driver: Open,
    small_disk: Path,
    filler: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    pages: int,
) -> None:
    # The journal's header, a segment's header, three payloads, the entries: each is
    # the one that finds no space in one of the cases.
    monkeypatch.setattr(storage, "_WRITER_RETRY_S", 0.0)
    root = small_disk / "kv"
    driver = open_driver(target=OverConfidentTarget(root), size=PAGE)
    filler(pages)
    for _ in range(3):
        outcomes = driver.store(range(3))
        assert set(outcomes) <= {OK, PRESENT, RESERVE, Outcome.FAILED}
    good = {number for number in range(3) if outcomes[number].good}
    found = driver.load(range(3))
    assert {number for number in range(3) if found[number] is OK} == good
    files = [path.name for path in root.glob("*/*") if path.suffix in (".journal", ".lock")]
    assert len(files) in (0, 2), "failed attempts leave nothing behind"

    filler(1 << 20)
    assert all(outcome.good for outcome in driver.store(range(6)))
    assert driver.load(range(6)) == [OK] * 6
    assert driver.block_store.close()
    again = open_driver(target=FilesystemTarget(root), size=PAGE)
    assert again.load(range(6)) == [OK] * 6
    assert again.block_store.counters().bad_entries == 0


def test_store_opened_on_a_full_disk_serves_what_is_there(
    open_driver: Open,
    small_disk: Path,
    filler: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "_WRITER_RETRY_S", 0.0)
    root = small_disk / "kv"
    before = open_driver(target=FilesystemTarget(root))
    assert before.store(range(8)) == [OK] * 8
    assert before.block_store.close()
    filler(0)
    driver = open_driver(target=FilesystemTarget(root))
    assert driver.block_store.state is State.READY
    assert driver.load(range(8)) == [OK] * 8
    assert not driver.store([9])[0].good
    filler(1 << 20)
    assert driver.store([9]) == [OK]
    assert driver.load(range(8)) == [OK] * 8


def test_first_start_on_a_full_disk_stands_down(
    small_disk: Path, filler: Callable[[int], None], namespace: Namespace
) -> None:
    filler(0)
    store = BlockStore(namespace, [FilesystemTarget(small_disk / "kv")], io_workers=1)
    assert store.wait_recovered(60)
    assert store.state is State.DISABLED
    assert "No space left" in store.reason
    assert store.close()


# Writes that fail half-way --------------------------------------------------------


def appended(
    writer: segment_writer.SegmentWriter, namespace: Namespace, numbers: Sequence[int]
) -> list[int]:
    keys = sample_keys(numbers)
    buffers = BlockBuffers.from_buffers([cut_at(payload_of(key, 100)) for key in keys])
    return writer.append(sample_records(namespace, keys, buffers), buffers, range(len(keys)))


class Dwindling:
    """Lets writes of one length through up to a limit in bytes.

    What Python writes then finds the disk full; what a kernel writes, the file too large.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.victim = self.limit = -1
        monkeypatch.setattr("lifeboat_cache.targets.segment_writer.write_from", self)
        self._append = segment_writer.SegmentWriter._append

        def append(
            writer: segment_writer.SegmentWriter, entries: Any, segments: Any, position: int
        ) -> tuple[int, bool]:
            return self.append(writer, entries, segments, position)

        monkeypatch.setattr(segment_writer.SegmentWriter, "_append", append)

    @property
    def refusal(self) -> Outcome:
        return Outcome.FAILED if kernels.ready() else Outcome.RESERVE

    def append(
        self, writer: segment_writer.SegmentWriter, entries: Any, segments: Any, position: int
    ) -> tuple[int, bool]:
        if entries.nbytes != self.victim:
            return self._append(writer, entries, segments, position)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (position + self.limit, before[1]))
        try:
            return self._append(writer, entries, segments, position)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def __call__(self, fd: int, pieces: Sequence[memoryview], offset: int) -> None:
        if sum(piece.nbytes for piece in pieces) != self.victim:
            write_from(fd, pieces, offset)
            return
        if self.limit:
            write_from(fd, [memoryview(b"".join(pieces))[: self.limit]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def writer(root: Path, namespace: Namespace) -> Iterator[segment_writer.SegmentWriter]:
    (root / namespace.directory).mkdir(parents=True)
    made = segment_writer.SegmentWriter(
        root / namespace.directory, namespace, direct=False, allowance=lambda wanted: None
    )
    yield made
    made.close()


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("limit", [0, 1, 127, 128, 33 * 128, 33 * 128 + 64])
def test_journal_write_that_fails_half_way_takes_nothing_back(
    root: Path,
    namespace: Namespace,
    writer: segment_writer.SegmentWriter,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
) -> None:
    disk = Dwindling(monkeypatch)
    assert appended(writer, namespace, [1000]) == [OK]
    disk.victim, disk.limit = 40 * 128, limit
    assert appended(writer, namespace, range(40)) == [disk.refusal] * 40
    whole = limit // 128

    def keys(reader: SegmentReader) -> list[bytes]:
        pages = list(reader.poll())
        assert sum(page.bad for page in pages) == 0
        return [key for page in pages for key in page.entries["key"].tolist()]

    tailing = SegmentReader(root / namespace.directory, namespace, direct=False)
    seen = keys(tailing)
    assert seen == sample_keys([1000, *range(whole)])
    # Whoever has read those entries must find the next ones behind them.
    assert appended(writer, namespace, range(2000, 2003)) == [OK] * 3
    seen += keys(tailing)
    assert seen == sample_keys([1000, *range(whole), *range(2000, 2003)])
    fresh = SegmentReader(root / namespace.directory, namespace, direct=False)
    assert keys(fresh) == seen


def test_access_log_goes_on_behind_a_write_that_failed_half_way(
    root: Path,
    namespace: Namespace,
    writer: segment_writer.SegmentWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Dwindling(monkeypatch)

    def accesses(*slots: int) -> np.ndarray:
        made = np.zeros(len(slots), dtype=ACCESS)
        made["slot"] = slots
        return made

    writer.log_access(accesses(1))
    disk.victim, disk.limit = 2 * 32, 50
    writer.log_access(accesses(2, 3))
    writer.log_access(accesses(4, 5, 6))
    reader = SegmentReader(root / namespace.directory, namespace, direct=False)
    assert [slot for page in reader.accesses() for slot in page["slot"].tolist()] == [1, 4, 5, 6]


@pytest.mark.usefixtures("both_kernels")
def test_tombstones_that_cannot_be_written_are_not_an_error(
    root: Path,
    namespace: Namespace,
    writer: segment_writer.SegmentWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Dwindling(monkeypatch)
    tombstones = np.zeros(3, dtype=ENTRY)
    tombstones["kind"] = KIND_TOMBSTONE
    disk.victim, disk.limit = 3 * 128, 60
    writer.bury(tombstones)
    assert appended(writer, namespace, [1]) == [OK]
    reader = SegmentReader(root / namespace.directory, namespace, direct=False)
    ((kind,),) = [page.entries["kind"].tolist() for page in reader.poll()]
    assert kind == KIND_RECORD


# Pressure ---------------------------------------------------------------------------


def test_too_many_waiting_bytes_are_dropped_as_busy(root: Path, namespace: Namespace) -> None:
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1, pending_bytes=1 << 20)
    assert store.wait_recovered(60)
    size = 512 << 10
    memory = [cut_at(payload_of(key, size)) for key in sample_keys(range(8))]
    jobs = [
        store.store(BlockBatch([key], BlockBuffers.from_buffers([pieces])))
        for key, pieces in zip(sample_keys(range(8)), memory, strict=True)
    ]
    assert store.drain(60)
    outcomes = {int(job.outcomes[0]) for job in jobs}
    assert outcomes <= {OK, Outcome.BUSY}
    assert OK in outcomes
    assert sorted(map(id, store.poll())) == sorted(map(id, jobs))
    # A single job larger than the bound is taken when nothing else waits.
    big = BlockBatch(sample_keys([50]), BlockBuffers.from_buffers([bytes(2 << 20)]))
    job = store.store(big)
    assert job.wait(60)
    assert job.ok
    assert store.close()
