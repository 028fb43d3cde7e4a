"""What the bytes of a chunk in vLLM's CPU tier are.

A chunk is a row: one area per worker, and in it one region per KV cache tensor with the
pages of the chunk's blocks, in the order in which vLLM's workers register their layers.
Everything here is read from the engine's configuration and checked against the sizes that
vLLM states; where anything does not fit, the bytes count as opaque and are kept exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, Role
from lifeboat_cache.interface import KVLayout, TensorLayout

__all__ = ["UnknownLayoutError", "chunk_layouts"]

_log = logging.getLogger("lifeboat_cache")

_DTYPES: dict[str, DType] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}

#: vLLM's names of 8-bit KV caches that hold nothing but floating-point numbers.
_CACHE_DTYPES: dict[str, DType] = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

#: Orders of a page in memory: heads, then tokens; or tokens, then heads.
_HEADS_FIRST, _TOKENS_FIRST = "LBHNC", "LBNHC"


class UnknownLayoutError(Exception):
    """The bytes of a chunk are not what is understood here; says why."""


@dataclass(frozen=True)
class _Layer:
    """A layer's pages in a chunk."""

    number: int
    spec: Any
    #: Where the layer's region begins in a worker's area, and the distance of its pages.
    offset: int
    page: int


def chunk_layouts(
    vllm_config: Any, kv_cache_config: Any, offloading: Any, row_bytes: int
) -> list[KVLayout]:
    """The layout of a chunk of each KV cache group, in the order of the keys' group numbers.

    Parameters
    ----------
    vllm_config, kv_cache_config
        Of the engine, as the scheduler has them.
    offloading
        vLLM's ``OffloadingConfig``.
    row_bytes
        Bytes of a chunk in the CPU tier.

    Raises
    ------
    UnknownLayoutError
        If they cannot be told.
    """
    try:
        return _chunk_layouts(vllm_config, kv_cache_config, offloading, row_bytes)
    except UnknownLayoutError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as exc:
        raise UnknownLayoutError(f"this release of vLLM describes it otherwise ({exc!r})") from exc


def _chunk_layouts(
    vllm_config: Any, kv_cache_config: Any, offloading: Any, row_bytes: int
) -> list[KVLayout]:
    parallel = offloading.parallel
    if max(parallel.pp_size, parallel.pcp_size, parallel.dcp_size) > 1:
        raise UnknownLayoutError("pipeline or context parallelism")
    if offloading.canonical_layout:
        raise UnknownLayoutError("canonical_layout is set")
    blocks = int(offloading.cache.blocks_per_chunk)
    groups = kv_cache_config.kv_cache_groups
    layers, used = _placed(kv_cache_config, offloading, blocks)
    area = int(offloading.worker_kv_bytes_per_block) * blocks
    # Where groups share memory, vLLM counts it for each of them, and the rest is not used.
    if used > area or (len(offloading.groups) == 1 and used < area):
        raise UnknownLayoutError("the sizes of the layers do not add up to that of a block")
    workers = 1 if offloading.replicated_layout else int(parallel.world_size)
    if not row_bytes - 4096 < area * workers <= row_bytes:
        raise UnknownLayoutError("the sizes of the workers do not add up to that of a chunk")
    order = offloading.kv_cache_layout
    out = []
    for group in offloading.groups:
        names = groups[group.group_id].layer_names
        tensors = [
            tensor
            for worker in range(workers)
            for name in names
            for tensor in _tensors(layers[name], blocks, worker * area, order, vllm_config)
        ]
        out.append(KVLayout.of(row_bytes, tensors))
    return out


def _placed(kv_cache_config: Any, offloading: Any, blocks: int) -> tuple[dict[str, _Layer], int]:
    """Every offloaded layer's place in a worker's area, and the size of the area in bytes.

    Layers of different groups may share memory: their region is there once.
    """
    addresses: dict[str, tuple[int, int]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            at = int(tensor.offset) + number * int(tensor.layer_stride)
            addresses[name] = (at, int(tensor.block_stride))
    layers: dict[str, _Layer] = {}
    regions: dict[tuple[int, int], tuple[int, int]] = {}
    area = 0
    for group in offloading.groups:
        described = kv_cache_config.kv_cache_groups[group.group_id]
        for name in described.layer_names:
            spec = _spec_of(described.kv_cache_spec, name)
            page = int(spec.page_size_bytes)
            address = addresses[name]
            if address[1] != page:
                raise UnknownLayoutError("the pages of several layers are packed together")
            if address not in regions:
                regions[address] = (area, page)
                area += page * blocks
            offset, stride = regions[address]
            if stride != page:
                raise UnknownLayoutError("layers that share memory have pages of different sizes")
            layers[name] = _Layer(_number(name, len(layers)), spec, offset, page)
    return layers, area


def _spec_of(spec: Any, name: str) -> Any:
    several = getattr(spec, "kv_cache_specs", None)
    return several[name] if isinstance(several, dict) else spec


def _number(name: str, otherwise: int) -> int:
    """Number of a layer in the model: the first number in its name."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else otherwise


def _tensors(
    layer: _Layer, blocks: int, base: int, order: str | None, vllm_config: Any
) -> Iterator[TensorLayout]:
    """The tensors of a layer in one worker's area."""
    spec = layer.spec
    kind = type(spec).__name__
    start = base + layer.offset
    if hasattr(spec, "shapes") and hasattr(spec, "dtypes"):  # recurrent state
        yield from _state(layer, blocks, start)
        return
    if kind not in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec") and (
        "MLA" not in kind
    ):
        raise UnknownLayoutError(f"layers of the kind {kind}")
    dtype = _dtype(spec, vllm_config)
    item = ITEM_BYTES[dtype]
    tokens, heads = int(spec.block_size), int(spec.num_kv_heads)
    keys, values = int(spec.head_size), int(spec.head_size_v)
    width = (keys + values) * item
    if int(spec.unpadded_page_size_bytes) != tokens * heads * width:
        raise UnknownLayoutError("pages hold more than keys and values")
    if values == 0:
        yield _tensor("latent", dtype, layer, blocks, tokens, heads, keys, start, width, width)
        return
    if "MLA" in kind:
        raise UnknownLayoutError(f"layers of the kind {kind} with values of their own")
    if order not in (_HEADS_FIRST, _TOKENS_FIRST):
        raise UnknownLayoutError(f"pages in the order {order}")
    if _keys_then_values():
        if order != _HEADS_FIRST or keys != values:
            raise UnknownLayoutError(f"pages in the order {order} on this platform")
        # The CPU backend keeps all keys of a head in a page, then all its values.
        step, head = keys * item, tokens * width
        behind = tokens * keys * item
    else:
        head, step = (tokens * width, width) if order == _HEADS_FIRST else (width, heads * width)
        behind = keys * item
    yield _tensor("key", dtype, layer, blocks, tokens, heads, keys, start, step, head)
    yield _tensor("value", dtype, layer, blocks, tokens, heads, values, start + behind, step, head)


def _tensor(
    role: Role,
    dtype: DType,
    layer: _Layer,
    blocks: int,
    tokens: int,
    heads: int,
    dim: int,
    start: int,
    step: int,
    head: int,
) -> TensorLayout:
    return TensorLayout(
        role, dtype, layer.number, blocks, tokens, heads, dim, layer.page, step, head, start
    )


def _state(layer: _Layer, blocks: int, start: int) -> Iterator[TensorLayout]:
    at = start
    shapes: Sequence[Any] = layer.spec.shapes
    for shape, kind in zip(shapes, layer.spec.dtypes, strict=True):
        dtype = _DTYPES[str(kind).removeprefix("torch.")]
        count = prod(shape)
        size = count * ITEM_BYTES[dtype]
        yield TensorLayout(
            "state", dtype, layer.number, blocks, 1, 1, count, layer.page, size, size, at
        )
        at += size


def _dtype(spec: Any, vllm_config: Any) -> DType:
    name = str(spec.dtype).removeprefix("torch.")
    mode = int(getattr(spec, "kv_quant_mode", 0))
    if mode == 0 and name in _DTYPES:
        return _DTYPES[name]
    cache = str(vllm_config.cache_config.cache_dtype)
    if mode <= 1 and cache in _CACHE_DTYPES:  # one scale per tensor, kept elsewhere
        return _CACHE_DTYPES[cache]
    raise UnknownLayoutError(f"a KV cache of {cache} ({name})")


def _keys_then_values() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
