"""Blocks that look like a model's keys and values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, KVLayout, Role, TensorLayout

__all__ = ["TOKENS", "layout_of", "real_looking"]

TOKENS = 256
_HEADS = 8

Bytes = npt.NDArray[np.uint8]


def layout_of(layers: int, dim: int, dtype: DType, heads: int = _HEADS) -> KVLayout:
    """Blocks of keys and values in pages of 16 tokens."""
    head = dim * ITEM_BYTES[dtype]
    token, page, tensor = head * heads, head * heads * 16, head * heads * TOKENS
    pages = TOKENS // 16
    roles: tuple[Role, ...] = ("key", "value")
    return KVLayout.of(
        tensor * 2 * layers,
        [
            TensorLayout(
                role, dtype, layer, pages, 16, heads, dim, page, token, head, tensor * number
            )
            for number, (layer, role) in enumerate(
                (layer, role) for layer in range(layers) for role in roles
            )
        ],
    )


def real_looking(layout: KVLayout, rng: np.random.Generator) -> Bytes:
    """A payload whose channels differ as those of models do: keys more than values."""
    payload = np.zeros(layout.nbytes, dtype=np.uint8)
    for tensor in layout.tensors:
        shape = (tensor.tokens, tensor.heads, tensor.dim)
        is_key = tensor.role == "key"
        scale = np.exp((0.8 if is_key else 0.3) * rng.standard_normal(shape[1:], dtype=np.float32))
        mean = (1.5 if is_key else 0.1) * rng.standard_normal(shape[1:], dtype=np.float32) * scale
        numbers = mean + scale * rng.standard_normal(shape, dtype=np.float32)
        tensor.scatter(_as_bytes(numbers, tensor.dtype), payload)
    return payload


def _as_bytes(numbers: npt.NDArray[np.float32], dtype: DType) -> Bytes:
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    if dtype == "float16":
        return numbers.astype(np.float16).view(np.uint8)
    return numbers.view(np.uint8)
