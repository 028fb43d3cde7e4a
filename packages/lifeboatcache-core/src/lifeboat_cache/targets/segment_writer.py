"""The appending side of a filesystem target."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

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
from lifeboat_cache.format.journal import ENTRY_BYTES, Entries, seal_entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import TargetWriter
from lifeboat_cache.targets.direct import ALIGNMENT, O_DIRECT, write_from
from lifeboat_cache.targets.layout import (
    FILE_MODE,
    WriterLock,
    new_writer_id,
    segment_name,
)

__all__ = ["SEGMENT_AGE_S", "SEGMENT_BYTES", "SegmentWriter"]

#: A segment is sealed once it holds so many bytes …
SEGMENT_BYTES = 256 << 20
#: … or is so many seconds old.
SEGMENT_AGE_S = 3600.0

#: One ``pwritev`` carries about this much: enough to be sequential for the device,
#: small enough that several workers share a batch.
_WRITE_BYTES = 16 << 20

_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _create(path: Path, header: bytes) -> int:
    """Create a file with a header and return it open for writing; all or nothing."""
    fd = os.open(path, _NEW, FILE_MODE)
    try:
        write_from(fd, [memoryview(header)], 0)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return fd


class _Segment:
    """An open segment. Closed when the last user lets go of the object."""

    __slots__ = ("created", "direct_fd", "fd", "next_slot", "number", "offset", "path")

    def __init__(self, path: Path, number: int, header: bytes, direct: bool) -> None:
        self.path = path
        self.number = number
        self.offset = HEADER_BYTES
        self.next_slot = 0
        self.created = time.monotonic()
        self.direct_fd = -1
        self.fd = _create(path, header)
        if direct:
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | O_DIRECT
            with contextlib.suppress(OSError):
                self.direct_fd = os.open(path, flags)

    def __del__(self) -> None:
        for fd in (getattr(self, "fd", -1), getattr(self, "direct_fd", -1)):
            if fd >= 0:
                os.close(fd)


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
    """

    def __init__(
        self,
        directory: Path,
        namespace: Namespace,
        *,
        direct: bool,
        allowance: Callable[[int], Outcome | None],
    ) -> None:
        self.writer = new_writer_id()
        self._hex = self.writer.hex()
        self._directory = directory
        self._namespace = namespace.digest
        self._direct = direct
        self._allowance = allowance
        self._lock = threading.Lock()  # placement
        self._journal_lock = threading.Lock()
        self._segment: _Segment | None = None
        self._next_segment = 0
        self._entries = 0
        self._journal_fd = -1
        self._accesses = 0
        self._access_fd = -1
        self._closed = False
        self._alive = WriterLock(directory, self.writer)
        try:
            self._journal_fd = _create(
                directory / f"{self._hex}.journal", self._header(MAGIC_JOURNAL)
            )
        except BaseException:
            self._alive.release()
            with contextlib.suppress(OSError):
                os.unlink(directory / f"{self._hex}.lock")
            raise

    def _header(self, magic: bytes, segment: int = 0) -> bytes:
        return FileHeader(magic, self._namespace, self.writer, segment, coarse_time()).pack()

    def append(self, entries: Entries, buffers: BlockBuffers, blocks: Sequence[int]) -> list[int]:
        count = len(blocks)
        outcomes = [int(Outcome.PENDING)] * count
        sizes = [_padded(int(size)) for size in entries["stored_length"]]
        first = 0
        while first < count:
            # One run: as many records as fit into one write and one segment.
            last, total = first, 0
            while last < count and (last == first or total + sizes[last] <= _WRITE_BYTES):
                total += sizes[last]
                last += 1
            outcome = self._append_run(
                entries[first:last], buffers, blocks[first:last], sizes[first:last]
            )
            outcomes[first:last] = [int(outcome)] * (last - first)
            first = last
        return outcomes

    def _append_run(
        self, entries: Entries, buffers: BlockBuffers, blocks: Sequence[int], sizes: list[int]
    ) -> Outcome:
        total = sum(sizes)
        refusal = self._allowance(total)
        if refusal is not None:
            return refusal
        try:
            segment = self._place(entries, sizes, total)
            try:
                self._write(segment, entries, buffers, blocks)
            except OSError:
                self._take_back(segment, entries, total)
                raise
            self._check_kept(segment)
            self._journal(entries)
        except OSError as exc:
            self._notice_loss()
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                return Outcome.RESERVE
            return Outcome.FAILED
        return Outcome.OK

    def _place(self, entries: Entries, sizes: list[int], total: int) -> _Segment:
        """Give the run a place; runs of other threads get other places."""
        with self._lock:
            segment = self._segment
            if self._closed:
                raise OSError(errno.EBADF, "the writer is closed")
            if segment is None or (
                segment.offset > HEADER_BYTES
                and (
                    segment.offset + total > SEGMENT_BYTES
                    or time.monotonic() - segment.created > SEGMENT_AGE_S
                )
            ):
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
            starts = np.zeros(len(sizes), dtype=np.uint64)
            np.cumsum(np.asarray(sizes[:-1], dtype=np.uint64), out=starts[1:])
            entries["segment"] = segment.number
            entries["offset"] = starts + np.uint64(segment.offset)
            entries["slot"] = np.arange(
                segment.next_slot, segment.next_slot + len(sizes), dtype=np.uint32
            )
            segment.offset += total
            segment.next_slot += len(sizes)
            return segment

    def _take_back(self, segment: _Segment, entries: Entries, total: int) -> None:
        """Give the space of a run that could not be written back, if it is the last one."""
        start = int(entries["offset"][0])
        with self._lock:
            if segment.offset == start + total:
                with contextlib.suppress(OSError):
                    os.ftruncate(segment.fd, start)
                segment.offset = start
                segment.next_slot -= len(entries)

    def _notice_loss(self) -> bool:
        """Find out whether somebody has deleted the journal."""
        with self._journal_lock:
            if self._journal_fd >= 0 and not os.fstat(self._journal_fd).st_nlink:
                self.lost = True
        return self.lost

    def _check_kept(self, segment: _Segment) -> None:
        """Raise ``OSError`` if somebody has deleted the segment: nothing would be kept."""
        if not os.fstat(segment.fd).st_nlink:
            with self._lock:
                if self._segment is segment:
                    self._segment = None
            raise OSError(errno.ESTALE, "the segment was deleted")

    def _write(
        self, segment: _Segment, entries: Entries, buffers: BlockBuffers, blocks: Sequence[int]
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

    def _journal(self, entries: Entries) -> None:
        with self._journal_lock:
            if self._journal_fd < 0:
                raise OSError(errno.EBADF, "the writer is closed")
            data = seal_entries(entries, self.writer, self._entries, self._namespace)
            try:
                write_from(
                    self._journal_fd,
                    [memoryview(data)],
                    HEADER_BYTES + self._entries * ENTRY_BYTES,
                )
            except OSError:
                # What is whole stays: readers may know it already. A torn entry is
                # overwritten by the next one.
                end = os.fstat(self._journal_fd).st_size
                self._entries = max(self._entries, (end - HEADER_BYTES) // ENTRY_BYTES)
                raise
            self._entries += len(entries)
        if self._notice_loss():
            raise OSError(errno.ESTALE, "the journal was deleted")

    def bury(self, entries: Entries) -> None:
        with contextlib.suppress(OSError):
            self._journal(entries)

    def log_access(self, accesses: Entries) -> None:
        with contextlib.suppress(OSError), self._journal_lock:
            if self._closed:
                return
            if self._access_fd < 0:
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
            self._segment = None
            used = self._access_fd >= 0
            for fd in (self._journal_fd, self._access_fd):
                if fd >= 0:
                    os.close(fd)
            self._journal_fd = self._access_fd = -1
            stored = self._entries > 0 or self._next_segment > 0
            self._alive.release()
        # A process that stored nothing leaves nothing but what it used.
        kinds = () if stored else ("journal",) if used else ("journal", "lock")
        for kind in kinds:
            with contextlib.suppress(OSError):
                os.unlink(self._directory / f"{self._hex}.{kind}")
