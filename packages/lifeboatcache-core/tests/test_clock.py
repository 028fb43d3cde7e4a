"""A clock that is wrong costs the order of use, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lifeboat_cache.clock import coarse_time
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.testing import StoreDriver, sample_keys


@pytest.mark.parametrize("now", [-5.0, 0.0, float(1 << 33)])
def test_a_clock_far_off_neither_stops_stores_nor_touches(
    open_driver: Callable[..., StoreDriver], monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    first = open_driver()
    first.store([1])
    monkeypatch.setattr(time, "time", lambda: now)
    assert first.store([2]) == [Outcome.OK]
    first.block_store.touch(sample_keys([1, 2]))
    first.block_store.close()
    second = open_driver()
    assert second.block_store.lookup(sample_keys([1, 2])).tolist() == [Lookup.HIT] * 2


def test_the_time_fits_into_a_journal_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < coarse_time() < 1 << 32
    monkeypatch.setattr(time, "time", lambda: float(1 << 40))
    assert coarse_time() == (1 << 32) - 1
