"""Sixty-four lanes with their signs: what the dense coder does to groups of elements.

A symbol is how far the exponent lies below its base (15: elsewhere), plus 16 if the sign is
not that of the element before. What is left of an element are the bits of its mantissa.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from lifeboat_cache.kernels import codec_layout as columns
from lifeboat_cache.kernels.lanes import ITEM_BYTES, base_at
from lifeboat_cache.kernels.vectors import (
    I64,
    LANES_8,
    LANES_16,
    LANES_32,
    bit,
    load,
    masked,
    narrow,
    operation,
    plane,
    plus,
    splat,
    spread,
    store,
)

__all__ = [
    "ESCAPED",
    "MANTISSA_BYTES",
    "MANTISSA_PLANES",
    "exponents_of",
    "join_signed",
    "plane_of_signs",
    "signs_of",
    "split_mantissa",
    "symbols_of",
]

#: The code of an exponent that lies elsewhere.
ESCAPED = 15
_FLIPPED = 16

#: Of an element, the lower so many bytes are stored as they are,
MANTISSA_BYTES = {
    columns.DTYPE_BF16: 0,
    columns.DTYPE_FP16: 1,
    columns.DTYPE_FP32: 2,
    columns.DTYPE_E4M3: 0,
    columns.DTYPE_E5M2: 0,
}
#: and so many bits above them as planes.
MANTISSA_PLANES = {
    columns.DTYPE_BF16: 7,
    columns.DTYPE_FP16: 2,
    columns.DTYPE_FP32: 7,
    columns.DTYPE_E4M3: 3,
    columns.DTYPE_E5M2: 2,
}

_KINDS = {1: LANES_8, 2: LANES_16, 4: LANES_32}


def plane_of_signs(dtype: int) -> Any:
    """``plane_of_signs(dtype)(source)``: the signs of a group."""
    kind = _KINDS[ITEM_BYTES[dtype]]

    def build(builder: Any, source: Any) -> Any:
        return bit(builder, load(builder, source, kind), 8 * ITEM_BYTES[dtype] - 1)

    return operation(1, types.int64, build)


def split_mantissa(dtype: int) -> Any:
    """``split_mantissa(dtype)(source, to)``: the mantissas of a group, packed."""
    item, kept, planes = ITEM_BYTES[dtype], MANTISSA_BYTES[dtype], MANTISSA_PLANES[dtype]

    def build(builder: Any, source: Any, to: Any) -> None:
        vector = load(builder, source, _KINDS[item])
        for number in range(planes):
            store(builder, bit(builder, vector, 8 * kept + number), plus(builder, to, 8 * number))
        if kept:
            store(builder, narrow(builder, vector, _KINDS[kept]), plus(builder, to, 8 * planes))

    return operation(2, types.void, build)


def join_signed(dtype: int) -> Any:
    """``join_signed(dtype)(to, exponents, signs, mantissas)``: put a group together again."""
    item, kept, planes = ITEM_BYTES[dtype], MANTISSA_BYTES[dtype], MANTISSA_PLANES[dtype]
    kind = _KINDS[item]

    def wide(builder: Any, vector: Any) -> Any:
        return vector if vector.type == kind else builder.zext(vector, kind)

    def build(builder: Any, to: Any, exponent: Any, signs: Any, mantissas: Any) -> None:
        vector = wide(builder, load(builder, exponent, LANES_8))
        vector = builder.shl(vector, splat(kind, 8 * kept + planes))
        sign = wide(builder, load(builder, signs, LANES_8))
        vector = builder.or_(vector, builder.shl(sign, splat(kind, 8 * (item - 1))))
        for number in range(planes):
            word = load(builder, plus(builder, mantissas, 8 * number), I64)
            value = 1 << (8 * kept + number)
            vector = builder.or_(vector, spread(builder, word, kind, value))
        if kept:
            low = load(builder, plus(builder, mantissas, 8 * planes), _KINDS[kept])
            vector = builder.or_(vector, wide(builder, low))
        store(builder, vector, to)

    return operation(4, types.void, build)


def _build_symbols(
    builder: Any, exponents: Any, base: Any, single: Any, flipped: Any, to: Any
) -> None:
    code = builder.sub(base_at(builder, base, single), load(builder, exponents, LANES_8))
    most = splat(LANES_8, ESCAPED)
    code = builder.select(builder.icmp_unsigned("<", code, most), code, most)
    store(builder, builder.or_(code, spread(builder, flipped, LANES_8, _FLIPPED)), to)


#: ``symbols_of(exponents, base, single, flipped, to)``: symbols of a group, out of its
#: exponents, its bases (``single``: the first is that of all lanes) and the plane of the signs
#: that are not as before.
symbols_of = operation(5, types.void, _build_symbols)


def _build_exponents(builder: Any, symbols: Any, base: Any, single: Any, to: Any) -> Any:
    code = masked(builder, load(builder, symbols, LANES_8), 15)
    store(builder, builder.sub(base_at(builder, base, single), code), to)
    return plane(builder, builder.icmp_unsigned("==", code, splat(LANES_8, ESCAPED)))


#: ``exponents_of(symbols, base, single, to)``: exponents of a group but for its escapes; gives
#: the plane of these.
exponents_of = operation(4, types.int64, _build_exponents)


def _build_signs(builder: Any, symbols: Any, before: Any, to: Any) -> None:
    flips = masked(builder, load(builder, symbols, LANES_8), _FLIPPED)
    flips = builder.shl(flips, ir.Constant(LANES_8, [3] * LANES_8.count))
    store(builder, builder.xor(flips, load(builder, before, LANES_8)), to)


#: ``signs_of(symbols, before, to)``: signs of a group, 0x80 or 0, out of those before them.
signs_of = operation(3, types.void, _build_signs)
