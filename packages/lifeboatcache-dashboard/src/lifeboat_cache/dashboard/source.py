"""What the pages show: read by one thread, so that no page ever waits for storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lifeboat_cache.agent import AgentState, agent_status
from lifeboat_cache.config import Config
from lifeboat_cache.config.watched import WatchedConfig
from lifeboat_cache.dashboard.history import History, sample_of
from lifeboat_cache.registry import Counts, Snapshot, snapshot
from lifeboat_cache.registry.measured import known_targets
from lifeboat_cache.registry.overview import AgentFacts, overview

__all__ = ["Source", "View"]

_log = logging.getLogger("lifeboat_cache")

#: While pages are being looked at, and otherwise; processes publish every 2 s.
_EAGER_S, _IDLE_S = 1.0, 10.0

#: A page that was asked for keeps the thread eager for so long.
_INTEREST_S = 30.0

#: A page waits at most so long for something fresh, and shows what is known then.
_PATIENCE_S = 2.0

_SAMPLE_S = 10.0


@dataclass(frozen=True)
class View:
    """What was known at one moment.

    Attributes
    ----------
    document
        As ``lifeboat-cache status --json`` shows it.
    found
        The processes and their counts.
    config
        The configuration in the files; ``None`` if they cannot be used.
    problem
        Why nothing newer is known; empty if this is fresh.
    """

    document: Mapping[str, Any]
    found: Snapshot
    config: Config | None
    problem: str = ""
    looked: float = field(default_factory=time.time)


class Source:
    """Looks at a home directory again and again.

    Parameters
    ----------
    home
        The home directory.
    config_path
        The configuration file; ``None`` = found as engines find it.
    history
        Where samples go.
    """

    def __init__(self, home: Path, config_path: Path | None, history: History) -> None:
        self.home = home
        self.config_path = config_path
        self.history = history
        self._config = WatchedConfig(home, config_path, speaker="dashboard: ")
        self._view: View | None = None
        self._asked = time.monotonic()
        self._sampled = 0.0
        self._changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._work, name="look", daemon=True)
        self._thread.start()

    def view(self) -> View:
        """What is known now, at most a few seconds old unless storage does not answer."""
        with self._changed:
            self._asked = time.monotonic()
            view = self._view
            if view is None or time.time() - view.looked > 2 * _EAGER_S:
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._view is not view or self._stop, timeout=_PATIENCE_S
                )
                view = self._view
        if view is None:
            return _nothing(self.home, "the home directory has not answered yet")
        age = time.time() - view.looked
        if age > 15:
            return View(
                view.document,
                view.found,
                view.config,
                f"the home directory has not answered for {age:.0f} s",
                view.looked,
            )
        return view

    def close(self) -> None:
        """End the thread, as far as it can be ended. Idempotent."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _work(self) -> None:
        while not self._stop:
            try:
                view = self._look()
            except Exception as error:  # the next look may find what this one did not
                _log.debug("dashboard: the home directory could not be read", exc_info=True)
                view = self._failed(error)
            with self._changed:
                self._view = view
                self._changed.notify_all()
                self._pause()

    def _pause(self) -> None:
        asked = self._asked
        eager = time.monotonic() - asked < _INTEREST_S
        self._changed.wait_for(
            lambda: self._stop or (not eager and self._asked != asked),
            timeout=_EAGER_S if eager else _IDLE_S,
        )

    def _look(self) -> View:
        self._config.look()
        config = self._config.config
        found = snapshot(self.home)
        if found is None:
            raise TimeoutError("another process holds run/totals.lock and does not go on")
        document = overview(
            self.home, found, known_targets(found, config), self._agent(), self._config.problem
        )
        now = time.time()
        if abs(now - self._sampled) >= _SAMPLE_S:
            self._sampled = now
            self.history.add(now, sample_of(document))
        return View(document, found, config)

    def _agent(self) -> AgentFacts:
        status = agent_status(self.home)
        reason = "" if status.state is AgentState.RUNNING else status.reason
        config = self._config.config
        autostart = config is None or config.agent.autostart
        return AgentFacts(autostart and status.state is not AgentState.STARTING, reason)

    def _failed(self, error: Exception) -> View:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        problem = (
            f"{self.home} cannot be read ({why}): run the dashboard as the engines' user, and see "
            "that the home directory is there"
        )
        old = self._view
        if old is None:
            return _nothing(self.home, problem)
        return View(old.document, old.found, old.config, problem, time.time())


def _nothing(home: Path, problem: str) -> View:
    found = Snapshot((), Counts(), Counts())
    document = overview(home, found, (), AgentFacts(expected=False))
    return View(document, found, None, problem)
