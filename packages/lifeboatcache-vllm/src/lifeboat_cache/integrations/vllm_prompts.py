"""What vLLM's prompts were made of, from the statistics that it keeps of each request.

vLLM tells a tier nothing of prompts as a whole, nor of what its own caches had. It sets these
statistics when a request is scheduled and completes them with its first token, once each;
both are watched here, passively.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from lifeboat_cache.interface import PromptCounts

__all__ = ["install", "prompts"]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_prompts"

#: More requests are not waited for: those that were given up before their first token stay.
_MOST_BEGUN = 1 << 16

#: Of this process.
prompts = PromptCounts()

_begun: dict[int, float] = {}  # when what was scheduled, by the identity of its statistics


def install() -> None:
    """Watch vLLM's statistics of prompts. Idempotent; without them there are no counts."""
    try:
        from vllm.v1.metrics.stats import PrefillStats

        if not hasattr(PrefillStats.finalize, _MARK):
            PrefillStats.set = _watched(PrefillStats.set, _scheduled)
            PrefillStats.finalize = _watched(PrefillStats.finalize, _first_token)
    except (ImportError, AttributeError) as exc:  # another release
        _log.info("LifeboatCache: this vLLM does not say what prompts are made of: %s", exc)


def _watched(original: Callable[..., None], note: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            note(self)
        except Exception:  # counts matter less than the engine
            _log.debug("LifeboatCache: a prompt was not counted", exc_info=True)

    setattr(method, _MARK, True)
    return method


def _scheduled(stats: Any) -> None:
    if len(_begun) >= _MOST_BEGUN:
        _begun.clear()
    _begun[id(stats)] = time.monotonic()


def _first_token(stats: Any) -> None:
    began = _begun.pop(id(stats), None)
    prompts.asked(stats.num_prompt_tokens, stats.num_cached_tokens)
    # In the time of the others something was loaded.
    if began is not None and not stats.num_external_cached_tokens:
        prompts.computed(stats.num_computed_tokens, began, time.monotonic())
