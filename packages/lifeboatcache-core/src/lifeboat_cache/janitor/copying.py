"""Copying live records out of segments that are to be removed."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.checksum import Binding, payload_checksum
from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.janitor.catalogue import Catalogue, Segment
from lifeboat_cache.janitor.journal_follower import read_entries
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.janitor.rows import padded
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.system import advise
from lifeboat_cache.targets.direct import open_direct, read_into
from lifeboat_cache.targets.files import close_file, close_files, open_file
from lifeboat_cache.targets.layout import segment_name
from lifeboat_cache.targets.segment_writer import SegmentWriter
from lifeboat_cache.targets.traits import traits_of

__all__ = ["Copied", "copy_segments"]

#: Read and written in one go; a single larger record takes memory of its own.
_CHUNK_BYTES = 16 << 20


@dataclass
class Copied:
    """What became of the live records of some segments.

    Attributes
    ----------
    done
        Per segment: slots that are of no use any more, because a verified copy is
        safe on disk, or because they are corrupt.
    places
        Per segment written: slots, and when these records were last used.
    moves
        What was copied: from which segment and slot, and to which writer, number and slot.
    writer
        Name of the writer that holds the copies; empty if there are none.
    failed
        Segments that could not be read, or whose copies found no space.
    """

    done: list[tuple[Segment, list[int]]] = field(default_factory=list)
    places: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    moves: list[tuple[Segment, int, str, int, int]] = field(default_factory=list)
    writer: str = ""
    failed: list[Segment] = field(default_factory=list)


class _Source:
    """Reads and verifies records of one segment."""

    def __init__(
        self, catalogue: Catalogue, segment: Segment, key: bytes | None, direct: bool
    ) -> None:
        self._key = key
        self._binding = Binding(catalogue.digest)
        self._direct_fd = -1
        self._fd = open_file(segment.path)
        if direct:
            with contextlib.suppress(OSError):
                self._direct_fd = open_direct(segment.path, os.O_RDONLY)

    def read(self, entry: Any, into: memoryview) -> bool:
        """Whether a record's bytes are now at the start of ``into`` and match.

        Raises ``OSError``.

        Parameters
        ----------
        entry
            Its journal entry.
        into
            Whole pages, at least as many as the record takes.
        """
        stored = int(entry["stored_length"])
        bound = self._binding.pack(
            entry["key"].tobytes(),
            int(entry["layout"]),
            int(entry["raw_length"]),
            stored,
            int(entry["codec"]),
            int(entry["algorithm"]),
        )
        expected = entry["payload_checksum"].tobytes()
        for fd in (self._direct_fd, self._fd, self._fd):
            # More than once: a verdict that drops data has to be certain.
            if fd < 0:
                continue
            try:
                moved = read_into(fd, [into], int(entry["offset"]))
            except OSError as error:
                if fd == self._direct_fd and error.errno == errno.EINVAL:
                    continue
                raise
            payload = into[:stored]
            if moved >= stored and payload_checksum(bound, [payload], key=self._key) == expected:
                return True
        return False

    def close(self) -> None:
        """Let go of the file."""
        close_files([self._fd, self._direct_fd])


def copy_segments(
    catalogue: Catalogue,
    segments: Sequence[Segment],
    *,
    allowance: Callable[[int], Outcome | None],
    direct: bool,
    key: bytes | None,
    report: JanitorReport,
) -> Copied:
    """Copy the live records of segments to new ones, and make them safe on disk.

    Entries keep everything but their place. A record whose bytes do not match is not
    copied; one that has an equal, intact record elsewhere is not copied either: a
    janitor that was killed half-way may have copied it before.

    Parameters
    ----------
    catalogue
        Their namespace.
    segments
        The segments; nothing is written to them any more.
    allowance
        See :class:`SegmentWriter`.
    direct
        Whether the filesystem takes O_DIRECT.
    key
        The integrity key of the namespace, if it has one.
    """
    return _Copier(catalogue, segments, allowance, direct, key, report).run()


class _Copier:
    def __init__(
        self,
        catalogue: Catalogue,
        segments: Sequence[Segment],
        allowance: Callable[[int], Outcome | None],
        direct: bool,
        key: bytes | None,
        report: JanitorReport,
    ) -> None:
        self._catalogue = catalogue
        self._segments = list(segments)
        self._allowance = allowance
        self._direct = direct
        self._key = key
        self._report = report
        self._shared = traits_of(catalogue.directory).shared
        self._writer: SegmentWriter | None = None
        self._memory = mmap.mmap(-1, _CHUNK_BYTES)
        self._seen: set[tuple[bytes, int, int, int, int]] = set()
        self._files: set[int] = set()
        self._others = self._find_others()
        self.copied = Copied()

    def run(self) -> Copied:
        written: list[tuple[Segment, list[int]]] = []
        try:
            for segment in self._segments:
                slots: list[int] = []
                # What was done of one that failed later counts all the same.
                written.append((segment, slots))
                try:
                    whole = self._copy(segment, slots)
                except FileNotFoundError:  # another janitor, or a purge, was faster
                    whole = False
                except (OSError, FormatError, ValueError) as error:
                    self._report.problem(segment.path.name, error)
                    whole = False
                if not whole:
                    self.copied.failed.append(segment)
            if self._writer is not None:
                self._sync(self._writer)
                self.copied.writer = self._writer.writer.hex()
            self.copied.done = written
        except OSError as error:  # not safe on disk: the old records stay
            self._report.problem(str(self._catalogue.directory.name), error)
        finally:
            if self._writer is not None:
                self._writer.close()
            self._memory.close()
        return self.copied

    def _find_others(self) -> dict[int, list[tuple[Segment, int]]]:
        """Live records elsewhere that may be equal to one of those to copy, by key."""
        chosen = {id(segment) for segment in self._segments}
        keys = [s.rows.array["key"][s.rows.live()] for s in self._segments]
        wanted = np.unique(np.concatenate(keys)) if keys else np.zeros(0, dtype=np.uint64)
        others: dict[int, list[tuple[Segment, int]]] = {}
        for segment in self._catalogue.segments():
            if id(segment) in chosen:
                continue
            rows = segment.rows.array
            for row in np.flatnonzero(segment.rows.live() & np.isin(rows["key"], wanted)).tolist():
                others.setdefault(int(rows["key"][row]), []).append((segment, row))
        return others

    def _copy(self, segment: Segment, done: list[int]) -> bool:
        """Copy one segment's live records; whether all are done."""
        rows = segment.rows.array
        live = np.flatnonzero(segment.rows.live())
        live = live[np.argsort(rows["offset"][live], kind="stable")]
        if not live.shape[0]:
            return True
        source = _Source(self._catalogue, segment, self._key, self._direct)
        try:
            sizes = padded(rows["stored"][live]).tolist()
            first = 0
            while first < len(sizes):
                last, total = first + 1, sizes[first]
                while last < len(sizes) and total + sizes[last] <= _CHUNK_BYTES:
                    total += sizes[last]
                    last += 1
                if not self._copy_chunk(segment, source, live[first:last], done):
                    return False
                first = last
            return True
        finally:
            source.close()

    def _copy_chunk(
        self, segment: Segment, source: _Source, part: npt.NDArray[np.int64], done: list[int]
    ) -> bool:
        rows = segment.rows.array
        writer = segment.writer
        # In the order of the journal to read it in long pieces, then by place again.
        numbers = rows["entry"][part].astype(np.int64)
        order = np.argsort(numbers)
        entries = read_entries(
            writer.path("journal"), writer.id, self._catalogue.digest, numbers[order]
        )[np.argsort(order)]
        lengths = padded(entries["stored_length"])
        total = int(lengths.sum())
        memory = self._memory if total <= _CHUNK_BYTES else mmap.mmap(-1, total)
        view = memoryview(memory)
        kept: list[int] = []
        pieces: list[memoryview] = []
        at = 0
        for number in range(part.shape[0]):
            entry = entries[number]
            pages = view[at : at + int(lengths[number])]
            if self._elsewhere(entry, segment, int(rows["key"][part[number]]), pages):
                done.append(int(entry["slot"]))
                continue
            if not source.read(entry, pages):
                # Of another host's bytes it is not certain that all are seen already: whoever
                # is to load them says so again and again, and buries them in the end.
                if not self._shared:
                    self._report.corrupt_blocks += 1
                    done.append(int(entry["slot"]))
                continue
            kept.append(number)
            pieces.append(pages[: int(entry["stored_length"])])
            self._seen.add(_identity(entry))
            at += int(lengths[number])
        good = self._append(segment, entries, kept, pieces, part, done) if kept else True
        pieces.clear()
        view = memoryview(b"")
        return good

    def _append(
        self,
        segment: Segment,
        entries: Entries,
        kept: list[int],
        pieces: list[memoryview],
        part: npt.NDArray[np.int64],
        done: list[int],
    ) -> bool:
        if self._writer is None:
            self._writer = SegmentWriter(
                self._catalogue.directory,
                Namespace({}, self._catalogue.digest),
                direct=self._direct,
                allowance=self._allowance,
            )
        chosen = entries[kept].copy()
        # What a wrong clock has put into the future would get away with it in a new file.
        chosen["time"] = np.minimum(chosen["time"], segment.rows.array["born"][part[kept]])
        old = chosen["slot"].tolist()
        used = segment.rows.array["used"][part[kept]].tolist()
        outcomes = self._writer.append(
            chosen, BlockBuffers.from_buffers(pieces), range(len(pieces))
        )
        for number, outcome in enumerate(outcomes):
            if outcome != Outcome.OK:
                continue
            done.append(old[number])
            place, slot = int(chosen["segment"][number]), int(chosen["slot"][number])
            self._files.add(place)
            self.copied.places.setdefault(place, []).append((slot, used[number]))
            name = self._writer.writer.hex()
            self.copied.moves.append((segment, old[number], name, place, slot))
            self._report.copied_blocks += 1
            self._report.copied_bytes += pieces[number].nbytes
        return all(outcome == Outcome.OK for outcome in outcomes)

    def _elsewhere(self, entry: Any, mine: Segment, key: int, memory: memoryview) -> bool:
        """Whether an equal record that is intact stays. Overwrites ``memory``.

        Only one that was written later counts, as a copy was: should two janitors be at
        work, each must not drop a record for the sake of the one that the other drops.
        """
        if _identity(entry) in self._seen:
            return True
        for segment, row in self._others.get(key, ()):
            writer = segment.writer
            other_row = segment.rows.array[row]
            slot = int(other_row["slot"])
            if _place(segment, slot) < _place(mine, int(entry["slot"])):
                continue
            try:
                dead = segment.bitmap.read()
                if slot < dead.shape[0] and dead[slot]:
                    continue
                number = np.array([other_row["entry"]], dtype=np.int64)
                (other,) = read_entries(
                    writer.path("journal"), writer.id, self._catalogue.digest, number
                )
                if _identity(other) != _identity(entry):
                    continue
                source = _Source(self._catalogue, segment, self._key, self._direct)
                try:
                    if source.read(other, memory):
                        return True
                finally:
                    source.close()
            except (OSError, FormatError, ValueError):
                continue
        return False

    def _sync(self, writer: SegmentWriter) -> None:
        """Wait until segments and then the journal are on the device."""
        directory = self._catalogue.directory
        names = [segment_name(writer.writer.hex(), number) for number in sorted(self._files)]
        for name in [*names, f"{writer.writer.hex()}.journal"]:
            fd = open_file(directory / name)
            try:
                os.fsync(fd)
                advise(fd, "dontneed")
            finally:
                close_file(fd)
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            close_file(fd)


def _place(segment: Segment, slot: int) -> tuple[int, str, int, int]:
    """Something by which any two janitors put records into the same order."""
    writer = segment.writer
    created = writer.journal.created if writer.journal is not None else 0
    return created, writer.name, segment.number, slot


def _identity(entry: Any) -> tuple[bytes, int, int, int, int]:
    """What two records have to share to stand for each other."""
    return (
        entry["key"].tobytes(),
        int(entry["layout"]),
        int(entry["raw_length"]),
        int(entry["stored_length"]),
        int(entry["codec"]),
    )
