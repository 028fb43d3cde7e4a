"""Calls of SGLang's that move pages of host pools, and the pools themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from lifeboat_cache.integrations import sglang_ahead
from lifeboat_cache.integrations.sglang_engine_store import EngineStore
from lifeboat_cache.integrations.sglang_keys import PageKeys
from lifeboat_cache.integrations.sglang_moves import Mover, Pages
from lifeboat_cache.integrations.sglang_pools import PoolPages
from lifeboat_cache.integrations.sglang_prefixes import longest_run
from lifeboat_cache.integrations.sglang_windows import Kind
from lifeboat_cache.interface import BlockBuffers, Store, tag

__all__ = ["KV", "PageCalls", "Pool"]

_log = logging.getLogger("lifeboat_cache")

#: The pool of the model's KV.
KV = "kv"


class Pool:
    """A registered host pool: where its pages lie, and their keys."""

    def __init__(self, pool: Any, pages: PoolPages, shard: Sequence[int]) -> None:
        self.pool = pool
        self.pages = pages
        self.keys = PageKeys(pages, shard)

    def describe(self, store: Store) -> None:
        """Have pages of the KV pool stored as configured; all others are stored exactly."""
        if self.pages.name == KV and self.pages.page_bytes:
            store.describe(self.pages.layout)


class PageCalls:
    """Answers them; none of its methods but :meth:`load` and :meth:`keep` raises.

    Parameters
    ----------
    kept
        Where pages are kept.
    pools
        The pools that are registered, by their names.
    mover
        Moves pages.
    operations
        What the controller's functions tell of their operations.
    """

    def __init__(
        self,
        kept: EngineStore,
        pools: Mapping[str, Pool],
        mover: Mover,
        operations: sglang_ahead.Operations,
    ) -> None:
        self._kept = kept
        self._pools = pools
        self._mover = mover
        self._operations = operations

    def get(self, name: str, hashes: list[str], indices: Any) -> list[bool]:
        """Load pages of a pool straight into it; which of them are there."""
        try:
            pool, store = self._pools.get(name), self._kept.store
            if pool is None or store is None or not hashes:
                return [False] * len(hashes)
            pages = pool.pages.starts(indices, len(hashes))
            if not pool.pages.page_bytes:
                return [True] * len(hashes)
            ahead = self._ahead("load", store, pool, hashes, pages)
            if ahead is not None:
                return self._loaded(ahead[0].store, pool, ahead[1])
            return self.load(store, pool, hashes, pool.pages.buffers(pages))
        except Exception:
            _log.exception("LifeboatCache: pages were not loaded; please report this")
            return [False] * len(hashes)

    def set(
        self,
        name: str,
        hashes: list[str],
        indices: Any,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Store pages of a pool; which of them are kept, now or before."""
        try:
            pool, store = self._pools.get(name), self._kept.to_fill()
            if pool is None or store is None or not hashes:
                return [False] * len(hashes)
            pages = pool.pages.starts(indices, len(hashes))
            if not pool.pages.page_bytes:
                return [True] * len(hashes)
            ahead = self._ahead("store", store, pool, hashes, pages)
            if ahead is not None:
                found: list[bool] = ahead[1].tolist()
                return found
            return self.keep(store, pool, hashes, pool.pages.buffers(pages), extra_info)
        except Exception:
            _log.exception("LifeboatCache: pages were not stored; please report this")
            return [False] * len(hashes)

    def _ahead(
        self, kind: Kind, store: Store, pool: Pool, hashes: list[str], pages: Any
    ) -> tuple[sglang_ahead.Ahead, npt.NDArray[np.bool_]] | None:
        """What a call of an operation asks for, if the operation's pages are moved ahead."""
        if pool.pages.name != KV:
            return None

        def begin(operation: Any, step: int) -> sglang_ahead.Ahead | None:
            every = list(operation.hash_value or ())
            if len(every) <= step:
                return None  # there are no others
            try:
                numbers = pool.pages.starts(operation.host_indices, len(every))
            except ValueError:
                return None  # a call for those that are wrong says so
            prefix = operation.prefix_keys

            def pages_of(first: int, last: int) -> Pages:
                # As SGLang would say it of a call for these: all that lies before them.
                before = None if prefix is None else len(prefix) + first
                parent = every[first - 1] if first else (prefix[-1] if prefix else None)
                buffers = pool.pages.buffers(numbers[first:last])
                return self._pages(pool, every[first:last], buffers, before, parent)

            return sglang_ahead.Ahead(
                self._mover, kind, store, every, numbers, pool.pages.page_bytes, step, pages_of
            )

        return self._operations.take(hashes, pages, begin)

    def load(
        self, store: Store, pool: Pool, hashes: list[str], buffers: BlockBuffers
    ) -> list[bool]:
        """Load pages into memory; which of them are there."""
        done = self._mover.load(store, self._pages(pool, hashes, buffers))
        return self._loaded(store, pool, done)

    def _loaded(self, store: Store, pool: Pool, done: npt.NDArray[np.bool_]) -> list[bool]:
        if store is not self._kept.store:
            done[:] = False  # weights have changed while it was read
        if pool.pages.name == KV:
            self._kept.published.served(longest_run(done) * pool.pages.tokens)
        found: list[bool] = done.tolist()
        return found

    def keep(
        self,
        store: Store,
        pool: Pool,
        hashes: list[str],
        buffers: BlockBuffers,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages out of memory; which of them are kept, now or before."""
        before = getattr(extra_info, "prefix_keys", None)
        pages = self._pages(
            pool,
            hashes,
            buffers,
            None if before is None else len(before),
            before[-1] if before else None,
        )
        done = self._mover.store(store, pages)
        found: list[bool] = done.tolist()
        return found

    def _pages(
        self,
        pool: Pool,
        hashes: list[str],
        buffers: BlockBuffers,
        before: int | None = None,
        parent: str | None = None,
    ) -> Pages:
        """Pages as they are moved, with how many lie before them and the last one of those."""
        kv = self._pools.get(KV)
        tokens = kv.pages.tokens if kv is not None else pool.pages.tokens
        return Pages(
            hashes,
            pool.keys.keys(hashes),
            buffers,
            layout=pool.pages.layout.tag,
            group=pool.keys.group,
            depth=-1 if before is None else before * tokens,
            tokens=tokens,
            parent=0 if before is None or parent is None else tag(parent.encode()),
        )
