"""Connections on which parts of objects are read straight into memory.

boto3 hands bodies out as new bytes; here they go from the socket to where they belong.
"""

from __future__ import annotations

import base64
import http.client
import io
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["Answer", "Connections", "InterruptedBodyError"]

#: Connections that are kept for the next request, of all hosts together.
_KEPT = 64

#: An idle connection is given up after so many seconds: servers do that, too.
_IDLE_S = 20.0

#: Of an answer that is an error, so much is read.
_MOST_ERROR = 16 << 10

#: No wait for a socket is shorter.
_LEAST_WAIT_S = 0.05

#: Where there is room for so many bytes, all of it is waited for.
_LEAST_FILLED = 64 << 10

#: After so many seconds it is looked how much time is left.
_SOON_S = 0.25

#: After so many seconds it is looked how much time is left.
_SOON_S = 0.25

_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

_TRANSPORT = (OSError, http.client.HTTPException)


class InterruptedBodyError(OSError):
    """A body that ends too early, or an answer that is not what was asked for."""


@dataclass(frozen=True)
class Answer:
    """What a server has answered.

    Attributes
    ----------
    status
        Of HTTP; 206 means that the bytes are there, 416 that the object ends before.
    body
        Of an error, or the whole object.
    date
        The server's clock as it says it.
    tag
        What the server tells this object from others of its name by.
    """

    status: int
    body: bytes = b""
    date: str = ""
    tag: str = ""


#: Scheme and address of a server, and of the proxy before it, if there is one.
_Place = tuple[str, str, str]

#: Makes an answer of a response, and reads its body.
_Take = Callable[[http.client.HTTPResponse, str], Answer]


def _ends_before(said: str, first: int, last: int) -> bool:
    """Whether a ``Content-Range`` is the beginning of a range, cut off by the object's end."""
    found = _RANGE.fullmatch(said)
    if found is None:
        return False
    begin, end, size = (int(number) for number in found.groups())
    return begin == first and end + 1 == size < last


class _Timed(io.RawIOBase):
    """What comes on a socket; each wait is as long as there is time left at all.

    What reads from it waits for all that is wanted, however slowly it comes.
    """

    def __init__(self, of: socket.socket, left: Callable[[], float]) -> None:
        self._socket, self._left = of, left
        self._raw = of.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        if len(into) >= _LEAST_FILLED:
            return self._fill(into)
        self._socket.settimeout(self._left())
        return self._raw.readinto(into)

    def _fill(self, into: memoryview) -> int:
        """Read all that there is room for, or what has come when time is up.

        With a call of the interpreter's for each packet that would take longer than the copy.
        """
        if isinstance(self._socket, ssl.SSLSocket):
            return self._fill_by_records(into)
        seconds, part = divmod(self._left(), 1.0)
        # The kernel waits for all of it, and no longer than that; Python waits for the first byte.
        limit = struct.pack("@ll", int(seconds), int(part * 1e6))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            return self._socket.recv_into(into, len(into), socket.MSG_WAITALL)
        except BlockingIOError as exc:
            raise TimeoutError("timed out") from exc

    def _fill_by_records(self, into: memoryview) -> int:
        """As :meth:`_fill`: of TLS a call brings one record, 16 KiB at most."""
        self._socket.settimeout(self._left())
        soon = time.monotonic() + _SOON_S
        count = 0
        while count < len(into):
            got = self._socket.recv_into(into[count:])
            count += got
            if not got or time.monotonic() > soon:
                break
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(
        self, of: socket.socket, *args: Any, left: Callable[[], float], **options: Any
    ) -> None:
        super().__init__(of, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(of, left))


class Connections:
    """Keeps connections to servers open. Thread-safe.

    Parameters
    ----------
    connect_s, read_s
        How long a connection may take, and how long nothing may come.
    tls
        For https.
    proxy_of
        The address of the proxy (``http://user:word@host:port``) through which an address is
        reached; empty: there is none.
    """

    def __init__(
        self,
        connect_s: float,
        read_s: float,
        tls: ssl.SSLContext | None,
        proxy_of: Callable[[str], str] | None = None,
    ) -> None:
        self._connect_s, self._read_s = connect_s, read_s
        self._tls = tls
        self._proxy_of = proxy_of or (lambda _: "")
        self._lock = threading.Lock()
        self._idle: list[tuple[float, _Place, http.client.HTTPConnection]] = []
        self._closed = False

    def read(
        self, url: str, offset: int, into: Sequence[memoryview], deadline: float | None = None
    ) -> Answer:
        """Read a part of an object, all of ``into``, one piece after the other.

        Raises
        ------
        OSError, http.client.HTTPException
            If there was no answer, or not all of it.
        """
        end = offset + sum(piece.nbytes for piece in into)
        wanted = {"Range": f"bytes={offset}-{end - 1}"}
        return self._ask(url, wanted, partial(_take_part, offset, into), deadline)

    def get(self, url: str, deadline: float | None = None) -> Answer:
        """Read a whole object. Raises as :meth:`read`."""
        return self._ask(url, {}, _take_whole, deadline)

    def _ask(
        self, url: str, headers: Mapping[str, str], take: _Take, deadline: float | None
    ) -> Answer:
        parts = urlsplit(url)
        place = parts.scheme, parts.netloc, self._proxy_of(url)
        connection, used = self._take(place)
        try:
            try:
                return self._ask_on(connection, place, url, headers, take, deadline)
            except _TRANSPORT as exc:
                connection.close()
                # A server may have closed what was idle; what broke off later is another matter.
                if not used or isinstance(exc, (InterruptedBodyError, TimeoutError)):
                    raise
            connection = self._make(place)
            return self._ask_on(connection, place, url, headers, take, deadline)
        except BaseException:
            connection.close()
            raise

    def _ask_on(
        self,
        connection: http.client.HTTPConnection,
        place: _Place,
        url: str,
        headers: Mapping[str, str],
        take: _Take,
        deadline: float | None,
    ) -> Answer:
        left = partial(self._left, self._read_s, deadline)
        # Whatever makes a response will do.
        connection.response_class = partial(_TimedResponse, left=left)  # type: ignore[assignment]
        if connection.sock is None:
            connection.timeout = self._left(self._connect_s, deadline)
            connection.connect()
        connection.sock.settimeout(left())
        scheme, _, proxy = place
        target, own = url, _proxy_headers(proxy)
        if scheme == "https" or not proxy:  # a proxy that passes bytes on hears nothing of it
            parts = urlsplit(url)
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            own = {}
        connection.request("GET", target, headers={**headers, **own, "Accept-Encoding": "identity"})
        response = connection.getresponse()
        date = response.headers.get("Date", "")
        if response.status in (200, 206):
            answer = take(response, date)
        else:
            answer = Answer(response.status, response.read(_MOST_ERROR), date)
        # What it has beyond that would be taken for the next answer.
        self._give(place, connection, keep=response.isclosed() and not response.will_close)
        return answer

    @staticmethod
    def _left(most: float, deadline: float | None) -> float:
        if deadline is None:
            return most
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return max(_LEAST_WAIT_S, min(most, left))

    def _make(self, place: _Place) -> http.client.HTTPConnection:
        scheme, netloc, proxy = place
        first = urlsplit(proxy).netloc.rpartition("@")[2] if proxy else netloc
        if scheme == "http":
            return http.client.HTTPConnection(first)
        connection = http.client.HTTPSConnection(first, context=self._tls)
        if proxy:
            connection.set_tunnel(netloc, headers=_proxy_headers(proxy))
        return connection

    def _take(self, place: _Place) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        old, found = [], None
        oldest = time.monotonic() - _IDLE_S
        with self._lock:
            kept = []
            for since, where, connection in reversed(self._idle):  # the one used last first
                if since < oldest:
                    old.append(connection)
                elif found is None and where == place:
                    found = connection
                else:
                    kept.append((since, where, connection))
            self._idle = kept[::-1]
        for connection in old:
            connection.close()
        return (self._make(place), False) if found is None else (found, True)

    def _give(self, place: _Place, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        with self._lock:
            keep = keep and not self._closed and len(self._idle) < _KEPT
            if keep:
                self._idle.append((time.monotonic(), place, connection))
        if not keep:
            connection.close()

    def close(self) -> None:
        """Close what is idle, and what is given back later."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, _, connection in idle:
            connection.close()


def _take_part(
    offset: int, into: Sequence[memoryview], response: http.client.HTTPResponse, date: str
) -> Answer:
    """Read the body of an answer to a range, all of it, to where it belongs."""
    size = sum(piece.nbytes for piece in into)
    if response.status == 200:  # all of an object is not what was asked for
        raise InterruptedBodyError("the server does not know ranges")
    said = response.headers.get("Content-Range", "")
    if not said.startswith(f"bytes {offset}-{offset + size - 1}/"):
        if _ends_before(said, offset, offset + size):
            return Answer(416, b"", date)
        raise InterruptedBodyError(f"another range than asked for ({said!r})")
    if response.length not in (None, size):
        raise InterruptedBodyError("a body of another length than asked for")
    done = 0
    for piece in into:
        here = 0
        while here < piece.nbytes:
            count = response.readinto(piece[here:])
            if not count:
                raise InterruptedBodyError(f"the body ends after {done} of {size} bytes")
            here += count
            done += count
    response.read(1)  # its end
    return Answer(206, b"", date)


def _take_whole(response: http.client.HTTPResponse, date: str) -> Answer:
    try:
        body = response.read()
    except http.client.IncompleteRead as exc:
        raise InterruptedBodyError(f"the body ends after {len(exc.partial)} bytes") from exc
    return Answer(response.status, body, date, response.headers.get("ETag", ""))


def _proxy_headers(proxy: str) -> dict[str, str]:
    """What a proxy wants to hear before it does anything."""
    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    said = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(said.encode()).decode()}"}
