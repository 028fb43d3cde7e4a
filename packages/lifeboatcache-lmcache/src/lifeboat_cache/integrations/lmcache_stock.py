"""What is stored, as LMCache was told: it counts, lists and evicts by that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener

from lifeboat_cache.integrations.lmcache_known import KnownObjects
from lifeboat_cache.integrations.lmcache_layout import ObjectLayout
from lifeboat_cache.integrations.lmcache_space import ModelSpace

__all__ = ["Stock"]

_log = logging.getLogger("lifeboat_cache")


class Stock:
    """Keeps the objects that are known to be stored, and tells LMCache of every change.

    Parameters
    ----------
    stored, accessed, deleted
        How LMCache is told: with keys, and with their sizes but for ``accessed``.
    """

    def __init__(
        self,
        stored: Callable[[list[ObjectKey], list[int]], None],
        accessed: Callable[[list[ObjectKey]], None],
        deleted: Callable[[list[ObjectKey], list[int]], None],
    ) -> None:
        self._stored, self._accessed, self._deleted = stored, accessed, deleted
        self.known = KnownObjects()

    def greet(self, listener: L2AdapterListener) -> None:
        """Tell a new listener what is known already."""
        known = self.known.items()
        if known:
            keys = [key for key, _ in known]
            _tell(listener.on_l2_keys_stored, keys, [layout.nbytes for _, layout in known])

    def add(self, keys: Sequence[ObjectKey], layouts: Sequence[ObjectLayout]) -> None:
        """Objects that are stored, by us or by others."""
        changed = []
        for key, layout in zip(keys, layouts, strict=True):
            known = self.known.layout(key)
            if known is not None and known.signature != layout.signature:
                changed.append(key)
        self.remove(changed)  # of another size
        fresh, sizes = self.known.add(keys, layouts)
        if fresh:
            _tell(self._stored, fresh, sizes)

    def used(self, keys: list[ObjectKey]) -> None:
        """Objects that somebody wants."""
        _tell(self._accessed, keys)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Objects that are not there any more."""
        gone, sizes = self.known.remove(keys)
        if gone:
            _tell(self._deleted, gone, sizes)

    def remove_missing(
        self,
        space: ModelSpace,
        keys: Sequence[ObjectKey],
        layouts: Sequence[ObjectLayout],
        good: Sequence[bool] | None = None,
    ) -> None:
        """Look whether objects are there, but for those that are ``good``; remove the others."""
        doubtful = [n for n in range(len(keys)) if good is None or not good[n]]
        there = space.present([keys[n] for n in doubtful], [layouts[n] for n in doubtful])
        self.remove([keys[n] for n, fine in zip(doubtful, there, strict=True) if not fine])


def _tell(notify: Callable[..., None], *arguments: Any) -> None:
    """Listeners are LMCache's: what they raise must not end a thread of ours."""
    try:
        notify(*arguments)
    except Exception:
        _log.exception("LifeboatCache: a listener of LMCache's failed")
