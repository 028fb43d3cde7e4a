"""``LifeboatMlxCache``: SGLang's prefix cache on its MLX backend, continued on storage.

Finished requests' chunks are stored. When a request arrives of which more is stored than
SGLang holds, reading begins, and SGLang lets the request wait as it does for its own
storage backends. What has arrived is put into slots of the pool and into SGLang's tree, as
if another request had just computed it: from there on it is SGLang's, which finds it,
locks it and evicts it like anything else.

Everything here runs on the scheduler's thread, as everything of MLX must. Faults are
answered without the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from typing_extensions import override

from lifeboat_cache.engines.guard import guarded
from lifeboat_cache.integrations.sglang_mlx_chunks import CHUNK_TOKENS, PoolShape, prefix_digests
from lifeboat_cache.integrations.sglang_mlx_keep import Keeper
from lifeboat_cache.integrations.sglang_mlx_keeping import Keeping
from lifeboat_cache.integrations.sglang_mlx_read import BUDGET_BYTES, Budget, Part, Read
from lifeboat_cache.interface import Store

__all__ = ["LifeboatMlxCache", "Waiting", "is_plain"]

_log = logging.getLogger("lifeboat_cache")


@dataclass
class Waiting:
    """A request that waits for what is stored of its prefix."""

    read: Read | None
    tokens: Any
    extra_key: str | None
    cache_salt: str | None
    begin: int
    end: int

    def key(self, tokens: int) -> Any:
        """SGLang's key of the first tokens."""
        return RadixKey(self.tokens[:tokens], extra_key=self.extra_key, cache_salt=self.cache_salt)


class LifeboatMlxCache(UnifiedRadixCache):
    """SGLang's radix cache that stores and restores chunks of the MLX pool.

    Works as SGLang's own until :meth:`connect`.
    """

    #: Tells the scheduler's hook that requests may wait for storage.
    reads_from_storage = False

    _keeping: Keeping | None = None
    _keeper: Keeper | None = None

    def connect(self, keeping: Keeping, runner: Any, vocabulary: int) -> None:
        """Begin to store and to restore.

        Parameters
        ----------
        keeping
            With an open store.
        runner
            SGLang's ``MlxModelRunner``, with its pool.
        vocabulary
            Tokens that the model knows: others stand for images and the like.
        """
        self._keeping = keeping
        self._runner = runner
        self._pool = runner._attention_kv_pool
        self._shape = PoolShape.of(self._pool)
        self._vocabulary = vocabulary
        self._waiting: dict[Any, Waiting] = {}
        self._budget = Budget(BUDGET_BYTES)
        self.reads_from_storage = True

    # Storing ------------------------------------------------------------------

    @override
    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self.keep_of(req, up_to)
        super().checkpoint(req, up_to=up_to, **kwargs)

    def keep_of(self, req: Any, up_to: int) -> None:
        """SGLang is about to keep a request's first tokens: store what shall be."""
        if req.finished():
            self._keep(req, up_to)

    @guarded(None)
    def _keep(self, req: Any, up_to: int) -> None:
        """Store what a finished request leaves, while it owns its slots."""
        store = None if self._keeping is None else self._keeping.store
        if store is None or not is_plain(req):
            return
        tokens = self._known(req.full_untruncated_fill_ids[:up_to])
        if tokens is not None:
            self._keep_chunks(store, req, tokens)

    def _keep_chunks(self, store: Store, req: Any, tokens: npt.NDArray[np.int64]) -> int:
        """Store the whole chunks of a request's first tokens; how many tokens they are."""
        # What SGLang has not written to the pool is not there.
        there = min(int(tokens.shape[0]), int(self._runner._req_synced_offset.get(req.rid, 0)))
        length: int = there - there % CHUNK_TOKENS
        if length:
            if self._keeper is None:
                self._keeper = Keeper(store, self._pool, self._shape)
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length]
            self._keeper.keep(tokens[:length], row.tolist(), req.extra_key, req.cache_salt)
        return length

    def _known(self, tokens: Any) -> npt.NDArray[np.int64] | None:
        """Tokens as an array, if they say all of what a prompt is."""
        known: npt.NDArray[np.int64] = np.array(tokens, dtype=np.int64)
        if known.shape[0] and (int(known.min()) < 0 or int(known.max()) >= self._vocabulary):
            return None
        return known

    # Restoring: called by the scheduler ---------------------------------------

    @override
    def is_backuped(self, node_id: Any) -> bool:
        # What is stored is known by its tokens, so any node can be continued.
        return self.reads_from_storage or super().is_backuped(node_id)

    @override
    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Sequence[int] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """A request has arrived: begin to read what is stored beyond what SGLang holds."""
        self._begin(request, matched_prefix_tokens, new_input_tokens, extra_key, cache_salt)

    @guarded(None)
    def _begin(
        self, request: Any, held: Any, rest: Any, extra_key: str | None, cache_salt: str | None
    ) -> None:
        keeping = self._keeping
        store = None if keeping is None else keeping.store
        self._forget(request)
        if keeping is None or store is None:
            return
        tokens = held + rest if held else rest
        known = self._known(tokens)
        begin = len(held) if held else 0
        if known is None or len(tokens) // CHUNK_TOKENS <= begin // CHUNK_TOKENS:
            return
        digests = prefix_digests(known, extra_key, cache_salt)
        waiting = self._wait_for(store, digests, tokens, begin, extra_key, cache_salt)
        if waiting is not None:
            self._waiting[request] = waiting

    def _wait_for(
        self,
        store: Store,
        digests: Sequence[bytes],
        tokens: Any,
        begin: int,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> Waiting | None:
        """Begin to read; ``None`` if there is nothing to wait for."""
        assert self._keeping is not None
        keys = self._shape.keys(digests[1:])
        read = Read(store, self._shape, keys, begin, self._keeping.wait_s, self._budget)
        if read.over:
            return None
        return Waiting(read, tokens, extra_key, cache_salt, begin=begin, end=begin)

    @override
    def check_prefetch_progress(self, request: Any) -> bool:
        """Whether a request may be computed now."""
        waiting = self._waiting.get(request) if self.reads_from_storage else None
        if waiting is None:
            return True
        if self._advance(waiting):
            return False
        self._forget(request)
        if waiting.end > waiting.begin:
            self.prefetch_loaded_tokens_by_reqid[request] = waiting.end - waiting.begin
            self.prefetch_loaded_storage_start_by_reqid[request] = waiting.begin
        return True

    @guarded(False)
    def _advance(self, waiting: Waiting) -> bool:
        """As :meth:`_take_over`; no if anything goes wrong."""
        if self._keeping is None or self._keeping.store is None:
            return False  # the weights have changed meanwhile
        return self._take_over(waiting)

    def _take_over(self, waiting: Waiting) -> bool:
        """Take over what has arrived; whether more will come."""
        read = waiting.read
        if read is None:
            return False
        while (part := read.take()) is not None:
            if not self._adopt(waiting, part):
                return False
        return not read.over

    def _adopt(self, waiting: Waiting, part: Part) -> bool:
        """Give slots to a part and put it into the tree; whether the next one can follow."""
        matched = self._match_tree(MatchPrefixParams(key=waiting.key(part.end)))
        held, node = int(matched.device_prefix_len), matched.last_device_node
        if held < part.begin:
            return False  # what comes before has been evicted
        if held < part.end:
            lock = self.lock(node)
            try:
                slots = self._slots(part.end - held)
                if slots is None:
                    return False
                try:
                    self._fill(slots.tolist(), part, held)
                    path = self.path_device_indices(node)
                    value = path.new_empty(part.end)
                    value[:held] = path[:held]
                    value[held:] = slots
                except Exception:
                    self.token_to_kv_pool_allocator.free(slots)
                    raise
                self.insert(
                    InsertParams(
                        key=waiting.key(part.end),
                        value=value,
                        prev_prefix_len=held,
                        inserted_len=held,
                    )
                )
            finally:
                self.unlock(lock)
            if self._keeping is not None:
                self._keeping.published.served(part.end - held)
        waiting.end = max(waiting.end, part.end)
        return True

    def _slots(self, count: int) -> Any | None:
        """Slots of the pool, a tensor; ``None`` if there are not so many."""
        slots = self.token_to_kv_pool_allocator.alloc(count)
        if slots is None:
            evict_from_tree_cache(self, count)
            slots = self.token_to_kv_pool_allocator.alloc(count)
        return slots

    def _fill(self, slots: list[int], part: Part, held: int) -> None:
        """Write what of a part SGLang does not hold into slots."""
        skip, end = held - part.begin, part.end - part.begin
        self._pool.set_kv_all_layers(
            mx.array(slots, dtype=mx.int32), part.keys[:, skip:end], part.values[:, skip:end]
        )
        # Not later, with the request's own computation: the part's memory can go the sooner.
        mx.async_eval(*self._pool.all_buffers())

    @override
    def release_aborted_request(self, request: Any) -> None:
        if self.reads_from_storage:
            self._forget(request)
        super().release_aborted_request(request)

    def _forget(self, request: Any) -> None:
        """A request waits no more."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._drop(waiting)

    def _drop(self, waiting: Waiting) -> None:
        """Let go of what a request waited for."""
        if waiting.read is not None:
            waiting.read.stop()

    @override
    def check_hicache_events(self) -> None:
        """There is nothing to poll: requests that wait ask for themselves."""

    def has_pending_cache_operations(self) -> bool:
        """Whether requests wait for storage; asked where SGLang looks whether it is idle."""
        return self.reads_from_storage and bool(self._waiting)

    @override
    def clear_storage_backend(self) -> bool:
        """Delete what is stored for this model."""
        store = None if self._keeping is None else self._keeping.store
        if store is None:
            return False
        store.delete(store.keys())
        return True

    @override
    def reset(self) -> None:
        """SGLang forgets its prefixes; what was on its way to them is not put there."""
        if self.reads_from_storage:
            for waiting in self._waiting.values():
                if waiting.read is not None:
                    waiting.read.stop()
        super().reset()


def is_plain(req: Any) -> bool:
    """Whether a request is nothing but tokens."""
    return (
        getattr(req, "multimodal_inputs", None) is None
        and getattr(req, "input_embeds", None) is None
        and getattr(req, "positional_embed_overrides", None) is None
        and getattr(req, "lora_id", None) is None
        and getattr(req, "session", None) is None
    )
