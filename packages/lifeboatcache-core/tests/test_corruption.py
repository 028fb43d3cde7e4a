"""Damaged files: a counted miss, never wrong bytes, healed by storing again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lifeboat_cache.format.bitmap import set_dead
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES, parse_entries, seal_entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.targets.segment_reader import SegmentReader
from lifeboat_cache.targets.segment_writer import SegmentWriter
from lifeboat_cache.testing import StoreDriver, flip_byte, sample_keys

Open = Callable[..., StoreDriver]

OK, CORRUPT, MISSING = Outcome.OK, Outcome.CORRUPT, Outcome.MISSING
HIT, MISS = Lookup.HIT, Lookup.MISS


def the_file(root: Path, kind: str) -> Path:
    (found,) = root.glob(f"*/*.{kind}")
    return found


def entries_of(journal: Path) -> np.ndarray:
    data = journal.read_bytes()[HEADER_BYTES:]
    return np.frombuffer(data[: len(data) // ENTRY_BYTES * ENTRY_BYTES], dtype=ENTRY)


def stored(open_driver: Open, count: int = 3, **options: int) -> None:
    """Blocks 0 … count-1 by a writer that is dead afterwards."""
    driver = open_driver(**options)
    assert driver.store(range(count)) == [OK] * count
    assert driver.block_store.close()


# Payloads -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [8192, 5000, 1])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_flipped_byte_is_corrupt_once_and_a_miss_from_then_on(
    open_driver: Open, root: Path, size: int, where: float
) -> None:
    stored(open_driver, size=size)
    entry = entries_of(the_file(root, "journal"))[1]
    flip_byte(the_file(root, "segment"), int(entry["offset"]) + int(where * (size - 1)), 0x01)

    driver = open_driver(size=size)
    assert driver.lookup(range(3)) == [HIT] * 3
    assert driver.load(range(3)) == [OK, CORRUPT, OK]
    assert driver.lookup(range(3)) == [HIT, MISS, HIT]
    assert driver.load(range(3)) == [OK, MISSING, OK]
    assert driver.block_store.counters().load_outcomes == {"ok": 4, "corrupt": 1, "missing": 1}
    assert driver.block_store.close()

    again = open_driver(size=size)
    assert again.lookup(range(3)) == [HIT, MISS, HIT]
    assert again.store(range(3)) == [Outcome.PRESENT, OK, Outcome.PRESENT]
    assert again.load(range(3)) == [OK] * 3
    assert again.block_store.close()
    assert open_driver(size=size).load(range(3)) == [OK] * 3


def test_damage_found_by_one_process_is_a_miss_in_the_others(
    open_driver: Open, start_process: Callable[..., Any], root: Path
) -> None:
    stored(open_driver)
    before = start_process()
    assert before.ask("lookup", range(3)) == ["HIT"] * 3
    flip_byte(the_file(root, "segment"), HEADER_BYTES)
    driver = open_driver()
    assert driver.load(range(3)) == [CORRUPT, OK, OK]
    after = start_process()
    assert after.ask("lookup", range(3)) == ["MISS", "HIT", "HIT"]
    assert after.ask("load", range(3)) == ["MISSING", "OK", "OK"]
    assert driver.store([0]) == [OK]
    for process in (before, after):
        # They follow: first the tombstone, then the new record.
        give_up = time.monotonic() + 60
        while process.ask("load", range(3)) != ["OK"] * 3:
            assert time.monotonic() < give_up


def test_every_byte_of_a_payload_is_covered(open_driver: Open, root: Path) -> None:
    size = 40
    stored(open_driver, count=size, size=size)
    for number, entry in enumerate(entries_of(the_file(root, "journal"))):
        flip_byte(the_file(root, "segment"), int(entry["offset"]) + number, 1 << number % 8)
    assert open_driver(size=size).load(range(size)) == [CORRUPT] * size


def test_damage_while_the_store_is_open(open_driver: Open, root: Path) -> None:
    driver = open_driver()
    assert driver.store(range(3)) == [OK] * 3
    assert driver.load(range(3)) == [OK] * 3
    flip_byte(the_file(root, "segment"), int(entries_of(the_file(root, "journal"))[2]["offset"]))
    assert driver.load(range(3)) == [OK, OK, CORRUPT]
    assert driver.store(range(3)) == [Outcome.PRESENT, Outcome.PRESENT, OK]
    assert driver.load(range(3)) == [OK] * 3


def test_damage_in_one_piece_of_many(open_driver: Open, root: Path) -> None:
    driver = open_driver(size=12_288, cuts=(1, 4096, 4097))
    assert driver.store(range(2)) == [OK] * 2
    flip_byte(the_file(root, "segment"), HEADER_BYTES + 4096)
    assert driver.load(range(2)) == [CORRUPT, OK]


def test_payloads_swapped_between_keys(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    first, _, third = entries_of(the_file(root, "journal"))
    segment = the_file(root, "segment")
    data = bytearray(segment.read_bytes())
    one = slice(int(first["offset"]), int(first["offset"]) + 8192)
    other = slice(int(third["offset"]), int(third["offset"]) + 8192)
    data[one], data[other] = data[other], data[one]
    segment.write_bytes(bytes(data))
    assert open_driver().load(range(3)) == [CORRUPT, OK, CORRUPT]


def reseal(journal: Path, entries: np.ndarray, namespace: Namespace) -> None:
    """Write entries with right checksums of their own, as a bug or an attacker might."""
    data = journal.read_bytes()
    header = FileHeader.unpack(data, MAGIC_JOURNAL)
    sealed = seal_entries(entries, header.writer, 0, namespace.digest)
    journal.write_bytes(data[:HEADER_BYTES] + sealed)


@pytest.mark.parametrize("field", ["key", "layout", "raw_length"])
def test_record_that_claims_to_be_another(
    open_driver: Open, root: Path, namespace: Namespace, field: str
) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    entries = entries_of(journal).copy()
    number, size, layout = 1, 8192, 0
    if field == "key":
        entries["key"][1] = np.void(sample_keys([77])[0])
        number = 77
    elif field == "layout":
        entries["layout"][1] = layout = 9
    else:
        entries["raw_length"][1] = entries["stored_length"][1] = size = 4096
    reseal(journal, entries, namespace)
    assert open_driver(size=size, layout=layout).load([number]) == [CORRUPT]


@pytest.mark.parametrize(("field", "value"), [("codec", 9), ("algorithm", 9), ("kind", 9)])
def test_records_of_a_later_release_are_a_miss_that_can_be_stored(
    open_driver: Open, root: Path, namespace: Namespace, field: str, value: int
) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    entries = entries_of(journal).copy()
    entries[field][1] = value
    reseal(journal, entries, namespace)
    before = journal.read_bytes()
    driver = open_driver()
    assert driver.block_store.counters().bad_entries == 0
    assert driver.lookup(range(3)) == [HIT, MISS, HIT]
    assert driver.load(range(3)) == [OK, MISSING, OK]
    assert driver.store(range(3)) == [Outcome.PRESENT, OK, Outcome.PRESENT]
    assert driver.load(range(3)) == [OK] * 3
    assert driver.block_store.close()
    assert journal.read_bytes() == before
    assert open_driver().load(range(3)) == [OK] * 3


def test_records_copied_to_another_namespace(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    other = Namespace.from_identity({"engine": "test", "model": "other"})
    shutil.copytree(root / namespace.directory, root / other.directory)
    assert open_driver(of=other).lookup(range(3)) == [MISS] * 3

    # Even with headers and entries that fit, the payloads do not belong there.
    shutil.rmtree(root / other.directory)
    shutil.copytree(root / namespace.directory, root / other.directory)
    (root / other.directory / "namespace.json").write_text(other.to_json())
    for path in (root / other.directory).iterdir():
        if path.suffix in (".journal", ".segment"):
            magic = MAGIC_JOURNAL if path.suffix == ".journal" else MAGIC_SEGMENT
            data = path.read_bytes()
            was = FileHeader.unpack(data, magic)
            header = FileHeader(magic, other.digest, was.writer, was.segment, was.created)
            path.write_bytes(header.pack() + data[HEADER_BYTES:])
    (journal,) = (root / other.directory).glob("*.journal")
    reseal(journal, entries_of(journal).copy(), other)
    assert open_driver(of=other).load(range(3)) == [CORRUPT] * 3


# Segments -----------------------------------------------------------------------


def test_flipped_byte_in_a_segment_header(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "segment"), 50)
    driver = open_driver()
    assert driver.load(range(3)) == [CORRUPT] * 3
    assert driver.lookup(range(3)) == [MISS] * 3
    assert driver.store(range(3)) == [OK] * 3
    assert driver.load(range(3)) == [OK] * 3
    assert driver.block_store.close()
    assert open_driver().load(range(3)) == [OK] * 3


def test_segment_of_a_newer_format_is_missing_and_left_alone(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    segment = the_file(root, "segment")
    data = bytearray(segment.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    segment.write_bytes(bytes(data))
    driver = open_driver()
    assert driver.load(range(3)) == [MISSING] * 3
    assert driver.block_store.counters().load_outcomes == {"missing": 3}
    assert driver.block_store.close()
    assert segment.read_bytes() == bytes(data)
    # No tombstones either: the newer release can still use its records.
    assert len(list(root.glob("*/*.journal"))) == 1


@pytest.mark.parametrize("left", [0, 100, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 12_289])
def test_cut_segment(open_driver: Open, root: Path, left: int) -> None:
    stored(open_driver)
    segment = the_file(root, "segment")
    whole = max(0, (left - HEADER_BYTES) // 8192)

    driver = open_driver()
    os.truncate(segment, left)
    assert driver.load(range(3)) == [OK] * whole + [MISSING] * (3 - whole)
    assert driver.lookup(range(3)) == [HIT] * whole + [MISS] * (3 - whole)
    assert driver.block_store.close()

    again = open_driver()
    assert again.lookup(range(3)) == [HIT] * whole + [MISS] * (3 - whole)
    assert again.load(range(3)) == [OK] * whole + [MISSING] * (3 - whole)
    assert again.store(range(whole, 3)) == [OK] * (3 - whole)
    assert again.block_store.close()
    assert open_driver().load(range(3)) == [OK] * 3


def test_removed_segment(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    driver = open_driver()
    the_file(root, "segment").unlink()
    assert driver.load(range(3)) == [MISSING] * 3
    assert driver.lookup(range(3)) == [MISS] * 3
    assert driver.block_store.close()
    again = open_driver()
    assert again.lookup(range(3)) == [MISS] * 3
    assert again.block_store.counters().bad_entries == 0
    assert again.store(range(3)) == [OK] * 3
    assert again.load(range(3)) == [OK] * 3


# Journals -----------------------------------------------------------------------


def polled(root: Path, namespace: Namespace) -> tuple[list[bytes], int]:
    """Keys and bad entries that a fresh reader finds."""
    reader = SegmentReader(root / namespace.directory, namespace, direct=False)
    pages = list(reader.poll())
    keys = [key for page in pages for key in page.entries["key"].tolist()]
    return keys, sum(page.bad for page in pages)


def test_every_flipped_byte_of_an_entry_costs_that_entry_only(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    keys = sample_keys(range(3))
    for at in range(ENTRY_BYTES):
        offset = HEADER_BYTES + ENTRY_BYTES + at
        flip_byte(journal, offset, 1 << at % 8)
        assert polled(root, namespace) == ([keys[0], keys[2]], 1)
        flip_byte(journal, offset, 1 << at % 8)
    assert polled(root, namespace) == (keys, 0)


def test_bad_entry_is_counted_and_healed(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "journal"), HEADER_BYTES + ENTRY_BYTES)
    driver = open_driver()
    assert driver.block_store.counters().bad_entries == 1
    assert driver.lookup(range(3)) == [HIT, MISS, HIT]
    assert driver.store(range(3)) == [Outcome.PRESENT, OK, Outcome.PRESENT]
    assert driver.block_store.close()
    assert open_driver().load(range(3)) == [OK] * 3


def test_entries_at_another_index_are_bad(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    data = journal.read_bytes()
    entries = [data[HEADER_BYTES + n * ENTRY_BYTES :][:ENTRY_BYTES] for n in range(3)]
    journal.write_bytes(data[:HEADER_BYTES] + entries[1] + entries[0] + entries[2] + entries[2])
    assert polled(root, namespace) == (sample_keys([2]), 3)


@pytest.mark.parametrize("at", [0, 8, 12, 16, 48, 64, 72, 1000, HEADER_BYTES - 1])
def test_flipped_byte_in_a_journal_header(open_driver: Open, root: Path, at: int) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "journal"), at)
    driver = open_driver()
    assert driver.lookup(range(3)) == [MISS] * 3
    # A flip in the version cannot be told from a newer release.
    assert driver.block_store.counters().bad_entries == int(at != 8)
    assert driver.store(range(3)) == [OK] * 3
    assert driver.block_store.close()
    assert open_driver().load(range(3)) == [OK] * 3


@pytest.mark.parametrize("lost", [1, 60, 127])
def test_torn_tail_of_a_dead_writer_is_cut_and_counted_once(
    open_driver: Open, root: Path, namespace: Namespace, lost: int
) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    os.truncate(journal, journal.stat().st_size - lost)
    assert polled(root, namespace) == (sample_keys(range(2)), 1)
    reader = SegmentReader(root / namespace.directory, namespace, direct=False)
    assert [page.bad for page in reader.poll()] == [1]
    assert list(reader.poll()) == []
    driver = open_driver()
    assert driver.block_store.counters().bad_entries == 1
    assert driver.lookup(range(3)) == [HIT, HIT, MISS]
    assert driver.store(range(3)) == [Outcome.PRESENT, Outcome.PRESENT, OK]
    assert driver.block_store.close()
    assert open_driver().load(range(3)) == [OK] * 3


@pytest.mark.parametrize("tail", [bytes(1000), b"\xff" * 4096, bytes(range(256)) * 2 + b"x"])
def test_rubbish_at_the_end_of_a_journal(
    open_driver: Open, root: Path, namespace: Namespace, tail: bytes
) -> None:
    stored(open_driver)
    with the_file(root, "journal").open("ab") as file:
        file.write(tail)
    bad = -(-len(tail) // ENTRY_BYTES)
    assert polled(root, namespace) == (sample_keys(range(3)), bad)


@pytest.mark.parametrize("length", [0, 7, 8, 100, HEADER_BYTES - 1])
def test_journal_without_a_whole_header(
    open_driver: Open, root: Path, namespace: Namespace, length: int
) -> None:
    stored(open_driver)
    os.truncate(the_file(root, "journal"), length)
    assert polled(root, namespace) == ([], 1)
    driver = open_driver()
    assert driver.store(range(3)) == [OK] * 3
    assert driver.load(range(3)) == [OK] * 3


class LiveJournal:
    """The journal of a writer that lives, to be written by hand."""

    def __init__(self, root: Path, namespace: Namespace) -> None:
        directory = root / namespace.directory
        directory.mkdir(parents=True)
        self.writer = SegmentWriter(
            directory, namespace, direct=False, allowance=lambda wanted: None
        )
        self.path = directory / f"{self.writer.writer.hex()}.journal"
        self.reader = SegmentReader(directory, namespace, direct=False)
        # Tombstones are entries that need no segment.
        entries = np.zeros(6, dtype=ENTRY)
        entries["kind"] = 2
        entries["slot"] = range(6)
        self.sealed = seal_entries(entries, self.writer.writer, 0, namespace.digest)
        self.writer.bury(entries[:1])  # who has stored nothing leaves nothing

    def put(self, data: bytes) -> None:
        """Replace everything after the header."""
        with self.path.open("r+b") as file:
            file.truncate(HEADER_BYTES)
            file.seek(HEADER_BYTES)
            file.write(data)

    def die(self) -> None:
        """As a killed process does: its lock goes, and it tidies nothing up."""
        self.writer._alive.release()

    def poll(self) -> tuple[list[int], int]:
        pages = list(self.reader.poll())
        slots = [slot for page in pages for slot in page.entries["slot"].tolist()]
        return slots, sum(page.bad for page in pages)


def test_torn_tail_of_a_living_writer_is_not_there_yet(root: Path, namespace: Namespace) -> None:
    journal = LiveJournal(root, namespace)
    for done, length in (([0], 200), ([], 255), ([1], 256), ([2, 3], 4 * 128 + 1)):
        journal.put(journal.sealed[:length])
        assert journal.poll() == (done, 0)
    journal.die()
    assert journal.poll() == ([], 1)
    assert journal.poll() == ([], 0)


def test_bad_end_of_a_living_writer_is_judged_later(root: Path, namespace: Namespace) -> None:
    journal = LiveJournal(root, namespace)
    unfinished = journal.sealed[:256] + bytes(256)
    journal.put(unfinished)
    assert journal.poll() == ([0, 1], 0)
    assert journal.poll() == ([], 0)
    # Entry 2 turns out to be bad for good, because good ones follow it.
    journal.put(journal.sealed[:256] + bytes(128) + journal.sealed[384:512])
    assert journal.poll() == ([3], 1)
    journal.put(journal.sealed[:256] + bytes(128) + journal.sealed[384:])
    assert journal.poll() == ([4, 5], 0)
    journal.writer.close()


def test_bad_end_of_a_writer_that_died_is_counted(root: Path, namespace: Namespace) -> None:
    journal = LiveJournal(root, namespace)
    journal.put(journal.sealed[:256] + bytes(300))
    assert journal.poll() == ([0, 1], 0)
    journal.die()
    assert journal.poll() == ([], 3)
    assert journal.poll() == ([], 0)


def test_entries_finished_at_the_last_moment_are_not_lost(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = LiveJournal(root, namespace)
    journal.put(journal.sealed[:128] + bytes(128))

    def finishes_and_dies(directory: Path, writer: str) -> bool:
        journal.put(journal.sealed[:384])
        return False

    monkeypatch.setattr("lifeboat_cache.targets.journal_reader.writer_alive", finishes_and_dies)
    assert journal.poll() == ([0, 1, 2], 0)
    journal.writer.close()


def test_long_journal_of_a_living_writer_that_grows_while_it_is_read(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    size = 128
    driver = open_driver(size=size)
    assert driver.store(range(2048)) == [OK] * 2048
    reader = SegmentReader(root / namespace.directory, namespace, direct=False)
    pages = reader.poll()
    found = next(pages).entries["key"].tolist()
    assert driver.store(range(2048, 2100)) == [OK] * 52
    for page in pages:
        assert page.bad == 0
        found += page.entries["key"].tolist()
    assert sorted(found) == sorted(sample_keys(range(2100)))


# Bitmaps and access logs ----------------------------------------------------------


def bury_slots(root: Path, namespace: Namespace, slots: list[int]) -> Path:
    segment = the_file(root, "segment")
    writer = bytes.fromhex(segment.name[:32])
    path = segment.with_suffix(".dead")
    header = FileHeader(MAGIC_DEAD, namespace.digest, writer, 0, 1)
    path.write_bytes(header.pack() + set_dead(b"", slots))
    return path


def test_flipped_bits_of_a_dead_bitmap_never_make_a_wrong_block(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    bitmap = bury_slots(root, namespace, [1])
    assert polled(root, namespace)[0] == sample_keys([0, 2])
    # The janitor has reclaimed slot 1: nothing is left of its payload.
    with the_file(root, "segment").open("r+b") as file:
        file.seek(int(entries_of(the_file(root, "journal"))[1]["offset"]))
        file.write(bytes(8192))
    for at in (8, 40, 70, 90, HEADER_BYTES - 1, HEADER_BYTES):
        flip_byte(bitmap, at)
        driver = open_driver()
        outcomes = driver.load(range(3))
        assert outcomes[1] in (CORRUPT, MISSING)
        assert driver.block_store.close()
        flip_byte(bitmap, at)


def test_what_a_janitor_reclaimed_meanwhile_is_missing_and_not_corrupt(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    driver = open_driver()
    bury_slots(root, namespace, [1])
    with the_file(root, "segment").open("r+b") as file:
        file.seek(int(entries_of(the_file(root, "journal"))[1]["offset"]))
        file.write(bytes(8192))
    assert driver.load(range(3)) == [OK, MISSING, OK]
    assert driver.lookup(range(3)) == [HIT, MISS, HIT]
    assert driver.block_store.close()
    # Nothing had to be buried.
    assert len(list(root.glob("*/*.journal"))) == 1


@pytest.mark.parametrize("left", [0, 10, HEADER_BYTES])
def test_cut_dead_bitmap(open_driver: Open, root: Path, namespace: Namespace, left: int) -> None:
    stored(open_driver)
    os.truncate(bury_slots(root, namespace, [0, 1, 2]), left)
    assert open_driver().load(range(3)) == [OK] * 3


def test_bitmap_of_another_segment_is_not_believed(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    path = bury_slots(root, namespace, [0])
    header = FileHeader(MAGIC_DEAD, namespace.digest, bytes.fromhex(path.name[:32]), 5, 1)
    path.write_bytes(header.pack() + b"\xff")
    assert open_driver().load(range(3)) == [OK] * 3


def test_damaged_access_log_is_ignored(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    name = the_file(root, "journal").with_suffix(".access")
    for content in (b"", b"LBACCESS", os.urandom(5000), bytes(HEADER_BYTES + 33)):
        name.write_bytes(content)
        driver = open_driver()
        assert driver.load(range(3)) == [OK] * 3
        assert driver.block_store.close()


def test_damaged_namespace_document_does_not_cost_the_blocks(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    document = the_file(root, "json")
    text = document.read_bytes()
    for content in (b"", b"{", b"\xff\xfe\xfa", b"[]", b'{"digest": 1}', b"[" * 100_000):
        document.write_bytes(content)
        driver = open_driver()
        assert driver.load(range(3)) == [OK] * 3
        assert driver.delete([0]) == [True]
        assert driver.store([0]) == [OK]
        assert driver.block_store.target is not None
        assert len(driver.block_store.target.namespaces()) == 1
        assert driver.block_store.close()
        assert document.read_bytes() == text


def test_entries_parse_as_they_were_sealed(namespace: Namespace) -> None:
    entries = np.zeros(3, dtype=ENTRY)
    sealed = seal_entries(entries, bytes(16), 5, namespace.digest)
    assert parse_entries(sealed, bytes(16), 5, namespace.digest)[1] == 0
    assert parse_entries(sealed, bytes(16), 4, namespace.digest)[1] == 3
    assert parse_entries(sealed, bytes(15) + b"x", 5, namespace.digest)[1] == 3
    assert parse_entries(sealed, bytes(16), 5, bytes(32))[1] == 3
