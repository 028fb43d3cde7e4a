"""What both directions of the coder LBQ are made of: vectors of 16 lanes, dtypes, rows.

Floating-point operations are never contracted or reordered: numba does not allow it unless it
is asked to, and every processor rounds a single operation in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, inline
from lifeboat_cache.kernels.memory import bytes_at, float32_at, int16_at

__all__ = [
    "BF16",
    "BF16_MOST",
    "EVENS",
    "F32",
    "FIRST_HALVES",
    "FLOATS",
    "FP16",
    "FP16_MOST",
    "FP32",
    "FP32_MOST",
    "I1",
    "I8",
    "I16",
    "I32",
    "I64",
    "INF",
    "INTS",
    "LANES",
    "MAGNITUDE",
    "MOST_CHANNELS",
    "MOST_DIM",
    "MOST_VECTORS",
    "ODDS",
    "OVER_ROOTS",
    "REFUSED",
    "ROOTS",
    "ROW",
    "SECOND_HALVES",
    "Kind",
    "add_row",
    "as_floats",
    "as_ints",
    "bits_of",
    "clamp",
    "declared",
    "float_of",
    "floats",
    "floats_of_bits",
    "ints",
    "load",
    "load_u16",
    "loop",
    "pick",
    "precise_of",
    "reflect",
    "sign_bits",
    "spread",
    "start_phases",
    "step",
    "store",
    "store_signs",
    "store_u16",
    "stored_size",
    "take_off",
    "to_bf16",
    "turn",
    "turn_phases",
    "turned_means",
    "unit_of",
    "vector_at",
    "widen",
    "wrap",
]

REFUSED = np.int64(-1)
MOST_DIM = 4096
MOST_CHANNELS = 1 << 16
MOST_VECTORS = 1 << 16

I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
LANES = 16
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
#: Bytes of a register, which in working memory is a row.
ROW = 64

BF16_MOST = 0x7F7F0000
FP16_MOST = 0x477FE000
FP32_MOST = 0x7F7FFFFF
INF = 0x7F800000
MAGNITUDE = 0x7FFFFFFF

ROOTS = {group: float(np.float32(np.sqrt(group))) for group in (16, 32, 64, 128)}
OVER_ROOTS = {group: float(np.float32(1 / np.sqrt(group))) for group in (16, 32, 64, 128)}


# Vectors of 16 lanes


def ints(number: int) -> Any:
    """The same integer in every lane."""
    number &= 0xFFFFFFFF
    return ir.Constant(INTS, [number - (1 << 32) if number >> 31 else number] * LANES)


def floats(number: Any) -> Any:
    """The same float32 in every lane."""
    return ir.Constant(FLOATS, [float(np.float32(number))] * LANES)


def floats_of_bits(bits: int) -> Any:
    """The float32 of these bits in every lane."""
    return floats(float(np.array(bits, dtype=np.uint32).view(np.float32)))


def load(builder: Any, address: Any, offset: int = 0, kind: Any = FLOATS) -> Any:
    """What is at an address, which need not be aligned."""
    at = builder.add(address, ir.Constant(I64, offset)) if offset else address
    loaded = builder.load(builder.inttoptr(at, kind.as_pointer()))
    loaded.align = 1
    return loaded


def store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    """Write to an address, which need not be aligned."""
    at = builder.add(address, ir.Constant(I64, offset)) if offset else address
    builder.store(value, builder.inttoptr(at, value.type.as_pointer())).align = 1


def spread(builder: Any, scalar: Any) -> Any:
    """A scalar in every lane."""
    kind = ir.VectorType(scalar.type, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, nothing, pick([0] * LANES))


def pick(numbers: Any) -> Any:
    """The order of a shuffle."""
    return ir.Constant(ir.VectorType(I32, len(numbers)), list(numbers))


def as_ints(builder: Any, value: Any) -> Any:
    """The bits of floats."""
    return builder.bitcast(value, INTS)


def as_floats(builder: Any, value: Any) -> Any:
    """The floats of bits."""
    return builder.bitcast(value, FLOATS)


def step(builder: Any, address: Any, number: Any, size: int) -> Any:
    """The address of element ``number`` of an array of elements of ``size`` bytes."""
    return builder.add(address, builder.mul(number, ir.Constant(I64, size)))


def loop(
    builder: Any, count: Any, first: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """``for number in range(count): values = body(number, values)``; the last values."""
    before, function = builder.block, builder.function
    head = function.append_basic_block("lbq.head")
    inside = function.append_basic_block("lbq.body")
    done = function.append_basic_block("lbq.done")
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.phi(I64)
    number.add_incoming(ir.Constant(I64, 0), before)
    values = [builder.phi(value.type) for value in first]
    for value, start in zip(values, first, strict=True):
        value.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", number, count), inside, done)
    builder.position_at_end(inside)
    after = body(number, values)
    number.add_incoming(builder.add(number, ir.Constant(I64, 1)), builder.block)
    for value, new in zip(values, after, strict=True):
        value.add_incoming(new, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return values


def wrap(count: int, build: Callable[..., Any]) -> Any:
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
def float_of(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        as_int = context.cast(builder, arguments[0], signature.args[0], types.int32)
        return builder.bitcast(as_int, F32)

    return types.float32(bits), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing_context: Any, number: Any) -> Any:  # noqa: ARG001
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number_ = context.cast(builder, arguments[0], signature.args[0], types.float32)
        return builder.zext(builder.bitcast(number_, I32), I64)

    return types.int64(number), generate


def clamp(builder: Any, value: Any, bits: int) -> Any:
    """No further from zero than the number of these bits, which NaN becomes."""
    most, least = floats_of_bits(bits), floats_of_bits(bits | 1 << 31)
    value = builder.select(builder.fcmp_ordered("<", value, most), value, most)
    return builder.select(builder.fcmp_ordered(">", value, least), value, least)


# Elements of a dtype


def _from_bf16(builder: Any, items: Any) -> Any:
    wide = builder.zext(items, INTS)
    return as_floats(builder, builder.shl(wide, ints(16)))


def to_bf16(builder: Any, value: Any) -> Any:
    """Finite numbers rounded to bfloat16, ties to even."""
    bits = as_ints(builder, value)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.add(builder.add(bits, ints(0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, ints(16)), ir.VectorType(I16, LANES))


def _from_fp16(builder: Any, items: Any) -> Any:
    wide = builder.zext(items, INTS)
    sign = builder.shl(builder.and_(wide, ints(0x8000)), ints(16))
    size = builder.shl(builder.and_(wide, ints(0x7FFF)), ints(13))
    # Exact for all, subnormal numbers too; what was infinity or NaN is 65,536 or more.
    number = builder.fmul(as_floats(builder, size), floats(2.0**112))
    special = builder.icmp_signed(">=", size, ints(0x7C00 << 13))
    bits = builder.select(special, ints(0x7FC00000), as_ints(builder, number))
    return as_floats(builder, builder.or_(bits, sign))


def _to_fp16(builder: Any, value: Any) -> Any:
    bits = as_ints(builder, value)
    sign = builder.and_(builder.lshr(bits, ints(16)), ints(0x8000))
    size = builder.and_(bits, ints(MAGNITUDE))
    odd = builder.and_(builder.lshr(size, ints(13)), ints(1))
    normal = builder.add(builder.add(size, ints(0xFFF - (112 << 23))), odd)
    normal = builder.lshr(normal, ints(13))
    # A subnormal number: 0.5 has the unit that its last place has, and rounds as it.
    small = builder.fadd(as_floats(builder, size), floats(0.5))
    small_bits = builder.sub(as_ints(builder, small), ints(0x3F000000))
    is_small = builder.icmp_signed("<", size, ints(113 << 23))
    half = builder.or_(builder.select(is_small, small_bits, normal), sign)
    return builder.trunc(half, ir.VectorType(I16, LANES))


def _same(builder: Any, value: Any) -> Any:
    del builder
    return value


class Kind:
    """Elements of one dtype, in vectors of 16."""

    def __init__(self, item_bits: int, most: int, wide: Any, narrow: Any) -> None:
        self.item = item_bits // 8
        self.most = most
        self.vector = FLOATS if item_bits == 32 else ir.VectorType(I16, LANES)
        self._wide = wide
        self._narrow = narrow

    def load(self, builder: Any, address: Any, offset: int = 0) -> Any:
        """As float32."""
        return self._wide(builder, load(builder, address, offset, self.vector))

    def store(self, builder: Any, value: Any, address: Any, offset: int = 0) -> None:
        """Clamped and rounded."""
        value = clamp(builder, value, self.most)
        store(builder, self._narrow(builder, value), address, offset)


BF16 = Kind(16, BF16_MOST, _from_bf16, to_bf16)
FP16 = Kind(16, FP16_MOST, _from_fp16, _to_fp16)
FP32 = Kind(32, FP32_MOST, _same, _same)


def declared(builder: Any, name: str, kind: Any) -> Any:
    """A function of LLVM."""
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if found is None else found


def sign_bits(element: int) -> Any:
    """The signs of 16 elements from this one on, as the highest bits of lanes."""
    bits = [(tables.SIGNS >> ((element + lane) % 128)) & 1 for lane in range(LANES)]
    return ir.Constant(INTS, [-(1 << 31) if bit else 0 for bit in bits])


# Rows of working memory


def _build_add(builder: Any, total: Any, at: Any) -> None:
    store(builder, builder.fadd(load(builder, total), load(builder, at)), total)


def _build_take_off(builder: Any, at: Any, total: Any, part: Any) -> None:
    by = builder.bitcast(builder.trunc(part, I32), F32)
    less = builder.fmul(load(builder, total), spread(builder, by))
    store(builder, builder.fsub(load(builder, at), less), at)


#: ``add_row(total, at)``: ``total += at``.
add_row = wrap(2, _build_add)
#: ``take_off(at, total, part)``: ``at -= total * part``; ``part`` as the bits of a float32.
take_off = wrap(3, _build_take_off)


@inline
def reflect(at: Any, rows: Any, groups: Any, total: Any) -> None:
    """Take twice their mean off groups of so many rows; ``total`` is working memory."""
    part = bits_of(np.float32(2.0 / groups))
    for row in range(rows):
        raw.copy(total, at + row * ROW, ROW)
        for number in range(1, groups):
            add_row(total, at + (number * rows + row) * ROW)
        for number in range(groups):
            take_off(at + (number * rows + row) * ROW, total, part)


def _build_widen(builder: Any, source: Any, to: Any) -> None:
    store(builder, BF16.load(builder, source), to)


#: ``widen(source, to)``: 16 bfloat16 as float32.
widen = wrap(2, _build_widen)


def _signs_at(builder: Any, to: Any, nothing: Any) -> None:
    del nothing
    for number in range(8):
        store(builder, sign_bits(LANES * number), to, ROW * number)


#: ``store_signs(to, 0)``: the signs of 128 elements, as highest bits of 32.
store_signs = wrap(2, _signs_at)


@inline
def unit_of(dim: Any) -> Any:
    """As in ``lbq_tables.py``."""
    if dim % 128 == 0:
        return np.int64(128)
    if dim % 64 == 0:
        return np.int64(64)
    return dim


@inline
def precise_of(words: Any) -> Any:
    """As in ``lbq_tables.py``."""
    tokens = words[C.ROW_OUTER] * words[C.ROW_INNER]
    return max(np.int64(1), tokens // (32 if words[C.ROW_ROLE] == C.ROLE_KEY else 128))


@inline
def stored_size(words: Any) -> Any:
    """Bytes of a stored tensor, or -1 if this coder does not store such tensors."""
    dtype, dim, bits = words[C.ROW_DTYPE], words[C.ROW_DIM], words[C.ROW_BITS]
    width = bits & tables.WIDTH_MASK
    channels = words[C.ROW_HEADS] * dim
    if (
        dtype not in (C.DTYPE_BF16, C.DTYPE_FP16, C.DTYPE_FP32)
        or not 2 <= width <= 4
        or bits != width | (bits & (tables.CENTRED | tables.PRECISE | tables.TURNING))
        or (bits & tables.TURNING and (not bits & tables.CENTRED or dim % 32 != 0))
        or words[C.ROW_ROLE] not in (C.ROLE_KEY, C.ROLE_VALUE, C.ROLE_LATENT)
        or dim % 16 != 0
        or not 16 <= dim <= MOST_DIM
        or channels > MOST_CHANNELS
    ):
        return REFUSED
    vectors = words[C.ROW_OUTER] * words[C.ROW_INNER] * words[C.ROW_HEADS]
    if vectors > MOST_VECTORS:
        return REFUSED
    size = 1 + vectors * (dim // unit_of(dim)) + vectors * dim * width // 8
    if bits & tables.CENTRED:
        size += 2 * channels
    if bits & tables.TURNING:
        size += 2 + 2 * dim
    if bits & tables.PRECISE:
        size += words[C.ROW_HEADS] * precise_of(words) * (4 + dim)
    return size


@inline
def load_u16(address: Any) -> Any:
    """The little-endian integer there."""
    return np.int64(bytes_at(address)[0]) | np.int64(bytes_at(address)[1]) << 8


@inline
def store_u16(address: Any, number: Any) -> None:
    """Write a little-endian integer."""
    bytes_at(address)[0] = number & 0xFF
    bytes_at(address)[1] = (number >> 8) & 0xFF


@inline
def vector_at(words: Any, start: Any, token: Any, head: Any) -> Any:
    """Address of a vector."""
    inner = words[C.ROW_INNER]
    return (
        start
        + (token // inner) * words[C.ROW_OUTER_STRIDE]
        + (token % inner) * words[C.ROW_INNER_STRIDE]
        + head * words[C.ROW_HEAD_STRIDE]
    )


# Means that turn: a group of 16 pairs has a row of cosines and one of sines


def _build_turn(builder: Any, phase: Any, by: Any) -> None:
    cosine, sine = load(builder, phase), load(builder, phase, ROW)
    c, s = load(builder, by), load(builder, by, ROW)
    one = builder.fsub(builder.fmul(cosine, c), builder.fmul(sine, s))
    other = builder.fadd(builder.fmul(cosine, s), builder.fmul(sine, c))
    store(builder, one, phase)
    store(builder, other, phase, ROW)


#: ``turn(phase, by)``: a group of pairs from one token to the next.
turn = wrap(2, _build_turn)

EVENS = pick(range(0, 32, 2))
ODDS = pick(range(1, 32, 2))
FIRST_HALVES = pick([lane // 2 + (LANES if lane % 2 else 0) for lane in range(LANES)])
SECOND_HALVES = pick([8 + lane // 2 + (LANES if lane % 2 else 0) for lane in range(LANES)])


def _turned_of(beside: bool) -> Any:
    """``turned(means, apart, phase, to, distance)``: a group's means at a token.

    The first channels' means are at ``means``, the others' ``apart`` bytes behind. They go to
    ``to`` and ``distance`` bytes behind, or, if channels of a pair are side by side, next to
    each other.
    """

    def build(builder: Any, means: Any, apart: Any, phase: Any, to: Any, distance: Any) -> None:
        x, y = load(builder, means), load(builder, builder.add(means, apart))
        cosine, sine = load(builder, phase), load(builder, phase, ROW)
        one = builder.fsub(builder.fmul(x, cosine), builder.fmul(y, sine))
        other = builder.fadd(builder.fmul(y, cosine), builder.fmul(x, sine))
        if beside:
            store(builder, builder.shuffle_vector(one, other, FIRST_HALVES), to)
            store(builder, builder.shuffle_vector(one, other, SECOND_HALVES), to, ROW)
        else:
            store(builder, one, to)
            store(builder, other, builder.add(to, distance))

    return wrap(5, build)


_turned_apart, _turned_beside = _turned_of(beside=False), _turned_of(beside=True)


@helper
def turned_means(means: Any, phases: Any, dim: Any, distance: Any, to: Any) -> None:
    """A head's means at a token, in the order of channels."""
    pairs = dim // 2
    if distance == 1:
        for pair in range(0, pairs, 16):
            _turned_beside(means + 4 * pair, 4 * pairs, phases + 8 * pair, to + 8 * pair, 0)
        return
    pair = 0
    for block in range(0, dim, 2 * distance):
        for channel in range(block, block + distance, 16):
            _turned_apart(
                means + 4 * pair, 4 * pairs, phases + 8 * pair, to + 4 * channel, 4 * distance
            )
            pair += 16


@helper
def start_phases(phases: Any, by: Any, steps: Any, pairs: Any) -> None:
    """Phases of the first token, and by what they turn; ``steps`` is as it is stored."""
    numbers, floats_ = int16_at(steps), float32_at(by)
    phase = float32_at(phases)
    unity = np.float32(tables.UNITY)
    for pair in range(pairs):
        place = pair // 16 * 32 + pair % 16
        phase[place], phase[place + 16] = np.float32(1), np.float32(0)
        floats_[place] = np.float32(numbers[pair]) / unity
        floats_[place + 16] = np.float32(numbers[pairs + pair]) / unity


@helper
def turn_phases(phases: Any, by: Any, pairs: Any) -> None:
    """From one token to the next."""
    for pair in range(0, pairs, 16):
        turn(phases + 8 * pair, by + 8 * pair)
