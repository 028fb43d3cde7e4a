"""Dead records: their grace, what readers see meanwhile, and what is never touched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from janitors import (
    THEN,
    Block,
    Clock,
    chain,
    janitor,
    leave,
    names,
    run_until_quiet,
    verified,
    write,
)

from lifeboat_cache.format.bitmap import dead_slots
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_DEAD, FileHeader
from lifeboat_cache.format.journal import ENTRY, KIND_TOMBSTONE, parse_entries, seal_entries
from lifeboat_cache.janitor import Janitor, JanitorPolicy, reclaim
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import Place
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.holes import punch_hole
from lifeboat_cache.targets.layout import JANITOR_LOCK
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

SIZE = 256 << 10
OK, MISSING = Outcome.OK, Outcome.MISSING


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Small filesystems of two kinds."""
    if os.geteuid():
        pytest.skip("mounting a small filesystem needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)]]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        commands = [
            ["mkfs.ext4", "-q", "-m", "0", str(image)],
            ["mount", "-o", "loop", str(image), str(mount)],
        ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"no small filesystem can be made here: {error}")
        if done.returncode:
            pytest.skip(f"no small filesystem can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def dead_of(root: Path) -> int:
    return sum(
        int(dead_slots(path.read_bytes()[HEADER_BYTES:]).sum()) for path in root.glob("*/*.dead")
    )


def test_holes_give_space_back(disk: Path, namespace: Namespace, open_driver: Open) -> None:
    root = disk / "kv"
    leave(root, chain(0, 40), namespace, 1 << 20)
    clock = Clock()
    one = janitor(root, clock, capacity=40 << 20, low=0.6, live_ratio=0.0)
    before = one.run_once()
    assert before.evicted_blocks >= 16
    assert before.punched_bytes == 0
    free = before.free
    clock.tick(31)
    after = one.run_once()
    assert after.punched_bytes == before.evicted_blocks << 20
    assert after.free >= free + after.punched_bytes - (1 << 20)
    assert after.used_after <= before.used_after - after.punched_bytes + (1 << 20)
    driver = open_driver(target=FilesystemTarget(root), size=1 << 20)
    left = 40 - before.evicted_blocks
    assert driver.load(range(40)) == [OK] * left + [MISSING] * before.evicted_blocks
    assert verified(root) == left


def test_nothing_is_reclaimed_before_the_grace_is_over(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    clock = Clock()
    one = janitor(root, clock, capacity=4 * SIZE, grace_s=30.0)
    used = one.run_once().used_after
    dead = dead_of(root)
    assert dead >= 4
    for _ in range(5):
        clock.tick(5)
        report = one.run_once()
        assert report.punched_bytes == report.segments_removed == 0
        assert report.used_after >= used
        assert dead_of(root) == dead, "what is on its way is not evicted twice"
    clock.tick(6)
    report = one.run_once()
    assert report.punched_bytes + report.removed_bytes >= 4 * SIZE


def test_bits_of_an_earlier_janitor_get_a_grace_of_their_own(
    root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    clock = Clock()
    janitor(root, clock, capacity=4 * SIZE).run_once()
    clock.tick(100)
    two = janitor(root, clock, capacity=4 * SIZE)
    report = two.run_once()
    assert report.punched_bytes == report.segments_removed == report.evicted_blocks == 0
    clock.tick(31)
    report = two.run_once()
    assert report.punched_bytes + report.removed_bytes >= 4 * SIZE


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_jump_of_the_clock_does_not_shorten_the_grace(
    root: Path, namespace: Namespace, jump: float
) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    clock = Clock()
    one = janitor(root, clock, capacity=4 * SIZE)
    one.run_once()
    clock.set(max(0.0, 1_700_000_000 + jump))
    report = one.run_once()
    assert report.punched_bytes == report.segments_removed == 0
    clock.tick(31)
    report = one.run_once()
    assert report.punched_bytes + report.removed_bytes > 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_reader_that_lags_finds_blocks_missing_and_never_corrupt(
    open_driver: Open, root: Path, namespace: Namespace, whole: bool
) -> None:
    size = 1 << 20
    leave(root, chain(0, 8), namespace, size)
    driver = open_driver(size=size)
    assert driver.load(range(8)) == [OK] * 8  # the segment is open now
    clock = Clock()
    capacity = (1 << 20) if whole else (8 << 20)
    one = janitor(root, clock, capacity=capacity, low=0.5, live_ratio=0.0)
    run_until_quiet(one, clock)
    assert len(names(root, "segment")) == (0 if whole else 1)
    # It has not looked at the bitmaps since: from its memory, everything is there.
    outcomes = driver.load(range(8))
    assert outcomes == [MISSING] * 8 if whole else set(outcomes) == {OK, MISSING}
    counters = driver.block_store.counters()
    assert counters.load_outcomes.get("corrupt", 0) == 0
    assert driver.block_store.close()
    assert not names(root, "journal") or not whole


def test_what_was_removed_with_its_bitmap_counts_as_reclaimed(
    root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 2), namespace)
    (name,) = names(root, "segment")
    place = Place(bytes.fromhex(name[:32]), 0, 4096, 8192)
    reader = FilesystemTarget(root).reader(namespace)
    assert reader.declared_dead([place], [0]) == [False]
    # Between cutting and unlinking, and after that.
    path = next(root.glob(f"*/{name}"))
    os.truncate(path, 0)
    assert reader.declared_dead([place], [0]) == [True]
    path.unlink()
    assert reader.declared_dead([place, place], [0, 1]) == [True, True]
    reader.close()


def test_an_access_log_is_read_from_where_it_was_punched(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 600), namespace, 4096)
    driver = open_driver(size=4096)
    store = driver.block_store
    store.touch(driver.keys(range(600)))
    store._flush_accesses()
    clock = Clock(4e9)
    janitor(root, clock).run_once()
    reader = FilesystemTarget(root).reader(namespace)
    pages = list(reader.accesses())
    # What was punched out is in the summary; of the rest, up to a page is in both.
    assert 600 <= sum(page.shape[0] for page in pages) < 600 + 128
    reader.close()
    assert store.close()


def test_segments_are_cut_before_they_are_unlinked(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    (name,) = names(root, "segment")
    path = next(root.glob(f"*/{name}"))
    fd = os.open(path, os.O_RDONLY)
    try:
        clock = Clock()
        run_until_quiet(janitor(root, clock, capacity=SIZE // 2), clock)
        assert not path.exists()
        assert os.fstat(fd).st_blocks == 0
    finally:
        os.close(fd)


def test_the_segment_of_a_living_writer_stays(root: Path, namespace: Namespace) -> None:
    writer = write(root, chain(0, 4), namespace, size=SIZE)
    clock = Clock()
    reports = run_until_quiet(janitor(root, clock, capacity=SIZE // 2), clock)
    assert sum(report.evicted_blocks for report in reports) == 4
    assert len(names(root, "segment")) == len(names(root, "journal")) == 1
    assert sum(report.punched_bytes for report in reports) == 4 * SIZE
    # It writes on; what it stores is not touched by the holes before.
    write(root, [Block(9)], namespace, size=SIZE, writer=writer)
    writer.close()
    assert verified(root) == 1
    run_until_quiet(janitor(root, clock, capacity=SIZE // 2), clock)
    assert not list(root.glob("*/*.*")) or names(root, "segment") == []


def test_a_tombstone_sets_the_bit_and_then_its_journal_can_go(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 4), namespace)
    driver = open_driver()
    assert driver.delete([1, 2]) == [True, True]
    assert driver.block_store.close()
    assert len(names(root, "journal")) == 2
    clock = Clock()
    one = janitor(root, clock)
    assert one.run_once().buried_blocks == 2
    assert dead_of(root) == 2
    run_until_quiet(one, clock)
    assert len(names(root, "journal")) == 1
    assert open_driver().load(range(4)) == [OK, MISSING, MISSING, OK]
    assert verified(root) == 2


def test_a_tombstone_waits_for_files_that_cannot_be_looked_at(
    open_driver: Open, root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(root, chain(0, 4), namespace)
    (owner,) = {name[:32] for name in names(root, "segment")}
    driver = open_driver()
    assert driver.delete([1, 2]) == [True, True]
    assert driver.block_store.close()
    scandir = os.scandir

    class Unseen:
        """An entry of a directory on a disk that fails."""

        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.path = entry.name, entry.path

        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            raise OSError(errno.EIO, "Input/output error")

    @contextlib.contextmanager
    def failing(path: Path) -> Iterator[list[Any]]:
        with scandir(path) as listing:
            yield [Unseen(e) if e.name.startswith(owner) else e for e in listing]

    clock = Clock()
    one = janitor(root, clock)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        for _ in range(3):
            one.run_once()
            clock.tick(100)
    assert dead_of(root) == 0
    run_until_quiet(one, clock)
    assert open_driver().load(range(4)) == [OK, MISSING, MISSING, OK]


def test_readers_are_told_of_new_dead_bits(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    one = janitor(root, Clock())
    one.run_once()
    (directory,) = [path for path in root.iterdir() if path.is_dir()]
    told = directory / "dead.generation"
    assert not told.exists()
    janitor(root, Clock(), capacity=4 * SIZE).run_once()
    first = told.stat()
    janitor(root, Clock(), capacity=2 * SIZE).run_once()
    assert (told.stat().st_ino, told.stat().st_mtime_ns) != (first.st_ino, first.st_mtime_ns)
    assert told.stat().st_mode & 0o777 == 0o600


def test_two_janitors_at_once(open_driver: Open, root: Path, namespace: Namespace) -> None:
    for first in range(0, 160, 8):
        leave(root, chain(first, 8), namespace, 32 << 10)
    clock = Clock()
    both = [janitor(root, clock, capacity=100 * (32 << 10), low=0.7) for _ in range(2)]
    for one in both:  # without the lock, which would only make them take turns
        one._take_lock = lambda: True  # type: ignore[method-assign]
    busy = [False, False]

    def interleave(step: str) -> None:
        """The other one does everything it has to do at each step of the first."""
        if not busy[1] and step in ("marked", "removed", "copied", "unlinked", "punch"):
            busy[1] = True
            both[1].run_once()
            clock.tick(40)
            busy[1] = False

    both[0].estate.on_step = interleave
    for _ in range(4):
        both[0].run_once()
        clock.tick(40)
    left = verified(root)
    assert 40 <= left <= 100
    outcomes = open_driver(size=32 << 10).load(range(160))
    assert outcomes.count(OK) == left
    assert set(outcomes) == {OK, MISSING}


def test_the_second_janitor_of_another_process_steps_back(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 2), namespace)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)

        try:
            target = FilesystemTarget(root)

            def hold(step: str) -> None:
                if step == "evict":
                    os.write(writing, b"x")
                    time.sleep(60)

            Janitor(target, on_step=hold).run_once()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
        report = Janitor(FilesystemTarget(root)).run_once()
        assert report.busy
        assert (root / JANITOR_LOCK).stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
    assert not Janitor(FilesystemTarget(root)).run_once().busy


def test_bits_that_another_janitor_wrote_over_are_set_again(
    root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    clock = Clock()
    one = janitor(root, clock, capacity=4 * SIZE)
    one.run_once()
    (path,) = root.glob("*/*.dead")
    data = path.read_bytes()
    path.write_bytes(data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES))
    clock.tick(31)
    report = one.run_once()
    assert report.punched_bytes == report.segments_removed == 0
    assert path.read_bytes() == data
    clock.tick(31)
    assert one.run_once().used_after < 5 * SIZE


def make_newer(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 2))


@pytest.mark.parametrize("kind", ["segment", "journal", "dead", "access"])
def test_what_a_newer_release_wrote_is_counted_and_left(
    open_driver: Open, root: Path, namespace: Namespace, kind: str
) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    (name,) = names(root, "segment")
    path = next(root.glob(f"*/{name}"))
    if kind == "dead":
        dead = path.with_suffix(".dead")
        header = FileHeader(MAGIC_DEAD, namespace.digest, bytes.fromhex(name[:32]), 0, 0)
        dead.write_bytes(header.pack() + b"\xff")
        make_newer(dead)
    elif kind == "access":
        # A log in the name of the same process.
        driver = open_driver()
        driver.block_store.touch(driver.keys([0]))
        assert driver.block_store.close()
        (log,) = root.glob("*/*.access")
        log.rename(path.parent / f"{name[:32]}.access")
        make_newer(path.parent / f"{name[:32]}.access")
        for extra in root.glob("*/*.lock"):
            if not extra.name.startswith(name[:32]):
                extra.unlink()
    else:
        make_newer(next(root.glob(f"*/*.{kind}")))
    leave(root, chain(10, 4), namespace, SIZE)
    mine = {p: p.read_bytes() for p in root.glob(f"*/{name[:32]}*")}
    clock = Clock()
    reports = run_until_quiet(janitor(root, clock, capacity=SIZE // 2), clock)
    assert {p: p.read_bytes() for p in root.glob(f"*/{name[:32]}*")} == mine
    assert sum(report.evicted_blocks for report in reports) == 4
    assert reports[-1].skipped_writers == 1
    assert reports[-1].used_after >= 4 * SIZE


@pytest.mark.parametrize(("field", "value"), [("kind", 9), ("codec", 77), ("algorithm", 200)])
def test_a_writer_with_entries_that_are_not_known_is_left(
    root: Path, namespace: Namespace, field: str, value: int
) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    (journal,) = root.glob("*/*.journal")
    data = journal.read_bytes()
    writer = bytes.fromhex(journal.name[:32])
    entries, _ = parse_entries(data[HEADER_BYTES:], writer, 0, namespace.digest)
    entries = entries.copy()
    entries[field][2] = value
    journal.write_bytes(data[:HEADER_BYTES] + seal_entries(entries, writer, 0, namespace.digest))
    before = sorted(path.name for path in root.glob(f"*/{journal.name[:32]}*"))
    clock = Clock()
    reports = run_until_quiet(janitor(root, clock, capacity=SIZE), clock)
    assert sum(report.evicted_blocks for report in reports) == 0
    assert reports[-1].skipped_writers == 1
    assert sorted(path.name for path in root.glob(f"*/{journal.name[:32]}*")) == before


def test_what_lies_there_is_counted_by_codec(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 6), namespace, SIZE)
    (journal,) = root.glob("*/*.journal")
    data = journal.read_bytes()
    writer = bytes.fromhex(journal.name[:32])
    entries, _ = parse_entries(data[HEADER_BYTES:], writer, 0, namespace.digest)
    entries = entries.copy()
    entries["codec"][2:] = 3
    entries["raw_length"][2:] *= 2
    journal.write_bytes(data[:HEADER_BYTES] + seal_entries(entries, writer, 0, namespace.digest))
    clock = Clock()
    report = janitor(root, clock).run_once()
    assert report.records == 6
    assert report.by_codec == {
        "raw": (2, 2 * SIZE, 2 * SIZE),
        "fp8": (4, 8 * SIZE, 4 * SIZE),
    }
    report = run_until_quiet(janitor(root, clock, capacity=5 * SIZE), clock)[-1]
    assert report.records < 6
    assert sum(records for records, _, _ in report.by_codec.values()) == report.records
    # The last blocks went first.
    assert report.by_codec["raw"] == (2, 2 * SIZE, 2 * SIZE)


def test_foreign_files_are_left(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    directory = next(path for path in root.iterdir() if path.is_dir())
    strangers = [root / "x.txt", directory / "notes", directory / f"{'a' * 32}.journal.bak"]
    for path in strangers:
        path.write_text("mine")
    # Named like one of ours, and something else.
    (directory / f"{'b' * 32}.00000000.segment").write_bytes(b"GIF89a" * 4000)
    clock = Clock()
    run_until_quiet(janitor(root, clock, capacity=SIZE // 2), clock)
    assert all(path.read_text() == "mine" for path in strangers)
    assert (directory / f"{'b' * 32}.00000000.segment").exists()


def test_files_are_private(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 40), namespace, 64 << 10)
    clock = Clock()
    run_until_quiet(janitor(root, clock, capacity=20 * (64 << 10)), clock)
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_filesystem_without_holes_is_compacted_only(
    open_driver: Open, root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "punch_hole", lambda *_: False)
    size = 1 << 20
    leave(root, chain(0, 16), namespace, size)
    clock = Clock()
    one = janitor(root, clock, capacity=16 << 20, low=0.4)
    reports = run_until_quiet(one, clock)
    assert sum(report.punched_bytes for report in reports) == 0
    assert sum(report.compacted_segments for report in reports) == 1
    assert reports[-1].used_after <= 0.45 * (16 << 20)
    left = verified(root)
    assert open_driver(size=size).load(range(left)) == [OK] * left


def test_faults_are_reported_and_stepped_over(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    other = Namespace.from_identity({"engine": "test", "model": "other"})
    leave(root, chain(0, 4), other, SIZE)
    real = os.open

    def broken(path: object, *args: object, **kwargs: object) -> int:
        if str(path).endswith(".journal") and namespace.directory in str(path):
            raise OSError(5, "Input/output error")
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", broken)
    clock = Clock()
    one = janitor(root, clock, capacity=SIZE)
    report = one.run_once()
    assert any("Input/output error" in problem for problem in report.problems)
    assert report.evicted_blocks == 4
    assert report.by_namespace[namespace.directory] >= 4 * SIZE
    monkeypatch.undo()
    clock.tick(31)
    assert one.run_once().evicted_blocks == 4


def test_a_read_only_directory_is_reported(small_disk: Path, namespace: Namespace) -> None:
    root = small_disk / "kv"
    leave(root, chain(0, 4), namespace, SIZE)
    mount = ["mount", "-o", "remount,ro", str(small_disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot be remounted here")
    report = janitor(root, Clock(), capacity=SIZE).run_once()
    assert report.problems
    assert report.used_after >= 4 * SIZE


def test_a_disk_without_any_space_gets_room(
    small_disk: Path, namespace: Namespace, open_driver: Open
) -> None:
    root = small_disk / "kv"
    for first in range(0, 12, 4):
        leave(root, chain(first, 4, THEN + first), namespace, 64 << 10)
    filler = small_disk / "filler"
    fd = os.open(filler, os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, os.statvfs(small_disk).f_bfree * 4096)
    os.close(fd)
    assert os.statvfs(small_disk).f_bfree == 0
    clock = Clock()
    one = janitor(root, clock, reserve=100 << 10, margin_bytes=64 << 10)
    report = one.run_once()
    assert any("No space" in problem for problem in report.problems)
    assert report.segments_removed == 1
    clock.tick(40)
    for _ in range(3):
        one.run_once()
        clock.tick(40)
    assert os.statvfs(small_disk).f_bfree * 4096 >= 100 << 10
    filler.unlink()
    driver = open_driver(target=FilesystemTarget(root), size=64 << 10)
    outcomes = driver.load(range(12))
    assert outcomes[:4] == [MISSING] * 4
    assert set(outcomes) == {OK, MISSING}
    assert verified(root) == outcomes.count(OK)


def test_a_tombstone_of_an_impossible_slot_makes_no_giant_bitmap(
    root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 2), namespace)
    (name,) = names(root, "segment")
    tombs = np.zeros(2, dtype=ENTRY)
    tombs["kind"] = KIND_TOMBSTONE
    tombs["payload_checksum"] = np.void(bytes.fromhex(name[:32]))
    tombs["slot"] = [1, (1 << 32) - 1]
    writer = FilesystemTarget(root).writer(namespace)
    writer.bury(tombs)
    writer.close()
    clock = Clock()
    run_until_quiet(janitor(root, clock), clock, 3)
    (bitmap,) = root.glob("*/*.dead")
    assert bitmap.stat().st_size < 5000
    assert verified(root) == 1


def test_the_directory_goes_away_underneath(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    one = janitor(root, Clock(), capacity=SIZE)

    def remove(step: str) -> None:
        if step == "evict":
            subprocess.run(["rm", "-rf", str(root)], check=True)

    one.estate.on_step = remove
    one.run_once()
    one.estate.on_step = None
    assert one.run_once().used_after == 0


def test_preallocated_tails_of_ended_writers_are_trimmed(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    (segment,) = root.glob("*/*.segment")
    fd = os.open(segment, os.O_RDWR)
    os.posix_fallocate(fd, 0, 16 << 20)
    os.close(fd)
    assert janitor(root, Clock()).run_once().trimmed_bytes >= 14 << 20
    assert segment.stat().st_blocks * 512 <= 5 * SIZE
    assert verified(root) == 4


def test_usage_is_published(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    writer = write(root, chain(10, 4), namespace, size=SIZE)
    report = janitor(root, Clock()).run_once()
    usage = json.loads((root / "usage.json").read_bytes())
    assert usage["used"] == report.used_after == FilesystemTarget(root).usage().used
    assert usage["settled"] <= usage["used"] - 4 * SIZE
    writer.close()


def test_punching_refuses_what_is_no_file_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="descriptor"):
            punch_hole(fd, 0, 4096)
    finally:
        os.close(fd)


def test_policy_defaults_leave_readers_time() -> None:
    # Readers look at bitmaps every 2 s.
    assert JanitorPolicy().grace_s >= 10
