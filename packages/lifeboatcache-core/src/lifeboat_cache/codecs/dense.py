"""Exact storage of numbers in less room: the twin of ``kernels.coder_dense``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.exact import Exact, Reader, not_stored, runs, spread, u8, u32
from lifeboat_cache.codecs.lossless import decode_exponents, encode_exponents
from lifeboat_cache.codecs.numbers import Numbers
from lifeboat_cache.codecs.parts import Part
from lifeboat_cache.codecs.rans import (
    LANES,
    LEAST,
    SLOTS,
    SYMBOLS,
    decode_symbols,
    encode_symbols,
)
from lifeboat_cache.kernels import codec_layout as columns
from lifeboat_cache.kernels.tables import COSTS, SEEDS

__all__ = ["Dense"]

_COLUMNS = 64
_GROUPS = 128

_LEAST_COUNT = 1 << 14
_MORE_COUNT = 1 << 17
_FEW_TABLES = 4
_MORE_TABLES = 8
_COLUMN_TOKENS = 32
_ESCAPE_SHARE = 8
_ROUNDS = 3
_MEAN_CODE = 4
_ESCAPED = 15
_FLIPPED = 16

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int64]


class Dense(Exact):
    """Exponents and signs through a range coder, mantissas as they are."""

    number = columns.CODER_DENSE

    def _encode_part(self, part: Part, numbers: Numbers, elements: Bytes) -> Bytes | None:
        if part.count < _LEAST_COUNT:
            return encode_exponents(part, numbers, elements)
        return _encode_symbols(part, numbers, elements)

    def _decode_part(self, part: Part, numbers: Numbers, mode: int, reader: Reader) -> Bytes:
        if mode < _COLUMNS:
            return decode_exponents(part, numbers, mode, reader)
        return _decode_symbols(part, numbers, mode, reader)


def _encode_symbols(part: Part, numbers: Numbers, elements: Bytes) -> Bytes | None:
    exponent, rest = numbers.split(elements)
    single = part.tokens < _COLUMN_TOKENS or part.columns < LANES
    bases = _choose_bases(part, exponent, single=single)
    code = np.minimum(spread(part, bases, single=single)[: part.count] - exponent, _ESCAPED)
    escaped = exponent[code == _ESCAPED]
    if escaped.shape[0] > part.count // _ESCAPE_SHARE:
        return None
    sign = numbers.signs(rest)
    if not single:
        flipped = sign.reshape(part.tokens, part.columns).copy()
        flipped[1:] ^= flipped[:-1].copy()
        sign = flipped.reshape(-1)
    symbols = (code + _FLIPPED * sign.astype(np.uint8)).astype(np.uint8)
    tables = _MORE_TABLES if part.count >= _MORE_COUNT else _FEW_TABLES
    classes, frequencies = _choose_tables(_count_symbols(part, symbols, single=single), tables)
    class_of = spread(part, classes, single=single)[: part.count]
    states, words = encode_symbols(symbols, class_of, frequencies)
    padded = np.zeros((-(-part.count // 64) * 64, numbers.item), dtype=np.uint8)
    padded[: part.count] = rest
    groups = padded.reshape(-1, 64, numbers.item)
    mantissas = [
        numbers.pack_mantissas(groups[first : first + many], lanes).reshape(-1)
        for first, many, lanes in runs(part.count)
    ]
    pairs = np.concatenate([classes, np.zeros(classes.shape[0] % 2, dtype=np.uint8)])
    return np.concatenate(
        [
            u8((_GROUPS if single else _COLUMNS) + tables - 1),
            u32(escaped.shape[0]),
            u32(words.shape[0]),
            bases,
            pairs[::2] | (pairs[1::2] << 4),
            *(_write_table(table) for table in frequencies),
            states.astype("<u4").view(np.uint8),
            *mantissas,
            words.astype("<u2").view(np.uint8),
            escaped,
        ]
    )


def _decode_symbols(part: Part, numbers: Numbers, mode: int, reader: Reader) -> Bytes:
    single = mode >= _GROUPS
    tables = mode % 64 + 1
    fits = part.tokens >= _COLUMN_TOKENS and part.columns >= LANES
    if tables > _MORE_TABLES or mode >= _GROUPS + 64 or not (single or fits):
        raise not_stored()
    units = -(-part.count // 64) if single else part.columns
    escapes, count = reader.u32(), reader.u32()
    bases = reader.take(units)
    pairs = reader.take((units + 1) // 2)
    classes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:units]
    frequencies = np.stack([_read_table(reader) for _ in range(tables)])
    states = reader.take(4 * LANES).view("<u4").astype(np.int64)
    if (classes >= tables).any() or (states < LEAST).any():
        raise not_stored()
    rest = np.zeros((-(-part.count // 64), 64, numbers.item), dtype=np.uint8)
    for first, many, lanes in runs(part.count):
        packed = reader.take(many * numbers.mantissa_bytes(lanes)).reshape(many, -1)
        rest[first : first + many] = numbers.unpack_mantissas(packed, lanes)
    words = reader.take(2 * count).view("<u2")
    class_of = spread(part, classes, single=single)[: part.count]
    symbols = decode_symbols(states, words.astype(np.uint16), class_of, frequencies)
    if symbols is None:
        raise not_stored()
    code = symbols & _ESCAPED
    exponent = spread(part, bases, single=single)[: part.count] - code
    if int((code == _ESCAPED).sum()) != escapes:
        raise not_stored()
    exponent[code == _ESCAPED] = reader.take(escapes)
    sign = symbols >= _FLIPPED
    if not single:
        rows = sign.reshape(part.tokens, part.columns)
        sign = np.logical_xor.accumulate(rows, axis=0).reshape(-1)
    mantissas = rest.reshape(-1, numbers.item)[: part.count]
    mantissas[:, -1] |= sign.astype(np.uint8) << 7
    return numbers.join(exponent, mantissas)


def _choose_bases(part: Part, exponent: Bytes, *, single: bool) -> Bytes:
    """Let the mean exponent of a column or group, but for zeros far below, lie at one code."""
    wide = exponent.astype(np.int64)
    if single:
        sizes = np.full(-(-part.count // 64), 64)
        sizes[-1] -= sizes.shape[0] * 64 - part.count
        starts = np.arange(0, part.count, 64)
        top = np.maximum.reduceat(wide, starts)
        low = np.minimum(np.repeat(top, sizes) - wide, 15)
        total = np.add.reduceat(low, starts)
    else:
        rows = wide.reshape(part.tokens, part.columns)
        sizes = np.full(part.columns, part.tokens)
        top = rows.max(axis=0)
        total = np.minimum(top - rows, 15).sum(axis=0)
    mean = (total + sizes // 2) // sizes
    bases: Bytes = ((top - mean + _MEAN_CODE) & 255).astype(np.uint8)
    return bases


def _count_symbols(part: Part, symbols: Bytes, *, single: bool) -> Table:
    """int64 ``(units, SYMBOLS)``: how often each column or group has each symbol, up to 255."""
    number = np.arange(part.count)
    unit = number // 64 if single else number % part.columns
    units = -(-part.count // 64) if single else part.columns
    counts = np.bincount(unit * SYMBOLS + symbols, minlength=units * SYMBOLS)
    return np.minimum(counts, 255).reshape(units, SYMBOLS)


def _choose_tables(counts: Table, tables: int) -> tuple[Bytes, Table]:
    """A table for every column or group, and the tables' slots ``(tables, SYMBOLS)``."""
    slots = SEEDS.reshape(-1, SYMBOLS)[:tables]
    for _ in range(_ROUNDS):
        classes = np.argmin(counts @ COSTS[slots].T, axis=1)
        totals = np.zeros((tables, SYMBOLS), dtype=np.int64)
        np.add.at(totals, classes, counts)
        slots = np.stack([_normalize(total) for total in totals])
    return classes.astype(np.uint8), slots


def _normalize(total: Table) -> Table:
    """Counts to slots: SLOTS together, at least one for what occurs; or all 0."""
    everything = int(total.sum())
    if everything == 0:
        return np.zeros(SYMBOLS, dtype=np.int64)
    share = np.maximum(1, (total * SLOTS + everything // 2) // everything)
    slots = np.where(total > 0, share, 0)
    while (filled := int(slots.sum())) != SLOTS:
        slots[int(slots.argmax())] += 1 if filled < SLOTS else -1
    return slots


def _write_table(slots: Table) -> Bytes:
    present = sum(1 << symbol for symbol in range(SYMBOLS) if slots[symbol])
    written = bytearray(present.to_bytes(4, "little"))
    for some in slots[slots > 0].tolist():
        less = some - 1
        written += bytes([128 | less >> 8, less & 255] if less >= 128 else [less])
    return np.frombuffer(bytes(written), dtype=np.uint8)


def _read_table(reader: Reader) -> Table:
    present = reader.u32()
    slots = np.zeros(SYMBOLS, dtype=np.int64)
    for symbol in range(SYMBOLS):
        if present >> symbol & 1:
            less = int(reader.take(1)[0])
            if less >= 128:
                less = (less & 127) << 8 | int(reader.take(1)[0])
            slots[symbol] = less + 1
    if not present:
        slots[_ESCAPED] = SLOTS
    if int(slots.sum()) != SLOTS:
        raise not_stored()
    return slots
