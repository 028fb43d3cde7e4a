"""Readers that lag behind an evicting janitor, and two janitors at once."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faultkit.disks import Disk, FaultyDisk
from faultkit.engine import engines

from lifeboat_cache.check import check_targets
from lifeboat_cache.format.bitmap import set_dead
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_DEAD, MAGIC_SEGMENT, FileHeader
from lifeboat_cache.interface import Namespace, Outcome
from lifeboat_cache.janitor import Janitor, JanitorPolicy
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

OK, MISSING = Outcome.OK, Outcome.MISSING

SIZE = 64 << 10

#: Nothing is spared and nobody is waited for: every reader lags behind.
RUTHLESS = JanitorPolicy(
    grace_s=0.0, young_s=0.0, punch_bytes=4096, small_bytes=4 << 20, merge_count=3,
    margin_bytes=0, summary_s=0.0,
)  # fmt: skip

PUNCH, KEEP_SIZE = 2, 1


def punch(path: Path, offset: int, length: int) -> None:
    """Give back the space of a range; it reads as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDWR)
    try:
        done = libc.fallocate(
            ctypes.c_int(fd),
            ctypes.c_int(PUNCH | KEEP_SIZE),
            ctypes.c_long(offset),
            ctypes.c_long(length),
        )
        if done and ctypes.get_errno() == errno.EOPNOTSUPP:
            pytest.skip("this filesystem punches no holes")
        assert not done
    finally:
        os.close(fd)


def mark_dead(segment: Path, slots: range) -> None:
    header = FileHeader.unpack(segment.read_bytes()[:HEADER_BYTES], MAGIC_SEGMENT)
    of = FileHeader(MAGIC_DEAD, header.namespace, header.writer, header.segment, 1)
    # At once, as bits appear when a janitor sets them.
    draft = segment.with_suffix(".draft")
    draft.write_bytes(of.pack() + set_dead(b"", slots))
    draft.replace(segment.with_suffix(".dead"))


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("how", ["punched", "truncated", "unlinked", "truncated and unlinked"])
@pytest.mark.parametrize("warm", [True, False], ids=["open", "not open"])
def test_reader_that_lags_behind(open_driver: Open, small_disk: Disk, how: str, warm: bool) -> None:
    before = open_driver(small_disk.root, size=SIZE)
    assert before.store(range(16)) == [OK] * 16
    assert before.block_store.close()
    driver = open_driver(small_disk.root, size=SIZE)
    if warm:
        assert driver.load(range(16)) == [OK] * 16
    (segment,) = small_disk.root.glob("*/*.segment")
    mark_dead(segment, range(4, 16))
    if how == "punched":
        punch(segment, HEADER_BYTES + 4 * SIZE, 12 * SIZE)
    if "truncated" in how:
        os.truncate(segment, HEADER_BYTES + 4 * SIZE)
    if "unlinked" in how:
        segment.unlink()
    kept = 0 if "unlinked" in how and not (warm and "truncated" not in how) else 4
    found = driver.load(range(16))
    assert Outcome.CORRUPT not in found
    assert set(found[4:]) <= ({OK, MISSING} if how == "unlinked" else {MISSING})
    assert found[:kept] == [OK] * kept or "unlinked" in how
    assert set(driver.block_store.counters().load_outcomes) <= {"ok", "missing"}
    # A reader that found nothing declares nothing dead.
    assert len(list(small_disk.root.glob("*/*.journal"))) == 1
    assert all(outcome.good for outcome in driver.store(range(16)))
    assert driver.load(range(16)) == [OK] * 16


def hole_by_hole(segment: Path, stop: threading.Event) -> None:
    for slot in range(4, 100):
        if stop.wait(0.002):
            return
        mark_dead(segment, range(4, slot + 1))
        punch(segment, HEADER_BYTES + slot * SIZE, SIZE)


def test_loads_while_holes_are_punched(open_driver: Open, small_disk: Disk) -> None:
    before = open_driver(small_disk.root, size=SIZE)
    assert before.store(range(100)) == [OK] * 100
    assert before.block_store.close()
    driver = open_driver(small_disk.root, size=SIZE)
    (segment,) = small_disk.root.glob("*/*.segment")
    stop = threading.Event()
    puncher = threading.Thread(target=hole_by_hole, args=(segment, stop))
    puncher.start()
    try:
        while puncher.is_alive():
            found = driver.load(range(100))
            assert set(found) <= {OK, MISSING}
            assert found[:4] == [OK] * 4
    finally:
        stop.set()
        puncher.join()
    assert driver.load(range(100)) == [OK] * 4 + [MISSING] * 96


def lookout(root: Path, namespace: Namespace) -> None:
    """What is there is right, and `check` finds no fault."""

    class Place:
        path, name, direct_io = root, "local", "auto"

    report = check_targets([Place()])  # type: ignore[list-item]
    assert [f.kind for t in report.targets for f in t.all_findings() if f.level == "fault"] == []


@pytest.mark.parametrize("left", [0, 100])
def test_segment_that_a_killed_janitor_was_removing_is_a_leftover(
    open_driver: Open, root: Path, namespace: Namespace, left: int
) -> None:
    driver = open_driver()
    assert driver.store(range(3)) == [OK] * 3
    assert driver.block_store.close()
    (segment,) = root.glob("*/*.segment")
    mark_dead(segment, range(3))
    os.truncate(segment, left)  # and then it was killed, before it could unlink it
    lookout(root, namespace)


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "without locks"])
def test_two_janitors_at_once_beside_engines(
    open_driver: Open,
    root: Path,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    locks: bool,
) -> None:
    blocks = 240
    lockf = fcntl.lockf

    def no_locks(fd: int, *arguments: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("janitor.lock"):
            raise OSError(errno.ENOLCK, "No locks available")
        lockf(fd, *arguments)

    if not locks:
        monkeypatch.setattr(fcntl, "lockf", no_locks)
    faults: list[BaseException] = []
    stop = threading.Event()

    def tidy(seed: int) -> None:
        try:
            janitor = Janitor(FilesystemTarget(root, capacity=8 << 20), policy=RUTHLESS)
            while not stop.is_set():
                janitor.run_once()
        except BaseException as fault:
            faults.append(fault)

    driver = open_driver(size=SIZE)
    assert driver.store(range(4)) == [OK] * 4
    janitors = [threading.Thread(target=tidy, args=(seed,)) for seed in range(2)]
    with engines(root, 2, SIZE) as others:
        for thread in janitors:
            thread.start()
        try:
            for seed, engine in enumerate(others):
                engine.tell("churn", [seed, 0.7, blocks])
            for first in range(0, blocks, 16):
                assert set(driver.store(range(first, first + 16))) <= {
                    OK, Outcome.PRESENT, Outcome.FULL, Outcome.RESERVE, Outcome.FAILED,
                }  # fmt: skip
                assert set(driver.load(range(first + 16))) <= {OK, MISSING}
            said = [engine.hear() for engine in others]
        finally:
            stop.set()
            for thread in janitors:
                thread.join()
        assert not faults
        for counts in said:
            assert set(counts["load"]) <= {"OK", "MISSING"}
            assert counts["load"].get("OK", 0) > 0
        for engine in others:
            assert engine.ask("close") is True
    assert driver.block_store.close()
    lookout(root, namespace)
    fresh = open_driver(size=SIZE)
    assert set(fresh.load(range(blocks))) <= {OK, MISSING}
    assert fresh.block_store.counters().bad_entries == 0


CALLS = [
    "read", "write", "create", "rename", "unlink", "open", "opendir", "setattr", "statfs",
    "fallocate", "lookup",
]  # fmt: skip


@pytest.mark.parametrize("file", ["segment$", "journal$"])
def test_janitor_that_cannot_look_at_files(
    open_driver: Open, faulty: FaultyDisk, file: str
) -> None:
    driver = open_driver(faulty.root)
    assert driver.store(range(8)) == [OK] * 8
    assert driver.block_store.close()
    faulty.rules({"op": "getattr", "match": file, "do": "error", "errno": errno.EIO})
    Janitor(FilesystemTarget(faulty.root), policy=RUTHLESS).run_once()
    faulty.rules()
    assert open_driver(faulty.root).load(range(8)) == [OK] * 8


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("op", CALLS)
def test_janitor_whose_calls_fail(
    open_driver: Open, faulty: FaultyDisk, namespace: Namespace, op: str, number: int
) -> None:
    # Several ended writers with something deleted in each: it merges, punches and removes.
    kept: list[int] = []
    for writer in range(4):
        driver = open_driver(faulty.root, size=20_000)
        numbers = range(writer * 10, writer * 10 + 10)
        assert driver.store(numbers) == [OK] * 10
        driver.block_store.touch(driver.keys(numbers))
        assert driver.delete(numbers[:6]) == [True] * 6
        kept += numbers[6:]
        assert driver.block_store.close()
    for skip in (0, 3, 9, 25):
        faulty.rules({"op": op, "do": "error", "errno": number, "skip": skip})
        janitor = Janitor(FilesystemTarget(faulty.root, capacity=1 << 40), policy=RUTHLESS)
        for _ in range(2):
            try:
                janitor.run_once()
            except OSError:
                assert op in ("lookup", "open", "read", "getattr")  # the root cannot be read
        janitor.close()
        faulty.rules()
        driver = open_driver(faulty.root, size=20_000)
        assert driver.load(kept) == [OK] * len(kept)
        assert driver.block_store.close()
    janitor = Janitor(FilesystemTarget(faulty.root, capacity=1 << 40), policy=RUTHLESS)
    for _ in range(4):
        report = janitor.run_once()
    assert not report.problems
    fresh = open_driver(faulty.root, size=20_000)
    assert fresh.load(kept) == [OK] * len(kept)
    assert fresh.block_store.counters().bad_entries == 0
    lookout(faulty.root, namespace)
