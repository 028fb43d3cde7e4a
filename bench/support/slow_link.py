"""A link of a given bandwidth to a server on this machine.

    python3 slow_link.py PORT BYTES_PER_SECOND

Listens on a port of its own, which it prints, passes on what comes there to the server at ``PORT``,
and what the server answers, as fast as the bandwidth allows for all connections together, each
direction by itself. Ends with its standard input. Bytes are not copied to this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["slow_link"]

#: So much passes at a time.
_PIECE = 128 << 10

#: What was not used may be used within so many seconds later.
_BURST_S = 0.005


class _Bandwidth:
    """Lets bytes pass at a rate. Thread-safe."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Wait until so many bytes may pass."""
        with self._lock:
            now = time.monotonic()
            begin = max(self._free_at, now - _BURST_S)
            self._free_at = begin + size / self._rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


def _pass_on(source: socket.socket, sink: socket.socket, bandwidth: _Bandwidth) -> None:
    out, into = os.pipe()
    with contextlib.suppress(OSError):
        while size := os.splice(source.fileno(), into, _PIECE):
            bandwidth.take(size)
            while size:
                size -= os.splice(out, sink.fileno(), size)
    for end in (out, into):
        os.close(end)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _serve(port: int, rate: float) -> None:
    there, back = _Bandwidth(rate), _Bandwidth(rate)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_end_with_input, daemon=True).start()
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, server, there), (server, client, back)):
                threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


@contextmanager
def slow_link(port: int, rate: float) -> Iterator[int]:
    """A link to a port of this machine, of so many bytes per second; where it begins."""
    command = [sys.executable, str(Path(__file__)), str(port), str(rate)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
