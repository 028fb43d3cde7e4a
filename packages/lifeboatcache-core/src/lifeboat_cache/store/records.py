"""From blocks to journal entries and back: what a record says, and whether it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.checksum import KNOWN_ALGORITHMS, usable_algorithms
from lifeboat_cache.clock import coarse_time
from lifeboat_cache.codecs.names import CODECS, EXACT, RAW
from lifeboat_cache.format.access import ACCESS
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.index_answers import Touched

__all__ = [
    "MOST_BYTES",
    "Record",
    "access_entries",
    "readable",
    "record_entries",
    "servable",
    "tombstones",
    "tombstones_at",
    "untrusted",
    "void",
]

#: Bytes of the largest payload: its length has 32 bits.
MOST_BYTES = (1 << 32) - 1

#: A record: its writer's 16 bytes and its journal entry (one element of ``ENTRY``).
Record = tuple[bytes, Any]


def record_entries(
    batch: BlockBatch,
    keys: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.int64],
    algorithm: int,
    codec: int = RAW,
    stored: npt.NDArray[np.int64] | None = None,
) -> Entries:
    """Describe blocks of a batch as records, without their places and checksums.

    Parameters
    ----------
    batch
        The blocks.
    keys
        uint8 ``(len(batch), 32)``, their keys.
    blocks
        int64 ``(n,)``: which of them.
    algorithm
        Of the payload checksums to come.
    codec, stored
        Codec of all of them, and their bytes in that codec (int64 ``(n,)``).

    Returns
    -------
    ``ENTRY`` array ``(n,)``.
    """
    entries = np.zeros(blocks.shape[0], dtype=ENTRY)
    entries["key"] = void(keys[blocks])
    entries["stored_length"] = entries["raw_length"] = batch.buffers.sizes()[blocks]
    if stored is not None:
        entries["stored_length"] = stored
    entries["layout"] = batch.tags()[blocks]
    salts = batch.salt
    # Not by way of numpy's own choice of a dtype, which would round them.
    entries["salt"] = salts if isinstance(salts, int) else np.array(salts, dtype="<u8")[blocks]
    entries["time"] = coarse_time()
    entries["codec"] = codec
    entries["algorithm"] = algorithm
    entries["kind"] = KIND_RECORD
    for name, values in (
        ("position", batch.positions),
        ("group", batch.groups),
        ("family", batch.families),
        ("parent", batch.parents),
    ):
        if values is not None:
            entries[name] = np.asarray(values, dtype=ENTRY[name])[blocks]
    return entries


def void(table: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """Rows of bytes ``(n, k)`` as ``n`` byte strings, as the fields of an entry hold them."""
    width = table.shape[1]
    rows: npt.NDArray[np.void] = np.ascontiguousarray(table).view(f"V{width}").reshape(-1)
    return rows


def readable(entries: Entries) -> npt.NDArray[np.bool_]:
    """Which entries this release can use; a later one may have written the others."""
    known = np.isin(entries["algorithm"], list(KNOWN_ALGORITHMS))
    usable: npt.NDArray[np.bool_] = (entries["kind"] == KIND_TOMBSTONE) | (
        known & np.isin(entries["codec"], list(CODECS))
    )
    return usable


def servable(entries: Entries, key: bytes | None, *, exact: bool = False) -> npt.NDArray[np.bool_]:
    """Which entries a store may use.

    Parameters
    ----------
    entries
        ``ENTRY`` array ``(n,)``.
    key
        Its integrity key, if it has one: it trusts nothing else.
    exact
        Whether it may serve only what is stored without loss.
    """
    trusted = np.isin(entries["algorithm"], list(usable_algorithms(key)))
    if exact:
        trusted &= np.isin(entries["codec"], list(EXACT))
    usable: npt.NDArray[np.bool_] = readable(entries) & (
        (entries["kind"] == KIND_TOMBSTONE) | trusted
    )
    return usable


def untrusted(entries: Entries, key: bytes | None) -> int:
    """How many records an integrity key does not protect, although there is one."""
    if key is None or not entries.shape[0]:
        return 0
    records = readable(entries) & (entries["kind"] == KIND_RECORD)
    return int((records & ~np.isin(entries["algorithm"], list(usable_algorithms(key)))).sum())


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


def tombstones_at(
    keys: npt.NDArray[np.uint8],
    writers: Sequence[bytes],
    segments: npt.ArrayLike,
    slots: npt.ArrayLike,
) -> Entries:
    """``ENTRY`` array that declares the records at some places dead."""
    entries = np.zeros(len(writers), dtype=ENTRY)
    entries["kind"] = KIND_TOMBSTONE
    entries["time"] = coarse_time()
    entries["key"] = void(keys)
    entries["payload_checksum"] = np.frombuffer(b"".join(writers), dtype="V16")
    entries["segment"], entries["slot"] = segments, slots
    return entries


def access_entries(
    touched: Sequence[tuple[Touched, int]], writer_id: Callable[[int], bytes]
) -> npt.NDArray[Any]:
    """``ACCESS`` array from places and the time of their use in seconds; a place once."""
    parts = []
    for places, now in touched:
        part = np.zeros(places.writers.shape[0], dtype=ACCESS)
        numbers, which = np.unique(places.writers, return_inverse=True)
        owners = b"".join(map(writer_id, numbers.tolist()))
        part["writer"] = np.frombuffer(owners, dtype="V16")[which.reshape(-1)]
        part["segment"], part["slot"], part["time"] = places.segments, places.slots, now
        parts.append(part)
    accesses = np.concatenate(parts)
    # The last one of a place counts.
    places_only = void(accesses.view(np.uint8).reshape(-1, ACCESS.itemsize)[::-1, :24])
    _, last = np.unique(places_only, return_index=True)
    return accesses[::-1][np.sort(last)][::-1]
