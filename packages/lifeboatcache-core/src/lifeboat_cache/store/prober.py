"""Asking storage something that it may never answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

__all__ = ["Prober"]

_log = logging.getLogger("lifeboat_cache")


class Prober:
    """Runs one question at a time on a thread that may be left behind.

    A system call on a dead mount cannot be given up. As long as one has not returned,
    nothing else is asked.

    Parameters
    ----------
    name
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._answer: Hashable = None
        self._error: Exception | None = None

    def ask(self, question: Callable[[], Hashable]) -> bool:
        """Ask, unless an answer is being waited for; whether it was asked."""
        if self.busy:
            return False

        def work() -> None:
            try:
                self._answer = question()
            except Exception as exc:  # what it cannot do is what is asked
                self._error = exc

        self._answer, self._error = None, None
        self._asked = time.monotonic()
        thread = threading.Thread(target=work, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no threads are left just now
            return False
        self._thread = thread
        return True

    @property
    def busy(self) -> bool:
        """Whether there is no answer yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waiting_s(self) -> float:
        """For how many seconds there has been none; 0 if nothing is asked."""
        return time.monotonic() - self._asked if self.busy else 0.0

    def take(self) -> tuple[Hashable, Exception | None] | None:
        """The answer, or why there is none, once; ``None`` if nothing new is known."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        return self._answer, self._error
