"""The coder fp8: vectors of 8-bit floating-point numbers, each vector with a power of two.

What is stored, and why, stands in ``codecs/fp8.py``, the numpy twin of this module. The
loops over a vector are written as vectors of 16 to 64 lanes: the compiler maps them to what
the processor has. All arithmetic is of integers, so that no mode of the floating-point unit
changes a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, inline
from lifeboat_cache.kernels.memory import bytes_at, words_at

__all__ = ["decode", "encode"]

_REFUSED = np.int64(-1)

_I1 = ir.IntType(1)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

#: The codes of infinity and of "not a number", without sign.
_CODE_INF = 0x7E
_CODE_NAN = 0x7F

#: From the exponents of float16 to those of float32.
_REBIAS = 112


@dataclass(frozen=True)
class _Kind:
    """Elements of one dtype.

    Attributes
    ----------
    item_bits, mantissa
        Bits of an element, and how many of them are its mantissa.
    inf, nan, largest
        The bits of infinity, of the NaN that is given back, and of the largest finite number.
    least, most
        Bounds of a vector's exponent.
    """

    item_bits: int
    mantissa: int
    inf: int
    nan: int
    largest: int
    least: int
    most: int


_BF16 = _Kind(16, 7, 0x7F80, 0x7FC0, 0x7F7F, 20, 255)
_FP16 = _Kind(16, 10, 0x7C00, 0x7E00, 0x7BFF, 103, 143)
_FP32 = _Kind(32, 23, 0x7F800000, 0x7FC00000, 0x7F7FFFFF, 20, 255)


class _Lanes:
    """Vectors of one width, in the function that a builder builds."""

    def __init__(self, builder: Any, lanes: int, bits: int) -> None:
        self._builder = builder
        self.lanes = lanes
        self.bits = bits
        self.type = ir.VectorType(ir.IntType(bits), lanes)

    def all(self, number: int) -> Any:
        """The same constant in every lane."""
        return ir.Constant(self.type, [number] * self.lanes)

    def spread(self, scalar: Any) -> Any:
        """The same ``i64`` in every lane."""
        builder = self._builder
        if self.bits < 64:
            scalar = builder.trunc(scalar, self.type.element)
        nothing = ir.Constant(self.type, ir.Undefined)
        first = builder.insert_element(nothing, scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return builder.shuffle_vector(first, nothing, zeros)

    def load(self, address: Any) -> Any:
        loaded = self._builder.load(self._builder.inttoptr(address, self.type.as_pointer()))
        loaded.align = 1
        return loaded

    def store(self, value: Any, address: Any) -> None:
        builder = self._builder
        builder.store(value, builder.inttoptr(address, self.type.as_pointer())).align = 1


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _loop(builder: Any, count: Any, first: Any, body: Callable[[Any, Any], Any]) -> Any:
    """``for number in range(count): value = body(number, value)``; returns the last value."""
    before, function = builder.block, builder.function
    head = function.append_basic_block("lanes.head")
    inside = function.append_basic_block("lanes.body")
    done = function.append_basic_block("lanes.done")
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.phi(_I64)
    number.add_incoming(ir.Constant(_I64, 0), before)
    value = builder.phi(first.type)
    value.add_incoming(first, before)
    builder.cbranch(builder.icmp_signed("<", number, count), inside, done)
    builder.position_at_end(inside)
    after = body(number, value)
    number.add_incoming(builder.add(number, ir.Constant(_I64, 1)), builder.block)
    value.add_incoming(after, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return value


def _step(builder: Any, address: Any, number: Any, size: int) -> Any:
    return builder.add(address, builder.mul(number, ir.Constant(_I64, size)))


def _wrap(count: int, build: Callable[..., Any], result: Any) -> Any:
    """An intrinsic of ``count`` int64 arguments out of ``build(builder, *arguments)``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        made = build(builder, *arguments)
        return context.get_dummy_value() if made is None else made

    whole = types.int64
    if count == 2:

        def two(typing_context: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
            return result(whole, whole), generate

        return intrinsic(two)

    def five(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:  # noqa: ARG001
        return result(whole, whole, whole, whole, whole), generate

    return intrinsic(five)


def _largest(kind: _Kind, lanes: int, *, finite: bool) -> Any:
    """``largest(address, count)``: the largest magnitude of ``count`` times ``lanes`` elements.

    Magnitudes are the bits of an element without its sign. With ``finite``, what is not
    finite counts as nothing.
    """
    bits = kind.item_bits

    def build(builder: Any, address: Any, count: Any) -> Any:
        wide = _Lanes(builder, lanes, bits)

        def body(number: Any, most: Any) -> Any:
            element = wide.load(_step(builder, address, number, lanes * bits // 8))
            size = builder.and_(element, wide.all((1 << (bits - 1)) - 1))
            if finite:
                is_finite = builder.icmp_signed("<", size, wide.all(kind.inf))
                size = builder.select(is_finite, size, wide.all(0))
            return _larger(builder, size, most)

        most = _loop(builder, count, wide.all(0), body)
        half = lanes
        while half > 1:
            half //= 2
            order = [(lane + half) % lanes for lane in range(lanes)]
            shuffled = builder.shuffle_vector(
                most, most, ir.Constant(ir.VectorType(_I32, lanes), order)
            )
            most = _larger(builder, most, shuffled)
        return builder.zext(builder.extract_element(most, ir.Constant(_I32, 0)), _I64)

    return _wrap(2, build, types.int64)


def _encode_lanes(kind: _Kind, lanes: int, *, widen: bool = False) -> Any:
    """``encode_lanes(source, to, count, exponent, digits)``: codes of ``count * lanes`` elements.

    ``digits`` is the number of mantissa bits of a code. With ``widen``, elements of float16 are
    encoded as float32; without, none of the subnormal ones may become a normal code.
    """
    bits = 32 if widen else kind.item_bits
    mantissa = 23 if widen else kind.mantissa
    inf = 0x47800000 if widen else kind.inf
    narrow16 = kind is _FP16 and not widen

    def build(builder: Any, source: Any, to: Any, count: Any, exponent: Any, digits: Any) -> None:
        wide = _Lanes(builder, lanes, bits)
        items = _Lanes(builder, lanes, kind.item_bits)
        narrow = _Lanes(builder, lanes, 8)
        low = builder.sub(exponent, _top(builder, digits))
        if narrow16:
            low = builder.sub(low, ir.Constant(_I64, _REBIAS))
        base = wide.spread(low)
        base_bits = wide.spread(builder.shl(low, ir.Constant(_I64, mantissa)))
        drop = builder.sub(ir.Constant(_I64, mantissa), digits)
        least_shift = wide.spread(drop)
        shift_at_one = wide.spread(builder.add(drop, ir.Constant(_I64, 1)))
        one, implicit = wide.all(1), wide.all(1 << mantissa)

        def body(number: Any, nothing: Any) -> Any:
            element = items.load(_step(builder, source, number, lanes * kind.item_bits // 8))
            size = builder.and_(element, items.all((1 << (kind.item_bits - 1)) - 1))
            sign = builder.lshr(element, items.all(kind.item_bits - 8))
            sign = builder.and_(sign, items.all(0x80))
            if widen:
                size, sign = (
                    _widened(builder, wide, size),
                    builder.zext(sign, wide.type),
                )
            field = builder.lshr(size, wide.all(mantissa))
            hidden = implicit
            if narrow16:
                is_subnormal = builder.icmp_signed("<", size, implicit)
                hidden = builder.select(is_subnormal, wide.all(0), implicit)
                field = _larger(builder, field, one)
            field = builder.sub(field, base)
            shift = _larger(builder, builder.sub(shift_at_one, field), least_shift)
            shift = _smaller(builder, shift, wide.all(bits - 1))
            significand = builder.or_(builder.and_(size, wide.all((1 << mantissa) - 1)), hidden)
            is_normal = builder.icmp_signed(">=", field, one)
            exact = builder.select(is_normal, builder.sub(size, base_bits), significand)
            # Half of the last place, less the smallest part if the place is even: ties to even.
            odd = builder.and_(builder.lshr(exact, shift), one)
            half = builder.sub(builder.lshr(builder.shl(one, shift), one), one)
            code = builder.lshr(builder.add(builder.add(exact, half), odd), shift)
            for above, special in ((inf - 1, _CODE_INF), (inf, _CODE_NAN)):
                is_special = builder.icmp_signed(">", size, wide.all(above))
                code = builder.select(is_special, wide.all(special), code)
            code = builder.trunc(builder.or_(code, sign), narrow.type)
            narrow.store(code, _step(builder, to, number, lanes))
            return nothing

        _loop(builder, count, ir.Constant(_I1, 0), body)

    return _wrap(5, build, types.void)


def _top(builder: Any, digits: Any) -> Any:
    """The largest exponent of a code."""
    one = ir.Constant(_I64, 1)
    return builder.sub(builder.shl(one, builder.sub(ir.Constant(_I64, 7), digits)), one)


def _widened(builder: Any, wide: _Lanes, size: Any) -> Any:
    """Magnitudes of float16 as those of float32; infinity becomes 65,536."""
    size = builder.zext(size, wide.type)
    normal = builder.add(builder.shl(size, wide.all(13)), wide.all(_REBIAS << 23))
    floats = ir.VectorType(ir.FloatType(), wide.lanes)
    # Whole numbers of the smallest subnormal, 2 ** -24; they convert exactly.
    counted = builder.bitcast(builder.sitofp(size, floats), wide.type)
    subnormal = _larger(builder, builder.sub(counted, wide.all(24 << 23)), wide.all(0))
    return builder.select(builder.icmp_signed("<", size, wide.all(0x400)), subnormal, normal)


def _decode_lanes(kind: _Kind, lanes: int) -> Any:
    """``decode_lanes(source, to, count, exponent, digits)``: elements of ``count * lanes`` codes.

    The contrary of :func:`_encode_lanes`; ``exponent`` is within the bounds of the kind.
    """
    bits = kind.item_bits
    mantissa = kind.mantissa
    bias = _REBIAS if kind is _FP16 else 0

    def build(builder: Any, source: Any, to: Any, count: Any, exponent: Any, digits: Any) -> None:
        wide = _Lanes(builder, lanes, bits)
        narrow = _Lanes(builder, lanes, 8)
        low = builder.sub(exponent, _top(builder, digits))
        low = builder.sub(low, ir.Constant(_I64, bias))
        base_bits = wide.spread(builder.shl(low, ir.Constant(_I64, mantissa)))
        raise_by = wide.spread(builder.sub(ir.Constant(_I64, mantissa), digits))
        whole = builder.shl(ir.Constant(_I64, 1), digits)
        limits = [narrow.spread(builder.lshr(whole, ir.Constant(_I64, by))) for by in range(5)]
        less = [narrow.spread(builder.mul(whole, ir.Constant(_I64, by))) for by in range(1, 6)]

        def body(number: Any, nothing: Any) -> Any:
            code = narrow.load(_step(builder, source, number, lanes))
            size = builder.and_(code, narrow.all(0x7F))
            # Subnormal codes become normal ones whose exponent is below the least.
            normal, doubled = size, size
            for limit, minus in zip(limits, less, strict=True):
                doubled = builder.add(doubled, doubled)
                normal = builder.select(
                    builder.icmp_signed("<", size, limit),
                    builder.sub(doubled, minus),
                    normal,
                )
            value = builder.add(builder.shl(builder.sext(normal, wide.type), raise_by), base_bits)
            if kind is _FP16:
                value = _subnormal(builder, wide, value)
            value = _smaller(builder, value, wide.all(kind.largest))
            for special, element in (
                (0, 0),
                (_CODE_INF, kind.inf),
                (_CODE_NAN, kind.nan),
            ):
                value = builder.select(
                    builder.icmp_signed("==", size, narrow.all(special)),
                    wide.all(element),
                    value,
                )
            sign = builder.and_(builder.sext(code, wide.type), wide.all(1 << (bits - 1)))
            wide.store(builder.or_(value, sign), _step(builder, to, number, lanes * bits // 8))
            return nothing

        _loop(builder, count, ir.Constant(_I1, 0), body)

    return _wrap(5, build, types.void)


def _subnormal(builder: Any, wide: _Lanes, value: Any) -> Any:
    """Numbers of float16 whose exponent may be too small, as subnormal ones."""
    shift = builder.sub(wide.all(1), builder.ashr(value, wide.all(10)))
    shift = builder.and_(_smaller(builder, shift, wide.all(15)), wide.all(15))
    significand = builder.or_(builder.and_(value, wide.all(0x3FF)), wide.all(0x400))
    return builder.select(
        builder.icmp_signed("<", value, wide.all(0x400)),
        builder.lshr(significand, shift),
        value,
    )


@inline
def _float32_bits(size: Any) -> Any:
    """A finite magnitude of float16 as one of float32."""
    if size >= 0x400:
        return (size << 13) + (_REBIAS << 23)
    if size == 0:
        return np.int64(0)
    exponent = np.int64(_REBIAS + 1)
    while size < 0x400:
        size <<= 1
        exponent -= 1
    return (exponent << 23) | ((size & 0x3FF) << 13)


def _encoder(kind: _Kind, lanes: int) -> Any:
    """The ``encode_lanes`` that is right for every element of a dtype."""
    plain = _encode_lanes(kind, lanes)
    if kind is not _FP16:
        return plain
    widening = _encode_lanes(kind, lanes, widen=True)

    @inline
    def either(source: Any, to: Any, count: Any, exponent: Any, digits: Any) -> None:
        # The least normal code, as float16, is normal from here on.
        if exponent - (1 << (7 - digits)) >= _REBIAS:
            plain(source, to, count, exponent, digits)
        else:
            widening(source, to, count, exponent, digits)

    return either


def _functions(kind: _Kind) -> tuple[Any, Any]:
    """``encode_vectors`` and ``decode_vectors`` of a dtype."""
    largest32, largest16 = (_largest(kind, lanes, finite=False) for lanes in (32, 16))
    finite16 = _largest(kind, 16, finite=True)
    encode32, encode16 = (_encoder(kind, lanes) for lanes in (32, 16))
    decode64, decode16 = (_decode_lanes(kind, lanes) for lanes in (64, 16))
    item = kind.item_bits // 8
    inf, least, most = kind.inf, kind.least, kind.most
    is_bf16, is_fp16 = kind is _BF16, kind is _FP16

    @inline
    def exponent_of(size: Any, digits: Any) -> Any:
        """The exponent that a vector gets whose largest finite magnitude is this."""
        if is_bf16:
            size <<= 16
        elif is_fp16:
            size = _float32_bits(size)
        # What would be rounded to the code of infinity belongs to the next exponent.
        exponent = (size + (np.int64(5) << (22 - digits))) >> 23
        return min(max(exponent, np.int64(least)), np.int64(most))

    @inline
    def encode_vector(source: Any, scale: Any, to: Any, dim: Any, digits: Any, padded: Any) -> None:
        pairs, half, tail = dim // 32, (dim // 16) % 2, dim % 16
        at_half, at_tail = pairs * 32, dim - tail
        most_of = largest32(source, pairs)
        if half:
            most_of = max(most_of, largest16(source + at_half * item, half))
        if tail:
            raw.zero(padded, 64)
            raw.copy(padded, source + at_tail * item, tail * item)
            most_of = max(most_of, largest16(padded, np.int64(1)))
        if most_of >= inf:
            most_of = finite16(source, dim // 16)
            if tail:
                most_of = max(most_of, finite16(padded, np.int64(1)))
        exponent = exponent_of(most_of, digits)
        bytes_at(scale)[0] = exponent
        encode32(source, to, pairs, exponent, digits)
        if half:
            encode16(source + at_half * item, to + at_half, half, exponent, digits)
        if tail:
            encode16(padded, padded + 64, np.int64(1), exponent, digits)
            raw.copy(to + at_tail, padded + 64, tail)

    @inline
    def decode_vector(source: Any, scale: Any, to: Any, dim: Any, digits: Any, padded: Any) -> None:
        quads, halves, tail = dim // 64, (dim // 16) % 4, dim % 16
        at_half, at_tail = quads * 64, dim - tail
        exponent = min(max(np.int64(bytes_at(scale)[0]), np.int64(least)), np.int64(most))
        decode64(source, to, quads, exponent, digits)
        if halves:
            decode16(source + at_half, to + at_half * item, halves, exponent, digits)
        if tail:
            raw.zero(padded + 64, 16)
            raw.copy(padded + 64, source + at_tail, tail)
            decode16(padded + 64, padded, np.int64(1), exponent, digits)
            raw.copy(to + at_tail * item, padded, tail * item)

    @helper
    def encode_vectors(words: Any, start: Any, scale: Any, code: Any) -> None:
        dim, digits, heads = words[C.ROW_DIM], words[C.ROW_BITS], words[C.ROW_HEADS]
        step = words[C.ROW_HEAD_STRIDE]
        padded = np.int64(raw.stack(80))
        for o in range(words[C.ROW_OUTER]):
            for i in range(words[C.ROW_INNER]):
                vector = start + o * words[C.ROW_OUTER_STRIDE] + i * words[C.ROW_INNER_STRIDE]
                for _ in range(heads):
                    encode_vector(vector, scale, code, dim, digits, padded)
                    vector += step
                    scale += 1
                    code += dim

    @helper
    def decode_vectors(words: Any, start: Any, scale: Any, code: Any) -> None:
        dim, digits, heads = words[C.ROW_DIM], words[C.ROW_BITS], words[C.ROW_HEADS]
        step = words[C.ROW_HEAD_STRIDE]
        padded = np.int64(raw.stack(80))
        for o in range(words[C.ROW_OUTER]):
            for i in range(words[C.ROW_INNER]):
                vector = start + o * words[C.ROW_OUTER_STRIDE] + i * words[C.ROW_INNER_STRIDE]
                for _ in range(heads):
                    decode_vector(code, scale, vector, dim, digits, padded)
                    vector += step
                    scale += 1
                    code += dim

    return encode_vectors, decode_vectors


_encode_bf16, _decode_bf16 = _functions(_BF16)
_encode_fp16, _decode_fp16 = _functions(_FP16)
_encode_fp32, _decode_fp32 = _functions(_FP32)


@inline
def _size(words: Any) -> Any:
    """Bytes of a stored tensor, or -1 if this coder does not store such tensors."""
    dtype, digits = words[C.ROW_DTYPE], words[C.ROW_BITS]
    if dtype not in (C.DTYPE_BF16, C.DTYPE_FP16, C.DTYPE_FP32) or not 3 <= digits <= 5:
        return _REFUSED
    vectors = words[C.ROW_OUTER] * words[C.ROW_INNER] * words[C.ROW_HEADS]
    return vectors * (words[C.ROW_DIM] + 1)


@helper
def encode(row: Any, start: Any, dst: Any, room: Any, scratch: Any) -> Any:  # noqa: ARG001
    """Store a tensor.

    Parameters
    ----------
    row, start
        Addresses of the tensor's row and of its first byte.
    dst, room
        Where it goes, and how many bytes there are.
    scratch
        Not used.

    Returns
    -------
    Bytes that it took, or -1 if there was not enough room.
    """
    words = words_at(row)
    size = _size(words)
    if size < 0 or size > room:
        return _REFUSED
    code = dst + words[C.ROW_OUTER] * words[C.ROW_INNER] * words[C.ROW_HEADS]
    dtype = words[C.ROW_DTYPE]
    if dtype == C.DTYPE_BF16:
        _encode_bf16(words, start, dst, code)
    elif dtype == C.DTYPE_FP16:
        _encode_fp16(words, start, dst, code)
    else:
        _encode_fp32(words, start, dst, code)
    return size


@helper
def decode(row: Any, start: Any, src: Any, size: Any, scratch: Any) -> Any:  # noqa: ARG001
    """Restore a tensor; see :func:`encode`.

    Returns
    -------
    Bytes that the stored tensor has, or -1 if there are fewer.
    """
    words = words_at(row)
    stored = _size(words)
    if stored < 0 or stored > size:
        return _REFUSED
    code = src + words[C.ROW_OUTER] * words[C.ROW_INNER] * words[C.ROW_HEADS]
    dtype = words[C.ROW_DTYPE]
    if dtype == C.DTYPE_BF16:
        _decode_bf16(words, start, src, code)
    elif dtype == C.DTYPE_FP16:
        _decode_fp16(words, start, src, code)
    else:
        _decode_fp32(words, start, src, code)
    return stored
