"""Jobs that a store hands on to others: admitted, finished, polled, waited for."""

from __future__ import annotations

import logging
import threading
from collections import deque

from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.job import Job
from lifeboat_cache.store.counters import Counters

__all__ = ["JobDesk"]

_log = logging.getLogger("lifeboat_cache")


class JobDesk:
    """Keeps the jobs under way. Thread-safe.

    Parameters
    ----------
    counters
        Where finished jobs are counted.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._idle = threading.Condition()
        self._jobs: set[Job] = set()
        self._finished: deque[Job] = deque()
        self._closed = False
        self._loads = 0

    def admit(self, job: Job) -> None:
        """Take a job on.

        Raises
        ------
        StoreClosedError
            After :meth:`close`.
        """
        with self._idle:
            if self._closed:
                raise StoreClosedError("the block store is closed: open a new one")
            self._jobs.add(job)
            self._loads += job.kind == "load"

    def finish_part(self, job: Job, moved: int = 0) -> None:
        """A part of a job is done; see to it that its owner hears if it was the last one."""
        if not job.finish_part(moved):
            return
        self._counters.job(job)
        interrupted: BaseException | None = None
        if not job.polled:
            try:
                job.publish()
            except BaseException as exc:  # the callback must not leave the job under way
                _log.exception("LifeboatCache: a completion callback failed")
                # Whoever presses Ctrl-C while a job is refused means it.
                if threading.current_thread() is threading.main_thread():
                    interrupted = exc if isinstance(exc, KeyboardInterrupt) else None
        with self._idle:
            self._jobs.discard(job)
            self._loads -= job.kind == "load"
            if job.polled:  # under the lock: who has waited for the job finds it polled
                self._finished.append(job)
                job.publish()
            self._idle.notify_all()
        if interrupted is not None:
            raise interrupted

    def poll(self) -> list[Job]:
        """Jobs without ``on_done`` that are done since the last call."""
        with self._idle:
            out = list(self._finished)
            self._finished.clear()
        return out

    @property
    def under_way(self) -> int:
        """Jobs that are not done."""
        return len(self._jobs)

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until no job is under way; whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._jobs, timeout)

    def wait_loads(self, timeout: float) -> None:
        """Wait for a moment without loads, but not longer than so many seconds."""
        if self._loads:
            with self._idle:
                self._idle.wait_for(lambda: not self._loads, timeout)

    def close(self) -> bool:
        """Admit nothing any more; whether it was open until now."""
        with self._idle:
            was, self._closed = self._closed, True
        return not was
