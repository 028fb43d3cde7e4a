"""The block store: what an engine adapter talks to."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels, spans
from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.checksum import Binding, preferred_algorithm
from lifeboat_cache.clock import coarse_time
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.names import EXACT, RAW, codec_name
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.errors import LifeboatError, StoreClosedError
from lifeboat_cache.format.journal import ENTRY, Entries
from lifeboat_cache.index import Index
from lifeboat_cache.index_answers import Touched
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.burials import Burials, Told
from lifeboat_cache.store.coding import Codings
from lifeboat_cache.store.counters import Counters, CounterSnapshot
from lifeboat_cache.store.executor import Executor
from lifeboat_cache.store.household import Alone, Companion
from lifeboat_cache.store.io_task import IoTask, new_progress
from lifeboat_cache.store.load_plan import LoadPlan, Places, same_shape
from lifeboat_cache.store.protocol import State, TargetStatus
from lifeboat_cache.store.records import (
    MOST_BYTES,
    Record,
    access_entries,
    servable,
    tombstones,
    tombstones_at,
    untrusted,
    void,
)
from lifeboat_cache.store.staging import Staging, StagingArea
from lifeboat_cache.store.store_plan import StorePlan, Unsized, Written
from lifeboat_cache.targets.base import OpenFile, Place, Target, TargetReader, TargetWriter

__all__ = ["DEFAULT_PENDING_BYTES", "BlockStore", "State"]

_log = logging.getLogger("lifeboat_cache")

#: How often other writers' journals are looked at, in seconds.
_TAIL_S = 2.0

#: How often accesses are written down, in seconds.
_ACCESS_S = 20.0

#: So many blocks of a job are planned at a time. numpy lets go of the interpreter for arrays
#: of more than 500 elements, and beside an engine that computes in Python it costs up to
#: 5 ms to win it back, each time.
_WINDOW = 448

#: The segments of every so many of the blocks found by a lookup are opened before they are
#: loaded: each takes several system calls, and each of these up to 5 ms beside an engine that
#: computes in Python. Not for lookups of fewer keys, nor again within so many seconds.
_AHEAD_EVERY = 32
_AHEAD_LEAST = 8
_AHEAD_S = 10.0
_MOST_AHEAD = 4096

#: Recovery waits so many seconds for compiled kernels to be loaded.
_KERNELS_S = 1.0

#: After a writer could not be started, stores fail for so many seconds.
_WRITER_RETRY_S = 5.0

#: Threads without work end within so many seconds.
_END_S = 10.0

#: What says nothing about a record that was to be read.
_UNREAD = (Outcome.CANCELLED, Outcome.TIMEOUT, Outcome.UNAVAILABLE)

#: To ask an enumeration for a member takes as long as to count the outcomes of a task.
_OK = int(Outcome.OK)

#: What repeats is said again after so many seconds.
_SAY_AGAIN_S = 600.0

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
        self._quiet = quiet
        self._page_cache = page_cache
        self._find_namespace = namespace
        self._shared_lookup = shared_lookup
        self._companion = companion or Alone()
        self._targets = list(targets)
        self._index = Index() if index is None else index
        self._counters = Counters()
        self._codings = Codings()
        self._policy = codecs or CodecPolicy.fixed("raw")
        self._executor = Executor(io_workers, self._finish_tasks, integrity_key)
        self._staging = StagingArea(self._executor.submit)
        self._integrity_key = integrity_key
        self._pending_limit = pending_bytes
        self._pending = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._state = State.OPENING
        self._reason = ""
        self._skipped: dict[str, str] = {}  # why, by the target's name
        self._namespace: Namespace | None = None
        self._binding: Binding | None = None
        self._target: Target | None = None
        self._reader: TargetReader | None = None
        self._writer: TargetWriter | None = None
        self._writer_lock = threading.Lock()
        self._writer_retry = 0.0
        self._said: dict[str, float] = {}
        self._waiting: list[Job] = []  # stores that came before the target was known
        self._jobs: set[Job] = set()
        self._finished: deque[Job] = deque()
        self._pins: Counter[bytes] = Counter()
        self._touched: list[tuple[Touched, int]] = []
        self._ahead: dict[tuple[int, int], float] = {}  # segments opened ahead, and when
        self._burials = Burials(self._idle, self._bury_deleted)
        self._kernel_loader: threading.Thread | None = None
        self._farewell: threading.Thread | None = None
        self._process = os.getpid()
        self._recovered = threading.Event()
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="lifeboat-store", daemon=True)
        _stores.add(self)
        try:
            self._keeper.start()
        except RuntimeError:
            self._executor.stop()
            raise

    # State ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where the store is in its life."""
        return self._state

    @property
    def usable(self) -> bool:
        """Whether jobs given to it now have a chance."""
        return self._state in (State.RECOVERING, State.READY)

    @property
    def reason(self) -> str:
        """Why the store stands down, or which targets it had to skip and why."""
        return self._reason

    @property
    def namespace(self) -> Namespace | None:
        """The namespace, once known."""
        return self._namespace

    @property
    def target(self) -> Target | None:
        """The target in use, once known."""
        return self._target

    def targets(self) -> list[TargetStatus]:
        """The target in use, or those that are tried."""
        with self._lock:
            used, state, reason = self._target, self._state, self._reason
            skipped = dict(self._skipped)
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
        return self._recovered.wait(timeout)

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
        state = self._state
        if state in (State.DISABLED, State.CLOSED):
            return np.zeros(len(keys), dtype=np.uint8)
        began = time.perf_counter()
        miss = Lookup.MISS if state is State.READY else Lookup.RETRY
        if pin:
            with self._lock:
                found = self._found(keys)
                self._pins.update(key for key, hit in zip(keys, found, strict=True) if hit)
        else:
            found = self._found(keys)
        answers = np.where(np.array(found, dtype=bool), np.uint8(Lookup.HIT), np.uint8(miss))
        hits = sum(found)
        self._counters.looked_up(len(keys), hits, time.perf_counter() - began)
        if hits >= _AHEAD_LEAST:
            self._open_ahead([key for key, hit in zip(keys, found, strict=True) if hit])
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

    def _open_ahead(self, keys: Sequence[bytes]) -> None:
        """Have the segments of blocks opened on an I/O thread: they will be loaded soon."""
        now = time.monotonic()
        last = self._ahead.get
        wanted = [
            place
            for place in self._index.segments_of(keys[::_AHEAD_EVERY])
            if now - last(place, -_AHEAD_S) > _AHEAD_S
        ]
        if wanted:
            if len(self._ahead) > _MOST_AHEAD:
                self._ahead = {}
            self._ahead.update(dict.fromkeys(wanted, now))
            self._executor.plan("load", partial(self._open_segments, wanted))

    def _open_segments(self, places: Sequence[tuple[int, int]]) -> None:
        for writer, segment in places:
            reader = self._reader
            if reader is not None and not self._stop.is_set():
                # What is wrong is found out, and said, when blocks are loaded.
                with contextlib.suppress(OSError, LifeboatError):
                    reader.open_segment(self._index.writer_id(writer), segment)

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
        with self._lock:
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
            with self._lock:
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
        with self._lock:
            usable = self.usable
            number = 0
            if self._state not in (State.DISABLED, State.CLOSED):
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
        writer = self._start_writer()
        if writer is None:
            return False
        keys = np.ascontiguousarray(records["key"]).view(np.uint8).reshape(-1, 32)
        writers = [self._index.writer_id(number) for number in owners.tolist()]
        return writer.bury(tombstones_at(keys, writers, records["segment"], records["slot"]))

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
        with self._lock:
            self._admit(job)
            if self._state is State.DISABLED:
                refusal: Outcome | None = Outcome.DISABLED
            elif self._pending and self._pending + size > self._pending_limit:
                refusal = Outcome.BUSY
            else:
                refusal = None
                self._pending += size
                if self._state is State.OPENING:
                    self._waiting.append(job)
                    return job
        if refusal is not None:
            job.outcomes[:] = refusal
            self._finish(job, 0)
        else:
            self._executor.plan("store", partial(self._start, job, size, size))
        return job

    def load(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Load blocks into the caller's memory; verified before reported.

        The memory of a block that is not ``OK`` holds anything. See :meth:`store`
        for ``on_done`` and errors.
        """
        self._check_process()
        job = Job("load", batch, on_done)
        with self._lock:
            self._admit(job)
            disabled = self._reader is None
        if not batch.buffers.writable:
            job.outcomes[:] = Outcome.MISMATCH
            self._finish(job, 0)
        elif disabled:
            job.outcomes[:] = Outcome.MISSING
            self._finish(job, 0)
        else:
            size = int(batch.buffers.sizes().sum())
            self._executor.plan("load", partial(self._start, job, 0, size))
        return job

    def poll(self) -> list[Job]:
        """Jobs without ``on_done`` that are done since the last call."""
        with self._lock:
            out = list(self._finished)
            self._finished.clear()
        return out

    def queue(self) -> dict[str, int]:
        """Jobs under way, bytes waiting to be written, and the bound of these bytes."""
        with self._lock:
            return {
                "jobs": len(self._jobs),
                "pending_bytes": self._pending,
                "limit_bytes": self._pending_limit,
            }

    def busy(self) -> bool:
        """Whether jobs are under way."""
        return bool(self._jobs)

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
        with self._idle:
            self._executor.cancel(cancel)
            waiting = self._waiting if cancel else []
            if cancel:
                self._waiting = []
        for job in waiting:
            job.outcomes[:] = Outcome.CANCELLED
            self._finish(job, int(job.batch.buffers.sizes().sum()))
        with self._idle:
            done = self._idle.wait_for(lambda: not (self._jobs or self._burials.under_way), timeout)
            # A store that is given up must not start what is still queued.
            self._executor.cancel(cancel and self._state is State.CLOSED)
        return done

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
        with self._lock:
            closed = self._state is State.CLOSED
            was = self._state
            self._state = State.CLOSED
        if closed:
            done = not self._jobs
            if done and self._farewell is not None:
                self._farewell.join(timeout)
            return done
        self._stop.set()
        # Stores that still wait for a target would wait for ever now.
        quiet = self.drain(timeout, cancel=was is State.OPENING)
        quiet = quiet or self.drain(timeout, cancel=True)
        self._keeper.join(timeout)
        self._recovered.set()
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
                self._target.location if self._target else "?",
                2 * timeout,
            )
        return quiet

    def purge(self) -> None:
        """Remove the namespace from storage, once the store is closed.

        For namespaces that nobody can serve any more. Faults are swallowed.
        """
        if self._target is not None and self._namespace is not None:
            with contextlib.suppress(OSError, LifeboatError):
                self._target.purge(self._namespace.hex)

    def _let_go(self) -> None:
        self._policy.close()
        self._flush_accesses()
        for part in (self._writer, self._reader):
            if part is not None:
                part.close()

    def _let_go_later(self) -> None:
        """Let go of all files once storage has answered what it was asked."""
        with self._idle:
            self._idle.wait_for(lambda: not (self._jobs or self._burials.under_way))
        self._executor.join(_END_S)
        self._let_go()

    def _after_fork(self) -> None:
        """In a forked child: the threads stayed with the parent, and with them the locks."""
        self._state = State.CLOSED
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._index = Index()
        self._counters = Counters()
        self._waiting, self._jobs, self._touched = [], set(), []
        self._finished, self._pins = deque(), Counter()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StoreClosedError(
                "this process was forked from the one that opened the block store, and its "
                "threads stayed there: open a store of its own"
            )

    def _admit(self, job: Job) -> None:
        if self._state is State.CLOSED:
            raise StoreClosedError("the block store is closed: open a new one")
        self._jobs.add(job)

    def _finish(self, job: Job, reserved: int) -> None:
        """The last part of ``job`` is done."""
        if job.finish_part():
            self._complete(job, reserved)

    def _complete(self, job: Job, reserved: int) -> None:
        self._counters.job(job)
        spans.note_job(job, "" if self._target is None else self._target.name)
        if job.kind == "store":
            self._say_full(job)
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
            self._pending -= reserved
            self._jobs.discard(job)
            if job.polled:  # under the lock: who has waited for the job finds it polled
                self._finished.append(job)
                job.publish()
            self._idle.notify_all()
        if interrupted is not None:
            raise interrupted

    def _start(self, job: Job, reserved: int, size: int) -> None:
        """Cut a job into tasks and run them."""
        batch, reader = job.batch, self._reader
        plan = self._plan_store if job.kind == "store" else partial(self._plan_load, {})
        part_bytes = self._executor.part_bytes(size)
        progress = new_progress()
        try:
            for first in range(0, len(batch), _WINDOW):
                last = min(first + _WINDOW, len(batch))
                window = batch if last - first == len(batch) else batch.window(first, last)
                for tasks in plan(window, job.outcomes[first:last], part_bytes):
                    job.add_parts(len(tasks))
                    for task in tasks:
                        task.blocks += first
                        task.job = (job, reserved)
                    if tasks and tasks[0].kind == "encode":
                        self._staging.submit(tasks)
                        continue
                    for task in tasks:
                        task.progress = progress
                    if reader is not None and job.kind == "load":
                        reader.fetch(tasks, self._executor.submit, self._finish_tasks)
                    else:
                        self._executor.submit(tasks)
        except Exception:  # a fault of ours: the rest fails, the engine goes on
            _log.exception("LifeboatCache: planning a job failed; please report this")
            job.outcomes[job.outcomes == Outcome.PENDING] = Outcome.FAILED
        progress[2] = 1
        self._finish(job, reserved)

    def _finish_tasks(self, tasks: list[IoTask]) -> None:
        """Take finished tasks of one kind, whatever has become of them."""
        encoded = [task for task in tasks if task.kind == "encode"]
        for task in encoded:
            self._finish_encoding(task)
        if encoded:
            tasks = [task for task in tasks if task.kind != "encode"]
        if not tasks:
            return
        finish = self._finish_stores if tasks[0].kind == "store" else self._finish_loads
        try:
            finish(tasks)
        except Exception:  # a fault of ours: the parts fail, the engine goes on
            _log.exception("LifeboatCache: completing I/O failed; please report this")
            for task in tasks:
                task.outcomes[:] = Outcome.FAILED
        for task in tasks:
            if isinstance(task.detail, Written):
                task.detail.writer.settle(task.detail.entries)
                if task.detail.staging is not None:
                    self._unstage(task.detail.staging)
            job, size = task.job
            job.outcomes[task.blocks] = task.outcomes
            if job.finish_part(self._account(job, task)):
                self._complete(job, size)

    def _account(self, job: Job, task: IoTask) -> int:
        """Count what a task has moved; returns how many bytes of the caller's that are."""
        done: Any = slice(None) if task.whole else np.flatnonzero(task.outcomes == Outcome.OK)
        lengths = task.lengths[done]
        blocks, stored = lengths.shape[0], int(lengths.sum())
        self._counters.moved(job.kind, stored)
        job.in_codec(codec_name(task.codec))
        counts = self._policy.counts
        # The sizes come from the task: to ask a large batch for those of all of its blocks, for
        # each task of it, has cost as much as reading them, beside a busy interpreter.
        if job.kind == "load":
            coding = task.coding
            size = stored if coding is None else blocks * coding.coded.layout.nbytes
            counts.loaded(task.codec, blocks, size, stored)
        else:
            detail: Written = task.detail
            size = int(detail.entries["raw_length"][done].sum())
            counts.stored(task.codec, blocks, size, stored)
            if blocks and self._policy.guard.wants(task.codec):
                self._offer(job.batch, int(task.blocks[done][0]), task.codec)
        if blocks:
            job.note_coded(task.codec, blocks, size, stored)
        return size

    def _offer(self, batch: BlockBatch, block: int, codec: int) -> None:
        """Let the guard compare a block with what is stored of it, on a thread of its own."""
        layout = self._codings.layout(int(batch.tags()[block]))
        if layout is not None:
            pieces = [np.frombuffer(piece, dtype=np.uint8) for piece in batch.buffers.pieces(block)]
            self._policy.guard.offer(layout, codec, np.concatenate(pieces))

    def _finish_encoding(self, task: IoTask) -> None:
        """Give blocks room whose length is known now, and write them."""
        job, size = task.job
        staging = self._staging.take(task)
        staging.parts = 1
        tasks: list[IoTask] = []
        try:
            job.outcomes[task.blocks] = task.outcomes
            detail: Unsized = task.detail
            shift = int(task.blocks[0] - detail.blocks[0])
            blocks, answers, tasks = detail.plan.sized(task, staging)
            job.outcomes[blocks + shift] = answers
            staging.parts += len(tasks)
            job.add_parts(len(tasks))
            for write in tasks:
                write.blocks += shift
                write.job = task.job
        except Exception:  # a fault of ours: the part fails, the engine goes on
            _log.exception("LifeboatCache: planning a store failed; please report this")
            job.outcomes[task.blocks] = Outcome.FAILED
        if tasks:
            self._executor.submit(tasks)
        self._unstage(staging)
        if job.finish_part():
            self._complete(job, size)

    def _unstage(self, staging: Staging) -> None:
        with self._lock:
            staging.parts -= 1
            done = staging.parts == 0
        if done:
            self._staging.release(staging)

    def _news(self, what: str) -> bool:
        """Whether something has not been said for a while."""
        now = time.monotonic()
        with self._lock:
            known = now - self._said.get(what, -_SAY_AGAIN_S) < _SAY_AGAIN_S
            if not known:
                self._said[what] = now
        return not known

    def _say_full(self, job: Job) -> None:
        where = self._target.location if self._target else "?"
        outcomes = job.outcomes.tobytes()  # unlike an array's, its methods keep the interpreter
        if Outcome.FULL in outcomes and self._news("full"):
            _log.warning(
                "LifeboatCache: %s has reached its capacity, new blocks are not kept: raise "
                "capacity_gb, or run `lifeboat-cache gc` or `lifeboat-cache purge --older-than 7d`",
                where,
            )
        if Outcome.RESERVE in outcomes and self._news("reserve"):
            _log.warning(
                "LifeboatCache: the disk of %s has less free than min_free_gb, new blocks are not "
                "kept: free space, or run `lifeboat-cache gc` or "
                "`lifeboat-cache purge --older-than 7d`",
                where,
            )

    def _say_large(self, size: int) -> None:
        if self._news("large"):
            _log.warning(
                "LifeboatCache: blocks of %d bytes are not kept, a record has less than 4 GiB: "
                "configure smaller blocks in the engine",
                size,
            )

    # Storing ----------------------------------------------------------------

    def _plan_store(
        self, batch: BlockBatch, outcomes: npt.NDArray[np.uint8], part_bytes: int
    ) -> Iterator[list[IoTask]]:
        """Leave out what is there, give the rest room and cut it into tasks."""
        keys = self._index.as_keys(batch.keys)
        found = self._index.gather(keys)
        sizes = batch.buffers.sizes()
        same = found.found & same_shape(found, sizes, batch.tags(), self._codings)
        outcomes[same] = Outcome.PRESENT
        large = sizes > MOST_BYTES
        if large.any():
            outcomes[large] = Outcome.FAILED
            self._say_large(int(sizes.max()))
        # Nobody who uses this layout could ever load what is there: replace it.
        doomed: list[Record] = []
        for number in np.flatnonzero(found.found & ~same & ~large).tolist():
            key = batch.keys[number]
            with self._lock:
                if self._pins.get(key, 0):
                    outcomes[number] = Outcome.MISMATCH
                else:
                    doomed += self._index.take(key)
        if doomed:
            self._bury(doomed)
        wanted = np.flatnonzero(outcomes == Outcome.PENDING)
        if not wanted.shape[0]:
            return
        writer = self._start_writer()
        if writer is None:
            outcomes[wanted] = Outcome.FAILED
            return
        if self._binding is None:
            raise RuntimeError("a store was planned before the namespace was known")
        plan = StorePlan(
            batch,
            keys,
            writer,
            self._binding,
            preferred_algorithm(self._integrity_key),
            self._codings,
            part_bytes,
            cached=self._page_cache,
        )
        for blocks, answers, tasks in plan.tasks(wanted, self._choose(batch, wanted)):
            outcomes[blocks] = answers
            yield tasks

    def _choose(self, batch: BlockBatch, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """The codec of each of some blocks of a batch."""
        codecs = np.zeros(blocks.shape[0], dtype=np.uint16)
        tags, sizes = batch.tags()[blocks], batch.buffers.sizes()[blocks]
        for tag in set(tags.tolist()):
            layout = self._codings.layout(tag)
            if layout is None:
                continue
            mine = (tags == np.uint64(tag)) & (sizes == layout.nbytes)
            codecs[mine] = self._policy.choose(layout).codec
        if batch.codecs is not None:
            # What is lost is lost: it takes no more room than where it has been.
            been = np.asarray(batch.codecs, dtype=np.uint16)[blocks]
            known = np.isin(tags, [tag for tag in set(tags.tolist()) if self._codings.layout(tag)])
            lossy = known & ~np.isin(been, list(EXACT))
            codecs[lossy] = np.maximum(codecs, been)[lossy]
        return codecs

    def _finish_stores(self, tasks: list[IoTask]) -> None:
        """Journal what has been written, of all tasks of a writer together."""
        written: dict[int, list[IoTask]] = {}
        for task in tasks:
            detail: Written = task.detail
            end = task.outcomes.tobytes().rfind(_OK) + 1
            if end < task.outcomes.shape[0]:
                detail.writer.give_back(detail.entries[end:], detail.file)
            if end:
                detail.entries["payload_checksum"] = void(task.checksums)
                written.setdefault(id(detail.writer), []).append(task)
        for mine in written.values():
            writer = mine[0].detail.writer
            kept = [
                task.detail.entries[slice(None) if task.whole else task.outcomes == _OK]
                for task in mine
            ]
            # Not by numpy: to find their common dtype takes it longer than all else here.
            entries: Entries = np.frombuffer(bytearray().join(kept), dtype=ENTRY)
            outcome = writer.commit(entries, [task.detail.file for task in mine])
            if outcome == _OK:
                self._index.insert(writer.writer, entries)
            else:
                for task in mine:
                    task.outcomes[task.outcomes == _OK] = outcome

    def _start_writer(self) -> TargetWriter | None:
        """The writer, started at the first store: who only reads leaves no files."""
        with self._writer_lock:
            if self._writer is not None:
                if not self._writer.lost:
                    return self._writer
                self._writer.close()
                self._writer = None
            target, namespace = self._target, self._namespace
            if target is None or namespace is None or time.monotonic() < self._writer_retry:
                return None
            try:
                self._writer = target.writer(namespace)
            except (OSError, LifeboatError) as exc:
                self._writer_retry = time.monotonic() + _WRITER_RETRY_S
                # Not by its text, which may name another file each time.
                if self._news(f"writer {type(exc).__name__} {getattr(exc, 'errno', None)}"):
                    _log.warning("LifeboatCache: cannot write to %s: %s", target.location, exc)
            return self._writer

    # Loading ----------------------------------------------------------------

    def _plan_load(
        self,
        opened: dict[tuple[bytes, int], OpenFile],
        batch: BlockBatch,
        outcomes: npt.NDArray[np.uint8],
        part_bytes: int,
    ) -> Iterator[list[IoTask]]:
        """Find the records and cut them into tasks, in the order of their places."""
        reader, binding = self._reader, self._binding
        if reader is None or binding is None:
            raise RuntimeError("a load was planned before the namespace was known")
        keys = self._index.as_keys(batch.keys)
        plan = LoadPlan(
            batch,
            keys,
            self._index,
            reader,
            binding,
            opened,
            self._codings,
            cached=self._page_cache,
        )
        if plan.lost.shape[0]:
            lost, places = plan.lost, plan.lost_places
            # Even the head of a file may be seen in pieces.
            wrong = np.flatnonzero(plan.outcomes[lost] == Outcome.CORRUPT)
            doubted = self._doubted(places, wrong)
            plan.outcomes[lost[doubted]] = Outcome.MISSING
            self._forget(places[~doubted], plan.outcomes[lost[~doubted]])
        outcomes[:] = plan.outcomes
        yield from plan.tasks(part_bytes)

    def _finish_loads(self, tasks: list[IoTask]) -> None:
        """Deal with what was not read, or is not what it should be."""
        for task in tasks:
            if self._reader is not None:
                self._reader.settle(task)
            self._believe(task)
            if task.whole:
                continue
            bad = np.flatnonzero(task.outcomes != Outcome.OK)
            places: Places = task.detail[bad]
            outcomes = task.outcomes[bad]
            wrong = np.flatnonzero(outcomes == Outcome.CORRUPT)
            short = np.flatnonzero(outcomes == Outcome.MISSING)
            reader = self._reader
            if wrong.shape[0] and reader is not None:
                dead = reader.declared_dead(
                    [
                        Place(self._index.writer_id(writer), segment, 0, 0)
                        for writer, segment, _ in places[wrong].rows()
                    ],
                    [slot for _, _, slot in places[wrong].rows()],
                )
                outcomes[wrong[np.array(dead, dtype=bool)]] = Outcome.MISSING
                wrong = wrong[~np.array(dead, dtype=bool)]
            doubted = self._doubted(places, np.concatenate((wrong, short)))
            outcomes[doubted] = Outcome.MISSING
            task.outcomes[bad] = outcomes
            lost = np.flatnonzero(~np.isin(outcomes, _UNREAD) & ~doubted)
            self._forget(places[lost], outcomes[lost])

    def _believe(self, task: IoTask) -> None:
        """Doubt no more what has turned out right."""
        reader = self._reader
        if reader is None or not reader.doubts:
            return
        good: Places = task.detail[np.flatnonzero(task.outcomes == Outcome.OK)]
        for writer, segment, slot in good.rows():
            reader.believe(self._index.writer_id(writer), segment, slot)

    def _doubted(self, places: Places, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of some records may only not be seen yet, as another host has just written them."""
        doubted = np.zeros(places.slots.shape[0], dtype=bool)
        reader = self._reader
        if reader is not None:
            for row, (writer, segment, slot) in zip(
                rows.tolist(), places[rows].rows(), strict=True
            ):
                doubted[row] = reader.doubtful(self._index.writer_id(writer), segment, slot)
        return doubted

    def _forget(self, places: Places, outcomes: npt.NDArray[np.uint8]) -> None:
        """Take records that could not be read out of the index; bury those that are wrong.

        A read that failed is a miss from now on: the block is computed and stored again,
        instead of failing for every request to come.
        """
        self._index.remove_many(places.keys, places.writers, places.segments, places.slots)
        corrupt = np.flatnonzero(outcomes == Outcome.CORRUPT)
        if not corrupt.shape[0]:
            return
        _log.warning(
            "LifeboatCache: %d corrupt block(s) at %s; dropped, they will be recomputed",
            corrupt.shape[0],
            self._target.location if self._target else "?",
        )
        writer = self._start_writer()
        if writer is not None:
            wrong = places[corrupt]
            owners = [self._index.writer_id(number) for number in wrong.writers.tolist()]
            writer.bury(tombstones_at(wrong.keys, owners, wrong.segments, wrong.slots))

    def _bury(self, records: list[Record]) -> None:
        """Declare records dead for every process, now and after a restart."""
        writer = self._start_writer()
        if writer is None:
            return
        writer.bury(tombstones(records))

    # Background -------------------------------------------------------------

    def _keep(self) -> None:
        """Open, recover, then follow other writers and write down accesses."""
        try:
            self._load_kernels(_KERNELS_S)
            self._companion.begin(self)
            if not self._open() or self._stop.is_set():
                return
            self._companion.tick()
            started = time.monotonic()
            self._follow(recovering=True)
            reader = self._reader
            if reader is not None:
                self._index.apply_accesses(reader.accesses())
            self._counters.add(recovered_blocks=len(self._index))
            self._counters.add_seconds("recovery", time.monotonic() - started)
            with self._lock:
                if self._state is State.RECOVERING:
                    self._state = State.READY
            self._recovered.set()
            self._companion.tick()
            flushed = time.monotonic()
            while not self._stop.wait(_TAIL_S):
                self._load_kernels()
                self._beat()
                for number in self._burials.again():
                    self._executor.plan("store", partial(self._burials.run, number))
                if self._shared_lookup:
                    self._follow(recovering=False)
                self._forget_reclaimed()
                self._companion.tick()
                if time.monotonic() - flushed > _ACCESS_S:
                    flushed = time.monotonic()
                    self._flush_accesses()
        except Exception as exc:  # a fault of ours must not leave lookups in RETRY for ever
            _log.exception("LifeboatCache: the store failed; please report this")
            self._disable(f"internal error: {exc}")
        finally:
            self._recovered.set()
            self._accompany()

    def _accompany(self) -> None:
        """Be seen until closed, also when standing down."""
        while not self._stop.wait(_TAIL_S):
            self._companion.tick()
        self._companion.end()

    def _load_kernels(self, wait_s: float = 0.0) -> None:
        """Use compiled kernels as soon as there are any, without depending on their disk."""
        loader = self._kernel_loader
        if self._executor.native:
            return
        if loader is None or not loader.is_alive():
            loader = threading.Thread(target=self._upgrade, name="lifeboat-kernels", daemon=True)
            try:
                loader.start()
            except RuntimeError:  # no threads are left: it goes on without kernels
                return
            self._kernel_loader = loader
        loader.join(wait_s)

    def _upgrade(self) -> None:
        if kernels.load() and not self._stop.is_set():
            self._executor.upgrade()

    def _open(self) -> bool:
        try:
            found = self._find_namespace
            namespace = found if isinstance(found, Namespace) else found()
        except LifeboatError as exc:
            self._disable(str(exc))
            return False
        for target in self._targets:
            try:
                target.probe()
                reader = target.reader(namespace)
            except (OSError, ValueError, LifeboatError) as exc:
                with self._lock:
                    self._skipped[target.name] = str(exc)
                if not self._quiet:
                    _log.warning("LifeboatCache: target %s is skipped: %s", target.name, exc)
                continue
            with self._lock:
                self._reason = self._why_skipped()
                self._namespace, self._target, self._reader = namespace, target, reader
                self._binding = Binding(namespace.digest)
                self._policy.opened(target)
                waiting, self._waiting = self._waiting, []
                if self._state is State.OPENING:
                    self._state = State.RECOVERING
            for job in waiting:
                size = int(job.batch.buffers.sizes().sum())
                self._executor.plan("store", partial(self._start, job, size, size))
            return True
        self._disable(
            "no storage target is usable (" + (self._why_skipped() or "none is configured") + "): "
            "run `lifeboat-cache doctor`"
        )
        return False

    def _why_skipped(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self._skipped.items())

    def _disable(self, reason: str) -> None:
        with self._lock:
            if self._state is not State.CLOSED:
                self._state = State.DISABLED
            self._reason = reason
            waiting, self._waiting = self._waiting, []
        for job in waiting:
            size = int(job.batch.buffers.sizes().sum())
            job.outcomes[:] = Outcome.DISABLED
            self._finish(job, size)
        if not self._quiet:
            _log.warning("LifeboatCache stands down: %s", reason)

    def _follow(self, *, recovering: bool) -> None:
        """Take in what other writers have journaled since the last time."""
        reader = self._reader
        if reader is None:
            return
        own = self._writer.writer if self._writer is not None else None
        for page in reader.poll(own):
            writer = self._writer
            if writer is not None and page.writer == writer.writer:
                continue  # started just now; what it stores is in the index already
            self._beat()
            usable = servable(page.entries, self._integrity_key, exact=self._policy.exact)
            self._index.insert(page.writer, page.entries[usable])
            bad = page.bad + untrusted(page.entries, self._integrity_key)
            if bad:
                self._counters.add(bad_entries=bad)
            if self._stop.is_set():
                return
            if recovering:
                time.sleep(0)  # let go of the interpreter between pages
        if reader.complete:
            self._index.settled()

    def _beat(self) -> None:
        """Show other hosts that the writer lives."""
        writer = self._writer
        if writer is not None:
            writer.beat()

    def _forget_reclaimed(self) -> None:
        """Take out of the index what a janitor or a purge has taken from storage."""
        reader = self._reader
        if reader is None:
            return
        for owner, segment, dead in reader.poll_dead():
            self._index.drop_dead(owner, segment, dead)
        for owner, gone in reader.take_vanished():
            if gone is None:
                self._index.drop_writer(owner)
            else:
                self._index.drop_segment(owner, gone)

    def _flush_accesses(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, []
        if not touched:
            return
        writer = self._start_writer()
        if writer is None:
            return
        writer.log_access(access_entries(touched, self._index.writer_id))


#: Stores of this process.
_stores: weakref.WeakSet[BlockStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
