"""Which means the coder LBQ takes off, and how they turn; see ``codecs/lbq.py``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, inline
from lifeboat_cache.kernels.lbq_lanes import (
    BF16,
    BF16_MOST,
    EVENS,
    FP16,
    FP32,
    I8,
    I32,
    I64,
    INF,
    INTS,
    LANES,
    MAGNITUDE,
    MOST_CHANNELS,
    MOST_DIM,
    MOST_VECTORS,
    ODDS,
    ROW,
    Kind,
    as_floats,
    as_ints,
    bits_of,
    float_of,
    floats,
    floats_of_bits,
    ints,
    load,
    loop,
    precise_of,
    spread,
    start_phases,
    step,
    store,
    store_u16,
    to_bf16,
    turn_phases,
    vector_at,
    wrap,
)
from lifeboat_cache.kernels.memory import bytes_at, float32_at, float64_at, int16_at

__all__ = ["CHOSEN", "choose", "fit_means", "fit_turning", "is_chosen"]

#: Where in working memory a byte for each token and head is, which is 1 for those that are
#: stored apart. All before is free again afterwards.
CHOSEN = 3 << 20

# Working memory, in bytes from its beginning.
_PHASES = 0
_BY = _PHASES + 4 * MOST_DIM
_LAGGED = _BY + 4 * MOST_DIM
_STEPS = _LAGGED + 4 * MOST_DIM
_COSINES = _STEPS + 2 * MOST_DIM
_SINES = _COSINES + 4 * MOST_DIM
_LARGEST = _SINES + 4 * MOST_DIM
_STILL = _LARGEST + ROW
_COUNTS = _STILL + 4 * MOST_CHANNELS
_TURNING = _COUNTS + 4 * MOST_CHANNELS
_RATIOS = _TURNING + 4 * MOST_CHANNELS
_SUMS = _RATIOS + 4 * MOST_VECTORS


class _Pairs:
    """16 pairs of channels, ``apart`` bytes from each other or side by side."""

    def __init__(self, kind: Kind, beside: bool) -> None:
        self._kind = kind
        self._beside = beside

    def load(self, builder: Any, address: Any, apart: Any) -> tuple[Any, Any]:
        """First channels and others, as float32."""
        kind = self._kind
        if not self._beside:
            return kind.load(builder, address), kind.load(builder, builder.add(address, apart))
        a, b = kind.load(builder, address), kind.load(builder, address, LANES * kind.item)
        return builder.shuffle_vector(a, b, EVENS), builder.shuffle_vector(a, b, ODDS)


def _lag_of(kind: Kind, beside: bool) -> Any:
    """``lag(now, then, apart, total)``: add products of 16 pairs at two tokens."""
    pairs = _Pairs(kind, beside)

    def build(builder: Any, now: Any, then: Any, apart: Any, total: Any) -> None:
        x0, y0 = pairs.load(builder, now, apart)
        x1, y1 = pairs.load(builder, then, apart)
        across = builder.fadd(builder.fmul(x1, x0), builder.fmul(y1, y0))
        along = builder.fsub(builder.fmul(y1, x0), builder.fmul(x1, y0))
        store(builder, builder.fadd(load(builder, total), across), total)
        store(builder, builder.fadd(load(builder, total, ROW), along), total, ROW)

    return wrap(4, build)


def _still_of(kind: Kind, beside: bool) -> Any:
    """``still(source, apart, total, counts, other)``: add 16 pairs where they are finite.

    Those of the other channels are ``other`` bytes behind.
    """
    pairs = _Pairs(kind, beside)

    def build(builder: Any, at: Any, apart: Any, total: Any, counts: Any, other: Any) -> None:
        for offset, value in zip((None, other), pairs.load(builder, at, apart), strict=True):
            size = builder.and_(as_ints(builder, value), ints(MAGNITUDE))
            finite = builder.icmp_signed("<", size, ints(INF))
            one = builder.select(finite, floats(1), floats(0))
            for place, more in (
                (total, builder.select(finite, value, floats(0))),
                (counts, one),
            ):
                to = place if offset is None else builder.add(place, offset)
                store(builder, builder.fadd(load(builder, to), more), to)

    return wrap(5, build)


def _turning_of(kind: Kind, beside: bool) -> Any:
    """``turning(source, apart, phase, total, other)``: add 16 pairs turned back."""
    pairs = _Pairs(kind, beside)

    def build(builder: Any, at: Any, apart: Any, phase: Any, total: Any, other: Any) -> None:
        x, y = pairs.load(builder, at, apart)
        c, s = load(builder, phase), load(builder, phase, ROW)
        one = builder.fadd(builder.fmul(x, c), builder.fmul(y, s))
        two = builder.fsub(builder.fmul(y, c), builder.fmul(x, s))
        store(builder, builder.fadd(load(builder, total), one), total)
        behind = builder.add(total, other)
        store(builder, builder.fadd(load(builder, behind), two), behind)

    return wrap(5, build)


def _larger_of(kind: Kind) -> Any:
    """``larger(source, most)``: raise ``most`` to the magnitudes of 16 elements."""

    def build(builder: Any, source: Any, most: Any) -> None:
        size = builder.and_(as_ints(builder, kind.load(builder, source)), ints(MAGNITUDE))
        before = load(builder, most, 0, INTS)
        larger = builder.icmp_signed(">", size, before)
        store(builder, builder.select(larger, size, before), most)

    return wrap(2, build)


def _channels_of(kind: Kind) -> Any:
    """``channels(vector, dim, total, counts)``: add a vector where it is finite."""

    def build(builder: Any, vector: Any, dim: Any, total: Any, counts: Any) -> None:
        def body(number: Any, nothing: list[Any]) -> list[Any]:
            value = kind.load(builder, step(builder, vector, number, LANES * kind.item))
            size = builder.and_(as_ints(builder, value), ints(MAGNITUDE))
            finite = builder.icmp_signed("<", size, ints(INF))
            one = builder.select(finite, floats(1), floats(0))
            value = builder.select(finite, value, floats(0))
            for place, more in ((total, value), (counts, one)):
                to = step(builder, place, number, ROW)
                store(builder, builder.fadd(load(builder, to), more), to)
            return nothing

        loop(builder, builder.lshr(dim, ir.Constant(I64, 4)), [], body)

    return wrap(4, build)


_channels_bf16, _channels_fp16, _channels_fp32 = (_channels_of(kind) for kind in (BF16, FP16, FP32))


def _build_usable(builder: Any, means: Any, to: Any) -> None:
    mean = load(builder, means)
    size = as_floats(builder, builder.and_(as_ints(builder, mean), ints(MAGNITUDE)))
    usable = builder.fcmp_ordered("<=", size, floats_of_bits(BF16_MOST))
    store(builder, to_bf16(builder, builder.select(usable, mean, floats(0))), to)


#: ``usable(means, to)``: 16 means as bfloat16, 0 for what is not finite.
_usable = wrap(2, _build_usable)


def _scans(kind: Kind) -> tuple[Any, Any, Any, Any]:
    """Functions of a dtype that go over a vector."""
    item = kind.item
    lag_apart, lag_beside = _lag_of(kind, beside=False), _lag_of(kind, beside=True)
    still_apart, still_beside = _still_of(kind, beside=False), _still_of(kind, beside=True)
    turning_apart = _turning_of(kind, beside=False)
    turning_beside = _turning_of(kind, beside=True)
    larger = _larger_of(kind)

    @helper
    def lag(now: Any, then: Any, dim: Any, distance: Any, total: Any) -> None:
        at = total
        if distance == 1:
            for channel in range(0, dim, 32):
                lag_beside(now + item * channel, then + item * channel, 0, at)
                at += 2 * ROW
            return
        for block in range(0, dim, 2 * distance):
            for channel in range(block, block + distance, 16):
                lag_apart(now + item * channel, then + item * channel, item * distance, at)
                at += 2 * ROW

    @helper
    def still(vector: Any, dim: Any, distance: Any, total: Any, counts: Any) -> None:
        pair = np.int64(0)
        if distance == 1:
            for channel in range(0, dim, 32):
                at = vector + item * channel
                still_beside(at, 0, total + 4 * pair, counts + 4 * pair, 2 * dim)
                pair += 16
            return
        for block in range(0, dim, 2 * distance):
            for channel in range(block, block + distance, 16):
                at = vector + item * channel
                still_apart(at, item * distance, total + 4 * pair, counts + 4 * pair, 2 * dim)
                pair += 16

    @helper
    def turning(vector: Any, dim: Any, distance: Any, phases: Any, total: Any) -> None:
        pair = np.int64(0)
        if distance == 1:
            for channel in range(0, dim, 32):
                at = vector + item * channel
                turning_beside(at, 0, phases + 8 * pair, total + 4 * pair, 2 * dim)
                pair += 16
            return
        for block in range(0, dim, 2 * distance):
            for channel in range(block, block + distance, 16):
                at = vector + item * channel
                turning_apart(at, item * distance, phases + 8 * pair, total + 4 * pair, 2 * dim)
                pair += 16

    @helper
    def most(vector: Any, dim: Any, to: Any) -> None:
        for channel in range(0, dim, 16):
            larger(vector + item * channel, to)

    return lag, still, turning, most


_lag_bf16, _still_bf16, _turning_bf16, _most_bf16 = _scans(BF16)
_lag_fp16, _still_fp16, _turning_fp16, _most_fp16 = _scans(FP16)
_lag_fp32, _still_fp32, _turning_fp32, _most_fp32 = _scans(FP32)


@helper
def _add_lag(words: Any, now: Any, then: Any, distance: Any, total: Any) -> None:
    dim, dtype = words[C.ROW_DIM], words[C.ROW_DTYPE]
    if dtype == C.DTYPE_BF16:
        _lag_bf16(now, then, dim, distance, total)
    elif dtype == C.DTYPE_FP16:
        _lag_fp16(now, then, dim, distance, total)
    else:
        _lag_fp32(now, then, dim, distance, total)


@helper
def _add_still(words: Any, vector: Any, distance: Any, total: Any, counts: Any) -> None:
    dim, dtype = words[C.ROW_DIM], words[C.ROW_DTYPE]
    if dtype == C.DTYPE_BF16:
        _still_bf16(vector, dim, distance, total, counts)
    elif dtype == C.DTYPE_FP16:
        _still_fp16(vector, dim, distance, total, counts)
    else:
        _still_fp32(vector, dim, distance, total, counts)


@helper
def _add_turning(words: Any, vector: Any, distance: Any, phases: Any, total: Any) -> None:
    dim, dtype = words[C.ROW_DIM], words[C.ROW_DTYPE]
    if dtype == C.DTYPE_BF16:
        _turning_bf16(vector, dim, distance, phases, total)
    elif dtype == C.DTYPE_FP16:
        _turning_fp16(vector, dim, distance, phases, total)
    else:
        _turning_fp32(vector, dim, distance, phases, total)


@inline
def is_chosen(words: Any, token: Any, head: Any, scratch: Any) -> Any:
    """Whether a token is stored apart."""
    if not words[C.ROW_BITS] & tables.PRECISE:
        return False
    return bytes_at(scratch + CHOSEN)[token * words[C.ROW_HEADS] + head] != 0


@helper
def _all_finite(words: Any, start: Any, scratch: Any) -> Any:
    dim, dtype = words[C.ROW_DIM], words[C.ROW_DTYPE]
    most = scratch + _LARGEST
    raw.zero(most, ROW)
    for token in range(words[C.ROW_OUTER] * words[C.ROW_INNER]):
        for head in range(words[C.ROW_HEADS]):
            if is_chosen(words, token, head, scratch):
                continue
            vector = vector_at(words, start, token, head)
            if dtype == C.DTYPE_BF16:
                _most_bf16(vector, dim, most)
            elif dtype == C.DTYPE_FP16:
                _most_fp16(vector, dim, most)
            else:
                _most_fp32(vector, dim, most)
    finite = True
    for lane in range(16):
        finite = finite and raw.load_u32(most + 4 * lane) < INF
    return finite


@helper
def _find_turns(words: Any, start: Any, heads: Any, distance: Any, scratch: Any) -> None:
    """By which cosine and sine each pair turns, as it is stored, at ``_STEPS``."""
    dim, tokens = words[C.ROW_DIM], words[C.ROW_OUTER] * words[C.ROW_INNER]
    pairs = dim // 2
    total = scratch + _LAGGED
    totals, steps = float32_at(total), int16_at(scratch + _STEPS)
    cosines, sines = float64_at(scratch + _COSINES), float64_at(scratch + _SINES)
    lag = np.int64(1)
    while lag <= 64 and lag < tokens:
        raw.zero(total, 4 * dim)
        for head in range(heads):
            for token in range(tokens - lag):
                if is_chosen(words, token, head, scratch) or is_chosen(
                    words, token + lag, head, scratch
                ):
                    continue
                now = vector_at(words, start, token, head)
                then = vector_at(words, start, token + lag, head)
                _add_lag(words, now, then, distance, total)
        for pair in range(pairs):
            place = pair // 16 * 32 + pair % 16
            across, along = np.float64(totals[place]), np.float64(totals[place + 16])
            size = math.sqrt(across * across + along * along)
            usable = size > 0.0 and size < np.inf
            across = np.float64(across / size if usable else 1.0)
            along = np.float64(along / size if usable else 0.0)
            if lag == 1:
                cosines[pair], sines[pair] = across, along
                continue
            cosine, sine = cosines[pair], sines[pair]
            far_cosine, far_sine = cosine, sine
            reached = np.int64(1)
            while reached < lag:
                square = far_cosine * far_cosine - far_sine * far_sine
                far_sine = 2.0 * far_cosine * far_sine
                far_cosine = square
                reached *= 2
            ahead = across * far_cosine + along * far_sine
            off = along * far_cosine - across * far_sine
            if not ahead > 0.0:
                off = 1.0 if off > 0.0 else -1.0
            off = (off if usable else 0.0) / np.float64(lag)
            new = cosine - off * sine
            sine = sine + off * cosine
            size = math.sqrt(new * new + sine * sine)
            cosines[pair], sines[pair] = new / size, sine / size
        lag *= 4
    unity = np.float64(tables.UNITY)
    for pair in range(pairs):
        steps[pair] = np.int64(cosines[pair] * unity + 32768.5) - 32768
        steps[pairs + pair] = np.int64(sines[pair] * unity + 32768.5) - 32768


@helper
def _project(words: Any, start: Any, heads: Any, distance: Any, scratch: Any) -> None:
    """Totals of heads, still and turned back, at ``_STILL`` and ``_TURNING``."""
    dim, tokens = words[C.ROW_DIM], words[C.ROW_OUTER] * words[C.ROW_INNER]
    phases, by = scratch + _PHASES, scratch + _BY
    raw.zero(scratch + _STILL, 4 * heads * dim)
    raw.zero(scratch + _COUNTS, 4 * heads * dim)
    raw.zero(scratch + _TURNING, 4 * heads * dim)
    start_phases(phases, by, scratch + _STEPS, dim // 2)
    for token in range(tokens):
        for head in range(heads):
            if is_chosen(words, token, head, scratch):
                continue
            vector, at = vector_at(words, start, token, head), 4 * head * dim
            still, counts = scratch + _STILL + at, scratch + _COUNTS + at
            _add_still(words, vector, distance, still, counts)
            _add_turning(words, vector, distance, phases, scratch + _TURNING + at)
        turn_phases(phases, by, dim // 2)


@helper
def _means(heads: Any, dim: Any, tokens: Any, scratch: Any) -> None:
    """Totals to means."""
    still, counts = float32_at(scratch + _STILL), float32_at(scratch + _COUNTS)
    turning = float32_at(scratch + _TURNING)
    for channel in range(heads * dim):
        still[channel] = still[channel] / max(counts[channel], np.float32(1))
        turning[channel] = turning[channel] / np.float32(tokens)


@helper
def _energy(means: Any, heads: Any, dim: Any, pair: Any) -> Any:
    """Of a pair's means in all heads."""
    numbers = float32_at(means)
    total = np.float32(0)
    for head in range(heads):
        x, y = numbers[head * dim + pair], numbers[head * dim + dim // 2 + pair]
        total = total + (x * x + y * y)
    return total


@helper
def _taken_off(words: Any, start: Any, left: Any, distance: Any, scratch: Any) -> Any:
    """How much the first head's means take off."""
    dim, one = words[C.ROW_DIM], np.int64(1)
    _find_turns(words, start, one, distance, scratch)
    _project(words, start, one, distance, scratch)
    _means(one, dim, left, scratch)
    total = 0.0
    for pair in range(dim // 2):
        still = _energy(scratch + _STILL, one, dim, pair)
        turning = _energy(scratch + _TURNING, one, dim, pair)
        total += np.float64(max(still, turning))
    return total


@helper
def fit_turning(words: Any, start: Any, dst: Any, scratch: Any) -> Any:
    """Store how means turn and what they are; returns how far apart channels of a pair are."""
    heads, dim = words[C.ROW_HEADS], words[C.ROW_DIM]
    tokens = words[C.ROW_OUTER] * words[C.ROW_INNER]
    left = tokens - (precise_of(words) if words[C.ROW_BITS] & tables.PRECISE else 0)
    whole = left >= 2 and _all_finite(words, start, scratch)
    distance = dim // 2
    steps = int16_at(scratch + _STEPS)
    if whole:
        most = -1.0
        for number in range(3 if dim % 64 == 0 else 2):
            tried = dim // 2 if number == 0 else (np.int64(1) if number == 1 else dim // 4)
            total = _taken_off(words, start, left, tried, scratch)
            if total > most:
                distance, most = tried, total
        _find_turns(words, start, heads, distance, scratch)
    else:
        for pair in range(dim // 2):
            steps[pair], steps[dim // 2 + pair] = tables.UNITY, 0
    _project(words, start, heads, distance, scratch)
    _means(heads, dim, left, scratch)
    still, turning = float32_at(scratch + _STILL), float32_at(scratch + _TURNING)
    for pair in range(dim // 2):
        better = _energy(scratch + _TURNING, heads, dim, pair) > _energy(
            scratch + _STILL, heads, dim, pair
        )
        if whole and better:
            for head in range(heads):
                at = head * dim + pair
                still[at], still[at + dim // 2] = turning[at], turning[at + dim // 2]
        else:
            steps[pair], steps[dim // 2 + pair] = tables.UNITY, 0
    bytes_at(dst)[0], bytes_at(dst)[1] = distance & 0xFF, distance >> 8
    raw.copy(dst + 2, scratch + _STEPS, 2 * dim)
    for at in range(0, heads * dim, 16):
        _usable(scratch + _STILL + 4 * at, dst + 2 + 2 * dim + 2 * at)
    return distance


@helper
def _add_channels(words: Any, start: Any, scratch: Any) -> None:
    """Means of channels, at ``_STILL``."""
    heads, dim, dtype = words[C.ROW_HEADS], words[C.ROW_DIM], words[C.ROW_DTYPE]
    raw.zero(scratch + _STILL, 4 * heads * dim)
    raw.zero(scratch + _COUNTS, 4 * heads * dim)
    for token in range(words[C.ROW_OUTER] * words[C.ROW_INNER]):
        for head in range(heads):
            if is_chosen(words, token, head, scratch):
                continue
            vector, at = vector_at(words, start, token, head), 4 * head * dim
            still, counts = scratch + _STILL + at, scratch + _COUNTS + at
            if dtype == C.DTYPE_BF16:
                _channels_bf16(vector, dim, still, counts)
            elif dtype == C.DTYPE_FP16:
                _channels_fp16(vector, dim, still, counts)
            else:
                _channels_fp32(vector, dim, still, counts)
    numbers, divisors = float32_at(scratch + _STILL), float32_at(scratch + _COUNTS)
    for channel in range(heads * dim):
        numbers[channel] = numbers[channel] / max(divisors[channel], np.float32(1))


@helper
def fit_means(words: Any, start: Any, dst: Any, scratch: Any) -> None:
    """Store the means of channels."""
    _add_channels(words, start, scratch)
    for at in range(0, words[C.ROW_HEADS] * words[C.ROW_DIM], 16):
        _usable(scratch + _STILL + 4 * at, dst + 2 * at)


def _squares_of(kind: Kind) -> Any:
    """``squares(vector, means, dim, to)``: sums of squares around the means and of elements."""

    def build(builder: Any, vector: Any, means: Any, dim: Any, to: Any) -> None:
        def body(number: Any, sums: list[Any]) -> list[Any]:
            value = kind.load(builder, step(builder, vector, number, LANES * kind.item))
            size = builder.and_(as_ints(builder, value), ints(MAGNITUDE))
            finite = builder.icmp_signed("<", size, ints(INF))
            value = builder.select(finite, value, floats(0))
            rest = builder.fsub(value, load(builder, step(builder, means, number, ROW)))
            rest = builder.select(finite, rest, floats(0))
            return [
                builder.fadd(sums[0], builder.fmul(rest, rest)),
                builder.fadd(sums[1], builder.fmul(value, value)),
            ]

        count = builder.lshr(dim, ir.Constant(I64, 4))
        around, whole = loop(builder, count, [floats(0), floats(0)], body)
        store(builder, around, to)
        store(builder, whole, to, ROW)

    return wrap(4, build)


def _steps_of(kind: Kind) -> tuple[Any, Any]:
    """``largest(vector, dim, to)`` and ``steps(vector, dim, to, scale)`` of a dtype.

    Magnitudes and steps of what is not finite are 0.
    """
    magic = floats(1.5 * 2**23)  # has whole numbers in its last place, and rounds to even

    def value_of(builder: Any, vector: Any, number: Any) -> Any:
        value = kind.load(builder, step(builder, vector, number, LANES * kind.item))
        size = builder.and_(as_ints(builder, value), ints(MAGNITUDE))
        finite = builder.icmp_signed("<", size, ints(INF))
        return builder.select(finite, value, floats(0))

    def build_largest(builder: Any, vector: Any, dim: Any, to: Any) -> None:
        def body(number: Any, most: list[Any]) -> list[Any]:
            value = as_ints(builder, value_of(builder, vector, number))
            size = builder.and_(value, ints(MAGNITUDE))
            return [builder.select(builder.icmp_signed(">", size, most[0]), size, most[0])]

        (most,) = loop(builder, builder.lshr(dim, ir.Constant(I64, 4)), [ints(0)], body)
        store(builder, most, to)

    def build_steps(builder: Any, vector: Any, dim: Any, to: Any, scale: Any) -> None:
        by = as_floats(builder, spread(builder, builder.trunc(scale, I32)))

        def body(number: Any, nothing: list[Any]) -> list[Any]:
            value = builder.fdiv(value_of(builder, vector, number), by)
            value = builder.fsub(builder.fadd(value, magic), magic)
            most, least = floats(127), floats(-127)
            value = builder.select(builder.fcmp_ordered("<", value, most), value, most)
            value = builder.select(builder.fcmp_ordered(">", value, least), value, least)
            steps = builder.trunc(builder.fptosi(value, INTS), ir.VectorType(I8, LANES))
            store(builder, steps, step(builder, to, number, LANES))
            return nothing

        loop(builder, builder.lshr(dim, ir.Constant(I64, 4)), [], body)

    return wrap(3, build_largest), wrap(4, build_steps)


_squares_bf16, _squares_fp16, _squares_fp32 = (_squares_of(kind) for kind in (BF16, FP16, FP32))
_largest_bf16, _steps_bf16 = _steps_of(BF16)
_largest_fp16, _steps_fp16 = _steps_of(FP16)
_largest_fp32, _steps_fp32 = _steps_of(FP32)


@helper
def _ratio(words: Any, vector: Any, means: Any, scratch: Any) -> Any:
    """How far a vector is from the means, for its length."""
    dim, dtype, to = words[C.ROW_DIM], words[C.ROW_DTYPE], scratch + _SUMS
    if dtype == C.DTYPE_BF16:
        _squares_bf16(vector, means, dim, to)
    elif dtype == C.DTYPE_FP16:
        _squares_fp16(vector, means, dim, to)
    else:
        _squares_fp32(vector, means, dim, to)
    sums = float32_at(to)
    around, whole = np.float32(0), np.float32(0)
    for lane in range(16):
        around = around + sums[lane]
        whole = whole + sums[16 + lane]
    ratio = around / whole
    return max(ratio, np.float32(0))


@helper
def _store_steps(words: Any, vector: Any, scale_at: Any, to: Any, scratch: Any) -> None:
    """Store a vector in 8 bits per element."""
    dim, dtype, row = words[C.ROW_DIM], words[C.ROW_DTYPE], scratch + _SUMS
    if dtype == C.DTYPE_BF16:
        _largest_bf16(vector, dim, row)
    elif dtype == C.DTYPE_FP16:
        _largest_fp16(vector, dim, row)
    else:
        _largest_fp32(vector, dim, row)
    most = np.int64(0)
    for lane in range(16):
        most = max(most, np.int64(raw.load_u32(row + 4 * lane)))
    scale = (bits_of(float_of(most) / np.float32(127)) + 0xFFFF) >> 16
    store_u16(scale_at, scale)
    if scale == 0:
        raw.zero(to, dim)
    elif dtype == C.DTYPE_BF16:
        _steps_bf16(vector, dim, to, scale << 16)
    elif dtype == C.DTYPE_FP16:
        _steps_fp16(vector, dim, to, scale << 16)
    else:
        _steps_fp32(vector, dim, to, scale << 16)


@helper
def choose(words: Any, start: Any, end: Any, scratch: Any) -> None:
    """Choose the tokens that are stored apart, and store them before ``end``."""
    heads, dim = words[C.ROW_HEADS], words[C.ROW_DIM]
    tokens, count = words[C.ROW_OUTER] * words[C.ROW_INNER], precise_of(words)
    chosen, ratios = bytes_at(scratch + CHOSEN), float32_at(scratch + _RATIOS)
    raw.zero(scratch + CHOSEN, tokens * heads)
    _add_channels(words, start, scratch)
    to = end - heads * count * (4 + dim)
    for head in range(heads):
        for token in range(tokens):
            vector = vector_at(words, start, token, head)
            ratios[token] = _ratio(words, vector, scratch + _STILL + 4 * head * dim, scratch)
        for _ in range(count):
            best, most = 0, np.float32(-1)
            for token in range(tokens):
                if ratios[token] > most:
                    best, most = token, ratios[token]
            ratios[best] = np.float32(-2)
            chosen[best * heads + head] = 1
        place = head * count
        for token in range(tokens):
            if chosen[token * heads + head]:
                store_u16(to + 2 * place, token)
                vector = vector_at(words, start, token, head)
                scale_at = to + 2 * (heads * count + place)
                steps = to + 4 * heads * count + place * dim
                _store_steps(words, vector, scale_at, steps, scratch)
                place += 1
