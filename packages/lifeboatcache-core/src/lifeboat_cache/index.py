"""The in-memory index of one namespace: key to record."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.index_answers import Gathered, Keys, Touched, Words, as_keys, words_of
from lifeboat_cache.index_loops import PlainLoops, loops
from lifeboat_cache.index_rows import Gate, Rows, Small
from lifeboat_cache.kernels import index_probe as probe

__all__ = ["Gathered", "Index", "Keys", "Touched", "as_keys"]

#: Entries taken in, or records dropped, before others may look something up: well below
#: a millisecond of work, with kernels and without.
_SLICE = 512
_PLAIN_SLICE = 64
#: The same for rows that are only looked at.
_SCAN = 1 << 14
_PLAIN_SCAN = 1 << 10

#: So few keys are looked up, or entries taken in, without letting go of the interpreter:
#: to win it back takes longer.
_BRIEF = 512

#: A table is replaced when this share of its cells is not empty …
_FULL = 0.8
#: … by one that is as large if at most this share is in use.
_SPARSE = 0.55
_LEAST_CELLS = 1024
#: Cells of an old table that are moved with each entry taken in. The new table must not
#: be full before that is done, see _FULL and _SPARSE.
_MOVED = 4
_LEAST_MOVED = 256

#: Rows are added by this part of what there is.
_GROWTH = 16

#: Slots below this have their row noted in an array, others, which nobody writes, singly.
_DENSE_SLOTS = 1 << 22

_NO_WORDS: Words = np.zeros(0, dtype=np.int64)


class Index:
    """Which record answers for a key. Safe to use from several threads.

    Records are 128 bytes in an array (their journal entry, less its checksum), found
    through an open-addressing table of 8-byte cells; a second array per segment knows
    the row of each slot. All together, room to grow included, that is less than 200
    bytes a block (:attr:`nbytes`), for blocks in segments of common size.

    The first record of a key that is inserted answers for it, others are kept in
    reserve, and one of them answers when the first is dropped: journals are read in any
    order. A tombstone may be inserted before the record that it declares dead; its place
    is remembered until :meth:`settled` was called twice.
    """

    def __init__(self) -> None:
        self._gate = Gate()
        # Held while a slice of entries is prepared and taken in; taken before the gate.
        self._inserting = threading.Lock()
        self._rows = Rows()
        self._table: Words = np.zeros(_LEAST_CELLS, dtype=np.int64)
        self._old = _NO_WORDS
        self._moved = 0  # cells of the old table
        self._state: Words = np.zeros(probe.STATE_WORDS, dtype=np.int64)
        self._buried = _no_places()
        self._buried_before = _no_places()
        self._writers: list[bytes] = []
        self._writer_numbers: dict[bytes, int] = {}
        # Row plus 1 by slot, of each writer's segments. What was dropped may still be
        # named: who uses it looks at the row.
        self._segments: dict[int, dict[int, npt.NDArray[np.int32]]] = {}
        self._strays: dict[tuple[int, int, int], int] = {}

    def __len__(self) -> int:
        return int(self._state[probe.LIVE])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unused room included."""
        with self._gate:
            slots = sum(array.nbytes for each in self._segments.values() for array in each.values())
            tables = self._table.nbytes + self._old.nbytes
            places = self._buried.nbytes + self._buried_before.nbytes
            return self._rows.nbytes + tables + places + slots

    # Writers ------------------------------------------------------------------

    def writer_id(self, number: int) -> bytes:
        """The 16 bytes of the writer with a number."""
        return self._writers[number]

    def writer_number(self, writer: bytes) -> int | None:
        """The number of a writer, ``None`` if nothing of it was ever here."""
        return self._writer_numbers.get(writer)

    def _number(self, writer: bytes) -> int:
        """The writer's number; under ``_inserting``."""
        number = self._writer_numbers.get(writer)
        if number is None:
            number = len(self._writers)
            self._writers.append(writer)
            self._writer_numbers[writer] = number
        return number

    # Looking up ---------------------------------------------------------------

    as_keys = staticmethod(as_keys)

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """int64 ``(n,)``: a number that is not negative for each key that is there, else -1."""
        words = words_of(keys)
        found: Words = np.empty(words.shape[0] // 4, dtype=np.int64)
        run = loops()
        find = run.find_brief if found.shape[0] <= _BRIEF else run.find
        with self._gate:
            find(words, self._table, self._old, self._rows.words, found)
        return found

    def contains(self, keys: Keys) -> list[bool]:
        """Whether each key has a record."""
        there: list[bool] = (self.find(keys) >= 0).tolist()
        return there

    def _copies(self, words: Words) -> tuple[Words, Entries]:
        """Rows of keys, and copies of them as entries."""
        found: Words = np.empty(words.shape[0] // 4, dtype=np.int64)
        copies: Words = np.zeros(16 * found.shape[0], dtype=np.int64)
        run = loops()
        gather = run.gather_brief if found.shape[0] <= _BRIEF else run.gather
        with self._gate:
            gather(words, self._table, self._old, self._rows.words, found, copies)
        return found, copies.view(ENTRY)

    def gather(self, keys: Keys) -> Gathered:
        """The records that answer for keys now, in one go."""
        found, entries = self._copies(words_of(keys))

        def column(name: str) -> Any:
            return np.ascontiguousarray(entries[name])

        checksums = np.ascontiguousarray(entries["payload_checksum"]).view(np.uint8)
        return Gathered(
            found=found >= 0,
            writer=_writers_in(entries),
            entries=entries,
            segment=column("segment"),
            slot=column("slot"),
            offset=column("offset"),
            stored_length=column("stored_length"),
            raw_length=column("raw_length"),
            layout=column("layout"),
            codec=column("codec"),
            algorithm=column("algorithm"),
            payload_checksum=checksums.reshape(-1, 16),
        )

    def get(self, keys: Keys) -> list[tuple[bytes, Any] | None]:
        """``(writer, entry)`` for each key, or ``None``; entries are copies."""
        found, entries = self._copies(words_of(keys))
        writers = _writers_in(entries).tolist()
        return [
            (self._writers[writers[number]], entries[number]) if row >= 0 else None
            for number, row in enumerate(found.tolist())
        ]

    def keys(self, group: int | None = None) -> list[bytes]:
        """All keys now, or those whose record is of one group."""
        run = loops()
        step = _scan(run)
        chosen: Words = np.empty(step, dtype=np.int64)
        keys: list[bytes] = []
        first = 0
        while first < self._state[probe.FRESH]:
            with self._gate:
                stop = min(first + step, int(self._state[probe.FRESH]))
                wanted = -1 if group is None else group
                count = run.select(first, stop, wanted, self._rows.small, chosen)
                keys += self._rows.words.view(ENTRY)["key"][chosen[:count]].tolist()
            first = stop
            self._gate.give_way()
        # What is dropped and stored anew in the meantime may be met twice.
        return keys if first <= step else list(dict.fromkeys(keys))

    def rows(self, step: int) -> Iterator[tuple[npt.NDArray[np.uint32], Entries]]:
        """All records, those in reserve too, as far as they are not dropped meanwhile.

        Parameters
        ----------
        step
            So many are looked at before others may change something.

        Yields
        ------
        numbers, entries
            uint32 ``(n,)``, the records' writers by number, and ``ENTRY`` ``(n,)``.
        """
        first = 0
        while first < self._state[probe.FRESH]:
            with self._gate:
                stop = min(first + step, int(self._state[probe.FRESH]))
                entries = self._rows.words[16 * first : 16 * stop].copy().view(ENTRY)
            first = stop
            entries = entries[entries["kind"] != 0]
            numbers = _writers_in(entries)
            # In a row the kind says whether it answers.
            entries["kind"] = KIND_RECORD
            entries["checksum"] = np.void(bytes(8))
            yield numbers, entries
            self._gate.give_way()

    def segments_of(self, keys: Keys) -> set[tuple[int, int]]:
        """Writer number and segment of the records that answer for keys."""
        found, entries = self._copies(words_of(keys))
        there = found >= 0
        writers, segments = _writers_in(entries)[there], entries["segment"][there]
        return set(zip(writers.tolist(), segments.tolist(), strict=True))

    def last_used(self, key: bytes) -> int | None:
        """When a block was last used (seconds), ``None`` if it is not there."""
        found, entries = self._copies(words_of([key]))
        return int(entries.view(np.uint32)[31]) if found[0] >= 0 else None

    # Taking in ----------------------------------------------------------------

    def insert(self, writer: bytes, entries: Entries) -> int:
        """Take in entries of one writer's journal, records and tombstones.

        Other threads can look up keys in between. Returns how many keys are new.
        """
        added = 0
        first = 0
        while first < entries.shape[0]:
            run = loops()
            step = _slice(run)
            take = run.insert_brief if entries.shape[0] <= _BRIEF else run.insert
            # A copy: contiguous, aligned and writable, as loops want it.
            part = np.array(entries[first : first + step], dtype=ENTRY, order="C")
            with self._inserting:
                added += self._insert(run, take, writer, part)
            first += step
            self._gate.give_way()
        return added

    def _insert(self, run: Any, take: Any, writer: bytes, part: Entries) -> int:
        count = part.shape[0]
        number = self._number(writer)
        owners: Words = np.zeros(count, dtype=np.int64)
        dead = np.flatnonzero(part["kind"] == KIND_TOMBSTONE)
        if dead.shape[0]:
            owners[dead] = [self._number(w) for w in part["payload_checksum"][dead].tolist()]
            self._room_for_places(run, dead.shape[0])
        placed: Words = np.empty(count, dtype=np.int64)
        with self._gate:
            before = len(self)
            self._room(run, count)
            take(
                part.view(np.int64),
                part.view(np.uint32),
                number,
                owners,
                self._table,
                self._old,
                self._rows.words,
                self._rows.small,
                self._rows.links,
                self._state,
                self._buried,
                self._buried_before,
                placed,
            )
            self._note(number, part, placed)
            return max(0, len(self) - before) if dead.shape[0] else len(self) - before

    def _room(self, run: Any, count: int) -> None:
        """Make room for so many entries; under the gate."""
        rows = self._rows
        wanted = int(self._state[probe.FRESH]) + count
        if wanted > rows.capacity:
            rows.grow(max(wanted, rows.capacity + rows.capacity // _GROWTH))
        if self._state[probe.OCCUPIED] + count > _FULL * self._table.shape[0]:
            self._migrate(run, self._old.shape[0])
            size = self._table.shape[0]
            while len(self) + count > _SPARSE * size:
                size *= 2
            # Zeros cost nothing until they are touched.
            self._old, self._table = self._table, np.zeros(size, dtype=np.int64)
            self._moved = 0
            self._state[probe.OCCUPIED] = 0
        if self._old.shape[0]:
            self._migrate(run, max(_MOVED * count, _LEAST_MOVED))

    def _migrate(self, run: Any, count: int) -> None:
        """Move cells of the old table to the new one; under the gate."""
        stop = min(self._moved + count, self._old.shape[0])
        run.migrate(self._old, self._moved, stop, self._table, self._state)
        self._moved = stop
        if stop == self._old.shape[0]:
            self._old = _NO_WORDS
            self._moved = 0

    def _note(self, number: int, part: Entries, placed: Words) -> None:
        """Note the rows of slots; under the gate."""
        new = placed >= 0
        if not new.all():
            part, placed = part[new], placed[new]
        if not placed.shape[0]:
            return
        segments = part["segment"]
        slots = part["slot"].astype(np.int64)
        known = self._segments.setdefault(number, {})
        for segment in dict.fromkeys(segments.tolist()):
            mine = segments == segment
            if mine.all():
                at, rows = slots, placed
            else:
                at, rows = slots[mine], placed[mine]
            top = int(at.max())
            if top >= _DENSE_SLOTS:
                far = at >= _DENSE_SLOTS
                for slot, row in zip(at[far].tolist(), rows[far].tolist(), strict=True):
                    self._strays[number, segment, slot] = row + 1
                at, rows = at[~far], rows[~far]
                if not at.shape[0]:
                    continue
                top = int(at.max())
            array = known.get(segment)
            size = 0 if array is None else array.shape[0]
            if top >= size:
                longer = np.zeros(max(top + 1, size + size // 8), dtype=np.int32)
                if array is not None:
                    longer[:size] = array
                known[segment] = array = longer
            if array is not None:
                array[at] = rows + 1

    def _room_for_places(self, run: Any, count: int) -> None:
        """Make room for places declared dead; under ``_inserting``, not under the gate."""
        wanted = 2 * (int(self._state[probe.BURIED]) + count)
        size = self._buried.shape[0] // 3
        if wanted > size:
            while wanted > size:
                size *= 2
            larger: Small = np.zeros(3 * size, dtype=np.uint32)
            run.bury_all(self._buried, larger)
            self._buried = larger

    def settled(self) -> None:
        """Say that all journals have been read to their ends.

        A record is journaled before anybody can declare it dead. So the place of a
        tombstone that was inserted before the journals were read once more from one
        end to the other is forgotten.
        """
        run = loops()
        step = _scan(run)
        while self._old.shape[0]:
            with self._gate:
                self._migrate(run, step)
            self._gate.give_way()
        with self._inserting:
            if self._state[probe.BURIED] or self._buried_before.any():
                self._buried_before, self._buried = self._buried, _no_places()
                self._state[probe.BURIED] = 0

    # Dropping -----------------------------------------------------------------

    def _drop(
        self,
        run: Any,
        words: Words,
        writers: Small,
        segments: Small,
        slots: Small,
        *,
        anywhere: bool,
    ) -> npt.NDArray[np.bool_]:
        """Drop records by key and place; under the gate."""
        dropped: Words = np.empty(words.shape[0] // 4, dtype=np.int64)
        run.drop(
            words,
            writers,
            segments,
            slots,
            int(anywhere),
            self._table,
            self._old,
            self._rows.words,
            self._rows.small,
            self._rows.links,
            self._state,
            dropped,
        )
        return dropped >= 0

    def remove(self, key: bytes, writer: bytes, segment: int, slot: int) -> bool:
        """Forget a record, unless the key meanwhile is answered by another one."""
        number = self._writer_numbers.get(writer)
        if number is None:
            return False
        return bool(self.remove_many([key], [number], [segment], [slot])[0])

    def remove_many(
        self, keys: Keys, writers: npt.ArrayLike, segments: npt.ArrayLike, slots: npt.ArrayLike
    ) -> npt.NDArray[np.bool_]:
        """Forget records, unless their keys meanwhile are answered by others.

        Parameters
        ----------
        keys, writers, segments, slots
            Of ``n`` records; writers by number.

        Returns
        -------
        bool ``(n,)``
            Which were forgotten. If there are others of the key, one of them answers now.
        """
        words = words_of(keys)
        places = [np.ascontiguousarray(a, dtype=np.uint32) for a in (writers, segments, slots)]
        count = words.shape[0] // 4
        done = np.zeros(count, dtype=np.bool_)
        run = loops()
        step = _slice(run)
        for first in range(0, count, step):
            part = slice(first, first + step)
            own = words[4 * first : 4 * (first + step)]
            with self._gate:
                done[part] = self._drop(run, own, *(p[part] for p in places), anywhere=False)
            self._gate.give_way()
        return done

    def take(self, key: bytes) -> list[tuple[bytes, Any]]:
        """Forget a key; returns ``(writer, entry)`` of all its records."""
        _, numbers, entries = self.take_many([key])
        return [
            (self._writers[number], entry)
            for number, entry in zip(numbers.tolist(), entries, strict=True)
        ]

    def take_many(
        self, keys: Keys
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32], Entries]:
        """Forget keys and all their records.

        Returns
        -------
        done
            bool ``(n,)``: which keys were there. A key that is named twice was there once.
        writers
            uint32 ``(m,)``: numbers of the writers of all records that were forgotten.
        entries
            ``ENTRY`` ``(m,)``: those records.
        """
        words = words_of(keys)
        count = words.shape[0] // 4
        done = np.zeros(count, dtype=np.bool_)
        taken: list[Entries] = []
        run = loops()
        step = _slice(run)
        for first in range(0, count, step):
            numbers = np.arange(first, min(first + step, count))
            with self._gate:
                while True:
                    own = words.reshape(-1, 4)[numbers].reshape(-1)
                    found: Words = np.empty(numbers.shape[0], dtype=np.int64)
                    copies: Words = np.zeros(16 * found.shape[0], dtype=np.int64)
                    run.gather(own, self._table, self._old, self._rows.words, found, copies)
                    there = found >= 0
                    if not there.any():
                        break
                    numbers = numbers[there]
                    records: Entries = copies.view(ENTRY)[there]
                    dropped = self._drop(
                        run,
                        words.reshape(-1, 4)[numbers].reshape(-1),
                        _writers_in(records),
                        np.ascontiguousarray(records["segment"]),
                        np.ascontiguousarray(records["slot"]),
                        anywhere=False,
                    )
                    numbers = numbers[dropped]
                    done[numbers] = True
                    taken.append(records[dropped])
            self._gate.give_way()
        entries: Entries = np.concatenate([np.zeros(0, dtype=ENTRY), *taken])
        return done, _writers_in(entries), entries

    def drop_dead(self, writer: bytes, segment: int, dead: npt.NDArray[np.bool_]) -> int:
        """Forget the records of a segment whose slots are marked dead.

        Parameters
        ----------
        writer, segment
            Of which segment.
        dead
            bool ``(slots,)``; slots beyond its end are alive.

        Returns
        -------
        int
            How many records were forgotten. Others of their keys answer now.
        """
        number = self._writer_numbers.get(writer)
        if number is None:
            return 0
        array = self._segments.get(number, {}).get(segment)
        dropped = 0
        if array is not None:
            shorter = min(dead.shape[0], array.shape[0])
            slots = np.flatnonzero(dead[:shorter] & (array[:shorter] > 0))
            dropped = self._drop_slots(number, segment, slots, array)
        for place in self._strays_of(number, segment):
            if place[2] < dead.shape[0] and dead[place[2]]:
                dropped += self._drop_stray(place)
        return dropped

    def drop_segment(self, writer: bytes, segment: int) -> int:
        """Forget all records of a segment; returns how many."""
        number = self._writer_numbers.get(writer)
        if number is None:
            return 0
        dropped = 0
        array = self._segments.get(number, {}).get(segment)
        if array is not None:
            dropped = self._drop_slots(number, segment, np.flatnonzero(array), array)
            with self._gate:
                if self._segments[number].get(segment) is array and not array.any():
                    del self._segments[number][segment]
        return dropped + sum(map(self._drop_stray, self._strays_of(number, segment)))

    def drop_writer(self, writer: bytes) -> int:
        """Forget all records of a writer; returns how many."""
        number = self._writer_numbers.get(writer)
        if number is None:
            return 0
        with self._gate:
            segments = {segment for other, segment, _ in self._strays if other == number}
            segments.update(self._segments.get(number, ()))
        return sum(self.drop_segment(writer, segment) for segment in sorted(segments))

    def _drop_slots(
        self,
        number: int,
        segment: int,
        slots: npt.NDArray[np.int64],
        array: npt.NDArray[np.int32],
    ) -> int:
        run = loops()
        step = _slice(run)
        dropped = 0
        for first in range(0, slots.shape[0], step):
            part = slots[first : first + step]
            with self._gate:
                rows = array[part].astype(np.int64) - 1
                part, rows = part[rows >= 0], rows[rows >= 0]
                words = self._rows.words.reshape(-1, 16)[rows, :4].reshape(-1)
                count = part.shape[0]
                done = self._drop(
                    run,
                    words,
                    np.full(count, number, dtype=np.uint32),
                    np.full(count, segment, dtype=np.uint32),
                    part.astype(np.uint32),
                    anywhere=True,
                )
                array[part] = 0
            dropped += int(done.sum())
            self._gate.give_way()
        return dropped

    def _strays_of(self, number: int, segment: int) -> list[tuple[int, int, int]]:
        if not self._strays:
            return []
        with self._gate:
            return [place for place in self._strays if place[:2] == (number, segment)]

    def _drop_stray(self, place: tuple[int, int, int]) -> int:
        run = loops()
        with self._gate:
            row = self._strays.pop(place, 0) - 1
            if row < 0:
                return 0
            words = self._rows.words[16 * row : 16 * row + 4].copy()
            writers, segments, slots = (np.array([part], dtype=np.uint32) for part in place)
            return int(self._drop(run, words, writers, segments, slots, anywhere=True).sum())

    # Recency ------------------------------------------------------------------

    def touch_places(self, keys: Keys, now: int) -> Touched:
        """Set the time of last use (seconds); returns the records whose time it advanced."""
        words = words_of(keys)
        places: Small = np.empty(3 * (words.shape[0] // 4), dtype=np.uint32)
        run = loops()
        with self._gate:
            count = run.touch(
                words,
                now,
                self._table,
                self._old,
                self._rows.words,
                self._rows.small,
                places,
            )
        writers, segments, slots = places[: 3 * count].reshape(-1, 3).T
        return Touched(writers, segments, slots)

    def touch(self, keys: Keys, now: int) -> list[tuple[bytes, int, int]]:
        """As :meth:`touch_places`; returns ``(writer, segment, slot)`` of each."""
        places = self.touch_places(keys, now)
        return [
            (self._writers[number], segment, slot)
            for number, segment, slot in zip(*(part.tolist() for part in places), strict=True)
        ]

    def apply_accesses(self, pages: Iterator[Entries]) -> None:
        """Take in access logs read at recovery (``ACCESS`` arrays)."""
        for page in pages:
            for first in range(0, page.shape[0], _SCAN):
                self._apply(page[first : first + _SCAN])

    def _apply(self, page: Entries) -> None:
        # Writers are random: half of the 16 bytes tells them apart well enough for recency.
        halves = np.ascontiguousarray(page["writer"]).view(np.uint64)[::2]
        _, examples, which = np.unique(halves, return_index=True, return_inverse=True)
        known = [self._writer_numbers.get(w, -1) for w in page["writer"][examples].tolist()]
        numbers = np.array(known, dtype=np.int64)[which]
        segments = page["segment"].astype(np.int64)
        mine = np.flatnonzero((numbers >= 0) & (page["slot"] < _DENSE_SLOTS))
        # One run after the other of places in the same segment.
        mine = mine[np.lexsort((segments[mine], numbers[mine]))]
        if not mine.shape[0]:
            return
        numbers, segments = numbers[mine], segments[mine]
        slots = page["slot"][mine].astype(np.int64)
        rows: Words = np.full(mine.shape[0], -1, dtype=np.int64)
        changes = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(segments) != 0)) + 1
        for start, stop in pairwise([0, *changes.tolist(), mine.shape[0]]):
            array = self._segments.get(int(numbers[start]), {}).get(int(segments[start]))
            if array is not None:
                at = slots[start:stop]
                inside = at < array.shape[0]
                rows[start:stop][inside] = array[at[inside]].astype(np.int64) - 1
        there = rows >= 0
        run = loops()
        step = _slice(run)
        columns: list[npt.NDArray[Any]] = [
            rows[there],
            *(part[there].astype(np.uint32) for part in (numbers, segments, slots)),
            page["time"][mine[there]].astype(np.uint32),
        ]
        for first in range(0, columns[0].shape[0], step):
            parts = [np.ascontiguousarray(part[first : first + step]) for part in columns]
            with self._gate:
                run.raise_used(*parts, self._rows.small)
            self._gate.give_way()


def _slice(run: Any) -> int:
    return _PLAIN_SLICE if run is PlainLoops else _SLICE


def _scan(run: Any) -> int:
    return _PLAIN_SCAN if run is PlainLoops else _SCAN


def _no_places() -> Small:
    return np.zeros(6, dtype=np.uint32)


def _writers_in(entries: Entries) -> npt.NDArray[np.uint32]:
    """Writer numbers in copies of rows, where entries have half of their checksum."""
    numbers: npt.NDArray[np.uint32] = np.ascontiguousarray(
        entries.view(np.uint32).reshape(-1, 32)[:, 30]
    )
    return numbers
