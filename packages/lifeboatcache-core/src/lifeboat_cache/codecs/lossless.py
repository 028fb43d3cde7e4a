"""Exact storage of numbers at the speed of memory: the twin of ``kernels.coder_lossless``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import TensorLayout
from lifeboat_cache.codecs.numbers import Numbers, numbers_of
from lifeboat_cache.codecs.parts import MOST_COLUMNS, Part, element_type, parts_of
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import codec_layout as columns

__all__ = ["Lossless"]

_COPY = 0
_CONSTANT = 1
_COLUMNS = 16
_GROUPS = 32

_COLUMN_TOKENS = 32
_SHIFTS = 3
_MOST_STORED = (1 << 32) - 1

Bytes = npt.NDArray[np.uint8]


class Lossless:
    """Exponents in few bits, signs and mantissas as they are."""

    number = columns.CODER_LOSSLESS

    def takes(self, tensor: TensorLayout) -> bool:
        """Every tensor whose stored length fits 32 bits."""
        return self.most_bytes(tensor, 0) <= _MOST_STORED

    def fixed_bytes(self, tensor: TensorLayout, bits: int) -> int | None:
        """It depends on the values."""
        del tensor, bits
        return None

    def most_bytes(self, tensor: TensorLayout, bits: int) -> int:
        """The tensor's own bytes, its length, and a byte for every part."""
        del bits
        return 4 + sum(1 for _ in parts_of(tensor)) + tensor.nbytes

    def encode(self, tensor: TensorLayout, payload: Bytes, bits: int) -> Bytes:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        del bits
        name, item = element_type(tensor)
        elements = tensor.gather(payload).reshape(tensor.tokens, -1, item)
        stored = [_encode_part(part, name, part.of(elements)) for part in parts_of(tensor)]
        length = 4 + sum(part.shape[0] for part in stored)
        return np.concatenate([_u32(length), *stored])

    def decode(self, tensor: TensorLayout, stored: Bytes, payload: Bytes, bits: int) -> int:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        del bits
        name, item = element_type(tensor)
        elements = np.empty(
            (tensor.tokens, tensor.heads * tensor.dim * tensor.item_bytes // item, item),
            dtype=np.uint8,
        )
        reader = Reader(stored, 0, stored.shape[0])
        length = int(reader.take(4).view("<u4")[0])
        reader = Reader(stored, 4, length)
        if length > stored.shape[0]:
            raise not_stored()
        for part in parts_of(tensor):
            part.put(elements, _decode_part(part, name, item, reader))
        if reader.at != length:
            raise not_stored()
        tensor.scatter(elements.reshape(tensor.tokens, tensor.heads, -1), payload)
        return length


def not_stored() -> FormatError:
    """The error about bytes that are not what they should be."""
    return FormatError("these bytes are not a stored tensor of this layout: it is computed again")


@dataclass
class Reader:
    """Takes bytes one after the other, up to an end."""

    stored: Bytes
    at: int
    end: int

    def take(self, count: int) -> Bytes:
        """The next bytes, copied."""
        if count > self.end - self.at:
            raise not_stored()
        self.at += count
        return self.stored[self.at - count : self.at].copy()


def _u32(value: int) -> Bytes:
    return np.frombuffer(value.to_bytes(4, "little"), dtype=np.uint8)


def is_constant(elements: Bytes) -> bool:
    """Whether all elements, uint8 ``(count, item)``, are the same."""
    return bool((elements == elements[0]).all())


def _encode_part(part: Part, name: str, elements: Bytes) -> Bytes:
    if is_constant(elements):
        return np.concatenate([np.array([_CONSTANT], dtype=np.uint8), elements[0]])
    numbers = numbers_of(name)
    coded = None if numbers is None else _encode_exponents(part, numbers, elements)
    if coded is not None:
        return coded
    return np.concatenate([np.array([_COPY], dtype=np.uint8), elements.reshape(-1)])


def _decode_part(part: Part, name: str, item: int, reader: Reader) -> Bytes:
    mode = int(reader.take(1)[0])
    if mode == _COPY:
        return reader.take(part.count * item).reshape(part.count, item)
    if mode == _CONSTANT:
        return np.broadcast_to(reader.take(item), (part.count, item))
    numbers = numbers_of(name)
    kind, width = mode & ~15, mode & 15
    known = kind == _GROUPS or (kind == _COLUMNS and part.columns <= MOST_COLUMNS)
    if numbers is None or not known or not 2 <= width <= 4:
        raise not_stored()
    groups = -(-part.count // 64)
    escapes = int(reader.take(4).view("<u4")[0])
    bases = reader.take(part.columns if kind == _COLUMNS else groups)
    base = _spread(part, bases, single=kind == _GROUPS)
    code = np.zeros(groups * 64, dtype=np.uint8)
    rest = np.zeros((groups * 64, numbers.rest_columns), dtype=np.uint8)
    for first, many, lanes in _runs(part.count):
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


def _encode_exponents(part: Part, numbers: Numbers, elements: Bytes) -> Bytes | None:
    """A part with codes for its exponents; ``None`` if a copy is as good."""
    exponent, rest = numbers.split(elements)
    single, width, bases = _choose_bases(part, exponent)
    groups = -(-part.count // 64)
    padded = np.zeros(groups * 64, dtype=np.uint8)
    padded[: part.count] = exponent
    code = _spread(part, bases, single=single) - padded
    most = (1 << width) - 1
    code = np.minimum(code, np.uint8(most))
    code[part.count :] = 0
    escaped = exponent[code[: part.count] == most]
    wide_rest = np.zeros((groups * 64, rest.shape[1]), dtype=np.uint8)
    wide_rest[: part.count] = rest
    stored = []
    for first, many, lanes in _runs(part.count):
        where = slice(64 * first, 64 * (first + many))
        planes = _to_planes(code[where].reshape(many, 64), width, lanes)
        packed = numbers.pack(wide_rest[where].reshape(many, 64, -1), lanes)
        stored.append(np.concatenate([planes, packed], axis=1).reshape(-1))
    mode = width + (_GROUPS if single else _COLUMNS)
    made = np.concatenate(
        [np.array([mode], dtype=np.uint8), _u32(escaped.shape[0]), bases, *stored, escaped]
    )
    return None if made.shape[0] > elements.size else made


def _runs(count: int) -> list[tuple[int, int, int]]:
    """Groups that are alike: the first one, how many, and their elements."""
    whole, odd = divmod(count, 64)
    return [run for run in ((0, whole, 64), (whole, 1, odd)) if run[1] and run[2]]


def _spread(part: Part, bases: Bytes, *, single: bool) -> Bytes:
    """The base of every element, up to the end of the last group."""
    groups = -(-part.count // 64)
    if single:
        return np.repeat(bases, 64)
    return np.resize(bases, groups * 64)


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
