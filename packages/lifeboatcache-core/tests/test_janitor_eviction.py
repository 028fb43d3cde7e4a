"""What goes first when a target is full, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from janitors import (
    THEN,
    Block,
    Clock,
    chain,
    janitor,
    leave,
    names,
    run_until_quiet,
    verified,
    write,
)

from lifeboat_cache.janitor.eviction import choose_victims, inherit_use
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

SIZE = 256 << 10
#: Beside its payloads, a writer has its headers.
ROOM = 64 << 10


def survivors(open_driver: Open, numbers: range) -> list[int]:
    driver = open_driver(size=SIZE)
    outcomes = driver.load(numbers)
    assert set(outcomes) <= {Outcome.OK, Outcome.MISSING}
    return [n for n, outcome in zip(numbers, outcomes, strict=True) if outcome is Outcome.OK]


def test_the_least_recently_used_prefix_goes_first_from_its_tail(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 8, THEN), namespace, SIZE)
    leave(root, chain(10, 8, THEN + 100), namespace, SIZE)
    clock = Clock()
    one = janitor(root, clock, capacity=16 * SIZE + ROOM, low=0.70)
    reports = run_until_quiet(one, clock)
    assert sum(report.evicted_blocks for report in reports) == 5
    assert survivors(open_driver, range(20)) == [0, 1, 2, *range(10, 18)]
    assert reports[-1].used_after <= 0.72 * (16 * SIZE + ROOM)
    assert verified(root) == 11


def test_a_prefix_is_as_recent_as_the_last_request_through_it(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 4, THEN), namespace, SIZE)
    leave(root, chain(10, 4, THEN + 100), namespace, SIZE)
    # A later request went on behind the oldest prefix.
    leave(root, chain(20, 4, THEN + 200, root=4), namespace, SIZE)
    clock = Clock()
    one = janitor(root, clock, capacity=12 * SIZE + ROOM, low=0.70)
    run_until_quiet(one, clock)
    assert survivors(open_driver, range(24)) == [*range(4), *range(20, 24)]


def test_used_blocks_are_spared_after_their_logs_have_gone(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    for first in (0, 10, 20):
        leave(root, chain(first, 4), namespace, SIZE)
    driver = open_driver(size=SIZE)
    driver.block_store.touch(driver.keys(range(10, 14)))
    assert driver.block_store.close()
    assert len(names(root, "access")) == 1
    clock = Clock(4e9)
    assert janitor(root, clock).run_once().logs_folded == 1
    assert names(root, "access") == [f"{'0' * 32}.access"]
    # A janitor that has seen none of it.
    one = janitor(root, clock, capacity=12 * SIZE + ROOM, low=0.36)
    run_until_quiet(one, clock)
    assert survivors(open_driver, range(24)) == list(range(10, 14))
    # Engines learn of it from the summary as they did from the logs.
    store = open_driver(size=SIZE).block_store
    assert (store._index.last_used(driver.keys([10])[0]) or 0) > THEN


def test_groups_and_ranks_of_a_block_go_together(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    ranks = [Namespace.from_identity({"model": "m", "parallel": {"rank": n}}) for n in (0, 1)]
    other = Namespace.from_identity({"model": "n", "parallel": {"rank": 0}})
    for at, of in enumerate((*ranks, other)):
        blocks = [
            Block(2 * n + group, family=n + 1, position=256, group=group, time=THEN + 10 * n + at)
            for n in range(4)
            for group in (0, 1)
        ]
        # Only one group of the first block was used, only on one rank.
        if at == 1:
            blocks[1].time = THEN + 1000
        leave(root, blocks, of, SIZE)
    clock = Clock()
    one = janitor(root, clock, capacity=25 * SIZE, low=0.75)
    run_until_quiet(one, clock)
    left = [
        {n for n in range(8) if open_driver(size=SIZE, of=of).load([n]) == [Outcome.OK]}
        for of in (*ranks, other)
    ]
    assert left[0] == left[1]
    assert {0, 1} <= left[0]
    # The other model's block of the same family is not kept alive by it.
    assert 0 not in left[2]
    for one_left in left:
        assert {n ^ 1 for n in one_left} == one_left


def test_young_records_are_spared(open_driver: Open, root: Path, namespace: Namespace) -> None:
    clock = Clock(THEN + 5.0)
    leave(root, chain(0, 4, THEN), namespace, SIZE)
    one = janitor(root, clock, capacity=2 * SIZE)
    assert one.run_once().evicted_blocks == 0
    clock.tick(60)
    assert one.run_once().evicted_blocks > 0


def test_policy_none_evicts_nothing_and_reclaims_what_is_buried(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    driver = open_driver(size=SIZE)
    driver.store(range(8))
    assert driver.delete(range(4)) == [True] * 4
    assert driver.block_store.close()
    clock = Clock(4e9)
    one = janitor(root, clock, capacity=SIZE, eviction="none")
    reports = run_until_quiet(one, clock)
    assert sum(report.evicted_blocks for report in reports) == 0
    assert sum(report.buried_blocks for report in reports) == 4
    assert reports[-1].used_after < 5 * SIZE
    assert survivors(open_driver, range(8)) == [4, 5, 6, 7]


def test_reserve_makes_room_without_a_capacity(
    open_driver: Open, small_disk: Path, namespace: Namespace
) -> None:
    root = small_disk / "kv"
    leave(root, chain(0, 10), namespace, SIZE)
    clock = Clock()
    one = janitor(root, clock, reserve=2 << 20, margin_bytes=256 << 10)
    reports = run_until_quiet(one, clock)
    assert reports[0].evicted_blocks >= 3
    assert reports[-1].free >= (2 << 20) + (256 << 10)
    assert sum(report.evicted_blocks for report in reports) <= 6


def test_dry_run_changes_nothing(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    before = {path: path.stat() for path in root.rglob("*")}
    report = janitor(root, Clock(), capacity=4 * SIZE).run_once(dry_run=True)
    assert report.evicted_blocks >= 4
    after = {path: path.stat() for path in root.rglob("*")}
    assert before.keys() == after.keys()
    assert all(before[p].st_mtime_ns == after[p].st_mtime_ns for p in before)


@pytest.mark.parametrize("jump", [-1_000_000_000, 1_000_000_000])
def test_a_record_of_the_future_ages(
    open_driver: Open, root: Path, namespace: Namespace, jump: int
) -> None:
    if jump > 0:  # some were stored while a clock was ahead
        leave(root, chain(0, 4, THEN + jump), namespace, SIZE)
        leave(root, chain(10, 8, THEN), namespace, SIZE)
        clock = Clock(THEN + 100.0)
        one = janitor(root, clock, capacity=15 * SIZE, low=0.43)
        one.run_once()
        clock.tick(1000)
        leave(root, chain(20, 4, THEN + 1000), namespace, SIZE)
        run_until_quiet(one, clock)
        left = survivors(open_driver, range(24))
        assert set(range(20, 24)) <= set(left), "newer ones are not thrown out instead"
        # Not so recent as what came later.
        assert left == [0, 1, *range(20, 24)]
    else:  # this machine's clock is behind all records: their order is kept
        leave(root, chain(0, 4, THEN), namespace, SIZE)
        leave(root, chain(10, 4, THEN + 100), namespace, SIZE)
        clock = Clock(float(THEN + jump))
        one = janitor(root, clock, capacity=8 * SIZE, low=0.60)
        run_until_quiet(one, clock)
        assert set(survivors(open_driver, range(20))) <= set(range(10, 14))


def test_hot_heads_stay_in_a_living_writers_segment(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    size = 1 << 20
    writer = write(root, chain(0, 12), namespace, size=size)
    clock = Clock()
    one = janitor(root, clock, capacity=12 << 20, low=0.5)
    before = one.run_once().used_before
    clock.tick(31)
    report = one.run_once()
    assert report.punched_bytes >= 6 << 20
    assert report.segments_removed == 0
    assert report.used_after <= before - (6 << 20)
    # The writer goes on in it.
    write(root, chain(20, 2), namespace, size=size, writer=writer)
    writer.close()
    left = open_driver(size=size).load(range(22))
    assert left[:5] == [Outcome.OK] * 5
    assert left[20:] == [Outcome.OK] * 2
    assert verified(root) == left.count(Outcome.OK)


@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 1000)), min_size=1, max_size=30))
def test_use_is_inherited_by_everything_in_front(nodes: list[tuple[int, int]]) -> None:
    # Parents come before their children, so that there is no circle.
    parents = np.array([min(p, at - 1) for at, (p, _) in enumerate(nodes)], dtype=np.int64)
    used = np.array([time for _, time in nodes], dtype=np.int64)
    expected = used.copy()
    for at in range(len(nodes) - 1, -1, -1):
        if parents[at] >= 0:
            expected[parents[at]] = max(expected[parents[at]], expected[at])
    assert inherit_use(used, parents).tolist() == expected.tolist()


def test_circles_end() -> None:
    used = inherit_use(np.array([1, 5, 3]), np.array([1, 2, 0]))
    assert used.tolist() == [5, 5, 5]


@given(st.data())
def test_victims_leave_no_block_without_those_before_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    parents = [data.draw(st.integers(0, at)) for at in range(count)]  # 0 = none, else family
    depth = [0] * count
    for at in range(count):
        depth[at] = depth[parents[at] - 1] + 1 if parents[at] else 1
    used = [data.draw(st.integers(0, 5)) for _ in range(count)]
    wanted = data.draw(st.integers(0, count + 5))
    victims = choose_victims(
        units=np.arange(1, count + 1, dtype=np.uint64),
        parents=np.array(parents, dtype=np.uint64),
        positions=np.array(depth),
        used=np.array(used),
        sizes=np.ones(count, dtype=np.int64),
        spared=np.zeros(count, dtype=np.bool_),
        wanted=wanted,
    )
    assert int(victims.sum()) == min(wanted, count)
    for at in range(count):
        if parents[at] and victims[parents[at] - 1]:
            assert victims[at]


def test_writers_drop_stores_at_the_reserve_without_a_janitor(
    open_driver: Open, root: Path
) -> None:
    driver = open_driver(target=FilesystemTarget(root, reserve=1 << 60))
    assert driver.store([1]) == [Outcome.RESERVE]
