"""Journal slices: what an object in a feed holds.

A slice is a journal of format 1 by itself: a header, which names the segment, and entries whose
indices begin at 0. Its entries are those of its writer's journal that lie in the segment, and
tombstones of that writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from lifeboat_cache.clock import coarse_time
from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, FileHeader
from lifeboat_cache.format.journal import (
    ENTRY,
    ENTRY_BYTES,
    KIND_RECORD,
    KIND_TOMBSTONE,
    Entries,
    parse_entries,
    seal_entries,
)
from lifeboat_cache.s3.names import FeedName

__all__ = ["blocks_of", "pack_gone", "pack_slice", "unpack_gone", "unpack_slice"]


def pack_slice(namespace: bytes, writer: bytes, number: int, entries: Entries) -> bytes:
    """The object for some entries; their checksums are made anew."""
    header = FileHeader(MAGIC_JOURNAL, namespace, writer, number, coarse_time()).pack()
    own = np.array(entries, dtype=ENTRY, order="C")
    return header + seal_entries(own, writer, 0, namespace)


def unpack_slice(data: bytes, namespace: bytes, name: FeedName) -> tuple[Entries, int]:
    """What is intact in an object of a feed.

    Parameters
    ----------
    data
        The object.
    namespace
        32 bytes.
    name
        The object's.

    Returns
    -------
    entries
        ``ENTRY`` array: records of the segment, and tombstones.
    bad
        How many others there are.

    Raises
    ------
    FormatError
        If it is not what its name says.
    """
    header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_JOURNAL, str(name))
    if (header.namespace, header.writer, header.segment) != (namespace, name.writer, name.number):
        raise FormatError(f"{name}: the header names another segment; it is skipped")
    body = data[HEADER_BYTES:]
    entries, bad = parse_entries(body, name.writer, 0, namespace)
    bad += 1 if len(body) % ENTRY_BYTES else 0
    ends = entries["offset"].astype(np.int64) + entries["stored_length"]
    inside = (
        (entries["kind"] == KIND_RECORD)
        & (entries["segment"] == name.number)
        & (entries["offset"] >= HEADER_BYTES)
        & (entries["offset"] % 4096 == 0)
        & (ends <= name.size)
    )
    good = inside | (entries["kind"] == KIND_TOMBSTONE)
    # Kinds of later releases are not ours to judge.
    known = (entries["kind"] == KIND_RECORD) | (entries["kind"] == KIND_TOMBSTONE)
    bad += int((known & ~good).sum())
    kept: Entries = entries[good]
    return kept, bad


def blocks_of(size: int) -> int:
    """Entries of a slice of so many bytes."""
    return max(0, size - HEADER_BYTES) // ENTRY_BYTES


def pack_gone(segments: Iterable[tuple[bytes, int]]) -> bytes:
    """The object that says which segments were deleted."""
    listed = [[writer.hex(), number] for writer, number in segments]
    return json.dumps({"format": 1, "segments": listed}).encode()


def unpack_gone(data: bytes) -> list[tuple[bytes, int]]:
    """Read it back.

    Raises
    ------
    FormatError
        If it is none.
    """
    try:
        document = json.loads(data)
        return [(bytes.fromhex(writer), int(number)) for writer, number in document["segments"]]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FormatError(f"a list of deleted segments is damaged ({exc}); it is skipped") from exc
