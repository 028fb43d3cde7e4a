"""Codecs by their numbers in journal entries: which coder each tensor of a block gets."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.coder import Coder
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.lbq import CENTRED, PRECISE, TURNING
from lifeboat_cache.codecs.names import DENSE, LBQ2, LBQ3, LBQ4, LOSSLESS, RAW
from lifeboat_cache.kernels import codec_layout as columns

__all__ = ["CodedLayout", "coded_layout", "coder"]

#: Bits of mantissa in the codes of fp8, of 7: see ``docs/codecs.md`` for the choice.
_FP8_MANTISSA = 4

#: Bits per element of keys, of values, and of latents, which are both. The error of keys is
#: what changes outputs most.
_WIDTHS = {LBQ4: (4, 4, 4), LBQ3: (3, 3, 4), LBQ2: (3, 2, 3)}

#: Modules of coders and their classes.
_CODERS = {
    columns.CODER_COPY: ("copying", "Copying"),
    columns.CODER_LOSSLESS: ("lossless", "Lossless"),
    columns.CODER_DENSE: ("dense", "Dense"),
    columns.CODER_FP8: ("fp8", "Fp8"),
    columns.CODER_LBQ: ("lbq", "Lbq"),
}


@cache
def coder(number: int) -> Coder:
    """The numpy twin of a coder, by its number (``CODER_*``)."""
    module, name = _CODERS[number]
    made = getattr(importlib.import_module(f"lifeboat_cache.codecs.{module}"), name)()
    return cast("Coder", made)


@dataclass(frozen=True, eq=False)
class CodedLayout:
    """A layout with a codec: what each tensor of a block becomes.

    Attributes
    ----------
    layout
        The tensors.
    codec
        Number of the codec.
    coders
        For each tensor its coder (``CODER_*``) and what this coder is told (``ROW_BITS``; 0: it
        has no choice).
    """

    layout: KVLayout
    codec: int
    coders: tuple[tuple[int, int], ...]

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """int64 ``(n_tensors, ROW_WORDS)``, as kernels read them."""
        pairs = zip(self.layout.tensors, self.coders, strict=True)
        rows = [tensor.row(number, bits) for tensor, (number, bits) in pairs]
        return np.array(rows, dtype=np.int64).reshape(-1, columns.ROW_WORDS)

    @cached_property
    def fixed_bytes(self) -> int | None:
        """Bytes of every stored block; ``None`` if that depends on the values."""
        total = 0
        for tensor, (number, bits) in zip(self.layout.tensors, self.coders, strict=True):
            size = coder(number).fixed_bytes(tensor, bits)
            if size is None:
                return None
            total += size
        return total

    @cached_property
    def most_bytes(self) -> int:
        """Bytes that no stored block exceeds."""
        pairs = zip(self.layout.tensors, self.coders, strict=True)
        return sum(coder(number).most_bytes(tensor, bits) for tensor, (number, bits) in pairs)

    def places(
        self, lengths: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """In which piece of a block each tensor lies, and at which of its bytes it begins.

        Parameters
        ----------
        lengths
            int64 ``(n_pieces,)``: bytes of the pieces whose concatenation is the block.

        Returns
        -------
        Two int64 arrays ``(n_tensors,)``, or ``None`` if a tensor lies across pieces.
        """
        ends = np.cumsum(lengths)
        first = np.array([tensor.offset for tensor in self.layout.tensors], dtype=np.int64)
        last = np.array([_end(tensor) for tensor in self.layout.tensors], dtype=np.int64)
        which = np.searchsorted(ends, first, side="right")
        if (which >= ends.shape[0]).any() or (last > ends[which]).any():
            return None
        return which, first - (ends - lengths)[which]


def _end(tensor: TensorLayout) -> int:
    return int(tensor.starts().max()) + tensor.dim * tensor.item_bytes


@cache
def coded_layout(layout: KVLayout, codec: int) -> CodedLayout:
    """What a codec makes of a layout."""
    coders = tuple(_coder_for(tensor, codec) for tensor in layout.tensors)
    return CodedLayout(layout, codec, coders)


def _coder_for(tensor: TensorLayout, codec: int) -> tuple[int, int]:
    """Coder and bits of a tensor: the first one that can store it."""
    for number, bits in _wanted(tensor, codec):
        if coder(number).takes(tensor):
            return number, bits
    return columns.CODER_COPY, 0


def _wanted(tensor: TensorLayout, codec: int) -> Iterator[tuple[int, int]]:
    if codec == LOSSLESS:
        yield columns.CODER_LOSSLESS, 0
    elif codec == DENSE:
        yield columns.CODER_DENSE, 0
    elif codec != RAW and tensor.role not in ("opaque", "state"):
        if codec in _WIDTHS:
            keys, values, latents = _WIDTHS[codec]
            if tensor.role == "key":
                # Rotary embedding turns the two halves of a head against each other.
                turning = TURNING if tensor.dim % 32 == 0 else 0
                yield columns.CODER_LBQ, keys | CENTRED | PRECISE | turning
            else:
                width = values if tensor.role == "value" else latents
                yield columns.CODER_LBQ, width | CENTRED | PRECISE
        yield columns.CODER_FP8, _FP8_MANTISSA
