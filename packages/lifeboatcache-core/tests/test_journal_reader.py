"""Following journals: what is read again, what is not, and what is told of what has gone."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.format.bitmap import set_dead
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import (
    ENTRY,
    ENTRY_BYTES,
    KIND_RECORD,
    KIND_TOMBSTONE,
    Entries,
    seal_entries,
)
from lifeboat_cache.targets import directory_listing, journal_reader
from lifeboat_cache.targets.base import Place
from lifeboat_cache.targets.journal_reader import JournalReader
from lifeboat_cache.targets.layout import segment_name
from lifeboat_cache.targets.segment_extents import SegmentExtents
from lifeboat_cache.targets.writer_lock import WriterLock

pytestmark = pytest.mark.usefixtures("both_kernels")

NAMESPACE = bytes(range(32))
SLOT_BYTES = 4096


class Files:
    """A namespace directory and what writers and janitors do there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.count: Counter[bytes] = Counter()

    def path(self, writer: bytes, kind: str = "journal", segment: int | None = None) -> Path:
        middle = "" if segment is None else f".{segment:08d}"
        return self.directory / f"{writer.hex()}{middle}.{kind}"

    def append(
        self, writer: bytes, slots: list[int], *, segment: int = 0, kind: int = KIND_RECORD
    ) -> None:
        """Journal records, and make room for them."""
        journal = self.path(writer)
        if not journal.exists():
            journal.write_bytes(FileHeader(MAGIC_JOURNAL, NAMESPACE, writer, 0, 1).pack())
        entries = np.zeros(len(slots), dtype=ENTRY)
        entries["kind"], entries["segment"], entries["slot"] = kind, segment, slots
        entries["offset"] = HEADER_BYTES + SLOT_BYTES * np.array(slots, dtype=np.int64)
        entries["stored_length"] = SLOT_BYTES
        with journal.open("ab") as file:
            file.write(seal_entries(entries, writer, self.count[writer], NAMESPACE))
        self.count[writer] += len(slots)
        if kind == KIND_RECORD:
            file_name = self.path(writer, "segment", segment)
            if not file_name.exists():
                header = FileHeader(MAGIC_SEGMENT, NAMESPACE, writer, segment, 1)
                file_name.write_bytes(header.pack())
            os.truncate(file_name, HEADER_BYTES + SLOT_BYTES * (max(slots) + 1))

    def mark_dead(self, writer: bytes, segment: int, slots: list[int]) -> None:
        """In place, as a janitor does; then it says so."""
        path = self.path(writer, "dead", segment)
        body = path.read_bytes()[HEADER_BYTES:] if path.exists() else b""
        header = FileHeader(MAGIC_DEAD, NAMESPACE, writer, segment, 1)
        path.write_bytes(header.pack() + set_dead(body, slots))

    def say_dead(self) -> None:
        made = self.directory / ".dead.generation.tmp"
        made.write_bytes(b"x")
        made.rename(self.directory / "dead.generation")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "ns")


@pytest.fixture
def reader(files: Files) -> JournalReader:
    return JournalReader(files.directory, NAMESPACE)


@pytest.fixture
def alive(files: Files) -> Iterator[Callable[[bytes], WriterLock]]:
    """Makes writers live."""
    locks: list[WriterLock] = []

    def begin(writer: bytes) -> WriterLock:
        locks.append(WriterLock(files.directory, writer))
        return locks[-1]

    yield begin
    for lock in locks:
        lock.release()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often files were opened and looked at, by the end of their names; listings too."""
    counted: Counter[str] = Counter()

    def count(name: str) -> None:
        inner = getattr(os, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            counted[f"{name} {Path(os.fspath(path)).suffix}"] += 1
            return inner(path, *arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("open", "stat", "listdir"):
        count(name)
    return counted


def writer(number: int) -> bytes:
    return number.to_bytes(16, "big")


def found(reader: JournalReader, skip: bytes | None = None) -> list[tuple[bytes, int, int]]:
    out = []
    for page in reader.poll(skip):
        assert page.bad == 0
        out += [(page.writer, int(e["segment"]), int(e["slot"])) for e in page.entries]
    return out


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES, HEADER_BYTES + SLOT_BYTES])
def test_what_is_dead_in_a_segment_that_is_being_removed_is_no_fault(
    files: Files, reader: JournalReader, size: int
) -> None:
    files.append(writer(1), [0, 1, 2])
    files.append(writer(1), [0], segment=1)
    files.mark_dead(writer(1), 0, [0, 1, 2])
    os.truncate(files.path(writer(1), "segment", 0), size)
    assert found(reader) == [(writer(1), 1, 0)]


def test_journals_of_dead_writers_are_read_once(
    files: Files, reader: JournalReader, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_listing, "_SETTLING_S", 0.0)
    for number in range(50):
        files.append(writer(number), [0, 1])
    assert len(found(reader)) == 100
    assert reader.complete
    assert found(reader) == []
    calls.clear()
    for _ in range(40):
        assert found(reader) == []
        assert reader.complete
    # Not even the directory is listed: nothing has changed there.
    assert calls == {"stat ": 40}


def test_journals_of_living_writers_are_looked_at_and_not_opened(
    files: Files,
    reader: JournalReader,
    alive: Callable[[bytes], WriterLock],
    calls: Counter[str],
) -> None:
    for number in range(3):
        alive(writer(number))
        files.append(writer(number), [0])
    assert len(found(reader)) == 3
    calls.clear()
    for _ in range(10):
        assert found(reader) == []
    assert calls["stat .journal"] == 30
    assert calls["open .journal"] == calls["open .lock"] == 0
    files.append(writer(1), [1, 2])
    assert found(reader) == [(writer(1), 0, 1), (writer(1), 0, 2)]
    assert calls["open .journal"] == 1
    # One whose growth the system hides is opened in the end.
    calls.clear()
    rounds = 0
    for _ in range(16):
        assert found(reader) == []
        rounds += reader.complete
    assert calls["open .journal"] == 3
    assert rounds == 1


def test_a_writer_that_dies_idle_is_noticed(
    files: Files,
    reader: JournalReader,
    alive: Callable[[bytes], WriterLock],
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_reader, "_FIRST_PROBE_S", 0.0)
    lock = alive(writer(1))
    files.append(writer(1), [0])
    assert len(found(reader)) == 1
    files.append(writer(1), [1])
    lock.release()
    assert len(found(reader)) == 1
    assert found(reader) == []
    calls.clear()
    assert found(reader) == []
    assert not [name for name in calls if "journal" in name or "lock" in name]


def test_files_are_open_one_at_a_time(files: Files, reader: JournalReader) -> None:
    for number in range(300):
        files.append(writer(number), [0])
        files.mark_dead(writer(number), 0, [5])
    before = len(os.listdir("/proc/self/fd"))
    worst = 0
    for _ in reader.poll():
        worst = max(worst, len(os.listdir("/proc/self/fd")) - before)
    for _ in reader.poll_dead():
        worst = max(worst, len(os.listdir("/proc/self/fd")) - before)
    assert worst <= 1


def test_a_journal_that_cannot_be_read_now_is_read_later(
    files: Files, reader: JournalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.append(writer(1), [0])
    files.append(writer(2), [0])
    failing = os.pread

    def fails(fd: int, length: int, at: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(files.path(writer(1)).name):
            raise OSError(5, "Input/output error")
        return failing(fd, length, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails)
        assert found(reader) == [(writer(2), 0, 0)]
        assert not reader.complete
    assert found(reader) == [(writer(1), 0, 0)]
    assert reader.complete


def test_a_poll_that_is_given_up_is_not_complete(files: Files, reader: JournalReader) -> None:
    for number in range(3):
        files.append(writer(number), [0])
    pages = reader.poll()
    next(pages)
    del pages
    assert not reader.complete
    assert len(found(reader)) == 2


# What has gone --------------------------------------------------------------------


def test_vanished_journals_and_segments_are_told(files: Files, reader: JournalReader) -> None:
    for number in range(3):
        files.append(writer(number), [0], segment=0)
        files.append(writer(number), [0], segment=1)
    assert len(found(reader)) == 6
    assert reader.take_vanished() == []
    # A purge takes the journal first; a janitor takes single segments.
    files.path(writer(1)).unlink()
    files.path(writer(1), "segment", 0).unlink()
    files.path(writer(2), "segment", 1).unlink()
    assert found(reader) == []
    assert sorted(reader.take_vanished(), key=str) == sorted(
        [(writer(1), None), (writer(2), 1)], key=str
    )
    assert reader.take_vanished() == []


def test_what_comes_back_is_read_anew(files: Files, reader: JournalReader) -> None:
    files.append(writer(1), [0, 1])
    assert len(found(reader)) == 2
    aside = files.directory.with_name("aside")
    files.directory.rename(aside)
    assert found(reader) == []
    assert reader.take_vanished() == [(writer(1), None)]
    aside.rename(files.directory)
    assert len(found(reader)) == 2
    shutil.rmtree(files.directory)
    assert found(reader) == []
    assert (writer(1), None) in reader.take_vanished()


def test_segments_of_the_own_writer_are_told_too(files: Files, reader: JournalReader) -> None:
    files.append(writer(1), [0])
    assert found(reader, writer(1)) == []
    files.path(writer(1), "segment", 0).unlink()
    assert found(reader, writer(1)) == []
    assert reader.take_vanished() == [(writer(1), 0)]


def test_directory_that_changes_twice_in_a_tick_is_listed_again(
    files: Files, reader: JournalReader
) -> None:
    files.append(writer(1), [0])
    stamp = time.time_ns()
    os.utime(files.directory, ns=(stamp, stamp))
    assert len(found(reader)) == 1
    files.append(writer(2), [0])
    os.utime(files.directory, ns=(stamp, stamp))
    assert len(found(reader)) == 1


# Dead bitmaps ---------------------------------------------------------------------


def told(reader: JournalReader) -> dict[tuple[bytes, int], list[int]]:
    return {
        (name, segment): np.flatnonzero(dead).tolist() for name, segment, dead in reader.poll_dead()
    }


def test_dead_bits_are_told_when_a_janitor_says_so(
    files: Files, reader: JournalReader, calls: Counter[str]
) -> None:
    for number in range(3):
        files.append(writer(number), [0, 1, 2])
    files.mark_dead(writer(0), 0, [1])
    assert (writer(0), 0, 1) not in found(reader)
    told(reader)
    calls.clear()
    for _ in range(5):
        assert told(reader) == {}
    assert calls == {"stat .generation": 5}
    files.mark_dead(writer(1), 0, [2])
    assert told(reader) == {}
    files.say_dead()
    assert told(reader)[writer(1), 0] == [2]
    assert told(reader) == {}
    # In place and at once: the bitmap's size and time of change may be the same.
    files.mark_dead(writer(1), 0, [0])
    files.say_dead()
    assert told(reader)[writer(1), 0] == [0, 2]


def test_bitmaps_that_are_as_they_were_are_not_told_again(
    files: Files, reader: JournalReader
) -> None:
    for number in range(2):
        files.append(writer(number), [0, 1, 2])
        files.mark_dead(writer(number), 0, [1])
        os.utime(files.path(writer(number), "dead", 0), (1, 1))
    assert len(found(reader)) == 4
    # All records were held against them.
    assert told(reader) == {}
    files.mark_dead(writer(1), 0, [2])
    files.say_dead()
    assert told(reader) == {(writer(1), 0): [1, 2]}


def test_bits_are_told_although_later_records_were_held_against_them(
    files: Files, reader: JournalReader, alive: Callable[[bytes], WriterLock]
) -> None:
    alive(writer(1))
    files.append(writer(1), [0, 1])
    assert len(found(reader)) == 2
    assert told(reader) == {}
    files.mark_dead(writer(1), 0, [0])
    os.utime(files.path(writer(1), "dead", 0), (1, 1))
    files.append(writer(1), [2])
    assert len(found(reader)) == 1
    assert reader.declared_dead([Place(writer(1), 0, 0, 1)] * 3, [0, 1, 99]) == [True, False, False]
    files.say_dead()
    assert told(reader) == {(writer(1), 0): [0]}


# Places ---------------------------------------------------------------------------


def expected_placed(
    entries: Entries, sizes: dict[int, int], dead: dict[int, list[int]]
) -> tuple[list[int], int]:
    """One entry after the other, as the format's page says it."""
    kept, misplaced = [], 0
    for entry in entries:
        segment, offset = int(entry["segment"]), int(entry["offset"])
        if entry["kind"] == KIND_TOMBSTONE:
            kept.append(int(entry["parent"]))
        elif entry["kind"] == KIND_RECORD and sizes.get(segment):
            length = int(entry["stored_length"])
            inside = (
                offset >= 4096
                and offset % 4096 == 0
                and (offset + length <= sizes[segment] or not length)
            )
            if int(entry["slot"]) in dead.get(segment, ()):
                continue
            misplaced += not inside
            if inside:
                kept.append(int(entry["parent"]))
    return kept, misplaced


lines = st.lists(
    st.tuples(
        st.sampled_from([KIND_RECORD, KIND_RECORD, KIND_RECORD, KIND_TOMBSTONE, 9]),
        st.integers(0, 4),
        st.sampled_from([0, 4096, 8192, 12_288, 12_289, 1 << 40, 2**64 - 4096]),
        st.sampled_from([0, 1, 4096, 4097, 2**32 - 1]),
        st.sampled_from([0, 1, 2, 7, 8, 9, 2**32 - 1]),
    ),
    max_size=30,
)
sizes_of_segments = st.dictionaries(
    st.integers(0, 4), st.sampled_from([0, 100, 8192, 12_288, 1 << 33]), max_size=5
)
dead_of_segments = st.dictionaries(
    st.integers(0, 4), st.lists(st.sampled_from([0, 1, 2, 8, 9]), min_size=1), max_size=4
)


@given(lines, sizes_of_segments, dead_of_segments)
def test_records_are_held_against_their_segments(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[int, ...]],
    sizes: dict[int, int],
    dead: dict[int, list[int]],
) -> None:
    files = Files(tmp_path_factory.mktemp("ns"))
    own = writer(7)
    entries = np.zeros(len(lines), dtype=ENTRY)
    for at, (kind, segment, offset, length, slot) in enumerate(lines):
        entries[at]["kind"], entries[at]["segment"], entries[at]["slot"] = kind, segment, slot
        entries[at]["offset"], entries[at]["stored_length"] = offset, length
        entries[at]["parent"] = at
    for segment, size in sizes.items():
        path = files.directory / segment_name(own.hex(), segment)
        path.touch()
        os.truncate(path, size)
    for segment, slots in dead.items():
        files.mark_dead(own, segment, slots)
    extents = SegmentExtents(files.directory, NAMESPACE, {(own.hex(), s) for s in dead})
    extents.begin(own, whole=True)
    kept, misplaced = extents.placed(entries)
    assert (kept["parent"].tolist(), misplaced) == expected_placed(entries, sizes, dead)


def test_a_segment_that_grows_while_its_journal_is_read(files: Files) -> None:
    own = writer(7)
    extents = SegmentExtents(files.directory, NAMESPACE, set())
    extents.begin(own, whole=True)
    files.append(own, [0])
    entries = np.frombuffer(files.path(own).read_bytes()[HEADER_BYTES:], dtype=ENTRY)
    assert extents.placed(entries)[1] == 0
    files.append(own, [5])
    later = np.frombuffer(files.path(own).read_bytes()[HEADER_BYTES + ENTRY_BYTES :], dtype=ENTRY)
    kept, misplaced = extents.placed(later)
    assert (kept["slot"].tolist(), misplaced) == ([5], 0)
