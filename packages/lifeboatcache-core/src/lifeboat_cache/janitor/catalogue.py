"""What a namespace's directory holds, kept from run to run and brought up to date."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_ACCESS,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.janitor.bitmaps import Bitmap
from lifeboat_cache.janitor.journal_follower import JournalFollower
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.janitor.rows import Census, Rows
from lifeboat_cache.store.records import readable
from lifeboat_cache.targets.files import (
    GONE,
    close_file,
    is_gone,
    open_file,
    read_range,
    refresh_attributes,
)
from lifeboat_cache.targets.layout import SILLY_RENAMES, SUMMARY_WRITER, parse_name, segment_name
from lifeboat_cache.targets.traits import traits_of
from lifeboat_cache.targets.writer_lock import writer_alive

__all__ = ["Catalogue", "Segment", "Writer"]

#: Why a writer is left alone for a while.
_UNKNOWN = "its files cannot be looked at"

_MAGIC = {
    "segment": MAGIC_SEGMENT,
    "dead": MAGIC_DEAD,
    "journal": MAGIC_JOURNAL,
    "access": MAGIC_ACCESS,
}

_SUMMARY = SUMMARY_WRITER.hex()

#: A record may be this much younger than the last look at its file.
_SLACK_S = 60
_LATEST = (1 << 32) - 1

#: What a host had flushed when it died is seen by others after so many seconds at the latest.
_VISIBLE_S = 60.0

#: What is bad in a journal of a directory that other hosts use too is looked at again for so many
#: seconds: what stays unknown is removed with its segment, and there is no hurry with that.
_PATIENCE_S = 600.0

#: No segment has so many records; a bitmap of 2 MiB would be needed for them.
_MOST_SLOTS = 1 << 24


@dataclass
class Segment:
    """One segment and its records.

    Attributes
    ----------
    writer
        Whose it is.
    number
        Which.
    bitmap
        Its dead bitmap.
    rows
        The records that the journal names in it.
    allocated, size
        Of the file, in bytes.
    sealed_at
        Monotonic time when it was first seen that the writer has gone on; 0 = not yet.
    untouchable
        Why it may not be changed (its header is damaged, or not ours), or empty.
    trimmed
        Whether it was cut behind its last record.
    written
        When it was written to, by the clock of its files.
    """

    writer: Writer
    number: int
    bitmap: Bitmap
    rows: Rows = field(default_factory=Rows)
    allocated: int = 0
    size: int = 0
    sealed_at: float = 0.0
    untouchable: str = ""
    trimmed: bool = False
    written: float = 0.0

    @property
    def path(self) -> Path:
        """The file."""
        return self.writer.directory / segment_name(self.writer.name, self.number)

    def settled(self, now: float, grace: float) -> bool:
        """Whether nothing is written to it any more."""
        if not self.writer.alive:
            return True
        return self.sealed_at > 0 and now - self.sealed_at >= grace


@dataclass
class Writer:
    """One writer's files.

    Attributes
    ----------
    directory, name
        Where, and its 32 digits.
    journal
        Follows its journal; ``None`` if there is none.
    alive
        Whether its process still ran before the journal was read.
    untouchable
        Why nothing of it may be changed, or empty.
    complete
        Whether everything that its journal names is known.
    """

    directory: Path
    name: str
    journal: JournalFollower | None = None
    alive: bool = True
    untouchable: str = ""
    complete: bool = False
    #: Since when (monotonic) it is known to be dead, 0 = it is not.
    dead_since: float = 0.0
    segments: dict[int, Segment] = field(default_factory=dict)
    #: Numbers of the segments that its journal has named.
    named: set[int] = field(default_factory=set)
    #: Files by kind (journal, lock, access) and dead bitmaps by number.
    files: set[str] = field(default_factory=set)
    bitmaps: dict[int, os.stat_result] = field(default_factory=dict)
    #: Tombstones in its journal: by writer and segment, which slots.
    tombstones: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    @property
    def id(self) -> bytes:
        """The writer's 16 bytes."""
        return bytes.fromhex(self.name)

    def path(self, kind: str) -> Path:
        """Its journal, lock or access log."""
        return self.directory / f"{self.name}.{kind}"


class Catalogue:
    """One namespace's writers, segments and records.

    Parameters
    ----------
    directory
        The namespace's directory.
    digest
        The namespace's 32-byte digest.
    monotonic
        The time for graces.
    """

    def __init__(self, directory: Path, digest: bytes, monotonic: Callable[[], float]) -> None:
        self.directory = directory
        self.digest = digest
        self.writers: dict[str, Writer] = {}
        self.allocated = 0
        self.growing = 0
        self.summary = False
        self._monotonic = monotonic
        self._verdicts: dict[str, tuple[str, bool]] = {}  # on headers, by file

    def segments(self) -> Iterator[Segment]:
        """All segments that may be touched."""
        for writer in self.writers.values():
            if not writer.untouchable:
                for segment in writer.segments.values():
                    if not segment.untouchable:
                        yield segment

    def census(self) -> Census:
        """Live records that this release knows, by codec; see :meth:`Rows.census`."""
        out: Census = {}
        for segment in self.segments():
            for codec, (records, raw, stored) in segment.rows.census().items():
                before = out.get(codec, (0, 0, 0))
                out[codec] = (before[0] + records, before[1] + raw, before[2] + stored)
        return out

    def known(self) -> dict[str, int]:
        """By writer: the highest segment that does not grow any more."""
        out = {}
        for writer in self.writers.values():
            if writer.segments:
                last = max(writer.segments)
                out[writer.name] = last - 1 if writer.alive else last
        return out

    # Files ------------------------------------------------------------------

    def refresh(self, report: JanitorReport) -> None:
        """Look at all files, and read what journals have gained.

        Raises
        ------
        OSError
            If the directory cannot be listed.
        """
        allocated = 0
        there: dict[str, dict[str, os.stat_result]] = {}
        shared = traits_of(self.directory).shared
        if shared:
            refresh_attributes(self.directory)
        unknown: set[str] = set()
        with os.scandir(self.directory) as listing:
            entries = list(listing)
        for entry in entries:
            if shared:
                refresh_attributes(entry.path)
            try:
                stat = entry.stat(follow_symlinks=False)
            except OSError as error:
                # Of what cannot be looked at it is not known that it has gone.
                parsed = parse_name(entry.name)
                if error.errno not in GONE and parsed is not None:
                    unknown.add(parsed.writer)
                continue
            if entry.name.startswith(SILLY_RENAMES):
                continue
            allocated += stat.st_blocks * 512
            parsed = parse_name(entry.name)
            if parsed is not None and entry.is_file(follow_symlinks=False):
                there.setdefault(parsed.writer, {})[entry.name] = stat
        self.allocated = allocated
        self.summary = there.pop(_SUMMARY, None) is not None or _SUMMARY in unknown
        unknown.discard(_SUMMARY)
        for name in list(self.writers):
            # Who could not be looked at is got to know anew.
            if name not in there or self.writers[name].untouchable == _UNKNOWN:
                del self.writers[name]
        for name in unknown:
            there.pop(name, None)
            self.writers[name] = Writer(self.directory, name, untouchable=_UNKNOWN)
        names = {name for files in there.values() for name in files}
        self._verdicts = {name: v for name, v in self._verdicts.items() if name in names}
        for name, files in sorted(there.items()):
            self._refresh_writer(name, files, report)
        self._mark_from_bitmaps()
        self.growing = sum(
            writer.segments[max(writer.segments)].allocated
            for writer in self.writers.values()
            if writer.alive and writer.segments
        )

    def _refresh_writer(
        self, name: str, files: dict[str, os.stat_result], report: JanitorReport
    ) -> None:
        writer = self.writers.get(name)
        if writer is None:
            writer = self.writers[name] = Writer(self.directory, name)
        if writer.alive:
            # Before its journal is read: what a dead writer left is final.
            writer.alive = not self._ended(writer)
        writer.files = set()
        writer.bitmaps = {}
        numbers = set()
        for file, stat in files.items():
            parsed = parse_name(file)
            if parsed is None:
                continue
            if parsed.kind == "segment":
                numbers.add(parsed.segment)
                self._note_segment(writer, parsed.segment, stat)
            elif parsed.kind == "dead":
                writer.bitmaps[parsed.segment] = stat
            else:
                writer.files.add(parsed.kind)
            if parsed.kind != "lock":
                why, whole = self._judge(file, parsed.kind)
                if why and whole:
                    writer.untouchable = why
                elif parsed.kind == "segment":
                    writer.segments[parsed.segment].untouchable = why
        for number in writer.segments.keys() - numbers:
            del writer.segments[number]
        now = self._monotonic()
        last = max(writer.segments, default=-1)
        for number, segment in writer.segments.items():
            if number < last and not segment.sealed_at:
                segment.sealed_at = max(now, 1e-9)
        if not writer.untouchable:
            self._follow(writer, report)

    def _ended(self, writer: Writer) -> bool:
        """Whether a writer is dead, and all that it has written can be seen."""
        if writer_alive(self.directory, writer.name):
            writer.dead_since = 0.0
            return False
        now = self._monotonic()
        if not writer.dead_since:
            writer.dead_since = max(now, 1e-9)
        shared = traits_of(self.directory).shared
        return not shared or now - writer.dead_since >= _VISIBLE_S

    def _note_segment(self, writer: Writer, number: int, stat: os.stat_result) -> None:
        segment = writer.segments.get(number)
        if segment is None:
            bitmap = Bitmap(self.directory, self.digest, writer.id, number)
            segment = writer.segments[number] = Segment(writer, number, bitmap)
        segment.allocated = stat.st_blocks * 512
        segment.size = stat.st_size
        segment.written = stat.st_mtime

    def _judge(self, file: str, kind: str) -> tuple[str, bool]:
        """Why a file must not be touched, or empty; and whether that holds for its writer."""
        known = self._verdicts.get(file)
        if known is not None:
            return known
        verdict = "", False
        try:
            fd = open_file(self.directory / file)
            try:
                data = read_range(fd, HEADER_BYTES, 0)
            finally:
                close_file(fd)
        except OSError as error:
            gone = error.errno in GONE
            return verdict if gone else ("its header cannot be read", False)
        if len(data) < HEADER_BYTES:  # being made, or being removed
            return verdict
        try:
            header = FileHeader.unpack(data, _MAGIC[kind], file)
            if header.namespace != self.digest:
                verdict = "it names another namespace", kind == "journal"
        except NewerFormatError:
            verdict = "written by a newer release", True
        except FormatError as error:
            verdict = str(error), kind == "journal"
        self._verdicts[file] = verdict
        return verdict

    # Journals ---------------------------------------------------------------

    def _follow(self, writer: Writer, report: JanitorReport) -> None:
        if writer.complete:
            return
        final = not writer.alive
        if "journal" not in writer.files:
            # Its files are removed journal first, so that nothing half-alive is left.
            try:
                writer.complete = final and is_gone(writer.path("journal"))
            except OSError as error:
                report.problem(writer.path("journal").name, error)
            return
        if writer.journal is None:
            writer.journal = JournalFollower(writer.path("journal"), writer.id, self.digest)
        try:
            patience_s = _PATIENCE_S if traits_of(self.directory).shared else 0.0
            for entries, numbers in writer.journal.read(final=final, patience_s=patience_s):
                self._take(writer, entries, numbers)
        except FileNotFoundError:
            return
        except FormatError:
            return  # not complete: nothing of it is removed
        except OSError as error:
            report.problem(writer.path("journal").name, error)
            return
        writer.complete = final and not writer.journal.waiting

    def _take(self, writer: Writer, entries: Entries, numbers: npt.NDArray[np.int64]) -> None:
        kinds = entries["kind"]
        records = kinds == KIND_RECORD
        tombs = kinds == KIND_TOMBSTONE
        if not bool((readable(entries) & (records | tombs)).all()):
            writer.untouchable = "it holds entries of a newer release"
            return
        for number in np.unique(entries["segment"][records]).tolist():
            writer.named.add(number)
            segment = writer.segments.get(number)
            if segment is None:  # made since the directory was listed, or removed
                try:
                    stat = os.stat(self.directory / segment_name(writer.name, number))
                except OSError as error:
                    if error.errno in GONE:
                        continue
                    writer.untouchable = _UNKNOWN
                    return
                self._note_segment(writer, number, stat)
                segment = writer.segments[number]
            mine = records & (entries["segment"] == number)
            # The file's clock is nobody's of those whose clocks disagree.
            latest = min(max(int(segment.written) + _SLACK_S, 0), _LATEST)
            segment.rows.add(entries[mine], numbers[mine], latest)
        buried = entries[tombs]
        for owner, number, slot in zip(
            buried["payload_checksum"].tolist(),
            buried["segment"].tolist(),
            buried["slot"].tolist(),
            strict=True,
        ):
            if slot < _MOST_SLOTS:
                writer.tombstones.setdefault((owner.hex(), number), set()).add(slot)

    def _mark_from_bitmaps(self) -> None:
        """Take in dead bits on disk: of earlier runs, or of other janitors."""
        now = max(self._monotonic(), 1e-9)
        for writer in self.writers.values():
            for number, segment in writer.segments.items():
                stat = writer.bitmaps.get(number)
                if stat is None or not len(segment.rows):
                    continue
                try:
                    if not segment.bitmap.changed(stat) and segment.bitmap.seen == len(
                        segment.rows
                    ):
                        continue
                    dead = segment.bitmap.read()
                except NewerFormatError:
                    continue
                segment.bitmap.seen = len(segment.rows)
                if not dead.shape[0]:
                    continue
                rows = segment.rows.array
                slots = rows["slot"].astype(np.int64)
                marked = dead[np.minimum(slots, dead.shape[0] - 1)] & (slots < dead.shape[0])
                rows["marked"][marked & (rows["marked"] == 0)] = now
