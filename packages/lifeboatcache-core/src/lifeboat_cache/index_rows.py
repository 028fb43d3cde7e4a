"""The memory of the index's records, and the lock that guards it."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.journal import ENTRY
from lifeboat_cache.index_answers import Words

__all__ = ["Gate", "Rows", "Small"]

#: The same memory in 32-bit fields.
Small = npt.NDArray[np.uint32]

_LEAST_ROWS = 1024

#: Who lets go of the lock while somebody else waits for it pauses for so many seconds.
_PAUSE_S = 50e-6


class Gate:
    """A lock whose holder for long lets go for those who want it shortly."""

    __slots__ = ("_lock", "_wanted")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            self._wanted = True
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def give_way(self) -> None:
        """Without the lock: let somebody else have it who waits.

        A lock that is let go and taken again at once is never got by a thread that
        sleeps for it.
        """
        if self._wanted:
            self._wanted = False
            time.sleep(_PAUSE_S)


class Rows:
    """Growing arrays of rows, in memory that the system extends without copying it."""

    def __init__(self) -> None:
        self.capacity = _LEAST_ROWS
        self._memory = _mapped(_LEAST_ROWS * ENTRY.itemsize)
        self._links_memory = _mapped(_LEAST_ROWS * 4)
        self._view()

    def _view(self) -> None:
        self.words: Words = np.frombuffer(self._memory, dtype=np.int64)
        self.small: Small = np.frombuffer(self._memory, dtype=np.uint32)
        self.links: npt.NDArray[np.int32] = np.frombuffer(self._links_memory, dtype=np.int32)

    def grow(self, capacity: int) -> None:
        """Make room; under the index's lock, nobody has one of the arrays."""
        del self.words, self.small, self.links
        try:
            self._memory = _extended(self._memory, capacity * ENTRY.itemsize)
            self._links_memory = _extended(self._links_memory, capacity * 4)
            self.capacity = capacity
        finally:
            self._view()

    @property
    def nbytes(self) -> int:
        return len(self._memory) + len(self._links_memory)


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _extended(memory: mmap.mmap, size: int) -> mmap.mmap:
    try:
        memory.resize(size)
        return memory
    except (BufferError, SystemError):  # a view is left somewhere, or no mremap
        larger = _mapped(size)
        larger[: len(memory)] = memory[:]
        return larger
