"""The clock jumps by years, forwards and backwards, under stores that are open."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faultkit.engine import engines

from lifeboat_cache.interface import Lookup, Namespace, Outcome
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

OK = Outcome.OK

YEAR = 365 * 24 * 3600.0

#: What wall clocks of hosts without a battery, and of hosts with a wrong one, do.
JUMPS = [+3600.0, -3600.0, +10 * YEAR, -10 * YEAR, +90 * YEAR, -200 * YEAR, +1e12, 0.0]


class Clock:
    """Wall time that jumps; the monotonic clock does not, by its contract."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset = 0.0
        real, real_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: real() + self.offset)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(self.offset * 1e9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_clock_that_jumps_between_all_calls(
    open_driver: Open, clock: Clock, namespace: Namespace, root: Path
) -> None:
    driver = open_driver()
    for number, jump in enumerate(JUMPS):
        clock.offset = jump
        numbers = range(number * 4, number * 4 + 4)
        assert driver.store(numbers) == [OK] * 4
        assert driver.load(range(number * 4 + 4)) == [OK] * (number * 4 + 4)
        driver.block_store.touch(driver.keys(range(number * 4 + 4)))
        other = open_driver()
        assert other.load(range(number * 4 + 4)) == [OK] * (number * 4 + 4)
        other.block_store.touch(driver.keys(range(number * 4 + 4)))
        assert other.block_store.close()
        assert FilesystemTarget(root).namespaces()[0].blocks >= number * 4 + 4
    assert driver.block_store.close()
    clock.offset = 0.0
    fresh = open_driver()
    assert fresh.load(range(len(JUMPS) * 4)) == [OK] * (len(JUMPS) * 4)
    assert fresh.block_store.counters().bad_entries == 0


@pytest.mark.parametrize("jump", [-10 * YEAR, +10 * YEAR])
def test_purging_by_age_with_a_clock_that_is_wrong(
    open_driver: Open, clock: Clock, root: Path, namespace: Namespace, jump: float
) -> None:
    before = open_driver()
    assert before.store(range(4)) == [OK] * 4
    assert before.block_store.close()
    living = open_driver()
    assert living.store(range(4, 8)) == [OK] * 4
    clock.offset = jump
    FilesystemTarget(root).purge(namespace.hex, older_than_s=7 * 24 * 3600.0)
    # A wrong clock may cost what is dead; never what somebody uses, never a wrong byte.
    fresh = open_driver()
    found = fresh.load(range(8))
    assert found[4:] == [OK] * 4
    assert set(found[:4]) == ({OK} if jump < 0 else {Outcome.MISSING})
    assert living.load(range(4, 8)) == [OK] * 4


def test_monotonic_clock_of_another_boot(
    open_driver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that is restored from a snapshot sees this clock jump too.
    driver = open_driver()
    assert driver.store(range(4)) == [OK] * 4
    real = time.monotonic
    for jump in (+1e6, -1e6):
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda jump=jump: real() + jump)
            assert driver.block_store.lookup(driver.keys(range(4))).tolist() == [Lookup.HIT] * 4
            assert driver.load(range(4)) == [OK] * 4
            assert driver.store([100 + int(jump > 0)]) == [OK]
    assert driver.load([100, 101]) == [OK] * 2


def test_engines_whose_clocks_differ_by_years(open_driver: Open, root: Path, clock: Clock) -> None:
    driver = open_driver()
    with engines(root, 1) as (engine,):
        for jump in JUMPS:
            clock.offset = jump
            assert all(outcome.good for outcome in driver.store(range(4)))
            assert driver.delete([0]) == [True]
        assert {*engine.ask("store", [0, 1, 2])} <= {"OK", "PRESENT"}
        assert engine.ask("load", [0, 1, 2]) == ["OK"] * 3
