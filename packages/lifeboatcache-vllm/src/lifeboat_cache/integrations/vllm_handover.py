"""Hands an engine's configuration to the tier that runs inside it.

vLLM gives a secondary tier neither ``VllmConfig`` nor ``KVCacheConfig``, so a tier
on its own knows a model's name and nothing of its weights, RoPE or layout. The
plugin therefore watches the creation of connectors, passively, and keeps both for
the tier of the same engine to pick up.
"""

from __future__ import annotations

import functools
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CHUNK_TOKENS_KEY",
    "LEAST_CHUNKS",
    "MOST_CHUNK_BYTES",
    "EngineConfig",
    "blocks_per_chunk",
    "engine_config",
    "install",
]

#: Key in ``kv_connector_extra_config`` that asks for a chunk of about so many
#: tokens. Removed and replaced by ``blocks_per_chunk`` once block sizes are known.
CHUNK_TOKENS_KEY = "lifeboat_chunk_tokens"

#: A chunk is not larger, whatever its tokens (but has one block), so that also a small
#: CPU tier holds some.
MOST_CHUNK_BYTES = 64 << 20

#: A CPU tier that holds fewer is worth a warning.
LEAST_CHUNKS = 16

_PAGE = mmap.PAGESIZE

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_handover"


@dataclass(frozen=True)
class EngineConfig:
    """vLLM's configuration of one engine: ``VllmConfig`` and ``KVCacheConfig``."""

    vllm_config: Any
    kv_cache_config: Any


_known: dict[str, EngineConfig] = {}


def engine_config(engine_id: str) -> EngineConfig | None:
    """The configuration of an engine of this process, ``None`` if it was not seen."""
    return _known.get(engine_id)


def install() -> None:
    """Watch vLLM's connector factory. Idempotent; changes nothing for other connectors."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    original: Callable[..., Any] = KVConnectorFactory.create_connector.__func__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_connector(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            kv_cache_config = kwargs.get("kv_cache_config", args[1] if len(args) > 1 else None)
            if _has_tiers(config):
                _take(config, kv_cache_config)
        except Exception:  # then the tier does not know its engine and stands down
            _log.exception("LifeboatCache: the engine's configuration was not understood")
        return original(cls, config, *args, **kwargs)

    setattr(create_connector, _MARK, True)
    KVConnectorFactory.create_connector = classmethod(create_connector)


def _has_tiers(config: Any) -> bool:
    """Whether some connector may have a tier of ours, at whatever depth."""
    extra = getattr(getattr(config, "kv_transfer_config", None), "kv_connector_extra_config", None)
    return "secondary_tiers" in str(extra)


def _take(config: Any, kv_cache_config: Any) -> None:
    transfer = getattr(config, "kv_transfer_config", None)
    engine_id = getattr(transfer, "engine_id", None)
    if transfer is None or not engine_id:
        return
    from lifeboat_cache.integrations import vllm_lora

    _known[engine_id] = EngineConfig(config, kv_cache_config)
    vllm_lora.install()
    extra = transfer.kv_connector_extra_config
    tokens = extra.pop(CHUNK_TOKENS_KEY, None)
    if tokens is not None and not {"block_size", "blocks_per_chunk"} & set(extra):
        _choose_chunk(config, kv_cache_config, extra, int(tokens))


def _choose_chunk(config: Any, kv_cache_config: Any, extra: dict[str, Any], tokens: int) -> None:
    """Choose the size of a chunk, which is part of the identity of what is stored.

    It therefore follows from the configuration and the model alone, and not from the
    memory that happens to be free at a start.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    specs = [group.kv_cache_spec for group in groups]
    cache = getattr(config, "cache_config", None)
    interval = getattr(cache, "prefix_cache_retention_interval", None) or 0
    size = _block_bytes(config, kv_cache_config)
    most = max(1, MOST_CHUNK_BYTES // size) if size else None
    blocks = blocks_per_chunk(tokens, specs, interval, most)
    extra["blocks_per_chunk"] = blocks
    if not size:
        return
    chunk = blocks * size
    if blocks < blocks_per_chunk(tokens, specs, interval):
        _log.info(
            "LifeboatCache: chunks of %d block(s), %.0f MB: larger ones would be above %.0f MB",
            blocks,
            chunk / 1e6,
            MOST_CHUNK_BYTES / 1e6,
        )
    memory = extra["cpu_bytes_to_use"]
    if memory < LEAST_CHUNKS * chunk:
        # Without any vLLM does not start.
        extra["cpu_bytes_to_use"] = max(memory, 2 * chunk)
        _log.warning(
            "LifeboatCache: a CPU tier of %.2f GB holds only %d chunks of this model: of longer "
            "prompts no more is restored at a time; free memory, or enlarge /dev/shm or the "
            "container's limit",
            extra["cpu_bytes_to_use"] / 1e9,
            extra["cpu_bytes_to_use"] // chunk,
        )


def _block_bytes(config: Any, kv_cache_config: Any) -> int:
    """Bytes of a block, of all workers together; 0 where the workers do not all know it."""
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "pipeline_parallel_size", 0) != 1:
        return 0  # each stage's blocks have another size, but all must decide alike
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )

    offloading = build_offloading_config(config, kv_cache_config)
    copies = 1 if offloading.replicated_layout else offloading.parallel.world_size
    size = int(offloading.worker_kv_bytes_per_block) * int(copies)
    return -(-size // _PAGE) * _PAGE


def blocks_per_chunk(
    tokens: int, specs: list[Any], interval: int = 0, most: int | None = None
) -> int:
    """How many blocks of the engine make up a chunk of about ``tokens`` tokens.

    One block per chunk where a group keeps recurrent state: its blocks are long
    already, and only the last state before a boundary exists.

    Parameters
    ----------
    tokens
        What is asked for.
    specs
        vLLM's KV cache specification of each group; the engine core has one layer's
        where a worker has those of all.
    interval
        vLLM's ``--prefix-cache-retention-interval``, of which it does not start with
        chunks that are no divisor; 0 = none.
    most
        Blocks that a chunk has at most; ``None`` = any number.
    """
    sizes = [int(getattr(spec, "block_size", 0)) for spec in specs]
    layers = [layer for spec in specs for layer in _layer_specs(spec)]
    recurrent = any("mamba" in type(layer).__name__.lower() for layer in layers)
    if recurrent or not sizes or min(sizes) <= 0:
        return 1
    blocks = max(1, tokens // max(sizes))
    if most is not None:
        blocks = min(blocks, most)
    while blocks > 1 and any(interval % (blocks * size) for size in sizes):
        blocks -= 1
    return blocks


def _layer_specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]
