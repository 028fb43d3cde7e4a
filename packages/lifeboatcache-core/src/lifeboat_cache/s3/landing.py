"""Memory that parts of objects are read into, where the kernels find them as in a file."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time

__all__ = ["Landing", "LandingArea"]

#: What is under way may take so many bytes.
_LIMIT_BYTES = 128 << 20

#: Memory is kept so long for the next use: new one costs page faults.
_KEPT_S = 30.0

_LEAST_BYTES = 1 << 20

#: What is kept serves where it is so many times as large as what is wanted, at most.
_MOST_SPARE = 4


def _memory_file() -> int:
    """A file in memory. Raises ``OSError``."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "this system has no files in memory")
    return os.memfd_create("lifeboat-s3", os.MFD_CLOEXEC)


class Landing:
    """A piece of memory that has a descriptor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = _memory_file()
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)
        self.idle_since = 0.0

    def close(self) -> None:
        """Give it back to the system."""
        self.view.release()
        self._map.close()
        os.close(self.fd)


class LandingArea:
    """Hands out memory, no more at a time than there may be. Thread-safe."""

    def __init__(self, limit: int = _LIMIT_BYTES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._used = 0
        self._idle: list[Landing] = []

    @property
    def free(self) -> bool:
        """Whether there is memory to be had."""
        return self._used < self._limit

    def take(self, size: int) -> Landing:
        """Memory for ``size`` bytes, also if it is more than is free.

        Raises
        ------
        OSError
            If the system has none.
        """
        wanted = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        with self._lock:
            self._used += wanted
            fit = min(
                (one for one in self._idle if wanted <= one.size <= _MOST_SPARE * wanted),
                key=lambda one: (one.size, -one.idle_since),
                default=None,
            )
            if fit is not None:
                self._idle.remove(fit)
                self._used += fit.size - wanted
                return fit
        try:
            return Landing(wanted)
        except BaseException:
            with self._lock:
                self._used -= wanted
            raise

    def give_back(self, landing: Landing) -> None:
        """Say that nothing uses a piece of memory any more."""
        now = time.monotonic()
        landing.idle_since = now
        with self._lock:
            self._used -= landing.size
            self._idle.append(landing)
            # As much as is under way now may be wanted again by what comes next.
            kept = sum(one.size for one in self._idle)
            old: list[Landing] = []
            while self._idle and kept > self._limit:
                old.append(self._idle.pop(0))
                kept -= old[-1].size
        for one in old:
            one.close()

    def tidy(self) -> None:
        """Give memory back to the system that was not used for a while."""
        oldest = time.monotonic() - _KEPT_S
        with self._lock:
            old = [one for one in self._idle if one.idle_since < oldest]
            self._idle = [one for one in self._idle if one.idle_since >= oldest]
        for one in old:
            one.close()
