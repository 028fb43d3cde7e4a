"""Who uses the local LMCache server: leases that end with the process that holds them.

::

    $LIFEBOAT_CACHE_HOME/run/lmcache-<node>-<port>/server.lock     held by the server
    $LIFEBOAT_CACHE_HOME/run/lmcache-<node>-<port>/server.json     what it says of itself
    $LIFEBOAT_CACHE_HOME/run/lmcache-<node>-<port>/start.lock      held by who starts one
    $LIFEBOAT_CACHE_HOME/run/lmcache-<node>-<port>/<name>.lease    held by each user
    $LIFEBOAT_CACHE_HOME/lmcache-<port>.log                        its log

Locks are fcntl's: the kernel lets go of them when a process ends, however it ends, and a
forked child does not have them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.agent.places import node_key
from lifeboat_cache.registry.files import run_directory
from lifeboat_cache.targets.files import close_file, open_file

__all__ = ["ServerPlaces", "hold_lease"]

_guard = threading.Lock()
#: Leases of this process by their directory: the file, and the process that has it.
_held: dict[Path, tuple[str, int, int]] = {}


@dataclass(frozen=True)
class ServerPlaces:
    """The files of the server of one home, node and port."""

    home: Path
    port: int

    @property
    def directory(self) -> Path:
        """Where leases and locks are."""
        return run_directory(self.home) / f"lmcache-{node_key()}-{self.port}"

    @property
    def document(self) -> Path:
        """What the server says of itself."""
        return self.directory / "server.json"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.home / f"lmcache-{self.port}.log"

    def make(self) -> None:
        """Make the directories that are missing. Raises ``OSError``."""
        run_directory(self.home, create=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)

    def lock(self, name: str) -> int | None:
        """Take the lock ``server`` or ``start``; its descriptor, ``None`` if somebody has it.

        Raises
        ------
        OSError
            If the file cannot be made.
        """
        fd = open_file(self.directory / f"{name}.lock", os.O_RDWR | os.O_CREAT)
        if _try_lock(fd):
            return fd
        close_file(fd)
        return None

    def served(self) -> bool:
        """Whether a server of this home runs. Not to be asked by the server itself."""
        try:
            fd = open_file(self.directory / "server.lock", os.O_RDWR)
        except OSError:
            return False
        try:
            return not _try_lock(fd)
        finally:
            close_file(fd)

    def in_use(self) -> bool:
        """Whether a living process holds a lease; what dead ones left is removed."""
        used = False
        try:
            names = [entry.name for entry in os.scandir(self.directory)]
        except OSError:
            return False
        mine = _held.get(self.directory)
        for name in names:
            if not name.endswith(".lease"):
                continue
            if mine is not None and mine[0] == name and mine[2] == os.getpid():
                used = True  # to open and close it would let go of it
                continue
            used = self._held_by_other(name) or used
        return used

    def _held_by_other(self, name: str) -> bool:
        try:
            fd = open_file(self.directory / name, os.O_RDWR)
        except OSError:
            return False
        try:
            if not _try_lock(fd):
                return True
            with contextlib.suppress(OSError):
                os.unlink(self.directory / name)
            return False
        finally:
            close_file(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def hold_lease(places: ServerPlaces) -> None:
    """Hold a lease as long as this process lives. Idempotent.

    Raises
    ------
    OSError
        If its file cannot be made.
    """
    with _guard:
        mine = _held.get(places.directory)
        if mine is not None and mine[2] == os.getpid():
            return
        places.make()
        name = f"{os.getpid()}-{secrets.token_hex(8)}.lease"
        temporary = places.directory / f".{name}.tmp"
        fd = open_file(temporary, os.O_RDWR | os.O_CREAT)
        try:
            _try_lock(fd)
            # Locked before it has its name, so that nobody takes it for left behind.
            os.rename(temporary, places.directory / name)
        except BaseException:
            close_file(fd)
            raise
        _held[places.directory] = name, fd, os.getpid()
