"""Where chunks stand in their prompts, as far as lookups have told.

LMCache stores chunks without saying what comes before them; eviction wants to know, for a
chunk is useless without the ones before it. Before a prompt's chunks are stored they were
looked up, in order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey

from lifeboat_cache.interface import tag

__all__ = ["Prefixes"]

#: So many chunks are remembered.
_MOST = 1 << 16


class Prefixes:
    """Remembers the order of the chunks of lookups."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[bytes, str], tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def seen(self, keys: Sequence[ObjectKey]) -> None:
        """Take in a lookup: one or more rows of chunks, each a prompt from its start."""
        if not keys:
            return
        first = keys[0]
        parent = 0
        places = self._places
        with self._lock:
            for depth, key in enumerate(keys):
                if key.kv_rank != first.kv_rank or key.object_group_id != first.object_group_id:
                    break  # the next row has the same chunks
                name = key.chunk_hash, key.cache_salt
                places[name] = depth, parent
                places.move_to_end(name)
                parent = family(key)
            while len(places) > _MOST:
                places.popitem(last=False)

    def place(self, key: ObjectKey) -> tuple[int, int]:
        """How many chunks are before one, and the tag of the last of them; 0, 0 if unknown."""
        with self._lock:
            return self._places.get((key.chunk_hash, key.cache_salt), (0, 0))


def family(key: ObjectKey) -> int:
    """The tag that all groups and ranks of a chunk share."""
    return tag(key.chunk_hash + key.cache_salt.encode())
