"""The block store: what an engine adapter talks to."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.clock import coarse_time
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.names import RAW
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.index import Index
from lifeboat_cache.index_answers import Touched
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.ahead import AHEAD_LEAST, OpeningAhead
from lifeboat_cache.store.burials import Burials, Told
from lifeboat_cache.store.coding import Codings
from lifeboat_cache.store.counters import Counters, CounterSnapshot
from lifeboat_cache.store.finder import Finder
from lifeboat_cache.store.follower import Follower
from lifeboat_cache.store.household import Alone, Companion
from lifeboat_cache.store.job_queue import JobQueue
from lifeboat_cache.store.job_runner import JobRunner
from lifeboat_cache.store.keeper import Keeper
from lifeboat_cache.store.loading import Loading
from lifeboat_cache.store.notices import Notices
from lifeboat_cache.store.protocol import State, TargetStatus
from lifeboat_cache.store.records import access_entries, tombstones_at
from lifeboat_cache.store.storage import Storage
from lifeboat_cache.store.storing import Storing
from lifeboat_cache.targets.base import Target

__all__ = ["DEFAULT_PENDING_BYTES", "BlockStore", "State"]

_log = logging.getLogger("lifeboat_cache")

#: Threads without work end within so many seconds.
_END_S = 10.0

#: Default bound of bytes waiting to be written.
DEFAULT_PENDING_BYTES = 2 << 30


class BlockStore:
    """Blocks of one namespace on the first usable target.

    Opening, probing, recovery and all I/O happen on threads of the store; no
    method but :meth:`drain` and :meth:`close` waits for storage.

    Parameters
    ----------
    namespace
        Whose blocks, or a function that finds out (called once, on a background
        thread; it may read files). If it raises :class:`LifeboatError`, the
        store stands down.
    targets
        Tried in order; the first whose probe succeeds is used.
    io_workers
        I/O threads.
    pending_bytes
        Stores beyond so many queued bytes are dropped as ``BUSY``.
    integrity_key
        Guards payloads against tampering: checksums are keyed with it.
    shared_lookup
        Whether to find what other processes store while this store is open, not only
        what was there when it was opened.
    companion
        Is told on a background thread how the store does.
    codecs
        Chooses the codecs of blocks whose layout is known (:meth:`describe`); by default
        everything is stored as it is.
    index
        An empty index to use, of which others want to know too.
    quiet
        Whether somebody else says it if no target is usable.
    page_cache
        Whether what is stored stays in the page cache, and is read from there as long as it
        is there, also where the target bypasses it.
    """

    def __init__(
        self,
        namespace: Namespace | Callable[[], Namespace],
        targets: Sequence[Target],
        *,
        io_workers: int = 8,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        integrity_key: bytes | None = None,
        shared_lookup: bool = True,
        companion: Companion | None = None,
        codecs: CodecPolicy | None = None,
        index: Index | None = None,
        quiet: bool = False,
        page_cache: bool = False,
    ) -> None:
        self._process = os.getpid()
        self._stop = threading.Event()
        self._targets = list(targets)
        self._index = Index() if index is None else index
        self._pins: Counter[bytes] = Counter()
        self._touched: list[tuple[Touched, int]] = []
        self._counters = Counters()
        self._codings = Codings()
        self._policy = codecs or CodecPolicy.fixed("raw")
        notices = Notices()
        self._storage = Storage(notices)
        self._queue = JobQueue(self._storage, self._counters, notices, pending_bytes)
        self._runner = JobRunner(
            self._storage,
            self._queue,
            self._counters,
            self._codings,
            self._policy,
            notices,
            Storing(
                self._storage,
                self._index,
                self._codings,
                self._policy,
                notices,
                self._pins,
                integrity_key=integrity_key,
                page_cache=page_cache,
            ),
            Loading(self._storage, self._index, self._codings, page_cache=page_cache),
            io_workers=io_workers,
            integrity_key=integrity_key,
        )
        self._executor = self._runner.executor
        self._ahead = OpeningAhead(self._storage, self._index, self._executor, self._stop)
        self._burials = Burials(self._storage.idle, self._bury_deleted)
        finder = Finder(
            namespace,
            self._targets,
            self._storage,
            self._queue,
            self._runner,
            self._policy,
            quiet=quiet,
        )
        follower = Follower(
            self._storage, self._index, self._policy, self._counters, integrity_key, self._stop
        )
        self._keeper = Keeper(
            self._storage,
            self._executor,
            self._burials,
            finder,
            follower,
            self._flush_accesses,
            shared_lookup=shared_lookup,
            stop=self._stop,
        )
        self._farewell: threading.Thread | None = None
        _stores.add(self)
        try:
            self._keeper.start(self, companion or Alone())
        except RuntimeError:
            self._executor.stop()
            raise

    # State ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where the store is in its life."""
        return self._storage.state

    @property
    def usable(self) -> bool:
        """Whether jobs given to it now have a chance."""
        return self._storage.state in (State.RECOVERING, State.READY)

    @property
    def reason(self) -> str:
        """Why the store stands down, or which targets it had to skip and why."""
        return self._storage.reason

    @property
    def namespace(self) -> Namespace | None:
        """The namespace, once known."""
        return self._storage.namespace

    @property
    def target(self) -> Target | None:
        """The target in use, once known."""
        return self._storage.target

    def targets(self) -> list[TargetStatus]:
        """The target in use, or those that are tried."""
        storage = self._storage
        with storage.lock:
            used, state, reason = storage.target, storage.state, storage.reason
            skipped = dict(storage.skipped)
        queue, counters = self.queue(), self.counters()
        return [
            TargetStatus(
                name=target.name,
                type=target.type,
                rung=self._policy.rung_of(target),
                location=target.location,
                state=state,
                reason=skipped.get(target.name, "" if target is used else reason),
                writing=target is used and state in (State.RECOVERING, State.READY),
                blocks=len(self._index) if target is used else 0,
                # Not every kind of target has these.
                capacity_bytes=getattr(target, "capacity", None),
                reserve_bytes=getattr(target, "reserve", 0),
                direct_io=getattr(target, "direct_io", "auto"),
                queue=queue,
                counters=counters,
                facts=target.special,
            )
            for target in ([used] if used is not None else self._targets)
        ]

    def __len__(self) -> int:
        """Blocks known to be there."""
        return len(self._index)

    def wait_recovered(self, timeout: float | None = None) -> bool:
        """Wait until journals have been read (or the store stands down)."""
        return self._keeper.recovered.wait(timeout)

    def counters(self) -> CounterSnapshot:
        """Totals since the store was opened."""
        return self._counters.snapshot()

    def describe(self, layout: KVLayout) -> int:
        """Say what the bytes of blocks are, so that they can be stored in a codec.

        Every process has to say it that is to load such blocks.

        Returns
        -------
        int
            The layout's tag, for :attr:`BlockBatch.layout`.
        """
        return self._codings.describe(layout)

    # Lookups ----------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> npt.NDArray[np.uint8]:
        """Which blocks are there; answered from memory.

        Parameters
        ----------
        keys
            32-byte block keys.
        pin
            Also protect the hits from :meth:`delete` until :meth:`unpin`.

        Returns
        -------
        uint8 ``(n,)`` of :class:`Lookup`
            ``RETRY`` for what is not found while recovery is going on.
        """
        state = self._storage.state
        if state in (State.DISABLED, State.CLOSED):
            return np.zeros(len(keys), dtype=np.uint8)
        began = time.perf_counter()
        miss = Lookup.MISS if state is State.READY else Lookup.RETRY
        if pin:
            with self._storage.lock:
                found = self._found(keys)
                self._pins.update(key for key, hit in zip(keys, found, strict=True) if hit)
        else:
            found = self._found(keys)
        answers = np.where(np.array(found, dtype=bool), np.uint8(Lookup.HIT), np.uint8(miss))
        hits = sum(found)
        self._counters.looked_up(len(keys), hits, time.perf_counter() - began)
        if hits >= AHEAD_LEAST:
            self._ahead.begin([key for key, hit in zip(keys, found, strict=True) if hit])
        return answers.astype(np.uint8)

    def _found(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are there and worth restoring.

        Until kernels are there, what is in a codec is restored slower than it is computed.
        """
        found = self._index.contains(keys)
        if kernels.ready() or not any(found):
            return found
        codecs = self._index.gather(self._index.as_keys(keys)).codec
        return [hit and codec == RAW for hit, codec in zip(found, codecs.tolist(), strict=True)]

    def sizes(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """int64 ``(n,)``: payload bytes of each block, -1 if it is not there."""
        found = self._index.get(keys)
        return np.array(
            [-1 if item is None else int(item[1]["raw_length"]) for item in found], dtype=np.int64
        )

    def layouts(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """uint64 ``(n,)``: layout tag of each block, 0 if unknown or not there."""
        found = self._index.get(keys)
        return np.array(
            [0 if item is None else int(item[1]["layout"]) for item in found], dtype=np.uint64
        )

    def records(self, keys: Sequence[bytes]) -> Entries:
        """``ENTRY`` array ``(n,)``: what is known of each block.

        ``kind`` is 0 for a block that is not there; places and checksums mean nothing.
        """
        return self._index.gather(keys).entries

    def keys(self, *, group: int | None = None) -> list[bytes]:
        """Keys of all blocks known to be there, or of those stored with one group number.

        Keys are digests. An adapter that has to name its blocks after a restart
        stores a list of their names as a block too, under a group of its own.
        """
        return self._index.keys(group)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo one pin of each key. Never fails."""
        with self._storage.lock:
            for key in keys:
                left = self._pins[key] - 1
                if left > 0:
                    self._pins[key] = left
                else:
                    del self._pins[key]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that a request used these blocks. Tell it *all* blocks of the request."""
        now = coarse_time()
        places = self._index.touch_places(keys, now)
        if places.writers.shape[0]:
            with self._storage.lock:
                self._touched.append((places, now))

    def delete(
        self, keys: Sequence[bytes], *, on_buried: Told | None = None
    ) -> npt.NDArray[np.bool_]:
        """Delete blocks, in memory at once and on storage soon after.

        Parameters
        ----------
        keys
            32-byte block keys.
        on_buried
            Told whether what was deleted is gone from storage, too: on an I/O thread, or
            before this returns if there was nothing to do. If it is not, that is tried again,
            and told again.

        Returns
        -------
        bool ``(n,)``
            False for keys that are pinned or not there.
        """
        done = np.zeros(len(keys), dtype=bool)
        if self._process != os.getpid():
            return done
        with self._storage.lock:
            usable = self.usable
            number = 0
            if self._storage.state not in (State.DISABLED, State.CLOSED):
                free = [number for number, key in enumerate(keys) if not self._pins.get(key, 0)]
                done[free], owners, records = self._index.take_many([keys[n] for n in free])
                if records.shape[0]:
                    number = self._burials.add(owners, records, on_buried)
        if number:
            self._executor.plan("store", partial(self._burials.run, number))
        elif on_buried is not None:
            on_buried(usable)
        return done

    def _bury_deleted(self, owners: npt.NDArray[np.uint32], records: Entries) -> bool:
        keys = np.ascontiguousarray(records["key"]).view(np.uint8).reshape(-1, 32)
        writers = [self._index.writer_id(number) for number in owners.tolist()]
        return self._storage.bury(tombstones_at(keys, writers, records["segment"], records["slot"]))

    def undone_deletions(self) -> list[bytes]:
        """Keys that were deleted, and may be found again by the next who opens the target."""
        keys = self._burials.keys()
        stored = self._index.contains(keys)
        return [key for key, again in zip(keys, stored, strict=True) if not again]

    # Jobs -------------------------------------------------------------------

    def store(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Store blocks. Their memory must not change until the job is done.

        Parameters
        ----------
        batch
            The blocks.
        on_done
            Called once when the job is done: on an I/O thread, or before this
            returns if the job is refused. It must not wait for the store. Without
            it the job is handed out by :meth:`poll`.

        Raises
        ------
        StoreClosedError
            If the store is closed, or belongs to the process that forked this one.
        """
        self._check_process()
        job = Job("store", batch, on_done)
        size = int(batch.buffers.sizes().sum())
        answer = self._queue.admit_store(job, size)
        if answer is None:
            self._executor.plan("store", partial(self._runner.start, job, size, size))
        elif answer is not Outcome.PENDING:
            job.outcomes[:] = answer
            self._queue.finish(job, 0)
        return job

    def load(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Load blocks into the caller's memory; verified before reported.

        The memory of a block that is not ``OK`` holds anything. See :meth:`store`
        for ``on_done`` and errors.
        """
        self._check_process()
        job = Job("load", batch, on_done)
        self._queue.admit_load(job)
        if not batch.buffers.writable:
            job.outcomes[:] = Outcome.MISMATCH
            self._queue.finish(job, 0)
        elif self._storage.reader is None:
            job.outcomes[:] = Outcome.MISSING
            self._queue.finish(job, 0)
        else:
            size = int(batch.buffers.sizes().sum())
            self._executor.plan("load", partial(self._runner.start, job, 0, size))
        return job

    def poll(self) -> list[Job]:
        """Jobs without ``on_done`` that are done since the last call."""
        return self._queue.poll()

    def queue(self) -> dict[str, int]:
        """Jobs under way, bytes waiting to be written, and the bound of these bytes."""
        return self._queue.facts()

    def busy(self) -> bool:
        """Whether jobs are under way."""
        return bool(self._queue.under_way)

    def drain(self, timeout: float | None = None, *, cancel: bool = False) -> bool:
        """Wait until no job is under way and what was deleted is gone from storage.

        Parameters
        ----------
        timeout
            Seconds; ``None`` = as long as it takes.
        cancel
            Parts that have not started yet end as ``CANCELLED``.

        Returns
        -------
        bool
            Whether all jobs are done. If false, I/O may still touch their memory.
        """
        if self._process != os.getpid():
            return True
        idle = self._storage.idle
        with idle:
            self._executor.cancel(cancel)
            waiting = self._queue.take_waiting() if cancel else []
        self._queue.refuse(waiting, Outcome.CANCELLED)
        with idle:
            done = idle.wait_for(self._quiet, timeout)
            # A store that is given up must not start what is still queued.
            self._executor.cancel(cancel and self._storage.state is State.CLOSED)
        return done

    def _quiet(self) -> bool:
        """Whether no job or deletion is under way."""
        return not (self._queue.under_way or self._burials.under_way)

    def close(self, timeout: float = 30.0) -> bool:
        """Finish queued jobs, write down accesses, let go of all files. Idempotent.

        Parameters
        ----------
        timeout
            Seconds for queued stores; what has not started by then is cancelled.
            System calls under way are waited for as long again.

        Returns
        -------
        bool
            Whether no I/O touches the callers' memory any more.
        """
        if self._process != os.getpid():  # a forked child must not end what is its parent's
            return True
        storage = self._storage
        with storage.lock:
            was = storage.state
            storage.state = State.CLOSED
        if was is State.CLOSED:
            done = not self._queue.under_way
            if done and self._farewell is not None:
                self._farewell.join(timeout)
            return done
        self._stop.set()
        # Stores that still wait for a target would wait for ever now.
        quiet = self.drain(timeout, cancel=was is State.OPENING)
        quiet = quiet or self.drain(timeout, cancel=True)
        self._keeper.join(timeout)
        self._executor.stop()
        if quiet:
            self._let_go()
        else:
            self._farewell = threading.Thread(
                target=self._let_go_later, name="lifeboat-farewell", daemon=True
            )
            self._farewell.start()
            _log.warning(
                "LifeboatCache: storage at %s has not answered for %.0f s; its I/O is left behind",
                storage.location,
                2 * timeout,
            )
        return quiet

    def purge(self) -> None:
        """Remove the namespace from storage, once the store is closed.

        For namespaces that nobody can serve any more. Faults are swallowed.
        """
        if self._process == os.getpid():  # a forked child must not take what its parent uses
            self._storage.purge()

    def _let_go(self) -> None:
        self._policy.close()
        self._flush_accesses()
        self._storage.close()

    def _let_go_later(self) -> None:
        """Let go of all files once storage has answered what it was asked."""
        with self._storage.idle:
            self._storage.idle.wait_for(self._quiet)
        self._executor.join(_END_S)
        self._let_go()

    def _after_fork(self) -> None:
        """In a forked child: the threads stayed with the parent, and with them the locks."""
        self._storage.after_fork()
        self._queue.after_fork()
        self._burials = Burials(self._storage.idle, self._bury_deleted)
        self._index = Index()
        self._counters = Counters()
        self._touched, self._pins = [], Counter()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StoreClosedError(
                "this process was forked from the one that opened the block store, and its "
                "threads stayed there: open a store of its own"
            )

    def _flush_accesses(self) -> None:
        with self._storage.lock:
            touched, self._touched = self._touched, []
        if not touched:
            return
        writer = self._storage.start_writer()
        if writer is None:
            return
        writer.log_access(access_entries(touched, self._index.writer_id))


#: Stores of this process.
_stores: weakref.WeakSet[BlockStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
