"""Sixty-four range coders side by side: asymmetric numeral systems with tables of 1,024 slots.

Symbol ``i`` belongs to lane ``i % 64``. A lane's state is 32 bits, between 2**16 and 2**32;
it takes 16 bits from the common stream of words when it falls below, lower lanes first. A
slot of a table holds a symbol, how many slots the symbol has, and the slot's place among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper
from lifeboat_cache.kernels.memory import bytes_at, words_at
from lifeboat_cache.kernels.vectors import HAS_EXPAND, LANES, operation

__all__ = [
    "LEAST",
    "SLOTS",
    "SLOT_BITS",
    "STATE_BYTES",
    "SYMBOLS",
    "cheapest",
    "decode_symbols",
    "encode_symbols",
    "fill_table",
    "settled",
]

SLOT_BITS = 10
SLOTS = 1 << SLOT_BITS
SYMBOLS = 32
#: The least state, with which every lane of the encoder begins.
LEAST = 1 << 16
STATE_BYTES = 4 * LANES

_REFUSED = np.int64(-1)

# A slot's word: slots of its symbol, its place among them, the symbol.
_PLACE_SHIFT = 11
_SYMBOL_SHIFT = 24

_WIDE = 16
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_B16 = ir.VectorType(ir.IntType(1), _WIDE)
_V16 = ir.VectorType(_I16, _WIDE)
_V32 = ir.VectorType(_I32, _WIDE)


def _splat(value: int) -> Any:
    return ir.Constant(_V32, [value] * _WIDE)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(_at(builder, address, kind))
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _at(builder, address, value.type)).align = 1


def _declared(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    found = builder.module.globals.get(name)
    if found is None:
        kind = ir.FunctionType(result, arguments)
        found = ir.Function(builder.module, kind, name=name)
    return found


def _alike(builder: Any, number: Any) -> Any:
    """A 32-bit number in all lanes."""
    first = builder.insert_element(ir.Constant(_V32, ir.Undefined), number, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, _WIDE), [0] * _WIDE)
    return builder.shuffle_vector(first, ir.Constant(_V32, ir.Undefined), lanes)


def _build_fill(builder: Any, to: Any, first: Any) -> None:
    places = ir.Constant(_V32, [place << _PLACE_SHIFT for place in range(_WIDE)])
    _store(builder, builder.add(_alike(builder, builder.trunc(first, _I32)), places), to)


#: ``_fill(to, first)``: 16 slots' words, of the same symbol, the first of which is given.
_fill = operation(2, types.void, _build_fill)


def _gather(builder: Any, table: Any, slots: Any) -> Any:
    """32-bit words of a table."""
    pointer = _I32.as_pointer()
    pointers = ir.VectorType(pointer, _WIDE)
    places = builder.gep(builder.inttoptr(table, pointer), [slots], source_etype=_I32)
    places.type = pointers
    gather = _declared(
        builder,
        "llvm.masked.gather.v16i32.v16p0",
        _V32,
        [pointers, _I32, _B16, _V32],
    )
    every = ir.Constant(_B16, [1] * _WIDE)
    return builder.call(gather, [places, ir.Constant(_I32, 4), every, _splat(0)])


def _expand(builder: Any, words: Any, mask: Any) -> Any:
    load = _declared(
        builder,
        "llvm.masked.expandload.v16i16",
        _V16,
        [_I16.as_pointer(), _B16, _V16],
    )
    zeros = ir.Constant(_V16, [0] * _WIDE)
    return builder.call(load, [_at(builder, words, _I16), mask, zeros])


def _build_group(
    builder: Any, states: Any, table: Any, offsets: Any, single: Any, words: Any, to: Any
) -> Any:
    start = words
    alike = _alike(builder, _load(builder, offsets, _I32))
    is_single = builder.icmp_unsigned("!=", single, ir.Constant(_I64, 0))
    count = _declared(builder, "llvm.ctpop.i16", _I16, [_I16])
    for part in range(LANES // _WIDE):
        at = builder.add(states, ir.Constant(_I64, 64 * part))
        state = _load(builder, at, _V32)
        offset = _load(builder, builder.add(offsets, ir.Constant(_I64, 64 * part)), _V32)
        offset = builder.select(is_single, alike, offset)
        slot = builder.or_(builder.and_(state, _splat(SLOTS - 1)), offset)
        entry = _gather(builder, table, slot)
        frequency = builder.and_(entry, _splat((1 << _PLACE_SHIFT) - 1))
        place = builder.and_(builder.lshr(entry, _splat(_PLACE_SHIFT)), _splat(SLOTS - 1))
        symbol = builder.lshr(entry, _splat(_SYMBOL_SHIFT))
        upper = builder.lshr(state, _splat(SLOT_BITS))
        state = builder.add(builder.mul(frequency, upper), place)
        low = builder.icmp_unsigned("<", state, _splat(LEAST))
        taken = builder.zext(_expand(builder, words, low), _V32)
        filled = builder.or_(builder.shl(state, _splat(16)), taken)
        _store(builder, builder.select(low, filled, state), at)
        used = builder.call(count, [builder.bitcast(low, _I16)])
        words = builder.add(words, builder.shl(builder.zext(used, _I64), ir.Constant(_I64, 1)))
        narrow = builder.trunc(symbol, ir.VectorType(_I8, _WIDE))
        _store(builder, narrow, builder.add(to, ir.Constant(_I64, 16 * part)))
    return builder.lshr(builder.sub(words, start), ir.Constant(_I64, 1))


#: ``_group(states, table, offsets, single, words, to)``: 64 symbols, one from each lane; gives
#: how many words they took, of which there must be 64. ``offsets`` are the lanes' tables, as
#: the slots (int32) at which they begin, or one for all lanes.
_group = operation(6, types.int64, _build_group)


def _build_put(
    builder: Any, states: Any, ranges: Any, offsets: Any, single: Any, symbols: Any, end: Any
) -> Any:
    compress = _declared(
        builder, "llvm.experimental.vector.compress.v16i16", _V16, [_V16, _B16, _V16]
    )
    masked_store = _declared(
        builder,
        "llvm.masked.store.v16i16.p0",
        ir.VoidType(),
        [_V16, _V16.as_pointer(), _I32, _B16],
    )
    count = _declared(builder, "llvm.ctpop.i16", _I16, [_I16])
    lanes = ir.Constant(ir.VectorType(_I32, _WIDE), list(range(_WIDE)))
    is_single = builder.icmp_unsigned("!=", single, ir.Constant(_I64, 0))
    alike = _alike(builder, _load(builder, offsets, _I32))
    doubles = ir.VectorType(ir.DoubleType(), _WIDE)
    for part in reversed(range(LANES // _WIDE)):
        at = builder.add(states, ir.Constant(_I64, 64 * part))
        state = _load(builder, at, _V32)
        offset = _load(builder, builder.add(offsets, ir.Constant(_I64, 64 * part)), _V32)
        offset = builder.select(is_single, alike, offset)
        place = builder.add(symbols, ir.Constant(_I64, 16 * part))
        symbol = builder.zext(_load(builder, place, ir.VectorType(_I8, _WIDE)), _V32)
        chosen = _gather(builder, ranges, builder.add(symbol, offset))
        slots = builder.and_(chosen, _splat(0xFFFF))
        full = builder.icmp_unsigned(">=", builder.lshr(state, _splat(32 - SLOT_BITS)), slots)
        put = builder.call(count, [builder.bitcast(full, _I16)])
        low = builder.trunc(state, _V16)
        low = builder.call(compress, [low, full, ir.Constant(_V16, ir.Undefined)])
        end = builder.sub(end, builder.shl(builder.zext(put, _I64), ir.Constant(_I64, 1)))
        there = builder.icmp_unsigned("<", lanes, _alike(builder, builder.zext(put, _I32)))
        builder.call(masked_store, [low, _at(builder, end, _V16), ir.Constant(_I32, 1), there])
        state = builder.select(full, builder.lshr(state, _splat(16)), state)
        # Exact: both are whole numbers of less than 53 bits, and a quotient that is none lies
        # at least 1/1024 below the next.
        whole = builder.fptoui(
            builder.fdiv(builder.uitofp(state, doubles), builder.uitofp(slots, doubles)), _V32
        )
        left = builder.sub(state, builder.mul(whole, slots))
        state = builder.add(builder.shl(whole, _splat(SLOT_BITS)), left)
        state = builder.add(state, builder.lshr(chosen, _splat(16)))
        _store(builder, state, at)
    return end


#: ``_put(states, ranges, offsets, single, symbols, end)``: encode 64 symbols, one in each lane,
#: into words before ``end``; gives the address of the first. There must be room for 64.
_put = operation(6, types.int64, _build_put)


_TABLES = 8


def _build_cheapest(builder: Any, counts: Any, costs: Any) -> Any:
    kind = ir.VectorType(_I32, _TABLES)
    lanes = ir.Constant(kind, [0] * _TABLES)
    total = ir.Constant(kind, [0] * _TABLES)
    for symbol in range(SYMBOLS):
        count = _load(builder, builder.add(counts, ir.Constant(_I64, symbol)), _I8)
        first = builder.insert_element(
            ir.Constant(kind, ir.Undefined), builder.zext(count, _I32), ir.Constant(_I32, 0)
        )
        times = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)
        at = builder.add(costs, ir.Constant(_I64, 4 * _TABLES * symbol))
        total = builder.add(total, builder.mul(times, _load(builder, at, kind)))
    # The lowest of the cheapest: a table's number stands below its cost.
    numbered = builder.or_(
        builder.shl(total, ir.Constant(kind, [3] * _TABLES)),
        ir.Constant(kind, list(range(_TABLES))),
    )
    least = _declared(builder, "llvm.vector.reduce.umin.v8i32", _I32, [kind])
    found = builder.call(least, [numbered])
    return builder.zext(builder.and_(found, ir.Constant(_I32, _TABLES - 1)), _I64)


#: ``cheapest(counts, costs)``: which of eight tables is cheapest for uint8 ``(SYMBOLS,)`` of
#: counts, with int32 ``(SYMBOLS, 8)`` of costs.
cheapest = operation(2, types.int64, _build_cheapest)


@helper
def fill_table(table: Any, frequencies: Any) -> None:
    """Fill a table's 1,024 slots (32 bits each) from int64 ``(SYMBOLS,)`` that sum up to them.

    Up to 15 slots after them are overwritten.
    """
    slots = words_at(frequencies)
    at = table
    for symbol in range(SYMBOLS):
        first = slots[symbol] | (np.int64(symbol) << _SYMBOL_SHIFT)
        for place in range(0, slots[symbol], _WIDE):
            _fill(at + 4 * place, first | (np.int64(place) << _PLACE_SHIFT))
        at += 4 * slots[symbol]


@helper
def decode_symbols(
    states: Any,
    table: Any,
    offsets: Any,
    phase: Any,
    period: Any,
    single: Any,
    words: Any,
    left: Any,
    count: Any,
    to: Any,
) -> Any:
    """Decode symbols, the first of which belongs to lane 0.

    Parameters
    ----------
    states
        Address of the lanes' states.
    table
        Address of the tables, one after the other.
    offsets, phase, period, single
        Address of int32: slots at which the tables begin. With ``single`` every group of 64
        symbols has one, the first ``offsets[phase]``; otherwise every symbol, symbol ``i``
        having ``offsets[(phase + i) % period]``; 64 follow the last of them, from the first.
    words, left
        Address of 16-bit words, and how many there are.
    count
        Symbols; all but the last call of a stream must have a multiple of 64.
    to
        Where they go, a byte each, and room for 64 more.

    Returns
    -------
    Words that were taken, or -1 if there were too few.
    """
    used = np.int64(0)
    step = np.int64(1) if single else np.int64(64) % period
    for first in range(0, count, 64):
        lanes = min(np.int64(64), count - first)
        if HAS_EXPAND and lanes == 64 and left - used >= 64:
            used += _group(states, table, offsets + 4 * phase, single, words + 2 * used, to + first)
        else:
            symbols = bytes_at(to + first)
            for lane in range(lanes):
                place = phase if single else phase + lane
                state = np.int64(raw.load_u32(states + 4 * lane))
                slot = np.int64(raw.load_u32(offsets + 4 * place)) + (state & (SLOTS - 1))
                entry = np.int64(raw.load_u32(table + 4 * slot))
                state = (entry & 2047) * (state >> SLOT_BITS)
                state += (entry >> _PLACE_SHIFT) & (SLOTS - 1)
                if state < LEAST:
                    if used >= left:
                        return _REFUSED
                    word = words + 2 * used
                    low = np.int64(raw.load_u8(word)) | (np.int64(raw.load_u8(word + 1)) << 8)
                    state = (state << 16) | low
                    used += 1
                raw.store_u32(states + 4 * lane, state)
                symbols[lane] = np.uint8(entry >> _SYMBOL_SHIFT)
        phase += step
        if phase >= period:
            phase -= period
    return used


@helper
def settled(states: Any) -> Any:
    """Whether the lanes are in the states in which an encoder began."""
    different = np.int64(0)
    for lane in range(LANES):
        different += np.int64(raw.load_u32(states + 4 * lane) != LEAST)
    return different == 0


@helper
def encode_symbols(
    states: Any,
    ranges: Any,
    offsets: Any,
    period: Any,
    single: Any,
    symbols: Any,
    count: Any,
    end: Any,
    least: Any,
) -> Any:
    """Encode symbols, from the last to the first.

    Parameters
    ----------
    states
        Address of the lanes' states, which become those with which decoding begins.
    ranges
        Address of 32-bit words ``(tables, SYMBOLS)``: the symbol's slots, and 2**16 times the
        first of them.
    offsets, period, single
        As in :func:`decode_symbols`, but the tables begin at symbols.
    symbols, count
        Address of bytes.
    end, least
        Words are written before the address ``end``, and not before ``least``.

    Returns
    -------
    Address of the first word, or -1 if there was not enough room.
    """
    for lane in range(LANES):
        raw.store_u32(states + 4 * lane, LEAST)
    at = end
    last = ((count - 1) >> 6) << 6
    phase = last >> 6 if single else last % period
    step = np.int64(1) if single else np.int64(64) % period
    for begin in range(last, -1, -64):
        lanes = min(np.int64(64), count - begin)
        if HAS_EXPAND and lanes == 64 and at - least >= 128:
            at = _put(states, ranges, offsets + 4 * phase, single, symbols + begin, at)
        else:
            symbol = bytes_at(symbols + begin)
            for lane in range(lanes - 1, -1, -1):
                place = phase if single else phase + lane
                number = np.int64(raw.load_u32(offsets + 4 * place)) + np.int64(symbol[lane])
                chosen = np.int64(raw.load_u32(ranges + 4 * number))
                slots = chosen & 0xFFFF
                state = np.int64(raw.load_u32(states + 4 * lane))
                if state >> (32 - SLOT_BITS) >= slots:
                    at -= 2
                    if at < least:
                        return _REFUSED
                    word = bytes_at(at)
                    word[0] = np.uint8(state & 255)
                    word[1] = np.uint8((state >> 8) & 255)
                    state >>= 16
                whole = state // slots
                state = (whole << SLOT_BITS) + state - whole * slots + (chosen >> 16)
                raw.store_u32(states + 4 * lane, state)
        phase -= step
        if phase < 0:
            phase += period
    return at
