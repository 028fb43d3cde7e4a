"""``LifeboatHybridMlxCache``: the same for models that have recurrent state besides attention.

Of such a model a prefix is of use only with the state at exactly its end, which SGLang keeps
at the ends of chunks that it computes a prompt in. There both are stored. They are restored
together or not at all, and for one request at a time: a whole prefix is in memory until its
state has come.

The state that SGLang has when a request finishes is not stored: where computing overlaps with
scheduling it may be ahead of the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_exec, mamba_checkpoint_grid
from typing_extensions import override

from lifeboat_cache.engines.guard import guarded
from lifeboat_cache.integrations.sglang_mlx_cache import LifeboatMlxCache, Waiting, is_plain
from lifeboat_cache.integrations.sglang_mlx_chunks import CHUNK_TOKENS, prefix_digests
from lifeboat_cache.integrations.sglang_mlx_read import PATIENCE_S, Part, Read
from lifeboat_cache.integrations.sglang_mlx_state import read_state, write_state
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    Job,
    Lookup,
    Outcome,
    Store,
    salt_tag,
    tag,
)

__all__ = ["LifeboatHybridMlxCache"]

#: The group of records that hold states.
_STATES = 1


@dataclass
class _Prefix(Waiting):
    """A request that waits for a prefix and its state."""

    keys: Sequence[bytes] = ()
    states: Sequence[bytes] = ()
    until: float = 0.0
    parts: list[Part] = field(default_factory=list)
    data: npt.NDArray[np.uint8] | None = None
    job: Job | None = None
    last: int = 0


class LifeboatHybridMlxCache(LifeboatMlxCache):
    """SGLang's radix cache that stores and restores prefixes of hybrid models."""

    _active: _Prefix | None = None

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for component in self.components.values():
            # SGLang 0.5.23 forgets it on MLX, and fails at the first request.
            if component.component_type == ComponentType.MAMBA and not hasattr(
                component, "mamba_checkpoint_grid"
            ):
                component.mamba_checkpoint_grid = mamba_checkpoint_grid(params.page_size)
                component.mamba_max_states_per_path = get_exec().mamba.mamba_max_states_per_path

    # Storing ------------------------------------------------------------------

    @override
    def keep_of(self, req: Any, up_to: int) -> None:
        if not req.finished():
            self._keep_state(req, up_to)

    @guarded(None)
    def _keep_state(self, req: Any, up_to: int) -> None:
        """Store what a prompt has left so far, if SGLang has the state at its end."""
        store = None if self._keeping is None else self._keeping.store
        if store is None or not is_plain(req):
            return
        tracked = req.kv.mamba_last_track_seqlen
        buffer = req.kv.mamba_ping_pong_track_buffer
        if tracked is not None and buffer is not None:
            length, slot = int(tracked), buffer[0]
        else:
            length, slot = int(up_to), req.kv.mamba_pool_idx
        # Behind the prompt the live state may be ahead of the tokens.
        most = min(int(up_to), len(req.origin_input_ids))
        if not length or length % CHUNK_TOKENS or length > most or slot is None:
            return
        pool = self.req_to_token_pool.auxiliary_state_pool
        snapshots = pool._snapshots.get(int(slot))
        tokens = self._known(req.full_untruncated_fill_ids[:length])
        if not snapshots or tokens is None or self._keep_chunks(store, req, tokens) < length:
            return
        digests = prefix_digests(tokens, req.extra_key, req.cache_salt)
        keys = self._shape.state_keys(digests[-1:])
        if int(store.sizes(keys)[0]) < 0:
            data = write_state(snapshots)
            queue = store.queue()
            if queue["limit_bytes"] - queue["pending_bytes"] >= data.nbytes:
                batch = BlockBatch(
                    keys,
                    BlockBuffers.from_buffers([data]),
                    positions=[length],
                    groups=[_STATES],
                    families=[tag(digests[-1])],
                    parents=[tag(digests[-2]) if len(digests) > 2 else 0],
                    salt=salt_tag(req.cache_salt),
                )
                store.store(batch, _ignore)
        store.touch(keys)

    # Restoring ----------------------------------------------------------------

    @override
    def _wait_for(
        self,
        store: Store,
        digests: Sequence[bytes],
        tokens: Any,
        begin: int,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> Waiting | None:
        assert self._keeping is not None
        return _Prefix(
            None,
            tokens,
            extra_key,
            cache_salt,
            begin=begin,
            end=begin,
            keys=self._shape.keys(digests[1:]),
            states=self._shape.state_keys(digests[1:]),
            until=time.monotonic() + self._keeping.wait_s,
        )

    @override
    def _drop(self, waiting: Waiting) -> None:
        super()._drop(waiting)
        if self._active is waiting:
            self._active = None

    @override
    def _take_over(self, waiting: Waiting) -> bool:
        assert isinstance(waiting, _Prefix)
        if self._active is not None and self._active is not waiting:
            return True  # one at a time
        self._active = waiting
        store = None if self._keeping is None else self._keeping.store
        if store is None or (waiting.read is None and not self._start(store, waiting)):
            return False
        if waiting.read is None:
            return True
        while (part := waiting.read.take()) is not None:
            waiting.parts.append(part)
        job = waiting.job
        if not waiting.read.over or (job is not None and not job.done()):
            return time.monotonic() < waiting.until
        self._adopt_whole(waiting)
        return False

    def _start(self, store: Store, waiting: _Prefix) -> bool:
        """Find out how much is there, and begin to read it; whether to go on."""
        first = waiting.begin // CHUNK_TOKENS
        hits = store.lookup(waiting.keys[first:])
        there = 0
        while there < len(hits) and hits[there] == Lookup.HIT:
            there += 1
        if there < len(hits) and hits[there] == Lookup.RETRY:
            return time.monotonic() < waiting.until
        sizes = store.sizes(waiting.states[first : first + there])
        found = np.flatnonzero(sizes >= 0)
        if not found.shape[0]:
            return False
        last = int(found[-1])
        waiting.last = (first + last + 1) * CHUNK_TOKENS
        if waiting.last <= waiting.begin:
            return False
        end = first + last + 1
        waiting.data = np.empty(int(sizes[last]), dtype=np.uint8)
        batch = BlockBatch(waiting.states[end - 1 : end], BlockBuffers.from_buffers([waiting.data]))
        waiting.job = store.load(batch, _ignore)
        waiting.read = Read(
            store, self._shape, waiting.keys[:end], waiting.begin, 0.0, self._budget
        )
        store.touch([*waiting.keys[:end], waiting.states[end - 1]])
        chunks = end - first
        # In all; a read that brings nothing is given up sooner.
        waiting.until = time.monotonic() + PATIENCE_S + chunks * self._shape.chunk_bytes / 1e8
        return True

    def _adopt_whole(self, waiting: _Prefix) -> None:
        """Give slots to all of a prefix and its state, and put them into the tree."""
        parts, job = waiting.parts, waiting.job
        if job is None or waiting.data is None or int(job.outcomes[0]) != Outcome.OK or not parts:
            return
        if parts[-1].end != waiting.last:
            return
        snapshots = read_state(waiting.data)
        if set(snapshots) != set(self._runner._cache_layout.auxiliary_layer_indices):
            return
        matched = self._match_tree(MatchPrefixParams(key=waiting.key(waiting.last)))
        held, node = int(matched.device_prefix_len), matched.last_device_node
        if held < parts[0].begin or held >= waiting.last:
            return
        states = self.req_to_token_pool.auxiliary_state_pool
        lock = self.lock(node)
        try:
            slots = self._slots(waiting.last - held)
            if slots is None:
                return
            state = None
            try:
                state = states.alloc(1)
                if state is None:
                    self.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
                    state = states.alloc(1)
                if state is None:
                    self.token_to_kv_pool_allocator.free(slots)
                    return
                states._snapshots[int(state[0])] = snapshots
                numbers = slots.tolist()
                for part in parts:
                    skip = max(held, part.begin)
                    if skip < part.end:
                        self._fill(numbers[skip - held : part.end - held], part, skip)
                path = self.path_device_indices(node)
                value = path.new_empty(waiting.last)
                value[:held] = path[:held]
                value[held:] = slots
            except Exception:
                self.token_to_kv_pool_allocator.free(slots)
                states.free(state)
                raise
            result = self.insert(
                InsertParams(
                    key=waiting.key(waiting.last),
                    value=value,
                    mamba_value=state,
                    prev_prefix_len=held,
                    inserted_len=held,
                )
            )
            if result.mamba_exist:
                states.free(state)
        finally:
            self.unlock(lock)
        waiting.end = waiting.last
        if self._keeping is not None:
            self._keeping.published.served(waiting.last - held)


def _ignore(job: Any) -> None:
    """The job is looked at when SGLang asks, or not at all."""
