"""Making files cold."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["forget_pages"]


def forget_pages(directory: Path) -> None:
    """Drop the files below a directory, or one file, from the page cache."""
    os.sync()  # only clean pages can be dropped
    for path in [directory, *directory.rglob("*")]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
