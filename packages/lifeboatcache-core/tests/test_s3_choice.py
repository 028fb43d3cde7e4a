"""Which objects of a bucket go, and what of them is moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.s3.choice import MOST_MOVED, Choice, Records, choose_objects

MIB = 1 << 20


def records(*objects: list[dict[str, Any]]) -> Records:
    rows = [(number, row) for number, rows in enumerate(objects) for row in rows]

    def column(name: str, default: Any, dtype: Any) -> Any:
        return np.array([row.get(name, default) for _, row in rows], dtype=dtype)

    keys = np.array([row.get("key", 1000 + at) for at, (_, row) in enumerate(rows)], np.uint64)
    return Records(
        np.array([number for number, _ in rows], dtype=np.int64),
        keys,
        column("unit", 0, np.uint64),
        column("parent", 0, np.uint64),
        column("position", 0, np.uint32),
        column("used", 0, np.uint32),
        column("size", MIB, np.int64),
        column("spared", False, np.bool_),
    )


def choose(of: Records, wanted: int, fixed: tuple[int, ...] = ()) -> Choice:
    count = int(of.object.max()) + 1
    sizes = np.zeros(count, dtype=np.int64)
    np.add.at(sizes, of.object, of.sizes)
    keep = np.isin(np.arange(count), fixed)
    return choose_objects(of, sizes, keep, wanted)


def row(used: int, **more: Any) -> dict[str, Any]:
    return {"used": used, **more}


def test_object_that_was_used_least_recently_goes() -> None:
    of = records([row(5), row(6)], [row(1), row(2)], [row(9), row(9)])
    choice = choose(of, 2 * MIB)
    assert choice.objects.tolist() == [False, True, False]
    assert not choice.moved.any()
    assert choice.freed == 2 * MIB


def test_what_is_hot_in_it_is_moved() -> None:
    of = records([row(1), row(2), row(3), row(99)], [row(50), row(51), row(52), row(53)])
    choice = choose(of, 3 * MIB)
    assert choice.objects.tolist() == [True, False]
    assert choice.moved.tolist() == [False, False, False, True] + [False] * 4
    assert choice.freed == 3 * MIB


def test_objects_that_are_mostly_hot_are_not_moved_about() -> None:
    # One cold record in each of four objects: moving three out of four is not worth it.
    objects = [[row(n), row(90 + n), row(92 + n), row(94 + n)] for n in range(4)]
    choice = choose(records(*objects), 2 * MIB)
    of = records(*objects)
    for number in np.flatnonzero(choice.objects).tolist():
        mine = of.object == number
        assert choice.moved[mine].sum() <= MOST_MOVED * 4
    assert choice.freed >= 2 * MIB


def test_prefix_of_something_that_is_used_stays_with_it() -> None:
    # The first block was not used for long itself, but the one behind it was.
    of = records(
        [row(1, unit=7, position=16), row(2, unit=9, position=16)],
        [row(90, unit=8, parent=7, position=32), row(80)],
        [row(40), row(41)],
    )
    choice = choose(of, MIB)
    assert choice.objects.tolist() == [True, False, False]
    assert choice.moved.tolist() == [True, False, False, False, False, False]


def test_what_another_object_keeps_is_not_moved() -> None:
    of = records([row(1), row(2), row(99, key=5)], [row(98, key=5), row(97), row(96)])
    choice = choose(of, 2 * MIB)
    assert choice.objects.tolist() == [True, False]
    assert not choice.moved.any()
    assert choice.freed == 3 * MIB


def test_what_only_an_older_object_keeps_is_moved() -> None:
    of = records([row(98, key=5), row(97), row(96)], [row(1), row(2), row(99, key=5)])
    choice = choose(of, 2 * MIB)
    assert choice.objects.tolist() == [False, True]
    assert int(choice.moved.sum()) == 1


def test_what_would_be_next_is_not_moved() -> None:
    of = records([row(1), row(2)], [row(3), row(4)], *([row(50), row(51)] for _ in range(4)))
    choice = choose(of, 3 * MIB)
    assert choice.objects.tolist() == [True, True] + [False] * 4
    assert not choice.moved.any()


def test_what_is_twice_in_them_is_moved_once() -> None:
    of = records(
        [row(1), row(2), row(99, key=5)],
        [row(1), row(2), row(99, key=5)],
        [row(50, size=64 * MIB)],
    )
    choice = choose(of, 4 * MIB)
    assert choice.objects.tolist() == [True, True, False]
    assert int(choice.moved.sum()) == 1
    assert choice.freed == 5 * MIB


def test_what_is_spared_is_moved_and_what_is_fixed_stays() -> None:
    of = records([row(1, spared=True), row(1)], [row(2), row(2)], [row(3), row(3)])
    choice = choose(of, 3 * MIB, fixed=(1,))
    assert not choice.objects[1]
    assert not (choice.objects[0] and not choice.moved[0])


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 200),
)
def test_as_much_as_is_wanted_goes_if_there_is_as_much(
    objects: list[list[tuple[int, int]]], wanted: int
) -> None:
    of = records(*[[row(used, size=size) for used, size in rows] for rows in objects])
    choice = choose(of, wanted)
    total = int(of.sizes.sum())
    assert choice.freed >= min(wanted, total)
    gone = choice.objects[of.object]
    assert not choice.moved[~gone].any()
    assert choice.freed == int(of.sizes[gone & ~choice.moved].sum())


@pytest.mark.parametrize("wanted", [0, -5])
def test_nothing_goes_if_nothing_is_wanted(wanted: int) -> None:
    choice = choose(records([row(1)]), wanted)
    assert not choice.objects.any()
    assert choice.freed == 0
