"""Making files cold."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lifeboat_cache.system import advise

__all__ = ["forget_pages"]


def forget_pages(path: Path) -> None:
    """Drop a file, or the files below a directory, from the page cache.

    They are written out first: only clean pages can be dropped. What vanishes
    meanwhile, and what may not be read, is left out. Files of a
    memory-backed filesystem stay where they are.
    """
    files = [path] if path.is_file() else []
    # Not Path.rglob, which fails where a directory vanishes.
    files += [Path(place, name) for place, _, names in os.walk(path) for name in names]
    for found in files:
        try:
            fd = os.open(found, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.fsync(fd)
                advise(fd, "dontneed")
        finally:
            os.close(fd)
