"""Parts of a tensor: what the exact coders look at in one go; the twin of ``kernels.parts``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import ITEM_BYTES, TensorLayout

__all__ = ["MOST_COLUMNS", "Part", "element_type", "parts_of"]

PART_BYTES = 1 << 20
PART_TOKENS = 256
MOST_COLUMNS = 4096


@dataclass(frozen=True)
class Part:
    """Tokens and columns of a tensor."""

    token: int
    tokens: int
    column: int
    columns: int

    @property
    def count(self) -> int:
        """Elements."""
        return self.tokens * self.columns

    def of(self, elements: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """uint8 ``(count, item)``: the part's elements; from ``(tokens, columns, item)``."""
        inside = elements[
            self.token : self.token + self.tokens, self.column : self.column + self.columns
        ]
        return np.ascontiguousarray(inside).reshape(self.count, -1)

    def put(self, elements: npt.NDArray[np.uint8], part: npt.NDArray[np.uint8]) -> None:
        """The reverse of :meth:`of`."""
        elements[
            self.token : self.token + self.tokens, self.column : self.column + self.columns
        ] = part.reshape(self.tokens, self.columns, -1)


def element_type(tensor: TensorLayout) -> tuple[str, int]:
    """As what a tensor's elements are stored, and their bytes.

    Bytes of which nothing is known are taken for bfloat16 where they can be.
    """
    if tensor.dtype == "bytes" and tensor.dim % 2 == 0:
        return "bfloat16", 2
    return tensor.dtype, ITEM_BYTES[tensor.dtype]


def parts_of(tensor: TensorLayout) -> Iterator[Part]:
    """The parts of a tensor, in the order in which they are stored."""
    _, item = element_type(tensor)
    tokens, columns = tensor.tokens, tensor.heads * tensor.dim * tensor.item_bytes // item
    wide = min(columns, MOST_COLUMNS if tokens > 1 else PART_BYTES // item)
    long = min(tokens, PART_TOKENS, max(1, PART_BYTES // (wide * item)))
    for token in range(0, tokens, long):
        for column in range(0, columns, wide):
            yield Part(token, min(long, tokens - token), column, min(wide, columns - column))
