"""A ladder of targets behind the surface of one store."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from lifeboat_cache import spans
from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.errors import LifeboatError, StoreClosedError
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, Entries
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.copier import Copier
from lifeboat_cache.store.counters import Counters, CounterSnapshot
from lifeboat_cache.store.household import Alone, Companion
from lifeboat_cache.store.job_desk import JobDesk
from lifeboat_cache.store.member import PATIENCE_S, Member, MemberSpec
from lifeboat_cache.store.protocol import State, TargetStatus
from lifeboat_cache.store.tiered_jobs import Ladder
from lifeboat_cache.store.write_modes import WriteMode, read_order, store_order

__all__ = ["TieredStore", "Tiering"]

_log = logging.getLogger("lifeboat_cache")

#: Plain numbers: numpy compares with them faster than with members of an enumeration.
_HIT, _MISS, _RETRY = int(Lookup.HIT), int(Lookup.MISS), int(Lookup.RETRY)

#: Targets are looked after every so many seconds, more often until all are known.
_TICK_S, _OPENING_TICK_S = 0.5, 0.01

#: The companion is told every so many seconds.
_COMPANION_S = 2.0

#: What waits to be copied has so many seconds when the store is closed.
_FLUSH_S = 5.0

#: Turns in which members are drained and asked again.
_TURN_S = 0.05


class Tiering:
    """What a ladder consists of now; asked every few moments.

    Parameters
    ----------
    specs
        Gives the targets in the order of the configuration; the same object as long as
        nothing changes.
    mode
        Gives the way in which new blocks are kept.
    """

    def __init__(
        self, specs: Callable[[], Sequence[MemberSpec]], mode: Callable[[], WriteMode]
    ) -> None:
        self.specs = specs
        self.mode = mode

    @classmethod
    def fixed(cls, specs: Sequence[MemberSpec], mode: WriteMode = "first") -> Tiering:
        """One that does not change."""
        return cls(lambda: specs, lambda: mode)


class TieredStore:
    """Blocks of one namespace on several targets; see :class:`Store`.

    A target that cannot be used is done without and probed again from time to time.
    Reads find a block wherever it is; of several copies the fastest is read, and if that
    fails, the next. New blocks go where the write mode says.

    Parameters
    ----------
    namespace
        Whose blocks, or a function that finds out (called once, on a background
        thread; it may read files). If it raises :class:`LifeboatError`, the
        store stands down.
    tiering
        Its targets.
    companion
        Is told on a background thread how the store does.
    pending_bytes
        Stores that come before any target is usable wait, up to so many bytes.
    """

    def __init__(
        self,
        namespace: Namespace | Callable[[], Namespace],
        tiering: Tiering,
        *,
        companion: Companion | None = None,
        pending_bytes: int,
    ) -> None:
        self._find_namespace = namespace
        self._tiering = tiering
        self._companion = companion or Alone()
        self._pending_limit = pending_bytes
        self._lock = threading.Lock()
        self._counters = Counters()
        self._desk = JobDesk(self._counters)
        self._specs = tiering.specs()
        self._members = tuple(Member(spec) for spec in self._specs)
        self._fast = read_order(self._members)
        self._mode: WriteMode = tiering.mode()
        self._copier = Copier(lambda: self._members, self._desk.wait_loads)
        self._ladder = Ladder(self._desk, self._copier, self._stored)
        self._gone: list[Member] = []  # taken out of the configuration
        self._layouts: dict[int, KVLayout] = {}
        self._pins: defaultdict[bytes, list[Member]] = defaultdict(list)
        self._waiting: list[tuple[Job, int]] = []  # stores that came before any target was usable
        self._pending = 0
        self._namespace: Namespace | None = None
        self._refusal = ""  # why there is no namespace
        self._settled = False
        self._started = 0.0
        self._closed = False
        self._process = os.getpid()
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self._keeper = threading.Thread(target=self._keep, name="lifeboat-ladder", daemon=True)
        _stores.add(self)
        self._keeper.start()

    # State ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where the store is in its life."""
        if self._closed:
            return State.CLOSED
        if self._refusal:
            return State.DISABLED
        if self._namespace is None:
            return State.OPENING
        undecided = self._undecided()
        if any(member.usable for member in self._members):
            return State.RECOVERING if undecided else State.READY
        return State.OPENING if undecided else State.DISABLED

    def _undecided(self) -> bool:
        """Whether more may soon be known to be there: only until that was so once."""
        if self._settled:
            return False
        if self._namespace is None:
            return True
        members = self._members
        patient = time.monotonic() - self._started < PATIENCE_S
        if not patient and any(member.ready for member in members):
            undecided = False
        else:
            # First: what is opened meanwhile is seen as undecided below.
            untried = any(one.spec.fallback and not one.tried for one in members)
            usable = any(one.usable for one in members)
            # A fallback that can hang (a home directory on a mount) is not waited for.
            undecided = any(
                one.undecided
                for one in members
                if not (usable and one.spec.fallback and one.spec.probe is None)
            )
            # The fallback is opened when everything else has turned out unusable.
            undecided |= untried and not usable
        self._settled = not undecided
        return undecided

    @property
    def usable(self) -> bool:
        """Whether jobs given to it now have a chance."""
        return not self._closed and any(member.usable for member in self._members)

    @property
    def reason(self) -> str:
        """Why the store stands down, or which targets it has to do without and why."""
        if self._refusal:
            return self._refusal
        reasons = [
            f"{member.spec.name}: {member.reason}" for member in self._members if member.reason
        ]
        skipped = "; ".join(reasons)
        if self.state is State.DISABLED:
            return (
                f"no storage target is usable ({skipped or 'none is configured'}): "
                "run `lifeboat-cache doctor`"
            )
        return skipped

    @property
    def namespace(self) -> Namespace | None:
        """The namespace, once known."""
        return self._namespace

    def written(self) -> str:
        """The name of the target that new blocks go to first; empty if there is none."""
        return next((one.spec.name for one in store_order(self._members, self._mode)), "")

    def targets(self) -> list[TargetStatus]:
        """All targets in the order of the configuration."""
        writing = store_order(self._members, self._mode)
        if self._mode != "all":
            writing = writing[:1]
        found = []
        places = {member: number for number, member in enumerate(self._fast, 1)}
        for member in self._members:
            status = member.status(writing=member in writing)
            more = self._copier.facts(member.spec.name)
            more["read_order"] = places.get(member, 0)
            found.append(replace(status, facts={**status.facts, **more}))
        return found

    def __len__(self) -> int:
        """Blocks known to be there; copies on several targets count each."""
        stores = [member.store for member in self._members]
        return sum(len(store) for store in stores if store is not None)

    def wait_recovered(self, timeout: float | None = None) -> bool:
        """Wait until journals have been read (or the store stands down)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.state in (State.OPENING, State.RECOVERING):
            left = _TURN_S if deadline is None else min(_TURN_S, deadline - time.monotonic())
            if left <= 0:
                return False
            with self._changed:
                self._changed.wait(min(left, _OPENING_TICK_S))
        return True

    def counters(self) -> CounterSnapshot:
        """Totals since the store was opened."""
        mine = self._counters.snapshot()
        sums = CounterSnapshot()
        for member in self._members:
            sums = sums + member.counters()
        return replace(
            mine,
            bytes_written=sums.bytes_written,
            bytes_read=sums.bytes_read,
            recovered_blocks=sums.recovered_blocks,
            recovery_seconds=sums.recovery_seconds,
            bad_entries=sums.bad_entries,
        )

    def queue(self) -> dict[str, int]:
        """Jobs under way, bytes waiting to be written, and the bound of these bytes."""
        stores = [member.store for member in self._members]
        queues = [store.queue() for store in stores if store is not None]
        with self._lock:
            pending = self._pending
        return {
            "jobs": self._desk.under_way,
            "pending_bytes": pending + sum(queue["pending_bytes"] for queue in queues),
            "limit_bytes": sum(queue["limit_bytes"] for queue in queues) or self._pending_limit,
        }

    def busy(self) -> bool:
        """Whether jobs are under way."""
        return self._desk.under_way > 0

    def describe(self, layout: KVLayout) -> int:
        """Say what the bytes of blocks are; returns the tag for :attr:`BlockBatch.layout`."""
        with self._lock:
            self._layouts[layout.tag] = layout
            stores = [member.store for member in self._members]
        for store in stores:
            if store is not None:
                store.describe(layout)
        return layout.tag

    # Lookups ----------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> npt.NDArray[np.uint8]:
        """uint8 ``(n,)`` of :class:`Lookup`: which blocks are there; from memory."""
        hidden = self._copier.hidden(keys)
        if hidden is None:
            return self._lookup(keys, pin)
        answers = np.full(len(keys), _MISS, dtype=np.uint8)
        rest = np.flatnonzero(~hidden)
        answers[rest] = self._lookup([keys[row] for row in rest.tolist()], pin)
        self._counters.add(lookups=len(keys) - rest.shape[0])
        return answers

    def _lookup(self, keys: Sequence[bytes], pin: bool) -> npt.NDArray[np.uint8]:
        began = time.perf_counter()
        count = len(keys)
        answers: npt.NDArray[np.uint8] | None = None
        hits = 0
        for member in self._fast:
            store = member.answering()
            if store is None:
                continue
            if answers is None:
                answers = store.lookup(keys, pin=pin)
                hits = int(np.count_nonzero(answers == _HIT))
                if pin and hits:
                    self._pinned(member, keys, answers)
            elif hits < count:
                rest = np.flatnonzero(answers != _HIT)
                some = [keys[row] for row in rest.tolist()]
                found = store.lookup(some, pin=pin)
                hit = found == _HIT
                answers[rest[hit]] = _HIT
                hits += int(np.count_nonzero(hit))
                if pin:
                    self._pinned(member, some, found)
        if answers is None:
            answers = np.zeros(count, dtype=np.uint8)
        if hits < count:
            retry = not self._closed and not self._refusal and self._undecided()
            if retry or int(answers.max()) == _RETRY:
                answers[answers != _HIT] = _RETRY if retry else _MISS
        seconds = time.perf_counter() - began
        self._counters.looked_up(count, hits, seconds)
        spans.note_lookup(count, hits, seconds)
        return answers

    def _pinned(
        self, member: Member, keys: Sequence[bytes], answers: npt.NDArray[np.uint8]
    ) -> None:
        with self._lock:
            for row in np.flatnonzero(answers == _HIT).tolist():
                self._pins[keys[row]].append(member)

    def sizes(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """int64 ``(n,)``: payload bytes of each block, -1 if it is not there."""
        records = self.records(keys)
        sizes = records["raw_length"].astype(np.int64)
        return np.where(records["kind"] == KIND_RECORD, sizes, np.int64(-1))

    def layouts(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """uint64 ``(n,)``: layout tag of each block, 0 if unknown or not there."""
        return np.ascontiguousarray(self.records(keys)["layout"])

    def records(self, keys: Sequence[bytes]) -> Entries:
        """``ENTRY`` array ``(n,)``: what is known of each block, from the fastest that has it."""
        found: Entries = np.zeros(len(keys), dtype=ENTRY)
        hidden = self._copier.hidden(keys)
        rest = np.arange(len(keys)) if hidden is None else np.flatnonzero(~hidden)
        for member in self._fast:
            store = member.answering()
            if store is None or not rest.shape[0]:
                continue
            some = store.records([keys[row] for row in rest.tolist()])
            here = some["kind"] == KIND_RECORD
            found[rest[here]] = some[here]
            rest = rest[~here]
        return found

    def keys(self, *, group: int | None = None) -> list[bytes]:
        """Keys of all blocks known to be there, or of those stored with one group number."""
        doomed = self._copier.doomed()  # first: they are so until their copies are deleted
        stores = [member.answering() for member in self._fast]
        lists = [store.keys(group=group) for store in stores if store is not None]
        found = lists[0] if len(lists) == 1 else list(dict.fromkeys(chain.from_iterable(lists)))
        return [key for key in found if key not in doomed] if doomed else found

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo one pin of each key. Never fails."""
        freed: defaultdict[Member, list[bytes]] = defaultdict(list)
        with self._lock:
            for key in keys:
                pins = self._pins.get(key)
                if pins:
                    freed[pins.pop()].append(key)
                    if not pins:
                        del self._pins[key]
        for member, mine in freed.items():
            store = member.store
            if store is not None:
                store.unpin(mine)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that a request used these blocks. Tell it *all* blocks of the request."""
        for member in self._members:
            store = member.store
            if store is not None:
                store.touch(keys)

    def delete(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Delete blocks everywhere; bool ``(n,)``, false for keys that are pinned or not there.

        A target that is not usable now deletes them before it is used again.
        """
        done = np.zeros(len(keys), dtype=bool)
        if self._process != os.getpid() or self._closed:
            return done
        with self._lock:
            free = np.array([key not in self._pins for key in keys], dtype=bool)
        hidden = self._copier.hidden(keys)
        rows = np.flatnonzero(free)
        some = [keys[row] for row in rows.tolist()]
        self._copier.deleted(some)
        for member in self._members:
            store = member.store
            if store is not None and store.usable:
                done[rows] |= store.delete(some)
            if member.blind:
                member.owe(some)
        if hidden is not None:  # they were deleted before
            done &= ~hidden
        return done

    def undone_deletions(self) -> list[bytes]:
        """See :meth:`Store.undone_deletions`; also what targets that are away have to delete."""
        return list({key for member in self._members for key in member.undone_deletions()})

    # Jobs -------------------------------------------------------------------

    def store(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Store blocks as the write mode says; see :meth:`Store.store`."""
        self._check_process()
        job = Job("store", batch, on_done)
        self._desk.admit(job)
        self._copier.wanted(batch.keys)
        if not self._ladder.store(job, self._members, self._mode):
            self._keep_waiting(job)
        return job

    def _stored(self, keys: Sequence[bytes]) -> None:
        """Blocks have been stored: no target has to delete them any more."""
        for member in self._members:
            member.wanted(keys)

    def _keep_waiting(self, job: Job) -> None:
        """No target is usable: keep a store until one is, or none can be expected."""
        size = int(job.batch.buffers.sizes().sum())
        with self._lock:
            if self._refusal or self._closed or not self._undecided():
                refusal: Outcome | None = Outcome.DISABLED
            elif self._pending and self._pending + size > self._pending_limit:
                refusal = Outcome.BUSY
            else:
                refusal = None
                self._pending += size
                self._waiting.append((job, size))
        if refusal is Outcome.DISABLED and self._ladder.store(job, self._members, self._mode):
            return  # a target has become usable in the meantime
        if refusal is not None:
            job.outcomes[:] = refusal
            self._desk.finish_part(job)

    def _release(self, *, cancel: bool = False) -> None:
        """Give stores that wait to a target, if there is one now."""
        if not self._waiting:
            return
        usable = any(member.usable for member in self._members)
        if not (usable or cancel or self._refusal or not self._undecided()):
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._pending = 0
        for job, _ in waiting:
            if cancel or not self._ladder.store(job, self._members, self._mode):
                job.outcomes[:] = Outcome.CANCELLED if cancel else Outcome.DISABLED
                self._desk.finish_part(job)

    def load(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Load blocks from the fastest target that has them; see :meth:`Store.load`."""
        self._check_process()
        job = Job("load", batch, on_done)
        self._desk.admit(job)
        self._ladder.load(job, self._fast, promote=self._mode != "first")
        return job

    def poll(self) -> list[Job]:
        """Jobs without ``on_done`` that are done since the last call."""
        return self._desk.poll()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StoreClosedError(
                "this process was forked from the one that opened the block store, and its "
                "threads stayed there: open a store of its own"
            )

    # End --------------------------------------------------------------------

    def drain(self, timeout: float | None = None, *, cancel: bool = False) -> bool:
        """Wait until no job is under way and what was deleted is gone; see :meth:`Store.drain`.

        Copies in the background are not waited for.
        """
        if self._process != os.getpid():
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        self._ladder.cancelling = cancel
        try:
            if cancel:
                self._release(cancel=True)
            while True:
                left = _TURN_S if deadline is None else max(0.0, deadline - time.monotonic())
                stores = [member.store for member in self._members]
                quiet = [
                    store.drain(min(_TURN_S, left), cancel=cancel)
                    for store in stores
                    if store is not None
                ]
                # A job may have gone on to another target in the meantime.
                if all(quiet) and self._desk.wait_idle(0):
                    return True
                if deadline is not None and time.monotonic() >= deadline:
                    return self._desk.under_way == 0 and all(quiet)
                self._desk.wait_idle(min(_TURN_S, left))
        finally:
            self._ladder.cancelling = False

    def close(self, timeout: float = 30.0) -> bool:
        """Finish queued jobs and let go of everything; see :meth:`Store.close`.

        What waits to be copied is copied for a few seconds more.
        """
        if self._process != os.getpid():  # a forked child must not end what is its parent's
            return True
        with self._lock:
            first = self._desk.close()
            was = self.state
            self._closed = True
        if not first:
            return self._desk.under_way == 0
        # Where a target has just become usable, what waited for it is stored: the keeper, which
        # would see to it at its next look, ends.
        self._release(cancel=was is State.OPENING)
        quiet = self.drain(timeout)
        quiet = quiet or self.drain(timeout, cancel=True)
        self._copier.wait_idle(min(timeout, _FLUSH_S))
        self._copier.stop(timeout)
        self._wake.set()
        self._keeper.join(timeout)
        self._close_members(timeout)
        return quiet and self._desk.under_way == 0

    def _close_members(self, timeout: float) -> None:
        """Close all at the same time: each may have to wait."""
        threads = [
            threading.Thread(target=member.close, args=(timeout,), daemon=True)
            for member in (*self._members, *self._gone)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * timeout)

    def purge(self) -> None:
        """Remove the namespace from every target; see :meth:`Store.purge`."""
        if self._process != os.getpid():
            return
        for member in (*self._members, *self._gone):
            member.purge()

    def _after_fork(self) -> None:
        """In a forked child: the threads stayed with the parent, and with them the locks."""
        self._closed = True
        self._lock = threading.Lock()
        self._counters = Counters()
        self._desk = JobDesk(self._counters)
        self._desk.close()
        self._copier.after_fork()
        self._waiting = []
        self._pins = defaultdict(list)

    # Background -------------------------------------------------------------

    def _keep(self) -> None:
        """Find out whose blocks they are, then look after the targets."""
        try:
            self._companion.begin(self)
            found = self._find_namespace
            namespace = found if isinstance(found, Namespace) else found()
        except LifeboatError as exc:
            self._refuse(str(exc))
        except Exception as exc:  # a fault of ours must not leave lookups in RETRY for ever
            _log.exception("LifeboatCache: the store failed; please report this")
            self._refuse(f"internal error: {exc}")
        else:
            self._started = time.monotonic()
            if not self._closed:
                self._look(namespace)
            self._namespace = namespace
        told = 0.0
        while not self._closed:
            now = time.monotonic()
            try:
                if self._namespace is not None and not self._refusal:
                    self._look(self._namespace)
                    self._release()
            except Exception:  # a fault of ours: the targets stay as they are
                _log.exception("LifeboatCache: targets are not looked after; please report this")
            if now - told >= _COMPANION_S or not self._settled:
                told = now
                self._companion.tick()
            with self._changed:
                self._changed.notify_all()
            self._wake.wait(_TICK_S if self._settled or self._refusal else _OPENING_TICK_S)
        self._companion.end()

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._release()
        _log.warning("LifeboatCache stands down: %s", reason)

    def _look(self, namespace: Namespace) -> None:
        """See how the targets are, and which ones there are to be."""
        self._mode = self._tiering.mode()
        self._adopt(self._tiering.specs())
        self._fast = read_order(self._members)
        usable = [one for one in self._members if one.usable and not one.spec.fallback]
        coming = [one for one in self._members if one.coming and not one.spec.fallback]
        for member in self._members:
            spec = member.spec
            wanted = not spec.fallback or not (usable or coming) or member.store is not None
            member.look(namespace, self._described, wanted=wanted or spec.wanted(namespace))
        if not self._settled:
            self._undecided()

    def _described(self) -> list[KVLayout]:
        with self._lock:
            return list(self._layouts.values())

    def _adopt(self, specs: Sequence[MemberSpec]) -> None:
        """Take in targets that have come, and let go of those that have left."""
        if specs is self._specs:
            return
        self._specs = specs
        known = {_identity(one.spec): one for one in self._members}
        members = tuple(known.get(_identity(spec)) or Member(spec) for spec in specs)
        left = [one for one in self._members if one not in members]
        self._members, self._fast = members, read_order(members)
        for member in left:
            _log.info("LifeboatCache: target %s is used no more", member.spec.name)
            member.leave("it is not configured any more")
        self._gone += left


def _identity(spec: MemberSpec) -> Hashable:
    return (spec.name, spec.location) if spec.identity is None else spec.identity


#: Stores of this process.
_stores: weakref.WeakSet[TieredStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
