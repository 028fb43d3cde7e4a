"""Whose blocks a store keeps, and which of its targets it uses, are found out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.job_queue import JobQueue
from lifeboat_cache.store.job_runner import JobRunner
from lifeboat_cache.store.protocol import State
from lifeboat_cache.store.storage import Storage
from lifeboat_cache.targets.base import Target

__all__ = ["Finder"]

_log = logging.getLogger("lifeboat_cache")


class Finder:
    """Finds and opens the storage of a store, and lets what has waited for it go on.

    Parameters
    ----------
    namespace
        Whose blocks, or a function that finds out.
    targets
        Tried in order; the first whose probe succeeds is used.
    storage, queue, runner, policy
        Those of the store.
    quiet
        Whether somebody else says it if no target is usable.
    """

    def __init__(
        self,
        namespace: Namespace | Callable[[], Namespace],
        targets: Sequence[Target],
        storage: Storage,
        queue: JobQueue,
        runner: JobRunner,
        policy: CodecPolicy,
        *,
        quiet: bool,
    ) -> None:
        self._find_namespace = namespace
        self._targets = targets
        self._storage = storage
        self._queue = queue
        self._runner = runner
        self._policy = policy
        self._quiet = quiet

    def find(self) -> bool:
        """Open the first usable target; if there is none, the store stands down."""
        try:
            found = self._find_namespace
            namespace = found if isinstance(found, Namespace) else found()
        except LifeboatError as exc:
            self.stand_down(str(exc))
            return False
        storage = self._storage
        for target in self._targets:
            try:
                target.probe()
                reader = target.reader(namespace)
            except (OSError, ValueError, LifeboatError) as exc:
                with storage.lock:
                    storage.skipped[target.name] = str(exc)
                if not self._quiet:
                    _log.warning("LifeboatCache: target %s is skipped: %s", target.name, exc)
                continue
            with storage.lock:
                storage.opened(namespace, target, reader)
                self._policy.opened(target)
                waiting = self._queue.take_waiting()
            self._start(waiting)
            return True
        self.stand_down(
            "no storage target is usable ("
            + (storage.why_skipped() or "none is configured")
            + "): "
            "run `lifeboat-cache doctor`"
        )
        return False

    def _start(self, waiting: Sequence[Job]) -> None:
        runner = self._runner
        for job in waiting:
            size = int(job.batch.buffers.sizes().sum())
            runner.executor.plan("store", partial(runner.start, job, size, size))

    def stand_down(self, reason: str) -> None:
        """Nothing is served or stored from now on."""
        storage = self._storage
        with storage.lock:
            if storage.state is not State.CLOSED:
                storage.state = State.DISABLED
            storage.reason = reason
            waiting = self._queue.take_waiting()
        self._queue.refuse(waiting, Outcome.DISABLED)
        if not self._quiet:
            _log.warning("LifeboatCache stands down: %s", reason)
