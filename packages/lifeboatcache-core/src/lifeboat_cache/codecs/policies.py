"""The codecs of several targets of one store, together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.config.live import LiveConfig

__all__ = ["CodecPolicies"]


class CodecPolicies:
    """What the codec policies of a store's targets do, for whoever publishes the store.

    Parameters
    ----------
    make
        Makes the policy of one target.
    live
        The configuration, if it is followed.

    Attributes
    ----------
    written
        Gives the name of the target that new blocks go to first; empty if there is none.
    """

    def __init__(self, make: Callable[[], CodecPolicy], live: LiveConfig | None = None) -> None:
        self._make = make
        self._live = live
        self._lock = threading.Lock()
        self._policies: dict[str, CodecPolicy] = {}
        self._past: Counter[str] = Counter()
        self.written: Callable[[], str] = lambda: ""

    def of(self, name: str) -> CodecPolicy:
        """A new policy for a target, in place of one that it had before."""
        policy = self._make()
        with self._lock:
            old = self._policies.pop(name, None)
            if old is not None:
                self._past.update(old.counts.values())
            self._policies[name] = policy
        return policy

    def _all(self) -> dict[str, CodecPolicy]:
        with self._lock:
            return dict(self._policies)

    def look(self) -> None:
        """See :meth:`CodecPolicy.look`."""
        if self._live is not None:
            self._live.look()
        for policy in self._all().values():
            policy.look()

    def values(self) -> dict[str, int]:
        """See :meth:`CodecCounts.values`."""
        policies = self._all()
        with self._lock:
            sums = Counter(self._past)
        for policy in policies.values():
            sums.update(policy.counts.values())
        return dict(sums)

    def facts(self) -> dict[str, Any]:
        """Those of the target that new blocks go to first; see :meth:`CodecPolicy.facts`."""
        policies = self._all()
        chosen = policies.get(self.written()) or next(iter(policies.values()), None)
        return {} if chosen is None else chosen.facts()

    def config_facts(self) -> dict[str, Any]:
        """See :meth:`CodecPolicy.config_facts`."""
        live = self._live
        return {} if live is None else {"problem": live.problem, "restart": list(live.restart)}
