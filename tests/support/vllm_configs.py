"""Real vLLM configuration objects without an engine: what a tier's plugin is handed.

Needs vLLM. The KV cache specs are those that the tiny Llama's layers publish; no
model is loaded and no memory taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_llama

__all__ = ["Handed", "hand_over", "takes_fp8_kv"]


@dataclass(frozen=True)
class Handed:
    """``VllmConfig``, ``KVCacheConfig`` and ``OffloadingConfig`` of one engine."""

    vllm_config: Any
    kv_cache_config: Any
    offloading_config: Any


def _specs(config: Any, rank: int) -> dict[str, Any]:
    """What one pipeline rank's layers publish, those of a draft model included."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel, cache = config.parallel_config, config.cache_config
    dtype = cache.cache_dtype
    spec = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=tiny_llama.KV_HEADS // parallel.tensor_parallel_size,
        head_size=tiny_llama.HEAD_SIZE,
        dtype=_torch_dtype(config.model_config.dtype if dtype == "auto" else dtype),
    )
    layers = config.model_config.hf_config.num_hidden_layers
    per_rank = -(-layers // parallel.pipeline_parallel_size)
    mine = range(rank * per_rank, min(layers, (rank + 1) * per_rank))
    found: dict[str, Any] = {f"model.layers.{number}.self_attn.attn": spec for number in mine}
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "draft_model":
        draft = speculative.draft_model_config.hf_config.num_hidden_layers
        found |= {f"draft_model.layers.{number}.self_attn.attn": spec for number in range(draft)}
    return found


def _torch_dtype(dtype: Any) -> Any:
    import torch

    if isinstance(dtype, str):
        return torch.uint8 if dtype.startswith("fp8") else getattr(torch, dtype)
    return dtype


def hand_over(
    model: Path | str, *, memory: int = 1 << 26, extra: dict[str, Any] | None = None, **options: Any
) -> Handed:
    """Configure an engine as ``vllm serve`` would, with native offloading on.

    Parameters
    ----------
    model
        Model directory.
    memory
        Bytes of KV cache per worker.
    extra
        Keys for ``kv_connector_extra_config``.
    options
        Fields of vLLM's ``EngineArgs``.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import core  # has what it uses itself, wherever a release keeps it

    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 26,
            **(extra or {}),
        },
    )
    arguments: dict[str, Any] = {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_transfer_config": transfer,
        **options,
    }
    config = EngineArgs(**arguments).create_engine_config()
    # The engine core does this once its workers have published their layouts.
    config.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout or "LBHNC"
    parallel = config.parallel_config
    specs = [
        _specs(config, rank)
        for rank in range(parallel.pipeline_parallel_size)
        for _ in range(parallel.tensor_parallel_size)
    ]
    grouping = getattr(core, "get_global_kv_cache_groups", None)  # vLLM 0.33
    groups = [] if grouping is None else [grouping(config, specs)]
    per_worker = core.get_kv_cache_configs(config, specs, [memory] * len(specs), *groups)
    kv_cache_config = core.generate_scheduler_kv_cache_config(per_worker)
    return Handed(config, kv_cache_config, build_offloading_config(config, kv_cache_config))


def takes_fp8_kv() -> bool:
    """Whether vLLM takes fp8 KV on this processor."""
    import torch

    supported = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    return bool(supported)
