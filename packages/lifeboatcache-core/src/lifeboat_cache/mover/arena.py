"""Memory of the engine through which blocks go to and come from a mover.

A file in memory (``memfd``) of the engine, which the mover maps. The engine itself never maps it:
it copies between its blocks and the file with ``pwritev`` and ``preadv``, each of which moves up
to 1,024 pieces without the interpreter's lock and reports an error where there is no memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.targets.holes import punch_hole

__all__ = ["PAGE", "Arena", "Extent", "padded_offsets"]

#: Blocks begin at such a boundary, as direct I/O wants it.
PAGE = 4096

_MOST_PIECES = 1024

_IOV = npt.NDArray[np.uint64]

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("preadv", "pwritev"):
    _function = getattr(_libc, _name)
    _function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _function.restype = ctypes.c_ssize_t

# What lies between two blocks whose size is no whole number of pages, in and out.
_zeros = np.zeros(PAGE, dtype=np.uint8)
_sink = np.zeros(PAGE, dtype=np.uint8)


def _sealed_memory(size: int) -> int:
    """A file in memory, whose size nobody can change. Raises ``OSError``."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "this system has no sealed memory files")
    fd = os.memfd_create("lifeboat-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Nobody can take memory away from under the other side's feet.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Extent:
    """A range of an arena in use by one part of a job; in bytes."""

    __slots__ = ("length", "offset")

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length


def padded_offsets(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 ``(n + 1,)``: where blocks of some sizes begin, each on a page; last, where all end."""
    offsets = np.zeros(sizes.shape[0] + 1, dtype=np.int64)
    np.cumsum(-(-sizes // PAGE) * PAGE, out=offsets[1:])
    return offsets


class Arena:
    """A bounded file in memory, given out in ranges. Not thread-safe but for copying.

    Parameters
    ----------
    size
        Bytes; memory is taken as it is used.

    Raises
    ------
    OSError
        If the system gives none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = _sealed_memory(size)
        self._free: list[tuple[int, int]] = [(0, size)]  # offset, length; in order
        self.used = 0

    def take(self, length: int) -> Extent | None:
        """A range of so many bytes, rounded up to pages; ``None`` if there is none now."""
        length = max(PAGE, -(-length // PAGE) * PAGE)
        for number, (offset, room) in enumerate(self._free):
            if room >= length:
                if room == length:
                    del self._free[number]
                else:
                    self._free[number] = (offset + length, room - length)
                self.used += length
                return Extent(offset, length)
        return None

    def give_back(self, extent: Extent) -> None:
        """Give a range back that nobody touches any more."""
        self.used -= extent.length
        at = bisect_left(self._free, (extent.offset, 0))
        insort(self._free, (extent.offset, extent.length))
        if at + 1 < len(self._free) and sum(self._free[at]) == self._free[at + 1][0]:
            self._free[at] = (self._free[at][0], self._free[at][1] + self._free[at + 1][1])
            del self._free[at + 1]
        if at > 0 and sum(self._free[at - 1]) == self._free[at][0]:
            self._free[at - 1] = (self._free[at - 1][0], self._free[at - 1][1] + self._free[at][1])
            del self._free[at]

    def forget(self, extent: Extent) -> None:
        """Let go of the memory of a range, which stays in use. Raises ``OSError``."""
        punch_hole(self.fd, extent.offset, extent.length)

    def fill(self, extent: Extent, buffers: BlockBuffers, sizes: npt.NDArray[np.int64]) -> None:
        """Copy blocks of some sizes into a range, each to a page boundary. Raises ``OSError``."""
        _move(_libc.pwritev, self.fd, extent.offset, _pieces(buffers, sizes, _zeros))

    def empty(self, extent: Extent, buffers: BlockBuffers, sizes: npt.NDArray[np.int64]) -> None:
        """Copy a range out to blocks. Raises ``OSError``."""
        _move(_libc.preadv, self.fd, extent.offset, _pieces(buffers, sizes, _sink))

    def close(self) -> None:
        """Let go of the file. Idempotent; who maps it keeps its memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pieces(
    buffers: BlockBuffers, sizes: npt.NDArray[np.int64], filler: npt.NDArray[np.uint8]
) -> _IOV:
    """uint64 ``(n, 2)``: address and length of all pieces, and of what fills the pages."""
    gaps = -sizes % PAGE
    iov = np.empty((buffers.lengths.shape[0], 2), dtype=np.uint64)
    iov[:, 0], iov[:, 1] = buffers.addresses, buffers.lengths
    if not gaps.any():
        return iov
    after = np.flatnonzero(gaps)
    between = np.empty((after.shape[0], 2), dtype=np.uint64)
    between[:, 0], between[:, 1] = filler.ctypes.data, gaps[after]
    mixed: _IOV = np.insert(iov, buffers.starts[after + 1], between, axis=0)
    return mixed


def _move(call: ctypes._NamedFuncPointer, fd: int, offset: int, iov: _IOV) -> None:
    if not iov[:, 1].all():
        iov = iov[iov[:, 1] > 0]
    ends: npt.NDArray[np.int64] | None = None
    first, moved = 0, 0
    while first < iov.shape[0]:
        count = min(_MOST_PIECES, iov.shape[0] - first)
        done = int(call(fd, iov.ctypes.data + 16 * first, count, offset + moved))
        if done < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            raise OSError(number, os.strerror(number))
        if not done:
            raise OSError(errno.EIO, "the arena is shorter than it was")
        moved += done
        if ends is None:
            if iov.shape[0] <= _MOST_PIECES and done == int(iov[:, 1].sum()):
                return
            ends = np.cumsum(iov[:, 1].astype(np.int64))
        first = int(np.searchsorted(ends, moved, side="right"))
        if first < iov.shape[0] and (left := int(ends[first]) - moved) < int(iov[first, 1]):
            # Moved in part: go on where it stopped.
            iov[first, 0] += iov[first, 1] - np.uint64(left)
            iov[first, 1] = left
