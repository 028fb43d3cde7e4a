"""Sixty-four lanes of bytes at a time: what the exact coders do to groups of elements.

A group is 64 elements that follow each other. Its exponents are 64 bytes; bit ``i`` of a
plane, a 64-bit word, belongs to element ``i``. Some operations spread or gather bytes under a
mask: where the processor cannot do that (``vectors.HAS_EXPAND``), they are right but slow.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from lifeboat_cache.kernels import codec_layout as columns
from lifeboat_cache.kernels.vectors import (
    I8,
    I32,
    I64,
    LANES_1,
    LANES_8,
    LANES_16,
    LANES_32,
    alike,
    bit,
    call,
    load,
    masked,
    narrow,
    operation,
    plane,
    plus,
    shifted,
    splat,
    spread,
    store,
)

__all__ = [
    "ITEM_BYTES",
    "MAX_PLANES",
    "REST_BYTES",
    "SHIFTS",
    "at_distance",
    "base_at",
    "beyond",
    "escapes",
    "expand",
    "exponents",
    "greatest",
    "join",
    "lower_bases",
    "maximum_of_columns",
    "planes_of",
    "split_rest",
    "squeeze",
    "uncode",
]

#: Most bits of a code.
MAX_PLANES = 4
#: How far below its maximum a base may lie.
SHIFTS = 3

#: Bytes of an element, by dtype.
ITEM_BYTES = {
    columns.DTYPE_BF16: 2,
    columns.DTYPE_FP16: 2,
    columns.DTYPE_FP32: 4,
    columns.DTYPE_E4M3: 1,
    columns.DTYPE_E5M2: 1,
}

#: Bytes of a whole group besides exponents, by dtype.
REST_BYTES = {
    columns.DTYPE_BF16: 64,
    columns.DTYPE_FP16: 24 + 64,
    columns.DTYPE_FP32: 64 + 128,
    columns.DTYPE_E4M3: 32,
    columns.DTYPE_E5M2: 24,
}

# Elements apart and together


def _elements(builder: Any, dtype: int, address: Any) -> Any:
    kind = {1: LANES_8, 2: LANES_16, 4: LANES_32}[ITEM_BYTES[dtype]]
    return load(builder, address, kind)


#: Bits of the mantissa and of the exponent.
_MANTISSA = {
    columns.DTYPE_BF16: 7,
    columns.DTYPE_FP16: 10,
    columns.DTYPE_FP32: 23,
    columns.DTYPE_E4M3: 3,
    columns.DTYPE_E5M2: 2,
}
_EXPONENT = {
    columns.DTYPE_BF16: 8,
    columns.DTYPE_FP16: 5,
    columns.DTYPE_FP32: 8,
    columns.DTYPE_E4M3: 4,
    columns.DTYPE_E5M2: 5,
}


def exponents(dtype: int) -> Any:
    """``exponents(dtype)(source, to)``: the exponents of a group, as 64 bytes."""

    def build(builder: Any, source: Any, to: Any) -> None:
        vector = shifted(builder, _elements(builder, dtype, source), _MANTISSA[dtype])
        vector = narrow(builder, masked(builder, vector, (1 << _EXPONENT[dtype]) - 1), LANES_8)
        store(builder, vector, to)

    return operation(2, types.void, build)


def _rest_byte(builder: Any, vector: Any) -> Any:
    """Sign and upper seven bits of the mantissa of 16-bit lanes, as bytes."""
    sign = masked(builder, shifted(builder, vector, 8), 0x80)
    return narrow(builder, builder.or_(sign, masked(builder, vector, 0x7F)), LANES_8)


def split_rest(dtype: int) -> Any:
    """``split_rest(dtype)(source, to)``: what of a group is not its exponents, packed."""

    def build(builder: Any, source: Any, to: Any) -> None:
        vector = _elements(builder, dtype, source)
        if dtype == columns.DTYPE_BF16:
            store(builder, _rest_byte(builder, vector), to)
        elif dtype == columns.DTYPE_FP16:
            for place, number in enumerate((8, 9, 15)):
                store(builder, bit(builder, vector, number), plus(builder, to, 8 * place))
            store(builder, builder.trunc(vector, LANES_8), plus(builder, to, 24))
        elif dtype == columns.DTYPE_FP32:
            upper = builder.trunc(shifted(builder, vector, 16), LANES_16)
            store(builder, _rest_byte(builder, upper), to)
            store(builder, builder.trunc(vector, LANES_16), plus(builder, to, 64))
        elif dtype == columns.DTYPE_E4M3:
            sign = masked(builder, shifted(builder, vector, 4), 8)
            both = builder.or_(sign, masked(builder, vector, 7))
            low = _half(builder, both, 0)
            high = builder.shl(_half(builder, both, 32), splat(low.type, 4))
            store(builder, builder.or_(low, high), to)
        else:
            for place, number in enumerate((0, 1, 7)):
                store(builder, bit(builder, vector, number), plus(builder, to, 8 * place))

    return operation(2, types.void, build)


def _half(builder: Any, vector: Any, first: int) -> Any:
    picked = ir.Constant(ir.VectorType(I32, 32), list(range(first, first + 32)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), picked)


def _with_rest_byte(builder: Any, exponent: Any, rest: Any) -> Any:
    """16-bit lanes out of exponents and what :func:`_rest_byte` gave."""
    wide = builder.zext(rest, LANES_16)
    sign = builder.shl(masked(builder, wide, 0x80), splat(LANES_16, 8))
    upper = builder.shl(builder.zext(exponent, LANES_16), splat(LANES_16, 7))
    return builder.or_(builder.or_(sign, masked(builder, wide, 0x7F)), upper)


def _joined(builder: Any, dtype: int, exponent: Any, rest: Any) -> Any:
    if dtype == columns.DTYPE_BF16:
        return _with_rest_byte(builder, exponent, load(builder, rest, LANES_8))
    if dtype == columns.DTYPE_FP16:
        vector = builder.zext(load(builder, plus(builder, rest, 24), LANES_8), LANES_16)
        for place, number in enumerate((8, 9, 15)):
            word = load(builder, plus(builder, rest, 8 * place), I64)
            vector = builder.or_(vector, spread(builder, word, LANES_16, 1 << number))
        upper = builder.shl(builder.zext(exponent, LANES_16), splat(LANES_16, 10))
        return builder.or_(vector, upper)
    if dtype == columns.DTYPE_FP32:
        upper = _with_rest_byte(builder, exponent, load(builder, rest, LANES_8))
        upper = builder.shl(builder.zext(upper, LANES_32), splat(LANES_32, 16))
        lower = builder.zext(load(builder, plus(builder, rest, 64), LANES_16), LANES_32)
        return builder.or_(upper, lower)
    if dtype == columns.DTYPE_E4M3:
        packed = load(builder, rest, ir.VectorType(I8, 32))
        every = ir.Constant(ir.VectorType(I32, 64), list(range(64)))
        both = builder.shuffle_vector(
            masked(builder, packed, 15), shifted(builder, packed, 4), every
        )
        sign = builder.shl(masked(builder, both, 8), splat(LANES_8, 4))
        upper = builder.shl(exponent, splat(LANES_8, 3))
        return builder.or_(builder.or_(sign, masked(builder, both, 7)), upper)
    vector = builder.shl(exponent, splat(LANES_8, 2))
    for place, number in enumerate((0, 1, 7)):
        word = load(builder, plus(builder, rest, 8 * place), I64)
        vector = builder.or_(vector, spread(builder, word, LANES_8, 1 << number))
    return vector


def join(dtype: int) -> Any:
    """``join(dtype)(to, exponents, rest)``: put a group together again."""

    def build(builder: Any, to: Any, exponent: Any, rest: Any) -> None:
        vector = _joined(builder, dtype, load(builder, exponent, LANES_8), rest)
        store(builder, vector, to)

    return operation(3, types.void, build)


# Codes: how far an exponent lies below its base, or all ones


def base_at(builder: Any, address: Any, single: Any) -> Any:
    """64 bases at an address, or one for all lanes."""
    same = alike(builder, load(builder, address, I8))
    wanted = builder.icmp_unsigned("!=", single, ir.Constant(I64, 0))
    return builder.select(wanted, same, load(builder, address, LANES_8))


def _read_planes(builder: Any, planes: Any, width: Any) -> tuple[list[Any], Any]:
    """Planes of a code (0 where the code has fewer), and the plane of the escapes."""
    words = []
    escapes = None
    for number in range(MAX_PLANES):
        there = builder.icmp_unsigned("<", ir.Constant(I64, number), width)
        # Within the group's bytes in any case: what is not a plane is its rest.
        word = load(builder, plus(builder, planes, 8 * number), I64)
        words.append(builder.select(there, word, ir.Constant(I64, 0)))
        among = builder.select(there, word, ir.Constant(I64, -1))
        escapes = among if escapes is None else builder.and_(escapes, among)
    return words, escapes


def _escapes(builder: Any, planes: Any, width: Any) -> Any:
    return _read_planes(builder, planes, width)[1]


#: ``escapes(planes, width)``: the plane of the escapes.
escapes = operation(2, types.int64, _escapes)


def _uncoded(builder: Any, planes: Any, width: Any, base: Any) -> tuple[Any, Any]:
    words, escaped = _read_planes(builder, planes, width)
    exponent = base
    for number, word in enumerate(words):
        exponent = builder.sub(exponent, spread(builder, word, LANES_8, 1 << number))
    return exponent, escaped


def _build_uncode(builder: Any, to: Any, planes: Any, width: Any, base: Any, single: Any) -> None:
    exponent, _ = _uncoded(builder, planes, width, base_at(builder, base, single))
    store(builder, exponent, to)


#: ``uncode(to, planes, width, base, single)``: exponents of a group but for its escapes.
uncode = operation(5, types.void, _build_uncode)


def expand(dtype: int) -> Any:
    """``expand(dtype)(to, planes, base, escaped, shape)``: a whole group out of its codes.

    ``shape`` is the number of planes, plus 16 if there is one base for all lanes. Only for
    processors with :data:`HAS_EXPAND`.
    """

    def build(builder: Any, to: Any, planes: Any, base: Any, escaped: Any, shape: Any) -> None:
        width = builder.and_(shape, ir.Constant(I64, 15))
        single = builder.lshr(shape, ir.Constant(I64, 4))
        exponent, mask = _uncoded(builder, planes, width, base_at(builder, base, single))
        exponent = call(
            builder,
            "llvm.masked.expandload.v64i8",
            LANES_8,
            [
                builder.inttoptr(escaped, I8.as_pointer()),
                builder.bitcast(mask, LANES_1),
                exponent,
            ],
        )
        rest = builder.add(planes, builder.shl(width, ir.Constant(I64, 3)))
        store(builder, _joined(builder, dtype, exponent, rest), to)

    return operation(5, types.void, build)


def _build_planes(builder: Any, exponent: Any, base: Any, shape: Any, lanes: Any, to: Any) -> Any:
    width = builder.and_(shape, ir.Constant(I64, 15))
    single = builder.lshr(shape, ir.Constant(I64, 4))
    code = builder.sub(base_at(builder, base, single), load(builder, exponent, LANES_8))
    most = builder.sub(builder.shl(ir.Constant(I64, 1), width), ir.Constant(I64, 1))
    limit = alike(builder, most)
    escaped = builder.icmp_unsigned(">=", code, limit)
    code = builder.select(escaped, limit, code)
    # The fourth plane is written even if the code is narrower: the rest comes over it.
    for number in range(MAX_PLANES):
        word = builder.and_(bit(builder, code, number), lanes)
        store(builder, word, plus(builder, to, 8 * number))
    return builder.and_(plane(builder, escaped), lanes)


#: ``planes_of(exponents, base, shape, lanes, to)``: write the planes of a group's codes, with
#: zeros outside of ``lanes``; gives the plane of the escapes. It writes MAX_PLANES words.
planes_of = operation(5, types.int64, _build_planes)


def _build_squeeze(builder: Any, source: Any, mask: Any, to: Any) -> None:
    picked = call(
        builder,
        "llvm.experimental.vector.compress.v64i8",
        LANES_8,
        [
            load(builder, source, LANES_8),
            builder.bitcast(mask, LANES_1),
            ir.Constant(LANES_8, ir.Undefined),
        ],
    )
    store(builder, picked, to)


#: ``squeeze(source, mask, to)``: the bytes under a mask, one after the other; writes 64 bytes.
#: Only for processors with :data:`HAS_EXPAND`.
squeeze = operation(3, types.void, _build_squeeze)


# Bases


def _build_maximum(builder: Any, source: Any, stride: Any, rows: Any, to: Any) -> None:
    most = cgutils.alloca_once_value(builder, splat(LANES_8, 0))
    with cgutils.for_range(builder, rows) as loop:
        row = load(builder, builder.add(source, builder.mul(loop.index, stride)), LANES_8)
        now = builder.load(most)
        larger = builder.icmp_unsigned(">", row, now)
        builder.store(builder.select(larger, row, now), most)
    store(builder, builder.load(most), to)


#: ``maximum_of_columns(source, stride, rows, to)``: of 64 columns of bytes.
maximum_of_columns = operation(4, types.void, _build_maximum)


def _build_beyond(builder: Any, source: Any, base: Any, limit: Any, single: Any) -> Any:
    distance = builder.sub(base_at(builder, base, single), load(builder, source, LANES_8))
    return plane(builder, builder.icmp_unsigned(">=", distance, alike(builder, limit)))


#: ``beyond(source, base, limit, single)``: plane of the lanes at least ``limit`` below their
#: base.
beyond = operation(4, types.int64, _build_beyond)


def _build_at(builder: Any, source: Any, base: Any, distance: Any) -> Any:
    found = builder.sub(alike(builder, base), load(builder, source, LANES_8))
    return plane(builder, builder.icmp_unsigned("==", found, alike(builder, distance)))


#: ``at_distance(source, base, distance)``: plane of the lanes that lie so far below ``base``.
at_distance = operation(3, types.int64, _build_at)


def _build_greatest(builder: Any, source: Any) -> Any:
    found = call(builder, "llvm.vector.reduce.umax.v64i8", I8, [load(builder, source, LANES_8)])
    return builder.zext(found, I64)


#: ``greatest(source)``: the greatest of 64 bytes.
greatest = operation(1, types.int64, _build_greatest)


def _build_lower(builder: Any, source: Any, stride: Any, rows: Any, bases: Any, width: Any) -> None:
    top = load(builder, bases, LANES_8)
    codes = builder.sub(builder.shl(ir.Constant(I64, 1), width), ir.Constant(I64, 1))
    zero = splat(LANES_8, 0)
    lost = [cgutils.alloca_once_value(builder, zero) for _ in range(SHIFTS)]
    gained = [cgutils.alloca_once_value(builder, zero) for _ in range(SHIFTS)]
    with cgutils.for_range(builder, rows) as loop:
        row = load(builder, builder.add(source, builder.mul(loop.index, stride)), LANES_8)
        distance = builder.sub(top, row)
        for shift in range(SHIFTS):
            beyond_them = alike(builder, plus(builder, codes, shift))
            for count, value in ((lost, splat(LANES_8, shift)), (gained, beyond_them)):
                equal = builder.icmp_unsigned("==", distance, value)
                now = builder.load(count[shift])
                more = builder.select(equal, splat(LANES_8, 1), zero)
                now = call(builder, "llvm.uadd.sat.v64i8", LANES_8, [now, more])
                builder.store(now, count[shift])
    score = splat(LANES_16, 0)
    best = splat(LANES_16, 0)
    shifts = zero
    for shift in range(SHIFTS):
        won = builder.zext(builder.load(gained[shift]), LANES_16)
        minus = builder.zext(builder.load(lost[shift]), LANES_16)
        score = builder.add(score, builder.sub(won, minus))
        better = builder.icmp_signed(">", score, best)
        best = builder.select(better, score, best)
        shifts = builder.select(better, splat(LANES_8, shift + 1), shifts)
    store(builder, builder.sub(top, shifts), bases)


#: ``lower_bases(source, stride, rows, bases, width)``: move the bases of 64 columns from their
#: maxima to where the fewest escape. It counts up to 255.
lower_bases = operation(5, types.void, _build_lower)
