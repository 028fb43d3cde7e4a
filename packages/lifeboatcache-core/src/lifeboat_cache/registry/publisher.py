"""Publishing a block store."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lifeboat_cache.registry.counts import Counts
from lifeboat_cache.registry.document import (
    PublishedCodecs,
    PublishedStore,
    dropped,
    lookup_values,
    store_document,
    store_labels,
    store_values,
    tier_labels,
    tier_values,
)
from lifeboat_cache.registry.extra import facts_of
from lifeboat_cache.registry.registration import Registration, Role
from lifeboat_cache.registry.totals import fold

__all__ = ["RECENT_S", "StorePublisher"]

_log = logging.getLogger("lifeboat_cache")

#: What was lost within so many seconds makes a store unhealthy.
RECENT_S = 600.0

_SAMPLE_S = 15.0


class StorePublisher:
    """Publishes a store as long as it is open. No method raises.

    Files are written on a thread of its own: a home directory on a dead mount must not
    hold up the store, whose data may be elsewhere.

    Parameters
    ----------
    store
        The store.
    home
        The home directory.
    extra
        What else is known (see :func:`attach`, which adds to it).
    queue
        Numbers ``jobs``, ``pending_bytes`` and ``limit_bytes`` of the store.
    codecs
        The store's codecs: published, and told to look at files on this thread.
    role
        What the process is.
    """

    def __init__(
        self,
        store: PublishedStore,
        home: Path,
        extra: Callable[[], Mapping[str, Any]] | None = None,
        *,
        queue: Callable[[], Mapping[str, Any]] | None = None,
        codecs: PublishedCodecs | None = None,
        role: Role = "engine",
    ) -> None:
        self._store = store
        self._home = home
        self._extra = extra
        self._queue = queue
        self._codecs = codecs
        self._samples: deque[tuple[float, dict[str, dict[str, int]]]] = deque()
        self._counts = Counts()
        self._counted: dict[str, float] = {}
        self._of_tiers: dict[str, dict[str, float]] = {}
        self._said = False
        self._role: Role = role
        self._registration: Registration | None = None
        self._entered = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="lifeboat-publish", daemon=True)
        self._thread.start()

    @property
    def reason(self) -> str:
        """Why nothing is published; empty if it is, or has not been tried yet."""
        return "" if self._registration is None else self._registration.reason

    def document(self) -> dict[str, Any]:
        """What is published now."""
        facts: dict[str, Any] = {}
        for ask in (self._extra, lambda: facts_of(self._store)):
            if ask is not None:
                facts.update(ask())
        self._count(facts)
        codecs = self._codecs
        return store_document(
            self._store,
            facts=facts,
            queue={} if self._queue is None else self._queue(),
            recent=self._recent(),
            counters=self._counts,
            codecs={} if codecs is None else codecs.facts(),
            config={} if codecs is None else codecs.config_facts(),
        )

    def tick(self) -> None:
        """Have it published soon; to be called every few seconds. Returns at once."""
        self._wake.set()

    def publish(self) -> bool:
        """Publish now; whether that worked."""
        self._entered.wait()
        registration = self._registration
        return registration is not None and registration.publish()

    def close(self, timeout: float = 5.0) -> None:
        """Publish for the last time. Idempotent.

        Parameters
        ----------
        timeout
            Seconds to wait for a home directory that does not answer.
        """
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)

    def _work(self) -> None:
        try:
            self._look()
            registration = Registration(self._home, self._role, describe=self.document)
            self._registration = registration
            self._entered.set()
            self._say()
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                if not self._closing:
                    self._look()
                    registration.publish()
                    self._say()
            registration.close()
            # Without an agent nobody else might tidy up after many short-lived processes.
            fold(self._home, wait_s=0.0)
        except Exception:  # a fault of ours: the store goes on
            _log.exception("LifeboatCache: a store is published no longer; please report this")
        finally:
            self._entered.set()

    def _look(self) -> None:
        """See what has changed on files, which may take its time."""
        try:
            if self._codecs is not None:
                self._codecs.look()
        except Exception:  # a fault of ours: what holds now stays
            _log.exception("LifeboatCache: changes are not followed any more; please report this")
            self._codecs = None

    def _say(self) -> None:
        if self.reason and not self._said:
            self._said = True
            _log.warning("LifeboatCache: `lifeboat-cache status` cannot see this: %s", self.reason)

    def _count(self, facts: Mapping[str, Any]) -> None:
        # What was counted before a label was known stays where it was shown: a counter
        # that moved to other labels would look like one that fell.
        values = store_values(self._store.counters(), facts)
        if self._codecs is not None:
            values.update(self._codecs.values())
        more = {name: value - self._counted.get(name, 0) for name, value in values.items()}
        labels = store_labels(self._store, facts)
        if {"unknown", "none"} & set(labels.values()):
            more = {name: value for name, value in more.items() if value}
        if more:
            self._counts.add(labels, more)
        for name, value in values.items():
            self._counted[name] = max(value, self._counted.get(name, 0))
        self._count_apart({"engine": labels["engine"]}, "", lookup_values(self._store.counters()))
        for target in self._store.targets():
            self._count_apart(tier_labels(target), target.name, tier_values(target))

    def _count_apart(
        self, labels: Mapping[str, str], name_of: str, found: Mapping[str, float]
    ) -> None:
        """Add what has grown of the counts of one target, or of none."""
        counted = self._of_tiers.setdefault(name_of, {})
        values = {name: value for name, value in found.items() if value}
        more = {name: value - counted.get(name, 0) for name, value in values.items()}
        more = {name: value for name, value in more.items() if value > 0}
        if more:
            self._counts.add(labels, more)
            counted.update({name: values[name] for name in more})

    def _recent(self) -> dict[str, Any]:
        """What was lost in the last :data:`RECENT_S` seconds."""
        counters = self._store.counters()
        lost = {
            "store_dropped": dropped(counters.store_outcomes),
            "load_failed": dropped(counters.load_outcomes),
        }
        now = time.monotonic()
        # The first sample is from before anything was counted.
        if not self._samples:
            self._samples.append((now, {}))
        elif now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, lost))
        while len(self._samples) > 1 and now - self._samples[1][0] >= RECENT_S:
            self._samples.popleft()
        before = self._samples[0][1]
        recent: dict[str, Any] = {"seconds": RECENT_S}
        for kind, reasons in lost.items():
            old = before.get(kind, {})
            recent[kind] = {
                name: count - old.get(name, 0)
                for name, count in reasons.items()
                if count > old.get(name, 0)
            }
        return recent
