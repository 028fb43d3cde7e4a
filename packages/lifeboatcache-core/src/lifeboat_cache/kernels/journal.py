"""Appending to a journal: checks, checksums and the write in one call without the GIL.

Each system call that Python makes lets go of the GIL, and beside a thread that computes
in Python it takes up to 5 ms to win it back.
"""

from __future__ import annotations

import errno as errors
from typing import Any

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from lifeboat_cache.kernels import blake3_short, raw
from lifeboat_cache.kernels.jit import helper, kernel
from lifeboat_cache.kernels.libc import errno, pwrite
from lifeboat_cache.kernels.syscalls import STATX

__all__ = ["DELETED", "DEVICE", "INODE", "JOURNAL_ERRNO", "UNKNOWN", "WORDS", "append"]

#: What :func:`append` answers: the place of the first segment that has been deleted, or -1;
DELETED = 0
#: device (major number << 32 | minor number) and inode that the journal's name leads to,
DEVICE = 1
INODE = 2
#: the error number of looking for it; and not 0 if this kernel of the system cannot tell.
JOURNAL_ERRNO = 3
UNKNOWN = 4
WORDS = 5

_EINTR = errors.EINTR
_EIO = errors.EIO
_ENOSYS = np.int64(errors.ENOSYS)
#: The system, or a filter of calls around a container, does not know the call.
_NO_CALL = (errors.EPERM, errors.ENOSYS)

# Of statx(2), whose struct is the same everywhere.
_AT_FDCWD = np.int64(-100)
_AT_SYMLINK_NOFOLLOW = np.int64(0x100)
_AT_EMPTY_PATH = np.int64(0x1000)
_NLINK_AND_INODE = np.int64(0x4 | 0x100)
_STATX_BYTES = 256
_AT_NLINK, _AT_INODE, _AT_MAJOR, _AT_MINOR = 16, 32, 136, 140

_i64 = types.int64

if STATX:
    _syscall = ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64))
    _number = np.int64(STATX)

    @helper
    def _look(directory: Any, path: Any, flags: Any, into: Any) -> Any:
        """Call statx; returns the error number."""
        while _syscall(_number, directory, path, flags, _NLINK_AND_INODE, into) < 0:
            error = np.int64(errno())
            if error != _EINTR:
                return error
        return np.int64(0)

else:

    @helper
    def _look(directory: Any, path: Any, flags: Any, into: Any) -> Any:  # noqa: ARG001
        """There is no such call: Python looks afterwards."""
        return _ENOSYS


@kernel("int64(int64[::1], int32, int64, int64, int64, int64, int64, int64, int64, int64[::1])")
def append(
    segments: Any,
    journal: Any,
    position: Any,
    entries: Any,
    count: Any,
    writer: Any,
    first_index: Any,
    namespace: Any,
    name: Any,
    answer: Any,
) -> Any:
    """Seal journal entries and write them, unless a segment of theirs has been deleted.

    Parameters
    ----------
    segments
        Descriptors of their segments.
    journal, position
        Descriptor, and where in the file to write.
    entries, count, writer, first_index, namespace
        As for :func:`blake3_short.seal_entries`.
    name
        Address of the journal's path, which ends in a zero.
    answer
        int64 ``(WORDS,)``, filled in. Where the name leads to is found out after the
        write: what was written before somebody removed it is not kept.

    Returns
    -------
    int64
        Error number of the write, or 0.
    """
    found = raw.stack(_STATX_BYTES)
    empty = raw.stack(8)
    raw.zero(empty, np.uint64(8))
    answer[DELETED] = -1
    answer[UNKNOWN] = 0
    for number in range(len(segments)):
        error = _look(segments[number], np.int64(empty), _AT_EMPTY_PATH, np.int64(found))
        if error in _NO_CALL:
            answer[UNKNOWN] = error
        elif error != 0:
            return error
        elif raw.load_u32(found + np.uint64(_AT_NLINK)) == 0:
            answer[DELETED] = number
            return np.int64(0)
    blake3_short.seal_entries(entries, count, writer, first_index, namespace)
    left, at = np.int64(128) * count, np.int64(entries)
    while left > 0:
        moved = pwrite(journal, at, np.uint64(left), position)
        if moved < 0:
            error = np.int64(errno())
            if error == _EINTR:
                continue
            return error
        if moved == 0:
            return np.int64(_EIO)
        at += moved
        position += moved
        left -= moved
    error = _look(_AT_FDCWD, name, _AT_SYMLINK_NOFOLLOW, np.int64(found))
    if error in _NO_CALL:
        answer[UNKNOWN] = error
    answer[JOURNAL_ERRNO] = error
    major = np.int64(raw.load_u32(found + np.uint64(_AT_MAJOR)))
    minor = np.int64(raw.load_u32(found + np.uint64(_AT_MINOR)))
    answer[DEVICE] = (major << 32) | minor
    answer[INODE] = np.int64(raw.load_u64(found + np.uint64(_AT_INODE)))
    return np.int64(0)
