"""Exact storage of numbers in less room, for slow media; see ``docs/codecs.md``.

As ``coder_lossless``, except for parts of many elements: exponents and signs together are
symbols (see ``signs``), which a range coder stores (see ``rans``). The part's columns, or
where it has few tokens its groups of 64 elements, share up to eight tables of how frequent
each symbol is; a column or group names its table and the base of its exponents.

The twin is ``lifeboat_cache.codecs.dense``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import lanes, raw, signs, vectors
from lifeboat_cache.kernels.coder_lossless import (
    BASES,
    ELEMENTS,
    EXPONENTS,
    GROUP,
    STRIP,
    STRIP_GROUPS,
    decode_part,
    encode_exponents,
    go_round,
    ones,
    read_exponents,
)
from lifeboat_cache.kernels.jit import helper, inline, shared
from lifeboat_cache.kernels.libc import memcpy, memmove
from lifeboat_cache.kernels.memory import bytes_at, words_at
from lifeboat_cache.kernels.parts import (
    PART_CONSTANT,
    PART_COPY,
    bring,
    element_of,
    flat,
    is_constant,
    part_columns,
    part_tokens,
    put,
    scatter,
)
from lifeboat_cache.kernels.rans import (
    LEAST,
    SLOT_BITS,
    SLOTS,
    STATE_BYTES,
    SYMBOLS,
    cheapest,
    decode_symbols,
    encode_symbols,
    fill_table,
    settled,
)
from lifeboat_cache.kernels.tables import COSTS, SEEDS

__all__ = ["decode", "encode"]

#: Plus the number of tables less one.
PART_COLUMNS = 64
PART_GROUPS = 128

#: Elements from which on tables pay, and more of them.
LEAST_COUNT = 1 << 14
MORE_COUNT = 1 << 17
FEW_TABLES = 4
MORE_TABLES = 8

#: Columns can have bases of their own from so many tokens on, if they are as many as lanes.
COLUMN_TOKENS = 32

#: Of this many elements, at most one may escape.
ESCAPE_SHARE = 8

#: How often columns choose their table anew.
ROUNDS = 3

#: Where the mean exponent lies below its base.
_MEAN_CODE = 4

#: Cost of a symbol with a table that there is not; more than any other.
_NEVER = 1 << 10

_REFUSED = np.int64(-1)

# Working memory, besides that of the coder lossless.
_CLASSES = (2 << 20) + (64 << 10)
_OFFSETS = (2 << 20) + (128 << 10)
_TABLES = (2 << 20) + (256 << 10)
_FREQUENCIES = (2 << 20) + (320 << 10)
_RANGES = (2 << 20) + (328 << 10)
_STATES = (2 << 20) + (336 << 10)
_COUNTS = (2 << 20) + (512 << 10)
_ESCAPED = (3 << 20) + (640 << 10)
_HISTORY = (2 << 20) + (512 << 10)
_HISTORY_BYTES = 32 << 10
_SYMBOLS = (2 << 20) + (576 << 10)


@inline
def _planes(dtype: Any) -> Any:
    if dtype == C.DTYPE_BF16 or dtype == C.DTYPE_FP32:
        return np.int64(7)
    return np.int64(3 if dtype == C.DTYPE_E4M3 else 2)


@inline
def _kept(dtype: Any) -> Any:
    if dtype == C.DTYPE_FP32:
        return np.int64(2)
    return np.int64(1 if dtype == C.DTYPE_FP16 else 0)


@inline
def _group_bytes(dtype: Any, count: Any) -> Any:
    """Bytes of the mantissas of up to 64 elements."""
    return _planes(dtype) * ((count + np.int64(7)) >> 3) + _kept(dtype) * count


@helper
def _last_group(dtype: Any, count: Any, whole: Any, stored: Any, storing: Any) -> None:
    """Copy mantissas of fewer than 64 elements between their stored form and a whole group's."""
    plane = (count + np.int64(7)) >> 3
    for _ in range(_planes(dtype)):
        if storing:
            memcpy(stored, whole, np.uint64(plane))
        else:
            raw.store_u64(whole, 0)
            memcpy(whole, stored, np.uint64(plane))
        stored += plane
        whole += np.int64(8)
    kept = _kept(dtype) * count
    if storing:
        memcpy(stored, whole, np.uint64(kept))
    else:
        memcpy(whole, stored, np.uint64(kept))


def _loops(dtype: int) -> tuple[Any, Any, Any]:
    """Loops over groups of one dtype: to make symbols, to store mantissas, to restore."""
    plane_of_signs = signs.plane_of_signs(dtype)
    split = signs.split_mantissa(dtype)
    join = signs.join_signed(dtype)
    item = lanes.ITEM_BYTES[dtype]
    rest_bytes = 8 * signs.MANTISSA_PLANES[dtype] + 64 * signs.MANTISSA_BYTES[dtype]

    @helper
    def code(
        elements: Any,
        first: Any,
        count: Any,
        source: Any,
        columns: Any,
        symbols: Any,
        bases: Any,
        period: Any,
        single: Any,
        chosen: Any,
        escaped: Any,
        most: Any,
    ) -> Any:
        """``source`` are groups from ``first`` on, ``elements`` all of the part."""
        phase = first if single else (64 * first) % columns
        step = np.int64(1) if single else np.int64(64) % period
        used = np.int64(0)
        for group in range(first, first + count):
            base = bases + phase
            mask = lanes.beyond(symbols, base, signs.ESCAPED, single) & chosen
            if mask != 0:
                more = vectors.count_ones(mask)
                if used + more > most:
                    return _REFUSED
                exponent, place = bytes_at(symbols), bytes_at(escaped + used)
                number = np.int64(0)
                while mask != 0:
                    place[number] = exponent[vectors.first_one(mask)]
                    number += 1
                    mask &= mask - 1
                used += more
            before = np.int64(0)
            if not single:
                if 64 * group >= columns:
                    before = plane_of_signs(elements + (64 * group - columns) * item)
                elif 64 * group + 64 > columns:
                    before = plane_of_signs(elements) << (columns - 64 * group)
            signs.symbols_of(symbols, base, single, plane_of_signs(source) ^ before, symbols)
            symbols += 64
            source += 64 * item
            phase += step
            if phase >= period:
                phase -= period
        return used

    @helper
    def pack(source: Any, count: Any, to: Any) -> None:
        for group in range(count):
            split(source + group * 64 * item, to + group * rest_bytes)

    @helper
    def restore(
        to: Any,
        symbols: Any,
        count: Any,
        mantissas: Any,
        bases: Any,
        phase: Any,
        period: Any,
        single: Any,
        history: Any,
        escaped: Any,
        most: Any,
    ) -> Any:
        """``history`` are two words: where signs go, and how far before they were."""
        step = np.int64(1) if single else np.int64(64) % period
        used = np.int64(0)
        exponents = np.int64(raw.stack(64))
        place = words_at(history)
        after = place[0]
        for _ in range(count):
            mask = signs.exponents_of(symbols, bases + phase, single, exponents)
            if mask != 0:
                more = vectors.count_ones(mask)
                if used + more > most:
                    return _REFUSED
                source, exponent = bytes_at(escaped + used), bytes_at(exponents)
                number = np.int64(0)
                while mask != 0:
                    exponent[vectors.first_one(mask)] = source[number]
                    number += 1
                    mask &= mask - 1
                used += more
            if single:
                signs.signs_of(symbols, place[2], after)
            else:
                if after + 64 > place[2]:
                    memcpy(place[3], after - place[1], np.uint64(place[1]))
                    after = place[3] + place[1]
                signs.signs_of(symbols, after - place[1], after)
            join(to, exponents, after, mantissas)
            if not single:
                after += 64
            to += 64 * item
            symbols += 64
            mantissas += rest_bytes
            phase += step
            if phase >= period:
                phase -= period
        place[0] = after
        return used

    return code, pack, restore


_code_bf16, _pack_bf16, _restore_bf16 = _loops(C.DTYPE_BF16)
_code_fp16, _pack_fp16, _restore_fp16 = _loops(C.DTYPE_FP16)
_code_fp32, _pack_fp32, _restore_fp32 = _loops(C.DTYPE_FP32)
_code_e4m3, _pack_e4m3, _restore_e4m3 = _loops(C.DTYPE_E4M3)
_code_e5m2, _pack_e5m2, _restore_e5m2 = _loops(C.DTYPE_E5M2)


@helper
def _code(
    dtype: Any,
    elements: Any,
    first: Any,
    count: Any,
    source: Any,
    columns: Any,
    symbols: Any,
    bases: Any,
    period: Any,
    single: Any,
    chosen: Any,
    escaped: Any,
    most: Any,
) -> Any:
    """Make symbols of exponents, in place; returns how many escaped, or -1."""
    if dtype == C.DTYPE_BF16:
        return _code_bf16(
            elements,
            first,
            count,
            source,
            columns,
            symbols,
            bases,
            period,
            single,
            chosen,
            escaped,
            most,
        )
    if dtype == C.DTYPE_FP16:
        return _code_fp16(
            elements,
            first,
            count,
            source,
            columns,
            symbols,
            bases,
            period,
            single,
            chosen,
            escaped,
            most,
        )
    if dtype == C.DTYPE_FP32:
        return _code_fp32(
            elements,
            first,
            count,
            source,
            columns,
            symbols,
            bases,
            period,
            single,
            chosen,
            escaped,
            most,
        )
    if dtype == C.DTYPE_E4M3:
        return _code_e4m3(
            elements,
            first,
            count,
            source,
            columns,
            symbols,
            bases,
            period,
            single,
            chosen,
            escaped,
            most,
        )
    return _code_e5m2(
        elements,
        first,
        count,
        source,
        columns,
        symbols,
        bases,
        period,
        single,
        chosen,
        escaped,
        most,
    )


@helper
def _pack(dtype: Any, source: Any, count: Any, to: Any) -> None:
    """Store the mantissas of groups."""
    if dtype == C.DTYPE_BF16:
        _pack_bf16(source, count, to)
    elif dtype == C.DTYPE_FP16:
        _pack_fp16(source, count, to)
    elif dtype == C.DTYPE_FP32:
        _pack_fp32(source, count, to)
    elif dtype == C.DTYPE_E4M3:
        _pack_e4m3(source, count, to)
    else:
        _pack_e5m2(source, count, to)


@helper
def _restore(
    dtype: Any,
    to: Any,
    symbols: Any,
    count: Any,
    mantissas: Any,
    bases: Any,
    phase: Any,
    period: Any,
    single: Any,
    history: Any,
    escaped: Any,
    most: Any,
) -> Any:
    """Restore groups; returns how many of their elements escaped, or -1 if more than ``most``."""
    if dtype == C.DTYPE_BF16:
        return _restore_bf16(
            to, symbols, count, mantissas, bases, phase, period, single, history, escaped, most
        )
    if dtype == C.DTYPE_FP16:
        return _restore_fp16(
            to, symbols, count, mantissas, bases, phase, period, single, history, escaped, most
        )
    if dtype == C.DTYPE_FP32:
        return _restore_fp32(
            to, symbols, count, mantissas, bases, phase, period, single, history, escaped, most
        )
    if dtype == C.DTYPE_E4M3:
        return _restore_e4m3(
            to, symbols, count, mantissas, bases, phase, period, single, history, escaped, most
        )
    return _restore_e5m2(
        to, symbols, count, mantissas, bases, phase, period, single, history, escaped, most
    )


@helper
def _choose_bases(exponents: Any, bases: Any, tokens: Any, columns: Any, single: Any) -> None:
    """Let the mean exponent of a column or group, but for zeros far below, lie at one code."""
    count = tokens * columns
    base, exponent = bytes_at(bases), bytes_at(exponents)
    if single:
        for first in range(0, count, 64):
            some = min(np.int64(64), count - first)
            top = lanes.greatest(exponents + first)
            total = np.int64(0)
            for number in range(first, first + some):
                total += min(top - np.int64(exponent[number]), np.int64(15))
            base[first >> 6] = np.uint8((top - (total + some // 2) // some + _MEAN_CODE) & 255)
        return
    sums = np.int64(raw.stack(8 * 64))
    total_of = words_at(sums)
    for first in range(0, columns, 64):
        some = min(np.int64(64), columns - first)
        lanes.maximum_of_columns(exponents + first, columns, tokens, bases + first)
        for lane in range(64):
            total_of[lane] = 0
        for token in range(tokens):
            at = token * columns + first
            for lane in range(some):
                low = np.int64(base[first + lane]) - np.int64(exponent[at + lane])
                total_of[lane] += min(low, np.int64(15))
        for lane in range(some):
            mean = (total_of[lane] + tokens // 2) // tokens
            base[first + lane] = np.uint8((np.int64(base[first + lane]) - mean + _MEAN_CODE) & 255)
    go_round(bases, columns)


@helper
def _count_symbols(symbols: Any, count: Any, units: Any, single: Any, counts: Any) -> None:
    """How often each column or group has each symbol, up to 255; uint8 ``(units, SYMBOLS)``."""
    raw.zero(counts, np.uint64(units * SYMBOLS))
    symbol, seen = bytes_at(symbols), bytes_at(counts)
    row = np.int64(0)
    for number in range(count):
        unit = number >> 6 if single else row
        at = unit * SYMBOLS + np.int64(symbol[number])
        seen[at] += np.uint8(seen[at] != 255)
        row += 1
        if row == units:
            row = np.int64(0)


@helper
def _normalize(totals: Any, frequencies: Any) -> None:
    """Counts to slots of a table: SLOTS together, at least one for what occurs; or all 0."""
    total, slots = words_at(totals), words_at(frequencies)
    everything = np.int64(0)
    for symbol in range(SYMBOLS):
        everything += total[symbol]
    filled = np.int64(0)
    for symbol in range(SYMBOLS):
        slots[symbol] = 0
        if total[symbol] > 0:
            share = (total[symbol] * SLOTS + everything // 2) // everything
            slots[symbol] = max(np.int64(1), share)
            filled += slots[symbol]
    while filled != SLOTS and everything > 0:
        largest = np.int64(0)
        for symbol in range(1, SYMBOLS):
            if slots[symbol] > slots[largest]:
                largest = np.int64(symbol)
        step = np.int64(1) if filled < SLOTS else np.int64(-1)
        slots[largest] += step
        filled += step


@helper
def _choose_tables(
    counts: Any, units: Any, tables: Any, classes: Any, frequencies: Any, ranges: Any
) -> None:
    """Choose a table for every column or group, and the tables; ``ranges`` is overwritten."""
    seen, class_of = bytes_at(counts), bytes_at(classes)
    slots, work = words_at(frequencies), words_at(ranges)
    for number in range(tables * SYMBOLS):
        slots[number] = SEEDS[number]
    for _ in range(ROUNDS):
        # What a symbol costs with each table, then what each table's symbols are.
        for symbol in range(SYMBOLS):
            for table in range(MORE_TABLES):
                cost = np.int64(_NEVER)
                if table < tables:
                    cost = COSTS[slots[table * SYMBOLS + symbol]]
                raw.store_u32(ranges + 4 * (symbol * MORE_TABLES + table), cost)
        for unit in range(units):
            class_of[unit] = np.uint8(cheapest(counts + unit * SYMBOLS, ranges))
        for number in range(tables * SYMBOLS):
            work[number] = 0
        for unit in range(units):
            at = np.int64(class_of[unit]) * SYMBOLS
            for symbol in range(SYMBOLS):
                work[at + symbol] += np.int64(seen[unit * SYMBOLS + symbol])
        for table in range(tables):
            _normalize(ranges + 8 * SYMBOLS * table, frequencies + 8 * SYMBOLS * table)


@helper
def _write_tables(frequencies: Any, tables: Any, to: Any) -> Any:
    """Write tables: which symbols occur, and their slots less one; returns the bytes."""
    slots, place = words_at(frequencies), bytes_at(to)
    at = np.int64(0)
    for table in range(tables):
        present = np.int64(0)
        for symbol in range(SYMBOLS):
            present |= np.int64(slots[table * SYMBOLS + symbol] > 0) << symbol
        raw.store_u32(to + at, present)
        at += 4
        for symbol in range(SYMBOLS):
            less = slots[table * SYMBOLS + symbol] - 1
            if less >= 128:
                place[at] = np.uint8(128 | (less >> 8))
                place[at + 1] = np.uint8(less & 255)
                at += 2
            elif less >= 0:
                place[at] = np.uint8(less)
                at += 1
    return at


@helper
def _read_tables(src: Any, size: Any, tables: Any, frequencies: Any) -> Any:
    """The reverse of :func:`_write_tables`; a table without symbols has only escapes."""
    slots, place = words_at(frequencies), bytes_at(src)
    at = np.int64(0)
    for table in range(tables):
        if size - at < 4:
            return _REFUSED
        present = np.int64(raw.load_u32(src + at))
        at += 4
        filled = np.int64(0)
        for symbol in range(SYMBOLS):
            here = table * SYMBOLS + symbol
            slots[here] = 0
            if (present >> symbol) & 1 == 0:
                continue
            if at >= size:
                return _REFUSED
            less = np.int64(place[at])
            at += 1
            if less >= 128:
                if at >= size:
                    return _REFUSED
                less = ((less & 127) << 8) | np.int64(place[at])
                at += 1
            slots[here] = less + 1
            filled += less + 1
        if filled == 0:
            slots[table * SYMBOLS + signs.ESCAPED] = SLOTS
        elif filled != SLOTS:
            return _REFUSED
    return at


@helper
def _encode_symbols(
    dtype: Any, source: Any, tokens: Any, columns: Any, dst: Any, room: Any, scratch: Any
) -> Any:
    """Store a part with symbols; returns its bytes, 0 if a copy takes no more, or -1."""
    item = np.int64(element_of(dtype))
    count = tokens * columns
    size = count * item
    # With more room than a copy takes, what does not fit into less is stored as a copy.
    inside = min(room, size)
    refused = np.int64(0) if room > size else _REFUSED
    whole = count >> 6
    odd = count & 63
    symbols, bases, padded = scratch + EXPONENTS, scratch + BASES, scratch + GROUP + 512
    read_exponents(dtype, source, whole, symbols)
    if odd:
        raw.zero(padded, 256)
        memcpy(padded, source + (count - odd) * item, np.uint64(odd * item))
        read_exponents(dtype, padded, np.int64(1), symbols + 64 * whole)
    single = np.int64(tokens < COLUMN_TOKENS or columns < 64)
    units = whole + np.int64(odd > 0) if single else columns
    _choose_bases(symbols, bases, tokens, columns, single)
    escaped, most = scratch + _ESCAPED, count // ESCAPE_SHARE
    every = np.int64(-1)
    escapes = _code(
        dtype,
        source,
        np.int64(0),
        whole,
        source,
        columns,
        symbols,
        bases,
        units,
        single,
        every,
        escaped,
        most,
    )
    if escapes < 0:
        return refused
    if odd:
        more = _code(
            dtype,
            source,
            whole,
            np.int64(1),
            padded,
            columns,
            symbols + 64 * whole,
            bases,
            units,
            single,
            ones(odd),
            escaped + escapes,
            most - escapes,
        )
        if more < 0:
            return refused
        escapes += more
    tables = np.int64(MORE_TABLES if count >= MORE_COUNT else FEW_TABLES)
    classes, frequencies = scratch + _CLASSES, scratch + _FREQUENCIES
    ranges, states, counts = scratch + _RANGES, scratch + _STATES, scratch + _COUNTS
    _count_symbols(symbols, count, units, single, counts)
    _choose_tables(counts, units, tables, classes, frequencies, ranges)
    written = scratch + _TABLES
    length = _write_tables(frequencies, tables, written)
    each = _group_bytes(dtype, np.int64(64))
    rest = whole * each + (_group_bytes(dtype, odd) if odd else np.int64(0))
    head = 9 + units + ((units + 1) >> 1)
    fixed = head + length + STATE_BYTES + rest
    if inside < fixed + escapes:
        return refused
    bytes_at(dst)[0] = np.uint8((PART_GROUPS if single else PART_COLUMNS) + tables - 1)
    memcpy(dst + 9, bases, np.uint64(units))
    class_of, slots = bytes_at(classes), words_at(frequencies)
    class_of[units] = 0
    nibbles = bytes_at(dst + 9 + units)
    for pair in range((units + 1) >> 1):
        nibbles[pair] = class_of[2 * pair] | (class_of[2 * pair + 1] << np.uint8(4))
    memcpy(dst + head, written, np.uint64(length))
    for table in range(tables):
        first = np.int64(0)
        for symbol in range(SYMBOLS):
            here = table * SYMBOLS + symbol
            raw.store_u32(ranges + 4 * here, slots[here] | (first << 16))
            first += slots[here]
    offsets = scratch + _OFFSETS
    for unit in range(units):
        raw.store_u32(offsets + 4 * unit, np.int64(class_of[unit]) * SYMBOLS)
    if not single:
        memcpy(offsets + 4 * columns, offsets, np.uint64(4 * 64))
    mantissas = dst + fixed - rest
    _pack(dtype, source, whole, mantissas)
    if odd:
        group = scratch + GROUP
        _pack(dtype, padded, np.int64(1), group)
        _last_group(dtype, odd, group, mantissas + whole * each, True)
    first_word = encode_symbols(
        states,
        ranges,
        offsets,
        units,
        single,
        symbols,
        count,
        dst + inside,
        dst + fixed + escapes,
    )
    if first_word < 0:
        return refused
    length = dst + inside - first_word
    raw.store_u32(dst + 1, escapes)
    raw.store_u32(dst + 5, length >> 1)
    memcpy(mantissas - STATE_BYTES, states, np.uint64(STATE_BYTES))
    memmove(dst + fixed, first_word, np.uint64(length))
    memcpy(dst + fixed + length, escaped, np.uint64(escapes))
    return fixed + length + escapes


@helper
def _decode_symbols(
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
    """Restore a part with symbols; returns the bytes that it took, or -1."""
    item = np.int64(element_of(dtype))
    count = tokens * columns
    whole = count >> 6
    odd = count & 63
    mode = np.int64(bytes_at(src)[0])
    single = np.int64(mode >= PART_GROUPS)
    tables = (mode & 63) + 1
    if tables > MORE_TABLES or mode >= PART_GROUPS + 64:
        return _REFUSED
    if not single and (tokens < COLUMN_TOKENS or columns < 64):
        return _REFUSED
    units = whole + np.int64(odd > 0) if single else columns
    head = 9 + units + ((units + 1) >> 1)
    if size < head:
        return _REFUSED
    escapes = np.int64(raw.load_u32(src + 1))
    words = np.int64(raw.load_u32(src + 5))
    frequencies, table, states = scratch + _FREQUENCIES, scratch + _TABLES, scratch + _STATES
    length = _read_tables(src + head, size - head, tables, frequencies)
    if length < 0:
        return _REFUSED
    for number in range(tables):
        fill_table(table + 4 * SLOTS * number, frequencies + 8 * SYMBOLS * number)
    at = head + length
    rest = whole * _group_bytes(dtype, np.int64(64))
    if odd:
        rest += _group_bytes(dtype, odd)
    if size - at < STATE_BYTES + rest + 2 * words + escapes:
        return _REFUSED
    memcpy(states, src + at, np.uint64(STATE_BYTES))
    for lane in range(64):
        if raw.load_u32(states + 4 * lane) < LEAST:
            return _REFUSED
    at += STATE_BYTES
    bases, offsets = scratch + BASES, scratch + _OFFSETS
    memcpy(bases, src + 9, np.uint64(units))
    nibbles = bytes_at(src + 9 + units)
    for unit in range(units):
        chosen = (np.int64(nibbles[unit >> 1]) >> (4 * (unit & 1))) & 15
        if chosen >= tables:
            return _REFUSED
        raw.store_u32(offsets + 4 * unit, chosen << SLOT_BITS)
    if not single:
        go_round(bases, columns)
        memcpy(offsets + 4 * columns, offsets, np.uint64(4 * 64))
    history = np.int64(raw.stack(32))
    place = words_at(history)
    signs_at = scratch + _HISTORY
    raw.zero(signs_at, np.uint64(_HISTORY_BYTES))
    place[0] = signs_at + 64 if single else signs_at + columns
    place[1] = columns
    place[2] = signs_at if single else signs_at + _HISTORY_BYTES
    place[3] = signs_at
    target = flat(row, item, start, token, tokens, column, columns)
    strip, symbols, group = scratch + STRIP, scratch + _SYMBOLS, scratch + GROUP
    mantissas, word, escaped = src + at, src + at + rest, src + at + rest + 2 * words
    each = _group_bytes(dtype, np.int64(64))
    used = np.int64(0)
    taken = np.int64(0)
    for first in range(0, count, 64 * STRIP_GROUPS):
        some = min(np.int64(64 * STRIP_GROUPS), count - first)
        phase = first >> 6 if single else first % columns
        more = decode_symbols(
            states,
            table,
            offsets,
            phase,
            units,
            single,
            word + 2 * taken,
            words - taken,
            some,
            symbols,
        )
        if more < 0:
            return _REFUSED
        taken += more
        full = some >> 6
        to = strip if target == 0 else target + first * item
        more = _restore(
            dtype,
            to,
            symbols,
            full,
            mantissas + (first >> 6) * each,
            bases,
            phase,
            units,
            single,
            history,
            escaped + used,
            escapes - used,
        )
        if more < 0:
            return _REFUSED
        used += more
        if some & 63:
            _last_group(dtype, odd, group, mantissas + whole * each, False)
            tail = bytes_at(symbols + 64 * full)
            for lane in range(odd, 64):
                tail[lane] = 0
            phase = whole if single else (64 * whole) % columns
            more = _restore(
                dtype,
                strip + 64 * full * item,
                symbols + 64 * full,
                np.int64(1),
                group,
                bases,
                phase,
                units,
                single,
                history,
                escaped + used,
                escapes - used,
            )
            if more < 0:
                return _REFUSED
            used += more
            if target != 0:
                memcpy(to + 64 * full * item, strip + 64 * full * item, np.uint64(odd * item))
        if target == 0:
            scatter(row, item, start, token, column, columns, first, some, strip)
    if used != escapes or taken != words or not settled(states):
        return _REFUSED
    return at + rest + 2 * words + escapes


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
    count = tokens * columns
    source = bring(row, item, start, token, tokens, column, columns, scratch + ELEMENTS)
    if is_constant(source, count * item, item):
        return put(source, item, PART_CONSTANT, dst, room)
    stored = np.int64(0)
    if dtype != C.DTYPE_BYTES:
        if count >= LEAST_COUNT:
            stored = _encode_symbols(dtype, source, tokens, columns, dst, room, scratch)
        else:
            stored = encode_exponents(dtype, source, tokens, columns, dst, room, scratch)
    if stored != 0:
        return stored
    return put(source, count * item, PART_COPY, dst, room)


@shared("int64(int64, int64, int64, int64, int64)")
def encode(row: Any, start: Any, dst: Any, room: Any, scratch: Any) -> Any:
    """Store a tensor; see ``coder_lossless.encode``."""
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


@shared("int64(int64, int64, int64, int64, int64)")
def decode(row: Any, start: Any, src: Any, size: Any, scratch: Any) -> Any:
    """Restore a tensor; see ``coder_lossless.decode``."""
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
            few, some = min(long, tokens - token), min(wide, columns - column)
            left = length - taken
            if left > 0 and bytes_at(src + taken)[0] >= PART_COLUMNS and dtype != C.DTYPE_BYTES:
                part = _decode_symbols(
                    row, dtype, start, token, few, column, some, src + taken, left, scratch
                )
            else:
                part = decode_part(
                    row, dtype, start, token, few, column, some, src + taken, left, scratch
                )
            if part < 0:
                return _REFUSED
            taken += part
    return taken if taken == length else _REFUSED
