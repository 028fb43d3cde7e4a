"""Memory in which blocks are stored before it is known how long they become."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.system import io_memory

__all__ = ["Staging", "StagingArea"]

#: Bytes that stored blocks may take in memory until they are written.
_LIMIT_BYTES = 128 << 20

#: Pieces of memory that are kept for the next use; new ones cost page faults.
_KEPT = 8


@dataclass(eq=False)
class Staging:
    """Memory of one encode task.

    Attributes
    ----------
    memory
        uint8, on a page boundary.
    parts
        Writes out of it that are under way.
    """

    memory: npt.NDArray[np.uint8]
    parts: int = 0


class StagingArea:
    """Hands out memory to encode tasks, no more at a time than there may be.

    Parameters
    ----------
    start
        Called with tasks that have their memory, outside all locks.
    failed
        Called with tasks for which the system has none, outside all locks.
    """

    def __init__(
        self, start: Callable[[list[IoTask]], None], failed: Callable[[list[IoTask]], None]
    ) -> None:
        self._start, self._failed = start, failed
        self._lock = threading.Lock()
        self._waiting: deque[IoTask] = deque()
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._used = 0

    def submit(self, tasks: list[IoTask]) -> None:
        """Start encode tasks, now or when others have been written."""
        with self._lock:
            self._waiting.extend(tasks)
        self._go_on()

    def take(self, task: IoTask) -> Staging:
        """The memory of a task that is done. It has to be released."""
        if task.staging is None:
            raise ValueError("not an encode task under way")
        return Staging(task.staging)

    def release(self, staging: Staging) -> None:
        """Give memory back, of which nothing is under way any more."""
        with self._lock:
            self._used -= staging.memory.nbytes
            if len(self._kept) < _KEPT:
                self._kept.append(staging.memory)
        self._go_on()

    def _go_on(self) -> None:
        ready: list[IoTask] = []
        lost: list[IoTask] = []
        with self._lock:
            while self._waiting:
                task = self._waiting[0]
                size = _bytes_of(task)
                if self._used and self._used + size > _LIMIT_BYTES:
                    break
                try:
                    task.staging = self._memory(size)
                except (MemoryError, OSError):
                    lost.append(self._waiting.popleft())
                    continue
                self._used += task.staging.nbytes
                ready.append(self._waiting.popleft())
        if ready:
            self._start(ready)
        if lost:
            self._failed(lost)

    def _memory(self, size: int) -> npt.NDArray[np.uint8]:
        fitting = [kept for kept in self._kept if size <= kept.nbytes <= 2 * size]
        if fitting:
            found = min(fitting, key=lambda kept: kept.nbytes)
            self._kept = [kept for kept in self._kept if kept is not found]
            return found
        return io_memory(size)


def _bytes_of(task: IoTask) -> int:
    if task.places is None:
        raise ValueError("not an encode task")
    return max(int(task.places[-1]), mmap.PAGESIZE)
