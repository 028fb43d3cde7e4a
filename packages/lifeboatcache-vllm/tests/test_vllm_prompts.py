"""Tokens of prompts, from the statistics that vLLM keeps of each request."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.metrics.stats import PrefillStats

from lifeboat_cache.integrations import vllm_prompts
from lifeboat_cache.integrations.vllm_published import Published
from lifeboat_cache.interface import Outcome, PromptCounts


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptCounts]:
    originals = PrefillStats.set, PrefillStats.finalize
    counts = PromptCounts()
    monkeypatch.setattr(vllm_prompts, "prompts", counts)
    vllm_prompts.install()
    vllm_prompts.install()
    yield counts
    PrefillStats.set, PrefillStats.finalize = originals
    vllm_prompts._begun.clear()


def request(tokens: int, local: int, external: int) -> PrefillStats:
    stats = PrefillStats()
    stats.set(tokens, local, external)
    stats.finalize(tokens)
    return stats


def test_prompts_are_counted_once(counts: PromptCounts) -> None:
    stats = PrefillStats()
    # Scheduled, put back for want of memory, scheduled again.
    stats.set(1000, 0, 0)
    stats.set(1000, 300, 200)
    assert counts.take() == {}, "it has computed nothing yet"
    stats.finalize(1000)
    assert counts.take() == {"prompt_tokens": 1000, "cached_tokens": 500}
    assert stats.num_cache_creation_tokens == 500, "vLLM's own is untouched"
    assert not vllm_prompts._begun


def test_only_prefills_without_a_load_say_how_fast_the_engine_is(counts: PromptCounts) -> None:
    request(1000, 0, 0)
    counts.take()
    request(1000, 0, 600)
    assert "prefill_tokens" not in counts.take()
    request(1000, 600, 0)
    assert counts.take()["prefill_tokens"] == 400


def test_requests_that_are_given_up_are_forgotten(
    counts: PromptCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_prompts, "_MOST_BEGUN", 4)
    kept = [PrefillStats() for _ in range(10)]
    for stats in kept:
        stats.set(10, 0, 0)
    assert len(vllm_prompts._begun) <= 4
    kept[0].finalize(10)
    assert counts.take()["prompt_tokens"] == 10


def test_a_fault_of_ours_is_none_of_vllms(
    counts: PromptCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(counts, "asked", broken)
    assert request(1000, 0, 0).num_prompt_tokens == 1000


def test_stores_of_one_process_publish_each_token_once() -> None:
    counts = PromptCounts()
    spec = SimpleNamespace(blocks_per_chunk=2, tokens_per_block=(16,))
    stores = [Published(spec, counts) for _ in range(2)]
    counts.asked(100, 40)
    stores[1].loaded([b"a", b"b"], np.array([Outcome.OK, Outcome.MISSING], dtype=np.uint8))
    facts = [store.facts() for store in stores]
    assert sum(fact.get("prompt_tokens", 0) for fact in facts) == 100
    assert sum(fact.get("served_tokens", 0) for fact in facts) == 32
    counts.asked(50, 0)
    facts = [store.facts() for store in stores]
    assert sum(fact.get("prompt_tokens", 0) for fact in facts) == 150, "they only grow"
