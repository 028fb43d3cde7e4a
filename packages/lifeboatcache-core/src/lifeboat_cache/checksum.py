"""Payload and entry checksums of format 1.

A payload checksum is bound to everything that decides what the bytes mean: key,
namespace, layout, codec and lengths. A payload that is right in itself but sits
under another key therefore does not match.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from blake3 import blake3

__all__ = [
    "ALGORITHM_BLAKE3",
    "CHECKSUM_BYTES",
    "KNOWN_ALGORITHMS",
    "Binding",
    "entry_checksum",
    "header_checksum",
    "payload_checksum",
]

#: Algorithm id of BLAKE3 truncated to 128 bits.
ALGORITHM_BLAKE3 = 1

#: Algorithm ids that this version can verify.
KNOWN_ALGORITHMS = frozenset({ALGORITHM_BLAKE3})

#: Length of a payload checksum in bytes.
CHECKSUM_BYTES = 16

#: key, namespace, layout, raw length, stored length, codec, algorithm, zeros: 96 bytes.
_BINDING = struct.Struct("<32s32sQIIHB13x")

#: writer, segment, entry index, namespace: 60 bytes in front of an entry's fields.
_ENTRY_CONTEXT = struct.Struct("<16sIQ32s")


class Binding:
    """What a payload's checksum is bound to.

    Parameters
    ----------
    namespace
        32-byte digest of the namespace.
    """

    __slots__ = ("_namespace",)

    def __init__(self, namespace: bytes) -> None:
        self._namespace = namespace

    def pack(self, key: bytes, layout: int, raw: int, stored: int, codec: int) -> bytes:
        """The 96 bytes that go in front of a payload (lengths in bytes)."""
        return _BINDING.pack(key, self._namespace, layout, raw, stored, codec, ALGORITHM_BLAKE3)


def payload_checksum(binding: bytes, pieces: Iterable[memoryview]) -> bytes:
    """BLAKE3-128 over ``binding`` and the pieces of a payload.

    BLAKE3 releases the GIL on pieces of more than a few KiB.
    """
    hasher = blake3(binding)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest(length=CHECKSUM_BYTES)


def entry_checksum(
    writer: bytes, segment: int, index: int, namespace: bytes, fields: bytes
) -> bytes:
    """8 bytes of BLAKE3 over an entry's place and fields.

    Parameters
    ----------
    writer
        16-byte identity of the writer whose journal the entry is in.
    segment
        Number of the segment that the entry speaks of.
    index
        Position of the entry in the journal, from 0.
    namespace
        32-byte digest of the namespace.
    fields
        The entry's first 120 bytes.
    """
    return blake3(_ENTRY_CONTEXT.pack(writer, segment, index, namespace) + fields).digest(length=8)


def header_checksum(fields: bytes | Iterable[int]) -> bytes:
    """8 bytes of BLAKE3 over a header's bytes."""
    return blake3(bytes(fields)).digest(length=8)
