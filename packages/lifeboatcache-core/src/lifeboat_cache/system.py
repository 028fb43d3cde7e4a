"""What is not the same on every system, by what the system offers.

Linux has it all. What macOS lacks is left out where it only makes things faster, and asked
for in its own way (:mod:`lifeboat_cache.darwin`) where it is needed.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

__all__ = ["DARWIN", "advise", "boot_seconds", "name_process", "usable_cpus"]

#: Whether this is macOS.
DARWIN = sys.platform == "darwin"

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
