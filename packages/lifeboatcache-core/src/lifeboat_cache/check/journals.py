"""Reading whole journals in pages, and what they name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.format.journal import (
    ENTRY_BYTES,
    KIND_RECORD,
    KIND_TOMBSTONE,
    Entries,
    parse_entries,
)
from lifeboat_cache.targets.files import close_file, open_file, read_range

__all__ = ["Codes", "Journal", "codes", "pages", "scan_journal"]

#: Entries looked at together (8 MiB): the records of several segments, so that reading
#: them in the order of their places is sequential.
_PAGE_ENTRIES = 1 << 16

#: uint64 ``(n,)``: records of one writer, segment number * 2^32 + slot.
Codes = npt.NDArray[np.uint64]


def codes(entries: Entries) -> Codes:
    """Which records of their writer entries speak of."""
    packed: Codes = (entries["segment"].astype(np.uint64) << np.uint64(32)) | entries[
        "slot"
    ].astype(np.uint64)
    return packed


@dataclass
class Journal:
    """What one journal holds.

    Attributes
    ----------
    size
        Of the file, in bytes.
    entries
        Whole entries, without those that a living writer may not have finished.
    bad
        Numbers of the entries whose checksum is wrong.
    torn
        Whether a dead writer left an incomplete entry at the end.
    named
        Segments of its writer that intact entries name.
    tombstones
        Which records it declares dead, by their writer.
    payload_bytes
        Of all records it names.
    """

    path: Path
    writer: bytes
    namespace: bytes
    size: int = 0
    entries: int = 0
    bad: list[int] = field(default_factory=list)
    torn: bool = False
    named: set[int] = field(default_factory=set)
    tombstones: dict[bytes, list[Codes]] = field(default_factory=dict)
    payload_bytes: int = 0

    @property
    def good(self) -> int:
        """Intact entries."""
        return self.entries - len(self.bad)


def scan_journal(
    path: Path, writer: bytes, namespace: bytes, *, alive: bool, stop: threading.Event
) -> Journal:
    """Read a journal from its first entry to its end. Raises ``OSError``.

    Parameters
    ----------
    path
        The file; its header is not looked at.
    writer, namespace
        Whose it has to be.
    alive
        Whether the writer was alive before: the end may then be unfinished.
    stop
        Ends it early.
    """
    journal = Journal(path, writer, namespace, path.stat().st_size)
    size = journal.size - HEADER_BYTES
    limit = max(0, size) // ENTRY_BYTES
    for first, data in _raw_pages(path, limit):
        entries, bad = parse_entries(data, writer, first, namespace)
        if bad:
            journal.bad += _bad_numbers(data, writer, first, namespace)
        journal.entries = first + len(data) // ENTRY_BYTES
        _note(journal, entries)
        if stop.is_set():
            break
    if alive:
        while journal.bad and journal.bad[-1] == journal.entries - 1:
            journal.bad.pop()
            journal.entries -= 1
    else:
        journal.torn = size > 0 and size % ENTRY_BYTES > 0
    return journal


def pages(journal: Journal) -> Iterator[Entries]:
    """The intact entries of a scanned journal, in pages. Raises ``OSError``."""
    for first, data in _raw_pages(journal.path, journal.entries):
        yield parse_entries(data, journal.writer, first, journal.namespace)[0]


def _raw_pages(path: Path, limit: int) -> Iterator[tuple[int, bytes]]:
    fd = open_file(path)
    try:
        first = 0
        while first < limit:
            wanted = min(_PAGE_ENTRIES, limit - first) * ENTRY_BYTES
            data = read_range(fd, wanted, HEADER_BYTES + first * ENTRY_BYTES)
            data = data[: len(data) // ENTRY_BYTES * ENTRY_BYTES]
            if not data:
                return
            yield first, data
            first += len(data) // ENTRY_BYTES
    finally:
        close_file(fd)


def _bad_numbers(data: bytes, writer: bytes, first: int, namespace: bytes) -> list[int]:
    return [
        first + number
        for number in range(len(data) // ENTRY_BYTES)
        if parse_entries(
            data[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES],
            writer,
            first + number,
            namespace,
        )[1]
    ]


def _note(journal: Journal, entries: Entries) -> None:
    tombs = entries["kind"] == KIND_TOMBSTONE
    # An entry of a kind that a later release writes may need its segment too.
    journal.named.update(np.unique(entries["segment"][~tombs]).tolist())
    records = entries["kind"] == KIND_RECORD
    journal.payload_bytes += int(entries["stored_length"][records].sum(dtype=np.uint64))
    buried = entries[tombs]
    if buried.shape[0]:
        owners: dict[bytes, list[int]] = {}
        for number, owner in enumerate(buried["payload_checksum"].tolist()):
            owners.setdefault(owner, []).append(number)
        packed = codes(buried)
        for owner, numbers in owners.items():
            journal.tombstones.setdefault(owner, []).append(packed[numbers])
