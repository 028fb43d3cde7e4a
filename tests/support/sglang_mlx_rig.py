"""Our prefix cache with SGLang's real tree, allocator and MLX pool, without a model.

Requests are computed by writing into the pool what follows from their tokens, as SGLang's MLX
runner would: the bytes of every slot can be checked against what they have to be. Needs the
environment of SGLang on a CPU with MLX, in a process that ``sglang_rig.prepare`` has prepared.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lifeboat_cache.interface import Namespace

__all__ = ["HybridRig", "MlxRig", "Request", "content", "state_of"]

_LAYERS, _HEADS, _DIM = 3, 2, 16

#: Layers with recurrent state, in a hybrid rig.
_STATES = (0, 2)
_PATIENCE_S = 60.0


def content(tokens: Sequence[int]) -> npt.NDArray[np.uint16]:
    """What K and V of each token of a prompt are: ``(2, layers, tokens, heads, dim)``.

    As in a model, it follows from the token and from all before it.
    """
    found = np.empty((2, _LAYERS, len(tokens), _HEADS, _DIM), dtype=np.uint16)
    state = 17
    for place, token in enumerate(tokens):
        state = (state * 1_000_003 + int(token) + 1) % (1 << 61)
        # Below the exponents of infinities: MLX may not keep the bits of a NaN.
        found[:, :, place] = np.random.default_rng(state).integers(
            0, 0x7F00, found[:, :, place].shape, dtype=np.uint16
        )
    return found


class Request:
    """A request as SGLang's scheduler has it, with what our cache looks at."""

    def __init__(self, name: str, tokens: Sequence[int], salt: str | None) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        self.rid = name
        self.cache_request_handle = CacheRequestHandle(name, 0)
        self.full_untruncated_fill_ids = array("q", tokens)
        self.origin_input_ids = array("q", tokens)
        self.extra_key: str | None = None
        self.cache_salt = salt
        self.kv = ReqKvInfo()
        self.priority = 0
        self.session = None
        self.session_id = None
        self.kv_rotation_base = None
        self.finished_reason = None
        self.lock: Any = None
        self.last_node: Any = None
        self.done = False
        self.loaded = 0

    def finished(self) -> bool:
        return self.done


class MlxRig:
    """One scheduler's prefix cache.

    Parameters
    ----------
    slots
        Of the pool.
    config
        Of LifeboatCache; as configured by default.
    namespace
        Whose KV it is.
    """

    def __init__(self, slots: int = 2048, *, config: Any = None, namespace: str = "one") -> None:
        import mlx.core as mx
        import torch
        from sglang.srt.hardware_backend.mlx.kv_cache import MlxAttentionKVPool
        from sglang.srt.hardware_backend.mlx.model_runner_stub import _DummyKVCache
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        from lifeboat_cache.integrations.sglang_mlx_keeping import Keeping

        dummy = _DummyKVCache(size=slots, dtype=torch.bfloat16, device="cpu")
        self.allocator = TokenToKVPoolAllocator(
            size=slots, dtype=torch.bfloat16, device="cpu", kvcache=dummy, need_sort=False
        )
        self.pool = MlxAttentionKVPool(slots + 1, _LAYERS, _HEADS, _DIM, mx.bfloat16)
        self.runner = SimpleNamespace(
            _attention_kv_pool=self.pool,
            _req_synced_offset={},
            _cache_layout=SimpleNamespace(auxiliary_layer_indices=_STATES),
        )
        self.cache: Any = self._make_cache()
        self.keeping = Keeping(
            "tiny", namespace=Namespace.from_identity({"rig": namespace}), config=config
        )
        self.cache.connect(self.keeping, self.runner, vocabulary=1 << 30)
        assert self.store.wait_recovered(_PATIENCE_S)
        self._names = itertools.count()

    def _make_cache(self) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        from lifeboat_cache.integrations.sglang_mlx_cache import LifeboatMlxCache

        rows = ReqToTokenPool(
            size=16, max_context_len=4096, device="cpu", enable_memory_saver=False
        )
        return LifeboatMlxCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
            )
        )

    @property
    def store(self) -> Any:
        store = self.keeping.store
        assert store is not None
        return store

    # What the scheduler does --------------------------------------------------

    def arrive(self, tokens: Sequence[int], salt: str | None = None) -> Request:
        """A request arrives: SGLang looks what it holds and asks for the rest."""
        request = Request(f"r{next(self._names)}", tokens, salt)
        held = self._match(request)
        self.cache.prefetch_from_storage(
            request.cache_request_handle,
            request.last_node,
            request.full_untruncated_fill_ids[held : len(tokens) - 1],
            matched_prefix_tokens=request.full_untruncated_fill_ids[:held],
            cache_salt=salt,
        )
        return request

    def poll(self, request: Request) -> bool:
        """Whether a request that waits may be computed."""
        handle = request.cache_request_handle
        if not self.cache.check_prefetch_progress(handle):
            return False
        request.loaded += self.cache.pop_prefetch_loaded_span(handle)[0]
        return True

    def wait(self, request: Request) -> Request:
        deadline = time.monotonic() + _PATIENCE_S
        while not self.poll(request):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return request

    def _match(self, request: Request) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(
            request.full_untruncated_fill_ids,
            limit=len(request.full_untruncated_fill_ids) - 1,
            cache_salt=request.cache_salt,
        )
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.last_node = found.last_device_node
        return int(found.device_prefix_len)

    def begin(self, request: Request) -> int:
        """Compute a request's prompt; how many of its tokens SGLang held."""
        import mlx.core as mx

        tokens = request.full_untruncated_fill_ids
        held = self._match(request)
        request.lock = self.cache.lock(request.last_node)
        rows = self.cache.req_to_token_pool
        assert rows.alloc([request]) is not None
        slots = self.cache._slots(len(tokens) - held)
        assert slots is not None, "the pool is too small for this test"
        row = request.kv.req_pool_idx
        rows.write((row, slice(0, held)), self.cache.path_device_indices(request.last_node)[:held])
        rows.write((row, slice(held, len(tokens))), slots)
        new = content(tokens)[:, :, held:]
        k, v = (mx.array(part).view(mx.bfloat16) for part in new)
        self.pool.set_kv_all_layers(mx.array(slots.tolist(), dtype=mx.int32), k, v)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = len(tokens)
        request.kv.cache_protected_len = held
        self.runner._req_synced_offset[request.rid] = len(tokens)
        return held

    def finish(self, request: Request) -> None:
        """A request ends; the tree takes over what it computed."""
        request.done = True
        length = len(request.full_untruncated_fill_ids)
        self.cache.checkpoint(request, up_to=length)
        self.cache.unlock(request.lock)
        self.cache.req_to_token_pool.free(request)
        self.runner._req_synced_offset.pop(request.rid, None)

    def serve(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, int]:
        """One request from arrival to end: tokens held at last, and tokens from storage."""
        request = self.wait(self.arrive(tokens, salt))
        held = self.begin(request)
        self.check(tokens, salt)
        self.finish(request)
        return held, request.loaded

    # What a test looks at -----------------------------------------------------

    def check(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Compare every byte of the slots that SGLang would use for a prompt; how many."""
        import mlx.core as mx

        request = Request("check", [*tokens, 0], salt)
        held = self._match(request)
        slots = self.cache.path_device_indices(request.last_node)[:held].tolist()
        if slots:
            assert len(set(slots)) == len(slots)
            assert 0 not in slots
            got = [
                np.array(part.view(mx.uint16))
                for part in self.pool.get_kv_all_layers(mx.array(slots, dtype=mx.int32))
            ]
            np.testing.assert_array_equal(np.stack(got), content(tokens[:held]))
        return held

    def balanced(self, in_use: int = 0) -> bool:
        """Whether every slot is free or in the tree, but for some that requests own."""
        free = self.allocator.available_size()
        cache = self.cache
        owned = cache.full_evictable_size() + cache.full_protected_size()
        return bool(free + owned + in_use == self.allocator.size)

    def settle(self) -> None:
        """Wait until what was given to the store is there."""
        assert self.store.drain(_PATIENCE_S)

    def close(self) -> None:
        self.keeping.finish(_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def state_of(tokens: Sequence[int]) -> dict[int, Any]:
    """What the recurrent state behind a prefix is, as SGLang keeps it."""
    import mlx.core as mx
    from sglang.srt.hardware_backend.mlx.kv_cache.auxiliary_state import _CacheSnapshot

    found = {}
    for layer in _STATES:
        dice = np.random.default_rng([layer, *tokens])
        first = mx.array(dice.integers(0, 0x7F00, (1, 3, 8), dtype=np.uint16)).view(mx.bfloat16)
        second = mx.array(dice.standard_normal((1, 2, 4, 4)).astype(np.float32))
        found[layer] = _CacheSnapshot(
            state=([first, second], None, None),
            meta_state="",
            attrs={"lengths": None, "left_padding": None},
        )
    return found


def _arrays(snapshots: dict[int, Any]) -> list[npt.NDArray[np.uint8]]:
    import mlx.core as mx

    return [
        np.array(array.view(mx.uint8))
        for layer in sorted(snapshots)
        for array in snapshots[layer].state[0]
    ]


class HybridRig(MlxRig):
    """The same with a model that has recurrent state besides attention."""

    def _make_cache(self) -> Any:
        from sglang.srt.hardware_backend.mlx.kv_cache.auxiliary_state import (
            MlxAuxiliaryStateComponent,
            MlxAuxiliaryStateReqToTokenPool,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        from lifeboat_cache.integrations.sglang_mlx_hybrid import LifeboatHybridMlxCache

        rows = MlxAuxiliaryStateReqToTokenPool(
            size=16,
            max_context_len=4096,
            device="cpu",
            enable_memory_saver=False,
            auxiliary_state_size=24,
        )
        self.states = rows.auxiliary_state_pool
        return LifeboatHybridMlxCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                component_registry_override={ComponentType.MAMBA: MlxAuxiliaryStateComponent},
            )
        )

    def begin(self, request: Request) -> int:
        held = super().begin(request)
        tokens = request.full_untruncated_fill_ids
        kv = request.kv
        # As SGLang's runner: the state at the end of the last whole chunk, and the live one.
        length = held + (len(tokens) - held) // 64 * 64
        if length > held:
            kv.mamba_ping_pong_track_buffer = self.states.alloc(1)
            self.states._snapshots[int(kv.mamba_ping_pong_track_buffer[0])] = state_of(
                tokens[:length]
            )
            kv.mamba_last_track_seqlen = length
        self.states._snapshots[int(kv.mamba_pool_idx)] = state_of(tokens)
        self.cache.checkpoint(request, up_to=len(tokens))
        return held

    def finish(self, request: Request) -> None:
        request.kv.mamba_last_track_seqlen = None
        # Ahead of the tokens, as where computing overlaps with scheduling.
        self.states._snapshots[int(request.kv.mamba_pool_idx)] = state_of(
            [*request.full_untruncated_fill_ids, 1]
        )
        super().finish(request)

    def check(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Compare the state at the end of what SGLang would use, too."""
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        held = super().check(tokens, salt)
        if held and held < len(tokens):
            request = Request("check", [*tokens[:held], 0], salt)
            self._match(request)
            slot = self.cache.tree_core.get_component_device_value(
                request.last_node, ComponentType.MAMBA
            )
            found = _arrays(self.states._snapshots[int(slot[0])])
            for got, expected in zip(found, _arrays(state_of(tokens[:held])), strict=True):
                np.testing.assert_array_equal(got, expected)
        return held
