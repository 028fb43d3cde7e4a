"""What the backend adds to ``lifeboat-cache status``, the agent's metrics and SGLang's."""

from __future__ import annotations

import threading
from typing import Any

from lifeboat_cache.integrations.sglang_moves import Moves

__all__ = ["Published", "storage_metrics"]


class Published:
    """Counts the tokens that one store has given back.

    Parameters
    ----------
    model
        What the server calls its model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._served = 0
        self._lock = threading.Lock()

    def served(self, tokens: int) -> None:
        """Count tokens whose KV was loaded; pools beside KV hold the same tokens."""
        with self._lock:
            self._served += tokens

    def facts(self) -> dict[str, Any]:
        """What is published; asked on a thread of the store."""
        import sglang

        return {
            "engine": "sglang",
            "version": str(sglang.__version__),
            "model": self._model,
            "served_tokens": self._served,
        }


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
