"""What engines and movers say to each other, and how it looks on the socket.

A message is a head of 16 bytes (length of the body, kind, 0, number) and its body. Bodies of
what happens rarely are JSON, those of jobs and of the index are arrays. ``number`` names a
part of a job: no number is used twice on a connection.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError

__all__ = [
    "CODED",
    "MOST_BODY",
    "PROTOCOL",
    "REQUEST",
    "SLOTS",
    "Kind",
    "Message",
    "Receiver",
    "from_json",
    "peer_uid",
    "receive",
    "send",
    "to_json",
]

#: Changes with every message whose meaning changes. Mover and engine must agree.
PROTOCOL = 2

#: No body is longer.
MOST_BODY = 16 << 20

_HEAD = struct.Struct("<IHHQ")
_CLOSED_IN_CHILDREN: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

#: A block of a job: its key, where it lies in the arena, and what is known of it.
REQUEST = np.dtype(
    [
        ("key", "V32"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("layout", "<u8"),
        ("salt", "<u8"),
        ("family", "<u8"),
        ("parent", "<u8"),
        ("position", "<u4"),
        ("group", "<u2"),
        ("codec", "<u2"),
    ]
)

#: What went through a codec: its number, blocks, payload bytes, and bytes of them on storage.
CODED = np.dtype([("codec", "<u8"), ("blocks", "<u8"), ("raw", "<u8"), ("kept", "<u8")])

#: Slots of a record: its writer, segment and slot.
SLOTS = np.dtype([("key", "V32"), ("writer", "V16"), ("segment", "<u4"), ("slot", "<u4")])


class Kind(IntEnum):
    """What a message says. → to the mover, ← to the engine."""

    #: → JSON, with the arena's descriptor: who asks, for which namespace.
    HELLO = 1
    #: ← JSON: the mover serves it.
    WELCOME = 2
    #: ← JSON: it does not, and why.
    REFUSED = 3
    #: → JSON: a layout of blocks.
    LAYOUT = 4
    #: → JSON: how blocks are encoded from now on.
    CONFIG = 5
    #: → ``REQUEST`` array: store, or load, these blocks.
    STORE = 6
    LOAD = 7
    #: ← uint64, then so many ``CODED``, then uint8 outcomes: nothing touches the part's memory
    #: any more.
    DONE = 8
    #: → keys.
    TOUCH = 9
    DELETE = 10
    #: → nothing; ← JSON: whether the target could be written and read just now.
    PROBE = 11
    PROBED = 12
    #: ← JSON, every second: how the mover does.
    STATUS = 13
    #: ← 16 bytes of the writer, then ``ENTRY`` array: records.
    INSERT = 14
    #: ← ``SLOTS`` array: records that are gone.
    REMOVE = 15
    #: ← 16 bytes of the writer, the segment, then a byte for each slot.
    DEAD = 16
    #: ← 16 bytes of the writer, the segment: all of it has gone.
    GONE = 17
    #: ← nothing: forget all records, they are told again.
    RESET = 18
    #: ← nothing: all records of now have been told.
    SYNCED = 19
    #: ← nothing: no record comes any more of what was declared dead before the last one.
    SETTLED = 21
    #: ← keys: there is no record of them, whatever was told before.
    FORGET = 22
    #: → nothing: remove the namespace from the target once nobody uses it.
    PURGE = 20


class Message:
    """One message."""

    __slots__ = ("body", "fds", "kind", "number")

    def __init__(
        self, kind: int, number: int, body: bytes | bytearray, fds: Sequence[int] = ()
    ) -> None:
        self.kind = kind
        self.number = number
        self.body = body
        self.fds = fds

    def table(self, dtype: np.dtype[Any], skip: int = 0) -> npt.NDArray[Any]:
        """The body, behind its first bytes, as an array.

        Raises
        ------
        FormatError
            If it is not whole.
        """
        size = len(self.body) - skip
        if size < 0 or size % dtype.itemsize:
            raise FormatError(
                f"message {self.kind} has {len(self.body)} bytes, which is no whole number of "
                "items: restart the engine, so that both sides are of one release"
            )
        return np.frombuffer(self.body, dtype=dtype, offset=skip, count=size // dtype.itemsize)


def to_json(value: Any) -> bytes:
    """A body of JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def from_json(body: bytes | bytearray) -> dict[str, Any]:
    """A body of JSON as a mapping.

    Raises
    ------
    FormatError
        If it is none.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a message is no JSON ({error}): restart the engine") from error
    if not isinstance(value, dict):
        raise FormatError("a message is no mapping: restart the engine")
    return value


def send(
    connection: socket.socket,
    kind: Kind,
    number: int = 0,
    body: Iterable[bytes | memoryview] = (),
    fds: Iterable[int] = (),
) -> None:
    """Send a message; one thread at a time. Raises ``OSError``."""
    parts = [memoryview(part).cast("B") for part in body]
    size = sum(part.nbytes for part in parts)
    data = bytearray(_HEAD.size + size)
    _HEAD.pack_into(data, 0, size, kind, 0, number)
    at = _HEAD.size
    for part in parts:
        data[at : at + part.nbytes] = part
        at += part.nbytes
    numbers = array.array("i", fds)
    if numbers:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers.tobytes())]
        sent = connection.sendmsg([data], ancillary)
        connection.sendall(memoryview(data)[sent:])
    else:
        connection.sendall(data)


class Receiver:
    """Takes messages from a connection with few calls: each gives the interpreter away.

    Descriptors that come with messages are lost; use :func:`receive` for those.

    Parameters
    ----------
    connection
        Nobody else receives from it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb", buffering=1 << 18)

    def next(self) -> Message | None:
        """The next message; ``None`` if the other side has gone. Waits for it.

        Raises
        ------
        FormatError
            If what comes is no message.
        OSError
            If the connection fails.
        """
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        size, kind, number = _parsed(head)
        body = self._file.read(size) if size else b""
        return Message(kind, number, body) if len(body) == size else None

    def close(self) -> None:
        """Let go of the connection."""
        self._file.close()


def _parsed(head: bytes | bytearray) -> tuple[int, int, int]:
    size, kind, zero, number = _HEAD.unpack(head)
    if size > MOST_BODY or zero:
        raise FormatError("a message is not one of ours: restart the engine")
    return size, kind, number


def receive(connection: socket.socket) -> Message | None:
    """The next message with its descriptors, as :meth:`Receiver.next` does.

    Raises
    ------
    FormatError
        If what comes is no message.
    OSError
        If the connection fails.
    """
    fds: list[int] = []
    head = bytearray(_HEAD.size)
    try:
        if not _fill(connection, head, fds):
            return None
        size, kind, number = _parsed(head)
        body = bytearray(size)
        if not _fill(connection, body, fds):
            _close(fds)
            return None
    except BaseException:
        _close(fds)
        raise
    return Message(kind, number, body, fds)


def _fill(connection: socket.socket, into: bytearray, fds: list[int]) -> bool:
    view = memoryview(into)
    done = 0
    while done < len(into):
        room = socket.CMSG_SPACE(4)
        got, ancillary, _, _ = connection.recvmsg_into([view[done:]], room, _CLOSED_IN_CHILDREN)
        for level, what, data in ancillary:
            if level == socket.SOL_SOCKET and what == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) // 4 * 4])
                fds.extend(numbers)
        if not got:
            return False
        done += got
    return True


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def peer_uid(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "this system does not tell who is at the other end")
    pid, uid, _ = struct.unpack(
        "iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, uid
