"""Who does the I/O of a store: native threads once kernels are there, Python until then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from lifeboat_cache import kernels
from lifeboat_cache.checksum import ALGORITHM_XXH3
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.io_python import execute
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.store.native_pool import NativePool
from lifeboat_cache.store.workers import Lane, WorkerPool

__all__ = ["Executor"]

_log = logging.getLogger("lifeboat_cache")

#: A job is cut into parts of about this many bytes: enough of them to keep every
#: thread busy with one big job, each big enough for the device.
_PART_BYTES = 8 << 20
#: Small jobs are cut finer, but not below this.
_LEAST_PART_BYTES = 2 << 20


class Executor:
    """Runs I/O tasks, loads before stores, and the planning that leads to them.

    Parameters
    ----------
    threads
        I/O threads.
    finished
        Called with finished tasks, on one of several threads. It must not raise.
    key
        The integrity key, if there is one.
    """

    def __init__(
        self, threads: int, finished: Callable[[list[IoTask]], None], key: bytes | None = None
    ) -> None:
        self._threads = max(1, threads)
        self._finished = finished
        self._key = key
        self._python = WorkerPool(threads)
        self._native: NativePool | None = None
        self._stopping: NativePool | None = None
        self._lock = threading.Lock()
        self._cancelling = False
        self._failed = False
        self._stopped = False

    @property
    def native(self) -> bool:
        """Whether native threads do what they can."""
        return self._native is not None

    def upgrade(self) -> None:
        """Start the native threads if the kernels are there and they do not run yet."""
        with self._lock:
            if self._native is not None or self._failed or not kernels.ready():
                return
        try:
            pool = NativePool(self._threads, self._finished)
        except Exception as exc:  # no descriptors, no threads: Python goes on doing it
            self._failed = True
            _log.warning("LifeboatCache: native I/O threads cannot be started (%s)", exc)
            return
        with self._lock:
            pool.cancel(self._cancelling)
            if not self._stopped:
                self._native = pool
                return
        pool.stop()

    def part_bytes(self, total: int) -> int:
        """Size of the parts into which a job of ``total`` bytes is cut."""
        return min(max(total // self._threads, _LEAST_PART_BYTES), _PART_BYTES)

    def plan(self, lane: Lane, work: Callable[[], None]) -> None:
        """Run something that needs Python, on a background thread. It must not raise."""
        self._python.submit(lane, [work])

    def submit(self, tasks: Sequence[IoTask]) -> None:
        """Run I/O tasks of one job."""
        with self._lock:
            native = self._native
        fast: list[IoTask] = []
        slow: list[IoTask] = []
        for task in tasks:
            (fast if native is not None and _native_can(task) else slow).append(task)
        if native is not None and fast:
            progress = fast[0].progress
            if progress is not None:
                progress[0] += len(fast)
            left = native.submit(fast)
            if progress is not None:
                progress[0] -= len(left)
            slow += left
        for task in slow:
            lane: Lane = "load" if task.kind == "load" else "store"
            self._python.submit(lane, [partial(self._execute, task)])

    def _execute(self, task: IoTask) -> None:
        if self._cancelling:
            task.outcomes[:] = Outcome.CANCELLED
        else:
            try:
                execute(task, self._key)
            except Exception:  # a fault of ours: the part fails, the engine goes on
                _log.exception("LifeboatCache: a %s failed; please report this", task.kind)
                task.outcomes[:] = Outcome.FAILED
        self._finished([task])

    def cancel(self, wanted: bool) -> None:
        """Whether tasks that have not started end as ``CANCELLED``."""
        with self._lock:
            self._cancelling = wanted
            if self._native is not None:
                self._native.cancel(wanted)

    def stop(self) -> None:
        """Let the threads end as soon as nothing is under way, without waiting for it."""
        self._python.stop()
        with self._lock:
            native, self._native = self._native, None
            self._stopped = True
        if native is not None:
            self._stopping = native
            native.stop()

    def join(self, timeout: float) -> None:
        """Wait until the threads have ended, but not much longer than so many seconds each."""
        self._python.join(timeout)
        if self._stopping is not None:
            self._stopping.join(timeout)


def _native_can(task: IoTask) -> bool:
    if task.coding is not None and not task.coding.native:
        return False
    # Looked through as bytes: numpy takes ten times as long for as few.
    algorithms = task.algorithms.tobytes()
    return algorithms.count(ALGORITHM_XXH3) == len(algorithms)
