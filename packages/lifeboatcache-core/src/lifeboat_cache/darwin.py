"""What macOS has to be asked in its own way: processes, mounts, space of files.

Written from Apple's headers (``sys/proc_info.h``, ``sys/mount.h``, ``sys/fcntl.h``). Every
function answers that it does not know where a call is missing or fails.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from functools import cache
from typing import Any, NamedTuple

__all__ = [
    "Mounted",
    "boot_session",
    "mounted",
    "parse_mounts",
    "parse_start",
    "process_start",
    "punch_hole",
    "skip_page_cache",
    "take_space",
]

# sys/proc_info.h: struct proc_bsdinfo, of which the start is two 64-bit words at the end.
_PROC_PIDTBSDINFO = 3
_BSDINFO_BYTES = 136
_START = struct.Struct("@120xQQ")

# sys/mount.h: struct statfs with 64-bit inode numbers.
_STATFS = struct.Struct("@64xII16s1024s1024s32x")
_MNT_NOWAIT = 2
_MNT_RDONLY, _MNT_LOCAL = 0x1, 0x1000

# sys/fcntl.h
_F_PREALLOCATE, _F_NOCACHE, _F_PUNCHHOLE = 42, 48, 99
_F_ALLOCATEALL, _F_PEOFPOSMODE = 4, 3
_FSTORE = struct.Struct("@Iiqqq")
_FPUNCHHOLE = struct.Struct("@IIqq")

#: What holes begin and end on.
_BLOCK = 4096

#: How a filesystem says that it has no such thing. EINVAL: one that knows the call only.
_UNSUPPORTED = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL})


class Mounted(NamedTuple):
    """A mounted file system: where, of which type, from where, whether written to, whether here."""

    point: str
    type: str
    source: str
    writable: bool
    local: bool


def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@cache
def boot_session() -> str:
    """A random name of this boot; empty if it cannot be known."""
    room, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    try:
        failed = _library().sysctlbyname(
            b"kern.bootsessionuuid", room, ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except AttributeError:
        return ""
    return "" if failed else room.value.decode("ascii", "replace")


def process_start(pid: int) -> int | None:
    """When a process started, in microseconds since the epoch.

    Returns
    -------
    int or None
        -1 if there is no such process, ``None`` if that cannot be known.
    """
    room = ctypes.create_string_buffer(_BSDINFO_BYTES)
    try:
        got = _library().proc_pidinfo(
            pid, _PROC_PIDTBSDINFO, ctypes.c_uint64(0), room, _BSDINFO_BYTES
        )
    except AttributeError:
        return None
    if got == _BSDINFO_BYTES:
        return parse_start(room.raw)
    # Of what belongs to others nothing is told; what waits for its parent has ended.
    return -1 if ctypes.get_errno() == errno.ESRCH else None


def parse_start(data: bytes) -> int:
    """The start of a process in a ``struct proc_bsdinfo``, in microseconds since the epoch."""
    seconds, microseconds = _START.unpack(data[: _START.size])
    return int(seconds) * 1_000_000 + int(microseconds)


def mounted() -> list[Mounted]:
    """All mounted file systems; none if unknown. Waits for none of them."""
    library = _library()
    # Its name where there was another one, with shorter inode numbers, before.
    ask = getattr(library, "getfsstat$INODE64", None) or getattr(library, "getfsstat", None)
    if ask is None:
        return []
    count = ask(None, 0, _MNT_NOWAIT)
    if count <= 0:
        return []
    room = ctypes.create_string_buffer((count + 8) * _STATFS.size)  # some may have come
    count = ask(room, len(room), _MNT_NOWAIT)
    return parse_mounts(room.raw[: max(0, count) * _STATFS.size])


def parse_mounts(data: bytes) -> list[Mounted]:
    """Mounts in an array of ``struct statfs``."""

    def text(value: bytes) -> str:
        return os.fsdecode(value.partition(b"\0")[0])

    return [
        Mounted(
            text(point),
            text(kind),
            text(source),
            not flags & _MNT_RDONLY,
            bool(flags & _MNT_LOCAL),
        )
        for flags, _, kind, point, source in _STATFS.iter_unpack(data)
    ]


def skip_page_cache(fd: int) -> None:
    """Have what is read and written through ``fd`` not stay in memory. Raises ``OSError``."""
    fcntl.fcntl(fd, _F_NOCACHE, 1)


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Deallocate the whole blocks of a range (:mod:`lifeboat_cache.targets.holes`)."""
    begin, end = -(-offset // _BLOCK) * _BLOCK, (offset + length) // _BLOCK * _BLOCK
    if end <= begin:
        return True
    return _ask(fd, _F_PUNCHHOLE, _FPUNCHHOLE.pack(0, 0, begin, end - begin))


def take_space(fd: int, length: int) -> bool:
    """Allocate bytes behind what a file has (:mod:`lifeboat_cache.targets.holes`)."""
    return _ask(fd, _F_PREALLOCATE, _FSTORE.pack(_F_ALLOCATEALL, _F_PEOFPOSMODE, 0, length, 0))


def _ask(fd: int, command: int, argument: bytes) -> bool:
    try:
        fcntl.fcntl(fd, command, argument)
    except OSError as exc:
        if exc.errno in _UNSUPPORTED:
            return False
        raise
    return True
