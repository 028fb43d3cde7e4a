"""What SGLang's prompts were made of, from the statistics that it keeps of each prefill batch.

SGLang tells a storage backend nothing of prompts as a whole, nor of what its own caches had.
It counts both when it forms a batch and shows them when the batch has run; both are watched
here, passively.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

from lifeboat_cache.interface import PromptCounts

__all__ = ["install", "prompts"]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_prompts"

#: What the ids of requests begin with that are no prompts of anybody; its own metrics leave
#: them out, too.
_HEALTH = "HEALTH_CHECK"

#: Of this process.
prompts = PromptCounts()


def install() -> None:
    """Watch SGLang's statistics of prefills. Idempotent; without them there are no counts."""
    try:
        from sglang.srt.managers.scheduler_components.batch_result_processor import (
            SchedulerBatchResultProcessor,
        )
        from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats

        if not hasattr(PrefillStats.from_adder, _MARK):
            _watch_batches(PrefillStats)
            _watch_results(SchedulerBatchResultProcessor)
    except (ImportError, AttributeError) as exc:  # another release
        _log.info("LifeboatCache: this SGLang does not say what prompts are made of: %s", exc)


def _watch_batches(stats: Any) -> None:
    original = stats.from_adder.__func__

    @functools.wraps(original)
    def from_adder(cls: Any, adder: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(cls, adder, *args, **kwargs)
        try:
            _formed(found, _probed(adder))
        except Exception:  # counts matter less than the engine
            _log.debug("LifeboatCache: a prefill was not counted", exc_info=True)
        return found

    setattr(from_adder, _MARK, True)
    stats.from_adder = classmethod(from_adder)


def _watch_results(processor: Any) -> None:
    original = processor.process_batch_result_prefill

    @functools.wraps(original)
    def process(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        stats = getattr(batch, "prefill_stats", None)  # gone when the batch goes on
        done = original(self, batch, *args, **kwargs)
        try:
            _ran(stats)
        except Exception:
            _log.debug("LifeboatCache: a prefill was not timed", exc_info=True)
        return done

    processor.process_batch_result_prefill = process


def _probed(adder: Any) -> int:
    """Tokens of a batch that SGLang asks itself for, whenever somebody asks whether it is well."""
    return sum(
        len(request.origin_input_ids)
        for request in adder.can_run_list
        if str(request.rid).startswith(_HEALTH)
    )


def _formed(stats: Any, probed: int) -> None:
    """A batch has been formed: the first part of a prompt counts what caches had of it."""
    stats.lifeboat_began = time.monotonic()
    # What was computed before and thrown away again is no prompt.
    computed = stats.log_input_tokens - stats.reprocessed_log_input_tokens
    cached = stats.log_device_hit_tokens + stats.log_host_hit_tokens + stats.log_storage_hit_tokens
    prompts.asked(max(0, computed + cached - probed), cached)


def _ran(stats: Any) -> None:
    began = getattr(stats, "lifeboat_began", None)
    if began is not None:
        prompts.computed(stats.log_input_tokens, began, time.monotonic())
