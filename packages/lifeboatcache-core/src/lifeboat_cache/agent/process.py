"""The agent's process: what it does from its first to its last second."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lifeboat_cache import kernels
from lifeboat_cache.agent.caretaker import Caretaker
from lifeboat_cache.agent.dashboard_child import DashboardChild
from lifeboat_cache.agent.exits import Exit
from lifeboat_cache.agent.kernel_build import KernelBuild
from lifeboat_cache.agent.lock import AgentLock
from lifeboat_cache.agent.movers import Movers
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.starter import LEASE_S, spawn
from lifeboat_cache.agent.status import clock
from lifeboat_cache.agent.wanted import WantedTarget, merged, of_config, of_document
from lifeboat_cache.config.watched import WatchedConfig
from lifeboat_cache.mover.hanging import needs_mover
from lifeboat_cache.registry import ProcessEntry, Registration, agent_document, fold, processes
from lifeboat_cache.registry.files import replace_json
from lifeboat_cache.registry.host import boot_id, process_start
from lifeboat_cache.version import __version__

if TYPE_CHECKING:
    from lifeboat_cache.config.schema import Telemetry
    from lifeboat_cache.registry.prometheus import Exporter

__all__ = ["BEAT_S", "Agent"]

_log = logging.getLogger("lifeboat_cache")

#: How often it publishes, in seconds.
BEAT_S = 2.0

#: How often it looks at engines, configuration and targets, in seconds.
_LOOK_S = 2.0

#: How often the counts of processes that have ended are added up, in seconds.
_FOLD_S = 30.0

#: From so many blocks on the agent uses compiled kernels itself.
_MANY_BLOCKS = 20_000

#: How long the end may take, in seconds: whatever a pass is doing can be cut off.
_END_S = 1.0


class Agent:
    """The agent of one node and home. Its lock is held already.

    Parameters
    ----------
    places
        Where its files are.
    lock
        Its lock.
    config_path
        The configuration file; ``None`` = found as engines find it.
    lease_s
        It ends so many seconds after the last engine; ``None`` = it stays.
    """

    def __init__(
        self,
        places: AgentPlaces,
        lock: AgentLock,
        config_path: Path | None,
        lease_s: float | None,
    ) -> None:
        self._places = places
        self._lock = lock
        self._lease_s = lease_s
        self._config_path = config_path
        self._config = WatchedConfig(places.home, config_path)
        self._kernels = KernelBuild(places.home)
        self._dashboard = DashboardChild(places.home, config_path)
        self._caretakers: dict[Path, Caretaker] = {}
        self._movers = Movers(places.home, self._start_mover)
        self._leaving: list[Caretaker] = []
        self._disagreements: list[str] = []
        self._engines = 0
        self._state = "starting"
        self._reason = ""
        self._started = time.time()
        self._replaced = threading.Event()
        self._over = threading.Event()
        self._publishing = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._signal = 0
        self._exporter: Exporter | None = None
        self._kernels_asked = False
        self._exported: Telemetry | None = None
        self._exporter_problem = ""
        self._registration: Registration | None = None

    # What it says about itself ----------------------------------------------

    def _document(self) -> dict[str, Any]:
        return {
            "format": 1,
            "pid": os.getpid(),
            "born": process_start(os.getpid()),
            "host": socket.gethostname(),
            "core": __version__,
            "python": sys.executable,
            "mode": "operator" if self._lease_s is None else "lease",
            "lease_s": self._lease_s,
            "started": self._started,
            "published": time.time(),
            "clock": clock(),
            "state": self._state,
            "reason": self._reason,
            "engines": self._engines,
            "kernels": self._kernels.state,
            "config": self._config.source,
            "dashboard": {"url": self._dashboard.url, "problem": self._dashboard.problem},
            "problems": self._problems(),
            "targets": [
                *(caretaker.describe() for caretaker in self._all_caretakers()),
                *self._movers.describe(),
            ],
        }

    def _all_caretakers(self) -> list[Caretaker]:
        return [*list(self._caretakers.values()), *list(self._leaving)]

    def _problems(self) -> list[str]:
        exporter = self._exporter.reason if self._exporter else self._exporter_problem
        problems = [self._config.problem, self._kernels.problem, exporter]
        others = [*self._disagreements, *self._movers.problems()]
        return [problem for problem in [*problems, *others] if problem]

    def _registry_document(self) -> dict[str, Any]:
        facts = [caretaker.facts() for caretaker in self._all_caretakers()]
        facts += self._movers.facts()
        reason = "; ".join(self._problems()) or self._reason
        document = agent_document(
            facts, state="active" if self._state == "watching" else self._state, reason=reason
        )
        document["agent"] = {
            "mode": "operator" if self._lease_s is None else "lease",
            "engines": self._engines,
            "kernels": self._kernels.state,
            # Not among its problems: the cache works without it.
            "dashboard": {"url": self._dashboard.url, "problem": self._dashboard.problem},
        }
        return document

    def _publish(self) -> None:
        with self._publishing:
            if not self._lock.is_current():
                return
            try:
                replace_json(self._places.document, self._document())
            except OSError:  # a full disk, most likely, on which this agent is making room
                self._lock.touch()

    def _beat(self) -> None:
        """The heart: independent of whatever the rest is stuck in."""
        while not self._over.wait(BEAT_S):
            if not self._lock.is_current():
                self._replaced.set()
                self._wake()
                return
            self._publish()
            if self._registration is not None:
                self._registration.publish()

    # Its life ---------------------------------------------------------------

    def run(self) -> Exit:
        """Work until a signal, the end of the lease, or until another takes over."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # A terminal that goes away is none of the agent's business.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._publish()
        heart = threading.Thread(target=self._beat, name="heart", daemon=True)
        heart.start()
        _log.info(
            "agent of lifeboatcache-core %s for %s starts: %s",
            __version__,
            self._places.home,
            "stays until it is told to end"
            if self._lease_s is None
            else f"ends {self._lease_s:g} s after the last engine",
        )
        try:
            self._reason = self._work()
        finally:
            self._end()
        return Exit.OK

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signal = number
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def _work(self) -> str:
        """Everything until the end; why it ends."""
        self._registration = Registration(
            self._places.home, "agent", describe=self._registry_document
        )
        self._places.remove_left_behind()
        self._kernels.start()
        last_engine = clock()
        folded = -_FOLD_S
        while True:
            if self._signal:
                return f"it was told to end ({signal.Signals(self._signal).name})"
            if self._replaced.is_set():
                return "another agent has taken its place"
            engines = self._live_engines()
            self._engines = len(engines)
            if engines:
                last_engine = clock()
            elif self._lease_s is not None and clock() - last_engine >= self._lease_s:
                return f"no engine has been there for {self._lease_s:g} s"
            self._config.look()
            self._look_after(engines)
            self._look_at_kernels()
            self._export()
            if self._config.config is not None:
                self._dashboard.look(self._config.config.dashboard)
            if clock() - folded >= _FOLD_S:
                folded = clock()
                fold(self._places.home)
            self._state = "watching"
            pause = _LOOK_S if self._lease_s is None else min(_LOOK_S, self._lease_s / 4)
            self._wait(pause)

    def _wait(self, seconds: float) -> None:
        # Not an event: a signal handler must not set one that its own thread waits for.
        ready, _, _ = select.select([self._wake_read], [], [], seconds)
        if ready:
            with contextlib.suppress(OSError):
                os.read(self._wake_read, 64)

    def _live_engines(self) -> list[ProcessEntry]:
        """Engines of this node; of others as well where nodes cannot be told apart."""
        return [
            entry
            for entry in processes(self._places.home)
            if entry.alive and entry.role == "engine" and (entry.identity.here or not boot_id())
        ]

    def _look_after(self, engines: Sequence[ProcessEntry]) -> None:
        config = self._config.config
        tiers = config.storage.places if config else ()
        moved = [tier for tier in tiers if needs_mover(tier)]
        self._movers.look(moved)
        targets = of_config(config, [one for one in tiers if one not in moved]) if config else []
        for engine in engines:
            # What can hang is never looked at from here: its mover does that.
            for target in of_document(engine.document, self._movers.has):
                if config is None:
                    targets.append(target)
                    continue
                # What engines do not publish is as in the agent's own configuration.
                targets.append(
                    replace(
                        target,
                        eviction=config.eviction.policy,
                        max_age_s=config.eviction.max_age,
                        integrity_key=config.security.integrity_key,
                    )
                )
        wanted, disagreements = merged(targets)
        for text in disagreements:
            if text not in self._disagreements:
                _log.warning("%s", text)
        self._disagreements = disagreements
        self._set(wanted)

    def _start_mover(self, target: str) -> str:
        lease_s = LEASE_S if self._lease_s is None else self._lease_s
        arguments = ["--mover", target, "--lease", str(lease_s)]
        return spawn(self._places, arguments, self._config_path)

    def _set(self, wanted: dict[Path, WantedTarget]) -> None:
        self._leaving = [item for item in self._leaving if not item.join(0)]
        for path in [path for path in self._caretakers if path not in wanted]:
            caretaker = self._caretakers.pop(path)
            caretaker.stop()
            self._leaving.append(caretaker)
        for path, target in wanted.items():
            if path in self._caretakers:
                self._caretakers[path].update(target)
            elif not any(item.path == path for item in self._leaving):
                _log.info("looks after %s", path)
                self._caretakers[path] = Caretaker(target, self._places.home)

    def _look_at_kernels(self) -> None:
        self._kernels.look()
        if self._kernels.state != "ready" or self._kernels_asked:
            return
        if any((item.facts().blocks or 0) >= _MANY_BLOCKS for item in self._caretakers.values()):
            # Worth the memory: journals of many records are checked much faster.
            self._kernels_asked = True
            kernels.load(self._places.home)

    def _export(self) -> None:
        """Serve metrics as the configuration says; whatever goes wrong, the rest goes on."""
        config = self._config.config
        if config is None or config.telemetry == self._exported:
            return
        self._exported = config.telemetry
        try:
            from lifeboat_cache.registry.prometheus import start_exporter

            if self._exporter is not None:
                self._exporter.close()
            self._exporter = start_exporter(self._places.home, config)
        except Exception as error:
            self._exporter = None
            self._exporter_problem = f"metrics are not served: {error}"
            _log.warning("%s", self._exporter_problem)

    def _end(self) -> None:
        """Leave in order, and at once: what a pass is doing can be cut off anywhere."""
        self._state = "ending"
        _log.info("the agent ends: %s", self._reason or "it failed")
        self._kernels.stop()
        self._dashboard.stop()
        self._movers.stop()
        until = time.monotonic() + _END_S
        caretakers = self._all_caretakers()
        for caretaker in caretakers:
            caretaker.stop()
        for caretaker in caretakers:
            caretaker.join(max(0.0, until - time.monotonic()))
        self._over.set()
        if self._reason:
            self._state = "ended"
            self._publish()
            if self._lock.is_current():
                # It did not die: whoever needs an agent may start one at once.
                with contextlib.suppress(OSError):
                    os.unlink(self._places.history)
        if self._registration is not None:
            self._registration.close()
        self._lock.release()
