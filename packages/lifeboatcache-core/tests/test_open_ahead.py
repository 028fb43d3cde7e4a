"""Segments are opened when their blocks are found, before these are loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store import ahead
from lifeboat_cache.targets import segment_reader
from lifeboat_cache.testing import StoreDriver

MANY = range(2 * ahead.AHEAD_LEAST)

Open = Callable[..., StoreDriver]


@pytest.fixture
def looked_ahead(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when segments have been opened ahead, or could not be."""
    done = threading.Event()
    inner = ahead.OpeningAhead._open

    def opened(self: ahead.OpeningAhead, places: list[tuple[int, int]]) -> None:
        inner(self, places)
        done.set()

    monkeypatch.setattr(ahead.OpeningAhead, "_open", opened)
    return done


def test_a_load_finds_the_segments_of_a_lookup_open(
    open_driver: Open, looked_ahead: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(open_driver().store(MANY)) == {Outcome.OK}
    driver = open_driver()
    assert set(driver.lookup(MANY)) == {Lookup.HIT}
    assert looked_ahead.wait(60)

    def refuse(*_: object) -> None:
        raise AssertionError("a segment was opened twice")

    monkeypatch.setattr(segment_reader, "_OpenSegment", refuse)
    assert set(driver.load(MANY)) == {Outcome.OK}
    looked_ahead.clear()
    driver.lookup(MANY)
    driver.load(MANY)
    assert not looked_ahead.is_set(), "they are known to be open"


def test_a_lookup_of_few_keys_or_of_none_that_are_there_opens_nothing(
    open_driver: Open, looked_ahead: threading.Event
) -> None:
    driver = open_driver()
    driver.store(range(4))
    driver.lookup(range(4))
    driver.lookup(range(100, 100 + len(MANY)))
    driver.load(range(4))
    assert not looked_ahead.is_set()


def test_a_segment_that_is_gone_is_found_out_by_the_load(
    open_driver: Open, root: Path, looked_ahead: threading.Event
) -> None:
    open_driver().store(MANY)
    driver = open_driver()
    for path in root.rglob("*.segment"):
        path.unlink()
    assert set(driver.lookup(MANY)) == {Lookup.HIT}
    assert looked_ahead.wait(60)
    assert set(driver.load(MANY)) == {Outcome.MISSING}
