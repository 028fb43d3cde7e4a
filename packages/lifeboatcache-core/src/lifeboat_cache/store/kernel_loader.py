"""Compiled kernels are taken into use as soon as there are any."""

from __future__ import annotations

import threading
import time

from lifeboat_cache import kernels
from lifeboat_cache.store.executor import Executor

__all__ = ["KernelLoader"]

#: How often it is looked whether kernels are there, in seconds.
_LOOK_S = 0.02


class KernelLoader:
    """Loads kernels on a thread of its own: the disk that they are on may hang.

    Parameters
    ----------
    executor
        Who uses them.
    stop
        Set when the store is being closed.
    """

    def __init__(self, executor: Executor, stop: threading.Event) -> None:
        self._executor = executor
        self._stop = stop
        self._thread: threading.Thread | None = None

    def load(self, wait_s: float = 0.0) -> None:
        """Use compiled kernels as soon as there are any, without depending on their disk."""
        loader = self._thread
        if self._executor.native:
            return
        if loader is None or not loader.is_alive():
            loader = threading.Thread(target=self._upgrade, name="lifeboat-kernels", daemon=True)
            try:
                loader.start()
            except RuntimeError:  # no threads are left: it goes on without kernels
                return
            self._thread = loader
        loader.join(wait_s)

    def wait(self, timeout: float) -> None:
        """Wait until what is being loaded is there, or cannot be had, or the store is closed."""
        end = time.monotonic() + timeout
        loader = self._thread
        while loader is not None and loader.is_alive() and time.monotonic() < end:
            if self._stop.wait(_LOOK_S):
                return

    def _upgrade(self) -> None:
        if kernels.load() and not self._stop.is_set():
            self._executor.upgrade()
