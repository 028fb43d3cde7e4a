"""Tokens of prompts, and the prefill that was saved."""

from __future__ import annotations

import pytest

from lifeboat_cache.engines.prompts import PromptCounts


def test_each_token_is_given_out_once() -> None:
    counts = PromptCounts()
    counts.asked(1000, 600)
    counts.served(500)
    assert counts.take() == {"prompt_tokens": 1000, "cached_tokens": 600, "served_tokens": 500}
    assert counts.take() == {}
    counts.asked(10, 20)
    assert counts.take() == {"prompt_tokens": 10, "cached_tokens": 10}


def test_without_a_measured_prefill_no_time_is_claimed() -> None:
    counts = PromptCounts()
    counts.served(500)
    counts.computed(255, 0.0, 9.0)  # too short to say anything
    counts.computed(1000, 10.0, 90.0)  # the engine warms up
    assert "saved_seconds" not in counts.take()
    counts.computed(1000, 100.0, 102.0)
    assert counts.take() == {
        "prefill_tokens": 1000,
        "prefill_seconds": 2.0,
        "saved_seconds": pytest.approx(1.0),
    }
    assert counts.take() == {}, "what was served before is counted once"


def test_prefills_at_the_same_time_share_it() -> None:
    counts = PromptCounts()
    counts.computed(1000, 0.0, 1.0)
    counts.computed(1000, 10.0, 12.0)
    counts.computed(1000, 11.0, 13.0)
    counts.computed(1000, 11.0, 13.0)
    counts.served(3000)
    taken = counts.take()
    assert taken["prefill_seconds"] == pytest.approx(3.0)
    assert taken["saved_seconds"] == pytest.approx(3.0)


def test_the_rate_is_that_of_the_last_prefills() -> None:
    counts = PromptCounts()
    for number in range(1 + 200):
        counts.computed(1000, 10.0 * number, 10.0 * number + 5)
    for number in range(201, 265):
        counts.computed(1000, 10.0 * number, 10.0 * number + 1)
    counts.served(64_000)
    assert counts.take()["saved_seconds"] == pytest.approx(64.0)
