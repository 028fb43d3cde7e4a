"""The index against a model of it in dictionaries, through any sequence of operations."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lifeboat_cache import index as module
from lifeboat_cache import index_rows, kernels
from lifeboat_cache.format.access import ACCESS
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.index import Index

KEYS = 40
WRITERS = [os.urandom(16) for _ in range(3)]
SEGMENTS = (0, 1, 2**32 - 1)
#: The last ones are beyond _DENSE_SLOTS, as set below.
SLOTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 2**32 - 1)
DENSE_SLOTS = 6

Place = tuple[int, int, int]


@dataclass(eq=False)
class Record:
    place: Place
    group: int
    time: int
    used: int
    mark: int


def key(number: int) -> bytes:
    """Few beginnings, so that cells collide; some as large as they get."""
    word = (0, 1, 2**64 - 1)[number % 3]
    return word.to_bytes(8, "little") + number.to_bytes(8, "little") + bytes(16)


def key_of(place: Place) -> int:
    """A place is of one key, a key has several places."""
    writer, segment, slot = place
    return (7 * writer + 3 * (segment % 11) + slot) % KEYS


places = st.tuples(st.integers(0, 2), st.sampled_from(SEGMENTS), st.sampled_from(SLOTS))
numbers = st.lists(st.integers(0, KEYS + 2), max_size=12)
times = st.sampled_from([0, 5, 50, 51, 52, 2**31, 2**32 - 1])


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        # Small, so that every table and array grows and is replaced all the time.
        for name, value in (
            ("_SLICE", 5),
            ("_PLAIN_SLICE", 3),
            ("_SCAN", 4),
            ("_PLAIN_SCAN", 4),
            ("_LEAST_CELLS", 4),
            # Slowly: most operations meet two tables.
            ("_LEAST_MOVED", 1),
            ("_MOVED", 2),
            ("_SPARSE", 0.3),
            ("_DENSE_SLOTS", DENSE_SLOTS),
        ):
            self.patch.setattr(module, name, value)
        self.patch.setattr(index_rows, "_LEAST_ROWS", 4)
        self.compiled = kernels.ready()
        self.index = Index()
        self.records: dict[int, list[Record]] = {}
        self.buried: set[Place] = set()
        self.buried_before: set[Place] = set()
        self.mark = 0

    def teardown(self) -> None:
        self.patch.undo()

    # The model ------------------------------------------------------------------

    def drop(self, number: int, place: Place, *, anywhere: bool) -> bool:
        known = self.records.get(number, [])
        for at, record in enumerate(known if anywhere else known[:1]):
            if record.place == place:
                del known[at]
                if not known:
                    del self.records[number]
                return True
        return False

    def find(self, place: Place) -> Record | None:
        for record in self.records.get(key_of(place), ()):
            if record.place == place:
                return record
        return None

    # Operations -------------------------------------------------------------------

    @rule()
    def kernels_come_or_go(self) -> None:
        self.patch.setattr(kernels, "_ready", self.compiled and not kernels.ready())

    @rule(
        writer=st.integers(0, 2),
        lines=st.lists(
            st.tuples(
                st.sampled_from([KIND_RECORD, KIND_RECORD, KIND_RECORD, KIND_TOMBSTONE]),
                places,
                st.integers(0, 1),
                times,
            ),
            max_size=14,
        ),
        frozen=st.booleans(),
    )
    def inserts(self, writer: int, lines: list[tuple[int, Place, int, int]], frozen: bool) -> None:
        entries = np.zeros(len(lines), dtype=ENTRY)
        before = len(self.records)
        dead = any(kind == KIND_TOMBSTONE for kind, *_ in lines)
        for at, (kind, drawn, group, time) in enumerate(lines):
            place = (writer, *drawn[1:]) if kind == KIND_RECORD else drawn
            number = key_of(place)
            self.mark += 1
            entries["kind"][at] = kind
            entries["key"][at] = np.void(key(number))
            entries["segment"][at], entries["slot"][at] = place[1:]
            entries["group"][at], entries["time"][at] = group, time
            entries["parent"][at] = self.mark
            entries["checksum"][at] = np.void(b"\xff" * 8)
            if kind == KIND_TOMBSTONE:
                entries["payload_checksum"][at] = np.void(WRITERS[place[0]])
                self.buried.add(place)
                self.drop(number, place, anywhere=True)
            elif place not in self.buried | self.buried_before and self.find(place) is None:
                record = Record(place, group, time, time, self.mark)
                self.records.setdefault(number, []).append(record)
        entries.flags.writeable = not frozen
        added = self.index.insert(WRITERS[writer], entries)
        if not dead:
            assert added == len(self.records) - before

    @rule(wanted=numbers, now=times, array=st.booleans())
    def touches(self, wanted: list[int], now: int, array: bool) -> None:
        expected = []
        for number in wanted:
            for record in self.records.get(number, ())[:1]:
                if record.used < now:
                    record.used = now
                    writer, segment, slot = record.place
                    expected.append((WRITERS[writer], segment, slot))
        keys = [key(number) for number in wanted]
        if array:
            writers, segments, slots = self.index.touch_places(self.index.as_keys(keys), now)
            found = [
                (self.index.writer_id(w), s, t)
                for w, s, t in zip(writers.tolist(), segments.tolist(), slots.tolist(), strict=True)
            ]
        else:
            found = self.index.touch(keys, now)
        assert found == expected

    @rule(lines=st.lists(st.tuples(places, times), max_size=8))
    def reads_access_logs(self, lines: list[tuple[Place, int]]) -> None:
        page = np.zeros(len(lines), dtype=ACCESS)
        for at, ((writer, segment, slot), time) in enumerate(lines):
            page["writer"][at] = np.void(WRITERS[writer])
            page["segment"][at], page["slot"][at], page["time"][at] = segment, slot, time
            record = self.find((writer, segment, slot))
            if record is not None and slot < DENSE_SLOTS:
                record.used = max(record.used, time)
        self.index.apply_accesses(iter([page[:3], page[3:]]))

    @rule(place=places)
    def removes_one(self, place: Place) -> None:
        number = key_of(place)
        expected = self.drop(number, place, anywhere=False)
        writer, segment, slot = place
        assert self.index.remove(key(number), WRITERS[writer], segment, slot) == expected

    @rule(wanted=st.lists(places, max_size=8))
    def removes_many(self, wanted: list[Place]) -> None:
        known = []
        owners = []
        for place in wanted:
            owner = self.index.writer_number(WRITERS[place[0]])
            if owner is not None:
                known.append(place)
                owners.append(owner)
        done = self.index.remove_many(
            [key(key_of(place)) for place in known],
            owners,
            [place[1] for place in known],
            [place[2] for place in known],
        )
        assert done.tolist() == [self.drop(key_of(p), p, anywhere=False) for p in known]

    @rule(wanted=numbers)
    def takes(self, wanted: list[int]) -> None:
        expected = [self.records.pop(number, []) for number in wanted]
        done, writers, entries = self.index.take_many([key(number) for number in wanted])
        assert done.tolist() == [bool(records) for records in expected]
        taken = zip(writers.tolist(), entries, strict=True)
        assert sorted(int(entry["parent"]) for _, entry in taken) == sorted(
            record.mark for records in expected for record in records
        )
        for number, entry in zip(writers.tolist(), entries, strict=True):
            assert WRITERS.index(self.index.writer_id(number)) in range(3)
            assert entry["kind"] in (1, 2)

    @rule(number=st.integers(0, KEYS + 2))
    def takes_one(self, number: int) -> None:
        expected = self.records.pop(number, [])
        taken = self.index.take(key(number))
        assert [(w, int(e["segment"]), int(e["slot"]), int(e["parent"])) for w, e in taken] == [
            (WRITERS[r.place[0]], *r.place[1:], r.mark) for r in expected
        ]

    @rule(writer=st.integers(0, 2), segment=st.sampled_from(SEGMENTS), data=st.data())
    def a_janitor_marks_slots(self, writer: int, segment: int, data: Any) -> None:
        dead = np.array(data.draw(st.lists(st.booleans(), max_size=10)), dtype=np.bool_)
        self.expect_dropped(
            lambda p: p[:2] == (writer, segment) and p[2] < len(dead) and bool(dead[p[2]]),
            lambda: self.index.drop_dead(WRITERS[writer], segment, dead),
        )

    @rule(writer=st.integers(0, 2), segment=st.sampled_from(SEGMENTS))
    def a_segment_vanishes(self, writer: int, segment: int) -> None:
        self.expect_dropped(
            lambda p: p[:2] == (writer, segment),
            lambda: self.index.drop_segment(WRITERS[writer], segment),
        )

    @rule(writer=st.integers(0, 2))
    def a_writer_vanishes(self, writer: int) -> None:
        self.expect_dropped(
            lambda p: p[0] == writer, lambda: self.index.drop_writer(WRITERS[writer])
        )

    def expect_dropped(self, doomed: Any, call: Any) -> None:
        count = 0
        for number, records in list(self.records.items()):
            for record in list(records):
                if doomed(record.place):
                    count += self.drop(number, record.place, anywhere=True)
        assert call() == count

    @rule()
    def journals_are_read_to_their_ends(self) -> None:
        self.buried_before, self.buried = self.buried, set()
        self.index.settled()

    # What always holds ------------------------------------------------------------

    @invariant()
    def answers_agree(self) -> None:
        asked = range(KEYS + 2)
        keys = [key(number) for number in asked]
        heads: list[Record | None] = [
            self.records[number][0] if number in self.records else None for number in asked
        ]
        there = [record is not None for record in heads]
        assert len(self.index) == len(self.records)
        assert (self.index.find(keys) >= 0).tolist() == there
        assert self.index.contains(self.index.as_keys(keys)) == there
        assert sorted(self.index.keys()) == sorted(key(number) for number in self.records)
        assert sorted(self.index.keys(1)) == sorted(
            key(number) for number, records in self.records.items() if records[0].group == 1
        )
        got = self.index.get(keys)
        gathered = self.index.gather(keys)
        assert gathered.found.tolist() == there
        for number, record in enumerate(heads):
            item = got[number]
            if record is None:
                assert item is None
                assert gathered.segment[number] == gathered.slot[number] == 0
                assert self.index.last_used(keys[number]) is None
                continue
            assert item is not None
            writer, entry = item
            place = (WRITERS.index(writer), int(entry["segment"]), int(entry["slot"]))
            assert place == record.place
            assert entry["key"].tobytes() == keys[number]
            assert (entry["kind"], entry["parent"]) == (KIND_RECORD, record.mark)
            assert (entry["time"], entry["group"]) == (record.time, record.group)
            assert self.index.last_used(keys[number]) == record.used
            assert self.index.writer_id(int(gathered.writer[number])) == writer
            assert (gathered.segment[number], gathered.slot[number]) == place[1:]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40)


class LongerMachine(IndexMachine):
    """The same, for longer."""


TestIndexLonger = pytest.mark.full(LongerMachine.TestCase)
TestIndexLonger.settings = settings(max_examples=2000, stateful_step_count=80, derandomize=False)


def random_records(rng: np.random.Generator, count: int, segment: int) -> Entries:
    entries = np.zeros(count, dtype=ENTRY)
    entries["kind"] = KIND_RECORD
    entries["key"] = np.frombuffer(rng.bytes(32 * count), dtype="V32")
    entries["segment"], entries["slot"] = segment, np.arange(count)
    return entries


#: What a block may cost, in bytes.
LIMIT = 200


def test_memory_of_a_block_while_the_index_grows() -> None:
    rng = np.random.default_rng(3)
    index = Index()
    worst = 0.0
    for segment in range(80):
        index.insert(WRITERS[0], random_records(rng, 4096, segment))
        if len(index) >= 100_000:
            worst = max(worst, index.nbytes / len(index))
    assert len(index) == 80 * 4096
    assert 128 < worst <= LIMIT


def test_memory_of_a_block_while_blocks_come_and_go() -> None:
    rng = np.random.default_rng(4)
    index = Index()
    segments: list[list[bytes]] = []
    worst = 0.0
    for segment in range(120):
        entries = random_records(rng, 2048, segment)
        index.insert(WRITERS[0], entries)
        segments.append(entries["key"].tolist())
        if segment >= 60:
            # As an evicting janitor does: what is oldest goes, segment after segment.
            if segment % 2:
                index.take_many(segments.pop(0))
                index.drop_segment(WRITERS[0], segment - 60 - 30)
            else:
                index.drop_segment(WRITERS[0], segment - 60)
                segments.pop(0)
            worst = max(worst, index.nbytes / len(index))
    assert len(index) == sum(map(len, segments))
    assert 128 < worst <= LIMIT


def record_and_tombstone(slot: int, owner: bytes) -> tuple[Entries, Entries]:
    record = random_records(np.random.default_rng(slot), 1, 0)
    record["slot"] = slot
    tombstone = record.copy()
    tombstone["kind"] = KIND_TOMBSTONE
    tombstone["payload_checksum"][0] = np.void(owner)
    return record, tombstone


def test_a_tombstone_is_known_until_journals_were_read_once_more(both_kernels: bool) -> None:
    for turns, count in ((0, 0), (1, 0), (2, 1)):
        index = Index()
        record, tombstone = record_and_tombstone(3, WRITERS[0])
        index.insert(WRITERS[1], tombstone)
        for _ in range(turns):
            index.settled()
        index.insert(WRITERS[0], record)
        assert len(index) == count


def test_records_in_reserve_take_over_while_a_table_is_replaced(
    both_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_LEAST_CELLS", 64), ("_LEAST_MOVED", 1), ("_MOVED", 1)):
        monkeypatch.setattr(module, name, value)
    index = Index()
    entries = random_records(np.random.default_rng(6), 50, 0)
    keys = entries["key"].tolist()
    index.insert(WRITERS[0], entries)
    index.insert(WRITERS[1], entries[:40])
    assert 0 < index._moved < index._old.shape[0]
    assert index.drop_segment(WRITERS[0], 0) == 50
    for _ in range(2):
        assert index.contains(keys) == [True] * 40 + [False] * 10
        found = index.gather(keys[:40])
        assert {index.writer_id(number) for number in found.writer.tolist()} == {WRITERS[1]}
        index.settled()  # the table is replaced
    assert index._old.shape[0] == 0
    assert index.drop_writer(WRITERS[1]) == 40
    assert len(index) == 0


def test_an_access_log_that_names_what_was_removed_changes_nothing(both_kernels: bool) -> None:
    index = Index()
    record, _ = record_and_tombstone(3, WRITERS[0])
    gone = record["key"].tolist()[0]
    index.insert(WRITERS[0], record)
    assert index.remove(gone, WRITERS[0], 0, 3)
    # In the same row, and but for the writer at the same place.
    other = random_records(np.random.default_rng(9), 1, 0)
    other["slot"] = 3
    index.insert(WRITERS[1], other)
    page = np.zeros(1, dtype=ACCESS)
    page["writer"][0], page["slot"], page["time"] = np.void(WRITERS[0]), 3, 99
    index.apply_accesses(iter([page]))
    assert index.last_used(other["key"].tolist()[0]) == 0
    assert index.drop_dead(WRITERS[0], 0, np.ones(8, dtype=np.bool_)) == 0
    assert index.drop_segment(WRITERS[0], 0) == index.drop_writer(WRITERS[0]) == 0
    assert len(index) == 1


def test_places_declared_dead_are_forgotten_in_the_end() -> None:
    index = Index()
    small = index.nbytes
    for turn in range(20):
        entries = np.zeros(1000, dtype=ENTRY)
        entries["kind"] = KIND_TOMBSTONE
        entries["slot"] = np.arange(1000) + 1000 * turn
        entries["payload_checksum"] = np.void(WRITERS[1])
        index.insert(WRITERS[0], entries)
        index.settled()
        assert index.nbytes < small + 200_000
    index.settled()
    assert index.nbytes == small


def test_keys_of_another_length_are_refused() -> None:
    index = Index()
    for keys in ([b"short"], np.zeros((2, 16), dtype=np.uint8), np.zeros(32, dtype=np.uint8)):
        with pytest.raises(ValueError, match="32"):
            index.find(keys)
        with pytest.raises(ValueError, match="32"):
            index.as_keys(keys)


def test_keys_in_frozen_and_in_strided_arrays_are_found() -> None:
    rng = np.random.default_rng(5)
    index = Index()
    entries = random_records(rng, 10, 0)
    index.insert(WRITERS[0], entries)
    joined = b"".join(entries["key"].tolist())
    frozen = np.frombuffer(joined, dtype=np.uint8).reshape(10, 32)
    assert index.contains(frozen) == [True] * 10
    strided = np.zeros((20, 64), dtype=np.uint8)[::2, :32]
    strided[:] = frozen
    assert index.contains(strided) == [True] * 10
    assert index.contains([]) == []
