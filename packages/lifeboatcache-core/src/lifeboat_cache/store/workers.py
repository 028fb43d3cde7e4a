"""Threads that do the I/O of a process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

__all__ = ["WorkerPool"]

_log = logging.getLogger("lifeboat_cache")

Lane = Literal["load", "store"]


class WorkerPool:
    """Raw daemon threads that run loads before stores.

    Not ``concurrent.futures``: its threads are joined at exit, where one that is
    stuck in a system call would hold the process.

    Parameters
    ----------
    threads
        How many threads, at most.

    Raises
    ------
    RuntimeError
        If not one can be started.
    """

    def __init__(self, threads: int) -> None:
        self._ready = threading.Condition()
        self._lanes: dict[Lane, deque[Callable[[], None]]] = {"load": deque(), "store": deque()}
        self._stopping = False
        self._threads: list[threading.Thread] = []
        for number in range(max(1, threads)):
            thread = threading.Thread(target=self._run, name=f"lifeboat-io-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more: fewer do as well
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    @property
    def threads(self) -> int:
        """Number of threads."""
        return len(self._threads)

    def submit(self, lane: Lane, tasks: list[Callable[[], None]]) -> None:
        """Queue tasks. They must not raise."""
        with self._ready:
            self._lanes[lane].extend(tasks)
            self._ready.notify(len(tasks))

    def _run(self) -> None:
        while True:
            with self._ready:
                while not (self._lanes["load"] or self._lanes["store"]):
                    if self._stopping:
                        return
                    self._ready.wait()
                lane = self._lanes["load"] or self._lanes["store"]
                task = lane.popleft()
            try:
                task()
            except BaseException:  # nothing must take the thread away
                _log.exception("LifeboatCache: an I/O task failed; please report this")
            del task  # it holds the caller's memory

    def stop(self) -> None:
        """Let the threads end once the queues are empty."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()

    def join(self, timeout: float) -> None:
        """Wait until the threads have ended, but not longer than so many seconds."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
