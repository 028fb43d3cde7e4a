"""From blocks to journal entries and back: what a record says, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.checksum import (
    ALGORITHM_BLAKE3,
    KNOWN_ALGORITHMS,
    Binding,
    payload_checksum,
)
from lifeboat_cache.clock import coarse_time
from lifeboat_cache.format.access import ACCESS
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.targets.base import Place

__all__ = [
    "CODEC_RAW",
    "Record",
    "access_entries",
    "cut",
    "fits",
    "place_of",
    "readable",
    "record_entries",
    "tombstones",
    "verified",
]

#: Codec id of stored bytes that equal the engine's bytes.
CODEC_RAW = 0

#: A job is cut into parts of about this many bytes, so that one big job keeps
#: every worker busy.
_PART_BYTES = 16 << 20

#: A record: its writer's 16 bytes and its journal entry (one element of ``ENTRY``).
Record = tuple[bytes, Any]


def record_entries(batch: BlockBatch, part: Sequence[int], binding: Binding) -> Entries:
    """Describe blocks of a batch as records, their payloads' checksums included.

    Parameters
    ----------
    batch
        The blocks; their memory is read here.
    part
        Which of them, by number.
    binding
        Of the namespace.

    Returns
    -------
    ``ENTRY`` array ``(len(part),)``, without places.
    """
    entries = np.zeros(len(part), dtype=ENTRY)
    sizes = batch.buffers.sizes()[list(part)]
    entries["stored_length"] = entries["raw_length"] = sizes
    entries["layout"] = batch.layout
    entries["salt"] = batch.salt
    entries["time"] = coarse_time()
    entries["codec"] = CODEC_RAW
    entries["algorithm"] = ALGORITHM_BLAKE3
    entries["kind"] = KIND_RECORD
    for name, values in (
        ("position", batch.positions),
        ("group", batch.groups),
        ("family", batch.families),
        ("parent", batch.parents),
    ):
        if values is not None:
            entries[name] = [values[number] for number in part]
    for at, number in enumerate(part):
        key, size = batch.keys[number], int(sizes[at])
        bound = binding.pack(key, batch.layout, size, size, CODEC_RAW)
        entries["key"][at] = np.void(key)
        entries["payload_checksum"][at] = np.void(
            payload_checksum(bound, batch.buffers.pieces(number))
        )
    return entries


def verified(batch: BlockBatch, number: int, record: Record, binding: Binding) -> bool:
    """Whether the caller's memory of a block holds exactly what the record says."""
    entry = record[1]
    bound = binding.pack(
        batch.keys[number],
        int(entry["layout"]),
        int(entry["raw_length"]),
        int(entry["stored_length"]),
        int(entry["codec"]),
    )
    checksum = payload_checksum(bound, batch.buffers.pieces(number))
    return checksum == bytes(entry["payload_checksum"].tobytes())


def fits(entry: Any, size: int, layout: int) -> bool:
    """Whether a record can be loaded into ``size`` bytes of the caller's layout."""
    return (
        int(entry["raw_length"]) == size
        and int(entry["stored_length"]) == size
        and int(entry["layout"]) == layout
    )


def readable(entries: Entries) -> npt.NDArray[np.bool_]:
    """Which entries this release can use; a later one may have written the others."""
    known = np.isin(entries["algorithm"], list(KNOWN_ALGORITHMS))
    usable: npt.NDArray[np.bool_] = (entries["kind"] == KIND_TOMBSTONE) | (
        known & (entries["codec"] == CODEC_RAW)
    )
    return usable


def place_of(record: Record) -> Place:
    """Where a record's stored bytes lie."""
    writer, entry = record
    return Place(writer, int(entry["segment"]), int(entry["offset"]), int(entry["stored_length"]))


def cut(numbers: Sequence[int], sizes: npt.NDArray[np.int64]) -> list[list[int]]:
    """Cut a list of blocks into parts of about 16 MiB, keeping its order."""
    parts: list[list[int]] = []
    total = 0
    for number in numbers:
        size = int(sizes[number])
        if not parts or total + size > _PART_BYTES:
            parts.append([])
            total = 0
        parts[-1].append(number)
        total += size
    return parts


def tombstones(records: Sequence[Record]) -> Entries:
    """``ENTRY`` array that declares records dead."""
    entries = np.zeros(len(records), dtype=ENTRY)
    entries["kind"] = KIND_TOMBSTONE
    entries["time"] = coarse_time()
    for at, (owner, entry) in enumerate(records):
        entries["payload_checksum"][at] = np.void(owner)
        for name in ("key", "segment", "slot"):
            entries[name][at] = entry[name]
    return entries


def access_entries(touched: Mapping[tuple[bytes, int, int], int]) -> npt.NDArray[Any]:
    """``ACCESS`` array from ``(writer, segment, slot)`` to the time of use in seconds."""
    accesses = np.zeros(len(touched), dtype=ACCESS)
    for at, ((owner, segment, slot), now) in enumerate(touched.items()):
        accesses["writer"][at] = np.void(owner)
        accesses["segment"][at], accesses["slot"][at], accesses["time"][at] = segment, slot, now
    return accesses
