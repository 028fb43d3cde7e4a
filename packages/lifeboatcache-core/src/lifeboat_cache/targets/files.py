"""Opening, reading and closing files with names of ours, whatever lies there.

Somebody may put a pipe, a device or a link where a file is expected: opening one may
wait for ever, and reading one may never end. A filesystem may answer a read with less
than was asked for, and report errors of earlier writes when a file is closed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "GONE",
    "NotAFileError",
    "close_file",
    "close_files",
    "cut_file",
    "is_gone",
    "late_errors",
    "open_file",
    "read_document",
    "read_range",
    "refresh_attributes",
]

#: What the system says of a file that is not there. ESTALE: deleted by another NFS client.
#: Any other error leaves open whether it is.
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})

#: How opening a link, a socket, a pipe without a reader, or a directory fails.
_STRANGE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV})

#: No document of ours is longer.
_MOST_BYTES = 64 << 20

_late_errors = 0

_AT_FDCWD = -100
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC = 0x7FF
_STATX_BYTES = 256


def _find_statx() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if function is not None:
        function.argtypes = [
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_void_p,
        ]
        function.restype = ctypes.c_int
    return function


_statx = _find_statx()


def _statx_room() -> Any:
    return ctypes.create_string_buffer(_STATX_BYTES)


class NotAFileError(OSError):
    """What has the name of one of our files is no regular file: it is left alone."""


def open_file(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file without ever waiting for somebody else.

    Parameters
    ----------
    path
        The file; no link is followed at its end.
    flags
        Of :func:`os.open`; what makes it safe is added.
    mode
        Of a file that is created.

    Raises
    ------
    NotAFileError
        If there is something else.
    OSError
        If it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in _STRANGE:
            raise NotAFileError(error.errno, "it is no regular file", str(path)) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotAFileError(errno.ENOTSUP, "it is no regular file", str(path))
    except BaseException:
        close_file(fd)
        raise
    return fd


def read_range(fd: int, length: int, offset: int) -> bytes:
    """Bytes of a file; fewer than asked for only at its end. Raises ``OSError``."""
    data = os.pread(fd, length, offset)
    if len(data) in (0, length):
        return data
    parts = [data]
    done = len(data)
    while done < length and (data := os.pread(fd, length - done, offset + done)):
        parts.append(data)
        done += len(data)
    return b"".join(parts)


def read_document(path: str | Path, most: int = _MOST_BYTES) -> bytes:
    """A whole file.

    Parameters
    ----------
    path
        The file.
    most
        A longer one is not ours.

    Raises
    ------
    NotAFileError
        If there is something else than a regular file.
    OSError
        If it cannot be read, or is too long.
    """
    fd = open_file(path)
    try:
        # One more than there is: by the end of the file it is known to be all.
        data = read_range(fd, min(os.fstat(fd).st_size, most) + 1, 0)
        while len(data) <= most and (more := read_range(fd, 1 << 16, len(data))):
            data += more
    finally:
        close_file(fd)
    if len(data) > most:
        raise OSError(errno.EFBIG, "it is too long for a file of LifeboatCache", str(path))
    return data


def refresh_attributes(path: str | Path) -> None:
    """Have the system ask the server how a file is, instead of remembering it.

    For those that look at it afterwards. What cannot be asked stays as it was remembered;
    faults are left to whoever looks.
    """
    if _statx is not None:
        _statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_BASIC, _statx_room())


def is_gone(path: str | Path) -> bool:
    """Whether nothing has this name. Raises ``OSError`` if that cannot be known.

    :func:`os.path.lexists` says of what cannot be looked at that it is not there.
    """
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno in GONE:
            return True
        raise
    return False


def cut_file(path: str | Path, size: int) -> None:
    """Cut a regular file off, or lengthen it. Raises ``OSError``.

    Unlike :func:`os.truncate` it does not follow a link to somebody else's file.
    """
    fd = open_file(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, size)
    finally:
        close_file(fd)


def close_file(fd: int) -> bool:
    """Close a file; whether no error was reported. Never raises.

    Network filesystems and FUSE report here that earlier writes failed. What was read
    is judged by its checksum, and so is what was written, when it is read again: there
    is nothing to be done but to count it. The descriptor is gone in any case.
    """
    global _late_errors
    try:
        os.close(fd)
    except OSError:
        _late_errors += 1
        return False
    return True


def close_files(fds: Iterable[int]) -> bool:
    """Close several files as :func:`close_file` does; negative numbers stand for none."""
    return all([close_file(fd) for fd in fds if fd >= 0])


def late_errors() -> int:
    """How many files of this process were closed with an error."""
    return _late_errors
