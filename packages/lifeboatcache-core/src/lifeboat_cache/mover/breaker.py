"""The circuit breaker of a target: it stops asking a target that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

__all__ = ["Breaker", "BreakerState"]

#: So many jobs in a row that fail open it.
_MOST_FAILURES = 3

#: Seconds until the target is tried again: at first, and at most.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 30.0


class BreakerState(Enum):
    """Whether a target is asked."""

    CLOSED = "closed"
    OPEN = "open"
    #: A probe is under way; nothing else is asked.
    HALF_OPEN = "half-open"


class Breaker:
    """Closed as long as a target answers; opened by errors and by deadlines that pass.

    A deadline that passes while nothing else was answered either opens it at once: the
    target hangs. A deadline or an error among answers opens it if it is the third in a row.
    While it is open the target is probed, at first after a second, then ever more rarely;
    a probe that succeeds closes it. Thread-safe.

    Parameters
    ----------
    deadline_s
        Of a probe.
    clock
        Seconds that nobody sets.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._reason = ""
        self._failures = 0
        self._opened = 0
        self._since = clock()
        self._pause_s = _LEAST_PAUSE_S
        self._retry = 0.0
        self._answered = clock()

    @property
    def state(self) -> BreakerState:
        """Whether the target is asked."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether jobs may be given to the target."""
        return self._state is BreakerState.CLOSED

    @property
    def reason(self) -> str:
        """Why it is not closed; empty if it is."""
        return self._reason

    @property
    def opened(self) -> int:
        """How often it has opened."""
        return self._opened

    def retry_in(self) -> float:
        """Seconds until the target is tried again; 0.0 if it is in use, or tried just now."""
        with self._lock:
            waits = self._state is BreakerState.OPEN
            return max(0.0, self._retry - self._clock()) if waits else 0.0

    def succeeded(self) -> None:
        """Say that the target has done what it was asked."""
        with self._lock:
            self._answered = self._clock()
            self._failures = 0

    def failed(self, why: str) -> None:
        """Say that the target has answered with an error."""
        with self._lock:
            self._answered = self._clock()
            self._fail(why)

    def timed_out(self, asked: float, why: str) -> None:
        """Say that a deadline has passed.

        Parameters
        ----------
        asked
            When the target was asked, by the breaker's clock.
        why
            For people.
        """
        with self._lock:
            if self._answered <= asked:
                self._open(why)
            else:
                self._fail(why)

    def _fail(self, why: str) -> None:
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            self._open(why)

    def _open(self, why: str) -> None:
        if self._state is not BreakerState.CLOSED:
            return
        self._state, self._reason = BreakerState.OPEN, why
        self._opened += 1
        self._pause_s = _LEAST_PAUSE_S
        self._retry = self._clock() + self._pause_s

    def wants_probe(self) -> bool:
        """Whether to probe the target now; asked every now and then. True begins a probe."""
        with self._lock:
            now = self._clock()
            if self._state is BreakerState.HALF_OPEN and now >= self._since + self._deadline_s:
                self._again(self._reason)
            if self._state is not BreakerState.OPEN or now < self._retry:
                return False
            self._state, self._since = BreakerState.HALF_OPEN, now
            return True

    def probed(self, good: bool, why: str = "") -> bool:
        """Take in the answer to a probe, however late; whether the target is in use again."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return False
            if not good:
                self._again(why or self._reason)
                return False
            self._reset()
            return True

    def _again(self, why: str) -> None:
        self._state, self._reason = BreakerState.OPEN, why
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
        self._retry = self._clock() + self._pause_s

    def reset(self) -> None:
        """Begin anew: whoever asks the target now is another process."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        self._state, self._reason = BreakerState.CLOSED, ""
        self._failures, self._pause_s = 0, _LEAST_PAUSE_S
        self._answered = self._clock()
