"""What the backend adds to ``lifeboat-cache status``, the agent's metrics and SGLang's."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from lifeboat_cache.integrations.sglang_moves import Moves
from lifeboat_cache.integrations.sglang_prompts import prompts
from lifeboat_cache.interface import PromptCounts

__all__ = ["Published", "storage_metrics"]


class Published:
    """Counts the tokens that one store has given back, and shows those of all prompts.

    Parameters
    ----------
    model
        What the server calls its model.
    first
        Whether this is the first of the ranks that hold parts of the same tokens: tokens
        count once.
    counts
        Where the process counts them.
    """

    def __init__(self, model: str, first: bool = True, counts: PromptCounts = prompts) -> None:
        self._model = model
        self._first = first
        self._counts = counts
        self._served = 0
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def served(self, tokens: int) -> None:
        """Count tokens whose KV was loaded; pools beside KV hold the same tokens."""
        if tokens:
            with self._lock:
                self._served += tokens
            self._counts.served(tokens)

    def facts(self) -> dict[str, Any]:
        """What is published; asked on a thread of the store."""
        import sglang

        return {
            "engine": "sglang",
            "version": str(sglang.__version__),
            "model": self._model,
            **self._tokens(),
        }

    def _tokens(self) -> dict[str, float]:
        if not self._first:
            return {}
        for name, more in self._counts.take().items():
            self._sums[name] += more
        return {**self._sums, "served_tokens": self._served}


def storage_metrics(moves: Moves) -> Any:
    """What SGLang exports as its storage metrics: the calls since the last time."""
    from sglang.srt.observability.metrics_collector import StorageMetrics

    metrics = StorageMetrics()
    for kind, pages, rates in (
        ("load", metrics.prefetch_pgs, metrics.prefetch_bandwidth),
        ("store", metrics.backup_pgs, metrics.backup_bandwidth),
    ):
        for count, size, seconds in moves.take(kind):
            pages.append(count)
            rates.append(size / seconds / 1e9 if seconds > 0 else 0.0)
    return metrics
