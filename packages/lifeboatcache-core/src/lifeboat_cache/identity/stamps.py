"""File stamps: whether a file is still the one that was looked at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache import darwin
from lifeboat_cache.errors import IdentityError
from lifeboat_cache.system import DARWIN

__all__ = ["FileStamp", "process_start_time", "stamp", "stamps_of"]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What ``stat`` says of a file, symbolic links followed.

    Attributes
    ----------
    size
        Bytes.
    mtime_ns, ctime_ns
        Times of the last change of the content and of the inode, nanoseconds.
    inode, device
        Which file it is: a file renamed over another has another inode.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @property
    def changed_at(self) -> float:
        """The later of both times, in seconds since the epoch.

        ``rsync -t`` and ``cp -p`` set an old mtime on a new file; the ctime
        cannot be set.
        """
        return max(self.mtime_ns, self.ctime_ns) / 1e9


def stamp(path: Path | int) -> FileStamp:
    """Stamp a path or an open file descriptor.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    info = os.stat(path)
    return FileStamp(info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev)


def stamps_of(files: tuple[Path, ...]) -> tuple[FileStamp, ...]:
    """Stamp several files, in order.

    Raises
    ------
    IdentityError
        If one cannot be read.
    """
    found = []
    for path in files:
        try:
            found.append(stamp(path))
        except OSError as exc:
            raise IdentityError(
                f"{path}: cannot be read ({exc.strerror}): make it readable for the engine's user"
            ) from exc
    return tuple(found)


def process_start_time(pid: int | None = None) -> float | None:
    """When a process started, in seconds since the epoch.

    Parameters
    ----------
    pid
        The process; this one if omitted.

    Returns
    -------
    float or None
        ``None`` where the system does not say.
    """
    if DARWIN:
        start = darwin.process_start(pid or os.getpid())
        return None if start is None or start < 0 else start / 1e6
    try:
        text = Path(f"/proc/{pid or 'self'}/stat").read_text("ascii", "replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    import time

    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
