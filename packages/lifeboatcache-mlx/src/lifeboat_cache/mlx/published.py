"""What a prompt cache adds to ``lifeboat-cache status`` and the metrics."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Published"]


class Published:
    """Counts the tokens that did not have to be computed.

    Parameters
    ----------
    model
        What to call the model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._served = 0
        self._lock = threading.Lock()

    def served(self, tokens: int) -> None:
        """Count tokens whose KV was restored."""
        with self._lock:
            self._served += tokens

    def facts(self) -> dict[str, Any]:
        """What is published; asked on a thread of the store."""
        import mlx_lm

        return {
            "engine": "mlx-lm",
            "version": str(mlx_lm.__version__),
            "model": self._model,
            "served_tokens": self._served,
        }
