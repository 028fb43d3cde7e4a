"""Starting the local LMCache server from an engine, and waiting until it answers.

Imports nothing of LMCache's: API servers do this too.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lifeboat_cache.config import LoadedConfig
from lifeboat_cache.config.paths import ENV_CONFIG, ENV_HOME, home_directory
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrations.lmcache_leases import ServerPlaces, hold_lease
from lifeboat_cache.registry.files import read_json
from lifeboat_cache.targets.files import close_file

__all__ = ["ServerError", "ensure_server"]

_log = logging.getLogger("lifeboat_cache")

#: A server that has not answered after so many seconds is given up.
_WAIT_S = 180.0
_LOOK_S = 0.2

#: Its process has so many seconds to go on as nobody's child.
_FORK_S = 60.0

#: The server serves engines on all devices, whatever this one was given.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class ServerError(LifeboatError, ConnectionError):
    """A local LMCache server that could not be started."""


def ensure_server(loaded: LoadedConfig, port: int, *, wait_s: float = _WAIT_S) -> None:
    """Hold a lease on the local server, and start one if there is none.

    Takes as long as LMCache takes to start, if this is the first engine.

    Parameters
    ----------
    loaded
        The configuration.
    port
        Where it listens.
    wait_s
        How long it may take to answer.

    Raises
    ------
    ServerError
        If it does not answer; the message says why.
    """
    places = ServerPlaces(home_directory(os.environ), port)
    try:
        # Before it is looked for, so that it does not end in between.
        hold_lease(places)
        _wait(places, loaded, time.monotonic() + wait_s)
    except OSError as exc:
        if isinstance(exc, ServerError):
            raise
        raise ServerError(
            f"{exc.filename or places.directory}: {exc.strerror or exc}: choose a home directory "
            "(LIFEBOAT_CACHE_HOME) that can be written"
        ) from exc


def _wait(places: ServerPlaces, loaded: LoadedConfig, end: float) -> None:
    started: int | None = None
    before = _size(places.log)
    lock: int | None = None
    try:
        while True:
            if places.served():
                if places.document.exists():
                    return
            elif started is None:
                lock = places.lock("start") if lock is None else lock
                # Somebody may have started it between the look and the lock.
                if lock is not None and not places.served():
                    places.document.unlink(missing_ok=True)
                    started = _start(places, loaded)
            elif not _alive(started):
                raise ServerError(
                    f"the LMCache server did not start: {_last_line(places.log, before)}; see "
                    f"{places.log}"
                )
            if time.monotonic() > end:
                raise ServerError(
                    f"the LMCache server on port {places.port} does not answer: see {places.log}"
                )
            time.sleep(_LOOK_S)
    finally:
        if lock is not None:
            close_file(lock)


def _start(places: ServerPlaces, loaded: LoadedConfig) -> int:
    """Start a server that is nobody's child; returns its process id."""
    _log.info("LifeboatCache: an LMCache server is started on port %d", places.port)
    command = [
        sys.executable,
        "-P",
        "-m",
        "lifeboat_cache.integrations.lmcache_server",
        "--log",
        str(places.log),
        "--",
        "--port",
        str(places.port),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env=_environment(os.environ, places.home, loaded.named),
            start_new_session=True,
            timeout=_FORK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ServerError(
            f"the LMCache server did not start: Python has not imported it within {_FORK_S:.0f} s: "
            "see what keeps this machine busy"
        ) from exc
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode or not text.isdecimal():
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ServerError(f"the LMCache server did not start: {said or done.returncode}")
    return int(text)


def _environment(environ: Mapping[str, str], home: Path, named: Path | None) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name not in _DEVICES}
    found[ENV_HOME] = os.path.abspath(home)
    if named is not None:
        found[ENV_CONFIG] = os.path.abspath(named)
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_line(path: Path, skip: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(skip, _size(path) - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return "it left no log"
    return lines[-1] if lines else "it left no log"


def server_pid(places: ServerPlaces) -> int:
    """The process id of the server that answers, 0 if there is none."""
    found = read_json(places.document) if places.served() else None
    pid = found[0].get("pid") if found else 0
    return pid if isinstance(pid, int) else 0
