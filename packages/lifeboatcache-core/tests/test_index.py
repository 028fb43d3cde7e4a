from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.format.access import ACCESS
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.index import Index

pytestmark = pytest.mark.usefixtures("both_kernels")

A, B, C = (bytes([number]) * 16 for number in range(3))


def key(number: int) -> bytes:
    # Keys may end in zeros, which some array types drop.
    return number.to_bytes(8, "little") + bytes(24)


def records(*numbers: int, segment: int = 0, first_slot: int = 0, time: int = 100) -> Entries:
    entries = np.zeros(len(numbers), dtype=ENTRY)
    entries["kind"] = KIND_RECORD
    entries["segment"] = segment
    entries["slot"] = range(first_slot, first_slot + len(numbers))
    entries["time"] = time
    for at, number in enumerate(numbers):
        entries["key"][at] = np.void(key(number))
    return entries


def tombstone(number: int, writer: bytes, segment: int, slot: int) -> Entries:
    entries = np.zeros(1, dtype=ENTRY)
    entries["kind"] = KIND_TOMBSTONE
    entries["segment"], entries["slot"] = segment, slot
    entries["key"][0] = np.void(key(number))
    entries["payload_checksum"][0] = np.void(writer)
    return entries


def place(index: Index, number: int) -> tuple[bytes, int, int] | None:
    (found,) = index.get([key(number)])
    if found is None:
        return None
    writer, entry = found
    assert entry["key"].tobytes() == key(number)
    return writer, int(entry["segment"]), int(entry["slot"])


def test_finds_what_was_inserted() -> None:
    index = Index()
    assert index.insert(A, records(*range(5000), segment=3)) == 5000
    assert len(index) == 5000
    assert index.contains([key(0), key(4999), key(5000)]) == [True, True, False]
    assert place(index, 4999) == (A, 3, 4999)
    assert place(index, 5000) is None
    assert sorted(index.keys()) == sorted(key(number) for number in range(5000))


def test_first_record_answers_and_the_next_takes_over() -> None:
    index = Index()
    assert index.insert(A, records(1)) == 1
    assert index.insert(B, records(1, segment=5)) == 0
    assert index.insert(C, records(1, segment=6)) == 0
    assert place(index, 1) == (A, 0, 0)
    assert len(index) == 1
    assert index.remove(key(1), A, 0, 0)
    assert place(index, 1) == (B, 5, 0)
    assert not index.remove(key(1), A, 0, 0)
    index.insert(A, tombstone(1, B, 5, 0))
    assert place(index, 1) == (C, 6, 0)
    assert index.remove(key(1), C, 6, 0)
    assert place(index, 1) is None
    assert not index.remove(key(1), C, 6, 0)


def test_tombstone_of_a_record_in_reserve() -> None:
    index = Index()
    index.insert(A, records(1))
    index.insert(B, records(1, segment=5))
    index.insert(C, tombstone(1, B, 5, 0))
    assert place(index, 1) == (A, 0, 0)
    assert index.remove(key(1), A, 0, 0)
    assert place(index, 1) is None


def test_a_record_that_is_met_twice_is_one_record() -> None:
    index = Index()
    for _ in range(2):
        index.insert(A, records(1))
        index.insert(B, records(1, segment=5))
    assert len(index.take(key(1))) == 2


def test_taking_a_key_returns_all_its_records() -> None:
    index = Index()
    index.insert(A, records(1, 2))
    index.insert(B, records(1, segment=5))
    taken = [(writer, int(entry["segment"])) for writer, entry in index.take(key(1))]
    assert taken == [(A, 0), (B, 5)]
    assert index.take(key(1)) == []
    assert len(index) == 1
    # Rows are used again without mixing records up.
    index.insert(C, records(7, segment=9))
    assert place(index, 7) == (C, 9, 0)
    assert place(index, 2) == (A, 0, 1)


def test_touch_moves_forward_and_names_places_once() -> None:
    index = Index()
    index.insert(A, records(1, 2, time=100))
    assert index.touch([key(1), key(3)], 90) == []
    assert index.touch([key(1), key(3)], 110) == [(A, 0, 0)]
    assert index.touch([key(1)], 110) == []
    assert index.last_used(key(1)) == 110
    assert index.last_used(key(2)) == 100
    assert index.last_used(key(3)) is None


def accesses(*lines: tuple[bytes, int, int, int]) -> Entries:
    made = np.zeros(len(lines), dtype=ACCESS)
    for at, (writer, segment, slot, time) in enumerate(lines):
        made["writer"][at] = np.void(writer)
        made["segment"][at], made["slot"][at], made["time"][at] = segment, slot, time
    return made


def test_access_logs_set_the_time_of_last_use() -> None:
    index = Index()
    index.insert(A, records(1, 2, 3, time=100))
    index.insert(B, records(4, segment=7, time=100))
    index.apply_accesses(
        iter(
            [
                accesses((A, 0, 1, 150), (A, 0, 1, 120), (C, 0, 0, 999), (A, 9, 9, 999)),
                accesses((B, 7, 0, 160), (A, 0, 2, 50)),
                accesses(),
            ]
        )
    )
    assert [index.last_used(key(number)) for number in (1, 2, 3, 4)] == [100, 150, 100, 160]


def test_access_logs_of_an_empty_index() -> None:
    index = Index()
    index.apply_accesses(iter([accesses((A, 0, 0, 1))]))
    assert len(index) == 0


journals = st.lists(
    st.tuples(
        st.sampled_from(["record", "tombstone"]),
        st.integers(0, 2),  # writer of the record
        st.integers(0, 3),  # key
        st.integers(0, 2),  # slot
    ),
    max_size=14,
    unique=True,
)


@given(journals, st.randoms(use_true_random=False))
def test_any_order_of_journals_gives_the_same_keys(
    events: list[tuple[str, int, int, int]], shuffle: Any
) -> None:
    """A key is there if, and only if, one of its records has no tombstone."""
    writers = (A, B, C)
    # A place belongs to one key.
    made = {(writer, slot): number for kind, writer, number, slot in events if kind == "record"}
    dead = {
        (writer, slot)
        for kind, writer, number, slot in events
        if kind == "tombstone" and made.get((writer, slot)) == number
    }
    lines: list[tuple[bytes, Entries]] = [
        (writers[writer], records(number, segment=number, first_slot=slot))
        for (writer, slot), number in made.items()
    ]
    lines += [
        (A, tombstone(number, writers[writer], number, slot))
        for (writer, slot), number in made.items()
        if (writer, slot) in dead
    ]
    shuffle.shuffle(lines)
    index = Index()
    for writer, entries in lines:
        index.insert(writer, entries)
    expected = {number for place_, number in made.items() if place_ not in dead}
    assert set(index.keys()) == {key(number) for number in expected}
    assert len(index) == len(expected)
    for number in expected:
        assert place(index, number) is not None


def test_readers_and_writers_at_once() -> None:
    index = Index()
    faults: list[BaseException] = []

    def churn(writer: bytes, numbers: Sequence[int]) -> None:
        try:
            for _ in range(40):
                index.insert(writer, records(*numbers))
                for number in numbers:
                    index.take(key(number))
        except BaseException as exc:
            faults.append(exc)

    def look(numbers: Sequence[int]) -> None:
        try:
            for _ in range(200):
                keys = [key(number) for number in numbers]
                for asked, found in zip(keys, index.get(keys), strict=True):
                    assert found is None or found[1]["key"].tobytes() == asked
                index.touch(keys, 500)
        except BaseException as exc:
            faults.append(exc)

    threads = [
        threading.Thread(target=churn, args=(A, range(300))),
        threading.Thread(target=churn, args=(B, range(200, 500))),
        threading.Thread(target=look, args=(range(500),)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(index) == 0
