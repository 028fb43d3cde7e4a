"""Sixty-four lanes of bytes at a time: what the exact coders do to groups of elements.

A group is 64 elements that follow each other. Its exponents are 64 bytes; bit ``i`` of a
plane, a 64-bit word, belongs to element ``i``. The operations are written as vectors of the
compiler's own language, which it maps to what the processor has, except that bytes are
spread and gathered under a mask one by one where the processor cannot do that in one go.
All arguments are ``int64``; addresses need no alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lifeboat_cache.kernels import codec_layout as columns

__all__ = [
    "HAS_EXPAND",
    "ITEM_BYTES",
    "LANES",
    "MAX_PLANES",
    "REST_BYTES",
    "SHIFTS",
    "at_distance",
    "beyond",
    "count_ones",
    "escapes",
    "expand",
    "exponents",
    "first_one",
    "greatest",
    "join",
    "lower_bases",
    "maximum_of_columns",
    "planes_of",
    "split_rest",
    "squeeze",
    "uncode",
]

LANES = 64
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

_I1 = ir.IntType(1)
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_B64 = ir.VectorType(_I1, LANES)
_V8 = ir.VectorType(_I8, LANES)
_V16 = ir.VectorType(_I16, LANES)
_V32 = ir.VectorType(_I32, LANES)

#: Whether the processor spreads bytes under a mask in one go.
HAS_EXPAND = bool(llvm.get_host_cpu_features().get("avx512vbmi2", False))


def _operation(count: int, result: Any, build: Callable[..., Any]) -> Any:
    """An operation on ``count`` integers out of a function that builds its instructions."""

    def generator(signature: Any) -> tuple[Any, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers = [
                context.cast(builder, value, kind, types.int64)
                for value, kind in zip(arguments, signature.args, strict=True)
            ]
            made = build(builder, *numbers)
            return context.get_dummy_value() if made is None else made

        return signature, generate

    def one(typing_context: Any, a: Any) -> Any:  # noqa: ARG001 (numba looks at the names)
        return generator(result(a))

    def two(typing_context: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b))

    def three(typing_context: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b, c))

    def four(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b, c, d))

    def five(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b, c, d, e))

    return intrinsic((one, two, three, four, five)[count - 1])


def _splat(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def _plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(_I64, offset))


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _alike(builder: Any, number: Any) -> Any:
    """A byte, the lower one of a number, in all lanes."""
    first = builder.insert_element(
        ir.Constant(_V8, ir.Undefined), builder.trunc(number, _I8), ir.Constant(_I32, 0)
    )
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(_V8, ir.Undefined), lanes)


def _plane(builder: Any, lanes: Any) -> Any:
    return builder.bitcast(lanes, _I64)


def _bit(builder: Any, vector: Any, bit: int) -> Any:
    """The plane of one bit of every lane."""
    kept = builder.and_(vector, _splat(vector.type, 1 << bit))
    return _plane(builder, builder.icmp_unsigned("!=", kept, _splat(vector.type, 0)))


def _spread(builder: Any, word: Any, kind: Any, value: int) -> Any:
    """``value`` in the lanes whose bit is set in a word, 0 in the others."""
    lanes = builder.bitcast(word, _B64)
    return builder.select(lanes, _splat(kind, value), _splat(kind, 0))


def _population(builder: Any, word: Any) -> Any:
    return _call(builder, "llvm.ctpop.i64", _I64, [word])


count_ones = _operation(1, types.int64, _population)
first_one = _operation(
    1,
    types.int64,
    lambda builder, word: _call(builder, "llvm.cttz.i64", _I64, [word, ir.Constant(_I1, 0)]),
)


# Elements apart and together


def _elements(builder: Any, dtype: int, address: Any) -> Any:
    kind = {1: _V8, 2: _V16, 4: _V32}[ITEM_BYTES[dtype]]
    return _load(builder, address, kind)


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


def _shift(builder: Any, vector: Any, bits: int) -> Any:
    return builder.lshr(vector, _splat(vector.type, bits))


def _mask(builder: Any, vector: Any, bits: int) -> Any:
    return builder.and_(vector, _splat(vector.type, bits))


def _narrow(builder: Any, vector: Any, kind: Any) -> Any:
    return vector if vector.type == kind else builder.trunc(vector, kind)


def exponents(dtype: int) -> Any:
    """``exponents(dtype)(source, to)``: the exponents of a group, as 64 bytes."""

    def build(builder: Any, source: Any, to: Any) -> None:
        vector = _shift(builder, _elements(builder, dtype, source), _MANTISSA[dtype])
        vector = _narrow(builder, _mask(builder, vector, (1 << _EXPONENT[dtype]) - 1), _V8)
        _store(builder, vector, to)

    return _operation(2, types.void, build)


def _rest_byte(builder: Any, vector: Any) -> Any:
    """Sign and upper seven bits of the mantissa of 16-bit lanes, as bytes."""
    sign = _mask(builder, _shift(builder, vector, 8), 0x80)
    return _narrow(builder, builder.or_(sign, _mask(builder, vector, 0x7F)), _V8)


def split_rest(dtype: int) -> Any:
    """``split_rest(dtype)(source, to)``: what of a group is not its exponents, packed."""

    def build(builder: Any, source: Any, to: Any) -> None:
        vector = _elements(builder, dtype, source)
        if dtype == columns.DTYPE_BF16:
            _store(builder, _rest_byte(builder, vector), to)
        elif dtype == columns.DTYPE_FP16:
            for place, bit in enumerate((8, 9, 15)):
                _store(builder, _bit(builder, vector, bit), _plus(builder, to, 8 * place))
            _store(builder, builder.trunc(vector, _V8), _plus(builder, to, 24))
        elif dtype == columns.DTYPE_FP32:
            upper = builder.trunc(_shift(builder, vector, 16), _V16)
            _store(builder, _rest_byte(builder, upper), to)
            _store(builder, builder.trunc(vector, _V16), _plus(builder, to, 64))
        elif dtype == columns.DTYPE_E4M3:
            sign = _mask(builder, _shift(builder, vector, 4), 8)
            both = builder.or_(sign, _mask(builder, vector, 7))
            low = _half(builder, both, 0)
            high = builder.shl(_half(builder, both, 32), _splat(low.type, 4))
            _store(builder, builder.or_(low, high), to)
        else:
            for place, bit in enumerate((0, 1, 7)):
                _store(builder, _bit(builder, vector, bit), _plus(builder, to, 8 * place))

    return _operation(2, types.void, build)


def _half(builder: Any, vector: Any, first: int) -> Any:
    picked = ir.Constant(ir.VectorType(_I32, 32), list(range(first, first + 32)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), picked)


def _with_rest_byte(builder: Any, exponent: Any, rest: Any) -> Any:
    """16-bit lanes out of exponents and what :func:`_rest_byte` gave."""
    wide = builder.zext(rest, _V16)
    sign = builder.shl(_mask(builder, wide, 0x80), _splat(_V16, 8))
    upper = builder.shl(builder.zext(exponent, _V16), _splat(_V16, 7))
    return builder.or_(builder.or_(sign, _mask(builder, wide, 0x7F)), upper)


def _joined(builder: Any, dtype: int, exponent: Any, rest: Any) -> Any:
    if dtype == columns.DTYPE_BF16:
        return _with_rest_byte(builder, exponent, _load(builder, rest, _V8))
    if dtype == columns.DTYPE_FP16:
        vector = builder.zext(_load(builder, _plus(builder, rest, 24), _V8), _V16)
        for place, bit in enumerate((8, 9, 15)):
            word = _load(builder, _plus(builder, rest, 8 * place), _I64)
            vector = builder.or_(vector, _spread(builder, word, _V16, 1 << bit))
        upper = builder.shl(builder.zext(exponent, _V16), _splat(_V16, 10))
        return builder.or_(vector, upper)
    if dtype == columns.DTYPE_FP32:
        upper = _with_rest_byte(builder, exponent, _load(builder, rest, _V8))
        upper = builder.shl(builder.zext(upper, _V32), _splat(_V32, 16))
        lower = builder.zext(_load(builder, _plus(builder, rest, 64), _V16), _V32)
        return builder.or_(upper, lower)
    if dtype == columns.DTYPE_E4M3:
        packed = _load(builder, rest, ir.VectorType(_I8, 32))
        every = ir.Constant(ir.VectorType(_I32, 64), list(range(64)))
        both = builder.shuffle_vector(_mask(builder, packed, 15), _shift(builder, packed, 4), every)
        sign = builder.shl(_mask(builder, both, 8), _splat(_V8, 4))
        upper = builder.shl(exponent, _splat(_V8, 3))
        return builder.or_(builder.or_(sign, _mask(builder, both, 7)), upper)
    vector = builder.shl(exponent, _splat(_V8, 2))
    for place, bit in enumerate((0, 1, 7)):
        word = _load(builder, _plus(builder, rest, 8 * place), _I64)
        vector = builder.or_(vector, _spread(builder, word, _V8, 1 << bit))
    return vector


def join(dtype: int) -> Any:
    """``join(dtype)(to, exponents, rest)``: put a group together again."""

    def build(builder: Any, to: Any, exponent: Any, rest: Any) -> None:
        vector = _joined(builder, dtype, _load(builder, exponent, _V8), rest)
        _store(builder, vector, to)

    return _operation(3, types.void, build)


# Codes: how far an exponent lies below its base, or all ones


def _base(builder: Any, address: Any, single: Any) -> Any:
    """64 bases at an address, or one for all lanes."""
    alike = _alike(builder, _load(builder, address, _I8))
    wanted = builder.icmp_unsigned("!=", single, ir.Constant(_I64, 0))
    return builder.select(wanted, alike, _load(builder, address, _V8))


def _read_planes(builder: Any, planes: Any, width: Any) -> tuple[list[Any], Any]:
    """Planes of a code (0 where the code has fewer), and the plane of the escapes."""
    words = []
    escapes = None
    for number in range(MAX_PLANES):
        there = builder.icmp_unsigned("<", ir.Constant(_I64, number), width)
        # Within the group's bytes in any case: what is not a plane is its rest.
        word = _load(builder, _plus(builder, planes, 8 * number), _I64)
        words.append(builder.select(there, word, ir.Constant(_I64, 0)))
        among = builder.select(there, word, ir.Constant(_I64, -1))
        escapes = among if escapes is None else builder.and_(escapes, among)
    return words, escapes


def _escapes(builder: Any, planes: Any, width: Any) -> Any:
    return _read_planes(builder, planes, width)[1]


#: ``escapes(planes, width)``: the plane of the escapes.
escapes = _operation(2, types.int64, _escapes)


def _uncoded(builder: Any, planes: Any, width: Any, base: Any) -> tuple[Any, Any]:
    words, escaped = _read_planes(builder, planes, width)
    exponent = base
    for number, word in enumerate(words):
        exponent = builder.sub(exponent, _spread(builder, word, _V8, 1 << number))
    return exponent, escaped


def _build_uncode(builder: Any, to: Any, planes: Any, width: Any, base: Any, single: Any) -> None:
    exponent, _ = _uncoded(builder, planes, width, _base(builder, base, single))
    _store(builder, exponent, to)


#: ``uncode(to, planes, width, base, single)``: exponents of a group but for its escapes.
uncode = _operation(5, types.void, _build_uncode)


def expand(dtype: int) -> Any:
    """``expand(dtype)(to, planes, base, escaped, shape)``: a whole group out of its codes.

    ``shape`` is the number of planes, plus 16 if there is one base for all lanes. Only for
    processors with :data:`HAS_EXPAND`.
    """

    def build(builder: Any, to: Any, planes: Any, base: Any, escaped: Any, shape: Any) -> None:
        width = builder.and_(shape, ir.Constant(_I64, 15))
        single = builder.lshr(shape, ir.Constant(_I64, 4))
        exponent, mask = _uncoded(builder, planes, width, _base(builder, base, single))
        exponent = _call(
            builder,
            "llvm.masked.expandload.v64i8",
            _V8,
            [
                builder.inttoptr(escaped, _I8.as_pointer()),
                builder.bitcast(mask, _B64),
                exponent,
            ],
        )
        rest = builder.add(planes, builder.shl(width, ir.Constant(_I64, 3)))
        _store(builder, _joined(builder, dtype, exponent, rest), to)

    return _operation(5, types.void, build)


def _build_planes(builder: Any, exponent: Any, base: Any, shape: Any, lanes: Any, to: Any) -> Any:
    width = builder.and_(shape, ir.Constant(_I64, 15))
    single = builder.lshr(shape, ir.Constant(_I64, 4))
    code = builder.sub(_base(builder, base, single), _load(builder, exponent, _V8))
    most = builder.sub(builder.shl(ir.Constant(_I64, 1), width), ir.Constant(_I64, 1))
    limit = _alike(builder, most)
    escaped = builder.icmp_unsigned(">=", code, limit)
    code = builder.select(escaped, limit, code)
    # The fourth plane is written even if the code is narrower: the rest comes over it.
    for number in range(MAX_PLANES):
        word = builder.and_(_bit(builder, code, number), lanes)
        _store(builder, word, _plus(builder, to, 8 * number))
    return builder.and_(_plane(builder, escaped), lanes)


#: ``planes_of(exponents, base, shape, lanes, to)``: write the planes of a group's codes, with
#: zeros outside of ``lanes``; gives the plane of the escapes. It writes MAX_PLANES words.
planes_of = _operation(5, types.int64, _build_planes)


def _build_squeeze(builder: Any, source: Any, mask: Any, to: Any) -> None:
    picked = _call(
        builder,
        "llvm.experimental.vector.compress.v64i8",
        _V8,
        [
            _load(builder, source, _V8),
            builder.bitcast(mask, _B64),
            ir.Constant(_V8, ir.Undefined),
        ],
    )
    _store(builder, picked, to)


#: ``squeeze(source, mask, to)``: the bytes under a mask, one after the other; writes 64 bytes.
#: Only for processors with :data:`HAS_EXPAND`.
squeeze = _operation(3, types.void, _build_squeeze)


# Bases


def _build_maximum(builder: Any, source: Any, stride: Any, rows: Any, to: Any) -> None:
    most = cgutils.alloca_once_value(builder, _splat(_V8, 0))
    with cgutils.for_range(builder, rows) as loop:
        row = _load(builder, builder.add(source, builder.mul(loop.index, stride)), _V8)
        now = builder.load(most)
        larger = builder.icmp_unsigned(">", row, now)
        builder.store(builder.select(larger, row, now), most)
    _store(builder, builder.load(most), to)


#: ``maximum_of_columns(source, stride, rows, to)``: of 64 columns of bytes.
maximum_of_columns = _operation(4, types.void, _build_maximum)


def _build_beyond(builder: Any, source: Any, base: Any, limit: Any, single: Any) -> Any:
    distance = builder.sub(_base(builder, base, single), _load(builder, source, _V8))
    return _plane(builder, builder.icmp_unsigned(">=", distance, _alike(builder, limit)))


#: ``beyond(source, base, limit, single)``: plane of the lanes at least ``limit`` below their
#: base.
beyond = _operation(4, types.int64, _build_beyond)


def _build_at(builder: Any, source: Any, base: Any, distance: Any) -> Any:
    found = builder.sub(_alike(builder, base), _load(builder, source, _V8))
    return _plane(builder, builder.icmp_unsigned("==", found, _alike(builder, distance)))


#: ``at_distance(source, base, distance)``: plane of the lanes that lie so far below ``base``.
at_distance = _operation(3, types.int64, _build_at)


def _build_greatest(builder: Any, source: Any) -> Any:
    found = _call(builder, "llvm.vector.reduce.umax.v64i8", _I8, [_load(builder, source, _V8)])
    return builder.zext(found, _I64)


#: ``greatest(source)``: the greatest of 64 bytes.
greatest = _operation(1, types.int64, _build_greatest)


def _build_lower(builder: Any, source: Any, stride: Any, rows: Any, bases: Any, width: Any) -> None:
    top = _load(builder, bases, _V8)
    codes = builder.sub(builder.shl(ir.Constant(_I64, 1), width), ir.Constant(_I64, 1))
    zero = _splat(_V8, 0)
    lost = [cgutils.alloca_once_value(builder, zero) for _ in range(SHIFTS)]
    gained = [cgutils.alloca_once_value(builder, zero) for _ in range(SHIFTS)]
    with cgutils.for_range(builder, rows) as loop:
        row = _load(builder, builder.add(source, builder.mul(loop.index, stride)), _V8)
        distance = builder.sub(top, row)
        for shift in range(SHIFTS):
            beyond_them = _alike(builder, _plus(builder, codes, shift))
            for count, value in ((lost, _splat(_V8, shift)), (gained, beyond_them)):
                equal = builder.icmp_unsigned("==", distance, value)
                now = builder.load(count[shift])
                more = builder.select(equal, _splat(_V8, 1), zero)
                now = _call(builder, "llvm.uadd.sat.v64i8", _V8, [now, more])
                builder.store(now, count[shift])
    score = _splat(_V16, 0)
    best = _splat(_V16, 0)
    shifts = zero
    for shift in range(SHIFTS):
        plus = builder.zext(builder.load(gained[shift]), _V16)
        minus = builder.zext(builder.load(lost[shift]), _V16)
        score = builder.add(score, builder.sub(plus, minus))
        better = builder.icmp_signed(">", score, best)
        best = builder.select(better, score, best)
        shifts = builder.select(better, _splat(_V8, shift + 1), shifts)
    _store(builder, builder.sub(top, shifts), bases)


#: ``lower_bases(source, stride, rows, bases, width)``: move the bases of 64 columns from their
#: maxima to where the fewest escape. It counts up to 255.
lower_bases = _operation(5, types.void, _build_lower)
