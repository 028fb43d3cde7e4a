"""What the bytes of a block are: its tensors, their dtypes, shapes and strides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from lifeboat_cache.kernels import codec_layout as columns
from lifeboat_cache.keys import tag
from lifeboat_cache.namespace import canonical_json

__all__ = ["DTYPES", "ITEM_BYTES", "ROLES", "KVLayout", "TensorLayout"]

DType = Literal["bytes", "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]
Role = Literal["opaque", "key", "value", "state", "latent"]

DTYPES: dict[str, int] = {
    "bytes": columns.DTYPE_BYTES,
    "bfloat16": columns.DTYPE_BF16,
    "float16": columns.DTYPE_FP16,
    "float32": columns.DTYPE_FP32,
    "float8_e4m3fn": columns.DTYPE_E4M3,
    "float8_e5m2": columns.DTYPE_E5M2,
}

ITEM_BYTES: dict[str, int] = {
    "bytes": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

ROLES: dict[str, int] = {
    "opaque": columns.ROLE_OPAQUE,
    "key": columns.ROLE_KEY,
    "value": columns.ROLE_VALUE,
    "state": columns.ROLE_STATE,
    "latent": columns.ROLE_LATENT,
}


@dataclass(frozen=True)
class TensorLayout:
    """One tensor inside a block.

    The vector of token ``o * inner + i`` and head ``h`` begins at byte
    ``offset + o * outer_stride + i * inner_stride + h * head_stride`` of the block's
    payload; its ``dim`` elements follow each other. Tokens have two axes because engines
    keep pages of a few tokens, and a block holds several pages.

    Attributes
    ----------
    role
        What the tensor is; ``state`` and ``opaque`` are always stored exactly.
    dtype
        Of its elements.
    layer
        Number of the model's layer, from 0.
    outer, inner, heads, dim
        Shape; ``outer * inner`` tokens.
    outer_stride, inner_stride, head_stride
        In bytes.
    offset
        Byte of the payload at which the tensor begins.
    """

    role: Role
    dtype: DType
    layer: int
    outer: int
    inner: int
    heads: int
    dim: int
    outer_stride: int
    inner_stride: int
    head_stride: int
    offset: int

    @property
    def tokens(self) -> int:
        """Tokens in the tensor."""
        return self.outer * self.inner

    @property
    def vectors(self) -> int:
        """Vectors of ``dim`` elements in the tensor."""
        return self.outer * self.inner * self.heads

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.vectors * self.dim * self.item_bytes

    def starts(self) -> npt.NDArray[np.int64]:
        """int64 ``(outer, inner, heads)``: byte of the payload at which each vector begins."""
        outer = np.arange(self.outer, dtype=np.int64)[:, None, None] * self.outer_stride
        inner = np.arange(self.inner, dtype=np.int64)[None, :, None] * self.inner_stride
        heads = np.arange(self.heads, dtype=np.int64)[None, None, :] * self.head_stride
        return self.offset + outer + inner + heads

    def gather(self, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """uint8 ``(tokens, heads, dim * item_bytes)``: a copy of the vectors of a payload."""
        width = self.dim * self.item_bytes
        at = self.starts()[..., None] + np.arange(width, dtype=np.int64)
        out: npt.NDArray[np.uint8] = payload[at].reshape(self.tokens, self.heads, width)
        return out

    def scatter(self, vectors: npt.NDArray[np.uint8], payload: npt.NDArray[np.uint8]) -> None:
        """Put what :meth:`gather` gave into a payload (uint8, 1-D)."""
        width = self.dim * self.item_bytes
        at = self.starts()[..., None] + np.arange(width, dtype=np.int64)
        payload[at] = vectors.reshape(self.outer, self.inner, self.heads, width)

    def row(self, coder: int = 0, bits: int = 0) -> npt.NDArray[np.int64]:
        """int64 ``(ROW_WORDS,)``: the tensor with its coder, as kernels read it."""
        return np.array(self._words(coder, bits), dtype=np.int64)

    def _words(self, coder: int = 0, bits: int = 0) -> list[int]:
        row = [0] * columns.ROW_WORDS
        row[columns.ROW_CODER] = coder
        row[columns.ROW_DTYPE] = DTYPES[self.dtype]
        row[columns.ROW_ROLE] = ROLES[self.role]
        row[columns.ROW_LAYER] = self.layer
        row[columns.ROW_OUTER] = self.outer
        row[columns.ROW_OUTER_STRIDE] = self.outer_stride
        row[columns.ROW_INNER] = self.inner
        row[columns.ROW_INNER_STRIDE] = self.inner_stride
        row[columns.ROW_HEADS] = self.heads
        row[columns.ROW_HEAD_STRIDE] = self.head_stride
        row[columns.ROW_DIM] = self.dim
        row[columns.ROW_OFFSET] = self.offset
        row[columns.ROW_BITS] = bits
        return row


@dataclass(frozen=True)
class KVLayout:
    """The tensors of a block; every byte of its payload belongs to exactly one.

    Make one with :meth:`of`, which takes what no tensor covers as opaque bytes.

    Attributes
    ----------
    nbytes
        Bytes of the payload.
    tensors
        In the order in which they are stored.
    """

    nbytes: int
    tensors: tuple[TensorLayout, ...]

    @classmethod
    def of(cls, nbytes: int, tensors: Iterable[TensorLayout] = ()) -> KVLayout:
        """Describe a payload of ``nbytes`` bytes.

        Raises
        ------
        ValueError
            If tensors overlap, or lie outside the payload.
        """
        known = tuple(tensors)
        for tensor in known:
            if min(tensor.outer, tensor.inner, tensor.heads, tensor.dim) < 1:
                raise ValueError(f"a tensor is empty: {tensor}")
        starts = [tensor.starts().reshape(-1) for tensor in known]
        widths = [tensor.dim * tensor.item_bytes for tensor in known]
        first = np.concatenate([*starts, np.array([nbytes], dtype=np.int64)])
        last = first + np.repeat([*widths, 0], [*(at.shape[0] for at in starts), 1])
        order = np.argsort(first, kind="stable")
        first, last = first[order], last[order]
        before = np.concatenate(([0], last[:-1]))
        if first[0] < 0 or int(last.max()) > nbytes:
            raise ValueError(f"a tensor lies outside the block of {nbytes} bytes")
        if (first < before).any():
            raise ValueError("tensors of a block overlap")
        gaps = np.flatnonzero(first > before)
        opaque = [
            _opaque(at, end - at)
            for at, end in zip(before[gaps].tolist(), first[gaps].tolist(), strict=True)
        ]
        return cls(nbytes, (*known, *opaque))

    @classmethod
    def opaque(cls, nbytes: int) -> KVLayout:
        """A payload of which nothing is known."""
        return cls(nbytes, (_opaque(0, nbytes),) if nbytes else ())

    def __hash__(self) -> int:
        return self.tag

    @cached_property
    def tag(self) -> int:
        """The 8-byte tag under which blocks of this layout are stored, never 0."""
        rows = [tensor._words() for tensor in self.tensors]
        return tag(b"kv layout 1\0" + canonical_json({"nbytes": self.nbytes, "tensors": rows}))

    def shifted(self, by: int) -> tuple[TensorLayout, ...]:
        """The tensors of this layout for a payload in which it begins at byte ``by``."""
        return tuple(replace(tensor, offset=tensor.offset + by) for tensor in self.tensors)


def _opaque(offset: int, nbytes: int) -> TensorLayout:
    return TensorLayout("opaque", "bytes", 0, 1, 1, 1, nbytes, nbytes, nbytes, nbytes, offset)
