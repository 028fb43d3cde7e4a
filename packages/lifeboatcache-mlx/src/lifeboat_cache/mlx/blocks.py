"""Blocks of tokens: where their bytes lie in the arrays of a prompt cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from lifeboat_cache.interface import BlockBuffers, KVLayout, TensorLayout
from lifeboat_cache.mlx.arrays import memories_of
from lifeboat_cache.mlx.kinds import Layer

__all__ = ["block_buffers", "block_bytes", "block_layout"]

#: Types that can be made smaller without loss.
_FLOATS = ("bfloat16", "float16", "float32")


def block_bytes(layers: Sequence[Layer], tokens: int) -> int:
    """Bytes of a block of so many tokens."""
    return tokens * sum(plane.heads * plane.row_bytes for layer in layers for plane in layer.planes)


@lru_cache(maxsize=16)  # hundreds of tensors: it takes longer than to look a prompt up
def block_layout(layers: tuple[Layer, ...], tokens: int) -> KVLayout:
    """What the bytes of a block are: layer by layer, array by array, head by head.

    All of it is called state, which is stored exactly whatever is configured: mlx-lm has
    lossy caches of its own, and who wants one has chosen it.
    """
    tensors: list[TensorLayout] = []
    offset = 0
    for layer in layers:
        for plane in layer.planes:
            size = tokens * plane.row_bytes
            for _ in range(plane.heads):
                if plane.dtype in _FLOATS and plane.dim:
                    tensors.append(
                        TensorLayout(
                            role="state",
                            dtype=plane.dtype,  # type: ignore[arg-type]
                            layer=layer.number,
                            outer=1,
                            inner=tokens,
                            heads=1,
                            dim=plane.dim,
                            outer_stride=size,
                            inner_stride=plane.row_bytes,
                            head_stride=plane.row_bytes,
                            offset=offset,
                        )
                    )
                offset += size
    return KVLayout.of(offset, tensors)


def block_buffers(
    arrays: Sequence[mx.array], blocks: npt.NDArray[np.int64], tokens: int, *, writable: bool
) -> BlockBuffers:
    """The memory of some blocks of tokens.

    Parameters
    ----------
    arrays
        ``(1, heads, tokens, dim)`` each, of all layers in order.
    blocks
        Numbers of the blocks from the start of the prompt.
    tokens
        Of a block.
    writable
        Whether they are loaded. The arrays must lie together then.
    """
    bases: list[npt.NDArray[np.int64]] = []
    rows: list[npt.NDArray[np.int64]] = []
    owners: list[Any] = []
    for memory, owner in memories_of(arrays, row=2):
        heads, row_bytes = memory.shape[1], memory.shape[3]
        owners.append((memory, owner))
        if row_bytes:
            bases.append(memory.ctypes.data + np.arange(heads, dtype=np.int64) * memory.strides[1])
            rows.append(np.full(heads, row_bytes, dtype=np.int64))
    base, row = np.concatenate(bases), np.concatenate(rows)
    addresses = base[None, :] + (blocks * tokens)[:, None] * row[None, :]
    lengths = np.broadcast_to(row * tokens, addresses.shape)
    starts = np.arange(blocks.shape[0] + 1, dtype=np.int64) * base.shape[0]
    return BlockBuffers(
        addresses.astype(np.uint64).reshape(-1),
        lengths.astype(np.uint64).reshape(-1),
        starts,
        owners,
        writable,
    )
