"""Starting the agent from an engine, and starting it again when it has died."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lifeboat_cache import kernels
from lifeboat_cache.agent.environment import child_environment
from lifeboat_cache.agent.exits import Exit
from lifeboat_cache.agent.kernel_build import begin_build
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.status import (
    HUNG_AFTER_S,
    STARTS_S,
    AgentState,
    AgentStatus,
    clock,
    recent_starts,
    status_at,
)
from lifeboat_cache.agent.stopping import stop_agent
from lifeboat_cache.registry.files import replace_json
from lifeboat_cache.targets.files import close_file, open_file
from lifeboat_cache.version import __version__

__all__ = ["LEASE_S", "ensure_agent", "spawn", "start_lock"]

_log = logging.getLogger("lifeboat_cache")

#: The agent ends so many seconds after the last engine.
LEASE_S = 60.0

#: How long an agent of an older release may take to end.
_STOP_S = 10.0

#: How long a Python interpreter may take until it has the lock or says why not.
_START_S = 60.0

# One start at a time in this process, for its threads share its locks.
_guard = threading.Lock()
_asked_for_kernels: list[bool] = []
_said: dict[AgentState, float] = {}

# The thread that starts an agent, and what has become of the last attempts.
_starter: threading.Thread | None = None
_last: dict[Path, AgentStatus] = {}


def _after_fork() -> None:
    """In a forked child: the threads stayed with the parent."""
    global _guard, _starter
    _guard = threading.Lock()
    _starter = None


os.register_at_fork(after_in_child=_after_fork)


def ensure_agent(
    home: Path,
    config_path: Path | None = None,
    *,
    lease_s: float = LEASE_S,
    hung_after_s: float = HUNG_AFTER_S,
    wait: bool = True,
) -> AgentStatus:
    """Make sure that this node and home have an agent; call it again every few seconds.

    Costs a look at two small files where one is alive. Otherwise it starts one, which
    takes some tenths of a second, in which nothing holds the interpreter. Never
    raises; the status says why there is none.

    Parameters
    ----------
    home
        The home directory.
    config_path
        The configuration file in use; ``None`` lets the agent find it as engines do.
    lease_s
        How long the agent outlives the last engine, in seconds.
    hung_after_s
        Silence of the agent, in seconds, after which another is started in its place.
    wait
        Whether to look, and to return when the agent has its lock. Otherwise all of that
        is done on another thread (a home directory on a dead disk holds up that one
        only), and what the last call has found out is returned.
    """
    places = AgentPlaces.of(home)

    def ensure() -> AgentStatus:
        status = _guarded(places, lambda: _look(places, hung_after_s))
        if not status.alive or _outdated(status):
            status = _guarded(places, lambda: _attempt(places, config_path, lease_s, hung_after_s))
            if status.state in (AgentState.FAILED, AgentState.BACKOFF):
                _say(status)
        _last[places.home] = status
        return status

    if wait:
        return ensure()
    _in_background(ensure)
    return _last.get(places.home, AgentStatus(AgentState.STARTING))


def _guarded(places: AgentPlaces, work: Callable[[], AgentStatus]) -> AgentStatus:
    """Do what must not reach the engine when it fails."""
    try:
        return work()
    except OSError as error:
        return AgentStatus(
            AgentState.FAILED,
            f"the agent cannot be started: {error.filename or places.home}: "
            f"{error.strerror or error}: "
            "choose a home directory (LIFEBOAT_CACHE_HOME) that can be written",
        )
    except Exception as error:
        return AgentStatus(
            AgentState.FAILED,
            f"the agent cannot be started: {type(error).__name__}: {error}: please report this",
        )


def _in_background(ensure: Callable[[], AgentStatus]) -> None:
    global _starter
    if _starter is None or not _starter.is_alive():
        thread = threading.Thread(target=ensure, name="lifeboat-agent-start", daemon=True)
        # No thread to be had: the next call tries again.
        with contextlib.suppress(RuntimeError):
            thread.start()
            _starter = thread


def _look(places: AgentPlaces, hung_after_s: float) -> AgentStatus:
    status = status_at(places, hung_after_s)
    if status.alive and not _outdated(status):
        _ensure_kernels(places, status)
    return status


def _attempt(
    places: AgentPlaces, config: Path | None, lease_s: float, hung_after_s: float
) -> AgentStatus:
    if not _guard.acquire(blocking=False):
        return AgentStatus(AgentState.STARTING)
    try:
        places.make()
        with start_lock(places) as mine:
            if not mine:
                return AgentStatus(AgentState.STARTING)
            # Somebody may have started it between the look and the lock.
            status = status_at(places, hung_after_s)
            if _outdated(status):
                _log.info("LifeboatCache: an agent of release %s makes room", status.core)
                stop_agent(places, status, _STOP_S)
                status = status_at(places, hung_after_s)
            if not status.alive and status.state is not AgentState.BACKOFF:
                status = _start(places, config, lease_s, status)
            return status
    finally:
        _guard.release()


@contextlib.contextmanager
def start_lock(places: AgentPlaces) -> Iterator[bool]:
    """Hold the lock of whoever starts an agent; false if another process does.

    Raises
    ------
    OSError
        If its file cannot be made.
    """
    fd = open_file(places.start, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield False
            return
        except OSError:
            pass  # a filesystem without locks: two agents at worst, and one of them ends
        yield True
    finally:
        close_file(fd)


def _start(
    places: AgentPlaces, config: Path | None, lease_s: float, found: AgentStatus
) -> AgentStatus:
    replace_json(places.history, {"starts": [*recent_starts(places), clock()]})
    if found.state in (AgentState.DIED, AgentState.HUNG):
        _log.info("LifeboatCache: %s; another is started", found.reason)
    arguments = ["--lease", str(lease_s)]
    if found.state is AgentState.HUNG:
        arguments.append("--take-over")
    reason = spawn(places, arguments, config)
    if reason:
        return AgentStatus(AgentState.FAILED, f"the agent cannot be started: {reason}")
    return AgentStatus(AgentState.STARTING)


def _outdated(status: AgentStatus) -> bool:
    """Whether the agent is older than this release, which it cannot look after in full."""
    if status.state is not AgentState.RUNNING or status.operated:
        return False
    theirs, ours = _release(status.core), _release(__version__)
    return bool(theirs and ours) and theirs < ours


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version; empty if it is not of that kind."""
    parts = version.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _ensure_kernels(places: AgentPlaces, status: AgentStatus) -> None:
    """Have kernels compiled for this process if the agent's do not fit it.

    The agent compiles for the Python and numba that it runs with, and engines of another
    environment beside it have others.
    """
    if status.document.get("kernels") not in ("ready", "failed") or kernels.ready():
        return
    if _guard.acquire(blocking=False):
        try:
            if not _asked_for_kernels and not kernels.load(places.home):
                _asked_for_kernels.append(True)
                if begin_build(places.home):
                    _log.info("LifeboatCache: kernels for this environment are compiled")
                    spawn(places, ["--compile"], None)
        finally:
            _guard.release()


def spawn(places: AgentPlaces, arguments: list[str], config: Path | None) -> str:
    """Start a process that is nobody's child; return why that failed, or nothing."""
    if not sys.executable:
        return "this process does not know its Python interpreter: run `lifeboat-cache agent`"
    home = Path(os.path.abspath(places.home))
    # By its file: a foreign distribution that hides `lifeboat_cache` is not even looked at.
    # -P: nothing is imported from where it lies.
    command = [sys.executable, "-P", str(Path(__file__).with_name("__main__.py"))]
    command += ["--detach", "--home", str(home), *arguments]
    if config is not None:
        command += ["--config", os.path.abspath(config)]
    log = open_file(places.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=child_environment(os.environ, home, config),
            start_new_session=True,
        )
    except OSError as error:
        return f"{sys.executable}: {error.strerror}: run `lifeboat-cache agent`"
    finally:
        close_file(log)
    try:
        # What was started here only starts the agent and ends: it is reaped at once, and
        # the agent itself is not among the engine's children.
        code = child.wait(_START_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"it did not start within {_START_S:.0f} s: see {places.log}"
    if code in (Exit.OK, Exit.ANOTHER):
        return ""
    return f"it ended with {code} at its start: see {places.log}"


def _say(status: AgentStatus) -> None:
    now = time.monotonic()
    if now - _said.get(status.state, -STARTS_S) >= STARTS_S:
        _said[status.state] = now
        _log.warning("LifeboatCache: %s. Nothing is evicted until there is one", status.reason)
