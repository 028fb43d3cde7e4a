"""Exact storage of numbers at the speed of memory: the twin of ``kernels.coder_lossless``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.exact import Exact, Reader, not_stored, runs, spread, u8, u32
from lifeboat_cache.codecs.numbers import Numbers
from lifeboat_cache.codecs.parts import MOST_COLUMNS, Part
from lifeboat_cache.kernels import codec_layout as columns

__all__ = ["Lossless", "decode_exponents", "encode_exponents"]

_COLUMNS = 16
_GROUPS = 32

_COLUMN_TOKENS = 32
_SHIFTS = 3

Bytes = npt.NDArray[np.uint8]


class Lossless(Exact):
    """Exponents in few bits, signs and mantissas as they are."""

    number = columns.CODER_LOSSLESS

    def _encode_part(self, part: Part, numbers: Numbers, elements: Bytes) -> Bytes | None:
        return encode_exponents(part, numbers, elements)

    def _decode_part(self, part: Part, numbers: Numbers, mode: int, reader: Reader) -> Bytes:
        return decode_exponents(part, numbers, mode, reader)


def decode_exponents(part: Part, numbers: Numbers, mode: int, reader: Reader) -> Bytes:
    """Restore what :func:`encode_exponents` stored, after its first byte."""
    kind, width = mode & ~15, mode & 15
    known = kind == _GROUPS or (kind == _COLUMNS and part.columns <= MOST_COLUMNS)
    if not known or not 2 <= width <= 4:
        raise not_stored()
    groups = -(-part.count // 64)
    escapes = reader.u32()
    bases = reader.take(part.columns if kind == _COLUMNS else groups)
    base = spread(part, bases, single=kind == _GROUPS)
    code = np.zeros(groups * 64, dtype=np.uint8)
    rest = np.zeros((groups * 64, numbers.rest_columns), dtype=np.uint8)
    for first, many, lanes in runs(part.count):
        plane = -(-lanes // 8)
        size = width * plane + numbers.rest_bytes(lanes)
        stored = reader.take(many * size).reshape(many, size)
        where = slice(64 * first, 64 * (first + many))
        code[where] = _from_planes(stored[:, : width * plane], width).reshape(-1)
        rest[where] = numbers.unpack(stored[:, width * plane :], lanes).reshape(64 * many, -1)
    escaped = code == (1 << width) - 1
    if int(escaped.sum()) != escapes:
        raise not_stored()
    exponent = base - code
    exponent[escaped] = reader.take(escapes)
    return numbers.join(exponent[: part.count], rest[: part.count])


def encode_exponents(part: Part, numbers: Numbers, elements: Bytes) -> Bytes:
    """A part with codes for its exponents."""
    exponent, rest = numbers.split(elements)
    single, width, bases = _choose_bases(part, exponent)
    groups = -(-part.count // 64)
    padded = np.zeros(groups * 64, dtype=np.uint8)
    padded[: part.count] = exponent
    code = spread(part, bases, single=single) - padded
    most = (1 << width) - 1
    code = np.minimum(code, np.uint8(most))
    code[part.count :] = 0
    escaped = exponent[code[: part.count] == most]
    wide_rest = np.zeros((groups * 64, rest.shape[1]), dtype=np.uint8)
    wide_rest[: part.count] = rest
    stored = []
    for first, many, lanes in runs(part.count):
        where = slice(64 * first, 64 * (first + many))
        planes = _to_planes(code[where].reshape(many, 64), width, lanes)
        packed = numbers.pack(wide_rest[where].reshape(many, 64, -1), lanes)
        stored.append(np.concatenate([planes, packed], axis=1).reshape(-1))
    mode = width + (_GROUPS if single else _COLUMNS)
    return np.concatenate([u8(mode), u32(escaped.shape[0]), bases, *stored, escaped])


def _choose_bases(part: Part, exponent: Bytes) -> tuple[bool, int, Bytes]:
    """Whether a base belongs to a group and not to a column; bits of a code; the bases."""
    single = part.tokens < _COLUMN_TOKENS
    if single:
        rows, inside = _groups(exponent)
        top = rows.max(axis=1, where=inside, initial=0)
        distance = (top[:, None] - rows).T
        counted = inside.T
    else:
        rows = exponent.reshape(part.tokens, part.columns)
        top = rows.max(axis=0)
        distance = top - rows
        counted = np.ones_like(distance, dtype=bool)
    width, cost = 0, 9 * part.count
    for tried in (3, 2, 4):
        beyond = int(((distance >= (1 << tried) - 1) & counted).sum())
        if tried * part.count + 8 * beyond < cost:
            width, cost = tried, tried * part.count + 8 * beyond
    codes = (1 << width) - 1
    score = np.zeros(top.shape, dtype=np.int64)
    best = np.zeros(top.shape, dtype=np.int64)
    shifts = np.zeros(top.shape, dtype=np.uint8)
    for shift in range(_SHIFTS):
        gained = ((distance == codes + shift) & counted).sum(axis=0)
        lost = ((distance == shift) & counted).sum(axis=0)
        score = score + np.minimum(gained, 255) - np.minimum(lost, 255)
        shifts = np.where(score > best, np.uint8(shift + 1), shifts)
        best = np.maximum(score, best)
    return single, width, top - shifts


def _groups(values: Bytes) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """Values in rows of 64 with zeros after them, and which are values."""
    groups = -(-values.shape[0] // 64)
    padded = np.zeros(groups * 64, dtype=np.uint8)
    padded[: values.shape[0]] = values
    return padded.reshape(groups, 64), (np.arange(groups * 64) < values.shape[0]).reshape(-1, 64)


def _to_planes(code: Bytes, width: int, lanes: int) -> Bytes:
    """uint8 ``(n, 64)`` to the planes of its lower bits, of so many lanes."""
    bits = (code[:, None, :lanes] >> np.arange(width, dtype=np.uint8)[:, None]) & 1
    return np.packbits(bits, axis=-1, bitorder="little").reshape(code.shape[0], -1)


def _from_planes(planes: Bytes, width: int) -> Bytes:
    """The reverse of :func:`_to_planes`: uint8 ``(n, 64)``."""
    many = planes.shape[0]
    bits = np.unpackbits(planes.reshape(many, width, -1), axis=-1, bitorder="little")
    code = np.zeros((many, 64), dtype=np.uint8)
    for number in range(width):
        code[:, : bits.shape[2]] |= bits[:, number] << number
    return code
