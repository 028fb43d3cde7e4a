"""What goes into the index and what comes out, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.journal import Entries

__all__ = ["Gathered", "Keys", "Touched", "Words", "as_keys", "words_of"]

#: Keys as bytes, or uint8 ``(n, 32)``.
Keys = Sequence[bytes] | npt.NDArray[np.uint8]

#: 64-bit words, signed so that plain Python and compiled code shift them alike.
Words = npt.NDArray[np.int64]

_KEY_BYTES = 32


class Touched(NamedTuple):
    """Records whose time of last use was advanced: uint32 ``(m,)`` each.

    ``writers`` are numbers; :meth:`Index.writer_id` knows whose.
    """

    writers: npt.NDArray[np.uint32]
    segments: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The records that answered for ``n`` keys at one moment, as arrays of length ``n``.

    Where ``found`` is false everything else is 0. Lengths and offset are in bytes.

    Attributes
    ----------
    found
        bool.
    writer
        uint32: numbers; :meth:`Index.writer_id` knows whose.
    entries
        ``ENTRY``: all other fields; the ``checksum`` field means nothing.
    segment, slot, stored_length, raw_length
        uint32.
    offset, layout
        uint64.
    codec
        uint16.
    algorithm
        uint8: of the payload checksum.
    payload_checksum
        uint8 ``(n, 16)``.
    """

    found: npt.NDArray[np.bool_]
    writer: npt.NDArray[np.uint32]
    entries: Entries
    segment: npt.NDArray[np.uint32]
    slot: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    stored_length: npt.NDArray[np.uint32]
    raw_length: npt.NDArray[np.uint32]
    layout: npt.NDArray[np.uint64]
    codec: npt.NDArray[np.uint16]
    algorithm: npt.NDArray[np.uint8]
    payload_checksum: npt.NDArray[np.uint8]


def as_keys(keys: Keys) -> npt.NDArray[np.uint8]:
    """Keys as uint8 ``(n, 32)``, contiguous and writable.

    Raises
    ------
    ValueError
        If they do not have 32 bytes each.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != _KEY_BYTES:
            raise ValueError(
                f"keys are {keys.dtype} {keys.shape}: pass uint8 arrays of shape (n, 32)"
            )
        return np.require(keys, requirements=["C", "A", "W"])
    count = len(keys)
    joined = bytearray().join(keys)
    if len(joined) != _KEY_BYTES * count:
        raise ValueError("a key does not have 32 bytes: pass keys made by `block_keys`")
    return np.frombuffer(joined, dtype=np.uint8).reshape(count, _KEY_BYTES)


def words_of(keys: Keys) -> Words:
    """Keys as flat int64, four words each."""
    if isinstance(keys, np.ndarray):
        return as_keys(keys).reshape(-1).view(np.int64)
    joined = bytearray().join(keys)
    if len(joined) != _KEY_BYTES * len(keys):
        raise ValueError("a key does not have 32 bytes: pass keys made by `block_keys`")
    return np.frombuffer(joined, dtype=np.int64)
