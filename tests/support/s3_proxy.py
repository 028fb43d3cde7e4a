"""A proxy between an S3 client and a server, which does on demand what networks and clouds do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import re
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Asked", "Fault", "S3Proxy", "s3_proxy"]

_PIECE = 256 << 10
_LISTED = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_NAME = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


@dataclasses.dataclass
class Fault:
    """What happens to requests, and to which of them.

    Attributes
    ----------
    do
        ``delay``: it is answered ``seconds`` later. ``answer``: the server is not asked, and
        ``status`` and ``code`` are the answer, of a server whose clock is ``seconds`` ahead.
        ``reset``: the connection is cut without one. ``lose``: the server does it, and the
        connection is cut before the answer. ``truncate``: the connection is cut in the middle of
        the body of the answer. ``corrupt``: a byte of that body is another one. ``stall``: after
        half of that body nothing comes, until the proxy is told to go on.
    verb
        Regular expression that the whole name of the operation matches (:attr:`Asked.verb`).
    match
        Regular expression that is found in the path.
    times
        How often, at most.
    after
        How many such requests are left alone before.
    seconds, status, code
        See ``do``.
    at
        ``corrupt``: which byte of the body, counted from its end if negative.
    """

    do: str
    verb: str = ".*"
    match: str = ""
    times: int = 1 << 60
    after: int = 0
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    at: int = 0

    def takes(self, asked: Asked) -> bool:
        """Whether a request is one of those; that counts."""
        fits = re.fullmatch(self.verb, asked.verb) and re.search(self.match, asked.path)
        if not fits or self.times <= 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return True


@dataclasses.dataclass
class Asked:
    """One request, and its answer.

    Attributes
    ----------
    verb
        ``GET``, ``PUT``, ``HEAD``, ``DELETE``, or what S3 hides behind those and POST: ``LIST``,
        ``COPY``, ``DELETE_MANY``, ``MULTIPART_BEGIN``, ``PART``, ``MULTIPART_END``,
        ``MULTIPART_DROP``.
    path
        Bucket and key.
    query
        What follows the path.
    headers
        Those of the request, their names in small letters.
    status
        Of the answer; 0 without one.
    sent, received
        Bytes of the bodies of the request and of the answer.
    """

    verb: str
    path: str
    query: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0
    received: int = 0


class _CutError(Exception):
    """The connection ends here."""


class S3Proxy:
    """Passes requests on to a server, on a thread of its own.

    Parameters
    ----------
    port
        Where the server listens, on this machine.
    """

    def __init__(self, port: int) -> None:
        self.asked: list[Asked] = []
        #: Seconds for which listings do not know what was written.
        self.listing_lag = 0.0
        self._upstream = port
        self._faults: list[Fault] = []
        self._written: dict[str, float] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._go_on = threading.Event()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_PIECE))
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def endpoint(self) -> str:
        """The address for clients."""
        return f"http://127.0.0.1:{self.port}"

    def faults(self, *faults: Fault) -> None:
        """What happens from now on, the first that fits; nothing without any."""
        with self._lock:
            self._faults = list(faults)

    def go_on(self) -> None:
        """Let what is stalled go on, and let nothing stall any more."""
        self.faults()
        self._go_on.set()

    def counts(self) -> Counter[str]:
        """How many requests of each kind there were since :meth:`forget`."""
        return Counter(one.verb for one in list(self.asked))

    def forget(self) -> None:
        """Begin to count anew."""
        self.asked.clear()

    def close(self) -> None:
        """Cut all connections and end."""
        self.go_on()

        async def end() -> None:
            self._server.close()
            for connection in list(self._open):
                connection.transport.abort()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.wait(others, timeout=10) if others else None

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._open.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if server is None:
                    server = await asyncio.open_connection(
                        "127.0.0.1", self._upstream, limit=_PIECE
                    )
                    self._open.add(server[1])
                await self._pass(head, reader, writer, *server)
        except (_CutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in (writer, server[1] if server else None):
                if end is not None:
                    self._open.discard(end)
                    end.transport.abort()

    async def _pass(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        asked = _read_request(head)
        self.asked.append(asked)
        with self._lock:
            fault = next((one for one in self._faults if one.takes(asked)), None)
        do = fault.do if fault else ""
        if fault and do == "delay":
            await asyncio.sleep(fault.seconds)
        if fault and do in ("answer", "reset"):
            if asked.headers.get("expect", "").lower() == "100-continue":
                # The client waits for this answer before it sends the body.
                if do == "answer":
                    writer.write(_answer(fault, asked, close=True))
                    await writer.drain()
                raise _CutError
            asked.sent = await _copy_body(reader, asked.headers, None)
            if do == "reset":
                raise _CutError
            writer.write(_answer(fault, asked))
            await writer.drain()
            asked.status = fault.status
            return
        server_writer.write(head)
        if asked.headers.get("expect", "").lower() == "100-continue":
            await server_writer.drain()
            interim = await server_reader.readuntil(b"\r\n\r\n")
            writer.write(interim)
            if not interim.startswith(b"HTTP/1.1 100"):
                raise _CutError
        asked.sent = await _copy_body(reader, asked.headers, server_writer)
        begun = time.monotonic()
        if asked.verb in ("PUT", "COPY", "MULTIPART_END"):
            self._written[urllib.parse.unquote(asked.path)] = begun
        answer = await server_reader.readuntil(b"\r\n\r\n")
        if do == "lose":
            raise _CutError
        status, headers = _read_head(answer)
        asked.status = int(status.split()[1])
        bodiless = asked.verb == "HEAD" or asked.status in (204, 304)
        if asked.verb == "LIST" and self.listing_lag and asked.status == 200:
            answer, body = await self._younger_listing(answer, server_reader, headers, asked)
            writer.write(answer + body)
            await writer.drain()
            return
        writer.write(answer)
        if not bodiless:
            asked.received = await _copy_body(
                server_reader, headers, writer, spoil=self._spoiler(fault, headers)
            )
        await writer.drain()
        if headers.get("connection", "").lower() == "close":
            raise _CutError

    def _spoiler(
        self, fault: Fault | None, headers: dict[str, str]
    ) -> Callable[[int, bytes], Coroutine[Any, Any, bytes]] | None:
        if fault is None or fault.do not in ("truncate", "corrupt", "stall"):
            return None
        total = int(headers.get("content-length", 0))
        if fault.do == "stall":
            self._go_on.clear()
        done = False

        async def spoil(at: int, piece: bytes) -> bytes:
            nonlocal done
            if fault.do == "corrupt":
                place = (fault.at if fault.at >= 0 else total + fault.at) - at
                if 0 <= place < len(piece):
                    changed = bytearray(piece)
                    changed[place] ^= 0x10
                    return bytes(changed)
                return piece
            if at + len(piece) <= total // 2 or done:
                return piece
            if fault.do == "truncate":
                raise _CutError
            done = True
            while not self._go_on.is_set():
                await asyncio.sleep(0.02)
            return piece

        return spoil

    async def _younger_listing(
        self,
        answer: bytes,
        server: asyncio.StreamReader,
        headers: dict[str, str],
        asked: Asked,
    ) -> tuple[bytes, bytes]:
        """A listing without what was written a moment ago."""
        sink = _Sink()
        asked.received = await _copy_body(server, headers, sink)
        bucket = urllib.parse.unquote(asked.path).strip("/")
        now = time.monotonic()

        def seen(found: re.Match[bytes]) -> bytes:
            name = _NAME.search(found.group())
            assert name is not None
            path = f"/{bucket}/{urllib.parse.unquote(name.group(1).decode())}"
            old = now - self._written.get(path, -1e9) > self.listing_lag
            return found.group() if old else b""

        body = _LISTED.sub(seen, sink.body())
        lines = [
            line
            for line in answer.rstrip().split(b"\r\n")
            if not line.lower().startswith((b"content-length:", b"transfer-encoding:"))
        ]
        lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n", body


class _Sink:
    """Takes the place of a connection."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)

    async def drain(self) -> None:
        """Nothing waits."""

    def body(self) -> bytes:
        """What was written, out of its chunks."""
        written = b"".join(self._pieces)
        if not _CHUNKED.match(written):
            return written
        body = b""
        while True:
            size, _, written = written.partition(b"\r\n")
            length = int(size.split(b";")[0], 16)
            if not length:
                return body
            body, written = body + written[:length], written[length + 2 :]


_CHUNKED = re.compile(rb"[0-9a-fA-F]+(;[^\r]*)?\r\n")


def _read_head(head: bytes) -> tuple[str, dict[str, str]]:
    first, *rest = head.decode("latin-1").rstrip().split("\r\n")
    headers = {}
    for line in rest:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return first, headers


def _read_request(head: bytes) -> Asked:
    first, headers = _read_head(head)
    method, target, _ = first.split(" ", 2)
    # Who is told of a proxy asks it for the whole address.
    path, _, query = re.sub(r"\Ahttp://[^/]*", "", target).partition("?")
    return Asked(_verb(method, path, query, headers), path, query, headers)


def _verb(method: str, path: str, query: str, headers: dict[str, str]) -> str:
    given = urllib.parse.parse_qs(query, keep_blank_values=True)
    in_bucket = "/" in path.strip("/")
    if method == "PUT" and "partNumber" in given:
        return "PART"
    if method == "PUT" and "x-amz-copy-source" in headers:
        return "COPY"
    if method == "GET" and not in_bucket:
        return "LIST"
    if method == "POST":
        if "delete" in given:
            return "DELETE_MANY"
        return "MULTIPART_BEGIN" if "uploads" in given else "MULTIPART_END"
    if method == "DELETE" and "uploadId" in given:
        return "MULTIPART_DROP"
    return method


def _answer(fault: Fault, asked: Asked, *, close: bool = False) -> bytes:
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{fault.code}</Code>'
        f"<Message>by the proxy of a test</Message></Error>"
    ).encode()
    end = b"Connection: close\r\n" if close else b""
    return (
        b"HTTP/1.1 %d Fault\r\nContent-Type: application/xml\r\n" % fault.status
        + f"Date: {email.utils.formatdate(time.time() + fault.seconds, usegmt=True)}\r\n".encode()
        + b"Content-Length: %d\r\n" % len(body)
        + end
        + b"\r\n"
        + (b"" if asked.verb == "HEAD" else body)
    )


async def _copy_body(
    reader: asyncio.StreamReader,
    headers: dict[str, str],
    writer: asyncio.StreamWriter | _Sink | None,
    *,
    spoil: Callable[[int, bytes], Coroutine[Any, Any, bytes]] | None = None,
) -> int:
    """Copy what follows a head; how many bytes that was."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _copy_chunks(reader, writer)
    length = int(headers.get("content-length", 0))
    at = 0
    while at < length:
        piece = await reader.read(min(_PIECE, length - at))
        if not piece:
            raise _CutError
        sent = await spoil(at, piece) if spoil else piece
        at += len(piece)
        if writer is not None:
            writer.write(sent)
            await writer.drain()
    return length


async def _copy_chunks(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter | _Sink | None
) -> int:
    total = 0
    while True:
        size = await reader.readuntil(b"\r\n")
        length = int(size.split(b";")[0], 16)
        chunk = size
        if length:
            chunk += await reader.readexactly(length + 2)
        else:
            while not chunk.endswith(b"\r\n\r\n"):  # trailers, and the empty line
                chunk += await reader.readuntil(b"\r\n")
        total += length
        if writer is not None:
            writer.write(chunk)
            await writer.drain()
        if not length:
            return total


@contextmanager
def s3_proxy(port: int) -> Iterator[S3Proxy]:
    """A proxy that ends in the end."""
    with contextlib.closing(S3Proxy(port)) as proxy:
        yield proxy
