"""An LMCache server whose second tier is LifeboatCache.

In the foreground for an operator (``lifeboat-cache server``), or detached for the engines of
a node that start and share it: then it ends when the last of them has ended, after what is
queued has been written.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lifeboat_cache.config import load_config
from lifeboat_cache.config.paths import ENV_CONFIG, home_directory
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrations.lmcache_arguments import port_of, server_arguments
from lifeboat_cache.integrations.lmcache_leases import ServerPlaces
from lifeboat_cache.integrations.lmcache_versions import refuse
from lifeboat_cache.registry.files import replace_json
from lifeboat_cache.targets.files import close_file, open_file

__all__ = ["main", "serve"]

_log = logging.getLogger("lifeboat_cache")

#: How often leases are looked at, in seconds.
_LOOK_S = 1.0

#: Without any user a started server goes on for so many seconds.
_GRACE_S = 10.0

#: How often the lock is tried for, and how long between, in seconds.
_CLAIMS, _CLAIM_S = 10, 0.05

#: It has so many seconds to become ready.
READY_S = 180.0


def serve(
    arguments: Sequence[str], *, config_file: Path | None = None, leased: bool = False
) -> int:
    """Run a server in this process until it is told to end; returns an exit code.

    Parameters
    ----------
    arguments
        Further arguments of ``lmcache server``.
    config_file
        The configuration file, if one was named.
    leased
        Whether it ends by itself when nobody holds a lease.

    Raises
    ------
    LifeboatError
        If the configuration or LMCache's version cannot be used.
    OSError
        If its files cannot be made.
    """
    refuse()
    # Its statistics go to its makers otherwise; whoever wants that says so.
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    config = load_config(config_file).config
    command = server_arguments(config, arguments, file=config_file)
    places = ServerPlaces(home_directory(os.environ), port_of(command, 0))
    places.make()
    lock = _claim(places)
    if lock is None:
        print(f"an LMCache server of this home runs on port {places.port}", file=sys.stderr)
        return 1
    stays = not leased or config.engine.lmcache_stays
    _watch(places, command, stays)
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), _interrupt)
    try:
        return _run(command)
    finally:
        places.document.unlink(missing_ok=True)
        close_file(lock)


def _claim(places: ServerPlaces) -> int | None:
    """Take the server's lock; who only looks whether it is taken has it for a moment, too."""
    for _ in range(_CLAIMS):
        lock = places.lock("server")
        if lock is not None:
            return lock
        time.sleep(_CLAIM_S)
    return None


def _interrupt(_number: int, _frame: Any) -> None:
    """LMCache ends in order on SIGINT only."""
    os.kill(os.getpid(), signal.SIGINT)


def _run(command: list[str]) -> int:
    from lmcache.cli.commands.server import ServerCommand

    server = ServerCommand()
    parser = argparse.ArgumentParser(prog="lifeboat-cache server --", allow_abbrev=False)
    server.add_arguments(parser)
    try:
        server.execute(parser.parse_args(command))
    except KeyboardInterrupt:
        return 0
    return 0


def _watch(places: ServerPlaces, command: list[str], stays: bool) -> None:
    """Say when the server is ready, and end it when nobody uses it any more."""

    def watch() -> None:
        started = used = time.monotonic()
        ready = False
        while True:
            now = time.monotonic()
            if not ready and _answers(places.port):
                ready = True
                _publish(places, command)
                _log.info("LifeboatCache: the LMCache server on port %d is ready", places.port)
            if stays or places.in_use() or (not ready and now - started < READY_S):
                used = now
            if now - used > _GRACE_S:
                _log.info("LifeboatCache: nobody uses the LMCache server any more; it ends")
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(_LOOK_S)

    threading.Thread(target=watch, name="lifeboat-lmcache-watch", daemon=True).start()


def _answers(port: int) -> bool:
    import zmq
    from lmcache.integration.vllm.mp_server_launcher import is_mp_server_healthy

    return bool(is_mp_server_healthy(f"tcp://127.0.0.1:{port}", zmq.Context.instance()))


def _publish(places: ServerPlaces, command: list[str]) -> None:
    document = {"pid": os.getpid(), "port": places.port, "arguments": command}
    try:
        replace_json(places.document, document)
    except OSError as exc:
        _log.error("LifeboatCache: %s cannot be written: %s", places.document, exc.strerror)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what an engine has started; see :mod:`~lifeboat_cache.integrations.lmcache_starter`."""
    parser = argparse.ArgumentParser(prog="lifeboat_cache.integrations.lmcache_server")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    os.umask(0o077)
    fd = open_file(args.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(fd, number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    named = os.environ.get(ENV_CONFIG)
    try:
        extra = [argument for argument in args.arguments if argument != "--"]
        return serve(extra, config_file=Path(named) if named else None, leased=True)
    except (LifeboatError, OSError) as exc:
        print(f"the LMCache server cannot start: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # Started by an engine: go on as nobody's child, before anything starts threads.
    child = os.fork()
    if child:
        print(child, flush=True)
        os._exit(0)
    sys.exit(main())
