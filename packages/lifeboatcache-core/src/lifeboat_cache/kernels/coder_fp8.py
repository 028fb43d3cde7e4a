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
from lifeboat_cache.kernels.jit import helper, inline, shared
from lifeboat_cache.kernels.memory import bytes_at, words_at

__all__ = ["decode", "encode"]

_REFUSED = np.int64(-1)

_I1 = ir.IntType(1)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

#: The codes of infinity and of "not a number", without sign.
_CODE_INF = 0x7E
_CODE_NAN = 0x7F

#: Elements of a vector that are encoded, or decoded, at once.
_ENCODED = 32
_DECODED = 64

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


def _chunks(builder: Any, dim: Any, lanes: int, first: Any, body: Callable[[Any, Any], Any]) -> Any:
    """``value = body(at, value)`` for pieces of ``lanes`` elements of a vector from its ``at``-th.

    The vector has at least ``lanes`` elements; its last piece may overlap the one before.
    Returns the last value.
    """
    before, function = builder.block, builder.function
    inside = function.append_basic_block("lanes.body")
    done = function.append_basic_block("lanes.done")
    last = builder.sub(dim, ir.Constant(_I64, lanes))
    builder.branch(inside)
    builder.position_at_end(inside)
    reached = builder.phi(_I64)
    reached.add_incoming(ir.Constant(_I64, 0), before)
    value = builder.phi(first.type)
    value.add_incoming(first, before)
    at = _smaller(builder, reached, last)
    after = body(at, value)
    further = builder.add(reached, ir.Constant(_I64, lanes))
    reached.add_incoming(further, builder.block)
    value.add_incoming(after, builder.block)
    builder.cbranch(builder.icmp_signed("<", further, dim), inside, done)
    builder.position_at_end(done)
    return after


def _at(builder: Any, address: Any, number: Any, size: int) -> Any:
    """Where an element is."""
    return builder.add(address, builder.mul(number, ir.Constant(_I64, size)))


def _wrap(build: Callable[..., Any]) -> Any:
    """An intrinsic of five int64 arguments out of ``build(builder, *arguments)``."""
    whole = types.int64

    def wrapped(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            del signature
            build(builder, *arguments)
            return context.get_dummy_value()

        return types.void(whole, whole, whole, whole, whole), generate

    return intrinsic(wrapped)


def _largest(kind: _Kind) -> Any:
    """``largest(address, dim)``: the largest finite magnitude of a vector.

    Magnitudes are the bits of an element without its sign.
    """
    bits = kind.item_bits

    def build(builder: Any, address: Any, dim: Any) -> Any:
        wide = _Lanes(builder, _ENCODED, bits)

        def body(at: Any, most: Any) -> Any:
            element = wide.load(_at(builder, address, at, bits // 8))
            size = builder.and_(element, wide.all((1 << (bits - 1)) - 1))
            is_finite = builder.icmp_signed("<", size, wide.all(kind.inf))
            return _larger(builder, builder.select(is_finite, size, wide.all(0)), most)

        most = _chunks(builder, dim, _ENCODED, wide.all(0), body)
        half = _ENCODED
        while half > 1:
            half //= 2
            order = [(lane + half) % _ENCODED for lane in range(_ENCODED)]
            shuffled = builder.shuffle_vector(
                most, most, ir.Constant(ir.VectorType(_I32, _ENCODED), order)
            )
            most = _larger(builder, most, shuffled)
        return builder.zext(builder.extract_element(most, ir.Constant(_I32, 0)), _I64)

    def largest(typing_context: Any, address: Any, dim: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            del context, signature
            return build(builder, *arguments)

        return types.int64(types.int64, types.int64), generate

    return intrinsic(largest)


def _encode_lanes(kind: _Kind, *, widen: bool = False) -> Any:
    """``encode_lanes(source, to, dim, exponent, digits)``: codes of a vector.

    ``digits`` is the number of mantissa bits of a code. With ``widen``, elements of float16 are
    encoded as float32; without, none of the subnormal ones may become a normal code.
    """
    bits = 32 if widen else kind.item_bits
    mantissa = 23 if widen else kind.mantissa
    inf = 0x47800000 if widen else kind.inf
    narrow16 = kind is _FP16 and not widen
    lanes = _ENCODED

    def build(builder: Any, source: Any, to: Any, dim: Any, exponent: Any, digits: Any) -> None:
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

        def body(at: Any, nothing: Any) -> Any:
            element = items.load(_at(builder, source, at, kind.item_bits // 8))
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
            narrow.store(code, _at(builder, to, at, 1))
            return nothing

        _chunks(builder, dim, lanes, ir.Constant(_I1, 0), body)

    return _wrap(build)


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


def _decode_lanes(kind: _Kind) -> Any:
    """``decode_lanes(source, to, dim, exponent, digits)``: a vector of codes.

    The contrary of :func:`_encode_lanes`; ``exponent`` is within the bounds of the kind.
    """
    bits = kind.item_bits
    mantissa = kind.mantissa
    bias = _REBIAS if kind is _FP16 else 0
    lanes = _DECODED

    def build(builder: Any, source: Any, to: Any, dim: Any, exponent: Any, digits: Any) -> None:
        wide = _Lanes(builder, lanes, bits)
        narrow = _Lanes(builder, lanes, 8)
        low = builder.sub(exponent, _top(builder, digits))
        low = builder.sub(low, ir.Constant(_I64, bias))
        base_bits = wide.spread(builder.shl(low, ir.Constant(_I64, mantissa)))
        raise_by = wide.spread(builder.sub(ir.Constant(_I64, mantissa), digits))
        whole = builder.shl(ir.Constant(_I64, 1), digits)
        limits = [narrow.spread(builder.lshr(whole, ir.Constant(_I64, by))) for by in range(5)]
        less = [narrow.spread(builder.mul(whole, ir.Constant(_I64, by))) for by in range(1, 6)]

        def body(at: Any, nothing: Any) -> Any:
            code = narrow.load(_at(builder, source, at, 1))
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
            wide.store(builder.or_(value, sign), _at(builder, to, at, bits // 8))
            return nothing

        _chunks(builder, dim, lanes, ir.Constant(_I1, 0), body)

    return _wrap(build)


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


def _encoder(kind: _Kind) -> Any:
    """The ``encode_lanes`` that is right for every element of a dtype."""
    plain = _encode_lanes(kind)
    if kind is not _FP16:
        return plain
    widening = _encode_lanes(kind, widen=True)

    @inline
    def either(source: Any, to: Any, dim: Any, exponent: Any, digits: Any) -> None:
        # The least normal code, as float16, is normal from here on.
        if exponent - (1 << (7 - digits)) >= _REBIAS:
            plain(source, to, dim, exponent, digits)
        else:
            widening(source, to, dim, exponent, digits)

    return either


def _functions(kind: _Kind) -> tuple[Any, Any]:
    """``encode_vectors`` and ``decode_vectors`` of a dtype."""
    largest, encode_lanes, decode_lanes = _largest(kind), _encoder(kind), _decode_lanes(kind)
    item = kind.item_bits // 8
    least, most = kind.least, kind.most
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

    @helper
    def encode_vectors(words: Any, start: Any, scale: Any, code: Any) -> None:
        dim, digits = words[C.ROW_DIM], words[C.ROW_BITS]
        # Vectors that are too short for the loops are moved to where there is room behind them.
        elements, codes = np.int64(raw.stack(128)), np.int64(raw.stack(64))
        short = dim < _ENCODED
        for o in range(words[C.ROW_OUTER]):
            for i in range(words[C.ROW_INNER]):
                vector = start + o * words[C.ROW_OUTER_STRIDE] + i * words[C.ROW_INNER_STRIDE]
                for _ in range(words[C.ROW_HEADS]):
                    source, to, size = vector, code, dim
                    if short:
                        raw.zero(elements, _ENCODED * item)
                        raw.copy(elements, vector, dim * item)
                        source, to, size = elements, codes, np.int64(_ENCODED)
                    exponent = exponent_of(largest(source, size), digits)
                    bytes_at(scale)[0] = exponent
                    encode_lanes(source, to, size, exponent, digits)
                    if short:
                        raw.copy(code, codes, dim)
                    vector += words[C.ROW_HEAD_STRIDE]
                    scale += 1
                    code += dim

    @helper
    def decode_vectors(words: Any, start: Any, scale: Any, code: Any) -> None:
        dim, digits = words[C.ROW_DIM], words[C.ROW_BITS]
        # Vectors that are too short for the loops are moved to where there is room behind them.
        elements, codes = np.int64(raw.stack(256)), np.int64(raw.stack(64))
        short = dim < _DECODED
        for o in range(words[C.ROW_OUTER]):
            for i in range(words[C.ROW_INNER]):
                vector = start + o * words[C.ROW_OUTER_STRIDE] + i * words[C.ROW_INNER_STRIDE]
                for _ in range(words[C.ROW_HEADS]):
                    source, to, size = code, vector, dim
                    if short:
                        raw.zero(codes, _DECODED)
                        raw.copy(codes, code, dim)
                        source, to, size = codes, elements, np.int64(_DECODED)
                    exponent = np.int64(bytes_at(scale)[0])
                    exponent = min(max(exponent, np.int64(least)), np.int64(most))
                    decode_lanes(source, to, size, exponent, digits)
                    if short:
                        raw.copy(vector, elements, dim * item)
                    vector += words[C.ROW_HEAD_STRIDE]
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


@shared("int64(int64, int64, int64, int64, int64)")
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


@shared("int64(int64, int64, int64, int64, int64)")
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
