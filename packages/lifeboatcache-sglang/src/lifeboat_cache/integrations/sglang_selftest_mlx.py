"""The part of ``lifeboat-cache selftest sglang`` about SGLang's MLX backend.

Stores chunks out of SGLang's own MLX pool, restores them into other slots, and compares
every byte. Needs MLX, and no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lifeboat_cache.integrations.sglang_selftest_interface import missing_names, parameters

__all__ = ["move_chunks", "problems"]

_CHUNKS = 6
_SEED = 2026
_PATIENCE_S = 60.0

_TREE = "sglang.srt.mem_cache.unified_radix_cache"

#: What is imported, called or wrapped there.
_NAMES = (
    *(
        ("sglang.srt.mem_cache.registry", name)
        for name in (
            "create_unified_radix_cache",
            "default_radix_cache_factory",
            "register_radix_cache_backend",
            "registered_radix_cache_backends",
        )
    ),
    *(
        (_TREE, f"UnifiedRadixCache.{name}")
        for name in ("_match_tree", "insert", "lock", "path_device_indices", "unlock")
    ),
    ("sglang.srt.managers.scheduler", "Scheduler._prefetch_kvcache"),
    ("sglang.srt.mem_cache.common", "evict_from_tree_cache"),
    ("sglang.srt.hardware_backend.mlx.tp_worker", "MlxTpModelWorker._ensure_mlx_pool_initialized"),
    ("sglang.srt.hardware_backend.mlx.model_runner", "MlxModelRunner.release_request_row"),
)


def problems() -> list[str]:
    """What is missing or other than it was, a line each."""
    return [*missing_names(iter(_NAMES)), *_methods()]


def _methods() -> Iterator[str]:
    """Compare our cache with the class of SGLang that it changes."""
    try:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from lifeboat_cache.integrations.sglang_mlx_cache import LifeboatMlxCache
    except ImportError as error:
        yield f"the cache cannot be imported: {error}"
        return
    for name in sorted(vars(LifeboatMlxCache)):
        ours = getattr(LifeboatMlxCache, name)
        if not getattr(ours, "__override__", False):
            continue
        theirs = getattr(UnifiedRadixCache, name, None)
        if theirs is None:
            yield f"SGLang's UnifiedRadixCache has no {name} any more: it will not be called"
        elif len(parameters(theirs)) != len(parameters(ours)):
            yield (
                f"SGLang calls a cache's {name} with {', '.join(parameters(theirs))}; this version "
                f"takes {', '.join(parameters(ours))}"
            )


def move_chunks(config: Path) -> str | None:
    """Store chunks, and restore them into other slots.

    Parameters
    ----------
    config
        A configuration file with a place of its own.

    Returns
    -------
    str or None
        What went wrong.
    """
    import mlx.core as mx
    from sglang.srt.hardware_backend.mlx.kv_cache import MlxAttentionKVPool

    from lifeboat_cache.config import load_config
    from lifeboat_cache.integrations.sglang_mlx_chunks import (
        CHUNK_TOKENS,
        PoolShape,
        prefix_digests,
    )
    from lifeboat_cache.integrations.sglang_mlx_keep import Keeper
    from lifeboat_cache.integrations.sglang_mlx_read import BUDGET_BYTES, Budget, Read
    from lifeboat_cache.interface import Namespace, open_block_store

    tokens = np.random.default_rng(_SEED).integers(0, 50_000, _CHUNKS * CHUNK_TOKENS)
    pool = MlxAttentionKVPool(2 * len(tokens) + 1, 2, 2, 32, mx.bfloat16)
    shape = PoolShape.of(pool)
    slots = list(range(2 * len(tokens), len(tokens), -1))
    data = np.random.default_rng(_SEED).integers(
        0, 0x7F00, (2, 2, len(tokens), 2, 32), dtype=np.uint16
    )
    k, v = (mx.array(part).view(mx.bfloat16) for part in data)
    pool.set_kv_all_layers(mx.array(slots, dtype=mx.int32), k, v)
    store = open_block_store(
        load_config(config).config,
        Namespace.from_identity({"selftest": "sglang mlx"}),
        native=True,
    )
    try:
        store.wait_recovered(_PATIENCE_S)
        Keeper(store, pool, shape).keep(tokens, slots, None, None)
        if not store.drain(_PATIENCE_S) or len(store) != _CHUNKS:
            return f"{len(store)} of {_CHUNKS} chunks of SGLang's MLX pool were stored"
        pool.clear()
        keys = shape.keys(prefix_digests(tokens, None, None)[1:])
        read = Read(store, shape, keys, 0, 0.0, Budget(BUDGET_BYTES))
        there = 0
        deadline = time.monotonic() + _PATIENCE_S
        while not read.over and time.monotonic() < deadline:
            part: Any = read.take()
            if part is None:
                time.sleep(0.001)
                continue
            others = mx.array(np.arange(part.begin, part.end, dtype=np.int32) + 1)
            count = part.end - part.begin
            pool.set_kv_all_layers(others, part.keys[:, :count], part.values[:, :count])
            there = part.end
        if there != len(tokens):
            return f"{there} of {len(tokens)} tokens came back to SGLang's MLX pool"
        got = pool.get_kv_all_layers(mx.array(np.arange(there, dtype=np.int32) + 1))
        same = np.array_equal(np.stack([np.array(part.view(mx.uint16)) for part in got]), data)
        return None if same else "wrong bytes in SGLang's MLX pool"
    finally:
        store.close(_PATIENCE_S)
