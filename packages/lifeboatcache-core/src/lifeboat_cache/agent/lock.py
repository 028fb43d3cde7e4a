"""Who is the agent: a locked file, and the file itself.

The lock keeps a second agent from starting beside a living one. An agent that hangs
cannot be made to let go of it, so the next one puts a file of its own in the place:
whoever finds that the file there is not the one that it has open was replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from enum import Enum
from pathlib import Path

from lifeboat_cache.system import DARWIN
from lifeboat_cache.targets.files import close_file, open_file

__all__ = ["AgentLock", "Holding", "probe"]

# struct flock of 64-bit Linux: type, whence, start, length, pid.
#: ``struct flock``: how to pack it, and where the kind of lock is.
_FLOCK = struct.Struct("@qqihh" if DARWIN else "@hhqqi4x")
_KIND = 3 if DARWIN else 0

# Locks of this very process: to open and close such a file would drop its lock.
_own: set[str] = set()
_guard = threading.Lock()


def _after_fork() -> None:
    """In a forked child: the locks stayed with the parent."""
    global _guard
    _guard = threading.Lock()
    _own.clear()


os.register_at_fork(after_in_child=_after_fork)


class Holding(Enum):
    """What is known about a lock."""

    #: The file is not there, or nobody holds it.
    FREE = "free"
    HELD = "held"
    #: The filesystem has no locks.
    UNKNOWN = "unknown"


def probe(path: Path) -> Holding:
    """Whether a lock is held, without taking it.

    Raises
    ------
    OSError
        If the file is there and cannot be opened.
    """
    with _guard:
        if str(path) in _own:
            return Holding.HELD
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Holding.FREE
    try:
        # Asked, not tried: a lock taken for a moment would keep an agent from starting.
        kind, rest = (fcntl.F_WRLCK, os.SEEK_SET), (0, 0, 0)
        question = _FLOCK.pack(*((*rest, *kind) if DARWIN else (*kind, *rest)))
        answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, question))
    except (OSError, struct.error):
        return Holding.UNKNOWN
    finally:
        close_file(fd)
    return Holding.FREE if answer[_KIND] == fcntl.F_UNLCK else Holding.HELD


class AgentLock:
    """A file that this process holds; see :meth:`acquire`."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        with _guard:
            _own.add(str(path))

    @classmethod
    def acquire(cls, path: Path, *, replace: bool = False) -> AgentLock | None:
        """Take the lock.

        Parameters
        ----------
        path
            The file, in an existing directory.
        replace
            Put a new file in its place, whoever holds the old one.

        Returns
        -------
        AgentLock or None
            ``None`` if another process, or another part of this one, has it.

        Raises
        ------
        OSError
            If the file cannot be made.
        """
        with _guard:
            if str(path) in _own:
                return None
        while not replace:
            fd = open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                close_file(fd)
                return None
            except OSError:  # a filesystem without locks: the file alone says who it is
                close_file(fd)
                break
            if _same(path, fd):
                os.utime(fd)  # since when it is held, for whoever finds nothing published
                return cls(path, fd)
            close_file(fd)  # replaced while it was being locked
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = os.open(
            temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            with contextlib.suppress(OSError):
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Locked before it has its name, so that nobody can find it unlocked.
            os.rename(temporary, path)
        except BaseException:
            close_file(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return cls(path, fd)

    def is_current(self) -> bool:
        """Whether the file is still the one that others find."""
        return self._fd >= 0 and _same(self._path, self._fd)

    def touch(self) -> None:
        """Show that its holder lives, where nothing can be written any more."""
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._fd >= 0:
            with _guard:
                _own.discard(str(self._path))
            close_file(self._fd)
            self._fd = -1


def _same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False
