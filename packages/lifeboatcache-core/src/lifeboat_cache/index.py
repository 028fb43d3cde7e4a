"""The in-memory index of one namespace: key to record."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.journal import ENTRY, KIND_TOMBSTONE, Entries

__all__ = ["Index"]

#: Rows indexed in one go: well below a millisecond, so that a lookup never waits long.
_SLICE = 256

#: Segment and slot share 44 bits of a place code; the writer has the other 20.
_SLOT_BITS = 20
_SEGMENT_BITS = 24


class Index:
    """Which record answers for a key. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[bytes, int] = {}
        self._free: list[int] = []
        self._entries: Entries = np.zeros(1024, dtype=ENTRY)
        self._writer_of: npt.NDArray[np.uint32] = np.zeros(1024, dtype=np.uint32)
        self._used: npt.NDArray[np.uint32] = np.zeros(1024, dtype=np.uint32)
        self._next = 0
        self._writers: list[bytes] = []
        self._writer_numbers: dict[bytes, int] = {}
        # Other records of keys that are in _rows. One of them answers when the record
        # that answers now turns out to be dead: journals are read in any order.
        self._spares: dict[bytes, list[tuple[int, Any]]] = {}
        # Places declared dead by tombstones, which may be read before their records.
        self._buried: set[tuple[bytes, int, int]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a record."""
        rows = self._rows
        return [key in rows for key in keys]

    def get(self, keys: Sequence[bytes]) -> list[tuple[bytes, Any] | None]:
        """``(writer, entry)`` for each key, or ``None``; entries are copies."""
        out: list[tuple[bytes, Any] | None] = []
        with self._lock:
            for key in keys:
                row = self._rows.get(key)
                if row is None:
                    out.append(None)
                else:
                    writer = self._writers[int(self._writer_of[row])]
                    out.append((writer, self._entries[row].copy()))
        return out

    def insert(self, writer: bytes, entries: Entries) -> int:
        """Take in entries of one writer's journal, records and tombstones.

        The first record of a key answers for it, the others are kept in reserve.
        Returns how many keys are new.
        """
        added = 0
        for first in range(0, entries.shape[0], _SLICE):
            part = entries[first : first + _SLICE]
            keys = part["key"].tolist()
            kinds = part["kind"].tolist()
            segments = part["segment"].tolist()
            slots = part["slot"].tolist()
            with self._lock:
                number = self._writer_number(writer)
                for at, key in enumerate(keys):
                    if kinds[at] == KIND_TOMBSTONE:
                        dead = part["payload_checksum"][at].tobytes()
                        self._bury(key, (dead, segments[at], slots[at]))
                        continue
                    if self._buried and (writer, segments[at], slots[at]) in self._buried:
                        continue
                    row = self._rows.get(key)
                    if row is None:
                        self._answer(key, number, part[at])
                        added += 1
                    else:
                        self._keep(key, row, (number, part[at].copy()))
        return added

    def _keep(self, key: bytes, row: int, spare: tuple[int, Any]) -> None:
        """Keep a record in reserve, unless it is one that is known."""
        place = self._spare_place(spare)
        spares = self._spares.get(key, [])
        if self._place(row) != place and place not in map(self._spare_place, spares):
            self._spares[key] = [*spares, spare]

    def _answer(self, key: bytes, number: int, entry: Any) -> None:
        """Let a record answer for its key, which has none now."""
        row = self._take_row()
        self._entries[row] = entry
        self._writer_of[row] = number
        self._used[row] = entry["time"]
        self._rows[key] = row

    def _drop(self, key: bytes) -> None:
        """Forget the record that answers for ``key``; another one takes over if there is one."""
        self._free.append(self._rows.pop(key))
        spares = self._spares.get(key)
        if spares:
            self._answer(key, *spares.pop(0))
            if not spares:
                del self._spares[key]

    def _writer_number(self, writer: bytes) -> int:
        number = self._writer_numbers.get(writer)
        if number is None:
            number = len(self._writers)
            self._writers.append(writer)
            self._writer_numbers[writer] = number
        return number

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        row = self._next
        size = self._entries.shape[0]
        if row == size:
            for name in ("_entries", "_writer_of", "_used"):
                old = getattr(self, name)
                grown = np.zeros(2 * size, dtype=old.dtype)
                grown[:size] = old
                setattr(self, name, grown)
        self._next = row + 1
        return row

    def _bury(self, key: bytes, place: tuple[bytes, int, int]) -> None:
        self._buried.add(place)
        row = self._rows.get(key)
        if row is None:
            return
        if self._place(row) == place:
            self._drop(key)
        elif key in self._spares:
            spares = [spare for spare in self._spares[key] if self._spare_place(spare) != place]
            if spares:
                self._spares[key] = spares
            else:
                del self._spares[key]

    def _place(self, row: int) -> tuple[bytes, int, int]:
        return self._spare_place((int(self._writer_of[row]), self._entries[row]))

    def _spare_place(self, spare: tuple[int, Any]) -> tuple[bytes, int, int]:
        number, entry = spare
        return self._writers[number], int(entry["segment"]), int(entry["slot"])

    def remove(self, key: bytes, writer: bytes, segment: int, slot: int) -> bool:
        """Forget a record, unless the key meanwhile is answered by another one."""
        with self._lock:
            row = self._rows.get(key)
            if row is None or self._place(row) != (writer, segment, slot):
                return False
            self._drop(key)
            return True

    def take(self, key: bytes) -> list[tuple[bytes, Any]]:
        """Forget a key; returns ``(writer, entry)`` of all its records."""
        with self._lock:
            row = self._rows.pop(key, None)
            if row is None:
                return []
            records = [(int(self._writer_of[row]), self._entries[row].copy())]
            self._free.append(row)
            records += self._spares.pop(key, ())
            return [(self._writers[number], entry) for number, entry in records]

    def touch(self, keys: Sequence[bytes], now: int) -> list[tuple[bytes, int, int]]:
        """Set the time of last use (seconds); returns the places of the keys found."""
        places = []
        with self._lock:
            for key in keys:
                row = self._rows.get(key)
                if row is not None and int(self._used[row]) < now:
                    self._used[row] = now
                    places.append(self._place(row))
        return places

    def last_used(self, key: bytes) -> int | None:
        """When a block was last used (seconds), ``None`` if it is not there."""
        with self._lock:
            row = self._rows.get(key)
            return None if row is None else int(self._used[row])

    def apply_accesses(self, pages: Iterator[Entries]) -> None:
        """Take in access logs read at recovery (``ACCESS`` arrays)."""
        with self._lock:
            rows = np.fromiter(self._rows.values(), dtype=np.int64, count=len(self._rows))
            codes = self._codes(
                self._writer_of[rows], self._entries["segment"][rows], self._entries["slot"][rows]
            )
            order = np.argsort(codes)
            codes, rows = codes[order], rows[order]
            numbers = dict(self._writer_numbers)
        if not rows.shape[0]:
            return
        for page in pages:
            writers = np.array(
                [numbers.get(writer, -1) for writer in page["writer"].tolist()], dtype=np.int64
            )
            known = page[writers >= 0]
            wanted = self._codes(writers[writers >= 0], known["segment"], known["slot"])
            at = np.minimum(np.searchsorted(codes, wanted), codes.shape[0] - 1)
            found = codes[at] == wanted
            with self._lock:
                np.maximum.at(self._used, rows[at[found]], known["time"][found])

    @staticmethod
    def _codes(
        writers: npt.NDArray[Any], segments: npt.NDArray[Any], slots: npt.NDArray[Any]
    ) -> npt.NDArray[np.uint64]:
        """One integer per place; places too large to fit collide harmlessly (recency only)."""
        code = writers.astype(np.uint64) << np.uint64(_SLOT_BITS + _SEGMENT_BITS)
        code |= segments.astype(np.uint64) << np.uint64(_SLOT_BITS)
        return code | slots.astype(np.uint64)

    def keys(self, group: int | None = None) -> list[bytes]:
        """All keys now, or those whose record is of one group."""
        with self._lock:
            if group is None:
                return list(self._rows)
            groups = self._entries["group"]
            return [key for key, row in self._rows.items() if groups[row] == group]
