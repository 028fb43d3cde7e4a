"""The coder LBQ: 2, 3 or 4 bits per element, after a rotation, along a trellis.

What is stored, and why, stands in ``codecs/lbq.py``, the numpy twin of this module. Vectors
are restored one by one, in registers of 16 elements; they are stored 16 at a time, a lane for
each, so that the search for the best path needs no shuffles.

Floating-point operations are never contracted or reordered: numba does not allow it unless it
is asked to, and every processor rounds a single operation in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import config, types
from numba.extending import intrinsic

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, inline
from lifeboat_cache.kernels.memory import bytes_at, words_at

__all__ = ["decode", "encode"]

_REFUSED = np.int64(-1)
_MOST_DIM = 4096

_I1 = ir.IntType(1)
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_LANES = 16
_FLOATS = ir.VectorType(_F32, _LANES)
_INTS = ir.VectorType(_I32, _LANES)
#: Bytes of a register, which in working memory is a row.
_ROW = 64

_BF16_MOST = 0x7F7F0000
_FP16_MOST = 0x477FE000
_FP32_MOST = 0x7F7FFFFF
_INF = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF

_ROOTS = {group: float(np.float32(np.sqrt(group))) for group in (16, 32, 64, 128)}
_OVER_ROOTS = {group: float(np.float32(1 / np.sqrt(group))) for group in (16, 32, 64, 128)}


# Vectors of 16 lanes


def _ints(number: int) -> Any:
    number &= 0xFFFFFFFF
    return ir.Constant(_INTS, [number - (1 << 32) if number >> 31 else number] * _LANES)


def _floats(number: Any) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(number))] * _LANES)


def _floats_of_bits(bits: int) -> Any:
    return _floats(float(np.array(bits, dtype=np.uint32).view(np.float32)))


def _load(builder: Any, address: Any, offset: int = 0, kind: Any = _FLOATS) -> Any:
    at = builder.add(address, ir.Constant(_I64, offset)) if offset else address
    loaded = builder.load(builder.inttoptr(at, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    at = builder.add(address, ir.Constant(_I64, offset)) if offset else address
    builder.store(value, builder.inttoptr(at, value.type.as_pointer())).align = 1


def _spread(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, _LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, nothing, _lanes([0] * _LANES))


def _lanes(numbers: Any) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), list(numbers))


def _as_ints(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, _INTS)


def _as_floats(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, _FLOATS)


def _step(builder: Any, address: Any, number: Any, size: int) -> Any:
    return builder.add(address, builder.mul(number, ir.Constant(_I64, size)))


def _loop(
    builder: Any, count: Any, first: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """``for number in range(count): values = body(number, values)``; the last values."""
    before, function = builder.block, builder.function
    head = function.append_basic_block("lbq.head")
    inside = function.append_basic_block("lbq.body")
    done = function.append_basic_block("lbq.done")
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.phi(_I64)
    number.add_incoming(ir.Constant(_I64, 0), before)
    values = [builder.phi(value.type) for value in first]
    for value, start in zip(values, first, strict=True):
        value.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", number, count), inside, done)
    builder.position_at_end(inside)
    after = body(number, values)
    number.add_incoming(builder.add(number, ir.Constant(_I64, 1)), builder.block)
    for value, new in zip(values, after, strict=True):
        value.add_incoming(new, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return values


def _wrap(count: int, build: Callable[..., Any]) -> Any:
    """An intrinsic without result, of ``count`` int64, out of ``build(builder, *arguments)``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        int64s = [
            context.cast(builder, argument, kind, types.int64)
            for argument, kind in zip(arguments, signature.args, strict=True)
        ]
        build(builder, *int64s)
        return context.get_dummy_value()

    # numba looks at the names of arguments, and takes no *arguments here
    if count == 2:

        def two(typing_context: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
            return types.void(a, b), generate

        return intrinsic(two)
    if count == 3:

        def three(typing_context: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
            return types.void(a, b, c), generate

        return intrinsic(three)
    if count == 4:

        def four(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:  # noqa: ARG001
            return types.void(a, b, c, d), generate

        return intrinsic(four)

    def five(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:  # noqa: ARG001
        return types.void(a, b, c, d, e), generate

    return intrinsic(five)


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        as_int = context.cast(builder, arguments[0], signature.args[0], types.int32)
        return builder.bitcast(as_int, _F32)

    return types.float32(bits), generate


@intrinsic  # type: ignore[untyped-decorator]
def _bits_of(typing_context: Any, number: Any) -> Any:  # noqa: ARG001
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number_ = context.cast(builder, arguments[0], signature.args[0], types.float32)
        return builder.zext(builder.bitcast(number_, _I32), _I64)

    return types.int64(number), generate


def _clamp(builder: Any, value: Any, bits: int) -> Any:
    """No further from zero than the number of these bits, which NaN becomes."""
    most, least = _floats_of_bits(bits), _floats_of_bits(bits | 1 << 31)
    value = builder.select(builder.fcmp_ordered("<", value, most), value, most)
    return builder.select(builder.fcmp_ordered(">", value, least), value, least)


# Elements of a dtype


def _from_bf16(builder: Any, items: Any) -> Any:
    wide = builder.zext(items, _INTS)
    return _as_floats(builder, builder.shl(wide, _ints(16)))


def _to_bf16(builder: Any, value: Any) -> Any:
    bits = _as_ints(builder, value)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    rounded = builder.add(builder.add(bits, _ints(0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, _ints(16)), ir.VectorType(_I16, _LANES))


def _from_fp16(builder: Any, items: Any) -> Any:
    wide = builder.zext(items, _INTS)
    sign = builder.shl(builder.and_(wide, _ints(0x8000)), _ints(16))
    size = builder.shl(builder.and_(wide, _ints(0x7FFF)), _ints(13))
    # Exact for all, subnormal numbers too; what was infinity or NaN is 65,536 or more.
    number = builder.fmul(_as_floats(builder, size), _floats(2.0**112))
    special = builder.icmp_signed(">=", size, _ints(0x7C00 << 13))
    bits = builder.select(special, _ints(0x7FC00000), _as_ints(builder, number))
    return _as_floats(builder, builder.or_(bits, sign))


def _to_fp16(builder: Any, value: Any) -> Any:
    bits = _as_ints(builder, value)
    sign = builder.and_(builder.lshr(bits, _ints(16)), _ints(0x8000))
    size = builder.and_(bits, _ints(_MAGNITUDE))
    odd = builder.and_(builder.lshr(size, _ints(13)), _ints(1))
    normal = builder.add(builder.add(size, _ints(0xFFF - (112 << 23))), odd)
    normal = builder.lshr(normal, _ints(13))
    # A subnormal number: 0.5 has the unit that its last place has, and rounds as it.
    small = builder.fadd(_as_floats(builder, size), _floats(0.5))
    small_bits = builder.sub(_as_ints(builder, small), _ints(0x3F000000))
    is_small = builder.icmp_signed("<", size, _ints(113 << 23))
    half = builder.or_(builder.select(is_small, small_bits, normal), sign)
    return builder.trunc(half, ir.VectorType(_I16, _LANES))


def _same(builder: Any, value: Any) -> Any:
    del builder
    return value


class _Kind:
    """Elements of one dtype, in vectors of 16."""

    def __init__(self, item_bits: int, most: int, wide: Any, narrow: Any) -> None:
        self.item = item_bits // 8
        self.most = most
        self.vector = _FLOATS if item_bits == 32 else ir.VectorType(_I16, _LANES)
        self._wide = wide
        self._narrow = narrow

    def load(self, builder: Any, address: Any, offset: int = 0) -> Any:
        """As float32."""
        return self._wide(builder, _load(builder, address, offset, self.vector))

    def store(self, builder: Any, value: Any, address: Any, offset: int = 0) -> None:
        """Clamped and rounded."""
        value = _clamp(builder, value, self.most)
        _store(builder, self._narrow(builder, value), address, offset)


_BF16 = _Kind(16, _BF16_MOST, _from_bf16, _to_bf16)
_FP16 = _Kind(16, _FP16_MOST, _from_fp16, _to_fp16)
_FP32 = _Kind(32, _FP32_MOST, _same, _same)


# Restoring: levels


def _features() -> frozenset[str]:
    """What the processor has for which numba compiles."""
    if config.CPU_NAME == "generic" or config.CPU_FEATURES is not None:
        wanted = (config.CPU_FEATURES or "").split(",")
        return frozenset(feature[1:] for feature in wanted if feature.startswith("+"))
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


def _look_up(builder: Any, table: list[float], bits: int, index: Any) -> Any:
    """``table[index]`` in each lane; ``index`` has no more than so many bits."""
    features = _features()
    table = table * (_LANES // len(table))
    if "avx512f" in features:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _INTS])
        permute = _declared(builder, "llvm.x86.avx512.permvar.sf.512", kind)
        return builder.call(permute, [ir.Constant(_FLOATS, table), index])
    if "avx2" in features:
        eight, eights = ir.VectorType(_F32, 8), ir.VectorType(_I32, 8)
        permute = _declared(
            builder, "llvm.x86.avx2.permps", ir.FunctionType(eight, [eight, eights])
        )
        halves = []
        for part in range(2):
            nothing = ir.Constant(_INTS, ir.Undefined)
            own = builder.shuffle_vector(index, nothing, _lanes(range(8 * part, 8 * part + 8)))
            found = builder.call(permute, [ir.Constant(eight, table[:8]), own])
            if bits == 4:
                upper = builder.call(permute, [ir.Constant(eight, table[8:]), own])
                is_upper = builder.icmp_signed(">", own, ir.Constant(eights, [7] * 8))
                found = builder.select(is_upper, upper, found)
            halves.append(found)
        return builder.shuffle_vector(halves[0], halves[1], _lanes(range(16)))
    choices: list[Any] = [_floats(number) for number in table[: 1 << bits]]
    for bit in range(bits):
        is_set = builder.icmp_signed("!=", builder.and_(index, _ints(1 << bit)), _ints(0))
        choices = [
            builder.select(is_set, odd, even)
            for even, odd in zip(choices[::2], choices[1::2], strict=True)
        ]
    return choices[0]


def _declared(builder: Any, name: str, kind: Any) -> Any:
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if found is None else found


def _lane_bytes(builder: Any, address: Any, offset: int) -> Any:
    """16 bytes, one in each lane."""
    return builder.zext(_load(builder, address, offset, ir.VectorType(_I8, _LANES)), _INTS)


def _lane_nibbles(builder: Any, address: Any, offset: int) -> Any:
    """8 bytes, 4 bits at the bottom of each lane, and other bits above."""
    words = _load(builder, address, offset, ir.VectorType(_I32, 2))
    nothing = ir.Constant(words.type, ir.Undefined)
    wide = builder.shuffle_vector(words, nothing, _lanes([0] * 8 + [1] * 8))
    return builder.lshr(wide, ir.Constant(_INTS, [4 * (lane % 8) for lane in range(_LANES)]))


def _levels_of(width: int) -> Any:
    """``levels(source, to, lanes)``: the levels of a chunk of ``4 * lanes`` elements.

    There are always 64 at ``to``, of which the first ones count.
    """
    positive = tables.LEVELS[width]
    # In the index, the subset's bits come in the order in which they are computed.
    table = [
        float(np.float32(positive[4 * (index >> 2) + 2 * (index & 1) + ((index >> 1) & 1)]))
        for index in range(1 << width)
    ]

    def build(builder: Any, source: Any, to: Any, lanes: Any) -> None:
        own = _lane_bytes(builder, source, 0)
        zero = _ints(0)
        # Each lane's byte with that of the lane before, whose elements come before.
        before = builder.shuffle_vector(own, zero, _lanes([16, *range(15)]))
        both = builder.or_(builder.shl(own, _ints(8)), before)
        sign = builder.lshr(both, _ints(1))
        low = builder.xor(both, builder.shl(both, _ints(2)))
        low = builder.xor(low, builder.xor(builder.shl(both, _ints(6)), sign))
        high = builder.xor(builder.shl(both, _ints(5)), both)
        index = builder.or_(builder.and_(low, _ints(0x5500)), builder.and_(high, _ints(0xAA00)))
        more = None
        if width == 3:
            more = _lane_nibbles(builder, source, 16)
        elif width == 4:
            more = _lane_bytes(builder, source, 16)
        step = builder.shl(lanes, ir.Constant(_I64, 2))
        at = to
        for number in range(4):
            chosen = builder.and_(builder.lshr(index, _ints(8 + 2 * number)), _ints(3))
            if width == 3:
                shifted = builder.shl(more, _ints(2 - number)) if number < 2 else more
                shifted = builder.lshr(more, _ints(number - 2)) if number > 2 else shifted
                chosen = builder.or_(chosen, builder.and_(shifted, _ints(4)))
            elif width == 4:
                shifted = builder.shl(more, _ints(2)) if number == 0 else more
                shifted = builder.lshr(more, _ints(2 * number - 2)) if number > 1 else shifted
                chosen = builder.or_(chosen, builder.and_(shifted, _ints(12)))
            level = _as_ints(builder, _look_up(builder, table, width, chosen))
            minus = builder.and_(builder.shl(both, _ints(22 - 2 * number)), _ints(1 << 31))
            _store(builder, builder.xor(level, minus), at)
            at = builder.add(at, step)

    return _wrap(3, build)


_levels2, _levels3, _levels4 = (_levels_of(width) for width in tables.WIDTHS)


# Restoring: rotation, scale, mean, dtype


def _sign_bits(element: int) -> Any:
    """The signs of 16 elements from this one on, as the highest bits of lanes."""
    bits = [(tables.SIGNS >> ((element + lane) % 128)) & 1 for lane in range(_LANES)]
    return ir.Constant(_INTS, [-(1 << 31) if bit else 0 for bit in bits])


def _add_and_subtract(builder: Any, registers: list[Any], bit: int) -> None:
    for number in range(len(registers)):
        other = number | (1 << bit)
        if other != number and other < len(registers):
            a, b = registers[number], registers[other]
            registers[number], registers[other] = builder.fadd(a, b), builder.fsub(a, b)


def _exchange(builder: Any, registers: list[Any], shuffle: str, bit: int) -> None:
    first, second = tables.SHUFFLES[shuffle]
    for number in range(len(registers)):
        other = number | (1 << bit)
        if other != number:
            a, b = registers[number], registers[other]
            registers[number] = builder.shuffle_vector(a, b, _lanes(first))
            registers[other] = builder.shuffle_vector(a, b, _lanes(second))


def _finish_group(kind: _Kind, group: int) -> Any:
    """``finish(levels, means, to, scale)``: a unit of 64 or 128, in the order of storage.

    ``scale`` is the bits of a float32.
    """

    def build(builder: Any, source: Any, means: Any, to: Any, scale: Any) -> None:
        registers = [_load(builder, source, _ROW * number) for number in range(group // _LANES)]
        for shuffle, bit in tables.exchanges(group):
            if shuffle:
                _exchange(builder, registers, shuffle, bit)
            _add_and_subtract(builder, registers, bit)
        by = _spread(builder, builder.trunc(scale, _I32))
        for number, register in enumerate(registers):
            signed = _as_floats(builder, builder.xor(by, _sign_bits(_LANES * number)))
            value = builder.fadd(
                builder.fmul(register, signed), _load(builder, means, _ROW * number)
            )
            kind.store(builder, value, to, _LANES * kind.item * number)

    return _wrap(4, build)


def _finish_any(kind: _Kind) -> Any:
    """``finish(rotated, signs, means, to, scale)``: 16 rotated elements."""

    def build(builder: Any, source: Any, signs: Any, means: Any, to: Any, scale: Any) -> None:
        by = _spread(builder, builder.trunc(scale, _I32))
        by = _as_floats(builder, builder.xor(by, _load(builder, signs, 0, _INTS)))
        value = builder.fadd(builder.fmul(_load(builder, source), by), _load(builder, means))
        kind.store(builder, value, to)

    return _wrap(5, build)


def _build_rotation(group: int) -> Any:
    """``rotate(at, nothing)``: a group of 16 or 32 in its place."""

    def build(builder: Any, at: Any, nothing: Any) -> None:
        del nothing
        registers = [_load(builder, at, _ROW * number) for number in range(group // _LANES)]
        for bit in tables.STAGES[group]:
            if bit >= 4:
                _add_and_subtract(builder, registers, bit - 4)
                continue
            for number, register in enumerate(registers):
                distance = 1 << bit
                none = ir.Constant(_FLOATS, ir.Undefined)
                order = _lanes([lane ^ distance for lane in range(_LANES)])
                partner = builder.shuffle_vector(register, none, order)
                total = builder.fadd(register, partner)
                difference = builder.fsub(partner, register)
                choice = _lanes(
                    [lane + _LANES if lane & distance else lane for lane in range(_LANES)]
                )
                registers[number] = builder.shuffle_vector(total, difference, choice)
        for number, register in enumerate(registers):
            _store(builder, register, at, _ROW * number)

    return _wrap(2, build)


_rotate16, _rotate32 = _build_rotation(16), _build_rotation(32)


def _build_add(builder: Any, total: Any, at: Any) -> None:
    _store(builder, builder.fadd(_load(builder, total), _load(builder, at)), total)


def _build_take_off(builder: Any, at: Any, total: Any, part: Any) -> None:
    by = builder.bitcast(builder.trunc(part, _I32), _F32)
    less = builder.fmul(_load(builder, total), _spread(builder, by))
    _store(builder, builder.fsub(_load(builder, at), less), at)


#: ``add_row(total, at)``: ``total += at``.
_add_row = _wrap(2, _build_add)
#: ``take_off(at, total, part)``: ``at -= total * part``; ``part`` as the bits of a float32.
_take_off = _wrap(3, _build_take_off)


@inline
def _reflect(at: Any, rows: Any, groups: Any, total: Any) -> None:
    """Take twice their mean off groups of so many rows; ``total`` is working memory."""
    part = _bits_of(np.float32(2.0 / groups))
    for row in range(rows):
        raw.copy(total, at + row * _ROW, _ROW)
        for number in range(1, groups):
            _add_row(total, at + (number * rows + row) * _ROW)
        for number in range(groups):
            _take_off(at + (number * rows + row) * _ROW, total, part)


def _build_widen(builder: Any, source: Any, to: Any) -> None:
    _store(builder, _BF16.load(builder, source), to)


#: ``widen(source, to)``: 16 bfloat16 as float32.
_widen = _wrap(2, _build_widen)


def _signs_at(builder: Any, to: Any, nothing: Any) -> None:
    del nothing
    for number in range(8):
        _store(builder, _sign_bits(_LANES * number), to, _ROW * number)


#: ``store_signs(to, 0)``: the signs of 128 elements, as highest bits of 32.
_store_signs = _wrap(2, _signs_at)


@inline
def _unit_of(dim: Any) -> Any:
    if dim % 128 == 0:
        return np.int64(128)
    if dim % 64 == 0:
        return np.int64(64)
    return dim


@inline
def _stored_size(words: Any) -> Any:
    """Bytes of a stored tensor, or -1 if this coder does not store such tensors."""
    dtype, dim = words[C.ROW_DTYPE], words[C.ROW_DIM]
    width, centred = words[C.ROW_BITS] & tables.WIDTH_MASK, words[C.ROW_BITS] & tables.CENTRED
    if (
        dtype not in (C.DTYPE_BF16, C.DTYPE_FP16, C.DTYPE_FP32)
        or not 2 <= width <= 4
        or words[C.ROW_BITS] != width | centred
        or words[C.ROW_ROLE] not in (C.ROLE_KEY, C.ROLE_VALUE, C.ROLE_LATENT)
        or dim % 16 != 0
        or not 16 <= dim <= _MOST_DIM
    ):
        return _REFUSED
    vectors = words[C.ROW_OUTER] * words[C.ROW_INNER] * words[C.ROW_HEADS]
    means = 2 * words[C.ROW_HEADS] * dim if centred else np.int64(0)
    return 1 + means + vectors * (dim // _unit_of(dim)) + vectors * dim * width // 8


@helper
def _unit_levels(source: Any, unit: Any, width: Any, to: Any, padded: Any) -> None:
    """The levels of a unit, in the order of storage."""
    at = source
    whole = unit - unit % 64
    for first in range(0, whole, 64):
        if width == 4:
            _levels4(at, to + 4 * first, 16)
        elif width == 3:
            _levels3(at, to + 4 * first, 16)
        else:
            _levels2(at, to + 4 * first, 16)
        at += 8 * width
    rest = unit - whole
    if rest:
        lanes = rest // 4
        raw.zero(padded, 32)
        raw.copy(padded, at, lanes)
        raw.copy(padded + 16, at + lanes, rest * (width - 2) // 8)
        if width == 4:
            _levels4(padded, to + 4 * whole, lanes)
        elif width == 3:
            _levels3(padded, to + 4 * whole, lanes)
        else:
            _levels2(padded, to + 4 * whole, lanes)


def _restoring(kind: _Kind) -> Any:
    """``decode_vector`` of a dtype."""
    finish64, finish128 = _finish_group(kind, 64), _finish_group(kind, 128)
    finish = _finish_any(kind)
    item = kind.item
    over64, over128 = np.float32(_OVER_ROOTS[64]), np.float32(_OVER_ROOTS[128])
    over16, over32 = np.float32(_OVER_ROOTS[16]), np.float32(_OVER_ROOTS[32])

    @helper
    def decode_vector(
        source: Any, scales: Any, low: Any, means: Any, to: Any, dim: Any, width: Any, work: Any
    ) -> None:
        unit = _unit_of(dim)
        signs, padded, total, levels = work, work + 512, work + 576, work + 640
        for number in range(dim // unit):
            code = np.int64(bytes_at(scales)[number])
            scale = min(code + low, np.int64(16 * 254 + 15)) << 19
            by = _float_of(scale) if code > 0 else np.float32(0)
            first = number * unit
            _unit_levels(source + first * width // 8, unit, width, levels, padded)
            own_means, own_to = means + 4 * first, to + item * first
            if unit == 128:
                finish128(levels, own_means, own_to, _bits_of(by * over128))
                continue
            if unit == 64:
                finish64(levels, own_means, own_to, _bits_of(by * over64))
                continue
            rows = np.int64(2) if unit % 32 == 0 else np.int64(1)
            groups = unit // (16 * rows)
            if groups > 1:
                _reflect(levels, rows, groups, total)
            for group in range(groups):
                if rows == 2:
                    _rotate32(levels + 2 * _ROW * group, 0)
                else:
                    _rotate16(levels + _ROW * group, 0)
            factor = _bits_of(by * (over32 if rows == 2 else over16))
            for row in range(unit // 16):
                finish(
                    levels + _ROW * row,
                    signs + _ROW * (row % 8),
                    own_means + _ROW * row,
                    own_to + 16 * item * row,
                    factor,
                )

    return decode_vector


_decode_bf16, _decode_fp16, _decode_fp32 = (_restoring(kind) for kind in (_BF16, _FP16, _FP32))


@helper
def decode(row: Any, start: Any, src: Any, size: Any, scratch: Any) -> Any:
    """Restore a tensor; see :func:`encode`.

    Returns
    -------
    Bytes that the stored tensor has, or -1 if there are fewer or they are none.
    """
    words = words_at(row)
    stored = _stored_size(words)
    if stored < 0 or stored > size:
        return _REFUSED
    top = np.int64(bytes_at(src)[0])
    if top < 16:
        return _REFUSED
    heads, dim, dtype = words[C.ROW_HEADS], words[C.ROW_DIM], words[C.ROW_DTYPE]
    width = words[C.ROW_BITS] & tables.WIDTH_MASK
    centred = words[C.ROW_BITS] & tables.CENTRED
    inner, outer = words[C.ROW_INNER], words[C.ROW_OUTER]
    units, vector_bytes = dim // _unit_of(dim), dim * width // 8
    work = scratch
    means = scratch + 640 + 4 * _MOST_DIM + 256
    _store_signs(work, 0)
    scales = src + 1 + (2 * heads * dim if centred else 0)
    codes = scales + outer * inner * heads * units
    if not centred:
        raw.zero(means, 4 * dim)
    for head in range(heads):
        if centred:
            for at in range(0, dim, 16):
                _widen(src + 1 + 2 * (head * dim + at), means + 4 * at)
        for o in range(outer):
            for i in range(inner):
                number = (o * inner + i) * heads + head
                to = (
                    start
                    + o * words[C.ROW_OUTER_STRIDE]
                    + i * words[C.ROW_INNER_STRIDE]
                    + head * words[C.ROW_HEAD_STRIDE]
                )
                source, scale = codes + number * vector_bytes, scales + number * units
                low = 16 * (top - 15)
                if dtype == C.DTYPE_BF16:
                    _decode_bf16(source, scale, low, means, to, dim, width, work)
                elif dtype == C.DTYPE_FP16:
                    _decode_fp16(source, scale, low, means, to, dim, width, work)
                else:
                    _decode_fp32(source, scale, low, means, to, dim, width, work)
    return stored


# Storing: 16 vectors at a time, a lane for each; element after element is a row


def _gather_of(kind: _Kind) -> Any:
    """``gather(addresses, offset, to)``: 16 elements of each of 16 vectors, as 16 rows."""

    def build(builder: Any, addresses: Any, offset: Any, to: Any) -> None:
        registers = []
        for lane in range(_LANES):
            vector = _load(builder, addresses, 8 * lane, _I64)
            registers.append(kind.load(builder, builder.add(vector, offset)))
        for bit in range(4):
            distance = 1 << bit
            first = [
                lane if not lane & distance else (lane ^ distance) + _LANES
                for lane in range(_LANES)
            ]
            second = [
                lane + _LANES if lane & distance else lane | distance for lane in range(_LANES)
            ]
            for number in range(_LANES):
                other = number | distance
                if other != number:
                    a, b = registers[number], registers[other]
                    registers[number] = builder.shuffle_vector(a, b, _lanes(first))
                    registers[other] = builder.shuffle_vector(a, b, _lanes(second))
        for number, register in enumerate(registers):
            _store(builder, register, to, _ROW * number)

    return _wrap(3, build)


def _is_finite(builder: Any, value: Any) -> Any:
    size = builder.and_(_as_ints(builder, value), _ints(_MAGNITUDE))
    return builder.icmp_signed("<", size, _ints(_INF))


def _accumulate_of(kind: _Kind) -> Any:
    """``accumulate(source, totals, counts)``: add 16 channels of a token where finite."""

    def build(builder: Any, source: Any, totals: Any, counts: Any) -> None:
        value = kind.load(builder, source)
        finite = _is_finite(builder, value)
        value = builder.select(finite, value, _floats(0))
        one = builder.select(finite, _floats(1), _floats(0))
        _store(builder, builder.fadd(_load(builder, totals), value), totals)
        _store(builder, builder.fadd(_load(builder, counts), one), counts)

    return _wrap(3, build)


def _build_mean(builder: Any, totals: Any, counts: Any, to: Any) -> None:
    count = _load(builder, counts)
    count = builder.select(builder.fcmp_ordered(">", count, _floats(1)), count, _floats(1))
    mean = builder.fdiv(_load(builder, totals), count)
    size = _as_floats(builder, builder.and_(_as_ints(builder, mean), _ints(_MAGNITUDE)))
    usable = builder.fcmp_ordered("<=", size, _floats_of_bits(_BF16_MOST))
    _store(builder, _to_bf16(builder, builder.select(usable, mean, _floats(0))), to)


#: ``mean(totals, counts, to)``: means of 16 channels, as bfloat16.
_mean = _wrap(3, _build_mean)


def _build_centre(builder: Any, rows: Any, means: Any, unit: Any, most: Any) -> None:
    def body(number: Any, values: list[Any]) -> list[Any]:
        at = _step(builder, rows, number, _ROW)
        value = _load(builder, at)
        mean = _load(builder, _step(builder, means, number, 4), 0, _F32)
        rest = builder.fsub(value, _spread(builder, mean))
        rest = _clamp(builder, rest, _FP32_MOST)
        rest = builder.select(_is_finite(builder, value), rest, _floats(0))
        _store(builder, rest, at)
        size = builder.and_(_as_ints(builder, rest), _ints(_MAGNITUDE))
        return [builder.select(builder.icmp_signed(">", size, values[0]), size, values[0])]

    (largest,) = _loop(builder, unit, [_ints(0)], body)
    _store(builder, largest, most)


#: ``centre(rows, means, unit, most)``: take means off; ``most`` gets the largest magnitudes.
_centre = _wrap(4, _build_centre)


def _square_roots(builder: Any, value: Any) -> Any:
    root = _declared(builder, "llvm.sqrt.v16f32", ir.FunctionType(_FLOATS, [_FLOATS]))
    return builder.call(root, [value])


def _build_measure(builder: Any, rows: Any, signs: Any, unit: Any, state: Any) -> None:
    most = _load(builder, state, 0, _INTS)
    exponent = builder.lshr(most, _ints(23))
    exponent = builder.select(builder.icmp_signed(">", exponent, _ints(1)), exponent, _ints(1))
    raised = builder.sub(_ints(254), exponent)
    raised = builder.select(builder.icmp_signed(">", raised, _ints(1)), raised, _ints(1))
    by = _as_floats(builder, builder.shl(raised, _ints(23)))

    def body(number: Any, values: list[Any]) -> list[Any]:
        at = _step(builder, rows, number, _ROW)
        value = builder.fmul(_load(builder, at), by)
        place = builder.and_(number, ir.Constant(_I64, 127))
        sign = _load(builder, _step(builder, signs, place, 4), 0, _I32)
        signed = builder.xor(_as_ints(builder, value), _spread(builder, sign))
        _store(builder, signed, at)
        return [builder.fadd(values[0], builder.fmul(value, value))]

    (energy,) = _loop(builder, unit, [_floats(0)], body)
    mean = builder.fdiv(energy, _spread(builder, builder.sitofp(unit, _F32)))
    found = _as_ints(builder, _square_roots(builder, mean))
    odd = builder.and_(builder.lshr(found, _ints(19)), _ints(1))
    scale = builder.lshr(builder.add(builder.add(found, _ints(0x3FFFF)), odd), _ints(19))
    lifted = builder.shl(builder.sub(raised, _ints(127)), _ints(4))
    scale = builder.sub(scale, lifted)
    largest = _ints(16 * 254 + 15)
    scale = builder.select(builder.icmp_signed("<", scale, largest), scale, largest)
    scale = builder.select(builder.icmp_signed(">", most, _ints(0)), scale, _ints(0))
    _store(builder, scale, state, _ROW)
    _store(builder, lifted, state, 2 * _ROW)


#: ``measure(rows, signs, unit, state)``: multiply each unit by a power of two, so that its
#: largest element, which ``state`` says, is about 1, and by its elements' signs. The next row
#: of ``state`` gets the scales in steps of ``lbq.py``, then how much of it is that power.
_measure = _wrap(4, _build_measure)


def _build_scale(builder: Any, state: Any, low: Any, root: Any) -> None:
    scale = _load(builder, state, _ROW, _INTS)
    lifted = _load(builder, state, 2 * _ROW, _INTS)
    code = builder.sub(scale, _spread(builder, builder.trunc(low, _I32)))
    there = builder.icmp_signed(">", code, _ints(0))
    code = builder.select(there, code, _ints(0))
    raised = _as_floats(builder, builder.shl(builder.add(scale, lifted), _ints(19)))
    root_ = _spread(builder, builder.bitcast(builder.trunc(root, _I32), _F32))
    by = builder.fdiv(_floats(1), builder.fmul(raised, root_))
    by = builder.select(there, by, _floats(0))
    _store(builder, by, state)
    _store(builder, code, state, _ROW)


#: ``scale(state, low, root)``: after ``measure``; ``state`` gets by what rotated elements are
#: multiplied, and the codes of scales. ``root`` is the bits of a float32.
_scale = _wrap(3, _build_scale)


def _build_butterfly(builder: Any, first: Any, second: Any) -> None:
    a, b = _load(builder, first), _load(builder, second)
    _store(builder, builder.fadd(a, b), first)
    _store(builder, builder.fsub(a, b), second)


_butterfly = _wrap(2, _build_butterfly)


def _build_scaled(builder: Any, source: Any, by: Any, to: Any) -> None:
    _store(builder, builder.fmul(_load(builder, source), _load(builder, by)), to)


#: ``scaled(source, by, to)``.
_scaled = _wrap(3, _build_scaled)


def _search_of(width: int) -> Any:
    """``search(rows, count, nearest, taken, end)``: the best path through a chunk.

    Row t of ``nearest`` gets the nearest level of each subset (a byte: sign, then the bits of
    ``h``), row t of ``taken`` which of its two branches each state takes back (a bit).
    ``end`` gets the states in which the best paths end.
    """
    half = 1 << width
    positive = [np.float32(level) for level in tables.LEVELS[width]]
    levels = [-level for level in reversed(positive)] + positive
    codes = [
        ((half - 1 - number) >> 2) << 1 | 1 if number < half else ((number - half) >> 2) << 1
        for number in range(2 * half)
    ]

    def step(builder: Any, value: Any) -> tuple[Any, list[Any]]:
        packed, errors = None, []
        for subset in range(4):
            own = levels[subset::4]
            own_codes = [code << (8 * subset) for code in codes[subset::4]]
            level, code = _floats(own[0]), _ints(own_codes[0])
            for number in range(1, len(own)):
                between = (own[number - 1] + own[number]) * np.float32(0.5)
                above = builder.fcmp_ordered(">", value, _floats(between))
                level = builder.select(above, _floats(own[number]), level)
                code = builder.select(above, _ints(own_codes[number]), code)
            difference = builder.fsub(value, level)
            errors.append(builder.fmul(difference, difference))
            packed = code if packed is None else builder.or_(packed, code)
        return packed, errors

    def build(builder: Any, rows: Any, count: Any, nearest: Any, taken: Any, end: Any) -> None:
        def body(number: Any, costs: list[Any]) -> list[Any]:
            value = _load(builder, _step(builder, rows, number, _ROW))
            packed, errors = step(builder, value)
            choices, after = _ints(0), []
            for state in range(tables.STATES):
                both = []
                for old in range(2):
                    before = (state >> 1) | (old << 2)
                    subset = tables.subset_of(before, state & 1)
                    both.append(builder.fadd(costs[before], errors[subset]))
                second = builder.fcmp_ordered("<", both[1], both[0])
                after.append(builder.select(second, both[1], both[0]))
                chosen = builder.select(second, _ints(1 << state), _ints(0))
                choices = builder.or_(choices, chosen)
            _store(builder, packed, _step(builder, nearest, number, _ROW))
            _store(builder, choices, _step(builder, taken, number, _ROW))
            return after

        first = [_floats(0)] + [_floats(1e30)] * (tables.STATES - 1)
        costs = _loop(builder, count, first, body)
        best, state = costs[0], _ints(0)
        for other in range(1, tables.STATES):
            less = builder.fcmp_ordered("<", costs[other], best)
            best = builder.select(less, costs[other], best)
            state = builder.select(less, _ints(other), state)
        _store(builder, state, end)

    return _wrap(5, build)


_search2, _search3, _search4 = (_search_of(width) for width in tables.WIDTHS)


def _trace_of(width: int) -> Any:
    """``trace(nearest, taken, end, sixteens, to)``: the best path's elements, packed.

    Each 16 elements give two rows at ``to``: the 32 bits of path and signs, and the rest.
    """

    def build(builder: Any, nearest: Any, taken: Any, end: Any, sixteens: Any, to: Any) -> None:
        last = builder.sub(sixteens, ir.Constant(_I64, 1))

        def body(number: Any, values: list[Any]) -> list[Any]:
            (state,) = values
            part = builder.sub(last, number)
            near = _step(builder, nearest, part, _ROW * 16)
            took = _step(builder, taken, part, _ROW * 16)
            core, more = _ints(0), _ints(0)
            for t in range(15, -1, -1):
                choices = _load(builder, took, _ROW * t, _INTS)
                old = builder.and_(builder.lshr(choices, state), _ints(1))
                before = builder.or_(builder.lshr(state, _ints(1)), builder.shl(old, _ints(2)))
                path = builder.and_(state, _ints(1))
                # Eight times the subset: 16 times its upper bit and 8 times its lower.
                upper = builder.xor(builder.xor(path, old), before)
                upper = builder.shl(builder.and_(upper, _ints(1)), _ints(4))
                lower = builder.and_(builder.shl(before, _ints(2)), _ints(8))
                shift = builder.or_(upper, lower)
                code = builder.lshr(_load(builder, near, _ROW * t, _INTS), shift)
                sign = builder.and_(builder.shl(code, _ints(1)), _ints(2))
                core = builder.or_(builder.shl(core, _ints(2)), builder.or_(path, sign))
                if width > 2:
                    rest = builder.and_(builder.lshr(code, _ints(1)), _ints(2 * width - 5))
                    more = builder.or_(builder.shl(more, _ints(width - 2)), rest)
                state = before
            place = _step(builder, to, part, 2 * _ROW)
            _store(builder, core, place)
            _store(builder, more, place, _ROW)
            return [state]

        _loop(builder, sixteens, [_load(builder, end, 0, _INTS)], body)

    return _wrap(5, build)


_trace2, _trace3, _trace4 = (_trace_of(width) for width in tables.WIDTHS)

_ORDER64 = np.array(tables.ORDERS[64], dtype=np.int64)
_ORDER128 = np.array(tables.ORDERS[128], dtype=np.int64)
_STAGES64 = np.array(tables.STAGES[64], dtype=np.int64)
_STAGES128 = np.array(tables.STAGES[128], dtype=np.int64)
_STAGES32 = np.array(tables.STAGES[32], dtype=np.int64)
_STAGES16 = np.array(tables.STAGES[16], dtype=np.int64)
_ROOT128, _ROOT64 = np.float32(_ROOTS[128]), np.float32(_ROOTS[64])
_ROOT32, _ROOT16 = np.float32(_ROOTS[32]), np.float32(_ROOTS[16])

# Working memory of storing, in bytes from its beginning.
_SIGNS = 0
_ADDRESSES = _SIGNS + 8 * _ROW
_STATE = _ADDRESSES + 2 * _ROW
_TOTAL = _STATE + 4 * _ROW
_NEAREST = _TOTAL + _ROW
_TAKEN = _NEAREST + tables.CHUNK * _ROW
_PACKED = _TAKEN + tables.CHUNK * _ROW
_TOTALS = _PACKED + 8 * _ROW
_COUNTS = _TOTALS + 4 * _MOST_DIM
_MEANS = _COUNTS + 4 * _MOST_DIM
_ROWS = _MEANS + 4 * _MOST_DIM
_SEQUENCE = _ROWS + _ROW * _MOST_DIM


@helper
def _group_of(unit: Any) -> Any:
    if unit % 32 != 0:
        return np.int64(16)
    return unit if unit == 64 or unit == 128 else np.int64(32)


@inline
def _root_of(group: Any) -> Any:
    if group == 128:
        return _bits_of(_ROOT128)
    if group == 64:
        return _bits_of(_ROOT64)
    return _bits_of(_ROOT32) if group == 32 else _bits_of(_ROOT16)


@inline
def _stage(group: Any, number: Any) -> Any:
    if group == 128:
        return _STAGES128[number]
    if group == 64:
        return _STAGES64[number]
    return _STAGES32[number] if group == 32 else _STAGES16[number]


@helper
def _rotate_rows(rows: Any, unit: Any, group: Any, total: Any) -> None:
    """Rotate units; see ``codecs/lbq.py``."""
    done, size = np.int64(0), np.int64(1)
    while size < group:
        distance = np.int64(1) << _stage(group, done)
        for first in range(0, unit, 2 * distance):
            for element in range(first, first + distance):
                _butterfly(rows + _ROW * element, rows + _ROW * (element + distance))
        done += 1
        size *= 2
    if unit > group:
        _reflect(rows, group, unit // group, total)


@helper
def _order_rows(rows: Any, unit: Any, by: Any, to: Any) -> None:
    """The order in which rotated elements are stored; multiplied on the way."""
    at = np.int64(0)
    while at < unit:
        lanes = min(unit - at, np.int64(64)) // 4
        for t in range(4 * lanes):
            place = at + (t % 4) * lanes + t // 4
            if unit == 128:
                place = _ORDER128[place]
            elif unit == 64:
                place = _ORDER64[place]
            _scaled(rows + _ROW * place, by, to + _ROW * (at + t))
        at += 4 * lanes


@helper
def _put(packed: Any, lane: Any, size: Any, width: Any, to: Any) -> None:
    """Write a lane's elements of a chunk."""
    more = to + size // 4
    for part in range(size // 16):
        at = packed + part * 2 * _ROW + 4 * lane
        raw.store_u32(to + 4 * part, raw.load_u32(at))
        if width == 4:
            raw.store_u32(more + 4 * part, raw.load_u32(at + _ROW))
        elif width == 3:
            word = raw.load_u32(at + _ROW)
            bytes_at(more)[2 * part] = word & 0xFF
            bytes_at(more)[2 * part + 1] = word >> 8


@helper
def _store_units(scratch: Any, unit: Any, width: Any, lanes: Any, to: Any, stride: Any) -> None:
    """Find the best path of each unit, and write it."""
    at = np.int64(0)
    while at < unit:
        size = min(unit - at, np.int64(64))
        rows = scratch + _SEQUENCE + _ROW * at
        nearest, taken, end = scratch + _NEAREST, scratch + _TAKEN, scratch + _TOTAL
        packed = scratch + _PACKED
        if width == 4:
            _search4(rows, size, nearest, taken, end)
            _trace4(nearest, taken, end, size // 16, packed)
        elif width == 3:
            _search3(rows, size, nearest, taken, end)
            _trace3(nearest, taken, end, size // 16, packed)
        else:
            _search2(rows, size, nearest, taken, end)
            _trace2(nearest, taken, end, size // 16, packed)
        for lane in range(lanes):
            _put(packed, lane, size, width, to + lane * stride + at * width // 8)
        at += size


_gather_bf16, _gather_fp16, _gather_fp32 = (_gather_of(kind) for kind in (_BF16, _FP16, _FP32))
_add_bf16, _add_fp16, _add_fp32 = (_accumulate_of(kind) for kind in (_BF16, _FP16, _FP32))


@inline
def _vector_at(words: Any, start: Any, token: Any, head: Any) -> Any:
    inner = words[C.ROW_INNER]
    return (
        start
        + (token // inner) * words[C.ROW_OUTER_STRIDE]
        + (token % inner) * words[C.ROW_INNER_STRIDE]
        + head * words[C.ROW_HEAD_STRIDE]
    )


@helper
def _store_means(words: Any, start: Any, head: Any, to: Any, scratch: Any) -> None:
    """The means of a head's channels."""
    dim, dtype = words[C.ROW_DIM], words[C.ROW_DTYPE]
    totals, counts = scratch + _TOTALS, scratch + _COUNTS
    raw.zero(totals, 4 * dim)
    raw.zero(counts, 4 * dim)
    for token in range(words[C.ROW_OUTER] * words[C.ROW_INNER]):
        vector = _vector_at(words, start, token, head)
        for at in range(0, dim, 16):
            if dtype == C.DTYPE_BF16:
                _add_bf16(vector + 2 * at, totals + 4 * at, counts + 4 * at)
            elif dtype == C.DTYPE_FP16:
                _add_fp16(vector + 2 * at, totals + 4 * at, counts + 4 * at)
            else:
                _add_fp32(vector + 4 * at, totals + 4 * at, counts + 4 * at)
    for at in range(0, dim, 16):
        _mean(totals + 4 * at, counts + 4 * at, to + 2 * at)


@helper
def _read_means(source: Any, dim: Any, scratch: Any) -> None:
    """Those of a head as float32; all zero if ``source`` is 0."""
    means = scratch + _MEANS
    if source == 0:
        raw.zero(means, 4 * dim)
        return
    for at in range(0, dim, 16):
        _widen(source + 2 * at, means + 4 * at)


@helper
def _take_units(
    words: Any, start: Any, first: Any, head: Any, at: Any, unit: Any, scratch: Any
) -> None:
    """Element ``at`` and what follows of 16 tokens' vectors, less means, and measured."""
    tokens, dtype = words[C.ROW_OUTER] * words[C.ROW_INNER], words[C.ROW_DTYPE]
    addresses, rows, state = scratch + _ADDRESSES, scratch + _ROWS, scratch + _STATE
    for lane in range(16):
        # Lanes without a token repeat the first.
        token = first + lane if first + lane < tokens else first
        words_at(addresses)[lane] = _vector_at(words, start, token, head)
    for element in range(0, unit, 16):
        to = rows + _ROW * element
        if dtype == C.DTYPE_BF16:
            _gather_bf16(addresses, 2 * (at + element), to)
        elif dtype == C.DTYPE_FP16:
            _gather_fp16(addresses, 2 * (at + element), to)
        else:
            _gather_fp32(addresses, 4 * (at + element), to)
    _centre(rows, scratch + _MEANS + 4 * at, unit, state)
    _measure(rows, scratch + _SIGNS, unit, state)


@helper
def encode(row: Any, start: Any, dst: Any, room: Any, scratch: Any) -> Any:
    """Store a tensor.

    Parameters
    ----------
    row, start
        Addresses of the tensor's row and of its first byte.
    dst, room
        Where it goes, and how many bytes there are.
    scratch
        Working memory, aligned to 64.

    Returns
    -------
    Bytes that it took, or -1 if there was not enough room.
    """
    words = words_at(row)
    size = _stored_size(words)
    if size < 0 or size > room:
        return _REFUSED
    heads, dim = words[C.ROW_HEADS], words[C.ROW_DIM]
    width = words[C.ROW_BITS] & tables.WIDTH_MASK
    centred = words[C.ROW_BITS] & tables.CENTRED
    tokens = words[C.ROW_OUTER] * words[C.ROW_INNER]
    unit = _unit_of(dim)
    group, units, unit_bytes = _group_of(unit), dim // unit, unit * width // 8
    means = dst + 1
    scales = means + (2 * heads * dim if centred else 0)
    codes = scales + tokens * heads * units
    state, rows = scratch + _STATE, scratch + _ROWS
    _store_signs(scratch + _SIGNS, 0)
    top = np.int64(16)
    for head in range(heads):
        if centred:
            _store_means(words, start, head, means + 2 * head * dim, scratch)
        _read_means(means + 2 * head * dim if centred else np.int64(0), dim, scratch)
        for first in range(0, tokens, 16):
            for number in range(units):
                _take_units(words, start, first, head, number * unit, unit, scratch)
                for lane in range(16):
                    scale = np.int32(raw.load_u32(state + _ROW + 4 * lane))
                    top = max(top, np.int64(scale) >> 4)
    bytes_at(dst)[0] = top
    for head in range(heads):
        _read_means(means + 2 * head * dim if centred else np.int64(0), dim, scratch)
        for first in range(0, tokens, 16):
            lanes = min(tokens - first, np.int64(16))
            for number in range(units):
                _take_units(words, start, first, head, number * unit, unit, scratch)
                _scale(state, 16 * (top - 15), _root_of(group))
                place = (first * heads + head) * units + number
                for lane in range(lanes):
                    code = raw.load_u32(state + _ROW + 4 * lane)
                    bytes_at(scales)[place + lane * heads * units] = code
                _rotate_rows(rows, unit, group, scratch + _TOTAL)
                _order_rows(rows, unit, state, scratch + _SEQUENCE)
                _store_units(
                    scratch,
                    unit,
                    width,
                    lanes,
                    codes + place * unit_bytes,
                    heads * units * unit_bytes,
                )
    return size
