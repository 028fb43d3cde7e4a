"""From a configuration to a listening dashboard."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import threading
from pathlib import Path

from lifeboat_cache.config import Dashboard
from lifeboat_cache.dashboard.access import Access, load_secret, refusal
from lifeboat_cache.errors import LifeboatError

__all__ = ["CannotListenError", "RefusedToServeError", "listen", "serve"]

_log = logging.getLogger("lifeboat_cache")

#: Where the dashboard keeps what is its own, below the home directory.
DIRECTORY = "dashboard"


class RefusedToServeError(LifeboatError):
    """The configuration does not allow to serve."""


class CannotListenError(LifeboatError):
    """The address is taken, or is none of this machine."""


def listen(where: Dashboard) -> socket.socket:
    """Take the address, before anything large is imported.

    Raises
    ------
    RefusedToServeError
        If the address can be reached by others and there is no token.
    CannotListenError
        If it cannot be listened on.
    """
    why = refusal(where.host, where.auth_token.get_secret_value())
    if why:
        raise RefusedToServeError(why)
    place = f"{where.host}:{where.port}"
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((where.host, where.port))
        listener.listen(128)
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        said = getattr(error, "strerror", None) or error
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise CannotListenError(
                f"{place} cannot be listened on ({said}): another dashboard may have it already; "
                "open that one, or choose another dashboard.port"
            ) from None
        raise CannotListenError(
            f"{place} cannot be listened on ({said}): correct dashboard.host"
        ) from None
    return listener


def serve(listener: socket.socket, home: Path, config_path: Path | None, where: Dashboard) -> None:
    """Serve until the process is told to end.

    Parameters
    ----------
    listener
        From :func:`listen`.
    home
        The home directory.
    config_path
        The configuration file; ``None`` = found as engines find it.
    where
        What the configuration says of the dashboard.
    """
    import uvicorn

    from lifeboat_cache.dashboard.app import create_app
    from lifeboat_cache.dashboard.history import History
    from lifeboat_cache.dashboard.source import Source

    own = home / DIRECTORY
    access = Access(
        where.host, where.port, where.auth_token.get_secret_value(), load_secret(own / "secret")
    )
    history = History(own / "history")
    if history.problem:
        _log.warning("dashboard: %s", history.problem)
    app = create_app(Source(home, config_path, history), access)
    # Addresses may hold the token, so requests are not logged.
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=1,
        lifespan="on",
        ws="none",
    )
    host = f"[{where.host}]" if ":" in where.host else where.host
    _log.info("dashboard: http://%s:%d", host, where.port)
    uvicorn.Server(config).run(sockets=[listener])


def end_with(fd: int) -> None:
    """End this process when the other end of a pipe is closed, with whoever held it."""

    def wait() -> None:
        while os.read(fd, 64):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        # What hangs then is cut off.
        threading.Event().wait(5)
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()
