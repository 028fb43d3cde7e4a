"""The mover's process: what it does from its first to its last second."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lifeboat_cache import kernels
from lifeboat_cache.agent.caretaker import Caretaker
from lifeboat_cache.agent.exits import Exit
from lifeboat_cache.agent.lock import AgentLock
from lifeboat_cache.agent.logfile import log_to_file
from lifeboat_cache.agent.priority import step_back
from lifeboat_cache.agent.status import clock
from lifeboat_cache.agent.wanted import merged, of_config
from lifeboat_cache.config.schema import Config, Tier
from lifeboat_cache.config.watched import WatchedConfig
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.mover.hosting import Hosts
from lifeboat_cache.mover.places import MoverPlaces
from lifeboat_cache.mover.session import Session
from lifeboat_cache.mover.throttle import Throttle
from lifeboat_cache.mover.wire import peer_uid
from lifeboat_cache.registry.files import replace_json, run_directory
from lifeboat_cache.registry.host import process_start
from lifeboat_cache.targets.opening import target_of
from lifeboat_cache.version import __version__

if TYPE_CHECKING:
    from lifeboat_cache.s3.caretaker import S3Caretaker
    from lifeboat_cache.s3.settings import S3Settings

__all__ = ["BEAT_S", "Mover", "run_mover"]

_log = logging.getLogger("lifeboat_cache")

#: How often it publishes, in seconds.
BEAT_S = 2.0

#: How often engines are told how it does, in seconds.
_STATUS_S = 1.0

#: Engines that may wait to be connected.
_BACKLOG = 64


class Mover:
    """The mover of one target. Its lock is held already.

    Parameters
    ----------
    places
        Where its files are.
    lock
        Its lock.
    config_path
        The configuration file; ``None`` = found as engines find it.
    lease_s
        It ends so many seconds after nobody wants it any more.
    """

    def __init__(
        self, places: MoverPlaces, lock: AgentLock, config_path: Path | None, lease_s: float
    ) -> None:
        self._places = places
        self._lock = lock
        self._lease_s = lease_s
        self._config = WatchedConfig(places.home, config_path)
        self._tiers: list[Tier] = []
        self._throttle = Throttle()
        self._hosts = Hosts(self._make_target, places.home)
        self._caretaker: Caretaker | None = None
        self._bucket: S3Caretaker | None = None
        self._sessions: list[Session] = []
        self._guard = threading.Lock()
        self._probe: threading.Thread | None = None
        self._askers: list[Session] = []
        self._started = time.time()
        self._problem = ""
        self._state = "starting"
        self._replaced = threading.Event()
        self._last_use = clock()

    # The target -------------------------------------------------------------

    def _make_target(self) -> Any:
        if self._tiers[0].type == "s3":
            from lifeboat_cache.s3.target import S3Target

            return S3Target.of(self._bucket_settings(), self._tiers[0].rung)
        return target_of(self._tiers[0])

    def _look_at_wants(self) -> None:
        """Take in what processes want, and with which limits."""
        found = self._places.wanted()
        if found:
            self._last_use = clock()
            self._tiers = found
        if not self._tiers:
            return
        limits = [tier.bandwidth_limit_bytes for tier in self._tiers]
        self._throttle.limit(min((one for one in limits if one is not None), default=None))
        self._config.look()
        if self._tiers[0].type == "s3":
            self._look_after_bucket()
            return
        config = self._config.config or Config.model_validate({})
        all_wanted = [one for tier in self._tiers for one in of_config(config, [tier])]
        targets, disagreements = merged(all_wanted)
        self._problem = "; ".join(disagreements)
        wanted = next(iter(targets.values()))
        if self._caretaker is None:
            self._caretaker = Caretaker(wanted, self._places.home)
        else:
            self._caretaker.update(wanted)

    def _bucket_settings(self) -> S3Settings:
        from lifeboat_cache.s3.settings import S3Settings

        # Where engines disagree the smallest capacity and the largest reserve count. Each engine
        # gives loads up by its own timeout: here the longest counts.
        wanted = [S3Settings.from_tier(tier) for tier in self._tiers]
        capacities = [one.capacity for one in wanted if one.capacity is not None]
        return replace(
            wanted[0],
            capacity=min(capacities, default=None),
            staging=min(one.staging for one in wanted),
            reserve=max(one.reserve for one in wanted),
            timeout_s=max(one.timeout_s for one in wanted),
        )

    def _look_after_bucket(self) -> None:
        from lifeboat_cache.s3.caretaker import Keeping, S3Caretaker

        settings = self._bucket_settings()
        config = self._config.config or Config.model_validate({})
        keeping = Keeping(
            config.eviction.policy, config.eviction.max_age, config.security.integrity_key
        )
        if self._bucket is None:
            self._bucket = S3Caretaker(settings, keeping)
        else:
            self._bucket.update(settings, keeping)

    def _busy(self) -> bool:
        """Whether it has something to do that nobody waits for."""
        return self._bucket is not None and self._bucket.busy

    def _probe_for(self, session: Session) -> None:
        """Have the target probed, on a thread of its own: it may never answer."""
        with self._guard:
            self._askers.append(session)
            if self._probe is not None and self._probe.is_alive():
                return
            self._probe = threading.Thread(target=self._probe_once, name="probe", daemon=True)
            self._probe.start()

    def _probe_once(self) -> None:
        reason = ""
        try:
            self._make_target().probe()
        except (OSError, ValueError, LifeboatError) as error:
            reason = str(error)
        except Exception as error:
            _log.exception("probing failed; please report this")
            reason = f"internal error: {error}"
        with self._guard:
            askers, self._askers = self._askers, []
            self._probe = None
        for session in askers:
            session.probed(reason)

    # What it says -----------------------------------------------------------

    def _document(self) -> dict[str, Any]:
        caretaker = self._caretaker or self._bucket
        with self._guard:
            engines = len(self._sessions)
        return {
            "format": 1,
            "pid": os.getpid(),
            "born": process_start(os.getpid()),
            "core": __version__,
            "state": self._state,
            "started": self._started,
            "clock": clock(),
            "engines": engines,
            "problem": self._problem,
            "target": {} if caretaker is None else caretaker.describe(),
            "facts": {} if caretaker is None else vars(caretaker.facts()),
        }

    def _publish(self) -> None:
        with contextlib.suppress(OSError):
            replace_json(self._places.document, self._document())

    def _beat(self) -> None:
        """Look at what lies in the home directory, which may be on a dead disk too."""
        while True:
            try:
                if not self._lock.is_current():
                    self._replaced.set()
                self._look_at_wants()
                kernels.load(self._places.home)
                self._publish()
            except Exception:
                _log.exception("the mover's heart missed a beat; please report this")
            time.sleep(BEAT_S)

    def _tell(self) -> None:
        while True:
            time.sleep(_STATUS_S)
            try:
                self._hosts.look()
                with self._guard:
                    sessions = list(self._sessions)
                for session in sessions:
                    session.status()
            except Exception:
                _log.exception("the mover could not tell how it does; please report this")

    # Its life ---------------------------------------------------------------

    def run(self) -> Exit:
        """Serve engines until nobody wants it any more."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._look_at_wants()
        if not self._tiers:
            _log.info("mover %s: nobody wants it", self._places.target)
            return Exit.OK
        name = self._tiers[0].name
        with contextlib.closing(_listen(self._places)) as listener:
            self._state = "serving"
            self._publish()
            for work in (self._beat, self._tell):
                threading.Thread(target=work, daemon=True).start()
            _log.info("mover of target %s of release %s starts", name, __version__)
            reason = self._accept(listener)
        _log.info("mover of target %s ends: %s", name, reason)
        self._state = "ended"
        if self._bucket is not None:
            self._bucket.close()
        if self._lock.is_current():
            with contextlib.suppress(OSError):
                os.unlink(self._places.socket)
            self._publish()
        self._lock.release()
        return Exit.OK

    def _accept(self, listener: socket.socket) -> str:
        while True:
            ready, _, _ = select.select([listener], [], [], min(1.0, self._lease_s / 4))
            if ready:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    self._receive(connection)
            if self._replaced.is_set():
                return "another has taken its place"
            with self._guard:
                if self._sessions or self._busy():
                    self._last_use = clock()
            if clock() - self._last_use >= self._lease_s:
                return f"nobody has wanted it for {self._lease_s:g} s"

    def _receive(self, connection: socket.socket) -> None:
        _, uid = peer_uid(connection)
        if uid not in (os.getuid(), 0):
            _log.warning("a process of user %d is refused", uid)
            connection.close()
            return
        session = Session(connection, self._hosts, self._throttle, self._probe_for)
        with self._guard:
            self._sessions.append(session)

        def serve() -> None:
            try:
                session.run()
            finally:
                with self._guard:
                    self._sessions.remove(session)

        threading.Thread(target=serve, name="from engine", daemon=True).start()


def _listen(places: MoverPlaces) -> socket.socket:
    """A socket that only this user reaches. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(places.socket)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        places.at_socket(listener.bind)
        os.chmod(places.socket, 0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def run_mover(
    home: Path,
    target: str,
    config_path: Path | None,
    lease_s: float,
    tell: Callable[[int], None],
) -> Exit:
    """Be the mover of a target, if there is none yet.

    Parameters
    ----------
    home
        The home directory.
    target
        The target's key.
    config_path, lease_s
        See :class:`Mover`.
    tell
        Called once with an exit code, as soon as it is known what becomes of it.
    """
    places = MoverPlaces.of(home, target)
    lock = None
    try:
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text("lifeboat-mover", encoding="ascii")
        run_directory(home, create=True)
        lock = AgentLock.acquire(places.lock)
        code = Exit.OK if lock is not None else Exit.ANOTHER
        log_to_file(places.log)
    except OSError as error:
        print(f"lifeboat-cache mover: {error.filename}: {error.strerror}", file=sys.stderr)
        lock, code = None, Exit.UNUSABLE
    tell(code)
    if lock is None:
        return code
    faulthandler.enable()
    # Threads inherit it. Last on the disk, too, but not only when that is idle.
    step_back(urgent=True)
    kernels.load(home)
    try:
        return Mover(places, lock, config_path, lease_s).run()
    except Exception:
        _log.exception("the mover failed; please report this")
        return Exit.FAILED
