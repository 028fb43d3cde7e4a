"""Reading and setting dead bits on disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.bitmap import MOST_BYTES, dead_slots, set_dead
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_DEAD, FileHeader
from lifeboat_cache.janitor.rows import Bools
from lifeboat_cache.targets.direct import write_from
from lifeboat_cache.targets.files import close_file, open_file, read_range
from lifeboat_cache.targets.layout import segment_name, write_atomically

__all__ = ["Bitmap"]


class Bitmap:
    """The dead bitmap of one segment.

    Parameters
    ----------
    directory, namespace
        The namespace's directory and its 32-byte digest.
    writer, segment
        Whose segment it is.
    """

    __slots__ = ("_header", "_stamp", "path", "seen")

    def __init__(self, directory: Path, namespace: bytes, writer: bytes, segment: int) -> None:
        self.path = directory / segment_name(writer.hex(), segment, "dead")
        self._header = FileHeader(MAGIC_DEAD, namespace, writer, segment, 0)
        self._stamp: tuple[int, int, int] | None = None
        #: How many rows the bits were last applied to.
        self.seen = 0

    def changed(self, stat: os.stat_result | None) -> bool:
        """Whether the file is another one than at the last :meth:`read`, by its stat."""
        return stat is not None and self._stamp_of(stat) != self._stamp

    @staticmethod
    def _stamp_of(stat: os.stat_result) -> tuple[int, int, int]:
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def read(self) -> Bools:
        """Which slots are dead; none if there is no bitmap that readers take.

        Raises
        ------
        NewerFormatError
            If a newer release wrote it.
        """
        none: Bools = np.zeros(0, dtype=np.bool_)
        try:
            fd = open_file(self.path)
        except OSError:
            return none
        try:
            stamp = self._stamp_of(os.fstat(fd))
            body = self._body(fd)
        except OSError:
            return none
        finally:
            close_file(fd)
        self._stamp = stamp
        return none if body is None else dead_slots(body)

    def _body(self, fd: int) -> bytes | None:
        size = max(os.fstat(fd).st_size, HEADER_BYTES)
        data = read_range(fd, min(size, HEADER_BYTES + MOST_BYTES), 0)
        try:
            header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_DEAD, self.path.name)
        except NewerFormatError:
            raise
        except FormatError:
            return None
        mine = self._header
        if (header.namespace, header.writer, header.segment) != (
            mine.namespace,
            mine.writer,
            mine.segment,
        ):
            return None
        return data[HEADER_BYTES:]

    def mark(self, slots: npt.NDArray[np.int64], created: int) -> None:
        """Set the bits of slots. Raises ``OSError`` if they are not all set afterwards.

        Bits are only ever set, so that doing it twice, or two janitors doing it at
        once, is harmless.
        """
        body: bytes | None = None
        try:
            fd = open_file(self.path, os.O_RDWR)
        except FileNotFoundError:
            fd = -1
        if fd >= 0:
            try:
                body = self._body(fd)
                if body is not None:
                    first = int(slots.min()) // 8
                    last = int(slots.max()) // 8 + 1
                    part = body[first:last]
                    relative = slots - first * 8
                    write_from(fd, [memoryview(set_dead(part, relative))], HEADER_BYTES + first)
            finally:
                close_file(fd)
        if body is None:
            # There is none, or one that nobody reads.
            mine = self._header
            header = FileHeader(MAGIC_DEAD, mine.namespace, mine.writer, mine.segment, created)
            # Bits that a power loss takes away are set again, or their payloads found bad.
            data = header.pack() + set_dead(b"", slots)
            write_atomically(self.path, data, durable=False)

    def remove(self) -> None:
        """Remove the file, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
