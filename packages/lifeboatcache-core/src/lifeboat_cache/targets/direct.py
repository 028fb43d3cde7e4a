"""Vectored file I/O between a file and pieces of memory."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lifeboat_cache import darwin
from lifeboat_cache.errors import TargetError
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.system import DARWIN
from lifeboat_cache.targets.files import close_file, open_file
from lifeboat_cache.targets.mounts import kind_of, mount_of

__all__ = [
    "ALIGNMENT",
    "MAX_PIECES",
    "open_direct",
    "read_into",
    "supports_direct",
    "write_from",
]

#: O_DIRECT wants addresses, lengths and offsets aligned; a page suits every device.
ALIGNMENT = HEADER_BYTES

#: Linux's UIO_MAXIOV: ``preadv`` and ``pwritev`` take no more pieces.
MAX_PIECES = 1024

O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def open_direct(path: str | Path, flags: int) -> int:
    """Open a file past the page cache; see :func:`lifeboat_cache.targets.files.open_file`.

    Raises
    ------
    OSError
        ``EINVAL`` if the filesystem does not take it.
    """
    if not DARWIN:
        return open_file(path, flags | O_DIRECT)
    fd = open_file(path, flags)
    try:
        darwin.skip_page_cache(fd)
    except BaseException:
        close_file(fd)
        raise
    return fd


def supports_direct(directory: Path, wanted: Literal["auto", "on", "off"]) -> bool:
    """Whether files in ``directory`` bypass the page cache; found out by writing one.

    Raises
    ------
    TargetError
        If ``wanted`` is ``"on"`` and the filesystem refuses.
    """
    if wanted == "off" or (DARWIN and wanted == "auto"):
        return False  # on macOS the page cache is the only memory that an engine's KV is in
    mount = mount_of(directory) if wanted == "auto" else None
    if mount is not None and kind_of(mount.type) == "memory":
        return False  # tmpfs takes it, and copies all the same
    path = directory / f".direct.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    reason = "this platform has no O_DIRECT"
    if O_DIRECT or DARWIN:
        try:
            close_file(open_file(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            fd = open_direct(path, os.O_WRONLY)
            try:
                with mmap.mmap(-1, ALIGNMENT) as page:
                    os.pwritev(fd, [page], 0)
            finally:
                close_file(fd)
            return True
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                return True  # it only lacks the space
            reason = exc.strerror or str(exc)
        finally:
            try:
                os.unlink(path)
            except OSError:
                pass
    if wanted == "on":
        raise TargetError(
            errno.EINVAL,
            f"{directory}: direct_io is on but does not work here ({reason}): "
            "set direct_io to auto or off",
        )
    return False


def _advance(pieces: list[memoryview], moved: int) -> list[memoryview]:
    for number, piece in enumerate(pieces):
        if moved < piece.nbytes:
            return [piece[moved:], *pieces[number + 1 :]]
        moved -= piece.nbytes
    return []


def write_from(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Write all pieces at ``offset``, through short writes. Raises ``OSError``."""
    left = list(pieces)
    while left:
        moved = os.pwritev(fd, left[:MAX_PIECES], offset)
        if moved == 0:
            raise OSError(errno.EIO, "a write made no progress")
        offset += moved
        left = _advance(left, moved)


def read_into(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Fill the pieces from ``offset``. Raises ``OSError``.

    Returns the bytes read; they are fewer than asked for only at the end of the file.
    """
    left = list(pieces)
    total = 0
    while left:
        try:
            moved = os.preadv(fd, left[:MAX_PIECES], offset)
        except OSError as exc:
            # O_DIRECT at the end of a file that was cut at an odd length.
            if total and exc.errno == errno.EINVAL:
                break
            raise
        if moved == 0:
            break
        offset += moved
        total += moved
        left = _advance(left, moved)
    return total
