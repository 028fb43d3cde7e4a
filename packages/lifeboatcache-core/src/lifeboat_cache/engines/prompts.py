"""What an engine's prompts were made of, and the prefill that stored KV has saved."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["PromptCounts"]

#: A prefill of fewer tokens says more about the engine's loop than about its speed.
_LEAST_TOKENS = 256

#: The rate is that of so many prefills.
_WINDOW = 64


class PromptCounts:
    """Counts tokens of prompts. Thread-safe.

    What is taken can be added up over stores of one process: each token is given out once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._more: dict[str, float] = {}
        self._unpriced = 0  # tokens served before a rate was known
        self._measured: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._tokens, self._seconds = 0, 0.0  # of these
        self._warm = False
        self._until = 0.0

    def asked(self, tokens: int, cached: int) -> None:
        """Count the prompt of a request.

        Parameters
        ----------
        tokens
            How long it is.
        cached
            How many of them the engine did not compute, whoever kept their KV.
        """
        with self._lock:
            self._add("prompt_tokens", tokens)
            self._add("cached_tokens", min(cached, tokens))

    def served(self, tokens: int) -> None:
        """Count tokens whose KV was loaded and not computed."""
        with self._lock:
            self._add("served_tokens", tokens)
            self._unpriced += tokens

    def computed(self, tokens: int, began: float, ended: float) -> None:
        """Count a prefill: tokens that the engine has computed, and when.

        Those that run at once share their time. The first of a process is left out, in which
        engines warm up.

        Parameters
        ----------
        tokens
            How many were computed.
        began, ended
            When, by a clock of the process; prefills come in the order of their ends.
        """
        if tokens < _LEAST_TOKENS:
            return
        with self._lock:
            seconds = ended - max(began, self._until)
            self._until = max(ended, self._until)
            if not self._warm:
                self._warm = True
                return
            seconds = max(0.0, seconds)
            self._add("prefill_tokens", tokens)
            self._add("prefill_seconds", seconds)
            if len(self._measured) == _WINDOW:
                old = self._measured[0]
                self._tokens -= old[0]
                self._seconds -= old[1]
            self._measured.append((tokens, seconds))
            self._tokens += tokens
            self._seconds += seconds

    def take(self) -> dict[str, float]:
        """What has been counted since the last call, by name.

        ``prompt_tokens``, ``cached_tokens``, ``served_tokens``; ``prefill_tokens`` and
        ``prefill_seconds``, the prefills that were measured; ``saved_seconds``, how long the
        engine would have computed what was served, at the rate of its last prefills. What is
        not known is left out: without a measured prefill, the seconds.
        """
        with self._lock:
            if self._unpriced and self._seconds > 0:
                self._add("saved_seconds", self._unpriced * self._seconds / self._tokens)
                self._unpriced = 0
            more, self._more = self._more, {}
        return more

    def _add(self, name: str, amount: float) -> None:
        self._more[name] = self._more.get(name, 0) + amount
