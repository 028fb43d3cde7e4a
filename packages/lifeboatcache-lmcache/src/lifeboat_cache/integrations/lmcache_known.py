"""The objects that an adapter knows to be stored: for counting, listing and deleting."""

from __future__ import annotations

import heapq
import json
import threading
from collections.abc import Iterable, Sequence

from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey

from lifeboat_cache.integrations.lmcache_layout import ObjectLayout

__all__ = ["KnownObjects"]

_Order = tuple[str, str, int, int, str]


class KnownObjects:
    """Objects by their keys, with their layouts. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._objects: dict[ObjectKey, ObjectLayout] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._objects)

    def add(
        self, keys: Sequence[ObjectKey], layouts: Sequence[ObjectLayout]
    ) -> tuple[list[ObjectKey], list[int]]:
        """Add objects; returns those that were not known before, and their sizes."""
        fresh: list[ObjectKey] = []
        sizes: list[int] = []
        with self._lock:
            for key, layout in zip(keys, layouts, strict=True):
                if key not in self._objects:
                    fresh.append(key)
                    sizes.append(layout.nbytes)
                    self._objects[key] = layout
        return fresh, sizes

    def remove(self, keys: Iterable[ObjectKey]) -> tuple[list[ObjectKey], list[int]]:
        """Remove objects; returns those that were known, and their sizes."""
        gone: list[ObjectKey] = []
        sizes: list[int] = []
        with self._lock:
            for key in keys:
                layout = self._objects.pop(key, None)
                if layout is not None:
                    gone.append(key)
                    sizes.append(layout.nbytes)
        return gone, sizes

    def layout(self, key: ObjectKey) -> ObjectLayout | None:
        """The layout of an object, ``None`` if it is not known."""
        return self._objects.get(key)

    def items(self) -> list[tuple[ObjectKey, ObjectLayout]]:
        """All of them."""
        with self._lock:
            return list(self._objects.items())

    def page(self, model_name: str | None, page_size: int, cursor: str | None) -> KeyListPage:
        """Some of them, in a fixed order.

        Raises
        ------
        ValueError
            If the size of the page or the cursor makes no sense.
        """
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}: ask for at least one key")
        after = _read_cursor(cursor)
        wanted = (
            (_order(key), key, layout)
            for key, layout in self.items()
            if model_name is None or key.model_name == model_name
        )
        if after is not None:
            wanted = (item for item in wanted if item[0] > after)
        found = heapq.nsmallest(page_size + 1, wanted, key=lambda item: item[0])
        entries = tuple(
            KeyEntry(key=key.to_encoded_object_key(), size_bytes=layout.nbytes)
            for _, key, layout in found[:page_size]
        )
        more = len(found) > page_size
        return KeyListPage(entries, json.dumps(found[page_size - 1][0]) if more else None)


def _order(key: ObjectKey) -> _Order:
    return (
        key.model_name,
        key.chunk_hash.hex(),
        key.kv_rank,
        key.object_group_id,
        key.cache_salt,
    )


def _read_cursor(cursor: str | None) -> _Order | None:
    if cursor is None:
        return None
    try:
        model, chunk, rank, group, salt = json.loads(cursor)
        return str(model), str(chunk), int(rank), int(group), str(salt)
    except (ValueError, TypeError) as exc:
        raise ValueError(
            f"cursor {cursor!r} is not one of this adapter's: pass the token of the page before"
        ) from exc
