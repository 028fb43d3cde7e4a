"""Payload and entry checksums of format 1.

A payload checksum is bound to everything that decides what the bytes mean: key,
namespace, layout, codec and lengths. A payload that is right in itself but sits
under another key therefore does not match.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from lifeboat_cache import kernels

__all__ = [
    "ALGORITHM_BLAKE3",
    "ALGORITHM_KEYED_BLAKE3",
    "ALGORITHM_XXH3",
    "BINDING_BYTES",
    "CHECKSUM_BYTES",
    "KNOWN_ALGORITHMS",
    "Binding",
    "entry_checksum",
    "header_checksum",
    "payload_checksum",
    "preferred_algorithm",
    "usable_algorithms",
]

#: Algorithm id of BLAKE3 truncated to 128 bits.
ALGORITHM_BLAKE3 = 1
#: Algorithm id of XXH3-128: as fast as memory, and only against accidents.
ALGORITHM_XXH3 = 2
#: Algorithm id of BLAKE3 with the integrity key, truncated to 128 bits: against tampering too.
ALGORITHM_KEYED_BLAKE3 = 3

#: Algorithm ids that this version can verify.
KNOWN_ALGORITHMS = frozenset({ALGORITHM_BLAKE3, ALGORITHM_XXH3, ALGORITHM_KEYED_BLAKE3})

#: Length of a payload checksum in bytes.
CHECKSUM_BYTES = 16

#: key, namespace, layout, raw length, stored length, codec, algorithm, zeros: 96 bytes.
_BINDING = struct.Struct("<32s32sQIIHB13x")

#: The same, for many payloads at once.
_BINDINGS = np.dtype(
    [
        ("key", "V32"),
        ("namespace", "V32"),
        ("layout", "<u8"),
        ("raw_length", "<u4"),
        ("stored_length", "<u4"),
        ("codec", "<u2"),
        ("algorithm", "u1"),
        ("reserved", "V13"),
    ]
)

#: Length of a binding in bytes.
BINDING_BYTES = _BINDING.size

#: Where a binding names the algorithm.
_ALGORITHM_AT = 82

#: XXH3 has rules of their own for inputs of up to 240 bytes; behind this padding none is so short.
_XXH3_PADDING = bytes(256 - BINDING_BYTES)

if _BINDINGS.itemsize != BINDING_BYTES:  # a wrong edit of one of them must not go unnoticed
    raise AssertionError("the two tables of a binding differ")

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

    def pack(
        self,
        key: bytes,
        layout: int,
        raw: int,
        stored: int,
        codec: int,
        algorithm: int = ALGORITHM_BLAKE3,
    ) -> bytes:
        """The 96 bytes that go in front of a payload (lengths in bytes)."""
        return _BINDING.pack(key, self._namespace, layout, raw, stored, codec, algorithm)

    def pack_batch(
        self,
        keys: npt.NDArray[np.uint8],
        layout: int | npt.NDArray[np.uint64],
        raw: npt.NDArray[np.uint32],
        stored: npt.NDArray[np.uint32],
        codec: int | npt.NDArray[np.uint16],
        algorithm: int | npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.uint8]:
        """:meth:`pack` for many payloads.

        Parameters
        ----------
        keys
            uint8 ``(n, 32)``.
        layout, raw, stored, codec, algorithm
            ``(n,)``, or one value for all.

        Returns
        -------
        ndarray
            uint8 ``(n, 96)``.
        """
        count = keys.shape[0]
        packed = np.zeros(count, dtype=_BINDINGS)
        packed["layout"] = layout
        packed["raw_length"] = raw
        packed["stored_length"] = stored
        packed["codec"] = codec
        packed["algorithm"] = algorithm
        table = packed.view(np.uint8).reshape(count, BINDING_BYTES)
        table[:, :32] = keys
        table[:, 32:64] = np.frombuffer(self._namespace, dtype=np.uint8)
        return table


def preferred_algorithm(key: bytes | None = None) -> int:
    """The algorithm for new records.

    Parameters
    ----------
    key
        The integrity key, if there is one.
    """
    if key is not None:
        return ALGORITHM_KEYED_BLAKE3
    return ALGORITHM_XXH3 if kernels.ready() else ALGORITHM_BLAKE3


def usable_algorithms(key: bytes | None = None) -> frozenset[int]:
    """The algorithms that a store may trust.

    With an integrity key only the keyed one: anybody who can write to the directory
    could make a record with a right checksum of another. Without one, a keyed
    checksum cannot be verified.
    """
    if key is not None:
        return frozenset({ALGORITHM_KEYED_BLAKE3})
    return KNOWN_ALGORITHMS - {ALGORITHM_KEYED_BLAKE3}


def payload_checksum(
    binding: bytes,
    pieces: Iterable[memoryview],
    algorithm: int | None = None,
    key: bytes | None = None,
) -> bytes:
    """The 16 bytes of checksum over ``binding`` and the pieces of a payload.

    BLAKE3 releases the GIL on pieces of more than a few KiB, XXH3 with kernels always.

    Parameters
    ----------
    algorithm
        By default the one that the binding names.
    key
        The integrity key (32 bytes), which only keyed BLAKE3 uses.

    Raises
    ------
    ValueError
        If the algorithm is unknown, or keyed and there is no key.
    """
    chosen = binding[_ALGORITHM_AT] if algorithm is None else algorithm
    if chosen == ALGORITHM_XXH3:
        return _xxh3(chain((memoryview(binding + _XXH3_PADDING),), pieces))
    if chosen == ALGORITHM_BLAKE3:
        hasher = blake3(binding)
    elif chosen != ALGORITHM_KEYED_BLAKE3:
        raise ValueError(f"unknown checksum algorithm {chosen}: upgrade lifeboatcache-core")
    elif key is None:
        raise ValueError("a keyed checksum needs the key: set security.integrity_key")
    else:
        hasher = blake3(binding, key=key)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest(length=CHECKSUM_BYTES)


def _xxh3(pieces: Iterable[memoryview]) -> bytes:
    """One piece after the other: a caller may use the memory of one for the next."""
    if not kernels.ready():
        from lifeboat_cache.kernels.xxh3_numpy import xxh3_128

        return xxh3_128(pieces)
    from lifeboat_cache.kernels.xxh3 import STATE_BYTES, xxh3_add, xxh3_begin, xxh3_end

    state = np.empty(STATE_BYTES, dtype=np.uint8)
    xxh3_begin(state)
    for piece in pieces:
        if piece.nbytes:
            xxh3_add(state, np.frombuffer(piece, dtype=np.uint8).ctypes.data, piece.nbytes)
    out = np.empty(CHECKSUM_BYTES, dtype=np.uint8)
    xxh3_end(state, out)
    return out.tobytes()


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
