"""Tokens of prompts, from the statistics that SGLang keeps of each prefill batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats

from lifeboat_cache.integrations import sglang_prompts
from lifeboat_cache.integrations.sglang_published import Published
from lifeboat_cache.interface import PromptCounts


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptCounts]:
    formed = PrefillStats.__dict__["from_adder"]
    ran = SchedulerBatchResultProcessor.process_batch_result_prefill
    counts = PromptCounts()
    monkeypatch.setattr(sglang_prompts, "prompts", counts)
    sglang_prompts.install()
    sglang_prompts.install()
    yield counts
    PrefillStats.from_adder = formed
    SchedulerBatchResultProcessor.process_batch_result_prefill = ran


def request(rid: str = "1", tokens: int = 600) -> Any:
    return SimpleNamespace(rid=rid, origin_input_ids=[0] * tokens)


def batch(
    computed: int,
    device: int = 0,
    host: int = 0,
    storage: int = 0,
    again: int = 0,
    requests: Sequence[Any] = (request(),),
) -> Any:
    """What the scheduler does for a batch."""
    adder = SimpleNamespace(
        log_input_tokens=computed,
        log_replay_tokens=0,
        log_hit_tokens=device + host + storage,
        reprocessed_log_input_tokens=again,
        reprocessed_log_hit_tokens=0,
        log_device_hit_tokens=device,
        log_host_hit_tokens=host,
        log_storage_hit_tokens=storage,
        new_token_ratio=0.5,
        can_run_list=list(requests),
    )
    return SimpleNamespace(prefill_stats=PrefillStats.from_adder(adder, []))


def test_prompts_are_counted_as_batches_are_formed(counts: PromptCounts) -> None:
    batch(600, device=100, host=200, storage=100)
    assert counts.take() == {"prompt_tokens": 1000, "cached_tokens": 400}
    batch(600, again=250)  # of a request that had been thrown out
    assert counts.take() == {"prompt_tokens": 350, "cached_tokens": 0}


def test_questions_whether_sglang_is_well_are_no_prompts(counts: PromptCounts) -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    probe = request(f"{HEALTH_CHECK_RID_PREFIX}_1734.5", 1)
    batch(1, requests=[probe])
    assert not counts.take().get("prompt_tokens")
    batch(601, requests=[request(), probe])
    assert counts.take()["prompt_tokens"] == 600


def test_batches_are_timed_when_they_have_run(
    counts: PromptCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class Processor:
        def process_batch_result_prefill(self, batch: Any, result: Any) -> str:
            given.append(result)
            batch.prefill_stats = None
            return "done"

    sglang_prompts._watch_results(Processor)
    for number in range(3):
        assert Processor().process_batch_result_prefill(batch(512), number) == "done"
    assert given == [0, 1, 2]
    taken = counts.take()
    assert taken["prefill_tokens"] == 1024, "without the first"
    assert taken["prefill_seconds"] >= 0


def test_a_fault_of_ours_is_none_of_sglangs(
    counts: PromptCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(counts, "asked", broken)
    assert batch(600).prefill_stats.log_input_tokens == 600


def test_ranks_that_share_tokens_count_them_once() -> None:
    counts = PromptCounts()
    first, second = Published("m", True, counts), Published("m", False, PromptCounts())
    for one in (first, second):
        one.served(64)
    assert first.facts()["served_tokens"] == 64
    assert "served_tokens" not in second.facts()
