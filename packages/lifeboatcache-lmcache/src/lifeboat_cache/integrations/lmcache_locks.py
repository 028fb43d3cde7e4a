"""Locks of objects between LMCache's lookups and its loads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from lmcache.v1.distributed.api import ObjectKey

from lifeboat_cache.integrations.lmcache_space import ModelSpace

__all__ = ["Locks"]


class Locks:
    """Counts the locks of objects; each keeps its blocks from being evicted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Locks of objects, each with the blocks that it has pinned.
        self._held: dict[ObjectKey, list[tuple[ModelSpace, list[bytes]]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, pinned: Iterable[tuple[ObjectKey, ModelSpace, list[bytes]]]) -> None:
        """Lock objects whose blocks have been pinned."""
        with self._lock:
            for key, space, blocks in pinned:
                self._held.setdefault(key, []).append((space, blocks))

    def release(self, keys: Sequence[ObjectKey]) -> None:
        """Undo one lock of each key that has one."""
        pinned: dict[int, tuple[ModelSpace, list[bytes]]] = {}
        with self._lock:
            for key in keys:
                locks = self._held.get(key)
                if not locks:
                    continue
                space, blocks = locks.pop()
                if not locks:
                    del self._held[key]
                pinned.setdefault(id(space), (space, []))[1].extend(blocks)
        for space, blocks in pinned.values():
            space.store.unpin(blocks)

    def without(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Those of some keys that are not locked."""
        with self._lock:
            return [key for key in keys if key not in self._held]
