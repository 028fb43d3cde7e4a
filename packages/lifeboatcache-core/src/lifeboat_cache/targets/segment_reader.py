"""The reading side of a filesystem target."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_SEGMENT, FileHeader
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import JournalPage, Place, TargetReader
from lifeboat_cache.targets.direct import ALIGNMENT, MAX_PIECES, open_direct, read_into
from lifeboat_cache.targets.files import GONE, close_files, open_file, read_range
from lifeboat_cache.targets.journal_reader import JournalReader
from lifeboat_cache.targets.layout import segment_name
from lifeboat_cache.targets.traits import traits_of

__all__ = ["SegmentReader"]

#: Segments kept open; more are closed, least recently used first.
_OPEN_SEGMENTS = 256

#: What another host has flushed is seen here after so many seconds at the latest.
_VISIBLE_S = 60.0

#: So many records are doubted at a time; more are given up at once.
_MOST_DOUBTS = 65536

#: One ``preadv`` carries about this much.
_READ_BYTES = 16 << 20

#: So many seconds after somebody last looked, an open segment may have been deleted. To look
#: lets go of the interpreter, which takes up to 5 ms to win back beside a busy engine.
_LOOK_S = 1.0


class _OpenSegment:
    """An open segment; closed when the last user lets go of the object."""

    __slots__ = ("direct_fd", "fd", "looked", "size")

    def __init__(self, path: Path, header: FileHeader, direct: bool) -> None:
        self.fd = self.direct_fd = -1
        self.looked = time.monotonic()
        self.fd = open_file(path)
        #: What was known of its size then.
        self.size = os.fstat(self.fd).st_size
        data = read_range(self.fd, HEADER_BYTES, 0)
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
                self.direct_fd = open_direct(path, os.O_RDONLY)

    def __del__(self) -> None:
        close_files([self.fd, self.direct_fd])


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
        self._journals = JournalReader(directory, namespace.digest)
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[bytes, int], _OpenSegment] = OrderedDict()
        self._closed = False
        self._shared = traits_of(directory).shared
        #: How far records are known to go in segments, on a shared mount.
        self._ends: dict[tuple[bytes, int], int] = {}
        #: Records that could not be read, and when first.
        self._doubts: dict[tuple[bytes, int, int], float] = {}

    # Journals ---------------------------------------------------------------

    def poll(self, skip: bytes | None = None) -> Iterator[JournalPage]:
        for page in self._journals.poll(skip):
            if self._shared:
                self._note_ends(page)
            yield page

    def _note_ends(self, page: JournalPage) -> None:
        """Remember how far segments go: who opened one before it grew does not see all of it."""
        numbers, which = np.unique(page.entries["segment"], return_inverse=True)
        ends = np.zeros(numbers.shape[0], dtype=np.int64)
        lengths = page.entries["offset"].astype(np.int64) + page.entries["stored_length"]
        np.maximum.at(ends, which, lengths)
        for number, end in zip(numbers.tolist(), ends.tolist(), strict=True):
            place = page.writer, number
            self._ends[place] = max(end, self._ends.get(place, 0))

    def declared_dead(self, places: Sequence[Place], slots: Sequence[int]) -> list[bool]:
        return self._journals.declared_dead(places, slots)

    @property
    def complete(self) -> bool:
        return self._journals.complete

    def poll_dead(self) -> Iterator[tuple[bytes, int, npt.NDArray[np.bool_]]]:
        return self._journals.poll_dead()

    def take_vanished(self) -> list[tuple[bytes, int | None]]:
        vanished = self._journals.take_vanished()
        for writer, segment in vanished:
            # A client keeps what it has open under another name, and so its space.
            with self._lock:
                for opened in [p for p in self._open if p[0] == writer and segment in (None, p[1])]:
                    del self._open[opened]
            for end in [p for p in self._ends if p[0] == writer and segment in (None, p[1])]:
                del self._ends[end]
        return vanished

    @property
    def doubts(self) -> int:
        return len(self._doubts)

    def believe(self, writer: bytes, segment: int, slot: int) -> None:
        self._doubts.pop((writer, segment, slot), None)

    def doubtful(self, writer: bytes, segment: int, slot: int) -> bool:
        if not self._shared:
            return False
        with self._lock:
            # What is read next time is read anew.
            self._open.pop((writer, segment), None)
        now = time.monotonic()
        if len(self._doubts) >= _MOST_DOUBTS:
            self._doubts = {
                place: since for place, since in self._doubts.items() if now - since < _VISIBLE_S
            }
        if len(self._doubts) >= _MOST_DOUBTS:
            return False
        place = (writer, segment, slot)
        if now - self._doubts.setdefault(place, now) < _VISIBLE_S:
            return True
        del self._doubts[place]
        return False

    def accesses(self) -> Iterator[Entries]:
        return self._journals.accesses()

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
            segment = self.open_segment(first.writer, first.segment)
            fd = segment.direct_fd if direct and segment.direct_fd >= 0 else segment.fd
            moved = read_into(fd, pieces, first.offset)
        except NewerFormatError:  # not ours to judge
            outcome, moved = Outcome.MISSING, 0
        except FormatError:
            outcome, moved = Outcome.CORRUPT, 0
        except OSError as exc:
            outcome = Outcome.MISSING if exc.errno in GONE else Outcome.FAILED
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

    def open_segment(self, writer: bytes, segment: int) -> _OpenSegment:
        key = (writer, segment)
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the reader is closed")
            found = self._open.get(key)
            if found is not None:
                if self._current(key, found):
                    self._open.move_to_end(key)
                    return found
                # Somebody deleted the file: give its space back.
                del self._open[key]
        path = self._directory / segment_name(writer.hex(), segment)
        header = FileHeader(MAGIC_SEGMENT, self._namespace, writer, segment, 0)
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

    def _current(self, key: tuple[bytes, int], opened: _OpenSegment) -> bool:
        """Whether an open segment is still there, and all of it is seen."""
        if opened.size < self._ends.get(key, 0):
            return False
        now = time.monotonic()
        if now - opened.looked <= _LOOK_S and not self._shared:
            return True
        opened.looked = now
        try:
            return os.fstat(opened.fd).st_nlink > 0
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
            return False  # deleted by another host, or the server knows it by another handle

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._open.clear()


def _order(place: Place) -> tuple[bytes, int, int]:
    return place.writer, place.segment, place.offset
