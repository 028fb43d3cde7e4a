"""`check`: every fault is found, repaired, found no more; what is intact stays."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from lifeboat_cache.check import CheckReport, check_targets
from lifeboat_cache.check import journals as check_journals
from lifeboat_cache.check import payloads as check_payloads
from lifeboat_cache.format.bitmap import set_dead
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    FileHeader,
)
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES, parse_entries, seal_entries
from lifeboat_cache.index_answers import Touched
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.records import access_entries
from lifeboat_cache.targets.direct import read_into
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.writer_lock import WriterLock
from lifeboat_cache.testing import StoreDriver, flip_byte

Open = Callable[..., StoreDriver]

OK, PRESENT = Outcome.OK, Outcome.PRESENT
HIT, MISS = Lookup.HIT, Lookup.MISS


@dataclass(frozen=True)
class Place:
    """A target to check."""

    path: Path
    name: str = "local"
    direct_io: Literal["auto", "on", "off"] = "auto"


def check(root: Path, **options: Any) -> CheckReport:
    return check_targets([Place(root)], **options)


def found(report: CheckReport, level: str = "") -> list[str]:
    return [
        finding.kind
        for target in report.targets
        for finding in target.all_findings()
        if level in ("", finding.level)
    ]


def stored(open_driver: Open, count: int = 3, first: int = 0, **options: Any) -> None:
    """Blocks by a writer that is dead afterwards."""
    driver = open_driver(**options)
    numbers = range(first, first + count)
    assert driver.store(numbers) == [OK] * count
    assert driver.block_store.close()


def the_file(root: Path, kind: str) -> Path:
    (path,) = root.glob(f"*/*.{kind}")
    return path


def entries_of(journal: Path) -> np.ndarray:
    data = journal.read_bytes()[HEADER_BYTES:]
    return np.frombuffer(data, dtype=ENTRY, count=len(data) // ENTRY_BYTES)


def reseal(journal: Path, entries: np.ndarray, namespace: Namespace) -> None:
    data = journal.read_bytes()
    header = FileHeader.unpack(data, MAGIC_JOURNAL)
    sealed = seal_entries(entries, header.writer, 0, namespace.digest)
    journal.write_bytes(data[:HEADER_BYTES] + sealed)


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def repaired(root: Path, *kinds: str, level: str = "fault") -> CheckReport:
    """Check that a plain check finds it and changes nothing, and that one repair is enough."""
    before = snapshot(root)
    first = check(root)
    assert found(first) == list(kinds)
    assert first.status == ("faulty" if level == "fault" else "ok")
    assert snapshot(root) == before
    report = check(root, repair=True)
    assert found(report) == list(kinds)
    assert all(f.repaired and not f.remedy for t in report.targets for f in t.all_findings())
    assert report.status == ("repaired" if level == "fault" else "ok")
    assert found(check(root)) == []
    after = snapshot(root)
    again = check(root, repair=True)
    assert found(again) == []
    assert again.status == "ok"
    assert snapshot(root) == after
    return report


# Nothing wrong ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5000, 8192, 9 << 20])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_an_intact_store(
    open_driver: Open, root: Path, size: int, direct_io: Literal["auto", "off"]
) -> None:
    stored(open_driver, size=size)
    stored(open_driver, first=3, count=2, size=size)
    shown: list[tuple[int, int]] = []
    report = check_targets(
        [Place(root, direct_io=direct_io)], show=lambda *a: shown.append(a), threads=2
    )
    (namespace,) = report.targets[0].namespaces
    assert report.status == "ok"
    assert namespace.records.verified == 5
    assert namespace.verified_bytes == 5 * size
    assert (namespace.writers, namespace.alive) == (2, 0)
    assert all(0 <= done <= total for done, total in shown)
    assert not report.interrupted


def test_what_is_not_there_is_not_made(root: Path) -> None:
    report = check(root, repair=True)
    assert report.status == "ok"
    assert not root.exists()


def test_many_pages_and_runs(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_journals, "_PAGE_ENTRIES", 7)
    monkeypatch.setattr(check_payloads, "_READ_BYTES", 16 << 10)
    monkeypatch.setattr(check_payloads, "_RUN_BYTES", 100_000)
    stored(open_driver, count=40, size=20_000)
    segment = the_file(root, "segment")
    entries = entries_of(the_file(root, "journal"))
    bad = [0, 6, 7, 20, 21, 22, 39]
    for number in bad:
        flip_byte(segment, int(entries["offset"][number]) + 19_999, 0x40)
    report = repaired(root, "record-corrupt")
    assert report.targets[0].namespaces[0].records.bad == len(bad)
    assert report.targets[0].namespaces[0].records.verified == 40 - len(bad)
    expected = [MISS if number in bad else HIT for number in range(40)]
    assert open_driver(size=20_000).lookup(range(40)) == expected


# Records ------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 4096, 8191])
def test_flipped_payload_byte(open_driver: Open, root: Path, where: int) -> None:
    stored(open_driver)
    offset = int(entries_of(the_file(root, "journal"))["offset"][1])
    flip_byte(the_file(root, "segment"), offset + where, 0x01)
    repaired(root, "record-corrupt")
    driver = open_driver()
    assert driver.lookup(range(3)) == [HIT, MISS, HIT]
    assert driver.load([0, 2]) == [OK, OK]
    assert driver.store(range(3)) == [PRESENT, OK, PRESENT]
    assert driver.block_store.close()
    assert check(root).status == "ok"


@pytest.mark.parametrize("field", ["key", "layout", "raw_length"])
def test_record_that_claims_to_be_another(
    open_driver: Open, root: Path, namespace: Namespace, field: str
) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    entries = entries_of(journal).copy()
    if field == "key":
        entries["key"][1] = np.void(b"k" * 32)
    elif field == "layout":
        entries["layout"][1] = 9
    else:
        entries["raw_length"][1] = 4096
    reseal(journal, entries, namespace)
    repaired(root, "record-corrupt")
    assert open_driver().load([0, 2]) == [OK, OK]


def test_truncated_segment(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    os.truncate(the_file(root, "segment"), HEADER_BYTES + 8192 + 100)
    report = repaired(root, "record-misplaced")
    assert report.targets[0].namespaces[0].records.bad == 2
    assert open_driver().lookup(range(3)) == [HIT, MISS, MISS]


def test_records_of_a_later_release_are_counted_and_left(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    entries = entries_of(journal).copy()
    entries["codec"][0], entries["algorithm"][1], entries["kind"][2] = 9, 9, 9
    reseal(journal, entries, namespace)
    before = snapshot(root)
    report = check(root, repair=True)
    assert report.status == "ok"
    assert report.targets[0].namespaces[0].records.unknown == 3
    assert snapshot(root) == before


def test_dead_records_are_not_read(open_driver: Open, root: Path, namespace: Namespace) -> None:
    driver = open_driver()
    assert driver.store(range(3)) == [OK] * 3
    assert driver.delete([0]) == [True]
    assert driver.block_store.close()
    segment = the_file(root, "segment")
    entries = entries_of(the_file(root, "journal"))
    header = FileHeader.unpack(the_file(root, "journal").read_bytes(), MAGIC_JOURNAL)
    bitmap = FileHeader(MAGIC_DEAD, namespace.digest, header.writer, 0, 0).pack()
    segment.with_suffix(".dead").write_bytes(bitmap + set_dead(b"", [1]))
    for number in (0, 1):
        flip_byte(segment, int(entries["offset"][number]))
    report = check(root, repair=True)
    assert found(report) == []
    records = report.targets[0].namespaces[0].records
    assert (records.dead, records.verified) == (2, 1)


def test_unreadable_record_is_said_and_kept(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(open_driver)
    offset = int(entries_of(the_file(root, "journal"))["offset"][1])
    read = read_into

    def broken(fd: int, pieces: Any, at: int) -> int:
        if at <= offset < at + sum(piece.nbytes for piece in pieces):
            raise OSError(5, "Input/output error")
        return read(fd, pieces, at)

    monkeypatch.setattr(check_payloads, "read_into", broken)
    report = check(root, repair=True)
    assert found(report) == ["record-unreadable"]
    assert report.status == "faulty"
    records = report.targets[0].namespaces[0].records
    assert (records.verified, records.unreadable) == (2, 1)
    monkeypatch.undo()
    assert open_driver().load(range(3)) == [OK] * 3


# Journals -----------------------------------------------------------------------


def test_bad_journal_entry(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "journal"), HEADER_BYTES + ENTRY_BYTES + 50)
    repaired(root, "journal-entry")
    driver = open_driver()
    assert driver.block_store.counters().bad_entries == 0
    assert driver.lookup(range(3)) == [HIT, MISS, HIT]
    assert driver.load([0, 2]) == [OK, OK]


def test_torn_tail_is_a_leftover(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    with the_file(root, "journal").open("ab") as file:
        file.write(b"x" * 50)
    repaired(root, "journal-tail", level="leftover")
    assert open_driver().load(range(3)) == [OK] * 3


@pytest.mark.parametrize("offset", [0, 12, 20, 60, 4090])
def test_damaged_journal_header(open_driver: Open, root: Path, offset: int) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "journal"), offset)
    repaired(root, "journal-header")
    assert open_driver().load(range(3)) == [OK] * 3


def test_journal_of_which_nothing_is_left(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    journal.write_bytes(journal.read_bytes()[:100])
    repaired(root, "journal-header", "segment-orphaned", "ended-writer")
    assert sorted(p.name for p in root.glob("*/*")) == ["namespace.json"]


def test_journal_that_is_somebody_elses_is_left_with_its_segments(
    open_driver: Open, root: Path
) -> None:
    stored(open_driver)
    the_file(root, "journal").write_bytes(b"a diary" * 1000)
    before = snapshot(root)
    report = check(root, repair=True)
    assert found(report) == ["foreign-file"]
    assert report.status == "faulty"
    assert snapshot(root) == before


# Segments -----------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 12, 20, 60, 66, 4090])
def test_damaged_segment_header(open_driver: Open, root: Path, offset: int) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "segment"), offset)
    repaired(root, "segment-header")
    assert open_driver().load(range(3)) == [OK] * 3


def test_damaged_segment_header_and_a_bad_record(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "segment"), 60)
    flip_byte(the_file(root, "segment"), HEADER_BYTES)
    repaired(root, "record-corrupt", "segment-header")
    assert open_driver().lookup(range(3)) == [MISS, HIT, HIT]
    assert open_driver().load([1, 2]) == [OK, OK]


def test_segment_of_which_nothing_is_left(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    segment = the_file(root, "segment")
    segment.write_bytes(segment.read_bytes()[:16].ljust(40_000, b"?"))
    repaired(root, "record-corrupt", "segment-header", "ended-writer")
    assert sorted(p.name for p in root.glob("*/*")) == ["namespace.json"]


def test_segment_without_a_journal(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    stored(open_driver, first=3)
    (first, _) = sorted(root.glob("*/*.journal"))
    first.unlink()
    repaired(root, "segment-orphaned", "ended-writer")
    assert len(list(root.glob("*/*.segment"))) == 1
    assert len(list(root.glob("*/*.lock"))) == 1


def test_segment_that_no_entry_names(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    segment = the_file(root, "segment")
    other = segment.with_name(segment.name.replace("00000000", "00000007"))
    shutil.copy(segment, other)
    # As a process leaves it that is killed before the first entry.
    repaired(root, "segment-orphaned", level="leftover")
    assert not other.exists()
    assert open_driver().load(range(3)) == [OK] * 3


def test_foreign_segment_is_left(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    segment = the_file(root, "segment")
    other = segment.with_name(segment.name.replace("00000000", "00000007"))
    other.write_bytes(b"holiday" * 3000)
    report = check(root, repair=True)
    assert found(report) == ["foreign-file"]
    assert other.exists()


def test_journal_without_segments(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    the_file(root, "segment").unlink()
    report = repaired(root, "ended-writer", level="leftover")
    assert report.targets[0].namespaces[0].records.gone == 3


def test_tombstones_that_are_still_needed_stay(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    driver = open_driver()
    assert driver.delete([1]) == [True]
    assert driver.block_store.close()
    assert len(list(root.glob("*/*.journal"))) == 2
    assert found(check(root, repair=True)) == []
    assert len(list(root.glob("*/*.journal"))) == 2
    assert open_driver().lookup(range(3)) == [HIT, MISS, HIT]


# Other files --------------------------------------------------------------------


@pytest.mark.parametrize("offset", [9, 20, 60, 4090])
def test_damaged_dead_bitmap(
    open_driver: Open, root: Path, namespace: Namespace, offset: int
) -> None:
    stored(open_driver)
    header = FileHeader.unpack(the_file(root, "journal").read_bytes(), MAGIC_JOURNAL)
    bitmap = the_file(root, "segment").with_suffix(".dead")
    packed = FileHeader(MAGIC_DEAD, namespace.digest, header.writer, 0, 0).pack()
    bitmap.write_bytes(packed + set_dead(b"", [1]))
    flip_byte(bitmap, offset)
    if offset == 9:  # that is a newer format
        assert found(check(root, repair=True)) == ["newer-format"]
        return
    repaired(root, "dead-bitmap")
    assert open_driver().load(range(3)) == [OK] * 3


@pytest.mark.parametrize("offset", [60, HEADER_BYTES + 33])
def test_damaged_access_log(
    open_driver: Open, root: Path, namespace: Namespace, offset: int
) -> None:
    stored(open_driver)
    reader = FilesystemTarget(root).writer(namespace)
    places = Touched(*(np.array(part, dtype=np.uint32) for part in ([0] * 3, [0] * 3, range(3))))
    reader.log_access(access_entries([(places, 9)], lambda _: b"w" * 16))
    reader.close()
    log = the_file(root, "access")
    assert log.stat().st_size == HEADER_BYTES + 3 * 32
    flip_byte(log, offset)
    repaired(root, "access-log")
    assert log.stat().st_size == HEADER_BYTES + (3 if offset == 60 else 2) * 32


def test_stale_temporary_file(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    directory = the_file(root, "journal").parent
    young, old = directory / ".a.tmp", directory / ".b.tmp"
    for path in (young, old):
        path.write_bytes(b"x")
    aged = time.time() - 7200
    os.utime(old, (aged, aged))
    repaired(root, "temporary-file", level="leftover")
    assert young.exists()


@pytest.mark.parametrize("name", ["photo.jpg", "{}/photo.jpg", "{}/" + "0" * 32 + ".Journal"])
def test_foreign_file_is_said_and_left(
    open_driver: Open, root: Path, namespace: Namespace, name: str
) -> None:
    stored(open_driver)
    path = root / name.format(namespace.directory)
    path.write_bytes(b"not ours")
    for _ in range(2):
        report = check(root, repair=True)
        assert found(report) == ["foreign-file"]
        assert report.status == "faulty"
        assert "move it" in next(report.targets[0].all_findings()).remedy
    assert path.read_bytes() == b"not ours"


def test_links_are_not_followed(open_driver: Open, root: Path, tmp_path: Path) -> None:
    stored(open_driver)
    journal = the_file(root, "journal")
    link = journal.with_name("f" * 32 + ".segment".replace(".", ".00000000."))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    link.symlink_to(victim)
    assert found(check(root, repair=True)) == ["foreign-file"]
    assert victim.read_bytes() == b"precious"


# Documents ----------------------------------------------------------------------


def test_damaged_document_with_its_identity(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    document = root / namespace.directory / "namespace.json"
    document.write_text(document.read_text().replace(namespace.hex, "0" * 64))
    repaired(root, "namespace-document")
    assert Namespace.from_json(document.read_bytes()) == namespace
    assert open_driver().load(range(3)) == [OK] * 3


@pytest.mark.parametrize("text", ["{", None])
def test_damaged_document_is_known_from_another_target(
    open_driver: Open, root: Path, tmp_path: Path, namespace: Namespace, text: str | None
) -> None:
    stored(open_driver)
    other = tmp_path / "other"
    shutil.copytree(root, other)
    document = root / namespace.directory / "namespace.json"
    document.unlink()
    if text is not None:
        document.write_text(text)
    targets = [Place(root, "one"), Place(other, "two")]
    assert found(check_targets(targets)) == ["namespace-document"]
    assert check_targets(targets, repair=True).status == "repaired"
    assert found(check_targets(targets)) == []
    assert Namespace.from_json(document.read_bytes()) == namespace


def test_document_that_nobody_knows_is_said_with_the_remedy(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    document = root / namespace.directory / "namespace.json"
    document.write_text("{")
    report = check(root, repair=True)
    assert found(report) == ["namespace-document"]
    assert report.targets[0].namespaces[0].records.verified == 3
    assert "start an engine" in report.faults[0].remedy
    stored(open_driver, first=3)  # an engine that starts
    assert check(root).status == "ok"


def test_namespace_of_which_nobody_knows_whose_it_is(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    (root / namespace.directory / "namespace.json").unlink()
    for kind in ("journal", "segment"):
        flip_byte(the_file(root, kind), 20)
    before = snapshot(root)
    report = check(root, repair=True)
    assert found(report) == ["namespace-document"]
    assert f"purge --namespace {namespace.directory}" in report.faults[0].remedy
    assert report.targets[0].namespaces[0].digest is None
    assert snapshot(root) == before


@pytest.mark.parametrize("text", ["{", None])
def test_damaged_root_marker(open_driver: Open, root: Path, text: str | None) -> None:
    stored(open_driver)
    marker = root / "lifeboat-cache.json"
    whole = marker.read_bytes()
    marker.unlink()
    if text is not None:
        marker.write_text(text)
    repaired(root, "root-marker")
    assert marker.read_bytes() == whole
    assert open_driver().load(range(3)) == [OK] * 3


def test_root_marker_beside_foreign_files_is_left(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    (root / "lifeboat-cache.json").write_text("{")
    (root / "photo.jpg").write_bytes(b"x")
    report = check(root, repair=True)
    assert found(report) == ["root-marker", "foreign-file"]
    assert "make sure that" in report.faults[0].remedy
    assert (root / "lifeboat-cache.json").read_text() == "{"


def test_foreign_directory_is_a_problem(root: Path) -> None:
    root.mkdir()
    (root / "photo.jpg").write_bytes(b"x")
    report = check(root, repair=True)
    assert "holds other files" in report.targets[0].problem
    assert sorted(os.listdir(root)) == ["photo.jpg"]


# Newer formats ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["journal", "segment"])
def test_newer_formats_are_skipped_and_said(open_driver: Open, root: Path, kind: str) -> None:
    stored(open_driver)
    stored(open_driver, first=3)
    path = min(root.glob(f"*/*.{kind}"))
    flip_byte(path, 8, 0x02)
    flip_byte(min(root.glob("*/*.segment")), HEADER_BYTES)  # not judged either
    before = snapshot(root)
    report = check(root, repair=True)
    assert found(report) == ["newer-format"]
    assert report.status == "ok"
    records = report.targets[0].namespaces[0].records
    assert (records.verified, records.newer) == (3, 3 if kind == "segment" else 0)
    assert snapshot(root) == before


def test_nothing_of_a_writer_that_a_newer_release_went_on_with_is_changed(
    open_driver: Open, root: Path
) -> None:
    stored(open_driver)
    segment = the_file(root, "segment")
    for number in (1, 2):
        shutil.copy(
            segment, segment.with_name(segment.name.replace("00000000", f"0000000{number}"))
        )
    flip_byte(segment.with_name(segment.name.replace("00000000", "00000001")), 8, 0x02)
    flip_byte(segment, 60)
    flip_byte(the_file(root, "journal"), HEADER_BYTES)
    before = snapshot(root)
    report = check(root, repair=True)
    assert found(report) == ["newer-format", "journal-entry", "segment-header"]
    assert all("upgrade" in fault.remedy for fault in report.faults)
    assert snapshot(root) == before


def test_newer_root_is_skipped_and_said(open_driver: Open, root: Path) -> None:
    stored(open_driver)
    (root / "lifeboat-cache.json").write_text('{"format": 2}')
    flip_byte(the_file(root, "segment"), HEADER_BYTES)
    before = snapshot(root)
    report = check(root, repair=True)
    assert found(report) == ["newer-format"]
    assert report.status == "ok"
    assert "upgrade" in report.targets[0].findings[0].remedy
    assert snapshot(root) == before


# Living writers -----------------------------------------------------------------


def test_beside_a_living_engine_in_another_process(
    start_process: Callable[..., Any], root: Path
) -> None:
    engine = start_process()
    assert engine.ask("store", range(4)) == ["OK"] * 4
    other = start_process()
    assert other.ask("lookup", range(4)) == ["HIT"] * 4
    entries = entries_of(the_file(root, "journal"))
    flip_byte(the_file(root, "segment"), int(entries["offset"][1]) + 5)
    assert found(check(root)) == ["record-corrupt"]
    report = check(root, repair=True)
    assert report.status == "repaired"
    assert report.targets[0].namespaces[0].alive >= 1
    assert found(check(root)) == []
    for process in (engine, other):
        # They follow the tombstone.
        give_up = time.monotonic() + 60
        while process.ask("lookup", range(4)) != ["HIT", "MISS", "HIT", "HIT"]:
            assert time.monotonic() < give_up
    assert engine.ask("store", [1, 4]) == ["OK", "OK"]
    assert engine.ask("load", range(5)) == ["OK"] * 5
    assert found(check(root, repair=True)) == []
    assert engine.ask("load", range(5)) == ["OK"] * 5


def test_files_of_the_living_are_left(start_process: Callable[..., Any], root: Path) -> None:
    engine = start_process()
    assert engine.ask("store", range(3)) == ["OK"] * 3
    journal, segment = the_file(root, "journal"), the_file(root, "segment")
    other = segment.with_name(segment.name.replace("00000000", "00000001"))
    shutil.copy(segment, other)  # as one that it has just begun
    with journal.open("ab") as file:
        file.write(b"y" * 300)  # entries that it is just writing
    assert found(check(root, repair=True)) == []
    flip_byte(segment, 60)
    flip_byte(journal, HEADER_BYTES)
    before = snapshot(root)
    report = check(root, repair=True)
    assert found(report) == ["journal-entry", "segment-header"]
    assert report.status == "faulty"
    assert all("has ended" in fault.remedy for fault in report.faults)
    assert snapshot(root) == before
    engine.kill()
    assert check(root, repair=True).status == "repaired"
    assert found(check(root, repair=True)) == []
    assert not other.exists()


def test_while_engines_store_and_delete(start_process: Callable[..., Any], root: Path) -> None:
    engine = start_process()
    assert engine.ask("store", range(50)) == ["OK"] * 50
    stop = threading.Event()

    def work() -> None:
        number = 50
        while not stop.is_set():
            assert engine.ask("store", range(number, number + 20)) == ["OK"] * 20
            assert all(engine.ask("delete", range(number, number + 5)))
            number += 20

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(10):
            assert found(check(root, repair=True)) == []
    finally:
        stop.set()
        worker.join()
    assert engine.ask("load", range(50)) == ["OK"] * 50


def test_killed_engine(start_process: Callable[..., Any], root: Path) -> None:
    engine = start_process()
    assert engine.ask("store", range(3)) == ["OK"] * 3
    engine.kill()
    report = check(root, repair=True)
    assert report.status == "ok"
    assert found(report) == []


def test_writer_that_ended_before_it_stored_anything(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    stored(open_driver)
    lock = WriterLock(root / namespace.directory, b"w" * 16)
    assert found(check(root, repair=True)) == []
    lock.release()
    repaired(root, "ended-writer", level="leftover")


# Ending early -------------------------------------------------------------------


def test_stopped_before_the_end(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_payloads.Progress, "_EVERY_S", 0.0)
    monkeypatch.setattr(check_payloads, "_RUN_BYTES", 8192)
    stored(open_driver, count=40)
    flip_byte(the_file(root, "segment"), HEADER_BYTES)
    stop = threading.Event()

    def show(done: int, _total: int) -> None:
        if done:
            stop.set()

    report = check(root, stop=stop, threads=1, show=show)
    assert report.interrupted
    assert found(report) == ["record-corrupt"]
    records = report.targets[0].namespaces[0].records
    assert records.bad + records.verified < 40


@pytest.mark.parametrize("pages", [0, 1, 2, 3])
def test_stopped_while_journals_are_read(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    monkeypatch.setattr(check_journals, "_PAGE_ENTRIES", 1)
    monkeypatch.setattr("lifeboat_cache.targets.segment_writer.SEGMENT_BYTES", 8192)
    stored(open_driver, count=4)
    driver = open_driver()
    assert driver.delete([0]) == [True]
    assert driver.block_store.close()
    flip_byte(min(root.glob("*/*.segment")), HEADER_BYTES)
    before = snapshot(root)
    stop = threading.Event()
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > pages:
            stop.set()
        return parse_entries(*args)

    monkeypatch.setattr(check_journals, "parse_entries", counted)
    # What was not read yet is not taken for something that is not there.
    report = check(root, stop=stop, repair=True)
    assert report.interrupted
    assert found(report) == []
    assert snapshot(root) == before


def test_progress_ends_at_its_total(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_payloads.Progress, "_EVERY_S", 0.0)
    driver = open_driver()
    assert driver.store(range(6)) == [OK] * 6
    assert all(driver.delete([0, 1]))
    assert driver.block_store.close()
    shown: list[tuple[int, int]] = []
    check(root, show=lambda *args: shown.append(args))
    assert shown[-1] == (4 * 8192, 4 * 8192)
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)


def test_failed_repair_is_said(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(open_driver)
    flip_byte(the_file(root, "segment"), HEADER_BYTES)
    from lifeboat_cache.check import repair

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(repair, "SegmentWriter", full)
    report = check(root, repair=True)
    assert report.status == "faulty"
    assert "No space left on device" in report.faults[0].detail
    assert "free space" in report.faults[0].remedy
    monkeypatch.undo()
    repaired(root, "record-corrupt")


def test_writers_that_died_before_there_was_a_document(root: Path, namespace: Namespace) -> None:
    FilesystemTarget(root).probe()
    directory = root / namespace.directory
    directory.mkdir()
    for number in range(2):
        writer = bytes([number]) * 16
        header = FileHeader(MAGIC_JOURNAL, namespace.digest, writer, 0, 1).pack()
        (directory / f"{writer.hex()}.journal").write_bytes(header)
        (directory / f"{writer.hex()}.lock").write_text("{}")
    report = check(root)
    assert report.status == "ok"
    (directory / f"{(b'x' * 16).hex()}.00000000.segment").write_bytes(bytes(HEADER_BYTES))
    assert check(root).status == "faulty"
