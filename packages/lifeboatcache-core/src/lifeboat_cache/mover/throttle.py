"""The bandwidth limit of a target."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Throttle"]

_log = logging.getLogger("lifeboat_cache")

#: What was not used may be used within so many seconds later.
_BURST_S = 0.25


class Throttle:
    """Starts transfers no faster than a limit allows, loads before stores.

    A transfer starts as soon as the one before it is paid for, so that one which is larger
    than a burst passes too.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._lanes: dict[str, deque[tuple[int, Callable[[], None]]]] = {
            "load": deque(),
            "store": deque(),
        }
        self._rate: float | None = None
        self._tokens = 0.0
        self._then = time.monotonic()
        self._thread: threading.Thread | None = None

    def limit(self, bytes_per_second: float | None) -> None:
        """Set the limit; ``None`` = none."""
        with self._ready:
            self._rate = bytes_per_second
            if bytes_per_second is not None and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)
                self._thread.start()
            self._ready.notify_all()

    def submit(self, lane: str, size: int, work: Callable[[], None]) -> None:
        """Do something that moves ``size`` bytes, now or when it may be. It must not wait."""
        with self._ready:
            if self._thread is not None:
                self._lanes[lane].append((size, work))
                self._ready.notify_all()
                return
        work()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not (self._lanes["load"] or self._lanes["store"]):
                    self._ready.wait()
                now = time.monotonic()
                rate = self._rate
                if rate is None:
                    # What passes meanwhile is not owed for when there is a limit again.
                    self._tokens, self._then = 0.0, now
                else:
                    earned = (now - self._then) * rate
                    self._tokens = min(self._tokens + earned, _BURST_S * rate)
                    self._then = now
                    if self._tokens <= 0:
                        self._ready.wait(min(0.5, -self._tokens / rate + 0.001))
                        continue
                size, work = (self._lanes["load"] or self._lanes["store"]).popleft()
                if rate is not None:
                    self._tokens -= size
            try:
                work()
            except Exception:  # the others must go on
                _log.exception("a transfer could not be started; please report this")
