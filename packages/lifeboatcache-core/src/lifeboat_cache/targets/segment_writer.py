"""The appending side of a filesystem target."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.clock import coarse_time
from lifeboat_cache.format.access import ACCESS_BYTES, pack_accesses
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_ACCESS,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES, Entries, seal_entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import OpenFile, Reservation, TargetWriter
from lifeboat_cache.targets.direct import ALIGNMENT, open_direct, write_from
from lifeboat_cache.targets.files import GONE, close_file, close_files, late_errors, open_file
from lifeboat_cache.targets.holes import take_space
from lifeboat_cache.targets.layout import FILE_MODE, new_writer_id, segment_name
from lifeboat_cache.targets.traits import owned, traits_of
from lifeboat_cache.targets.writer_lock import WriterLock

__all__ = ["SEGMENT_AGE_S", "SEGMENT_BYTES", "SegmentWriter"]

_log = logging.getLogger("lifeboat_cache")

#: A segment is sealed once it holds so many bytes …
SEGMENT_BYTES = 256 << 20
#: … or is so many seconds old.
SEGMENT_AGE_S = 3600.0

#: One ``pwritev`` carries about this much: enough to be sequential for the device,
#: small enough that several workers share a batch.
_WRITE_BYTES = 16 << 20

#: The journal gets its space in steps of so many bytes, and larger ones as it grows.
_JOURNAL_STEP = 32 << 10
_MOST_JOURNAL_STEP = 1 << 20

#: What counts as allocated where a filesystem cannot allocate ahead.
_NEVER_FULL = 1 << 62

_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _create(path: Path, header: bytes) -> int:
    """Create a file with a header and return it open for writing; all or nothing."""
    try:
        fd = os.open(path, _NEW, FILE_MODE)
    except FileExistsError:
        # Nobody else uses names with this writer's number. A network filesystem may have made
        # the file, lost the answer, and tried once more.
        fd = open_file(path, os.O_WRONLY)
        if os.fstat(fd).st_size:
            close_file(fd)
            raise
    except OSError:
        with contextlib.suppress(OSError):  # it may have been made all the same
            os.unlink(path)
        raise
    try:
        traits = traits_of(path)
        owned(fd, traits)
        write_from(fd, [memoryview(header)], 0)
        if traits.shared:
            os.fsync(fd)
    except BaseException:
        close_file(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return fd


def _address(data: bytes) -> int:
    """Where bytes lie in memory; valid as long as the caller holds them."""
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


def _padded_sizes(entries: Entries) -> npt.NDArray[np.int64]:
    """Bytes that each record takes in its segment."""
    sizes: npt.NDArray[np.int64] = entries["stored_length"].astype(np.int64)
    return -(-sizes // ALIGNMENT) * ALIGNMENT


def _parts(sizes: npt.NDArray[np.int64], limit: int) -> list[tuple[int, int]]:
    """Cut records into consecutive parts of at most ``limit`` bytes or one record."""
    parts, first, total = [], 0, 0
    for at, size in enumerate(sizes.tolist()):
        if at > first and total + size > limit:
            parts.append((first, at))
            first, total = at, 0
        total += size
    return [*parts, (first, int(sizes.shape[0]))] if sizes.shape[0] else []


class _Segment:
    """An open segment. Closed when the last user lets go of the object."""

    __slots__ = ("created", "direct_fd", "fd", "next_slot", "number", "offset", "path", "returned")

    def __init__(self, path: Path, number: int, header: bytes, direct: bool) -> None:
        self.path = path
        self.number = number
        self.offset = HEADER_BYTES
        self.next_slot = 0
        # Room that was given back and has other room behind it: its end, start, slots.
        self.returned: dict[int, tuple[int, int]] = {}
        self.created = time.monotonic()
        self.direct_fd = -1
        self.fd = _create(path, header)
        if direct:
            with contextlib.suppress(OSError):
                self.direct_fd = open_direct(path, os.O_WRONLY)

    def __del__(self) -> None:
        close_files([getattr(self, "fd", -1), getattr(self, "direct_fd", -1)])


class SegmentWriter(TargetWriter):
    """Appends records of one namespace to segments of its own.

    Parameters
    ----------
    directory
        The namespace's directory; exists.
    namespace
        Whose records they are.
    direct
        Whether the filesystem takes O_DIRECT.
    allowance
        Asked before each write with the bytes to be allocated; answers with the
        reason for a refusal or ``None``.
    settled
        Told how many of these bytes are written by now, or never will be.
    """

    def __init__(
        self,
        directory: Path,
        namespace: Namespace,
        *,
        direct: bool,
        allowance: Callable[[int], Outcome | None],
        settled: Callable[[int], None] | None = None,
    ) -> None:
        self.writer = new_writer_id()
        self._hex = self.writer.hex()
        self._directory = directory
        self._namespace = namespace.digest
        self._direct = direct
        self._allowance = allowance
        self._settled = settled
        self._lock = threading.Lock()  # placement
        self._journal_lock = threading.Lock()
        self._segment: _Segment | None = None
        self._next_segment = 0
        self._entries = 0
        self._expected = 0  # entries, those of payloads under way included
        self._journal_space = HEADER_BYTES  # allocated
        self._journal_path = directory / f"{self._hex}.journal"
        self._journal_fd = -1
        self._journal_file: tuple[int, int] | None = None  # which one the name leads to
        self._journal_name = os.fsencode(self._journal_path) + b"\0"
        self._journal_place = (-1, -1)  # the same as kernels say it
        self._accesses = 0
        self._access_fd = -1
        self._closed = False
        self._shared = traits_of(directory).shared
        self._alive = WriterLock(directory, self.writer)
        try:
            self._journal_fd = _create(self._journal_path, self._header(MAGIC_JOURNAL))
            made = os.fstat(self._journal_fd)
            self._journal_file = made.st_dev, made.st_ino
            device = os.major(made.st_dev) << 32 | os.minor(made.st_dev)
            self._journal_place = device, made.st_ino
        except BaseException:
            close_files([self._journal_fd])
            self._alive.release()
            with contextlib.suppress(OSError):
                os.unlink(directory / f"{self._hex}.lock")
            raise

    def _header(self, magic: bytes, segment: int = 0) -> bytes:
        return FileHeader(magic, self._namespace, self.writer, segment, coarse_time()).pack()

    def append(self, entries: Entries, buffers: BlockBuffers, blocks: Sequence[int]) -> list[int]:
        outcomes = [int(Outcome.PENDING)] * len(blocks)
        for room in self.reserve(entries, _WRITE_BYTES):
            mine = slice(room.first, room.last)
            outcome = room.refusal
            if room.file is not None:
                try:
                    self._write(room.file, entries[mine], buffers, blocks[mine])
                except OSError as exc:
                    self.give_back(entries[mine], room.file)
                    outcome = self._failure(exc)
                else:
                    outcome = self.commit(entries[mine], [room.file])
                self.settle(entries[mine])
            outcomes[mine] = [int(outcome)] * (room.last - room.first)
        return outcomes

    def beat(self) -> None:
        self._alive.beat()
        if self._alive.lapsed:
            self.lost = True

    def reserve(self, entries: Entries, part_bytes: int) -> list[Reservation]:
        self.beat()
        sizes = _padded_sizes(entries)
        parts = _parts(sizes, part_bytes)
        # Once for all: each of these calls lets go of the interpreter.
        total = int(sizes.sum())
        allowed = len(parts) > 1 and self._allowance(total) is None
        journaled = self._take_journal_space_at_once(len(entries)) if allowed else False
        if journaled and (file := self._place_together(entries, sizes, total)) is not None:
            return [Reservation(first, last, file) for first, last in parts]
        rooms = []
        for first, last in parts:
            mine = sizes[first:last]
            size = int(mine.sum())
            refusal = None if allowed else self._allowance(size)
            if refusal is None:
                try:
                    if not journaled:
                        self._take_journal_space(last - first)
                    file = self._place(entries[first:last], mine, size)
                except OSError as exc:
                    self._settle_bytes(size)
                    refusal = self._failure(exc)
                else:
                    rooms.append(Reservation(first, last, file))
                    continue
            rooms.append(Reservation(first, last, None, refusal))
        return rooms

    def _take_journal_space_at_once(self, count: int) -> bool:
        """For all parts of a reservation; if there is none for all, there may be for some."""
        try:
            self._take_journal_space(count)
        except OSError:
            return False
        return True

    def settle(self, entries: Entries) -> None:
        self._settle_bytes(int(_padded_sizes(entries).sum()))

    def _settle_bytes(self, size: int) -> None:
        if self._settled is not None:
            self._settled(size)

    def commit(self, entries: Entries, files: Sequence[OpenFile]) -> Outcome:
        segments = list({id(file): file for file in files}.values())
        try:
            if self._shared:  # other hosts must not know of what they cannot read yet
                for segment in segments:
                    os.fsync(segment.fd)
            self._journal(entries, segments)
        except OSError as exc:
            return self._failure(exc)
        return Outcome.OK

    def _take_journal_space(self, count: int) -> None:
        """Make sure that payloads which find room can be journaled on a disk that is full then."""
        with self._journal_lock:
            end = HEADER_BYTES + (self._expected + count) * ENTRY_BYTES
            if self._journal_fd >= 0 and end > self._journal_space:
                self._extend_journal(end - self._journal_space)
            self._expected += count

    def _extend_journal(self, needed: int) -> None:
        """Allocate at least so many bytes more; under the journal's lock."""
        step = -(-needed // _JOURNAL_STEP) * _JOURNAL_STEP
        # Each allocation lets go of the interpreter: who stores much takes much at once.
        ample = max(step, min(self._journal_space, _MOST_JOURNAL_STEP))
        try:
            taken = take_space(self._journal_fd, self._journal_space, ample)
        except OSError:
            if ample == step:
                raise
            ample = step
            taken = take_space(self._journal_fd, self._journal_space, ample)
        self._journal_space = self._journal_space + ample if taken else _NEVER_FULL

    def _failure(self, exc: OSError) -> Outcome:
        self._notice_loss()
        return Outcome.RESERVE if exc.errno in (errno.ENOSPC, errno.EDQUOT) else Outcome.FAILED

    def _place_together(
        self, entries: Entries, sizes: npt.NDArray[np.int64], total: int
    ) -> _Segment | None:
        """Give the records of several parts a place at once, if the segment has room for all."""
        with self._lock:
            segment = self._segment
            if self._closed or segment is None or self._is_full(segment, total):
                return None
            self._give_places(segment, entries, sizes, total)
            return segment

    @staticmethod
    def _is_full(segment: _Segment, total: int) -> bool:
        """Whether so many bytes belong into the next segment."""
        return segment.offset > HEADER_BYTES and (
            segment.offset + total > SEGMENT_BYTES
            or time.monotonic() - segment.created > SEGMENT_AGE_S
        )

    def _place(self, entries: Entries, sizes: npt.NDArray[np.int64], total: int) -> _Segment:
        """Give records a place one after the other; those of other threads get other places."""
        with self._lock:
            segment = self._segment
            if self._closed:
                raise OSError(errno.EBADF, "the writer is closed")
            if segment is None or self._is_full(segment, total):
                self._require_kept()  # it would be made where it does not belong
                self._require_lease()
                number = self._next_segment
                # Even if it fails: a number is never used twice.
                self._next_segment = number + 1
                segment = _Segment(
                    self._directory / segment_name(self._hex, number),
                    number,
                    self._header(MAGIC_SEGMENT, number),
                    self._direct,
                )
                self._segment = segment
            self._give_places(segment, entries, sizes, total)
            return segment

    @staticmethod
    def _give_places(
        segment: _Segment, entries: Entries, sizes: npt.NDArray[np.int64], total: int
    ) -> None:
        """Put records behind what a segment has; under the lock."""
        starts = np.zeros(len(sizes), dtype=np.uint64)
        starts[1:] = np.cumsum(sizes[:-1])
        entries["segment"] = segment.number
        entries["offset"] = starts + np.uint64(segment.offset)
        entries["slot"] = np.arange(
            segment.next_slot, segment.next_slot + len(sizes), dtype=np.uint32
        )
        segment.offset += total
        segment.next_slot += len(sizes)

    @property
    def current(self) -> int:
        """Number of the segment that is written to; -1 if the next record begins another one."""
        with self._lock:
            return -1 if self._segment is None else self._segment.number

    def seal(self, age_s: float) -> None:
        """Go on with another segment if there are records in this one and it is so old."""
        with self._lock:
            segment = self._segment
            if segment is None or segment.offset == HEADER_BYTES:
                return
            if time.monotonic() - segment.created >= age_s:
                self._segment = None

    def give_back(self, entries: Entries, file: OpenFile) -> None:
        start = int(entries["offset"][0])
        end = int(entries["offset"][-1]) + _padded(int(entries["stored_length"][-1]))
        with self._journal_lock:
            self._expected -= len(entries)
        with self._lock:
            segment = self._segment
            if segment is not file:
                return  # sealed by now: it stays unused
            # Only the end of the file can be given back. What is further inside waits
            # until that has become true of it.
            segment.returned[end] = (start, len(entries))
            before = segment.offset
            while segment.offset in segment.returned:
                segment.offset, count = segment.returned.pop(segment.offset)
                segment.next_slot -= count
            if segment.offset < before:
                with contextlib.suppress(OSError):
                    os.ftruncate(segment.fd, segment.offset)

    def _notice_loss(self) -> bool:
        """Find out whether the journal is not what its name leads to any more.

        Somebody has deleted it, or the whole directory, or mounted or moved another one
        into its place: nobody would find what is stored.
        """
        if not self.lost and self._journal_file is not None:
            try:
                found = os.lstat(self._journal_path)
                self.lost = (found.st_dev, found.st_ino) != self._journal_file
            except OSError as exc:
                self.lost = exc.errno in GONE
        return self.lost

    def _require_lease(self) -> None:
        """Raise ``OSError`` if others may take this writer for dead."""
        if self._alive.lapsed:
            self.lost = True
            raise OSError(errno.ESTALE, "the writer has not been able to show that it lives")

    def _require_kept(self) -> None:
        """Raise ``OSError`` if what is stored now would not be found."""
        if self._notice_loss():
            raise OSError(errno.ESTALE, "the journal was deleted, or its directory replaced")

    def _check_kept(self, segment: OpenFile) -> None:
        """Raise ``OSError`` if somebody has deleted the segment: nothing would be kept."""
        if not os.fstat(segment.fd).st_nlink:
            self._leave(segment)

    def _leave(self, segment: OpenFile) -> None:
        """Use a segment no more that was deleted; raises ``OSError``."""
        with self._lock:
            if self._segment is segment:
                self._segment = None
        raise OSError(errno.ESTALE, "the segment was deleted")

    def _write(
        self, segment: OpenFile, entries: Entries, buffers: BlockBuffers, blocks: Sequence[int]
    ) -> None:
        stored = entries["stored_length"]
        if not bool((stored % ALIGNMENT).any()):
            # No gaps between the records: one sequence of pieces.
            pieces = [piece for block in blocks for piece in buffers.pieces(block)]
            direct = segment.direct_fd >= 0 and buffers.aligned(ALIGNMENT)
            fd = segment.direct_fd if direct else segment.fd
            write_from(fd, pieces, int(entries["offset"][0]))
            return
        for offset, block in zip(entries["offset"].tolist(), blocks, strict=True):
            write_from(segment.fd, buffers.pieces(block), offset)

    def _journal(self, entries: Entries, segments: Sequence[OpenFile] = ()) -> None:
        """Append entries, unless one of the segments they lie in has been deleted."""
        self._require_lease()
        native = kernels.ready() and len(entries) > 0
        if not native:
            for segment in segments:
                self._check_kept(segment)
        deleted, kept = -1, False
        with self._journal_lock:
            if self._journal_fd < 0:
                raise OSError(errno.EBADF, "the writer is closed")
            position = HEADER_BYTES + self._entries * ENTRY_BYTES
            try:
                if native:
                    deleted, kept = self._append(entries, segments, position)
                else:
                    data = seal_entries(entries, self.writer, self._entries, self._namespace)
                    write_from(self._journal_fd, [memoryview(data)], position)
            except OSError:
                # What is whole stays: readers may know it already. A torn entry is
                # overwritten by the next one.
                end = os.fstat(self._journal_fd).st_size
                self._entries = max(self._entries, (end - HEADER_BYTES) // ENTRY_BYTES)
                raise
            if deleted < 0:
                self._entries += len(entries)
        if deleted >= 0:
            self._leave(segments[deleted])
        if self._shared:
            os.fsync(self._journal_fd)
            self.beat()
            # Had it lapsed before the entries were there, they might not be found.
            self._require_lease()
        if not kept:
            if native:
                for segment in segments:
                    self._check_kept(segment)
            self._require_kept()

    def _append(
        self, entries: Entries, segments: Sequence[OpenFile], position: int
    ) -> tuple[int, bool]:
        """Append in one call without the interpreter; under the journal's lock.

        Returns
        -------
        deleted
            The place of a segment that has been deleted, in which case nothing is
            written, or -1.
        kept
            Whether all files are known to be there still.
        """
        from lifeboat_cache.kernels import journal

        sealed = np.array(entries, dtype=ENTRY, order="C")
        answer = np.zeros(journal.WORDS, dtype=np.int64)
        error = journal.append(
            np.array([segment.fd for segment in segments], dtype=np.int64),
            self._journal_fd,
            position,
            sealed.ctypes.data,
            len(sealed),
            _address(self.writer),
            self._entries,
            _address(self._namespace),
            _address(self._journal_name),
            answer,
        )
        if error:
            raise OSError(error, os.strerror(error))
        place = int(answer[journal.DEVICE]), int(answer[journal.INODE])
        kept = not answer[journal.UNKNOWN] and not answer[journal.JOURNAL_ERRNO]
        return int(answer[journal.DELETED]), bool(kept) and place == self._journal_place

    def bury(self, entries: Entries) -> bool:
        try:
            self._journal(entries)
        except OSError:
            return False
        return True

    def log_access(self, accesses: Entries) -> None:
        with contextlib.suppress(OSError), self._journal_lock:
            if self._closed:
                return
            if self._access_fd < 0:
                self._require_kept()
                self._access_fd = _create(
                    self._directory / f"{self._hex}.access", self._header(MAGIC_ACCESS)
                )
            data = memoryview(pack_accesses(accesses))
            write_from(self._access_fd, [data], HEADER_BYTES + self._accesses * ACCESS_BYTES)
            # Only now: what failed half-way is overwritten by the next one.
            self._accesses += len(accesses)

    def close(self) -> None:
        with self._lock, self._journal_lock:
            if self._closed:
                return
            self._closed = True
            reported = late_errors()
            self._segment = None
            used = self._access_fd >= 0
            with contextlib.suppress(OSError):
                # What was allocated ahead, and an entry of which only a part was written.
                os.ftruncate(self._journal_fd, HEADER_BYTES + self._entries * ENTRY_BYTES)
            close_files([self._journal_fd, self._access_fd])
            if late_errors() > reported:
                _log.warning(
                    "LifeboatCache: storage at %s reported at the end that not all has been "
                    "written: check the disk and its free space",
                    self._directory,
                )
            self._journal_fd = self._access_fd = -1
            stored = self._entries > 0 or self._next_segment > 0
            self._alive.release()
        # A process that stored nothing leaves nothing but what it used.
        kinds = () if stored else ("journal",) if used else ("journal", "lock")
        for kind in kinds:
            with contextlib.suppress(OSError):
                os.unlink(self._directory / f"{self._hex}.{kind}")
