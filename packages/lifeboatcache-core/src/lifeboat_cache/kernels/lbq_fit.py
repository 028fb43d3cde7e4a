"""Which means the coder LBQ takes off, and how they turn; see ``codecs/lbq.py``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper
from lifeboat_cache.kernels.lbq_lanes import (
    BF16,
    BF16_MOST,
    EVENS,
    FP16,
    FP32,
    I64,
    INF,
    INTS,
    LANES,
    MAGNITUDE,
    MOST_CHANNELS,
    MOST_DIM,
    ODDS,
    ROW,
    Kind,
    as_floats,
    as_ints,
    floats,
    floats_of_bits,
    ints,
    load,
    loop,
    start_phases,
    step,
    store,
    to_bf16,
    turn_phases,
    vector_at,
    wrap,
)
from lifeboat_cache.kernels.memory import bytes_at, float32_at, float64_at, int16_at

__all__ = ["fit_means", "fit_turning"]

# Working memory, in bytes from its beginning; all of it is free again afterwards.
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


@helper
def _all_finite(words: Any, start: Any, first: Any, scratch: Any) -> Any:
    dim, dtype = words[C.ROW_DIM], words[C.ROW_DTYPE]
    most = scratch + _LARGEST
    raw.zero(most, ROW)
    for token in range(first, words[C.ROW_OUTER] * words[C.ROW_INNER]):
        for head in range(words[C.ROW_HEADS]):
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
def _find_turns(
    words: Any, start: Any, first: Any, heads: Any, distance: Any, scratch: Any
) -> None:
    """By which cosine and sine each pair turns, as it is stored, at ``_STEPS``."""
    dim, tokens = words[C.ROW_DIM], words[C.ROW_OUTER] * words[C.ROW_INNER]
    pairs = dim // 2
    total = scratch + _LAGGED
    totals, steps = float32_at(total), int16_at(scratch + _STEPS)
    cosines, sines = float64_at(scratch + _COSINES), float64_at(scratch + _SINES)
    lag = np.int64(1)
    while lag <= 64 and lag < tokens - first:
        raw.zero(total, 4 * dim)
        for head in range(heads):
            for token in range(first, tokens - lag):
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
def _project(
    words: Any, start: Any, first: Any, heads: Any, distance: Any, skip: Any, scratch: Any
) -> None:
    """Totals of heads, still and turned back, at ``_STILL`` and ``_TURNING``.

    Phases begin ``skip`` tokens before the first.
    """
    dim, tokens = words[C.ROW_DIM], words[C.ROW_OUTER] * words[C.ROW_INNER]
    phases, by = scratch + _PHASES, scratch + _BY
    raw.zero(scratch + _STILL, 4 * heads * dim)
    raw.zero(scratch + _COUNTS, 4 * heads * dim)
    raw.zero(scratch + _TURNING, 4 * heads * dim)
    start_phases(phases, by, scratch + _STEPS, dim // 2)
    for _ in range(skip):
        turn_phases(phases, by, dim // 2)
    for token in range(first, tokens):
        for head in range(heads):
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
def _taken_off(words: Any, start: Any, first: Any, distance: Any, scratch: Any) -> Any:
    """How much the first head's means take off."""
    dim, tokens = words[C.ROW_DIM], words[C.ROW_OUTER] * words[C.ROW_INNER]
    one = np.int64(1)
    _find_turns(words, start, first, one, distance, scratch)
    _project(words, start, first, one, distance, np.int64(0), scratch)
    _means(one, dim, tokens - first, scratch)
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
    first = np.int64(1) if words[C.ROW_BITS] & tables.FIRST else np.int64(0)
    whole = tokens - first >= 2 and _all_finite(words, start, first, scratch)
    distance = dim // 2
    steps = int16_at(scratch + _STEPS)
    if whole:
        most = -1.0
        for number in range(3 if dim % 64 == 0 else 2):
            tried = dim // 2 if number == 0 else (np.int64(1) if number == 1 else dim // 4)
            total = _taken_off(words, start, first, tried, scratch)
            if total > most:
                distance, most = tried, total
        _find_turns(words, start, first, heads, distance, scratch)
    else:
        for pair in range(dim // 2):
            steps[pair], steps[dim // 2 + pair] = tables.UNITY, 0
    _project(words, start, first, heads, distance, first, scratch)
    _means(heads, dim, tokens - first, scratch)
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
def fit_means(words: Any, start: Any, dst: Any, scratch: Any) -> None:
    """Store the means of channels."""
    heads, dim, dtype = words[C.ROW_HEADS], words[C.ROW_DIM], words[C.ROW_DTYPE]
    tokens = words[C.ROW_OUTER] * words[C.ROW_INNER]
    first = np.int64(1) if words[C.ROW_BITS] & tables.FIRST else np.int64(0)
    raw.zero(scratch + _STILL, 4 * heads * dim)
    raw.zero(scratch + _COUNTS, 4 * heads * dim)
    for token in range(first, tokens):
        for head in range(heads):
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
    for at in range(0, heads * dim, 16):
        _usable(scratch + _STILL + 4 * at, dst + 2 * at)
