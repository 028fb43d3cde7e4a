"""Numbers apart: exponents, and what else is in an element; as ``kernels.lanes`` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Numbers", "numbers_of"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Numbers:
    """How the elements of a dtype are taken apart.

    Attributes
    ----------
    item
        Bytes of an element.
    mantissa, exponent
        Their bits; above them is the sign.
    rest_planes
        Bits of an element that are stored as planes, the sign being the last of them.
    """

    item: int
    mantissa: int
    exponent: int
    rest_planes: tuple[int, ...] = ()

    @property
    def rest_columns(self) -> int:
        """Bytes in which :meth:`split` gives the rest of an element."""
        return self.item

    def split(self, elements: Bytes) -> tuple[Bytes, Bytes]:
        """Exponents ``(n,)`` and rests ``(n, item)``, which are elements without exponents."""
        words = elements.view(f"<u{self.item}").reshape(-1)
        field = ((1 << self.exponent) - 1) << self.mantissa
        exponent = ((words & field) >> self.mantissa).astype(np.uint8)
        rest: npt.NDArray[Any] = (words & ~words.dtype.type(field)).astype(words.dtype)
        return exponent, rest.view(np.uint8).reshape(-1, self.item)

    def join(self, exponent: Bytes, rest: Bytes) -> Bytes:
        """The reverse of :meth:`split`."""
        words = np.ascontiguousarray(rest).view(f"<u{self.item}").reshape(-1)
        # An exponent of more bits than there are comes from bytes that are none of ours.
        upper = exponent.astype(words.dtype) << words.dtype.type(self.mantissa)
        made: Bytes = (words | upper).astype(words.dtype).view(np.uint8).reshape(-1, self.item)
        return made

    def signs(self, rest: Bytes) -> npt.NDArray[np.bool_]:
        """Which of the rests ``(n, item)`` have a sign."""
        return rest[:, -1] >= 0x80

    def mantissa_bytes(self, lanes: int) -> int:
        """Bytes of the packed mantissas of a group with so many elements."""
        return self.mantissa % 8 * -(-lanes // 8) + self.mantissa // 8 * lanes

    def pack_mantissas(self, rest: Bytes, lanes: int) -> Bytes:
        """Mantissas of groups, of rests ``(n, 64, item)``, as the dense coder stores them.

        Bits that are not whole bytes are planes; bytes below them follow.
        """
        many, kept = rest.shape[0], self.mantissa // 8
        bits = np.arange(self.mantissa % 8, dtype=np.uint8)[:, None]
        planes = (rest[:, None, :lanes, kept] >> bits) & 1
        packed = np.packbits(planes, axis=2, bitorder="little").reshape(many, -1)
        low = np.ascontiguousarray(rest[:, :lanes, :kept]).reshape(many, -1)
        return np.concatenate([packed, low], axis=1)

    def unpack_mantissas(self, packed: Bytes, lanes: int) -> Bytes:
        """The reverse of :meth:`pack_mantissas`, without signs."""
        many, kept, count = packed.shape[0], self.mantissa // 8, self.mantissa % 8
        width = count * -(-lanes // 8)
        planes = np.ascontiguousarray(packed[:, :width]).reshape(many, count, -1)
        bits = np.unpackbits(planes, axis=2, bitorder="little")[:, :, :lanes]
        rest = np.zeros((many, 64, self.item), dtype=np.uint8)
        for number in range(count):
            rest[:, :lanes, kept] |= bits[:, number] << number
        rest[:, :lanes, :kept] = packed[:, width:].reshape(many, lanes, kept)
        return rest

    def rest_bytes(self, lanes: int) -> int:
        """Bytes of the packed rests of a group with so many elements."""
        if self.item == 1 and self.mantissa == 3:
            return min(lanes, 32)
        bytes_of = {7: lanes, 10: lanes, 23: 3 * lanes, 2: 0}[self.mantissa]
        return len(self.rest_planes) * -(-lanes // 8) + bytes_of

    def pack(self, rest: Bytes, lanes: int) -> Bytes:
        """Rests of groups, ``(n, 64, item)``, as they are stored: ``(n, rest_bytes(lanes))``."""
        many = rest.shape[0]
        words = np.ascontiguousarray(rest).view(f"<u{self.item}").reshape(many, 64)
        if self.mantissa == 3:
            both = ((words >> 4) & 8) | (words & 7)
            packed = both[:, :32] | (both[:, 32:] << 4)
            return packed[:, : min(lanes, 32)].astype(np.uint8)
        parts = []
        for bit in self.rest_planes:
            plane = ((words[:, :lanes] >> words.dtype.type(bit)) & 1).astype(np.uint8)
            parts.append(np.packbits(plane, axis=1, bitorder="little"))
        if self.mantissa == 10:
            parts.append((words[:, :lanes] & 0xFF).astype(np.uint8))
        elif self.mantissa in (7, 23):
            upper = words >> words.dtype.type(16) if self.item == 4 else words
            byte = ((upper >> words.dtype.type(8)) & 0x80) | (upper & 0x7F)
            parts.append(byte[:, :lanes].astype(np.uint8))
            if self.item == 4:
                lower = (words[:, :lanes] & 0xFFFF).astype("<u2")
                parts.append(lower.view(np.uint8).reshape(many, -1))
        return np.concatenate(parts, axis=1)

    def unpack(self, packed: Bytes, lanes: int) -> Bytes:
        """The reverse of :meth:`pack`."""
        many = packed.shape[0]
        words = np.zeros((many, 64), dtype=f"<u{self.item}")
        kind = words.dtype.type
        if self.mantissa == 3:
            both = np.zeros((many, 64), dtype=np.uint8)
            both[:, : packed.shape[1]] = packed & 15
            both[:, 32 : 32 + packed.shape[1]] = packed >> 4
            words |= ((both & 8) << 4) | (both & 7)
            words[:, lanes:] = 0
            return words.view(np.uint8).reshape(many, 64, 1)
        plane = -(-lanes // 8)
        for number, bit in enumerate(self.rest_planes):
            stored = np.ascontiguousarray(packed[:, number * plane : (number + 1) * plane])
            bits = np.unpackbits(stored, axis=1, bitorder="little")[:, :lanes]
            words[:, :lanes] |= bits.astype(words.dtype) << kind(bit)
        after = packed[:, len(self.rest_planes) * plane :]
        if self.mantissa == 10:
            words[:, :lanes] |= after[:, :lanes]
        elif self.mantissa in (7, 23):
            byte = after[:, :lanes].astype(words.dtype)
            upper = ((byte & 0x80) << kind(8)) | (byte & 0x7F)
            if self.item == 4:
                lower = np.ascontiguousarray(after[:, lanes:]).view("<u2")
                upper = (upper << kind(16)) | lower
            words[:, :lanes] |= upper
        return words.view(np.uint8).reshape(many, 64, self.item)


_NUMBERS = {
    "bfloat16": Numbers(2, 7, 8),
    "float16": Numbers(2, 10, 5, (8, 9, 15)),
    "float32": Numbers(4, 23, 8),
    "float8_e4m3fn": Numbers(1, 3, 4),
    "float8_e5m2": Numbers(1, 2, 5, (0, 1, 7)),
}


def numbers_of(name: str) -> Numbers | None:
    """How the elements of a dtype are taken apart; ``None`` for plain bytes."""
    return _NUMBERS.get(name)
