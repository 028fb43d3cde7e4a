"""Following one journal with the numbers of its entries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, FileHeader
from lifeboat_cache.format.journal import ENTRY_BYTES, Entries, parse_entries
from lifeboat_cache.targets.files import close_file, open_file, read_range

__all__ = ["JournalFollower", "read_entries"]

#: Entries read and checked in one go.
_PAGE_ENTRIES = 4096

_Numbers = npt.NDArray[np.int64]


class JournalFollower:
    """Reads a journal from where it stopped the last time.

    Parameters
    ----------
    path, writer, namespace
        The file, and the 16 and 32 bytes that its header must name.
    """

    __slots__ = ("_namespace", "_path", "_valid", "_writer", "created", "next", "size")

    def __init__(self, path: Path, writer: bytes, namespace: bytes) -> None:
        self._path = path
        self._writer = writer
        self._namespace = namespace
        self._valid = False
        self.created = 0
        self.next = 0
        self.size = -1

    def read(self, *, final: bool) -> Iterator[tuple[Entries, _Numbers]]:
        """What was appended since, in pages of entries and their numbers.

        Parameters
        ----------
        final
            Whether its writer was dead before: what is bad at the end stays bad.

        Raises
        ------
        FormatError, OSError
            If the file or its header cannot be read.
        """
        fd = open_file(self._path)
        try:
            size = os.fstat(fd).st_size
            if size == self.size and not final:
                return
            if not self._valid:
                name = self._path.name
                header = FileHeader.unpack(read_range(fd, HEADER_BYTES, 0), MAGIC_JOURNAL, name)
                if (header.namespace, header.writer) != (self._namespace, self._writer):
                    raise FormatError(f"{name}: the header names another writer; skipped")
                self._valid = True
                self.created = header.created
            while True:
                at = HEADER_BYTES + self.next * ENTRY_BYTES
                data = read_range(fd, _PAGE_ENTRIES * ENTRY_BYTES, at)
                whole = len(data) // ENTRY_BYTES
                if not whole:
                    break
                entries, numbers = self._parse(data[: whole * ENTRY_BYTES])
                if whole < _PAGE_ENTRIES and not final:
                    # What is bad at the very end may still be being written.
                    whole = int(numbers[-1]) + 1 - self.next if numbers.shape[0] else 0
                self.next += whole
                if numbers.shape[0]:
                    yield entries, numbers
                if whole < _PAGE_ENTRIES:
                    break
            self.size = size
        finally:
            close_file(fd)

    def _parse(self, data: bytes) -> tuple[Entries, _Numbers]:
        entries, bad = parse_entries(data, self._writer, self.next, self._namespace)
        count = len(data) // ENTRY_BYTES
        numbers = np.arange(self.next, self.next + count, dtype=np.int64)
        if bad:
            good = [
                not parse_entries(
                    data[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES],
                    self._writer,
                    self.next + at,
                    self._namespace,
                )[1]
                for at in range(count)
            ]
            numbers = numbers[np.array(good, dtype=bool)]
        return entries, numbers


def read_entries(path: Path, writer: bytes, namespace: bytes, numbers: _Numbers) -> Entries:
    """Entries of a journal by number, in that order. Raises ``OSError``.

    Raises
    ------
    FormatError
        If one of them is bad by now.
    """
    parts = []
    fd = open_file(path)
    try:
        at = 0
        while at < numbers.shape[0]:
            # Neighbours in one go.
            upto = at + 1
            while upto < numbers.shape[0] and numbers[upto] == numbers[upto - 1] + 1:
                upto += 1
            first, count = int(numbers[at]), upto - at
            data = read_range(fd, count * ENTRY_BYTES, HEADER_BYTES + first * ENTRY_BYTES)
            entries, bad = parse_entries(data, writer, first, namespace)
            if bad or entries.shape[0] != count:
                raise FormatError(f"{path.name}: entries are damaged")
            parts.append(entries)
            at = upto
    finally:
        close_file(fd)
    out: Entries = np.concatenate(parts)
    return out
