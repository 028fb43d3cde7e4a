"""Two and eight engines in one directory, forked ones and ones without file descriptors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faultkit.engine import engines

from lifeboat_cache.interface import Outcome
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

OK = Outcome.OK


@pytest.mark.parametrize(
    ("count", "seconds"),
    [
        pytest.param(2, 0.6, id="two"),
        pytest.param(8, 0.6, id="eight"),
        pytest.param(8, 60.0, id="full", marks=pytest.mark.full),
    ],
)
def test_engines_store_the_same_keys_at_once(
    open_driver: Open, root: Path, count: int, seconds: float
) -> None:
    blocks = 300
    with engines(root, count) as running:
        for seed, engine in enumerate(running):
            engine.tell("churn", [seed, seconds, blocks])
        said = [engine.hear() for engine in running]
        for counts in said:
            assert set(counts["store"]) <= {"OK", "PRESENT"}
            assert set(counts["load"]) <= {"OK", "MISSING"}
            assert counts["load"].get("OK", 0) > 0
        assert set(running[0].ask("store", list(range(blocks)))) <= {"OK", "PRESENT"}
        # StoreDriver compared every byte of its own; now everybody's by a newcomer.
        reader = open_driver()
        assert reader.load(range(blocks)) == [OK] * blocks
        assert reader.block_store.counters().bad_entries == 0
        # Half of them die, the others go on.
        for engine in running[::2]:
            engine.kill()
        for engine in running[1::2]:
            assert set(engine.ask("store", list(range(blocks)))) <= {"OK", "PRESENT"}
            assert engine.ask("load", list(range(blocks))) == ["OK"] * blocks
            assert engine.ask("counters")[0] == 0
            assert engine.ask("close") is True
    assert open_driver().load(range(blocks)) == [OK] * blocks


def test_worker_forked_while_blocks_are_stored(open_driver: Open, root: Path) -> None:
    with engines(root, 1) as (engine,):
        engine.ask("store", list(range(8)))
        children = [engine.ask("fork", 0.1) for _ in range(5)]
        assert engine.ask("churn", [1, 0.5, 100])["load"].keys() <= {"OK", "MISSING"}
        assert engine.ask("load", list(range(8))) == ["OK"] * 8
        assert all(children)
        engine.kill()
    fresh = open_driver()
    assert fresh.load(range(8)) == [OK] * 8
    assert fresh.block_store.counters().bad_entries == 0


@pytest.mark.parametrize("left", [0, 4])
def test_no_file_descriptors_left(open_driver: Open, root: Path, left: int) -> None:
    before = open_driver()
    assert before.store(range(8)) == [OK] * 8
    assert before.block_store.close()
    with engines(root, 1) as (engine,):
        assert engine.ask("ready") == [True, "READY"]
        engine.ask("descriptors", left)
        kept: list[int] = []
        for first in range(100, 120, 4):
            numbers = list(range(first, first + 4))
            outcomes = engine.ask("store", numbers)
            assert set(outcomes) <= {"OK", "FAILED"}
            kept += [n for n, outcome in zip(numbers, outcomes, strict=True) if outcome == "OK"]
            assert set(engine.ask("load", list(range(8)))) <= {"OK", "FAILED", "MISSING"}
        engine.ask("descriptors", None)
        for _ in range(20):
            again = engine.ask("store", [500])
            if again != ["FAILED"]:
                break
            time.sleep(0.5)  # after a failure it leaves the disk alone for some seconds
        assert again in (["OK"], ["PRESENT"])
        assert engine.ask("close") is True
    fresh = open_driver()
    assert fresh.load([*range(8), *kept, 500]) == [OK] * (9 + len(kept))
