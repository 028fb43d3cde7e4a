"""The background thread of a store, from its opening to its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from lifeboat_cache.store.burials import Burials
from lifeboat_cache.store.executor import Executor
from lifeboat_cache.store.finder import Finder
from lifeboat_cache.store.follower import Follower
from lifeboat_cache.store.household import Companion
from lifeboat_cache.store.kernel_loader import KernelLoader
from lifeboat_cache.store.protocol import State, Store
from lifeboat_cache.store.storage import Storage

__all__ = ["Keeper"]

_log = logging.getLogger("lifeboat_cache")

#: How often other writers' journals are looked at, in seconds.
_TAIL_S = 2.0

#: How often accesses are written down, in seconds.
_ACCESS_S = 20.0

#: Recovery waits so many seconds for compiled kernels to be loaded …
_KERNELS_S = 1.0
#: … and so many more where blocks are stored: without kernels most of them would be missed.
_MORE_KERNELS_S = 10.0


class Keeper:
    """Opens the storage of a store, recovers, then looks after it every few seconds.

    Parameters
    ----------
    storage, executor, burials
        Those of the store.
    finder, follower
        What is done first, and what is done again and again.
    flush_accesses
        Writes down which blocks were used.
    shared_lookup
        Whether to follow other processes, too.
    stop
        Set when the store is being closed.

    Attributes
    ----------
    follower
        As given.
    recovered
        Set when journals have been read, or the store stands down.
    """

    def __init__(
        self,
        storage: Storage,
        executor: Executor,
        burials: Burials,
        finder: Finder,
        follower: Follower,
        flush_accesses: Callable[[], None],
        *,
        shared_lookup: bool,
        stop: threading.Event,
    ) -> None:
        self._storage = storage
        self._executor = executor
        self._burials = burials
        self._finder = finder
        self.follower = follower
        self._flush_accesses = flush_accesses
        self._shared_lookup = shared_lookup
        self._stop = stop
        self._kernels = KernelLoader(executor, stop)
        self._thread: threading.Thread | None = None
        self.recovered = threading.Event()

    def start(self, store: Store, companion: Companion) -> None:
        """Begin; ``companion`` is told how ``store`` does.

        Raises
        ------
        RuntimeError
            If the system gives no thread.
        """
        self._thread = threading.Thread(
            target=self._keep, args=(store, companion), name="lifeboat-store", daemon=True
        )
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the end, which comes soon after ``stop`` is set, so many seconds at most."""
        if self._thread is not None:
            self._thread.join(timeout)
        self.recovered.set()

    def _keep(self, store: Store, companion: Companion) -> None:
        """Open, recover, then follow other writers and write down accesses."""
        try:
            self._kernels.load(_KERNELS_S)
            companion.begin(store)
            if not self._finder.find() or self._stop.is_set():
                return
            companion.tick()
            if self.follower.recover():
                self._kernels.wait(_MORE_KERNELS_S)
            with self._storage.lock:
                if self._storage.state is State.RECOVERING:
                    self._storage.state = State.READY
            self.recovered.set()
            companion.tick()
            flushed = time.monotonic()
            while not self._stop.wait(_TAIL_S):
                self._kernels.load()
                self._storage.beat()
                for number in self._burials.again():
                    self._executor.plan("store", partial(self._burials.run, number))
                if self._shared_lookup:
                    self.follower.follow(recovering=False)
                self.follower.forget_reclaimed()
                companion.tick()
                if time.monotonic() - flushed > _ACCESS_S:
                    flushed = time.monotonic()
                    self._flush_accesses()
        except Exception as exc:  # a fault of ours must not leave lookups in RETRY for ever
            _log.exception("LifeboatCache: the store failed; please report this")
            self._finder.stand_down(f"internal error: {exc}")
        finally:
            self.recovered.set()
            self._accompany(companion)

    def _accompany(self, companion: Companion) -> None:
        """Be seen until closed, also when standing down."""
        while not self._stop.wait(_TAIL_S):
            companion.tick()
        companion.end()
