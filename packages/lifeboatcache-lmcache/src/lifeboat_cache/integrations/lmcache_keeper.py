"""What an adapter sees to now and then: names of before, changed weights, what was evicted."""

from __future__ import annotations

import logging
import threading
import time

from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.integrations.lmcache_space import ModelSpace
from lifeboat_cache.integrations.lmcache_spaces import Spaces
from lifeboat_cache.integrations.lmcache_stock import Stock
from lifeboat_cache.interface import State

__all__ = ["Keeper"]

_log = logging.getLogger("lifeboat_cache")

#: How often what has to be looked at now and then is looked at, in seconds.
_TICK_S = 2.0

#: How often known objects are compared with what is stored, in seconds.
_COMPARE_S = 30.0


class Keeper:
    """Looks after the stores of an adapter.

    Parameters
    ----------
    spaces, stock
        Of the adapter.
    """

    def __init__(self, spaces: Spaces, stock: Stock) -> None:
        self._spaces, self._stock = spaces, stock
        self._stop = threading.Event()

    def run(self) -> None:
        """Look again and again, until :meth:`stop`."""
        compared = time.monotonic()
        while not self._stop.wait(_TICK_S if self._named() else _TICK_S / 10):
            try:
                for space in self._spaces.all():
                    self._look_after(space)
                if time.monotonic() - compared > _COMPARE_S:
                    compared = time.monotonic()
                    self._compare()
            except StoreClosedError:
                continue
            except Exception:
                _log.exception("LifeboatCache: looking after a store failed; please report this")

    def stop(self) -> None:
        """Let :meth:`run` return."""
        self._stop.set()

    def _named(self) -> bool:
        return all([space.named for space in self._spaces.all()])

    def _look_after(self, space: ModelSpace) -> None:
        if space.changed():
            self._leave(space)
            return
        if not space.named and space.store.state is State.READY:
            named = space.names()
            space.named = True
            self._stock.add([key for key, _ in named], [layout for _, layout in named])
        elif space.store.state is State.DISABLED:
            space.named = True

    def _leave(self, space: ModelSpace) -> None:
        """The model's weights are others now: what is stored belongs to those of before."""
        _log.warning(
            "LifeboatCache: the weights of %s have changed; its KV is neither kept nor used from "
            "here on: restart its engines, then this server",
            space.model_name,
        )
        self._spaces.leave(space)
        self._stock.remove(
            [key for key, _ in self._stock.known.items() if key.model_name == space.model_name]
        )

    def _compare(self) -> None:
        """Notice what was evicted by the agent, or deleted by another server."""
        known = self._stock.known.items()
        for space, rows in self._spaces.rows([key for key, _ in known]):
            if space is not None and space.store.state is State.READY:
                self._stock.remove_missing(
                    space, [known[n][0] for n in rows], [known[n][1] for n in rows]
                )
