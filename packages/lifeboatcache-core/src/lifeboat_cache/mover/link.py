"""A connection to a mover, at the engine's end."""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from lifeboat_cache.errors import LifeboatError, TargetError
from lifeboat_cache.mover.arena import Arena
from lifeboat_cache.mover.places import MoverPlaces
from lifeboat_cache.mover.wire import (
    Kind,
    Message,
    Receiver,
    from_json,
    peer_uid,
    receive,
    send,
    to_json,
)

__all__ = ["Link", "reason_of"]

#: A mover answers a greeting within so many seconds: it touches no target for that.
_GREETING_S = 10.0


def _watch(pid: int) -> int:
    """A descriptor that is readable when a process has ended. Raises ``OSError``."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "this system does not tell when a process ends")
    return os.pidfd_open(pid)


class Link:
    """A connection, and the arena that the mover at its other end maps.

    A mover that dies takes its arena with it: the next one gets another, so that nothing that
    the dead one had begun can ever reach what is read now.

    Attributes
    ----------
    arena
        Through which blocks go.
    pid
        The mover's.
    heard
        When something came from it last, by the monotonic clock.
    status
        What it has said of itself last.
    synced
        Whether it has told all records.
    """

    def __init__(self, connection: socket.socket, arena: Arena, pid: int) -> None:
        self._connection = connection
        self._receiver = Receiver(connection)
        self.arena = arena
        self.pid = pid
        self.heard = time.monotonic()
        self.status: Mapping[str, Any] = {}
        self.synced = False
        self._sending = threading.Lock()
        self._closed = False
        self._dead = False
        try:
            self._pidfd = _watch(pid)
        except OSError:  # it has ended already
            self._pidfd, self._dead = -1, True

    def __del__(self) -> None:
        if getattr(self, "_pidfd", -1) >= 0:
            os.close(self._pidfd)

    @classmethod
    def connect(cls, places: MoverPlaces, hello: Mapping[str, Any], arena_bytes: int) -> Link:
        """Reach the mover of a target.

        Raises
        ------
        OSError
            If there is none, or it does not answer.
        LifeboatError
            If it refuses.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        arena: Arena | None = None
        try:
            connection.settimeout(_GREETING_S)
            places.at_socket(connection.connect)
            pid, uid = peer_uid(connection)
            if uid not in (os.getuid(), 0):
                raise TargetError(
                    f"the mover is a process of user {uid}: run all engines of a home directory "
                    "as one user"
                )
            arena = Arena(arena_bytes)
            body = to_json({**hello, "arena": arena_bytes, "pid": os.getpid()})
            send(connection, Kind.HELLO, 0, [body], [arena.fd])
            answer = receive(connection)
            if answer is None:
                raise TargetError("the mover has ended; another is started")
            if answer.kind == Kind.REFUSED:
                raise TargetError(str(from_json(answer.body).get("reason")))
            if answer.kind != Kind.WELCOME:
                raise TargetError("the mover does not speak as this release does: restart it")
            connection.settimeout(None)
            return cls(connection, arena, pid)
        except BaseException:
            connection.close()
            if arena is not None:
                arena.close()
            raise

    def send(self, kind: Kind, number: int = 0, body: bytes | memoryview = b"") -> None:
        """Send a message. Raises ``OSError``."""
        with self._sending:
            send(self._connection, kind, number, [body])

    def receive(self) -> Message | None:
        """The next message; ``None`` at the end. Raises ``OSError`` and ``LifeboatError``."""
        message = self._receiver.next()
        self.heard = time.monotonic()
        return message

    def usable(self) -> bool:
        """Whether the mover can use its target."""
        return self.status.get("state") in ("recovering", "ready")

    def dead(self) -> bool:
        """Whether the mover's process is known to have ended, threads in system calls included."""
        if self._pidfd >= 0 and select.select([self._pidfd], [], [], 0)[0]:
            os.close(self._pidfd)
            self._pidfd = -1
            self._dead = True
        return self._dead

    def shut(self) -> None:
        """End the connection; whoever waits for it wakes."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def after_fork(self) -> None:
        """In a forked child: let go of its copies; whoever is receiving stayed with the parent."""
        self._closed = True
        os.close(self._connection.detach())
        self.arena.close()

    def close(self) -> None:
        """Let go of everything. Idempotent. Nobody may be sending or receiving."""
        if not self._closed:
            self._closed = True
            self._receiver.close()
            self._connection.close()
            self.arena.close()


def reason_of(error: Exception) -> str:
    """Why a mover cannot be reached, for people."""
    if isinstance(error, LifeboatError):
        return str(error)
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return "its mover is not running yet; the agent starts it (see `lifeboat-cache status`)"
    if isinstance(error, TimeoutError):
        return "its mover does not answer; it is replaced (see mover.log)"
    return f"its mover cannot be reached: {error}"
