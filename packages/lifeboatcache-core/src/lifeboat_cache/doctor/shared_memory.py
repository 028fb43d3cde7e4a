"""Files that engines left in ``/dev/shm``.

vLLM's CPU tier is a file ``/dev/shm/vllm_offload_<engine id>.mmap``. An engine that
is killed can leave it behind, and with it all the memory of the tier.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lifeboat_cache.config.units import format_size
from lifeboat_cache.doctor.check import Check, Fix

__all__ = ["Leftover", "check_shared_memory", "find_leftovers", "remove_leftover"]

_DIRECTORY = Path("/dev/shm")
_PATTERN = "vllm_offload_*.mmap"
_NAME = "shared memory"


@dataclass(frozen=True)
class Leftover:
    """A file in shared memory.

    Attributes
    ----------
    path
        The file.
    size
        Bytes of memory that it holds.
    pids
        Processes seen to map it.
    state
        ``used``; ``unused``: the kernel says that nobody has it open or mapped;
        ``unknown``: nobody is seen to, but not everybody can be seen.
    """

    path: Path
    size: int
    pids: tuple[int, ...]
    state: Literal["used", "unused", "unknown"]


def find_leftovers(
    directory: Path = _DIRECTORY, proc: Path = Path("/proc")
) -> tuple[tuple[Leftover, ...], int]:
    """Return vLLM's files in shared memory, and how many processes could not be looked into."""
    found: list[tuple[Path, os.stat_result]] = []
    for path in sorted(directory.glob(_PATTERN)):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append((path, status))
    if not found:
        return (), 0
    users, hidden = _mapping_processes({(s.st_dev, s.st_ino) for _, s in found}, proc)
    leftovers = []
    for path, status in found:
        pids = tuple(users.get((status.st_dev, status.st_ino), ()))
        state: Literal["used", "unused", "unknown"]
        state = "used" if pids else _state_by_lease(path)
        leftovers.append(Leftover(path, status.st_blocks * 512, pids, state))
    return tuple(leftovers), hidden


def _mapping_processes(
    wanted: set[tuple[int, int]], proc: Path
) -> tuple[dict[tuple[int, int], list[int]], int]:
    users: dict[tuple[int, int], list[int]] = {}
    hidden = 0
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            text = (entry / "maps").read_text(errors="replace")
        except PermissionError:
            hidden += 1
            continue
        except OSError:
            # It has ended.
            continue
        for file in _mapped_files(text) & wanted:
            users.setdefault(file, []).append(int(entry.name))
    return users, hidden


def _mapped_files(maps: str) -> set[tuple[int, int]]:
    """Return device and inode of every mapping; names differ between mount namespaces."""
    files = set()
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0":
            major, _, minor = fields[3].partition(":")
            files.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return files


def _state_by_lease(path: Path) -> Literal["used", "unused", "unknown"]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return "unknown"
    try:
        return _take_lease(fd)
    finally:
        os.close(fd)


def _take_lease(fd: int) -> Literal["used", "unused", "unknown"]:
    """Try to take a write lease, which closing ``fd`` gives up.

    The kernel grants it only if nobody else has the file open or mapped. Unlike
    ``/proc`` that covers the processes of other users and of other containers.
    """
    if sys.platform != "linux":
        return "unknown"
    try:
        # Whoever opens the file meanwhile makes the kernel send a signal; the
        # default one would end this process, this one is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return "used" if error.errno == errno.EAGAIN else "unknown"
    return "unused"


def remove_leftover(leftover: Leftover) -> str:
    """Remove a file that nobody uses, and say so.

    It is asked again whether somebody uses it, and the answer holds until the file
    is gone; then the file stays, and that is said.
    """
    path = leftover.path
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return f"left {path}: {error.strerror}"
    try:
        if _take_lease(fd) != "unused":
            return f"left {path}: somebody uses it now"
        os.unlink(path)
    except OSError as error:
        return f"left {path}: {error.strerror}"
    finally:
        os.close(fd)
    return f"removed {path} ({format_size(leftover.size)})"


def check_shared_memory(directory: Path = _DIRECTORY) -> Check:
    """Look for files of dead vLLM processes in shared memory; they can be removed."""
    leftovers, hidden = find_leftovers(directory)
    unused = tuple(item for item in leftovers if item.state == "unused")
    unknown = tuple(item for item in leftovers if item.state == "unknown")
    details = [_describe(item) for item in leftovers]
    if hidden and unknown:
        details.append(f"the mappings of other users' processes ({hidden}) could not be read")
    if unused:
        size = format_size(sum(item.size for item in unused))
        files = "file" if len(unused) == 1 else "files"
        return Check(
            _NAME,
            "warn",
            f"{len(unused)} {files} of dead vLLM processes hold {size} of memory in {directory}",
            "Run: lifeboat-cache doctor --fix",
            tuple(details),
            Fix(
                f"Remove {len(unused)} {files} ({size}) that no process uses from {directory}?",
                lambda: tuple(map(remove_leftover, unused)),
            ),
        )
    if unknown:
        return Check(
            _NAME,
            "warn",
            f"it cannot be told whether {len(unknown)} of vLLM's files in {directory} are in use",
            "Run the doctor as the user that ran vLLM, or as root.",
            tuple(details),
        )
    used = f"; {len(leftovers)} in use" if leftovers else ""
    return Check(_NAME, "ok", f"vLLM left nothing in {directory}{used}", details=tuple(details))


def _describe(item: Leftover) -> str:
    who = {
        "used": "used by " + (", ".join(f"pid {pid}" for pid in item.pids) or "a hidden process"),
        "unused": "used by nobody",
        "unknown": "perhaps in use",
    }
    return f"{item.path}: {format_size(item.size)}, {who[item.state]}"
