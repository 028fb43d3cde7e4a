"""A plugin of pytest that takes away what macOS does not have, as far as that can be done.

No O_DIRECT, no advice about files, no memory files, no ``/proc``, no clock that goes
on in sleep by Linux's name; processes and mounts are told by what
``lifeboat_cache.darwin`` answers, for which Linux gives the facts here. What stays Linux's: the
C library, its error numbers, and the machine code of kernels.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import socket
import time
from pathlib import Path
from typing import Any

_LACKING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        os,
        (
            "O_DIRECT",
            "O_PATH",
            "memfd_create",
            "pidfd_open",
            "pipe2",
            "posix_fadvise",
            "sched_getaffinity",
            "sched_setaffinity",
        ),
    ),
    (fcntl, ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SETSIG")),
    (socket, ("MSG_CMSG_CLOEXEC", "SO_PEERCRED")),
    (time, ("CLOCK_BOOTTIME",)),
)


def _started(pid: int) -> int | None:
    """What macOS says of a process, of this system's facts."""
    try:
        with _OPEN(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return -1


_OPEN = builtins.open

#: HFS+ has no holes, and APFS does.
_HOLES = os.environ.get("LIFEBOAT_TEST_HOLES") != "off"


def _hides(path: object) -> bool:
    return isinstance(path, (str, Path)) and str(path).startswith("/proc")


def _without_proc(function: Any) -> Any:
    def call(path: Any, *args: Any, **options: Any) -> Any:
        if _hides(path):
            raise FileNotFoundError(2, "there is no /proc", str(path))
        return function(path, *args, **options)

    return call


def _punch(fd: int, offset: int, length: int) -> bool:
    """As APFS does: whole blocks only."""
    from lifeboat_cache.targets import holes

    begin, end = -(-offset // 4096) * 4096, (offset + length) // 4096 * 4096
    if not _HOLES:
        return False
    return end <= begin or holes._call(fd, 3, begin, end - begin)


def _take(fd: int, length: int) -> bool:
    """As APFS does: behind what the file has."""
    from lifeboat_cache.targets import holes

    return _HOLES and holes._call(fd, 1, os.fstat(fd).st_blocks * 512, length)


def _take_away() -> None:
    for module, names in _LACKING:
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    # Before those are imported that ask for it.
    from lifeboat_cache import darwin, system

    answers: dict[str, Any] = {
        "boot_session": lambda: "one boot",
        "process_start": _started,
        "mounted": lambda: [darwin.Mounted("/", "apfs", "/dev/disk3s1s1", True, True)],
        "skip_page_cache": lambda fd: None,
        "punch_hole": _punch,
        "take_space": _take,
    }
    for name, answer in answers.items():
        setattr(darwin, name, answer)
    system.DARWIN = True
    from lifeboat_cache.targets import files

    files._statx = None
    for module, name in ((builtins, "open"), (io, "open"), (os, "readlink"), (os, "stat")):
        setattr(module, name, _without_proc(getattr(module, name)))


# Now: pytest loads a plugin before conftests, which import what asks for these.
_take_away()
