"""Whether a bucket answers, so that not every load has to find out by waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Health"]

#: So many requests in a row that get no answer, and it is left alone …
_MOST_FAILURES = 2
#: … for so many seconds: at first, and at most.
_LEAST_S, _MOST_S = 0.5, 8.0


class Health:
    """Remembers how requests ended. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = _LEAST_S
        self._until = 0.0
        self._trying = False  # one has been let through after a pause
        self.problem = ""

    def may_try(self) -> bool:
        """Whether to send a request. Of many that ask after a pause, one may."""
        if not self._until:
            return True
        with self._lock:
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause_s
            self._trying = True
            return True

    def good(self) -> None:
        """Say that it has answered."""
        if not (self._failures or self.problem):
            return
        with self._lock:
            self._failures, self._pause_s, self._until = 0, _LEAST_S, 0.0
            self._trying = False
            self.problem = ""

    def bad(self, problem: str) -> None:
        """Say that it has not."""
        with self._lock:
            self.problem = problem
            if self._clock() < self._until and not self._trying:
                return  # of many that were under way when the pause began, the first has counted
            self._trying = False
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                self._until = self._clock() + self._pause_s
                self._pause_s = min(_MOST_S, 2 * self._pause_s)
