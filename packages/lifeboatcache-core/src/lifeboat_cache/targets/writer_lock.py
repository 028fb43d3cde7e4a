"""Who is alive behind a writer's files.

On a local disk that is whoever holds a lock. Other hosts do not see each other's locks on
every network mount, and hosts that are gone may seem to hold theirs. So on a shared mount a
writer also holds a *lease*: it touches its lock file from time to time, and has lost it when it
did not for :data:`LEASE_S`, by the clock of the files' server. A writer that finds that it may
have lost its lease gives itself up, long before others do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from lifeboat_cache.system import boot_seconds
from lifeboat_cache.targets.files import (
    GONE,
    close_file,
    open_file,
    read_document,
    read_range,
)
from lifeboat_cache.targets.hosts import Process, this_process
from lifeboat_cache.targets.layout import FILE_MODE
from lifeboat_cache.targets.server_clock import file_time
from lifeboat_cache.targets.traits import owned, traits_of
from lifeboat_cache.version import __version__

__all__ = [
    "BEAT_S",
    "FENCE_S",
    "LEASE_S",
    "WriterLock",
    "lease_expired",
    "lock_owner",
    "read_owner",
    "writer_alive",
]

#: A writer touches its lock file after so many seconds …
BEAT_S = 20.0
#: … gives itself up when it could not for so long …
FENCE_S = 120.0
#: … and counts as dead to others, unless they know better, after so long.
LEASE_S = 300.0

#: Nobody is declared dead before it has been watched for so long without a sign of life: a
#: server's clock may be set, and then all files look old at once …
_WATCH_S = 60.0
#: … unless no clock is that wrong. (Commands do not wait.)
_CERTAIN_S = 3600.0

#: A lock file holds a few hundred bytes.
_MOST_BYTES = 1 << 16

# Writers of this very process and who they are. Opening and closing a lock file that
# this process holds would drop the lock (POSIX locks belong to the process), so it is
# asked here.
_own: dict[str, str] = {}
_own_guard = threading.Lock()

# By lock file: its last sign of life, and since when (of this host's clock) there was no other.
_watched: dict[str, tuple[float, float]] = {}
_watched_guard = threading.Lock()
_MOST_WATCHED = 4096


def _forget_own() -> None:
    """In a forked child: the locks stayed with the parent."""
    global _own_guard, _watched_guard
    _own_guard = threading.Lock()
    _watched_guard = threading.Lock()
    _own.clear()


os.register_at_fork(after_in_child=_forget_own)


class WriterLock:
    """A file that is locked, and on a shared mount touched, as long as its writer lives.

    ``fcntl`` locks, because forked children do not inherit them: a worker that
    outlives its parent does not keep the parent's lock.

    Parameters
    ----------
    directory
        The namespace's directory.
    writer
        The writer's 16 bytes.
    """

    def __init__(self, directory: Path, writer: bytes) -> None:
        self._hex = writer.hex()
        self._path = directory / f"{self._hex}.lock"
        self._shared = traits_of(directory).shared
        self._lapsed = False
        self._beaten = boot_seconds()
        temporary = directory / f".{self._hex}.lock.tmp"
        self._fd = os.open(
            temporary,
            os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW,
            FILE_MODE,
        )
        try:
            owned(self._fd, traits_of(directory))
            # On a filesystem without locks probing fails too, which counts as alive.
            with contextlib.suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._owner: dict[str, Any] = {
                **this_process().to_json(),
                "core": __version__,
                "started": int(time.time()),
            }
            if self._shared:
                self._owner["lease_s"] = LEASE_S
            self._write()
            if self._shared:  # others see what is in it from the moment when it has its name
                os.fsync(self._fd)
            self._server = os.fstat(self._fd).st_mtime
            with _own_guard:
                _own[self._hex] = _owner_text(self._owner)
            # Locked before it has its name, so that nobody can find it unlocked.
            try:
                os.rename(temporary, self._path)
            except FileNotFoundError:
                if not self._is_there():  # as `_replace` in layout.py
                    raise
        except BaseException:
            self.release()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _write(self) -> None:
        data = json.dumps(self._owner).encode() + b"\n"
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    @property
    def lapsed(self) -> bool:
        """Whether others may take the writer for dead: what it stores may not be found."""
        if not self._shared:
            return False
        if not self._lapsed and boot_seconds() - self._beaten > FENCE_S:
            self._lapsed = True
        return self._lapsed

    def beat(self) -> None:
        """Show that the writer lives, if it is time to. Does I/O; faults are swallowed."""
        if not self._shared or self._fd < 0 or boot_seconds() - self._beaten < BEAT_S:
            return
        if self.lapsed:
            return
        began = boot_seconds()
        try:
            os.utime(self._fd)  # to the server's time
            now = os.fstat(self._fd).st_mtime
        except OSError:
            return  # the next one may go through, or nobody trusts it any more
        # While a machine is frozen its own clocks stand still; the server's goes on.
        if now - self._server > FENCE_S:
            self._lapsed = True
        self._server, self._beaten = now, began

    def release(self) -> None:
        """Let go. The file stays: it says who the dead writer was."""
        if self._fd >= 0:
            with _own_guard:
                _own.pop(self._hex, None)
            if self._shared:
                with contextlib.suppress(OSError, AttributeError):
                    self._owner["ended"] = True
                    self._write()
            close_file(self._fd)
            self._fd = -1


def writer_alive(directory: Path, writer: str) -> bool:
    """Whether the process behind ``writer`` still runs.

    When it cannot be known (a lock that cannot be probed), the answer is yes:
    nothing of a writer that may live is ever removed.
    """
    with _own_guard:
        if writer in _own:
            return True
    path = directory / f"{writer}.lock"
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        owner = _parse(read_range(fd, _MOST_BYTES, 0))
        touched = os.fstat(fd).st_mtime
        if not (traits_of(directory).shared if owner is None else "lease_s" in owner):
            return not _free(fd)
    except OSError as error:
        return error.errno not in GONE
    finally:
        close_file(fd)
    # Whatever is known of locks here: a dead host's may be held for ever, a living one's not
    # be seen. Without a lease its writer stores nothing more.
    if owner is not None:
        if owner.get("ended") is True:
            return False
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            if Process.from_json(owner).ended():
                return False
    return not lease_expired(path, touched, LEASE_S)


def _free(fd: int) -> bool:
    """Whether it is certain that nobody holds a lock."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lease_expired(path: Path, touched: float, lease_s: float) -> bool:
    """Whether whoever touches a file from time to time has not for too long.

    Parameters
    ----------
    path
        The file, in a root directory or in a namespace's.
    touched
        When it was touched last, as its server says.
    lease_s
        How long is too long.
    """
    name, now = os.fspath(path), boot_seconds()
    with _watched_guard:
        known = _watched.get(name)
        if known is None or known[0] != touched or now < known[1]:
            if len(_watched) >= _MOST_WATCHED:
                _watched.clear()  # who is watched anew lives longer
            known = _watched[name] = touched, now
    root = path.parent if path.name.startswith(".") else path.parent.parent
    time_there = file_time(root)
    if time_there is None:
        return False
    age = time_there - touched
    return age > lease_s and (now - known[1] >= _WATCH_S or age > _CERTAIN_S)


def lock_owner(directory: Path, writer: str) -> str:
    """Who a writer is or was, for people (``pid 12 on host``); empty if unknown."""
    with _own_guard:
        if writer in _own:
            return _own[writer]
    owner = read_owner(directory / f"{writer}.lock")
    return "" if owner is None else _owner_text(owner)


def read_owner(path: Path) -> dict[str, Any] | None:
    """What a lock or lease file says of whoever made it; ``None`` if it says nothing."""
    try:
        return _parse(read_document(path, _MOST_BYTES))
    except OSError:
        return None


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        owner = json.loads(text)
        _owner_text(owner)
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError):
        return None
    return dict(owner) if isinstance(owner, dict) else None


def _owner_text(owner: dict[str, Any]) -> str:
    return f"pid {int(owner['pid'])} on {owner['host']}"
