"""Where blocks are until they are in the bucket: files on a local disk, of format 1.

They are written as on a target of type ``filesystem``, so that what is reported as stored survives
the death of the process, and is uploaded by the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, FileHeader
from lifeboat_cache.format.journal import (
    ENTRY,
    KIND_RECORD,
    KIND_TOMBSTONE,
    Entries,
    parse_entries,
)
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import OpenFile, Reservation
from lifeboat_cache.targets.direct import ALIGNMENT
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import segment_name
from lifeboat_cache.targets.segment_writer import SegmentWriter

__all__ = ["LeftBehind", "Sealed", "StagedWriter", "StagingTarget", "read_left_behind"]

#: Before a store is refused, what is staged is measured again if it was so many seconds ago.
_MEASURE_S = 1.0

_NOTHING: Entries = np.zeros(0, dtype=ENTRY)


@dataclass(frozen=True)
class Sealed:
    """A segment that nobody writes to any more.

    Attributes
    ----------
    namespace, writer, number
        Which one it is; the namespace as 32 bytes.
    path
        Where it is.
    entries
        Its records. None: nothing of it counts.
    """

    namespace: bytes
    writer: bytes
    number: int
    path: Path
    entries: Entries

    @property
    def size(self) -> int:
        """Bytes up to the end of the last record."""
        if not self.entries.shape[0]:
            return 0
        ends = self.entries["offset"].astype(np.int64) + self.entries["stored_length"]
        return -(-int(ends.max()) // ALIGNMENT) * ALIGNMENT


class StagedWriter(SegmentWriter):
    """Appends to staged segments, and knows which of them are complete.

    Parameters
    ----------
    closed
        Called when it is closed.
    """

    def __init__(
        self, *args: Any, closed: Callable[[StagedWriter], None] | None = None, **options: Any
    ) -> None:
        self._guard = threading.Lock()
        self._reserving = 0
        self._under_way: Counter[int] = Counter()  # reservations, by segment
        self._committed: dict[int, list[Entries]] = {}
        self._buried: list[Entries] = []
        self._on_close = closed
        super().__init__(*args, **options)

    def reserve(self, entries: Entries, part_bytes: int) -> list[Reservation]:
        with self._guard:
            self._reserving += 1
        try:
            rooms = super().reserve(entries, part_bytes)
            with self._guard:
                for room in rooms:
                    if room.file is not None:
                        self._under_way[int(entries["segment"][room.first])] += 1
        finally:
            with self._guard:
                self._reserving -= 1
        return rooms

    def commit(self, entries: Entries, files: Sequence[OpenFile]) -> Outcome:
        outcome = super().commit(entries, files)
        if outcome is Outcome.OK:
            with self._guard:
                for number in np.unique(entries["segment"]).tolist():
                    mine = np.array(entries[entries["segment"] == number])
                    self._committed.setdefault(number, []).append(mine)
        return outcome

    def settle(self, entries: Entries) -> None:
        super().settle(entries)
        with self._guard:
            self._under_way[int(entries["segment"][0])] -= 1

    def bury(self, entries: Entries) -> bool:
        kept = super().bury(entries)
        with self._guard:
            self._buried.append(np.array(entries))
        return kept

    @property
    def namespace(self) -> bytes:
        """Whose records it writes (32 bytes)."""
        return self._namespace

    def take_buried(self) -> Entries:
        """Tombstones since the last call."""
        with self._guard:
            found, self._buried = self._buried, []
        return np.concatenate(found) if found else _NOTHING

    def put_back(self, tombstones: Entries) -> None:
        """Give tombstones back that could not be published."""
        with self._guard:
            self._buried.insert(0, tombstones)

    def sealed(self, age_s: float) -> list[Sealed]:
        """Segments that are complete; the one that is written to is, when it is so old."""
        self.seal(age_s)
        with self._guard:
            if self._reserving:
                return []
            # Not before: a store that begins meanwhile would write to what counts as complete.
            current = self.current
            numbers = [
                number
                for number in self._committed
                if number != current and self._under_way[number] <= 0
            ]
            return [self._as_sealed(number) for number in sorted(numbers)]

    def _as_sealed(self, number: int) -> Sealed:
        return Sealed(
            self._namespace,
            self.writer,
            number,
            self._directory / segment_name(self._hex, number),
            np.concatenate(self._committed[number]),
        )

    def forget(self, number: int) -> None:
        """Say that a segment is in the bucket."""
        with self._guard:
            self._committed.pop(number, None)
            self._under_way.pop(number, None)

    def close(self) -> None:
        super().close()
        if self._on_close is not None:
            self._on_close(self)


class StagingTarget(FilesystemTarget):
    """The directory of staged segments.

    Parameters
    ----------
    opened, closed
        Called with its writers.
    fits
        Whether the bucket may take so many bytes more, those that are staged included.
    """

    def __init__(
        self,
        root: Path,
        *,
        opened: Callable[[StagedWriter], None],
        closed: Callable[[StagedWriter], None],
        fits: Callable[[int], bool],
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self._opened, self._closed, self._fits = opened, closed, fits

    def limit(self, capacity: int, reserve: int) -> None:
        """Use other limits from now on."""
        self._capacity, self._reserve = capacity, reserve

    def _allow(self, wanted: int) -> Outcome | None:
        fits = self._fits(self._used + wanted)
        if not fits and self._age() > _MEASURE_S:  # some of it is in the bucket by now
            self._measure()
            fits = self._fits(self._used + wanted)
        if not fits:
            return Outcome.FULL
        refusal = super()._allow(wanted)
        # What is staged waits for the bucket, which takes less than comes.
        return Outcome.BUSY if refusal is Outcome.FULL else refusal

    def _start_writer(self, directory: Path, namespace: Namespace) -> SegmentWriter:
        writer = self._make_writer(StagedWriter, directory, namespace, closed=self._closed)
        self._opened(writer)
        return writer


@dataclass(frozen=True)
class LeftBehind:
    """What a writer that is no more has staged.

    Attributes
    ----------
    namespace, writer
        32 and 16 bytes.
    sealed
        Its segments.
    tombstones
        What it has declared dead.
    problem
        What is lost of it and why, for people.
    """

    namespace: bytes
    writer: bytes
    sealed: tuple[Sealed, ...]
    tombstones: Entries
    problem: str = ""


def read_left_behind(directory: Path, writer: str, numbers: Sequence[int]) -> LeftBehind:
    """Read the journal of a dead writer.

    Parameters
    ----------
    directory
        Of the namespace.
    writer
        32 digits.
    numbers
        Its segments that are there.

    Returns
    -------
    LeftBehind
        What can be had of it. Segments without records are of no use to anybody: nothing says
        what is in them.

    Raises
    ------
    OSError
        If it cannot be read.
    NewerFormatError
        If a later release has written it.
    """
    path = directory / f"{writer}.journal"
    owner, namespace, problem = bytes.fromhex(writer), bytes(32), ""
    data = b""
    try:
        data = path.read_bytes()
        header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_JOURNAL, path.name)
        if header.writer != owner or header.namespace.hex()[:32] != directory.name:
            raise FormatError(f"{path.name}: the header names another journal")
        namespace = header.namespace
    except NewerFormatError:
        raise
    except FileNotFoundError:
        problem = f"staged segments of {writer} have no journal: nothing says what is in them"
    except FormatError as error:
        # Its entries carry checksums of their own.
        problem = f"{error}; what is intact of it is uploaded"
        with contextlib.suppress(OSError, FormatError):
            namespace = Namespace.from_json((directory / "namespace.json").read_bytes()).digest
    entries, _ = parse_entries(data[HEADER_BYTES:], owner, 0, namespace)
    records = entries[entries["kind"] == KIND_RECORD]
    sealed = []
    for number in numbers:
        file = directory / segment_name(writer, number)
        size = file.stat().st_size
        mine = records[records["segment"] == number]
        ends = mine["offset"].astype(np.int64) + mine["stored_length"]
        sealed.append(Sealed(namespace, owner, number, file, mine[ends <= size]))
    tombstones = entries[entries["kind"] == KIND_TOMBSTONE]
    return LeftBehind(namespace, owner, tuple(sealed), tombstones, problem)
