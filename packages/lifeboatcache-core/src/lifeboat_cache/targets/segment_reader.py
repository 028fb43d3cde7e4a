"""The reading side of a filesystem target."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.access import parse_accesses
from lifeboat_cache.format.bitmap import dead_slots
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_ACCESS,
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
    parse_entries,
)
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import JournalPage, Place, TargetReader
from lifeboat_cache.targets.direct import ALIGNMENT, MAX_PIECES, O_DIRECT, read_into
from lifeboat_cache.targets.layout import parse_name, segment_name, writer_alive

__all__ = ["SegmentReader"]

#: Entries read and checked in one go: about 2 ms of work, after which other
#: threads get the interpreter.
_PAGE_ENTRIES = 2048

#: Segments kept open; more are closed, least recently used first.
_OPEN_SEGMENTS = 256

#: One ``preadv`` carries about this much.
_READ_BYTES = 16 << 20

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

_NO_ENTRIES: Entries = np.zeros(0, dtype=ENTRY)

#: What a vanished file looks like. ESTALE: deleted by another NFS client.
_GONE = frozenset({errno.ENOENT, errno.ESTALE})


class _OpenSegment:
    """An open segment; closed when the last user lets go of the object."""

    __slots__ = ("direct_fd", "fd")

    def __init__(self, path: Path, header: FileHeader, direct: bool) -> None:
        self.fd = self.direct_fd = -1
        self.fd = os.open(path, _OPEN)
        data = os.pread(self.fd, HEADER_BYTES, 0)
        if len(data) < HEADER_BYTES:  # cut, or being purged: what was there has gone
            raise FileNotFoundError(errno.ENOENT, "the segment is cut off", path.name)
        found = FileHeader.unpack(data, MAGIC_SEGMENT, path.name)
        if (found.namespace, found.writer, found.segment) != (
            header.namespace,
            header.writer,
            header.segment,
        ):
            raise FormatError(f"{path.name}: the header names another segment; it is skipped")
        if direct:
            with contextlib.suppress(OSError):
                self.direct_fd = os.open(path, _OPEN | O_DIRECT)

    def __del__(self) -> None:
        for fd in (self.fd, self.direct_fd):
            if fd >= 0:
                os.close(fd)


class _Journal:
    """How far a journal has been read."""

    __slots__ = ("index", "torn", "valid", "writer")

    def __init__(self, writer: bytes) -> None:
        self.writer = writer
        self.index = 0
        self.valid = False
        self.torn = False


class SegmentReader(TargetReader):
    """Reads the records of one namespace directory.

    Parameters
    ----------
    directory
        The namespace's directory; may not exist yet.
    namespace
        Whose records they are; files of another namespace are skipped.
    direct
        Whether the filesystem takes O_DIRECT.
    """

    def __init__(self, directory: Path, namespace: Namespace, *, direct: bool) -> None:
        self._directory = directory
        self._namespace = namespace.digest
        self._direct = direct
        self._journals: dict[str, _Journal] = {}
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[bytes, int], _OpenSegment] = OrderedDict()
        self._closed = False

    # Journals ---------------------------------------------------------------

    def poll(self, skip: bytes | None = None) -> Iterator[JournalPage]:
        own = "" if skip is None else skip.hex()
        try:
            names = sorted(os.listdir(self._directory))
        except OSError:
            return
        for name in names:
            parsed = parse_name(name)
            if parsed is None or parsed.kind != "journal" or parsed.writer == own:
                continue
            journal = self._journals.setdefault(
                parsed.writer, _Journal(bytes.fromhex(parsed.writer))
            )
            try:
                yield from self._read_journal(self._directory / name, journal)
            except NewerFormatError:
                continue  # not ours to judge
            except FormatError:
                if not journal.torn and not writer_alive(self._directory, parsed.writer):
                    journal.torn = True
                    yield JournalPage(journal.writer, _NO_ENTRIES, 1)
            except OSError:
                continue  # it may be readable at the next poll

    def _read_journal(self, path: Path, journal: _Journal) -> Iterator[JournalPage]:
        fd = os.open(path, _OPEN)
        try:
            if not journal.valid:
                header = FileHeader.unpack(os.pread(fd, HEADER_BYTES, 0), MAGIC_JOURNAL, path.name)
                if header.namespace != self._namespace or header.writer != journal.writer:
                    raise FormatError(f"{path.name}: the header names another writer; skipped")
                journal.valid = True
            dead = False
            while True:
                at = HEADER_BYTES + journal.index * ENTRY_BYTES
                data = os.pread(fd, _PAGE_ENTRIES * ENTRY_BYTES, at)
                whole = len(data) // ENTRY_BYTES
                if not data:
                    return
                entries, bad = parse_entries(data, journal.writer, journal.index, self._namespace)
                last_page = whole < _PAGE_ENTRIES
                if last_page:
                    tail = len(data) % ENTRY_BYTES > 0
                    if (bad or tail) and not dead:
                        dead = not writer_alive(self._directory, journal.writer.hex())
                        if dead:  # read what it finished before it died
                            continue
                    if dead:
                        # Nobody will ever finish it.
                        bad += int(tail and not journal.torn)
                        journal.torn = journal.torn or tail
                    elif bad:
                        # What is bad at the very end may still be being written:
                        # look again next time, and judge then.
                        while whole and not self._entry_good(data, whole - 1, journal):
                            whole -= 1
                            bad -= 1
                journal.index += whole
                kept, misplaced = self._placed(entries, journal.writer)
                if kept.shape[0] or bad or misplaced:
                    yield JournalPage(journal.writer, kept, bad + misplaced)
                if last_page:
                    return
        finally:
            os.close(fd)

    def _entry_good(self, data: bytes, number: int, journal: _Journal) -> bool:
        one = data[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        _, bad = parse_entries(one, journal.writer, journal.index + number, self._namespace)
        return bad == 0

    def _placed(self, entries: Entries, writer: bytes) -> tuple[Entries, int]:
        """Leave out records that are dead, gone, or not inside their segment."""
        keep = np.zeros(entries.shape[0], dtype=bool)
        misplaced = 0
        keep[entries["kind"] == KIND_TOMBSTONE] = True
        records = entries["kind"] == KIND_RECORD
        for segment in np.unique(entries["segment"][records]).tolist():
            # Not remembered from page to page: a living writer's segment grows.
            size, dead = self._extent(writer, segment)
            mine = records & (entries["segment"] == segment)
            if not size:  # purged: nothing is wrong, nothing is there
                continue
            offset = entries["offset"]
            inside = (
                (offset >= HEADER_BYTES)
                & (offset % ALIGNMENT == 0)
                & (
                    entries["stored_length"]
                    <= np.uint64(size) - np.minimum(offset, np.uint64(size))
                )
            )
            slot = entries["slot"]
            marked = (
                dead[np.minimum(slot, dead.shape[0] - 1)] & (slot < dead.shape[0])
                if dead.shape[0]
                else np.zeros(entries.shape[0], dtype=bool)
            )
            misplaced += int((mine & ~inside).sum())
            keep |= mine & inside & ~marked
        kept: Entries = entries[keep]
        return kept, misplaced

    def _extent(self, writer: bytes, segment: int) -> tuple[int, npt.NDArray[np.bool_]]:
        """A segment's size in bytes (0 if it has gone) and its dead slots."""
        none: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        try:
            size = os.stat(self._directory / segment_name(writer.hex(), segment)).st_size
        except OSError:
            return 0, none
        name = segment_name(writer.hex(), segment, "dead")
        try:
            data = (self._directory / name).read_bytes()
            header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_DEAD, name)
        except (OSError, FormatError):
            return size, none
        if (header.namespace, header.writer, header.segment) != (
            self._namespace,
            writer,
            segment,
        ):
            return size, none
        return size, dead_slots(data[HEADER_BYTES:])

    def declared_dead(self, places: Sequence[Place], slots: Sequence[int]) -> list[bool]:
        out = []
        for place, slot in zip(places, slots, strict=True):
            _, dead = self._extent(place.writer, place.segment)
            out.append(slot < dead.shape[0] and bool(dead[slot]))
        return out

    def accesses(self) -> Iterator[Entries]:
        try:
            names = sorted(os.listdir(self._directory))
        except OSError:
            return
        for name in names:
            parsed = parse_name(name)
            if parsed is None or parsed.kind != "access":
                continue
            with contextlib.suppress(OSError, FormatError):
                data = (self._directory / name).read_bytes()
                header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_ACCESS, name)
                if header.namespace == self._namespace:
                    yield parse_accesses(data[HEADER_BYTES:])

    # Payloads ---------------------------------------------------------------

    def read(
        self, places: Sequence[Place], buffers: BlockBuffers, blocks: Sequence[int]
    ) -> list[int]:
        outcomes = [int(Outcome.PENDING)] * len(places)
        order = sorted(range(len(places)), key=lambda i: _order(places[i]))
        direct = buffers.aligned(ALIGNMENT)
        run: list[int] = []
        pieces: list[memoryview] = []
        end = 0
        for index in order:
            place = places[index]
            own = buffers.pieces(blocks[index])
            last = places[run[-1]] if run else None
            if last is not None and not (
                place.writer == last.writer
                and place.segment == last.segment
                and place.offset == end
                and len(pieces) + len(own) <= MAX_PIECES
                and end + place.length - places[run[0]].offset <= _READ_BYTES
            ):
                self._read_run(places, run, pieces, direct, outcomes)
                run, pieces = [], []
            run.append(index)
            pieces.extend(own)
            end = place.offset + place.length
        if run:
            self._read_run(places, run, pieces, direct, outcomes)
        return outcomes

    def _read_run(
        self,
        places: Sequence[Place],
        run: list[int],
        pieces: list[memoryview],
        direct: bool,
        outcomes: list[int],
    ) -> None:
        """Read records that lie one after the other with as few calls as possible."""
        first = places[run[0]]
        try:
            segment = self._segment(first.writer, first.segment)
            fd = segment.direct_fd if direct and segment.direct_fd >= 0 else segment.fd
            moved = read_into(fd, pieces, first.offset)
        except NewerFormatError:  # not ours to judge
            outcome, moved = Outcome.MISSING, 0
        except FormatError:
            outcome, moved = Outcome.CORRUPT, 0
        except OSError as exc:
            outcome = Outcome.MISSING if exc.errno in _GONE else Outcome.FAILED
            moved = 0
        else:
            outcome = Outcome.MISSING  # for what lies beyond the end of a cut file
        if outcome is Outcome.FAILED and len(run) > 1:
            # One bad sector must not cost its neighbours.
            at = 0
            for index in run:
                count = 0
                wanted = places[index].length
                while wanted > 0:
                    wanted -= pieces[at + count].nbytes
                    count += 1
                self._read_run(places, [index], pieces[at : at + count], direct, outcomes)
                at += count
            return
        for index in run:
            whole = places[index].offset + places[index].length - first.offset <= moved
            outcomes[index] = int(Outcome.OK if whole else outcome)

    def _segment(self, writer: bytes, number: int) -> _OpenSegment:
        key = (writer, number)
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the reader is closed")
            found = self._open.get(key)
            if found is not None:
                if os.fstat(found.fd).st_nlink:
                    self._open.move_to_end(key)
                    return found
                # Somebody deleted the file: give its space back.
                del self._open[key]
        path = self._directory / segment_name(writer.hex(), number)
        header = FileHeader(MAGIC_SEGMENT, self._namespace, writer, number, 0)
        try:
            opened = _OpenSegment(path, header, self._direct)
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # The engine needs its descriptors: give ours back, and take what one needs.
            with self._lock:
                self._open.clear()
            opened = _OpenSegment(path, header, self._direct)
        with self._lock:
            opened = self._open.setdefault(key, opened)
            self._open.move_to_end(key)
            while len(self._open) > _OPEN_SEGMENTS:
                self._open.popitem(last=False)
        return opened

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._open.clear()


def _order(place: Place) -> tuple[bytes, int, int]:
    return place.writer, place.segment, place.offset
