"""Verifying the records of a surveyed namespace, and burying bad ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.check.journals import Journal, codes, pages
from lifeboat_cache.check.payloads import Payload, Verdict, Verifier, runs
from lifeboat_cache.check.repair import Undertaker, put_header, remove_files
from lifeboat_cache.check.report import RUN_REPAIR, Finding, Level
from lifeboat_cache.check.survey import Survey, Writer
from lifeboat_cache.checksum import ALGORITHM_KEYED_BLAKE3, Binding
from lifeboat_cache.errors import ForeignDataError, FormatError, NewerFormatError
from lifeboat_cache.format.bitmap import dead_slots
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_DEAD,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.store.records import readable, tombstones
from lifeboat_cache.targets.direct import ALIGNMENT
from lifeboat_cache.targets.files import GONE, read_document
from lifeboat_cache.targets.layout import segment_name

__all__ = ["RecordCheck"]

_KINDS = {
    "corrupt": ("record-corrupt", "the stored bytes do not match their checksum"),
    "misplaced": ("record-misplaced", "outside the segment: it was cut, or the entry is wrong"),
    "untrusted": (
        "record-untrusted",
        "not protected by the integrity key of its namespace: no engine that has the key wrote it",
    ),
    "unreadable": ("record-unreadable", "the system reports an error for the stored bytes"),
}


@dataclass
class _Segment:
    """A segment that records name, as far as it is known by now."""

    number: int
    path: Path
    damaged: bool = False
    foreign: bool = False
    named: bool = True
    verified: int = 0
    doubtful: list[np.void] = field(default_factory=list)


class RecordCheck:
    """Verifies the records of one namespace.

    Parameters
    ----------
    survey
        The namespace's files.
    digest
        The namespace's 32-byte digest.
    verifier
        Reads and hashes.
    direct
        Whether to read past the page cache.
    repair
        Whether to bury bad records, a page at a time.
    stop
        Ends it early.
    keyed
        Whether the verifier has the integrity key of this namespace.
    """

    def __init__(
        self,
        survey: Survey,
        digest: bytes,
        verifier: Verifier,
        *,
        direct: bool,
        repair: bool,
        stop: threading.Event,
        keyed: bool = False,
    ) -> None:
        self._survey = survey
        self._keyed = keyed
        self._unread_keyed: set[tuple[bytes, int]] = set()
        self._digest = digest
        self._binding = Binding(digest)
        self._verifier = verifier
        self._direct = direct
        self._stop = stop
        self._records = survey.report.records
        self._undertaker = Undertaker(survey.directory, digest) if repair else None
        self._findings: dict[tuple[str, str], Finding] = {}
        self._doomed: dict[str, set[int]] = {}

    def run(self) -> None:
        """Verify everything. Findings go to the survey's report."""
        try:
            for writer in self._survey.writers:
                if writer.journal is not None:
                    self._check_writer(writer, writer.journal)
                if self._stop.is_set():
                    return
            self._find_leftovers()
            self._say_keyed()
        finally:
            if self._undertaker is not None:
                self._undertaker.close()

    def _check_writer(self, writer: Writer, journal: Journal) -> None:
        segments: dict[int, _Segment] = {}
        try:
            for entries in pages(journal):
                self._check_page(writer, entries, segments)
                if self._stop.is_set():
                    return
        except OSError as error:
            name = journal.path.name
            detail = f"it cannot be read ({error.strerror})"
            remedy = "check the disk and the permissions"
            self._survey.find(name, Finding("unreadable-file", "fault", "", detail, remedy))
            return
        for segment in segments.values():
            if segment.damaged or segment.foreign or not segment.named:
                self._judge(writer, segment)

    def _check_page(self, writer: Writer, entries: Entries, segments: dict[int, _Segment]) -> None:
        records = entries["kind"] == KIND_RECORD
        usable = records & readable(entries)
        self._records.unknown += int(((entries["kind"] != KIND_TOMBSTONE) & ~usable).sum())
        buried = self._survey.tombstones.get(writer.id)
        if buried is not None:
            dead = usable & np.isin(codes(entries), buried)
            self._records.dead += int(dead.sum())
            usable &= ~dead
        if self._keyed:
            planted = usable & (entries["algorithm"] != ALGORITHM_KEYED_BLAKE3)
            for number in np.unique(entries["segment"][planted]).tolist():
                mine = entries[planted & (entries["segment"] == number)]
                self._bad(writer, self._segment(writer, number, segments), mine, "untrusted")
            usable &= ~planted
        else:
            usable &= ~self._note_keyed(writer, entries, usable)
        bad: list[tuple[_Segment, Entries, str]] = []
        expected = int(entries["stored_length"][records].sum(dtype=np.uint64))
        submitted = 0
        for number in np.unique(entries["segment"][usable]).tolist():
            mine = entries[usable & (entries["segment"] == number)]
            segment = self._segment(writer, number, segments)
            submitted += self._check_segment(writer, segment, mine, bad)
        self._verifier.skip(expected - submitted)
        for path, payload, verdict in self._verifier.drain():
            segment = segments[int(payload.entry["segment"])]
            self._note(writer, segment, payload, verdict, path, bad)
        for segment, doomed, kind in bad:
            self._bad(writer, segment, doomed, kind)

    def _note_keyed(
        self, writer: Writer, entries: Entries, usable: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Which usable entries cannot be verified because the key is not known here."""
        keyed: npt.NDArray[np.bool_] = usable & (entries["algorithm"] == ALGORITHM_KEYED_BLAKE3)
        self._records.keyed += int(keyed.sum())
        numbers = np.unique(entries["segment"][keyed]).tolist()
        self._unread_keyed.update((writer.id, number) for number in numbers)
        return keyed

    def _say_keyed(self) -> None:
        if self._records.keyed:
            self._survey.find(
                "",
                Finding(
                    "integrity-key",
                    "skipped",
                    "",
                    "protected by an integrity key that is not this configuration's: not verified",
                    "check with the configuration of the engines, whose security.integrity_key "
                    "names the key",
                    count=self._records.keyed,
                ),
            )

    def _segment(self, writer: Writer, number: int, segments: dict[int, _Segment]) -> _Segment:
        segment = segments.get(number)
        if segment is None:
            name = segment_name(writer.name, number)
            segment = segments[number] = _Segment(number, self._survey.directory / name)
            header = writer.headers.get(name)
            segment.foreign = isinstance(header, ForeignDataError)
            segment.damaged = isinstance(header, FormatError) and not isinstance(
                header, (ForeignDataError, NewerFormatError)
            )
            if isinstance(header, FileHeader):
                stated = (header.namespace, header.writer, header.segment)
                segment.named = stated == (self._digest, writer.id, number)
        return segment

    def _check_segment(
        self,
        writer: Writer,
        segment: _Segment,
        entries: Entries,
        bad: list[tuple[_Segment, Entries, str]],
    ) -> int:
        """Sort the records of one segment, queue those to be read; the bytes of those."""
        header = writer.headers.get(segment.path.name)
        if isinstance(header, NewerFormatError):
            self._records.newer += entries.shape[0]
            return 0
        try:
            size = os.lstat(segment.path).st_size
        except OSError as error:
            if error.errno not in GONE:
                self._bad(writer, segment, entries, "unreadable")
                return 0
            size = 0
        if not size:  # purged, or being purged
            self._records.gone += entries.shape[0]
            return 0
        marked = self._marked(writer, segment, entries)
        self._records.dead += int(marked.sum())
        entries = entries[~marked]
        offset = entries["offset"]
        inside = (
            (offset >= HEADER_BYTES)
            & (offset % ALIGNMENT == 0)
            & (entries["stored_length"] <= np.uint64(size) - np.minimum(offset, np.uint64(size)))
        )
        if not inside.all():
            bad.append((segment, entries[~inside], "misplaced"))
        entries = entries[inside]
        payloads = [
            self._payload(entry) for entry in entries[np.argsort(entries["offset"], kind="stable")]
        ]
        for run in runs(payloads):
            self._verifier.submit(segment.path, run, direct=self._direct)
            if self._stop.is_set():
                break
        return sum(payload.length for payload in payloads)

    def _payload(self, entry: np.void) -> Payload:
        stored = int(entry["stored_length"])
        bound = self._binding.pack(
            entry["key"].tobytes(),
            int(entry["layout"]),
            int(entry["raw_length"]),
            stored,
            int(entry["codec"]),
            int(entry["algorithm"]),
        )
        return Payload(entry, int(entry["offset"]), stored, bound)

    def _marked(self, writer: Writer, segment: _Segment, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which records the segment's dead bitmap marks, as it is now."""
        none = np.zeros(entries.shape[0], dtype=np.bool_)
        name = segment_name(writer.name, segment.number, "dead")
        try:
            data = read_document(self._survey.directory / name)
            header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_DEAD, name)
        except (OSError, FormatError):
            return none
        stated = (header.namespace, header.writer, header.segment)
        dead = dead_slots(data[HEADER_BYTES:])
        if stated != (self._digest, writer.id, segment.number) or not dead.shape[0]:
            return none
        slot = entries["slot"].astype(np.int64)
        marked: npt.NDArray[np.bool_] = dead[np.minimum(slot, dead.shape[0] - 1)] & (
            slot < dead.shape[0]
        )
        return marked

    def _note(
        self,
        writer: Writer,
        segment: _Segment,
        payload: Payload,
        verdict: Verdict,
        path: Path,
        bad: list[tuple[_Segment, Entries, str]],
    ) -> None:
        if verdict is Verdict.GOOD:
            segment.verified += 1
            self._records.verified += 1
            self._survey.report.verified_bytes += payload.length
            return
        one: Entries = np.array([payload.entry])
        # What a purge or a janitor reclaimed meanwhile is gone, not bad.
        try:
            gone = not os.lstat(path).st_size
        except OSError as error:
            gone = error.errno in GONE
        if gone:
            self._records.gone += 1
        elif self._marked(writer, segment, one)[0]:
            self._records.dead += 1
        elif verdict is Verdict.UNREADABLE:
            bad.append((segment, one, "unreadable"))
        else:
            bad.append((segment, one, "corrupt" if verdict is Verdict.CORRUPT else "misplaced"))

    def _bad(self, writer: Writer, segment: _Segment, entries: Entries, kind: str) -> None:
        count = entries.shape[0]
        if kind == "unreadable":
            self._records.unreadable += count
        else:
            self._records.bad += count
        name, detail = _KINDS[kind]
        finding = self._findings.get((name, segment.path.name))
        if finding is None:
            remedy = RUN_REPAIR if kind != "unreadable" else "check the disk"
            finding = Finding(name, "fault", "", detail, remedy, count=0)
            self._findings[name, segment.path.name] = finding
            self._survey.find(segment.path.name, finding)
        finding.count += count
        if kind == "unreadable":
            return  # it may be readable another time
        if segment.damaged and writer.ended:
            # Not buried yet: if nothing in the segment is good, it is removed.
            segment.doubtful.extend(entries)
        else:
            self._bury(writer, finding, entries)

    def _bury(self, writer: Writer, finding: Finding, entries: Sequence[np.void] | Entries) -> None:
        if self._undertaker is None:
            return
        try:
            self._undertaker.bury(tombstones([(writer.id, entry) for entry in entries]))
        except OSError as error:
            finding.repaired = False
            finding.failed(error.strerror or str(error))
            return
        if finding.remedy in (RUN_REPAIR, ""):
            finding.repaired = True
            finding.remedy = ""

    def _judge(self, writer: Writer, segment: _Segment) -> None:
        """Say what becomes of a segment whose header is not what it should be."""
        name = segment.path.name
        if self._stop.is_set():
            return
        try:
            size = os.lstat(segment.path).st_size
        except OSError:  # it has gone, or was found unreadable before
            return
        known_bad = any((kind, name) in self._findings for kind, _ in _KINDS.values())
        if size < HEADER_BYTES and not known_bad:
            # Nothing in it counts any more: it is cut before it is unlinked.
            if writer.ended:
                self._remove(writer, segment, "segment-removed", "leftover")
            return
        if not segment.named:
            detail = "its header names another segment: blocks in it are served as misses"
            self._survey.find(name, Finding("segment-header", "fault", "", detail, "move it away"))
        elif segment.foreign and not segment.verified:
            detail = "not a file of LifeboatCache"
            remedy = "move it elsewhere"
            self._survey.find(name, Finding("foreign-file", "fault", "", detail, remedy))
        elif not writer.ended:
            detail = "the header is damaged: blocks in it are served as misses"
            self._survey.find(name, writer.fault("segment-header", detail))
        elif segment.verified or self._unread(writer, segment):
            detail = "the header is damaged: blocks in it are served as misses"
            fix = partial(
                put_header, segment.path, MAGIC_SEGMENT, self._digest, writer.id, segment.number
            )
            self._survey.find(name, Finding("segment-header", "fault", "", detail, fix=fix))
            for kind, _ in _KINDS.values():
                finding = self._findings.get((kind, name))
                if finding is not None and segment.doubtful:
                    self._bury(writer, finding, segment.doubtful)
                    segment.doubtful = []
        else:
            self._remove(writer, segment)

    def _unread(self, writer: Writer, segment: _Segment) -> bool:
        return (writer.id, segment.number) in self._unread_keyed or (
            "record-unreadable",
            segment.path.name,
        ) in self._findings

    def _remove(
        self,
        writer: Writer,
        segment: _Segment,
        name: str = "segment-header",
        level: Level = "fault",
    ) -> None:
        """A segment without an intact header or record is of no use to anybody."""
        self._doomed.setdefault(writer.name, set()).add(segment.number)
        paths = [
            self._survey.directory / segment_name(writer.name, segment.number, kind)
            for kind in ("segment", "dead")
        ]
        finding = Finding(
            name,
            level,
            "",
            "the header is damaged, and no record in it is intact: it is of no use"
            if level == "fault"
            else "a janitor or a purge was killed while it removed it",
            fix=partial(remove_files, paths),
        )
        self._survey.find(segment.path.name, finding)
        for kind, _ in _KINDS.values():
            bad = self._findings.get((kind, segment.path.name))
            if bad is not None:
                bad.fix = partial(remove_files, paths)

    def _find_leftovers(self) -> None:
        """Find dead writers of whom nothing is left that anybody needs."""
        left = {
            writer.name: writer.segments - writer.orphans - self._doomed.get(writer.name, set())
            for writer in self._survey.writers
        }
        for writer in self._survey.writers:
            if not writer.ended or not writer.sure or left[writer.name]:
                continue
            journal = writer.journal
            if journal is not None and self._needed(journal, left):
                continue
            kept = ("access", "lock") if writer.of_kind("access") else ()
            names = [n for n, parsed in writer.files.items() if parsed.kind not in kept]
            gone = writer.orphans | self._doomed.get(writer.name, set())
            names = [n for n in names if writer.files[n].segment not in gone]
            if not names:
                continue
            # The journal first: a repair that is killed half-way leaves nothing half-alive.
            names.sort(key=lambda n: not n.endswith(".journal"))
            detail = "nothing that this process stored is left"
            paths = [self._survey.directory / name for name in names]
            fix = partial(remove_files, paths)
            found = Finding("ended-writer", "leftover", "", detail, fix=fix, count=len(names))
            self._survey.find(names[0], found)

    def _needed(self, journal: Journal, left: dict[str, set[int]]) -> bool:
        """Whether a journal declares records dead that would count again without it."""
        for owner, parts in journal.tombstones.items():
            there = left.get(owner.hex())
            if there is None:
                continue
            for part in parts:
                if there & set(np.unique(part >> np.uint64(32)).tolist()):
                    return True
        return False
