"""Journal entries: 128 bytes each, with a checksum of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.checksum import entry_checksum

__all__ = [
    "ENTRY",
    "ENTRY_BYTES",
    "KIND_RECORD",
    "KIND_TOMBSTONE",
    "Entries",
    "intact_entries",
    "parse_entries",
    "seal_entries",
]

#: One journal entry. The size divides 4,096, so that no entry straddles a page.
ENTRY = np.dtype(
    [
        ("key", "V32"),
        ("payload_checksum", "V16"),
        ("offset", "<u8"),
        ("layout", "<u8"),
        ("salt", "<u8"),
        ("family", "<u8"),
        ("parent", "<u8"),
        ("segment", "<u4"),
        ("stored_length", "<u4"),
        ("raw_length", "<u4"),
        ("position", "<u4"),
        ("time", "<u4"),
        ("group", "<u2"),
        ("codec", "<u2"),
        ("algorithm", "u1"),
        ("kind", "u1"),
        ("flags", "<u2"),
        ("slot", "<u4"),
        ("checksum", "V8"),
    ]
)

ENTRY_BYTES = 128
_FIELD_BYTES = 120

#: The entry describes a payload.
KIND_RECORD = 1
#: The entry declares a record dead: ``payload_checksum`` holds the 16-byte writer
#: of that record, ``segment`` and ``slot`` its place, ``key`` its key.
KIND_TOMBSTONE = 2

Entries = npt.NDArray[Any]

if ENTRY.itemsize != ENTRY_BYTES:  # a wrong edit of the table above must not go unnoticed
    raise AssertionError(f"a journal entry has {ENTRY.itemsize} bytes instead of {ENTRY_BYTES}")


def seal_entries(entries: Entries, writer: bytes, first_index: int, namespace: bytes) -> bytes:
    """Put the checksums in and return the bytes to append.

    Parameters
    ----------
    entries
        ``ENTRY`` array ``(n,)``; its ``checksum`` field is overwritten.
    writer, namespace
        Whose journal it is (16 and 32 bytes).
    first_index
        Index that the first entry will have in the journal.
    """
    data = bytearray(entries.tobytes())
    if kernels.ready() and data:
        from lifeboat_cache.kernels import blake3_short

        blake3_short.seal_entries(
            _address(data),
            len(entries),
            _address(writer),
            first_index,
            _address(namespace),
        )
        return bytes(data)
    segments = entries["segment"].tolist()
    for number, segment in enumerate(segments):
        at = number * ENTRY_BYTES
        fields = bytes(data[at : at + _FIELD_BYTES])
        data[at + _FIELD_BYTES : at + ENTRY_BYTES] = entry_checksum(
            writer, segment, first_index + number, namespace, fields
        )
    return bytes(data)


def parse_entries(
    data: bytes, writer: bytes, first_index: int, namespace: bytes
) -> tuple[Entries, int]:
    """Parse the whole entries in ``data``.

    Parameters
    ----------
    data
        Bytes of a journal, starting at an entry; an incomplete last entry is
        ignored (it may still be being written).
    writer, namespace
        From the journal's header.
    first_index
        Index of the first entry in ``data``.

    Returns
    -------
    entries
        ``ENTRY`` array ``(n,)`` with the entries whose checksum matches.
    bad
        How many whole entries did not match.
    """
    count = len(data) // ENTRY_BYTES
    entries = np.frombuffer(data, dtype=ENTRY, count=count)
    good = intact_entries(entries, writer, first_index, namespace)
    if good.all():
        return entries, 0
    kept: Entries = entries[good]
    return kept, count - int(kept.shape[0])


def intact_entries(
    entries: Entries, writer: bytes, first_index: int, namespace: bytes
) -> npt.NDArray[np.bool_]:
    """Which entries have the right checksum; the parameters are those of :func:`parse_entries`.

    Parameters
    ----------
    entries
        ``ENTRY`` array ``(n,)``.

    Returns
    -------
    ndarray
        bool ``(n,)``.
    """
    good = np.ones(len(entries), dtype=np.bool_)
    if kernels.ready():
        from lifeboat_cache.kernels import blake3_short

        if len(entries):
            dense = np.ascontiguousarray(entries)
            blake3_short.check_entries(
                dense.ctypes.data,
                len(entries),
                _address(writer),
                first_index,
                _address(namespace),
                good,
            )
        return good
    data = entries.tobytes()
    for number, segment in enumerate(entries["segment"].tolist()):
        at = number * ENTRY_BYTES
        fields = data[at : at + _FIELD_BYTES]
        stated = data[at + _FIELD_BYTES : at + ENTRY_BYTES]
        if entry_checksum(writer, segment, first_index + number, namespace, fields) != stated:
            good[number] = False
    return good


def _address(data: bytes | bytearray) -> int:
    """Where bytes lie in memory; valid as long as the caller holds them."""
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
