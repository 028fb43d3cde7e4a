"""Chunks of 64 tokens of SGLang's MLX pool: their keys, and where their bytes lie.

The pool has pages of one token. Here a chunk is the unit of everything: small enough that
little of a prompt's end is computed again, large enough that nothing is done token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from lifeboat_cache.interface import BlockBuffers, KVLayout, TensorLayout, block_keys
from lifeboat_cache.namespace import canonical_json

__all__ = ["CHUNK_TOKENS", "PoolShape", "buffers_of", "new_array", "prefix_digests"]

#: Tokens of a chunk. Of a model with 128 KiB of KV per token that is 8 MiB.
CHUNK_TOKENS = 64

_PREFIX_CONTEXT = "lifeboatcache 2026 sglang mlx prefix v1"
_SPACE_CONTEXT = "lifeboatcache 2026 sglang mlx key space v1"

_DTYPES: dict[Any, str] = {
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.float32: "float32",
}


def prefix_digests(
    tokens: npt.NDArray[np.int64], extra_key: str | None, cache_salt: str | None
) -> list[bytes]:
    """Digests of the prefixes of 0, 1, 2, … whole chunks of a request's tokens.

    Parameters
    ----------
    tokens
        Of the request, from its first on.
    extra_key, cache_salt
        Of the request. Another one never finds what this one stored, as in SGLang's own tree.
    """
    start = canonical_json([extra_key or None, cache_salt or None])
    digests = [blake3(start, derive_key_context=_PREFIX_CONTEXT).digest()]
    data = tokens.astype("<i8")
    for end in range(CHUNK_TOKENS, data.shape[0] + 1, CHUNK_TOKENS):
        digests.append(blake3(digests[-1] + data[end - CHUNK_TOKENS : end].tobytes()).digest())
    return digests


@dataclass(frozen=True)
class PoolShape:
    """What one token of the pool is.

    Attributes
    ----------
    layers
        Layers with full attention; the pool holds no others.
    heads, dim
        KV heads, and elements of each.
    dtype
        Of MLX.
    """

    layers: int
    heads: int
    dim: int
    dtype: Any

    @classmethod
    def of(cls, pool: Any) -> PoolShape:
        """That of SGLang's ``MlxAttentionKVPool``.

        Raises
        ------
        ValueError
            If its type is none that KV is stored in.
        """
        if pool.dtype not in _DTYPES:
            raise ValueError(f"KV of the type {pool.dtype} is not stored: report this")
        shape = cls(int(pool.num_layers), int(pool.n_kv_heads), int(pool.head_dim), pool.dtype)
        expected = (int(pool.pool_size), shape.heads, shape.dim)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            if tuple(buffer.shape) != expected or buffer.dtype != pool.dtype:
                raise ValueError(
                    f"a buffer of the pool is {tuple(buffer.shape)} of {buffer.dtype} instead of "
                    f"{expected} of {pool.dtype}: report this"
                )
        return shape

    @property
    def row_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one layer."""
        return self.heads * self.dim * int(self.dtype.size)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return 2 * self.layers * CHUNK_TOKENS * self.row_bytes

    def layout(self) -> KVLayout:
        """What the bytes of a chunk are: layer by layer, of each first K and then V."""
        size = CHUNK_TOKENS * self.row_bytes
        tensors = [
            TensorLayout(
                role=role,  # type: ignore[arg-type]
                dtype=_DTYPES[self.dtype],  # type: ignore[arg-type]
                layer=layer,
                outer=1,
                inner=CHUNK_TOKENS,
                heads=self.heads,
                dim=self.dim,
                outer_stride=size,
                inner_stride=self.row_bytes,
                head_stride=self.dim * int(self.dtype.size),
                offset=(2 * layer + number) * size,
            )
            for layer in range(self.layers)
            for number, role in enumerate(("key", "value"))
        ]
        return KVLayout.of(self.chunk_bytes, tensors)

    def keys(self, digests: Sequence[bytes]) -> list[bytes]:
        """Keys of chunks, by the digests of the prefixes that they end."""
        return block_keys(digests, space=self._space())

    def state_keys(self, digests: Sequence[bytes]) -> list[bytes]:
        """Keys of the recurrent states at the ends of prefixes."""
        return block_keys(digests, space=b"state" + self._space())

    def _space(self) -> bytes:
        document = {
            "tokens": CHUNK_TOKENS,
            "layers": self.layers,
            "heads": self.heads,
            "dim": self.dim,
            "dtype": _DTYPES[self.dtype],
            "layout": self.layout().tag,
        }
        return blake3(canonical_json(document), derive_key_context=_SPACE_CONTEXT).digest()


def new_array(shape: PoolShape, tokens: int) -> mx.array:
    """An array ``(layers, tokens, heads, dim)`` with memory of its own, to be filled."""
    array = mx.zeros((shape.layers, tokens, shape.heads, shape.dim), shape.dtype)
    mx.eval(array)
    return array


def buffers_of(
    shape: PoolShape, keys: mx.array, values: mx.array, *, writable: bool
) -> BlockBuffers:
    """The memory of all chunks of two evaluated arrays ``(layers, tokens, heads, dim)``.

    What is written there changes the arrays; nobody else may use them until the job is done.
    MLX keeps arrays in memory that the CPU can address, on Apple silicon too.

    Raises
    ------
    ValueError
        If the arrays do not lie together in memory.
    """
    chunks = int(keys.shape[1]) // CHUNK_TOKENS
    owners: list[Any] = []
    bases: list[int] = []
    for array in (keys, values):
        view = array.view(mx.uint8)
        memory = np.array(view, copy=False)
        if not memory.flags.c_contiguous or memory.nbytes != shape.chunk_bytes // 2 * chunks:
            raise ValueError("arrays of MLX do not lie together in memory: report this")
        owners.append((memory, view))
        bases.append(int(memory.ctypes.data))
    piece = CHUNK_TOKENS * shape.row_bytes
    # Of each chunk layer by layer, of each layer K and V.
    chunk = np.arange(chunks, dtype=np.int64)[:, None, None] * piece
    layer = np.arange(shape.layers, dtype=np.int64)[None, :, None] * (chunks * piece)
    addresses = np.array(bases, dtype=np.int64)[None, None, :] + layer + chunk
    pieces = 2 * shape.layers
    return BlockBuffers(
        addresses.reshape(-1).astype(np.uint64),
        np.full(chunks * pieces, piece, dtype=np.uint64),
        np.arange(chunks + 1, dtype=np.int64) * pieces,
        owners,
        writable,
    )
