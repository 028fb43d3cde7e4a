"""What the twins of the exact coders have in common: a tensor is stored part by part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import TensorLayout
from lifeboat_cache.codecs.numbers import Numbers, numbers_of
from lifeboat_cache.codecs.parts import Part, element_type, parts_of
from lifeboat_cache.errors import FormatError

__all__ = ["Exact", "Reader", "not_stored", "runs", "spread", "u8", "u32"]

Bytes = npt.NDArray[np.uint8]

# The first byte of a stored part; what coders have besides is larger.
_COPY = 0
_CONSTANT = 1

_MOST_STORED = (1 << 32) - 1


class Exact(ABC):
    """A coder that gives back every bit: its length, then its parts."""

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
        numbers = numbers_of(name)
        stored = [self._stored(part, numbers, part.of(elements)) for part in parts_of(tensor)]
        return np.concatenate([u32(4 + sum(part.shape[0] for part in stored)), *stored])

    def decode(self, tensor: TensorLayout, stored: Bytes, payload: Bytes, bits: int) -> int:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        del bits
        name, item = element_type(tensor)
        numbers = numbers_of(name)
        width = tensor.heads * tensor.dim * tensor.item_bytes // item
        elements = np.empty((tensor.tokens, width, item), dtype=np.uint8)
        length = Reader(stored, 0, stored.shape[0]).u32()
        if length > stored.shape[0]:
            raise not_stored()
        reader = Reader(stored, 4, length)
        for part in parts_of(tensor):
            part.put(elements, self._restored(part, numbers, item, reader))
        if reader.at != length:
            raise not_stored()
        tensor.scatter(elements.reshape(tensor.tokens, tensor.heads, -1), payload)
        return length

    def _stored(self, part: Part, numbers: Numbers | None, elements: Bytes) -> Bytes:
        if (elements == elements[0]).all():
            return np.concatenate([u8(_CONSTANT), elements[0]])
        coded = None if numbers is None else self._encode_part(part, numbers, elements)
        if coded is not None and coded.shape[0] <= elements.size:
            return coded
        return np.concatenate([u8(_COPY), elements.reshape(-1)])

    def _restored(self, part: Part, numbers: Numbers | None, item: int, reader: Reader) -> Bytes:
        mode = int(reader.take(1)[0])
        if mode == _COPY:
            return reader.take(part.count * item).reshape(part.count, item)
        if mode == _CONSTANT:
            return np.broadcast_to(reader.take(item), (part.count, item))
        if numbers is None:
            raise not_stored()
        return self._decode_part(part, numbers, mode, reader)

    @abstractmethod
    def _encode_part(self, part: Part, numbers: Numbers, elements: Bytes) -> Bytes | None:
        """Store a part, uint8 ``(count, item)``; ``None`` if it had better be copied."""

    @abstractmethod
    def _decode_part(self, part: Part, numbers: Numbers, mode: int, reader: Reader) -> Bytes:
        """Restore a part whose first byte, already taken, is ``mode``."""


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

    def u32(self) -> int:
        """The next four bytes as a number."""
        return int(self.take(4).view("<u4")[0])


def u8(value: int) -> Bytes:
    """A number as a byte."""
    return np.array([value], dtype=np.uint8)


def u32(value: int) -> Bytes:
    """A number as four bytes."""
    return np.frombuffer(value.to_bytes(4, "little"), dtype=np.uint8)


def runs(count: int) -> list[tuple[int, int, int]]:
    """Groups of 64 elements that are alike: the first one, how many, and their elements."""
    whole, odd = divmod(count, 64)
    return [run for run in ((0, whole, 64), (whole, 1, odd)) if run[1] and run[2]]


def spread(part: Part, units: npt.NDArray[np.uint8], *, single: bool) -> Bytes:
    """What every element has of its group (``single``) or column, up to the last group's end."""
    if single:
        return np.repeat(units, 64)
    return np.resize(units, -(-part.count // 64) * 64)
