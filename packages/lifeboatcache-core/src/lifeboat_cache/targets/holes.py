"""Giving back the space of a part of a file, and taking space before it is written."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from lifeboat_cache import darwin
from lifeboat_cache.system import DARWIN

__all__ = ["data_start", "punch_hole", "take_space"]

_KEEP_SIZE = 1
_PUNCH_HOLE = 2

#: What a filesystem without holes answers.
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})


def _find_fallocate() -> Any:
    # glibc's posix_fallocate, which Python offers, can only allocate.
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        function.restype = ctypes.c_int
    return function


_fallocate = _find_fallocate()


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Deallocate a range of a file, which reads as zeros from then on.

    Parameters
    ----------
    fd
        Open for writing.
    offset, length
        In bytes; whole filesystem blocks inside are given back.

    Returns
    -------
    bool
        False if the filesystem has no holes.

    Raises
    ------
    OSError
        If it has them and the call failed.
    """
    if DARWIN:
        return darwin.punch_hole(fd, offset, length)
    return _call(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def take_space(fd: int, offset: int, length: int) -> bool:
    """Allocate a range of a file without changing its size.

    Returns
    -------
    bool
        False if the filesystem cannot.

    Raises
    ------
    OSError
        If it can and the call failed: ``ENOSPC`` when the disk is full.
    """
    if DARWIN:  # behind what there is: nobody takes space in another order
        return darwin.take_space(fd, length)
    return _call(fd, _KEEP_SIZE, offset, length)


def _call(fd: int, mode: int, offset: int, length: int) -> bool:
    if _fallocate is None:
        return False
    while True:
        if _fallocate(fd, mode, offset, length) == 0:
            return True
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def data_start(fd: int, offset: int) -> int:
    """Where data begins at or behind ``offset``; the file's size if there is none.

    Where the filesystem does not tell, everything counts as data.
    """
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return os.fstat(fd).st_size
        return offset
