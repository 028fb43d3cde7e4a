"""Following one journal with the numbers of its entries."""

from __future__ import annotations

import os
import time
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

    __slots__ = (
        "_namespace",
        "_path",
        "_stuck",
        "_valid",
        "_writer",
        "created",
        "next",
        "size",
        "waiting",
    )

    def __init__(self, path: Path, writer: bytes, namespace: bytes) -> None:
        self._path = path
        self._writer = writer
        self._namespace = namespace
        self._valid = False
        self.created = 0
        self.next = 0
        self.size = -1
        #: Whether it stopped at entries that may not be seen as they are yet.
        self.waiting = False
        self._stuck = (-1, 0.0)

    def read(self, *, final: bool, patience_s: float = 0.0) -> Iterator[tuple[Entries, _Numbers]]:
        """What was appended since, in pages of entries and their numbers.

        Parameters
        ----------
        final
            Whether its writer was dead before: what is bad at the end stays bad.
        patience_s
            For so long it stops at a bad entry, and looks at it again the next time: another
            host may have written it just now.

        Raises
        ------
        FormatError, OSError
            If the file or its header cannot be read.
        """
        fd = open_file(self._path)
        try:
            size = os.fstat(fd).st_size
            if size == self.size and not final and not self.waiting:
                return
            self.waiting = False
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
                good = self._good_at_first(numbers)
                if good < whole and patience_s and self._patient(good, patience_s):
                    self.waiting = True
                    entries, numbers = entries[:good], numbers[:good]
                    self.next += good
                    if good:
                        yield entries, numbers
                    break
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

    def _good_at_first(self, numbers: _Numbers) -> int:
        """How many good entries there are before the first bad one."""
        expected = np.arange(self.next, self.next + numbers.shape[0])
        wrong = np.flatnonzero(numbers != expected)
        return int(wrong[0]) if wrong.shape[0] else int(numbers.shape[0])

    def _patient(self, good: int, patience_s: float) -> bool:
        """Whether to wait for the entry behind so many good ones."""
        place, now = self.next + good, time.monotonic()
        if self._stuck[0] != place:
            self._stuck = place, now
        return now - self._stuck[1] < patience_s

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
