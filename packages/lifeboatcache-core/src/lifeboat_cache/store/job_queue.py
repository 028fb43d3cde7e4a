"""Jobs of a store on one target, from when they are admitted until they are handed out."""

from __future__ import annotations

import logging
import threading
from collections import deque

from lifeboat_cache import spans
from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.job import Job
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.counters import Counters
from lifeboat_cache.store.notices import Notices
from lifeboat_cache.store.protocol import State
from lifeboat_cache.store.storage import Storage

__all__ = ["JobQueue"]

_log = logging.getLogger("lifeboat_cache")


class JobQueue:
    """Keeps the jobs under way, and bounds the bytes that wait to be written. Thread-safe.

    Parameters
    ----------
    storage
        Its state says what is admitted; its lock guards this, too.
    counters, notices
        Where finished jobs are counted, and what was not kept is said.
    pending_bytes
        Stores beyond so many queued bytes are refused.

    Attributes
    ----------
    under_way
        Jobs that are not done.
    """

    def __init__(
        self, storage: Storage, counters: Counters, notices: Notices, pending_bytes: int
    ) -> None:
        self._storage = storage
        self._counters = counters
        self._notices = notices
        self._pending_limit = pending_bytes
        self._pending = 0
        self._waiting: list[Job] = []  # stores that came before the target was known
        self.under_way: set[Job] = set()
        self._finished: deque[Job] = deque()

    # Admission --------------------------------------------------------------

    def admit_load(self, job: Job) -> None:
        """Take a load on.

        Raises
        ------
        StoreClosedError
            If the store is closed.
        """
        with self._storage.lock:
            if self._storage.state is State.CLOSED:
                raise StoreClosedError("the block store is closed: open a new one")
            self.under_way.add(job)

    def admit_store(self, job: Job, size: int) -> Outcome | None:
        """Take a store of so many bytes on.

        Returns
        -------
        Outcome or None
            ``None`` if it is to be started, ``PENDING`` if it waits until the target is known,
            or why it is refused.

        Raises
        ------
        StoreClosedError
            If the store is closed.
        """
        with self._storage.lock:
            state = self._storage.state
            if state is State.CLOSED:
                raise StoreClosedError("the block store is closed: open a new one")
            self.under_way.add(job)
            if state is State.DISABLED:
                return Outcome.DISABLED
            if self._pending and self._pending + size > self._pending_limit:
                return Outcome.BUSY
            self._pending += size
            if state is State.OPENING:
                self._waiting.append(job)
                return Outcome.PENDING
        return None

    def take_waiting(self) -> list[Job]:
        """Stores that have waited for the target: they are the caller's now. Under the lock."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def refuse(self, jobs: list[Job], outcome: Outcome) -> None:
        """End stores that have waited for the target."""
        for job in jobs:
            size = int(job.batch.buffers.sizes().sum())
            job.outcomes[:] = outcome
            self.finish(job, size)

    # Completion -------------------------------------------------------------

    def finish(self, job: Job, reserved: int) -> None:
        """The last part of ``job`` is done."""
        if job.finish_part():
            self.complete(job, reserved)

    def complete(self, job: Job, reserved: int) -> None:
        """See to it that the owner of ``job``, which is done, hears of it.

        ``reserved`` bytes of it have waited to be written.
        """
        target = self._storage.target
        self._counters.job(job)
        spans.note_job(job, "" if target is None else target.name)
        if job.kind == "store":
            self._notices.full(job, target)
        interrupted: BaseException | None = None
        if not job.polled:
            try:
                job.publish()
            except BaseException as exc:  # the callback must not leave the job under way
                _log.exception("LifeboatCache: a completion callback failed")
                # Whoever presses Ctrl-C while a job is refused means it.
                if threading.current_thread() is threading.main_thread():
                    interrupted = exc if isinstance(exc, KeyboardInterrupt) else None
        with self._storage.idle:
            self._pending -= reserved
            self.under_way.discard(job)
            if job.polled:  # under the lock: who has waited for the job finds it polled
                self._finished.append(job)
                job.publish()
            self._storage.idle.notify_all()
        if interrupted is not None:
            raise interrupted

    def poll(self) -> list[Job]:
        """Jobs without ``on_done`` that are done since the last call."""
        with self._storage.lock:
            out = list(self._finished)
            self._finished.clear()
        return out

    def facts(self) -> dict[str, int]:
        """Jobs under way, bytes waiting to be written, and the bound of these bytes."""
        with self._storage.lock:
            return {
                "jobs": len(self.under_way),
                "pending_bytes": self._pending,
                "limit_bytes": self._pending_limit,
            }

    def after_fork(self) -> None:
        """In a forked child: the jobs are the parent's."""
        self._waiting, self.under_way, self._finished = [], set(), deque()
