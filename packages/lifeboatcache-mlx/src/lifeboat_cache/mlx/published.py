"""What a prompt cache adds to ``lifeboat-cache status`` and the metrics."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lifeboat_cache.interface import PromptCounts

__all__ = ["Published"]


class Published:
    """Counts the tokens of prompts, and those that did not have to be computed.

    Parameters
    ----------
    model
        What to call the model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = PromptCounts()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def asked(self, tokens: int, held: int, served: int) -> None:
        """Count a prompt.

        Parameters
        ----------
        tokens
            How long it is.
        held, served
            How many of them a cache in memory had, and how many more were restored.
        """
        self._counts.asked(tokens, held + served)
        if served:
            self._counts.served(served)

    def computed(self, tokens: int, began: float, ended: float) -> None:
        """Count a prefill that was timed."""
        self._counts.computed(tokens, began, ended)

    def facts(self) -> dict[str, Any]:
        """What is published; asked on a thread of the store."""
        import mlx_lm

        for name, more in self._counts.take().items():
            self._sums[name] += more
        return {
            "engine": "mlx-lm",
            "version": str(mlx_lm.__version__),
            "model": self._model,
            **self._sums,
        }
