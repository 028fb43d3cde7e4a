"""Exact storage of numbers at the speed of memory; see ``docs/codecs.md``.

A stored tensor is its length (32 bits) and its parts. Of every element the sign and the
mantissa are stored as they are, and of the exponent how far it lies below a base, in two to
four bits; the few exponents that lie elsewhere escape: they follow in full. There is a base
for every column of a part (a head's channel), or, where a part has few tokens, for every
group of 64 elements. A part that this does not make smaller is stored as it is.

The twin is ``lifeboat_cache.codecs.lossless``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lanes, raw, vectors
from lifeboat_cache.kernels.jit import helper, inline, shared
from lifeboat_cache.kernels.libc import memcpy
from lifeboat_cache.kernels.memory import bytes_at, words_at
from lifeboat_cache.kernels.parts import (
    MOST_COLUMNS,
    PART_CONSTANT,
    PART_COPY,
    bring,
    element_of,
    flat,
    is_constant,
    part_columns,
    part_tokens,
    put,
    repeat,
    scatter,
    token_start,
)

__all__ = [
    "BASES",
    "ELEMENTS",
    "EXPONENTS",
    "GROUP",
    "STRIP",
    "STRIP_GROUPS",
    "decode",
    "decode_part",
    "encode",
    "encode_exponents",
    "go_round",
    "ones",
    "read_exponents",
]

#: Plus the bits of a code.
PART_COLUMNS = 16
PART_GROUPS = 32

#: Tokens from which on a base for every column pays.
COLUMN_TOKENS = 32

_REFUSED = np.int64(-1)

# Working memory: the part's elements if they do not lie together, its exponents, the bases,
# the escapes, and room for a group or a few.
ELEMENTS = 0
EXPONENTS = 1 << 20
BASES = (2 << 20) + 4096
ESCAPES = (2 << 20) + (256 << 10)
STRIP = (3 << 20) + (512 << 10)
GROUP = (3 << 20) + (768 << 10)
STRIP_GROUPS = 64


@inline
def _rest_planes(dtype: Any) -> Any:
    return np.int64(3 if dtype == C.DTYPE_FP16 or dtype == C.DTYPE_E5M2 else 0)


@inline
def _rest_width(dtype: Any) -> Any:
    """Bytes of an element's rest; 0: they are planes only."""
    if dtype == C.DTYPE_FP32:
        return np.int64(3)
    return np.int64(1 if dtype == C.DTYPE_BF16 or dtype == C.DTYPE_FP16 else 0)


@inline
def _group_bytes(dtype: Any, width: Any, count: Any) -> Any:
    """Bytes of a group of up to 64 elements."""
    plane = (count + np.int64(7)) >> 3
    if dtype == C.DTYPE_E4M3:
        return width * plane + min(count, np.int64(32))
    return (width + _rest_planes(dtype)) * plane + _rest_width(dtype) * count


@helper
def _last_group(dtype: Any, width: Any, count: Any, whole: Any, stored: Any, storing: Any) -> None:
    """Copy a group of fewer than 64 elements between its stored form and that of a whole one."""
    plane = (count + np.int64(7)) >> 3
    for _ in range(width + _rest_planes(dtype)):
        if storing:
            memcpy(stored, whole, np.uint64(plane))
        else:
            raw.store_u64(whole, 0)
            memcpy(whole, stored, np.uint64(plane))
        stored += plane
        whole += np.int64(8)
    sizes = (np.int64(64), np.int64(128))
    parts = (count, np.int64(0))
    if dtype == C.DTYPE_FP32:
        parts = (count, 2 * count)
    elif dtype == C.DTYPE_E4M3:
        parts = (min(count, np.int64(32)), np.int64(0))
    elif dtype == C.DTYPE_E5M2:
        parts = (np.int64(0), np.int64(0))
    for number in range(2):
        if storing:
            memcpy(stored, whole, np.uint64(parts[number]))
        else:
            memcpy(whole, stored, np.uint64(parts[number]))
        stored += parts[number]
        whole += sizes[number]


@inline
def _put_escapes(exponents: Any, mask: Any, to: Any) -> None:
    if vectors.HAS_EXPAND:
        lanes.squeeze(exponents, mask, to)
    else:
        source, place = bytes_at(exponents), bytes_at(to)
        left = np.int64(0)
        while mask != 0:
            place[left] = source[vectors.first_one(mask)]
            left += 1
            mask &= mask - 1


def _loops(dtype: int) -> tuple[Any, Any, Any]:
    """Loops over whole groups of one dtype: to read exponents, to store, to restore."""
    exponents_of = lanes.exponents(dtype)
    split = lanes.split_rest(dtype)
    join = lanes.join(dtype)
    expand = lanes.expand(dtype)
    rest_bytes = lanes.REST_BYTES[dtype]
    group_bytes = 64 * lanes.ITEM_BYTES[dtype]

    @helper
    def read(source: Any, count: Any, to: Any) -> None:
        for group in range(count):
            exponents_of(source + group * group_bytes, to + group * 64)

    @helper
    def store(
        source: Any,
        exponents: Any,
        count: Any,
        bases: Any,
        period: Any,
        shape: Any,
        chosen: Any,
        to: Any,
        escaped: Any,
        most: Any,
    ) -> Any:
        planes = 8 * (shape & 15)
        phase = np.int64(0)
        step = np.int64(64) % period if shape < 16 else np.int64(1)
        used = np.int64(0)
        for _ in range(count):
            mask = lanes.planes_of(exponents, bases + phase, shape, chosen, to)
            split(source, to + planes)
            if mask != 0:
                more = vectors.count_ones(mask)
                if used + more > most:
                    return _REFUSED
                _put_escapes(exponents, mask, escaped + used)
                used += more
            phase += step
            if phase >= period:
                phase -= period
            source += group_bytes
            exponents += 64
            to += planes + rest_bytes
        return used

    @helper
    def restore(
        to: Any,
        stored: Any,
        count: Any,
        bases: Any,
        phase: Any,
        period: Any,
        shape: Any,
        escaped: Any,
        most: Any,
    ) -> Any:
        width = shape & 15
        planes = 8 * width
        step = np.int64(64) % period if shape < 16 else np.int64(1)
        used = np.int64(0)
        exponents = np.int64(raw.stack(64))
        for _ in range(count):
            mask = lanes.escapes(stored, width)
            more = vectors.count_ones(mask)
            if used + more > most:
                return _REFUSED
            if vectors.HAS_EXPAND:
                expand(to, stored, bases + phase, escaped + used, shape)
            else:
                lanes.uncode(exponents, stored, width, bases + phase, shape >> 4)
                source, place = bytes_at(escaped + used), bytes_at(exponents)
                number = np.int64(0)
                while mask != 0:
                    place[vectors.first_one(mask)] = source[number]
                    number += 1
                    mask &= mask - 1
                join(to, exponents, stored + planes)
            used += more
            phase += step
            if phase >= period:
                phase -= period
            to += group_bytes
            stored += planes + rest_bytes
        return used

    return read, store, restore


_read_bf16, _store_bf16, _restore_bf16 = _loops(C.DTYPE_BF16)
_read_fp16, _store_fp16, _restore_fp16 = _loops(C.DTYPE_FP16)
_read_fp32, _store_fp32, _restore_fp32 = _loops(C.DTYPE_FP32)
_read_e4m3, _store_e4m3, _restore_e4m3 = _loops(C.DTYPE_E4M3)
_read_e5m2, _store_e5m2, _restore_e5m2 = _loops(C.DTYPE_E5M2)


@helper
def read_exponents(dtype: Any, source: Any, count: Any, to: Any) -> None:
    """The exponents of groups of 64 elements, as bytes."""
    if dtype == C.DTYPE_BF16:
        _read_bf16(source, count, to)
    elif dtype == C.DTYPE_FP16:
        _read_fp16(source, count, to)
    elif dtype == C.DTYPE_FP32:
        _read_fp32(source, count, to)
    elif dtype == C.DTYPE_E4M3:
        _read_e4m3(source, count, to)
    else:
        _read_e5m2(source, count, to)


@helper
def _store(
    dtype: Any,
    source: Any,
    exponents: Any,
    count: Any,
    bases: Any,
    period: Any,
    shape: Any,
    chosen: Any,
    to: Any,
    escaped: Any,
    most: Any,
) -> Any:
    """Store groups; returns how many elements escaped, or -1 if they were more than ``most``."""
    if dtype == C.DTYPE_BF16:
        return _store_bf16(
            source, exponents, count, bases, period, shape, chosen, to, escaped, most
        )
    if dtype == C.DTYPE_FP16:
        return _store_fp16(
            source, exponents, count, bases, period, shape, chosen, to, escaped, most
        )
    if dtype == C.DTYPE_FP32:
        return _store_fp32(
            source, exponents, count, bases, period, shape, chosen, to, escaped, most
        )
    if dtype == C.DTYPE_E4M3:
        return _store_e4m3(
            source, exponents, count, bases, period, shape, chosen, to, escaped, most
        )
    return _store_e5m2(source, exponents, count, bases, period, shape, chosen, to, escaped, most)


@helper
def _restore(
    dtype: Any,
    to: Any,
    stored: Any,
    count: Any,
    bases: Any,
    phase: Any,
    period: Any,
    shape: Any,
    escaped: Any,
    most: Any,
) -> Any:
    """Restore groups; returns how many escapes they had, or -1 if more than ``most``."""
    if dtype == C.DTYPE_BF16:
        return _restore_bf16(to, stored, count, bases, phase, period, shape, escaped, most)
    if dtype == C.DTYPE_FP16:
        return _restore_fp16(to, stored, count, bases, phase, period, shape, escaped, most)
    if dtype == C.DTYPE_FP32:
        return _restore_fp32(to, stored, count, bases, phase, period, shape, escaped, most)
    if dtype == C.DTYPE_E4M3:
        return _restore_e4m3(to, stored, count, bases, phase, period, shape, escaped, most)
    return _restore_e5m2(to, stored, count, bases, phase, period, shape, escaped, most)


@helper
def _choose_bases(exponents: Any, bases: Any, tokens: Any, columns: Any) -> Any:
    """Choose the bases of a part; returns its shape: bits of a code, plus 16 for groups."""
    count = tokens * columns
    groups = (count + np.int64(63)) >> 6
    single = np.int64(tokens < COLUMN_TOKENS)
    last = ones(count - ((groups - 1) << 6))
    base = bytes_at(bases)
    if single:
        period, step = groups, np.int64(1)
        for group in range(groups):
            base[group] = np.uint8(lanes.greatest(exponents + 64 * group))
    else:
        period, step = columns, np.int64(64) % columns
        for column in range(0, columns, 64):
            lanes.maximum_of_columns(exponents + column, columns, tokens, bases + column)
        go_round(bases, columns)
    over2 = over3 = over4 = phase = np.int64(0)
    for group in range(groups):
        chosen = last if group == groups - 1 else np.int64(-1)
        here, base_at = exponents + 64 * group, bases + phase
        over2 += vectors.count_ones(lanes.beyond(here, base_at, 3, single) & chosen)
        over3 += vectors.count_ones(lanes.beyond(here, base_at, 7, single) & chosen)
        over4 += vectors.count_ones(lanes.beyond(here, base_at, 15, single) & chosen)
        phase += step
        if phase >= period:
            phase -= period
    width, cost = np.int64(3), 3 * count + 8 * over3
    if 2 * count + 8 * over2 < cost:
        width, cost = np.int64(2), 2 * count + 8 * over2
    if 4 * count + 8 * over4 < cost:
        width = np.int64(4)
    if single:
        codes = (np.int64(1) << width) - 1
        for group in range(groups):
            chosen = last if group == groups - 1 else np.int64(-1)
            here, top = exponents + 64 * group, np.int64(base[group])
            best = score = lowered = np.int64(0)
            for shift in range(lanes.SHIFTS):
                gained = lanes.at_distance(here, top, codes + shift) & chosen
                lost = lanes.at_distance(here, top, shift) & chosen
                score += vectors.count_ones(gained) - vectors.count_ones(lost)
                if score > best:
                    best, lowered = score, np.int64(shift + 1)
            base[group] = np.uint8(top - lowered)
        return width + np.int64(16)
    for column in range(0, columns, 64):
        lanes.lower_bases(exponents + column, columns, tokens, bases + column, width)
    go_round(bases, columns)
    return width


@inline
def ones(count: Any) -> Any:
    """A plane with ones for the first 1 to 64 lanes."""
    return np.int64(-1) if count >= 64 else (np.int64(1) << count) - np.int64(1)


@inline
def go_round(bases: Any, columns: Any) -> None:
    """Let the bases of columns begin again after the last, for a group across rows."""
    base = bytes_at(bases)
    for number in range(64):
        base[columns + number] = base[number]


@helper
def _encode_part(
    row: Any,
    dtype: Any,
    start: Any,
    token: Any,
    tokens: Any,
    column: Any,
    columns: Any,
    dst: Any,
    room: Any,
    scratch: Any,
) -> Any:
    """Store a part; returns its bytes, or -1."""
    item = np.int64(element_of(dtype))
    size = tokens * columns * item
    source = bring(row, item, start, token, tokens, column, columns, scratch + ELEMENTS)
    if is_constant(source, size, item):
        return put(source, item, PART_CONSTANT, dst, room)
    if dtype != C.DTYPE_BYTES:
        stored = encode_exponents(dtype, source, tokens, columns, dst, room, scratch)
        if stored != 0:
            return stored
    return put(source, size, PART_COPY, dst, room)


@helper
def encode_exponents(
    dtype: Any, source: Any, tokens: Any, columns: Any, dst: Any, room: Any, scratch: Any
) -> Any:
    """Store a part with codes for its exponents.

    Returns its bytes, 0 if a copy takes no more, or -1 if there is not enough room.
    """
    item = np.int64(element_of(dtype))
    count = tokens * columns
    whole = count >> 6
    odd = count & 63
    exponents = scratch + EXPONENTS
    bases = scratch + BASES
    group = scratch + GROUP
    padded = group + 512
    read_exponents(dtype, source, whole, exponents)
    if odd:
        raw.zero(padded, 256)
        memcpy(padded, source + (count - odd) * item, np.uint64(odd * item))
        read_exponents(dtype, padded, np.int64(1), exponents + 64 * whole)
    shape = _choose_bases(exponents, bases, tokens, columns)
    width = shape & 15
    period = columns
    numbers = columns
    if shape >= 16:
        period = numbers = whole + np.int64(odd > 0)
    head = 5 + numbers
    fixed = head + whole * _group_bytes(dtype, width, np.int64(64))
    if odd:
        fixed += _group_bytes(dtype, width, odd)
    most = count * item - fixed
    if most < 0:
        return np.int64(0)
    if room < fixed:
        return _REFUSED
    bytes_at(dst)[0] = shape + (PART_COLUMNS if shape < 16 else PART_GROUPS - 16)
    memcpy(dst + 5, bases, np.uint64(numbers))
    to = dst + head
    escaped = scratch + ESCAPES
    every = np.int64(-1)
    used = _store(dtype, source, exponents, whole, bases, period, shape, every, to, escaped, most)
    if used < 0:
        return np.int64(0)
    to += whole * _group_bytes(dtype, width, np.int64(64))
    if odd:
        phase = whole if shape >= 16 else (64 * whole) % columns
        more = _store(
            dtype,
            padded,
            exponents + 64 * whole,
            np.int64(1),
            bases + phase,
            period,
            shape,
            ones(odd),
            group,
            escaped + used,
            most - used,
        )
        if more < 0:
            return np.int64(0)
        used += more
        _last_group(dtype, width, odd, group, to, True)
    if room < fixed + used:
        return _REFUSED
    raw.store_u32(dst + 1, used)
    memcpy(dst + fixed, escaped, np.uint64(used))
    return fixed + used


@shared("int64(int64, int64, int64, int64, int64)")
def encode(row: Any, start: Any, dst: Any, room: Any, scratch: Any) -> Any:
    """Store a tensor.

    Parameters
    ----------
    row
        Address of the tensor's row.
    start
        Address of its first byte.
    dst, room
        Where it goes, and how many bytes there are.
    scratch
        ``SCRATCH_BYTES`` of working memory.

    Returns
    -------
    Bytes that it took, or -1 if there was not enough room.
    """
    words = words_at(row)
    dtype, dim = words[C.ROW_DTYPE], words[C.ROW_DIM]
    if dtype == C.DTYPE_BYTES and (dim & 1) == 0:
        dtype = np.int64(C.DTYPE_BF16)
    item = np.int64(element_of(dtype))
    tokens = words[C.ROW_OUTER] * words[C.ROW_INNER]
    columns = words[C.ROW_HEADS] * dim * element_of(words[C.ROW_DTYPE]) // item
    wide = part_columns(tokens, columns, item)
    long = part_tokens(tokens, wide, item)
    filled = np.int64(4)
    for token in range(0, tokens, long):
        for column in range(0, columns, wide):
            size = _encode_part(
                row,
                dtype,
                start,
                token,
                min(long, tokens - token),
                column,
                min(wide, columns - column),
                dst + filled,
                room - filled,
                scratch,
            )
            if size < 0:
                return _REFUSED
            filled += size
    raw.store_u32(dst, filled)
    return filled


@helper
def _restore_vectors(
    row: Any,
    dtype: Any,
    start: Any,
    token: Any,
    tokens: Any,
    column: Any,
    columns: Any,
    stored: Any,
    bases: Any,
    period: Any,
    shape: Any,
    escaped: Any,
    escapes: Any,
) -> Any:
    """Restore a part whose groups lie within vectors, straight into these."""
    words = words_at(row)
    item = np.int64(element_of(dtype))
    width = words[C.ROW_DIM] * element_of(words[C.ROW_DTYPE])
    stride = words[C.ROW_HEAD_STRIDE]
    if words[C.ROW_HEADS] == 1 or stride == width:
        width *= words[C.ROW_HEADS]
    first = (column * item) // width
    within = (column * item) % width
    each = _group_bytes(dtype, shape & 15, np.int64(64))
    phase = used = np.int64(0)
    for number in range(token, token + tokens):
        if shape < 16:
            phase = np.int64(0)
        vector = token_start(words, start, number) + first * stride
        at = within
        left = columns * item
        while left > 0:
            run = min(left, width - at)
            groups = run // (64 * item)
            more = _restore(
                dtype,
                vector + at,
                stored,
                groups,
                bases,
                phase,
                period,
                shape,
                escaped + used,
                escapes - used,
            )
            if more < 0:
                return _REFUSED
            used += more
            stored += groups * each
            phase += groups if shape >= 16 else 64 * groups
            left -= run
            vector += stride
            at = np.int64(0)
    return used


@helper
def decode_part(
    row: Any,
    dtype: Any,
    start: Any,
    token: Any,
    tokens: Any,
    column: Any,
    columns: Any,
    src: Any,
    size: Any,
    scratch: Any,
) -> Any:
    """Restore a part; returns the bytes that it took, or -1."""
    item = np.int64(element_of(dtype))
    count = tokens * columns
    target = flat(row, item, start, token, tokens, column, columns)
    if size < 1:
        return _REFUSED
    mode = np.int64(bytes_at(src)[0])
    if mode == PART_COPY:
        if size < 1 + count * item:
            return _REFUSED
        if target != 0:
            memcpy(target, src + 1, np.uint64(count * item))
        else:
            scatter(row, item, start, token, column, columns, np.int64(0), count, src + 1)
        return 1 + count * item
    if mode == PART_CONSTANT:
        if size < 1 + item:
            return _REFUSED
        strip = scratch + STRIP
        most = np.int64(64 * STRIP_GROUPS)
        repeat(strip, src + 1, item, min(count, most))
        for begin in range(0, count, most):
            some = min(most, count - begin)
            if target != 0:
                memcpy(target + begin * item, strip, np.uint64(some * item))
            else:
                scatter(row, item, start, token, column, columns, begin, some, strip)
        return 1 + item
    width = mode & 15
    kind = mode - width
    if dtype == C.DTYPE_BYTES or width < 2 or width > lanes.MAX_PLANES:
        return _REFUSED
    whole = count >> 6
    odd = count & 63
    if kind == PART_COLUMNS and columns <= MOST_COLUMNS:
        shape, period, numbers = width, columns, columns
    elif kind == PART_GROUPS:
        shape = width + np.int64(16)
        period = numbers = whole + np.int64(odd > 0)
    else:
        return _REFUSED
    each = _group_bytes(dtype, width, np.int64(64))
    fixed = 5 + numbers + whole * each
    if odd:
        fixed += _group_bytes(dtype, width, odd)
    if size < fixed:
        return _REFUSED
    escapes = np.int64(raw.load_u32(src + 1))
    if size - fixed < escapes:
        return _REFUSED
    bases = scratch + BASES
    memcpy(bases, src + 5, np.uint64(numbers))
    if shape < 16:
        go_round(bases, columns)
    stored = src + 5 + numbers
    escaped = src + fixed
    strip = scratch + STRIP
    used: Any = np.int64(0)
    phase: Any = np.int64(0)
    first: Any = np.int64(0)
    many = whole if target != 0 else np.int64(STRIP_GROUPS)
    vector = words_at(row)[C.ROW_DIM] * np.int64(element_of(words_at(row)[C.ROW_DTYPE]))
    if target == 0 and vector % (64 * item) == 0 and columns & 63 == 0:
        used = _restore_vectors(
            row,
            dtype,
            start,
            token,
            tokens,
            column,
            columns,
            stored,
            bases,
            period,
            shape,
            escaped,
            escapes,
        )
        if used < 0:
            return _REFUSED
        first = whole
    while first < whole:
        some = min(many, whole - first)
        to = target if target != 0 else strip
        more = _restore(
            dtype,
            to,
            stored + first * each,
            some,
            bases,
            phase,
            period,
            shape,
            escaped + used,
            escapes - used,
        )
        if more < 0:
            return _REFUSED
        used += more
        if target == 0:
            scatter(row, item, start, token, column, columns, 64 * first, 64 * some, strip)
        first += some
        phase = first if shape >= 16 else (64 * first) % columns
    if odd:
        group = scratch + GROUP
        _last_group(dtype, width, odd, group, stored + whole * each, False)
        more = _restore(
            dtype,
            strip,
            group,
            np.int64(1),
            bases,
            phase,
            period,
            shape,
            escaped + used,
            escapes - used,
        )
        if more < 0:
            return _REFUSED
        used += more
        if target != 0:
            memcpy(target + 64 * whole * item, strip, np.uint64(odd * item))
        else:
            scatter(row, item, start, token, column, columns, 64 * whole, odd, strip)
    if used != escapes:
        return _REFUSED
    return fixed + escapes


@shared("int64(int64, int64, int64, int64, int64)")
def decode(row: Any, start: Any, src: Any, size: Any, scratch: Any) -> Any:
    """Restore a tensor; see :func:`encode`.

    Returns
    -------
    Bytes of ``src`` that it took, or -1 if they are not a stored tensor of this row.
    """
    words = words_at(row)
    dtype, dim = words[C.ROW_DTYPE], words[C.ROW_DIM]
    if dtype == C.DTYPE_BYTES and (dim & 1) == 0:
        dtype = np.int64(C.DTYPE_BF16)
    item = np.int64(element_of(dtype))
    tokens = words[C.ROW_OUTER] * words[C.ROW_INNER]
    columns = words[C.ROW_HEADS] * dim * element_of(words[C.ROW_DTYPE]) // item
    wide = part_columns(tokens, columns, item)
    long = part_tokens(tokens, wide, item)
    if size < 4:
        return _REFUSED
    length = np.int64(raw.load_u32(src))
    if length > size:
        return _REFUSED
    taken = np.int64(4)
    for token in range(0, tokens, long):
        for column in range(0, columns, wide):
            part = decode_part(
                row,
                dtype,
                start,
                token,
                min(long, tokens - token),
                column,
                min(wide, columns - column),
                src + taken,
                length - taken,
                scratch,
            )
            if part < 0:
                return _REFUSED
            taken += part
    return taken if taken == length else _REFUSED
