"""How the coder LBQ restores tensors; see ``codecs/lbq.py``."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import config

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, shared
from lifeboat_cache.kernels.lbq_lanes import (
    BF16,
    F32,
    FIRST_HALVES,
    FLOATS,
    FP16,
    FP32,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    MOST_CHANNELS,
    MOST_DIM,
    OVER_ROOTS,
    REFUSED,
    ROW,
    SECOND_HALVES,
    Kind,
    as_floats,
    as_ints,
    bits_of,
    declared,
    float_of,
    floats,
    ints,
    load,
    load_u16,
    loop,
    pick,
    precise_of,
    reflect,
    sign_bits,
    spread,
    start_phases,
    step,
    store,
    store_signs,
    stored_size,
    unit_of,
    vector_at,
    widen,
    wrap,
)
from lifeboat_cache.kernels.memory import bytes_at, words_at

__all__ = ["decode"]

# Levels


def _features() -> frozenset[str]:
    """What the processor has for which numba compiles."""
    if config.CPU_NAME == "generic" or config.CPU_FEATURES is not None:
        wanted = (config.CPU_FEATURES or "").split(",")
        return frozenset(feature[1:] for feature in wanted if feature.startswith("+"))
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


def _look_up(builder: Any, table: list[float], bits: int, index: Any) -> Any:
    """``table[index]`` in each lane; ``index`` has no more than so many bits."""
    features = _features()
    table = table * (LANES // len(table))
    if "avx512f" in features:
        kind = ir.FunctionType(FLOATS, [FLOATS, INTS])
        permute = declared(builder, "llvm.x86.avx512.permvar.sf.512", kind)
        return builder.call(permute, [ir.Constant(FLOATS, table), index])
    if "avx2" in features:
        eight, eights = ir.VectorType(F32, 8), ir.VectorType(I32, 8)
        permute = declared(builder, "llvm.x86.avx2.permps", ir.FunctionType(eight, [eight, eights]))
        halves = []
        for part in range(2):
            nothing = ir.Constant(INTS, ir.Undefined)
            own = builder.shuffle_vector(index, nothing, pick(range(8 * part, 8 * part + 8)))
            found = builder.call(permute, [ir.Constant(eight, table[:8]), own])
            if bits == 4:
                upper = builder.call(permute, [ir.Constant(eight, table[8:]), own])
                is_upper = builder.icmp_signed(">", own, ir.Constant(eights, [7] * 8))
                found = builder.select(is_upper, upper, found)
            halves.append(found)
        return builder.shuffle_vector(halves[0], halves[1], pick(range(16)))
    choices: list[Any] = [floats(number) for number in table[: 1 << bits]]
    for bit in range(bits):
        is_set = builder.icmp_signed("!=", builder.and_(index, ints(1 << bit)), ints(0))
        choices = [
            builder.select(is_set, odd, even)
            for even, odd in zip(choices[::2], choices[1::2], strict=True)
        ]
    return choices[0]


def _lane_bytes(builder: Any, address: Any, offset: int) -> Any:
    """16 bytes, one in each lane."""
    return builder.zext(load(builder, address, offset, ir.VectorType(I8, LANES)), INTS)


def _lane_nibbles(builder: Any, address: Any, offset: int) -> Any:
    """8 bytes, 4 bits at the bottom of each lane, and other bits above."""
    words = load(builder, address, offset, ir.VectorType(I32, 2))
    nothing = ir.Constant(words.type, ir.Undefined)
    wide = builder.shuffle_vector(words, nothing, pick([0] * 8 + [1] * 8))
    return builder.lshr(wide, ir.Constant(INTS, [4 * (lane % 8) for lane in range(LANES)]))


def _levels_of(width: int) -> Any:
    """``levels(source, to, count, lanes)``: the levels of chunks of ``4 * lanes`` elements.

    There are always 64 at ``to`` for a chunk, of which the first ones count.
    """
    positive = tables.LEVELS[width]
    # In the index, the subset's bits come in the order in which they are computed.
    table = [
        float(np.float32(positive[4 * (index >> 2) + 2 * (index & 1) + ((index >> 1) & 1)]))
        for index in range(1 << width)
    ]

    def build(builder: Any, source: Any, to: Any, count: Any, lanes: Any) -> None:
        by = builder.shl(lanes, ir.Constant(I64, 2))

        def body(number: Any, nothing: list[Any]) -> list[Any]:
            chunk = step(builder, source, number, 8 * width)
            at = step(builder, to, number, 4 * tables.CHUNK)
            for level in _chunk_levels(builder, chunk, width, table):
                store(builder, level, at)
                at = builder.add(at, by)
            return nothing

        loop(builder, count, [], body)

    return wrap(4, build)


def _chunk_levels(builder: Any, source: Any, width: int, table: list[float]) -> list[Any]:
    """Four registers: element ``t`` is in lane ``t // 4`` of register ``t % 4``."""
    own = _lane_bytes(builder, source, 0)
    # Each lane's byte with that of the lane before, whose elements come before.
    before = builder.shuffle_vector(own, ints(0), pick([16, *range(15)]))
    both = builder.or_(builder.shl(own, ints(8)), before)
    sign = builder.lshr(both, ints(1))
    low = builder.xor(both, builder.shl(both, ints(2)))
    low = builder.xor(low, builder.xor(builder.shl(both, ints(6)), sign))
    high = builder.xor(builder.shl(both, ints(5)), both)
    index = builder.or_(builder.and_(low, ints(0x5500)), builder.and_(high, ints(0xAA00)))
    more = None
    if width == 3:
        more = _lane_nibbles(builder, source, 16)
    elif width == 4:
        more = _lane_bytes(builder, source, 16)
    levels = []
    for number in range(4):
        chosen = builder.and_(builder.lshr(index, ints(8 + 2 * number)), ints(3))
        if width > 2:
            left = 2 - (width - 2) * number
            shifted = builder.shl(more, ints(left)) if left > 0 else more
            shifted = builder.lshr(more, ints(-left)) if left < 0 else shifted
            chosen = builder.or_(chosen, builder.and_(shifted, ints((1 << width) - 4)))
        level = as_ints(builder, _look_up(builder, table, width, chosen))
        minus = builder.and_(builder.shl(both, ints(22 - 2 * number)), ints(1 << 31))
        levels.append(builder.xor(level, minus))
    return levels


_levels2, _levels3, _levels4 = (_levels_of(width) for width in tables.WIDTHS)


@helper
def _levels(source: Any, to: Any, count: Any, lanes: Any, width: Any) -> None:
    if width == 4:
        _levels4(source, to, count, lanes)
    elif width == 3:
        _levels3(source, to, count, lanes)
    else:
        _levels2(source, to, count, lanes)


# Rotation, scale, mean, dtype: units on two axes, with a distance in bytes along each

_P_LEVELS = 0
_P_MEANS = 1
_P_TO = 2
_P_SCALES = 3
_P_COUNT = 4
_P_BY_COUNT = 5
_P_LOW = 6
_P_WORDS = 16


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
            registers[number] = builder.shuffle_vector(a, b, pick(first))
            registers[other] = builder.shuffle_vector(a, b, pick(second))


def _swap_lanes(builder: Any, registers: list[Any], bit: int) -> None:
    """Sums and differences of lanes whose numbers differ by this bit."""
    distance = 1 << bit
    order = pick([lane ^ distance for lane in range(LANES)])
    choice = pick([lane + LANES if lane & distance else lane for lane in range(LANES)])
    for number, register in enumerate(registers):
        partner = builder.shuffle_vector(register, ir.Constant(FLOATS, ir.Undefined), order)
        total = builder.fadd(register, partner)
        difference = builder.fsub(partner, register)
        registers[number] = builder.shuffle_vector(total, difference, choice)


def _rotate(builder: Any, registers: list[Any], group: int) -> None:
    """A group, which of 64 and 128 is in the order of storage."""
    if group >= 64:
        for shuffle, bit in tables.exchanges(group):
            if shuffle:
                _exchange(builder, registers, shuffle, bit)
            _add_and_subtract(builder, registers, bit)
        return
    for bit in tables.STAGES[group]:
        if bit >= 4:
            _add_and_subtract(builder, registers, bit - 4)
        else:
            _swap_lanes(builder, registers, bit)


def _reflect(builder: Any, registers: list[Any], rows: int) -> None:
    """Take twice their mean off groups of so many registers."""
    groups = len(registers) // rows
    part = floats(np.float32(2 / groups))
    for row in range(rows):
        total = registers[row]
        for number in range(1, groups):
            total = builder.fadd(total, registers[number * rows + row])
        less = builder.fmul(total, part)
        for number in range(groups):
            place = number * rows + row
            registers[place] = builder.fsub(registers[place], less)


def _finish_of(kind: Kind, unit: int) -> Any:
    """``finish(at)``: rotated and finished units out of levels; ``at`` is the address of words.

    Words ``P_LEVELS`` to ``P_SCALES`` are addresses, ``P_COUNT`` and ``P_BY_COUNT`` how many
    units there are on the first and second axis. From word 8 on are the distances of the
    addresses along the first axis, from word 12 on along the second.
    """
    group = tables.group_of(unit)
    over_root = ir.Constant(F32, OVER_ROOTS[group])

    def build(builder: Any, parameters: Any, nothing: Any) -> None:
        del nothing
        words = [load(builder, parameters, 8 * number, I64) for number in range(_P_WORDS)]

        def one(levels: Any, means: Any, to: Any, scales: Any) -> None:
            code = builder.zext(load(builder, scales, 0, I8), I64)
            number = builder.add(code, words[_P_LOW])
            largest = ir.Constant(I64, 16 * 254 + 15)
            number = builder.select(builder.icmp_signed("<", number, largest), number, largest)
            number = builder.select(
                builder.icmp_signed(">", code, ir.Constant(I64, 0)), number, ir.Constant(I64, 0)
            )
            bits = builder.trunc(builder.shl(number, ir.Constant(I64, 19)), I32)
            scale = builder.fmul(builder.bitcast(bits, F32), over_root)
            by = spread(builder, builder.bitcast(scale, I32))
            registers = [load(builder, levels, ROW * place) for place in range(unit // LANES)]
            if unit > group:
                _reflect(builder, registers, group // LANES)
            for first in range(0, unit // LANES, group // LANES):
                part = registers[first : first + group // LANES]
                _rotate(builder, part, group)
                registers[first : first + group // LANES] = part
            for place, register in enumerate(registers):
                signed = as_floats(builder, builder.xor(by, sign_bits(LANES * place)))
                value = builder.fmul(register, signed)
                value = builder.fadd(value, load(builder, means, ROW * place))
                kind.store(builder, value, to, LANES * kind.item * place)

        def inner(_: Any, at: list[Any]) -> list[Any]:
            one(*at)
            return [builder.add(a, by) for a, by in zip(at, words[12:16], strict=True)]

        def outer(_: Any, at: list[Any]) -> list[Any]:
            loop(builder, words[_P_BY_COUNT], at, inner)
            return [builder.add(a, by) for a, by in zip(at, words[8:12], strict=True)]

        loop(builder, words[_P_COUNT], words[:4], outer)

    return wrap(2, build)


_UNITS = (64, 80, 96, 128)


def _all_turned_of(beside: bool) -> Any:
    """``turned(at, nothing)``: all heads' means at a token; ``at`` is the address of words.

    They are the addresses of means, phases, what phases turn by, and of the first head's means
    at the token; then the numbers of heads, of blocks of channels and of groups of 16 pairs in
    a block, then the bytes of a head's means and of half a block. Phases go on to the next
    token.
    """

    def build(builder: Any, parameters: Any, nothing: Any) -> None:
        del nothing
        means, phases, by, to, heads, blocks, groups, head_by, half = (
            load(builder, parameters, 8 * number, I64) for number in range(9)
        )
        apart = builder.lshr(head_by, ir.Constant(I64, 1))
        by_phases = builder.sub(by, phases)

        def group(_: Any, at: list[Any]) -> list[Any]:
            own_means, phase, own_to = at
            cosine, sine = load(builder, phase), load(builder, phase, ROW)

            def head(_: Any, places: list[Any]) -> list[Any]:
                x = load(builder, places[0])
                y = load(builder, builder.add(places[0], apart))
                one = builder.fsub(builder.fmul(x, cosine), builder.fmul(y, sine))
                other = builder.fadd(builder.fmul(y, cosine), builder.fmul(x, sine))
                if beside:
                    store(builder, builder.shuffle_vector(one, other, FIRST_HALVES), places[1])
                    last = builder.shuffle_vector(one, other, SECOND_HALVES)
                    store(builder, last, places[1], ROW)
                else:
                    store(builder, one, places[1])
                    store(builder, other, builder.add(places[1], half))
                return [builder.add(place, head_by) for place in places]

            loop(builder, heads, [own_means, own_to], head)
            turn_from = builder.add(phase, by_phases)
            c, s = load(builder, turn_from), load(builder, turn_from, ROW)
            one = builder.fsub(builder.fmul(cosine, c), builder.fmul(sine, s))
            other = builder.fadd(builder.fmul(cosine, s), builder.fmul(sine, c))
            store(builder, one, phase)
            store(builder, other, phase, ROW)
            steps = (ROW, 2 * ROW, 2 * ROW if beside else ROW)
            return [
                builder.add(place, ir.Constant(I64, number))
                for place, number in zip(at, steps, strict=True)
            ]

        def block(_: Any, at: list[Any]) -> list[Any]:
            after = loop(builder, groups, at, group)
            return [*after[:2], builder.add(after[2], half)]

        loop(builder, blocks, [means, phases, to], block)

    return wrap(2, build)


_all_turned_apart, _all_turned_beside = _all_turned_of(beside=False), _all_turned_of(beside=True)


def _build_rotation(group: int) -> Any:
    """``rotate(at, nothing)``: a group of 16 or 32 in its place."""

    def build(builder: Any, at: Any, nothing: Any) -> None:
        del nothing
        registers = [load(builder, at, ROW * number) for number in range(group // LANES)]
        _rotate(builder, registers, group)
        for number, register in enumerate(registers):
            store(builder, register, at, ROW * number)

    return wrap(2, build)


_rotate16, _rotate32 = _build_rotation(16), _build_rotation(32)


def _finish_any(kind: Kind) -> Any:
    """``finish(rotated, signs, means, to, scale)``: 16 rotated elements."""

    def build(builder: Any, source: Any, signs: Any, means: Any, to: Any, scale: Any) -> None:
        by = spread(builder, builder.trunc(scale, I32))
        by = as_floats(builder, builder.xor(by, load(builder, signs, 0, INTS)))
        value = builder.fadd(builder.fmul(load(builder, source), by), load(builder, means))
        kind.store(builder, value, to)

    return wrap(5, build)


def _finishing(kind: Kind) -> Any:
    """``finish(parameters, unit, work)`` of a dtype."""
    finish64, finish80, finish96, finish128 = (_finish_of(kind, unit) for unit in _UNITS)
    finish16 = _finish_any(kind)
    item = kind.item
    over16, over32 = np.float32(OVER_ROOTS[16]), np.float32(OVER_ROOTS[32])

    @helper
    def finish_one(
        levels: Any, means: Any, to: Any, scale: Any, low: Any, unit: Any, work: Any
    ) -> None:
        """Any unit that is no multiple of 64."""
        code = np.int64(bytes_at(scale)[0])
        number = min(code + low, np.int64(16 * 254 + 15)) if code > 0 else np.int64(0)
        rows = np.int64(2) if unit % 32 == 0 else np.int64(1)
        factor = bits_of(float_of(number << 19) * (over32 if rows == 2 else over16))
        groups = unit // (16 * rows)
        if groups > 1:
            reflect(levels, rows, groups, work + _TOTAL)
        for group in range(groups):
            if rows == 2:
                _rotate32(levels + 2 * ROW * group, 0)
            else:
                _rotate16(levels + ROW * group, 0)
        for row in range(unit // 16):
            finish16(
                levels + ROW * row,
                work + _SIGNS + ROW * (row % 8),
                means + ROW * row,
                to + 16 * item * row,
                factor,
            )

    @helper
    def finish(parameters: Any, unit: Any, work: Any) -> None:
        if unit == 128:
            finish128(parameters, 0)
        elif unit == 64:
            finish64(parameters, 0)
        elif unit == 96:
            finish96(parameters, 0)
        elif unit == 80:
            finish80(parameters, 0)
        else:
            words = words_at(parameters)
            for a in range(words[_P_COUNT]):
                for b in range(words[_P_BY_COUNT]):
                    finish_one(
                        words[0] + a * words[8] + b * words[12],
                        words[1] + a * words[9] + b * words[13],
                        words[2] + a * words[10] + b * words[14],
                        words[3] + a * words[11] + b * words[15],
                        words[_P_LOW],
                        unit,
                        work,
                    )

    return finish


_finish_bf16, _finish_fp16, _finish_fp32 = (_finishing(kind) for kind in (BF16, FP16, FP32))

# Working memory of restoring, in bytes from its beginning.
_PARAMETERS = 0
_TURNS = _PARAMETERS + 2 * ROW
_SIGNS = _TURNS + 2 * ROW
_TOTAL = _SIGNS + 8 * ROW
_PADDED = _TOTAL + ROW
_MEANS = _PADDED + ROW
_LEVELS = _MEANS + 4 * MOST_CHANNELS
_ROWS = _LEVELS + 4 * MOST_CHANNELS + 4 * ROW
_PHASES = _ROWS + 4 * MOST_CHANNELS
_BY = _PHASES + 4 * MOST_DIM

#: Bytes of levels that are made at a time: they stay in the first cache.
_BATCH = 4096


def _build_times(kind: Kind) -> Any:
    """``times(steps, to, scale)``: 16 steps of 8 bits; ``scale`` is the bits of a float32."""

    def build(builder: Any, source: Any, to: Any, scale: Any) -> None:
        wide = builder.sext(load(builder, source, 0, ir.VectorType(I8, LANES)), INTS)
        by = as_floats(builder, spread(builder, builder.trunc(scale, I32)))
        kind.store(builder, builder.fmul(builder.sitofp(wide, FLOATS), by), to)

    return wrap(3, build)


_times_bf16, _times_fp16, _times_fp32 = (_build_times(kind) for kind in (BF16, FP16, FP32))


@helper
def _put_back(words: Any, start: Any, end: Any) -> Any:
    """Restore the tokens that are stored apart; whether all of them are tokens."""
    heads, dim, dtype = words[C.ROW_HEADS], words[C.ROW_DIM], words[C.ROW_DTYPE]
    tokens, count = words[C.ROW_OUTER] * words[C.ROW_INNER], precise_of(words)
    source = end - heads * count * (4 + dim)
    steps = source + 4 * heads * count
    for head in range(heads):
        for number in range(count):
            place = head * count + number
            token = np.int64(load_u16(source + 2 * place))
            if token >= tokens:
                return False
            scale = np.int64(load_u16(source + 2 * (heads * count + place))) << 16
            to, at = vector_at(words, start, token, head), steps + place * dim
            for channel in range(0, dim, 16):
                if dtype == C.DTYPE_BF16:
                    _times_bf16(at + channel, to + 2 * channel, scale)
                elif dtype == C.DTYPE_FP16:
                    _times_fp16(at + channel, to + 2 * channel, scale)
                else:
                    _times_fp32(at + channel, to + 4 * channel, scale)
    return True


@helper
def _batch_levels(source: Any, to: Any, units: Any, unit: Any, width: Any, padded: Any) -> None:
    """The levels of units."""
    whole = unit // 64
    if whole * 64 == unit:
        _levels(source, to, units * whole, 16, width)
        return
    rest = unit - 64 * whole
    lanes, high = rest // 4, rest * (width - 2) // 8
    for _ in range(units):
        if whole:
            _levels(source, to, whole, 16, width)
        at = source + 8 * width * whole
        raw.zero(padded, 32)
        raw.copy(padded, at, lanes)
        raw.copy(padded + 16, at + lanes, high)
        # What is written behind the unit's last element is overwritten by the next unit.
        _levels(padded, to + 256 * whole, 1, lanes, width)
        source += unit * width // 8
        to += 4 * unit


@shared("int64(int64, int64, int64, int64, int64)")
def decode(row: Any, start: Any, src: Any, size: Any, scratch: Any) -> Any:
    """Restore a tensor; see ``lbq_encode.py``.

    Returns
    -------
    Bytes that the stored tensor has, or -1 if there are fewer or they are none.
    """
    words = words_at(row)
    stored = stored_size(words)
    if stored < 0 or stored > size:
        return REFUSED
    top = np.int64(bytes_at(src)[0])
    if top < 16:
        return REFUSED
    heads, dim, dtype = words[C.ROW_HEADS], words[C.ROW_DIM], words[C.ROW_DTYPE]
    width = words[C.ROW_BITS] & tables.WIDTH_MASK
    outer, outer_by = words[C.ROW_OUTER], words[C.ROW_OUTER_STRIDE]
    inner, inner_by = words[C.ROW_INNER], words[C.ROW_INNER_STRIDE]
    if inner == 1 or outer_by == inner * inner_by:
        if inner == 1:
            inner_by = outer_by
        inner, outer = inner * outer, np.int64(1)
    unit = unit_of(dim)
    units = dim // unit
    bits = words[C.ROW_BITS]
    scales, turning, distance = src + 1, bits & tables.TURNING, np.int64(0)
    means, levels = scratch + _MEANS, scratch + _LEVELS
    phases, by = scratch + _PHASES, scratch + _BY
    turns = words_at(scratch + _TURNS)
    if turning:
        distance = np.int64(bytes_at(scales)[0]) | np.int64(bytes_at(scales)[1]) << 8
        fourth = distance == dim // 4 and dim % 64 == 0
        if distance not in (1, dim // 2) and not fourth:
            return REFUSED
        start_phases(phases, by, scales + 2, dim // 2)
        turns[0], turns[1], turns[2] = means, phases, by
        turns[4], turns[7] = heads, 4 * dim
        turns[5], turns[6], turns[8] = np.int64(1), dim // 32, np.int64(0)
        if distance > 1:
            turns[5], turns[6], turns[8] = dim // (2 * distance), distance // 16, 4 * distance
        scales += 2 + 2 * dim
    if bits & tables.CENTRED:
        for at in range(0, heads * dim, 16):
            widen(scales + 2 * at, means + 4 * at)
        scales += 2 * heads * dim
    else:
        raw.zero(means, 4 * heads * dim)
    store_signs(scratch + _SIGNS, 0)
    codes = scales + words[C.ROW_OUTER] * words[C.ROW_INNER] * heads * units
    item = np.int64(4) if dtype == C.DTYPE_FP32 else np.int64(2)
    parameters = words_at(scratch + _PARAMETERS)
    parameters[_P_LOW] = 16 * (top - 15)
    # Along the first axis tokens, along the second heads or, if there are several in a vector
    # and vectors do not follow each other, units.
    by_head = units == 1
    together = by_head or words[C.ROW_HEAD_STRIDE] == dim * item
    parameters[_P_BY_COUNT] = heads * units if together else units
    parameters[8], parameters[12] = 4 * heads * dim, 4 * unit
    parameters[9] = 4 * heads * dim if turning else np.int64(0)
    parameters[13] = 4 * unit
    parameters[10] = inner_by
    parameters[14] = words[C.ROW_HEAD_STRIDE] if by_head else unit * item
    parameters[11], parameters[15] = heads * units, np.int64(1)
    batch = max(np.int64(1), _BATCH // (4 * heads * dim))
    for o in range(outer):
        first = np.int64(0)
        while first < inner:
            tokens = min(batch, inner - first)
            _batch_levels(codes, levels, tokens * heads * units, unit, width, scratch + _PADDED)
            parameters[_P_COUNT] = tokens
            offsets = means
            if turning:
                offsets = scratch + _ROWS
                for token in range(tokens):
                    turns[3] = offsets + 4 * token * heads * dim
                    if distance == 1:
                        _all_turned_beside(scratch + _TURNS, 0)
                    else:
                        _all_turned_apart(scratch + _TURNS, 0)
            for head in range(np.int64(1) if together else heads):
                parameters[_P_LEVELS] = levels + 4 * head * dim
                parameters[_P_MEANS] = offsets + 4 * head * dim
                parameters[_P_TO] = (
                    start + o * outer_by + first * inner_by + head * words[C.ROW_HEAD_STRIDE]
                )
                parameters[_P_SCALES] = scales + head * units
                if dtype == C.DTYPE_BF16:
                    _finish_bf16(scratch + _PARAMETERS, unit, scratch)
                elif dtype == C.DTYPE_FP16:
                    _finish_fp16(scratch + _PARAMETERS, unit, scratch)
                else:
                    _finish_fp32(scratch + _PARAMETERS, unit, scratch)
            codes += tokens * heads * dim * width // 8
            scales += tokens * heads * units
            first += tokens
    if bits & tables.PRECISE and not _put_back(words, start, src + stored):
        return REFUSED
    return stored
