"""Slows requests down when a server asks for it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]

_LEAST_S, _MOST_S = 0.05, 5.0


class Pace:
    """Keeps requests apart after a server has asked for fewer, and lets them go again.

    Each answer of that kind doubles the pause before every request, each good answer takes a
    fourth off it. Thread-safe.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._next = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds between requests now; 0.0 as long as nobody has asked for fewer."""
        return self._pause_s

    def wait(self, deadline: float | None = None) -> bool:
        """Wait until the next request may be sent; False if that would be after the deadline."""
        if not self._pause_s:
            return True
        with self._lock:
            now = self._clock()
            at = max(self._next, now)
            if deadline is not None and at > deadline:
                return False
            # Not all at the same moment after a pause, also not those of other hosts.
            self._next = at + self._pause_s * random.uniform(0.75, 1.25)
        if at > now:
            self._sleep(at - now)
        return True

    def slower(self) -> None:
        """Say that the server asks for fewer requests."""
        with self._lock:
            self._pause_s = min(_MOST_S, max(_LEAST_S, 2 * self._pause_s))
            self._next = max(self._next, self._clock() + self._pause_s)

    def good(self) -> None:
        """Say that a request was answered."""
        if not self._pause_s:
            return
        with self._lock:
            self._pause_s *= 0.75
            if self._pause_s < _LEAST_S / 4:
                self._pause_s = 0.0
