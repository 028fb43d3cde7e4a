"""What is not the same on every system, by what the system offers.

Linux has it all. What macOS lacks is left out where it only makes things faster, and asked
for in its own way (:mod:`lifeboat_cache.darwin`) where it is needed.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["DARWIN", "advise", "boot_seconds", "io_memory", "name_process", "usable_cpus"]

#: Whether this is macOS.
DARWIN = sys.platform == "darwin"

#: Python has no name for it.
_MADV_WIPEONFORK = 18 if sys.platform == "linux" else None

_Advice = Literal["willneed", "dontneed", "random"]


def advise(fd: int, advice: _Advice, offset: int = 0, length: int = 0) -> None:
    """Say how a file is going to be read; nothing where the system takes no advice.

    Parameters
    ----------
    fd
        Of the file.
    advice
        ``"dontneed"`` drops clean pages from the page cache.
    offset, length
        In bytes; a length of 0 reaches to the end of the file.
    """
    tell = getattr(os, "posix_fadvise", None)
    if tell is None:
        return
    try:
        tell(fd, offset, length, getattr(os, f"POSIX_FADV_{advice.upper()}"))
    except OSError:
        pass  # advice only


def io_memory(size: int) -> npt.NDArray[np.uint8]:
    """Memory of this process's own that a device reads into and writes from.

    It lies in huge pages where the system gives any: scattered small ones cut what is asked of
    a device into many requests, which has cost a virtual disk a quarter of its speed.

    Parameters
    ----------
    size
        In bytes.

    Returns
    -------
    uint8 ``(size,)``
        On a page boundary, zeros. A forked child finds zeros there.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child that shared it would have every page copied that is written to meanwhile. One that
    # had nothing there (MADV_DONTFORK) would put something else there, and lose that as soon as
    # it let go of the array.
    for number in (getattr(mmap, "MADV_HUGEPAGE", None), _MADV_WIPEONFORK):
        if number is not None:
            try:
                pages.madvise(number)
            except OSError:
                pass  # advice only: a kernel without huge pages
    return np.frombuffer(pages, dtype=np.uint8)


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    try:
        if affinity is not None:
            return max(1, len(affinity(0)))
    except OSError:
        pass
    return os.cpu_count() or 1


def boot_seconds() -> float:
    """Seconds that never jump and go on while the machine sleeps."""
    # What Linux calls by the second name stops when the machine sleeps; on macOS it goes on.
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def name_process(name: str) -> None:
    """Say what `ps` and `top` call this process, where that can be said."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        pass
