"""A store whose target lives in a mover: what an engine has of it."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache import spans
from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.clock import coarse_time
from lifeboat_cache.codecs.counts import CodecCounts
from lifeboat_cache.codecs.ladder import rung_of
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.names import RAW, codec_name
from lifeboat_cache.config import Config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.errors import LifeboatError, StoreClosedError
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.job import Job
from lifeboat_cache.mover.breaker import Breaker
from lifeboat_cache.mover.client import LOOK_S, MoverClient
from lifeboat_cache.mover.deletions import Deletions
from lifeboat_cache.mover.transfers import Transfers
from lifeboat_cache.mover.wire import Kind
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.coding import Codings
from lifeboat_cache.store.counters import Counters, CounterSnapshot
from lifeboat_cache.store.household import Alone, Companion
from lifeboat_cache.store.load_plan import same_shape
from lifeboat_cache.store.protocol import State, TargetStatus

__all__ = ["RemoteStore"]

_log = logging.getLogger("lifeboat_cache")

#: Lookups at the start answer "ask again" for so many seconds at most.
_PATIENCE_S = 10.0

#: A store that is closed waits so long, in seconds, for a target that does not answer.
_CLOSING_S = 2.0

#: Memory between engine and mover, at most. It is taken as it is used.
DEFAULT_ARENA_BYTES = 256 << 20

#: Stores of more blocks than that do not wait in line.
_MOST_BLOCKS = 1 << 17

#: Keys in one message.
_KEYS = 4096


class RemoteStore:
    """Blocks of one namespace on a target that can hang; see :class:`Store`.

    No thread of this process touches the target. Lookups are answered out of an index that
    the mover feeds; jobs go through memory of this process, and each part of one has a
    deadline, after which it is given up and its memory left to the mover.

    Parameters
    ----------
    namespace
        See :class:`BlockStore`.
    tier
        The target.
    home
        The home directory.
    config
        What this process runs with. A :class:`LiveConfig` is followed.
    native
        See :class:`CodecPolicy`.
    pending_bytes
        Stores beyond so many queued bytes are dropped as ``BUSY``.
    secret
        The integrity key's bytes.
    companion
        See :class:`BlockStore`.
    arena_bytes
        Memory that blocks pass through.
    counts
        Where it is counted what goes through which codec.

    Attributes
    ----------
    codec_counts
        ``counts``.
    """

    def __init__(
        self,
        namespace: Namespace | Callable[[], Namespace],
        tier: Tier,
        *,
        home: Path,
        config: Config | LiveConfig,
        native: bool = False,
        pending_bytes: int = 2 << 30,
        secret: bytes | None = None,
        companion: Companion | None = None,
        arena_bytes: int = DEFAULT_ARENA_BYTES,
        counts: CodecCounts | None = None,
    ) -> None:
        self._find_namespace = namespace
        self._tier = tier
        self._companion = companion or Alone()
        self._pending_limit = pending_bytes
        self._codings = Codings()
        self.codec_counts = counts or CodecCounts()
        self._counters = Counters()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._state = State.OPENING
        self._reason = ""
        self._namespace: Namespace | None = None
        self._started = time.monotonic()
        self._pending = 0
        self._pending_blocks = 0
        self._jobs: set[Job] = set()
        self._finished: deque[Job] = deque()
        self._pins: Counter[bytes] = Counter()
        self._deletions = Deletions()
        self._process = os.getpid()
        self._stop = threading.Event()
        self._breaker = Breaker(tier.timeout_s)
        self._transfers = Transfers(
            self._plan, self._complete, self._account, self._breaker, tier.timeout_s
        )
        self._client = MoverClient(
            tier,
            home,
            config,
            native=native,
            secret=secret,
            arena_bytes=arena_bytes,
            breaker=self._breaker,
            transfers=self._transfers,
            on_deleted=self._deleted,
            on_records=self._hide_deleted,
        )
        _stores.add(self)
        self._keeper = threading.Thread(target=self._keep, name="lifeboat-mover", daemon=True)
        clock = threading.Thread(
            target=self._client.watch_deadlines, name="lifeboat-mover-clock", daemon=True
        )
        try:
            self._keeper.start()
            clock.start()
        except RuntimeError:
            self._stop.set()
            self._client.stop()
            self._transfers.stop()
            raise

    # State ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where the store is in its life."""
        link = self._client.link
        if self._state in (State.DISABLED, State.CLOSED):
            return self._state
        if link is None or not link.usable():
            return State.OPENING
        return State.READY if link.synced else State.RECOVERING

    @property
    def reason(self) -> str:
        """Why the target is not used now; empty if it is."""
        why = self._why()
        return f"{self._tier.name}: {why}" if why and self._state is not State.DISABLED else why

    def _why(self) -> str:
        return self._reason if self._state is State.DISABLED else self._client.why()

    @property
    def namespace(self) -> Namespace | None:
        """The namespace, once known."""
        return self._namespace

    @property
    def usable(self) -> bool:
        """Whether jobs given to it now have a chance."""
        return self._client.usable

    def __len__(self) -> int:
        """Blocks known to be there."""
        return len(self._client.index)

    def targets(self) -> list[TargetStatus]:
        """Its target."""
        tier = self._tier
        state = self.state
        if state is State.READY and not self._breaker.closed:
            state = State.DISABLED
        return [
            TargetStatus(
                name=tier.name,
                type=tier.type,
                rung=rung_of(tier.type),
                location=tier.location,
                state=state,
                reason=self._why(),
                writing=self.usable,
                blocks=len(self._client.index),
                capacity_bytes=tier.capacity_bytes,
                reserve_bytes=tier.min_free_bytes,
                direct_io=tier.direct_io,
                queue=self.queue(),
                counters=self.counters(),
                facts=self.facts(),
            )
        ]

    def facts(self) -> dict[str, object]:
        """What is known of the way to the target, for people and metrics."""
        breaker, transfers, link = self._breaker, self._transfers, self._client.link
        loads, stores = transfers.latency("load"), transfers.latency("store")
        return {
            "mover": 0 if link is None else link.pid,
            "breaker": breaker.state.value,
            "breaker_opened": breaker.opened,
            "retry_s": round(breaker.retry_in(), 1),
            "timeout_s": self._tier.timeout_s,
            "load_s": [round(value, 4) for value in loads],
            "store_s": [round(value, 4) for value in stores],
            "abandoned_bytes": transfers.abandoned_bytes,
            "abandoned_total_bytes": transfers.abandoned_total,
            "dropped_messages": transfers.dropped_messages,
        }

    def wait_recovered(self, timeout: float | None = None) -> bool:
        """Wait until the mover has told all records (or the store stands down)."""
        return self._client.recovered.wait(timeout)

    def counters(self) -> CounterSnapshot:
        """Totals since the store was opened."""
        found = self._counters.snapshot()
        return replace(found, recovered_blocks=self._client.recovered_blocks)

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

    def describe(self, layout: KVLayout) -> int:
        """Say what the bytes of blocks are; returns the tag for :attr:`BlockBatch.layout`."""
        tag = self._codings.describe(layout)
        self._client.describe(layout)
        return tag

    # Lookups ----------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> npt.NDArray[np.uint8]:
        """uint8 ``(n,)`` of :class:`Lookup`: which blocks are there; from memory.

        All are missing while the target does not answer.
        """
        count = len(keys)
        if self._state in (State.DISABLED, State.CLOSED) or not self._breaker.closed:
            return np.zeros(count, dtype=np.uint8)
        waiting = not self._client.ever_synced and time.monotonic() - self._started < _PATIENCE_S
        miss = Lookup.RETRY if waiting else Lookup.MISS
        if not self.usable:
            return np.full(count, miss, dtype=np.uint8)
        began = time.perf_counter()
        if pin:
            with self._lock:
                found = self._found(keys)
                self._pins.update(key for key, hit in zip(keys, found, strict=True) if hit)
        else:
            found = self._found(keys)
        answers = np.where(np.array(found, dtype=bool), np.uint8(Lookup.HIT), np.uint8(miss))
        self._counters.looked_up(count, sum(found), time.perf_counter() - began)
        return answers.astype(np.uint8)

    def _found(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._client.index.contains(keys)
        link = self._client.link
        if not any(found) or (link is not None and link.status.get("kernels")):
            return found
        # Until the mover has kernels, what is in a codec is computed sooner than it is restored.
        codecs = self._client.index.gather(self._client.index.as_keys(keys)).codec
        return [hit and codec == RAW for hit, codec in zip(found, codecs.tolist(), strict=True)]

    def sizes(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """int64 ``(n,)``: payload bytes of each block, -1 if it is not there."""
        found = self._client.index.gather(keys)
        return np.where(found.found, found.raw_length.astype(np.int64), -1)

    def layouts(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """uint64 ``(n,)``: layout tag of each block, 0 if unknown or not there."""
        return self._client.index.gather(keys).layout

    def records(self, keys: Sequence[bytes]) -> Entries:
        """``ENTRY`` array ``(n,)``: what is known of each block; ``kind`` is 0 if nothing."""
        return self._client.index.gather(keys).entries

    def keys(self, *, group: int | None = None) -> list[bytes]:
        """Keys of all blocks known to be there, or of those stored with one group number."""
        return self._client.index.keys(group)

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
        """Say that a request used these blocks. The mover is told; if it is gone, nobody is."""
        self._client.index.touch_places(keys, coarse_time())
        for first in range(0, len(keys), _KEYS):
            self._transfers.tell(Kind.TOUCH, b"".join(keys[first : first + _KEYS]))

    def delete(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Delete blocks: in memory at once, and soon on the target.

        Returns
        -------
        bool ``(n,)``
            False for keys that are pinned, not there, or cannot be told to the mover.
        """
        done = np.zeros(len(keys), dtype=bool)
        if self._process != os.getpid():
            return done
        for first in range(0, len(keys), _KEYS):
            done[first : first + _KEYS] = self._delete(keys[first : first + _KEYS])
        return done

    def _delete(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        done = np.zeros(len(keys), dtype=bool)
        with self._lock:
            if self._state in (State.DISABLED, State.CLOSED):
                return done
            free = [number for number, key in enumerate(keys) if not self._pins.get(key, 0)]
            there = self._client.index.contains([keys[n] for n in free])
            mine = [number for number, hit in zip(free, there, strict=True) if hit]
            if not mine:
                return done
            told = [keys[n] for n in mine]
            if self._tell_deleted(told):
                done[mine], _, _ = self._client.index.take_many(told)
        return done

    def _tell_deleted(self, keys: Sequence[bytes]) -> bool:
        """Tell the mover what to delete, if there is one; under the lock."""
        number = self._deletions.tell(keys)
        if self._transfers.tell(Kind.DELETE, b"".join(keys), number):
            return True
        self._deletions.not_told(number)
        return False

    def undone_deletions(self) -> list[bytes]:
        """Keys that were deleted, and whose tombstones are not on storage yet."""
        with self._lock:
            return self._deletions.keys()

    def _tick(self) -> None:
        """Called every few moments."""
        self._companion.tick()
        if self._deletions.untold and self.state is State.READY:
            with self._lock:
                again = self._deletions.take_untold()
                for first in range(0, len(again), _KEYS):
                    if not self._tell_deleted(again[first : first + _KEYS]):
                        self._deletions.give_back(again[first:])
                        break

    # Jobs -------------------------------------------------------------------

    def store(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Store blocks; see :meth:`Store.store`."""
        self._check_process()
        job = Job("store", batch, on_done)
        size = int(batch.buffers.sizes().sum())
        with self._lock:
            self._admit(job)
            self._deletions.stored(batch.keys)
            refusal: Outcome | None = None
            if self._state is State.DISABLED:
                refusal = Outcome.DISABLED
            elif not self._breaker.closed:
                refusal = Outcome.UNAVAILABLE
            elif self._pending and (
                self._pending + size > self._pending_limit
                or self._pending_blocks + len(batch) > _MOST_BLOCKS
            ):
                refusal = Outcome.BUSY
            else:
                self._pending += size
                self._pending_blocks += len(batch)
        return self._submit(job, size, refusal)

    def load(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Load blocks into the caller's memory, verified; see :meth:`Store.load`."""
        self._check_process()
        job = Job("load", batch, on_done)
        with self._lock:
            self._admit(job)
            refusal: Outcome | None = None
            if not batch.buffers.writable:
                refusal = Outcome.MISMATCH
            elif self._state is State.DISABLED or self._client.link is None:
                refusal = Outcome.MISSING
            elif not self._breaker.closed:
                refusal = Outcome.UNAVAILABLE
        return self._submit(job, int(batch.buffers.sizes().sum()), refusal)

    def _submit(self, job: Job, size: int, refusal: Outcome | None) -> Job:
        if refusal is None:
            self._transfers.submit(job, size)
            self._client.busy()
        else:
            job.outcomes[:] = refusal
            if job.finish_part():
                self._complete(job, None)
        return job

    def poll(self) -> list[Job]:
        """Jobs without ``on_done`` that are done since the last call."""
        with self._lock:
            out = list(self._finished)
            self._finished.clear()
        return out

    def _admit(self, job: Job) -> None:
        if self._state is State.CLOSED:
            raise StoreClosedError("the store is closed: open a new one")
        self._jobs.add(job)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StoreClosedError(
                "this process was forked from the one that opened the store, and its threads "
                "stayed there: open a store of its own"
            )

    def _plan(self, job: Job) -> npt.NDArray[np.int64]:
        """Which blocks of a job have to be moved; all others get their outcomes."""
        batch, outcomes = job.batch, job.outcomes
        found = self._client.index.gather(batch.keys)
        same = found.found & same_shape(found, batch.buffers.sizes(), batch.tags(), self._codings)
        if job.kind == "store":
            outcomes[same] = Outcome.PRESENT
            return np.flatnonzero(~same)
        outcomes[~found.found] = Outcome.MISSING
        outcomes[found.found & ~same] = Outcome.MISMATCH
        for codec in set(found.codec[same].tolist()):
            job.in_codec(codec_name(codec))
        return np.flatnonzero(same)

    def _account(self, job: Job, coded: npt.NDArray[Any]) -> None:
        count = self.codec_counts.stored if job.kind == "store" else self.codec_counts.loaded
        for codec, blocks, raw, kept in coded.tolist():
            count(codec, blocks, raw, kept)
            self._counters.moved(job.kind, kept)
            job.in_codec(codec_name(codec))

    def _complete(self, job: Job, reserved: int | None) -> None:
        self._counters.job(job)
        spans.note_job(job, self._tier.name)
        if not job.polled:
            try:
                job.publish()
            except Exception:  # the callback must not leave the job under way
                _log.exception("LifeboatCache: a completion callback failed")
        with self._idle:
            if job.kind == "store" and reserved is not None:
                self._pending -= reserved
                self._pending_blocks -= len(job.outcomes)
            self._jobs.discard(job)
            if job.polled:  # under the lock: who has waited for the job finds it polled
                self._finished.append(job)
                job.publish()
            self._idle.notify_all()

    # The mover --------------------------------------------------------------

    def _keep(self) -> None:
        """Find out the namespace, then keep in touch with the mover."""
        try:
            self._companion.begin(self)
            found = self._find_namespace
            self._namespace = found if isinstance(found, Namespace) else found()
            self._client.follow(self._namespace, self._tick)
        except LifeboatError as exc:
            self._disable(str(exc))
        except Exception as exc:  # a fault of ours must not leave lookups in RETRY for ever
            _log.exception("LifeboatCache: the store failed; please report this")
            self._disable(f"internal error: {exc}")
        finally:
            self._client.recovered.set()
            while not self._stop.wait(LOOK_S):
                self._companion.tick()
            self._companion.end()
            self._client.withdraw()

    def _disable(self, reason: str) -> None:
        with self._lock:
            if self._state is not State.CLOSED:
                self._state = State.DISABLED
            self._reason = reason
        self._transfers.cancel(Outcome.DISABLED)
        _log.warning("LifeboatCache stands down: %s", reason)

    def _deleted(self, number: int | None, done: bool = False) -> None:
        """What has become of a deletion; or nobody knows it of any."""
        with self._idle:
            if number is None:
                self._deletions.lost()
            else:
                self._deletions.answered(number, done=done)
            self._idle.notify_all()

    def _hide_deleted(self) -> None:
        """A mover has told of records: those that its predecessor should have deleted are none."""
        if self._deletions.untold:
            with self._lock:
                self._client.index.take_many(self._deletions.hidden())

    # The end ----------------------------------------------------------------

    def drain(self, timeout: float | None = None, *, cancel: bool = False) -> bool:
        """Wait until no job is under way and what was deleted is gone; see :meth:`Store.drain`."""
        if self._process != os.getpid():
            return True
        if cancel:
            self._transfers.cancel()
        with self._idle:
            return self._idle.wait_for(
                lambda: not (self._jobs or self._deletions.under_way), timeout
            )

    def close(self, timeout: float = 30.0) -> bool:
        """Finish queued jobs and let go of everything. Idempotent.

        Waits no longer than two seconds for a target that does nothing.

        Returns
        -------
        bool
            True: nothing touches the callers' memory any more.
        """
        if self._process != os.getpid():
            return True
        with self._lock:
            closed, self._state = self._state is State.CLOSED, State.CLOSED
        if closed:
            return not self._jobs
        self._finish_jobs(timeout)
        self._stop.set()
        self._client.stop()
        self._transfers.stop()
        self._keeper.join(_CLOSING_S)
        self._client.recovered.set()
        return not self._jobs

    def _finish_jobs(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        progress, since = -1, time.monotonic()
        while not self.drain(0.05):
            now = time.monotonic()
            if self._transfers.progress != progress:
                progress, since = self._transfers.progress, now
            if now > until or now - since > _CLOSING_S or not self.usable:
                break
        until = time.monotonic() + _CLOSING_S
        while not self.drain(0.01) and time.monotonic() < until:
            # What is being copied is done in a moment; all else ends here.
            self._transfers.cancel(sent=True)
            with self._lock:
                self._deletions.forget()

    def purge(self) -> None:
        """Remove the namespace from the target, once the store is closed; returns at once."""
        if self._process == os.getpid():
            self._client.purge()

    def _after_fork(self) -> None:
        """In a forked child: the threads stayed with the parent, and with them the locks."""
        self._state = State.CLOSED
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._client.after_fork()
        self._transfers.after_fork()
        self._counters = Counters()
        self._jobs, self._finished, self._pins = set(), deque(), Counter()


#: Stores of this process.
_stores: weakref.WeakSet[RemoteStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
