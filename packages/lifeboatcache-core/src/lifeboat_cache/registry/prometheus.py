"""Serving metrics over HTTP; part of the agent."""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from lifeboat_cache.config import Config
from lifeboat_cache.registry.metrics import families
from lifeboat_cache.registry.totals import fold, snapshot

__all__ = ["Exporter", "start_exporter"]

_log = logging.getLogger("lifeboat_cache")

#: A port that is taken is tried again after so many seconds.
_RETRY_S = 30.0

#: A client that says nothing for so long is sent away.
_PATIENCE_S = 10.0


def start_exporter(home: Path, config: Config) -> Exporter | None:
    """Serve the metrics of a home directory.

    Parameters
    ----------
    home
        The home directory.
    config
        Says where: ``telemetry.prometheus``.

    Returns
    -------
    Exporter or None
        ``None`` if the configuration says that nothing is served. A port that is
        taken is said once and tried again.
    """
    where = config.telemetry.prometheus
    return Exporter(home, where.host, where.port) if where.port else None


class Exporter:
    """Serves metrics until it is closed.

    Parameters
    ----------
    home
        The home directory.
    host, port
        Where to listen.
    retry_s
        How long to wait before a port that is taken is tried again.
    """

    def __init__(self, home: Path, host: str, port: int, *, retry_s: float = _RETRY_S) -> None:
        self._host, self._port = host, port
        self._retry_s = retry_s
        self._reason = ""
        self._stop = threading.Event()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Processes(home))
        self._handler = type(
            "Handler", (MetricsHandler.factory(registry),), {"timeout": _PATIENCE_S}
        )
        self._server = self._listen()
        self._thread = threading.Thread(target=self._serve, name="lifeboat-metrics", daemon=True)
        self._thread.start()

    @property
    def listening(self) -> bool:
        """Whether metrics are served."""
        return self._server is not None

    @property
    def reason(self) -> str:
        """Why they are not; empty if they are."""
        return self._reason

    def close(self) -> None:
        """Serve no longer. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _listen(self) -> _Server | None:
        try:
            server = _Server((self._host, self._port), self._handler)
        except (OSError, OverflowError, UnicodeError) as exc:
            place = f"{self._host}:{self._port}"
            why = getattr(exc, "strerror", None) or exc
            if isinstance(exc, OSError) and exc.errno in (errno.EADDRINUSE, errno.EACCES):
                reason = (
                    f"{place} cannot be listened on ({why}): choose another "
                    "telemetry.prometheus.port, or 0 to serve nothing"
                )
            else:
                reason = (
                    f"{place} cannot be listened on ({why}): correct telemetry.prometheus.host, "
                    "or set the port to 0 to serve nothing"
                )
            if not self._reason:
                _log.warning("LifeboatCache: metrics are not served for now: %s", reason)
            self._reason = reason
            return None
        if self._reason:
            _log.info("LifeboatCache: metrics are served on %s:%d now", self._host, self._port)
        self._reason = ""
        return server

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                if self._server is not None:
                    self._server.handle_request()
                elif not self._stop.wait(self._retry_s):
                    self._server = self._listen()
        except Exception as exc:  # a fault of ours: the agent goes on
            self._reason = f"internal error: {exc}"
            _log.exception("LifeboatCache: metrics are served no longer; please report this")
        finally:
            server, self._server = self._server, None
            if server is not None:
                server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    timeout = 0.2  # how long one look for a request lasts

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks a name server for a name that nobody needs.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        _log.debug("LifeboatCache: a request for metrics failed", exc_info=True)


class _Processes(Collector):
    """What all processes of a home directory publish."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._last: list[Metric] = []
        self._guard = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        with self._guard:  # what is kept must not be older than what was shown
            try:
                fold(self._home)
                found = snapshot(self._home)
                if found is not None:
                    self._last = families(found)
            except Exception:  # counters that are gone for a moment look like a restart
                _log.debug("LifeboatCache: metrics could not be read", exc_info=True)
            shown = self._last
        yield from shown
