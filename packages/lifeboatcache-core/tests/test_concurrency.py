"""Many threads on one store."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store import executor, job_runner, keeper
from lifeboat_cache.store.storing import Storing
from lifeboat_cache.targets import segment_writer
from lifeboat_cache.testing import StoreDriver

THREADS = 8
KEYS = 60


@pytest.mark.parametrize(
    "rounds", [pytest.param(60, id="quick"), pytest.param(3000, id="full", marks=pytest.mark.full)]
)
def test_storing_loading_and_deleting_at_once(
    open_driver: Callable[..., StoreDriver],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    rounds: int,
) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 2 << 20)
    monkeypatch.setattr(executor, "_PART_BYTES", 32 << 10)
    monkeypatch.setattr(executor, "_LEAST_PART_BYTES", 32 << 10)
    monkeypatch.setattr(keeper, "_TAIL_S", 0.01)
    # The second store follows the first and writes the same keys.
    # One of them reads and writes past the page cache, the other through it.
    drivers = [open_driver(size=12_288, cuts=(at,), io_workers=4) for at in (4096, 100)]
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        choice = random.Random(seed)
        driver = drivers[seed % 2]
        try:
            for _ in range(rounds):
                numbers = choice.sample(range(KEYS), choice.randint(1, 8))
                action = choice.random()
                if action < 0.45:
                    assert set(driver.store(numbers)) <= {Outcome.OK, Outcome.PRESENT}
                elif action < 0.85:
                    assert set(driver.load(numbers)) <= {Outcome.OK, Outcome.MISSING}
                elif action < 0.95:
                    driver.delete(numbers[:2])
                else:
                    keys = driver.keys(numbers)
                    pinned = driver.block_store.lookup(keys, pin=True)
                    held = [n for n, hit in zip(numbers, pinned, strict=True) if hit]
                    assert not any(driver.delete(held))
                    driver.block_store.unpin(driver.keys(held))
                    driver.block_store.touch(keys)
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for driver in drivers:
        assert driver.block_store.drain(60)
        # A block found may be one that the other store has just deleted.
        there = [number for number in range(KEYS) if driver.lookup([number]) == [Lookup.HIT]]
        assert set(driver.load(there)) <= {Outcome.OK, Outcome.MISSING}
        assert driver.block_store.counters().bad_entries == 0
        assert driver.block_store.counters().load_outcomes.get("corrupt", 0) == 0
        assert driver.block_store.close()
    again = open_driver(size=12_288)
    assert again.block_store.counters().bad_entries == 0
    assert set(again.load(range(KEYS))) <= {Outcome.OK, Outcome.MISSING}
    outcomes = again.store(range(KEYS))
    assert set(outcomes) <= {Outcome.OK, Outcome.PRESENT}
    assert again.load(range(KEYS)) == [Outcome.OK] * KEYS


def test_stores_are_planned_one_after_the_other_and_loads_do_not_wait_for_them(
    open_driver: Callable[..., StoreDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Side by side, all plans would be done late, and the device idle until then.
    monkeypatch.setattr(job_runner, "_TURN_S", 60.0)
    driver = open_driver(io_workers=4)
    assert driver.store(range(4)) == [Outcome.OK] * 4
    planning, most, begun, go_on = [0], [0], threading.Event(), threading.Event()
    plan = Storing.plan

    def watched(*arguments: Any) -> Iterator[Any]:
        planning[0] += 1
        most[0] = max(most[0], planning[0])
        begun.set()
        assert go_on.wait(60)
        yield from plan(*arguments)
        planning[0] -= 1

    monkeypatch.setattr(Storing, "plan", watched)
    stores = [
        threading.Thread(target=driver.store, args=(range(at, at + 4),)) for at in (10, 20, 30)
    ]
    for thread in stores:
        thread.start()
    assert begun.wait(60)
    assert driver.load(range(4)) == [Outcome.OK] * 4
    go_on.set()
    for thread in stores:
        thread.join(60)
    assert most == [1]
    assert driver.load([*range(10, 14), *range(30, 34)]) == [Outcome.OK] * 8


def test_deletion_by_another_store_wins_only_over_the_record_it_saw(
    open_driver: Callable[..., StoreDriver],
) -> None:
    first, second = open_driver(), open_driver()
    assert first.store([1]) == [Outcome.OK]
    assert first.delete([1]) == [True]
    assert first.store([1]) == [Outcome.OK]
    assert second.store([1]) in ([Outcome.OK], [Outcome.PRESENT])
    assert first.block_store.close()
    assert second.block_store.close()
    assert open_driver().load([1]) == [Outcome.OK]
