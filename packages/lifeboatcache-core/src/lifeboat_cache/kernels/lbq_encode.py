"""How the coder LBQ stores tensors; see ``codecs/lbq.py``.

16 vectors are stored at a time, a lane for each, so that the search for the best path needs no
shuffles; element after element is a row of working memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, inline, shared
from lifeboat_cache.kernels.lbq_fit import choose, fit_means, fit_turning, is_chosen
from lifeboat_cache.kernels.lbq_lanes import (
    BF16,
    F32,
    FLOATS,
    FP16,
    FP32,
    FP32_MOST,
    I32,
    I64,
    INF,
    INTS,
    LANES,
    MAGNITUDE,
    MOST_CHANNELS,
    MOST_DIM,
    REFUSED,
    ROOTS,
    ROW,
    Kind,
    as_floats,
    as_ints,
    bits_of,
    clamp,
    declared,
    floats,
    ints,
    load,
    loop,
    pick,
    reflect,
    spread,
    start_phases,
    step,
    store,
    store_signs,
    stored_size,
    turn_phases,
    turned_means,
    unit_of,
    vector_at,
    widen,
    wrap,
)
from lifeboat_cache.kernels.memory import bytes_at, words_at

__all__ = ["encode"]


def _gather_of(kind: Kind) -> Any:
    """``gather(addresses, offset, means, to)``: 16 elements of each of 16 vectors, as 16 rows.

    Their means are taken off. Those of a vector are at ``means`` bytes behind the address that
    stands 16 words behind the vector's.
    """

    def build(builder: Any, addresses: Any, offset: Any, means: Any, to: Any) -> None:
        registers = []
        for lane in range(LANES):
            vector = load(builder, addresses, 8 * lane, I64)
            own_means = load(builder, addresses, 8 * (LANES + lane), I64)
            value = kind.load(builder, builder.add(vector, offset))
            rest = builder.fsub(value, load(builder, builder.add(own_means, means)))
            rest = clamp(builder, rest, FP32_MOST)
            registers.append(builder.select(_is_finite(builder, value), rest, floats(0)))
        for bit in range(4):
            distance = 1 << bit
            first = [
                lane if not lane & distance else (lane ^ distance) + LANES for lane in range(LANES)
            ]
            second = [lane + LANES if lane & distance else lane | distance for lane in range(LANES)]
            for number in range(LANES):
                other = number | distance
                if other != number:
                    a, b = registers[number], registers[other]
                    registers[number] = builder.shuffle_vector(a, b, pick(first))
                    registers[other] = builder.shuffle_vector(a, b, pick(second))
        for number, register in enumerate(registers):
            store(builder, register, to, ROW * number)

    return wrap(4, build)


def _peak_of(kind: Kind) -> Any:
    """``peak(vector, means, dim, most)``: raise ``most`` to magnitudes of a vector less means."""

    def build(builder: Any, vector: Any, means: Any, dim: Any, to: Any) -> None:
        def body(number: Any, most: list[Any]) -> list[Any]:
            value = kind.load(builder, step(builder, vector, number, LANES * kind.item))
            rest = builder.fsub(value, load(builder, step(builder, means, number, ROW)))
            rest = clamp(builder, rest, FP32_MOST)
            rest = builder.select(_is_finite(builder, value), rest, floats(0))
            size = builder.and_(as_ints(builder, rest), ints(MAGNITUDE))
            return [builder.select(builder.icmp_signed(">", size, most[0]), size, most[0])]

        count = builder.lshr(dim, ir.Constant(I64, 4))
        (most,) = loop(builder, count, [load(builder, to, 0, INTS)], body)
        store(builder, most, to)

    return wrap(4, build)


_peak_bf16, _peak_fp16, _peak_fp32 = (_peak_of(kind) for kind in (BF16, FP16, FP32))


def _is_finite(builder: Any, value: Any) -> Any:
    size = builder.and_(as_ints(builder, value), ints(MAGNITUDE))
    return builder.icmp_signed("<", size, ints(INF))


def _build_largest(builder: Any, rows: Any, count: Any, to: Any) -> None:
    def body(number: Any, values: list[Any]) -> list[Any]:
        value = load(builder, step(builder, rows, number, ROW), 0, INTS)
        size = builder.and_(value, ints(MAGNITUDE))
        return [builder.select(builder.icmp_signed(">", size, values[0]), size, values[0])]

    (most,) = loop(builder, count, [ints(0)], body)
    store(builder, most, to)


#: ``largest(rows, count, to)``: the largest magnitude in each lane.
_largest = wrap(3, _build_largest)


def _square_roots(builder: Any, value: Any) -> Any:
    root = declared(builder, "llvm.sqrt.v16f32", ir.FunctionType(FLOATS, [FLOATS]))
    return builder.call(root, [value])


def _build_measure(builder: Any, rows: Any, signs: Any, unit: Any, state: Any) -> None:
    most = load(builder, state, 0, INTS)
    exponent = builder.lshr(most, ints(23))
    exponent = builder.select(builder.icmp_signed(">", exponent, ints(1)), exponent, ints(1))
    raised = builder.sub(ints(254), exponent)
    raised = builder.select(builder.icmp_signed(">", raised, ints(1)), raised, ints(1))
    by = as_floats(builder, builder.shl(raised, ints(23)))

    def body(number: Any, values: list[Any]) -> list[Any]:
        at = step(builder, rows, number, ROW)
        value = builder.fmul(load(builder, at), by)
        place = builder.and_(number, ir.Constant(I64, 127))
        sign = load(builder, step(builder, signs, place, 4), 0, I32)
        signed = builder.xor(as_ints(builder, value), spread(builder, sign))
        store(builder, signed, at)
        return [builder.fadd(values[0], builder.fmul(value, value))]

    (energy,) = loop(builder, unit, [floats(0)], body)
    mean = builder.fdiv(energy, spread(builder, builder.sitofp(unit, F32)))
    found = as_ints(builder, _square_roots(builder, mean))
    odd = builder.and_(builder.lshr(found, ints(19)), ints(1))
    scale = builder.lshr(builder.add(builder.add(found, ints(0x3FFFF)), odd), ints(19))
    lifted = builder.shl(builder.sub(raised, ints(127)), ints(4))
    scale = builder.sub(scale, lifted)
    largest = ints(16 * 254 + 15)
    scale = builder.select(builder.icmp_signed("<", scale, largest), scale, largest)
    scale = builder.select(builder.icmp_signed(">", most, ints(0)), scale, ints(0))
    store(builder, scale, state, ROW)
    store(builder, lifted, state, 2 * ROW)


#: ``measure(rows, signs, unit, state)``: multiply each unit by a power of two, so that its
#: largest element, which ``state`` says, is about 1, and by its elements' signs. The next row
#: of ``state`` gets the scales in steps of ``lbq.py``, then how much of it is that power.
_measure = wrap(4, _build_measure)


def _build_scale(builder: Any, state: Any, low: Any, root: Any) -> None:
    scale = load(builder, state, ROW, INTS)
    lifted = load(builder, state, 2 * ROW, INTS)
    code = builder.sub(scale, spread(builder, builder.trunc(low, I32)))
    there = builder.icmp_signed(">", code, ints(0))
    code = builder.select(there, code, ints(0))
    code = builder.select(builder.icmp_signed("<", code, ints(255)), code, ints(255))
    raised = as_floats(builder, builder.shl(builder.add(scale, lifted), ints(19)))
    root_ = spread(builder, builder.bitcast(builder.trunc(root, I32), F32))
    by = builder.fdiv(floats(1), builder.fmul(raised, root_))
    by = builder.select(there, by, floats(0))
    store(builder, by, state)
    store(builder, code, state, ROW)


#: ``scale(state, low, root)``: after ``measure``; ``state`` gets by what rotated elements are
#: multiplied, and the codes of scales. ``root`` is the bits of a float32.
_scale = wrap(3, _build_scale)


def _build_butterfly(builder: Any, first: Any, second: Any) -> None:
    a, b = load(builder, first), load(builder, second)
    store(builder, builder.fadd(a, b), first)
    store(builder, builder.fsub(a, b), second)


_butterfly = wrap(2, _build_butterfly)


def _build_scaled(builder: Any, source: Any, by: Any, to: Any) -> None:
    store(builder, builder.fmul(load(builder, source), load(builder, by)), to)


#: ``scaled(source, by, to)``.
_scaled = wrap(3, _build_scaled)


def _search_of(width: int) -> Any:
    """``search(rows, count, nearest, taken, end)``: the best path through a chunk.

    Four rows of ``nearest`` for each element get the nearest level of each subset, a row of
    ``taken`` which of its two branches each state takes back (a bit).
    ``end`` gets the states in which the best paths end.
    """
    positive = [np.float32(level) for level in tables.LEVELS[width]]
    levels = [-level for level in reversed(positive)] + positive

    def nearest_of(builder: Any, value: Any) -> tuple[list[Any], list[Any]]:
        nearest, errors = [], []
        for subset in range(4):
            own = levels[subset::4]
            level = floats(own[0])
            for number in range(1, len(own)):
                between = (own[number - 1] + own[number]) * np.float32(0.5)
                above = builder.fcmp_ordered(">", value, floats(between))
                level = builder.select(above, floats(own[number]), level)
            difference = builder.fsub(value, level)
            nearest.append(level)
            errors.append(builder.fmul(difference, difference))
        return nearest, errors

    def build(builder: Any, rows: Any, count: Any, nearest: Any, taken: Any, end: Any) -> None:
        def body(number: Any, costs: list[Any]) -> list[Any]:
            value = load(builder, step(builder, rows, number, ROW))
            levels_, errors = nearest_of(builder, value)
            choices, after = ints(0), []
            for state in range(tables.STATES):
                both = []
                for old in range(2):
                    before = (state >> 1) | (old << 2)
                    subset = tables.subset_of(before, state & 1)
                    both.append(builder.fadd(costs[before], errors[subset]))
                second = builder.fcmp_ordered("<", both[1], both[0])
                after.append(builder.select(second, both[1], both[0]))
                chosen = builder.select(second, ints(1 << state), ints(0))
                choices = builder.or_(choices, chosen)
            for subset, level in enumerate(levels_):
                at = step(builder, nearest, number, 4 * ROW)
                store(builder, level, at, ROW * subset)
            store(builder, choices, step(builder, taken, number, ROW))
            return after

        first = [floats(0)] + [floats(1e30)] * (tables.STATES - 1)
        costs = loop(builder, count, first, body)
        best, state = costs[0], ints(0)
        for other in range(1, tables.STATES):
            less = builder.fcmp_ordered("<", costs[other], best)
            best = builder.select(less, costs[other], best)
            state = builder.select(less, ints(other), state)
        store(builder, state, end)

    return wrap(5, build)


_search2, _search3, _search4 = (_search_of(width) for width in tables.WIDTHS)


def _trace_of(width: int) -> Any:
    """``trace(nearest, taken, end, sixteens, to)``: the best path's elements, packed.

    Each 16 elements give two rows at ``to``: the 32 bits of path and signs, and the rest.
    """
    # Magnitudes above which are the next four levels.
    positive = np.array(tables.LEVELS[width], dtype=np.float32)
    limits = [int(bits) for bits in positive.view(np.int32)[3:-1:4]]

    def build(builder: Any, nearest: Any, taken: Any, end: Any, sixteens: Any, to: Any) -> None:
        last = builder.sub(sixteens, ir.Constant(I64, 1))

        def body(number: Any, values: list[Any]) -> list[Any]:
            (state,) = values
            part = builder.sub(last, number)
            near = step(builder, nearest, part, 4 * ROW * 16)
            took = step(builder, taken, part, ROW * 16)
            core, more = ints(0), ints(0)
            for t in range(15, -1, -1):
                choices = load(builder, took, ROW * t, INTS)
                old = builder.and_(builder.lshr(choices, state), ints(1))
                before = builder.or_(builder.lshr(state, ints(1)), builder.shl(old, ints(2)))
                path = builder.and_(state, ints(1))
                upper = builder.and_(builder.xor(builder.xor(path, old), before), ints(1))
                lower = builder.and_(before, ints(2))
                is_upper = builder.icmp_signed("!=", upper, ints(0))
                is_lower = builder.icmp_signed("!=", lower, ints(0))
                rows = [load(builder, near, ROW * (4 * t + row), INTS) for row in range(4)]
                level = builder.select(
                    is_upper,
                    builder.select(is_lower, rows[3], rows[2]),
                    builder.select(is_lower, rows[1], rows[0]),
                )
                sign = builder.and_(builder.lshr(level, ints(30)), ints(2))
                core = builder.or_(builder.shl(core, ints(2)), builder.or_(path, sign))
                if width > 2:
                    size = builder.and_(level, ints(MAGNITUDE))
                    more = builder.shl(more, ints(width - 2))
                    for limit in limits:
                        above = builder.icmp_signed(">", size, ints(limit))
                        more = builder.add(more, builder.select(above, ints(1), ints(0)))
                state = before
            place = step(builder, to, part, 2 * ROW)
            store(builder, core, place)
            store(builder, more, place, ROW)
            return [state]

        loop(builder, sixteens, [load(builder, end, 0, INTS)], body)

    return wrap(5, build)


_trace2, _trace3, _trace4 = (_trace_of(width) for width in tables.WIDTHS)

_ORDER64 = np.array(tables.ORDERS[64], dtype=np.int64)
_ORDER128 = np.array(tables.ORDERS[128], dtype=np.int64)
_STAGES64 = np.array(tables.STAGES[64], dtype=np.int64)
_STAGES128 = np.array(tables.STAGES[128], dtype=np.int64)
_STAGES32 = np.array(tables.STAGES[32], dtype=np.int64)
_STAGES16 = np.array(tables.STAGES[16], dtype=np.int64)
_ROOT128, _ROOT64 = np.float32(ROOTS[128]), np.float32(ROOTS[64])
_ROOT32, _ROOT16 = np.float32(ROOTS[32]), np.float32(ROOTS[16])

# Working memory of storing, in bytes from its beginning.
_SIGNS = 0
_ADDRESSES = _SIGNS + 8 * ROW
_STATE = _ADDRESSES + 4 * ROW
_PEAKS = _STATE + 4 * ROW
_TOTAL = _PEAKS + ROW
_NEAREST = _TOTAL + ROW
_TAKEN = _NEAREST + 4 * tables.CHUNK * ROW
_PACKED = _TAKEN + tables.CHUNK * ROW
_NOTHING = _PACKED + 8 * ROW
_PHASES = _NOTHING + 4 * MOST_DIM
_BY = _PHASES + 4 * MOST_DIM
_MEANS = _BY + 4 * MOST_DIM
_SIXTEEN = _MEANS + 4 * MOST_CHANNELS
_TURNED = _SIXTEEN + LANES * 4 * MOST_DIM
_ROWS = _TURNED + LANES * 4 * MOST_DIM
_SEQUENCE = _ROWS + ROW * MOST_DIM


@helper
def _group_of(unit: Any) -> Any:
    if unit % 32 != 0:
        return np.int64(16)
    return unit if unit == 64 or unit == 128 else np.int64(32)


@inline
def _root_of(group: Any) -> Any:
    if group == 128:
        return bits_of(_ROOT128)
    if group == 64:
        return bits_of(_ROOT64)
    return bits_of(_ROOT32) if group == 32 else bits_of(_ROOT16)


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
                _butterfly(rows + ROW * element, rows + ROW * (element + distance))
        done += 1
        size *= 2
    if unit > group:
        reflect(rows, group, unit // group, total)


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
            _scaled(rows + ROW * place, by, to + ROW * (at + t))
        at += 4 * lanes


@helper
def _put(packed: Any, lane: Any, size: Any, width: Any, to: Any) -> None:
    """Write a lane's elements of a chunk."""
    more = to + size // 4
    for part in range(size // 16):
        at = packed + part * 2 * ROW + 4 * lane
        raw.store_u32(to + 4 * part, raw.load_u32(at))
        if width == 4:
            raw.store_u32(more + 4 * part, raw.load_u32(at + ROW))
        elif width == 3:
            word = raw.load_u32(at + ROW)
            bytes_at(more)[2 * part] = word & 0xFF
            bytes_at(more)[2 * part + 1] = word >> 8


@helper
def _store_units(scratch: Any, unit: Any, width: Any, lanes: Any, to: Any, stride: Any) -> None:
    """Find the best path of each unit, and write it."""
    at = np.int64(0)
    while at < unit:
        size = min(unit - at, np.int64(64))
        rows = scratch + _SEQUENCE + ROW * at
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


_gather_bf16, _gather_fp16, _gather_fp32 = (_gather_of(kind) for kind in (BF16, FP16, FP32))


@helper
def _take_units(words: Any, at: Any, unit: Any, scratch: Any) -> None:
    """Element ``at`` and what follows of 16 tokens' vectors, less means, and measured."""
    dtype = words[C.ROW_DTYPE]
    addresses, rows, state = scratch + _ADDRESSES, scratch + _ROWS, scratch + _STATE
    for element in range(0, unit, 16):
        to, means = rows + ROW * element, 4 * (at + element)
        if dtype == C.DTYPE_BF16:
            _gather_bf16(addresses, 2 * (at + element), means, to)
        elif dtype == C.DTYPE_FP16:
            _gather_fp16(addresses, 2 * (at + element), means, to)
        else:
            _gather_fp32(addresses, 4 * (at + element), means, to)
    _largest(rows, unit, state)
    _measure(rows, scratch + _SIGNS, unit, state)


@helper
def _raise_peaks(words: Any, lanes: Any, scratch: Any) -> None:
    """The largest magnitudes so far, of 16 tokens' vectors too."""
    addresses, dim, dtype = words_at(scratch + _ADDRESSES), words[C.ROW_DIM], words[C.ROW_DTYPE]
    peaks = scratch + _PEAKS
    for lane in range(lanes):
        vector, means = addresses[lane], addresses[16 + lane]
        if dtype == C.DTYPE_BF16:
            _peak_bf16(vector, means, dim, peaks)
        elif dtype == C.DTYPE_FP16:
            _peak_fp16(vector, means, dim, peaks)
        else:
            _peak_fp32(vector, means, dim, peaks)


@helper
def _point(words: Any, start: Any, first: Any, head: Any, distance: Any, scratch: Any) -> None:
    """The addresses of 16 tokens' vectors and of their means."""
    tokens, dim, bits = words[C.ROW_OUTER] * words[C.ROW_INNER], words[C.ROW_DIM], words[C.ROW_BITS]
    addresses = words_at(scratch + _ADDRESSES)
    means, nothing = scratch + _MEANS + 4 * head * dim, scratch + _NOTHING
    phases = scratch + _SIXTEEN
    for lane in range(16):
        # Lanes without a token repeat the first.
        token = first + lane if first + lane < tokens else first
        addresses[lane] = vector_at(words, start, token, head)
        addresses[16 + lane] = means
        if is_chosen(words, token, head, scratch):
            addresses[lane] = addresses[16 + lane] = nothing
        elif bits & tables.TURNING:
            addresses[16 + lane] = scratch + _TURNED + 4 * dim * lane
            turned_means(
                means,
                phases + 4 * dim * (token - first),
                dim,
                distance,
                scratch + _TURNED + 4 * dim * lane,
            )


@helper
def _next_phases(words: Any, scratch: Any) -> None:
    """Keep the phases of the next 16 tokens."""
    pairs = words[C.ROW_DIM] // 2
    phases, by = scratch + _PHASES, scratch + _BY
    for lane in range(16):
        raw.copy(scratch + _SIXTEEN + 8 * pairs * lane, phases, 8 * pairs)
        turn_phases(phases, by, pairs)


@shared("int64(int64, int64, int64, int64, int64)")
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
    size = stored_size(words)
    if size < 0 or size > room:
        return REFUSED
    heads, dim, bits = words[C.ROW_HEADS], words[C.ROW_DIM], words[C.ROW_BITS]
    width, turning = bits & tables.WIDTH_MASK, bits & tables.TURNING
    tokens = words[C.ROW_OUTER] * words[C.ROW_INNER]
    unit = unit_of(dim)
    group, units, unit_bytes = _group_of(unit), dim // unit, unit * width // 8
    if bits & tables.PRECISE:
        choose(words, start, dst + size, scratch)
    scales, distance = dst + 1, np.int64(0)
    if turning:
        distance = fit_turning(words, start, scales, scratch)
        scales += 2 + 2 * dim
    elif bits & tables.CENTRED:
        fit_means(words, start, scales, scratch)
    store_signs(scratch + _SIGNS, 0)
    raw.zero(scratch + _NOTHING, 4 * dim)
    if bits & tables.CENTRED:
        for at in range(0, heads * dim, 16):
            widen(scales + 2 * at, scratch + _MEANS + 4 * at)
        scales += 2 * heads * dim
    else:
        raw.zero(scratch + _MEANS, 4 * heads * dim)
    codes = scales + tokens * heads * units
    state, rows = scratch + _STATE, scratch + _ROWS
    top = np.int64(16)
    raw.zero(scratch + _PEAKS, ROW)
    for storing in range(2):
        if storing == 1:
            for lane in range(16):
                # No scale is larger than the largest element, rounded in the same way.
                peak = np.int64(raw.load_u32(scratch + _PEAKS + 4 * lane))
                top = max(top, (peak + 0x3FFFF + ((peak >> 19) & 1)) >> 23)
            top = min(top, np.int64(254))
        if turning:
            start_phases(scratch + _PHASES, scratch + _BY, dst + 3, dim // 2)
        for first in range(0, tokens, 16):
            lanes = min(tokens - first, np.int64(16))
            if turning:
                _next_phases(words, scratch)
            for head in range(heads):
                _point(words, start, first, head, distance, scratch)
                if storing == 0:
                    _raise_peaks(words, lanes, scratch)
                    continue
                for number in range(units):
                    _take_units(words, number * unit, unit, scratch)
                    _scale(state, 16 * (top - 15), _root_of(group))
                    place = (first * heads + head) * units + number
                    for lane in range(lanes):
                        code = raw.load_u32(state + ROW + 4 * lane)
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
    bytes_at(dst)[0] = top
    return size
