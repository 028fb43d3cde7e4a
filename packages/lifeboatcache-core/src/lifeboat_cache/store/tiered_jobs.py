"""Jobs of a ladder: which target gets which blocks, and what happens if it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.format.journal import KIND_RECORD
from lifeboat_cache.job import Job
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.copier import Copier
from lifeboat_cache.store.job_desk import JobDesk
from lifeboat_cache.store.member import Member
from lifeboat_cache.store.write_modes import WriteMode, store_order

__all__ = ["Ladder"]

_log = logging.getLogger("lifeboat_cache")

_Rows = npt.NDArray[np.int64]

#: What ends a store: it is there, or another target would not do better.
_FINAL = np.array([Outcome.OK, Outcome.PRESENT, Outcome.BUSY, Outcome.MISMATCH], dtype=np.uint8)


class Ladder:
    """Hands jobs to members.

    Parameters
    ----------
    desk
        Where jobs are finished.
    copier
        Is told what has been stored and loaded.
    stored
        Called with the keys of blocks that a target has kept.

    Attributes
    ----------
    cancelling
        Whether what one target has not done goes to no other.
    """

    def __init__(
        self, desk: JobDesk, copier: Copier, stored: Callable[[Sequence[bytes]], None]
    ) -> None:
        self._desk = desk
        self._copier = copier
        self._stored = stored
        self._merging = threading.Lock()
        self.cancelling = False

    # Storing ----------------------------------------------------------------

    def store(self, job: Job, members: Sequence[Member], mode: WriteMode) -> bool:
        """Start a store; false, with nothing done, if no target is usable."""
        order = store_order(members, mode)
        if not order:
            return False
        if mode == "all" and len(order) > 1:
            self._store_everywhere(job, order)
        else:
            follow = mode == "local_first"
            self._store_on(job, job.batch, None, order[0], members, mode, (), follow)
        return True

    def _store_on(
        self,
        job: Job,
        batch: BlockBatch,
        rows: _Rows | None,
        member: Member,
        members: Sequence[Member],
        mode: WriteMode,
        tried: tuple[Member, ...],
        follow: bool,
    ) -> None:
        """Store some blocks on a target, and what it does not take on the next."""

        def done(part: Job) -> None:
            outcomes = part.outcomes
            _put(job, rows, outcomes)
            with self._finishing(job, part.bytes_moved):
                self._note(batch, outcomes)
                job.in_codec(part.codec)
                if follow and (good := outcomes == Outcome.OK).any():
                    self._copier.stored(member, _keys(batch, good))
                rest = np.flatnonzero(~np.isin(outcomes, _FINAL))
                if not rest.shape[0] or self.cancelling:
                    return
                left = (*tried, member)
                order = [one for one in store_order(members, mode) if one not in left]
                if not order:  # a fallback, say
                    order = [one for one in members if one.usable and one not in left]
                if order:
                    at = rest if rows is None else rows[rest]
                    more = batch.take(rest)
                    job.add_parts(1)
                    self._store_on(job, more, at, order[0], members, mode, left, follow)

        self._start(member, "store", batch, done)

    def _store_everywhere(self, job: Job, order: Sequence[Member]) -> None:
        """Store all blocks on all targets; what any of them has kept is good."""
        batch = job.batch
        job.add_parts(len(order) - 1)
        moved = [0]

        def done(part: Job) -> None:
            outcomes = part.outcomes
            with self._merging:
                mine = job.outcomes
                # In order of preference: stored, there already, whatever else.
                better = (outcomes == Outcome.OK) | (mine == Outcome.PENDING)
                better |= (outcomes == Outcome.PRESENT) & (mine != Outcome.OK)
                mine[better] = outcomes[better]
                more = max(0, part.bytes_moved - moved[0])
                moved[0] += more
            with self._finishing(job, more):
                self._note(batch, outcomes)
                job.in_codec(part.codec)

        for member in order:
            self._start(member, "store", batch, done)

    def _note(self, batch: BlockBatch, outcomes: npt.NDArray[np.uint8]) -> None:
        good = (outcomes == Outcome.OK) | (outcomes == Outcome.PRESENT)
        if good.any():
            self._stored(_keys(batch, good))

    # Loading ----------------------------------------------------------------

    def load(self, job: Job, members: Sequence[Member], *, promote: bool) -> None:
        """Start a load from members, the fastest first."""
        job.outcomes[:] = Outcome.MISSING
        with self._finishing(job):
            if not job.batch.buffers.writable:
                job.outcomes[:] = Outcome.MISMATCH
                return
            answering = tuple(one for one in members if one.answering() is not None)
            hidden = self._copier.hidden(job.batch.keys)
            if hidden is not None:
                rows = np.flatnonzero(~hidden)
                if rows.shape[0]:
                    self._distribute(job, job.batch.take(rows), rows, answering, promote)
            elif len(answering) == 1:
                job.add_parts(1)
                self._load_from(job, job.batch, None, answering, promote)
            elif answering:
                self._distribute(job, job.batch, None, answering, promote)

    def _distribute(
        self,
        job: Job,
        batch: BlockBatch,
        rows: _Rows | None,
        members: tuple[Member, ...],
        promote: bool,
    ) -> None:
        """Load each block from the first target that has it."""
        rest = np.arange(len(batch))
        for number, member in enumerate(members):
            store = member.answering()
            if store is None or not rest.shape[0]:
                continue
            whole = rest.shape[0] == len(batch)
            keys = batch.keys if whole else [batch.keys[row] for row in rest.tolist()]
            here = store.records(keys)["kind"] == KIND_RECORD
            mine = rest[here]
            rest = rest[~here]
            if not mine.shape[0]:
                continue
            part, at = batch, rows
            if mine.shape[0] < len(batch):
                part, at = batch.take(mine), mine if rows is None else rows[mine]
            job.add_parts(1)
            self._load_from(job, part, at, members[number:], promote)

    def _load_from(
        self,
        job: Job,
        batch: BlockBatch,
        rows: _Rows | None,
        members: tuple[Member, ...],
        promote: bool,
    ) -> None:
        """Load blocks from the first of some targets, and what it fails to give from others."""
        member = members[0]

        def done(part: Job) -> None:
            outcomes = part.outcomes
            _put(job, rows, outcomes)
            with self._finishing(job, part.bytes_moved):
                member.speed.note(part.bytes_moved, part.seconds)
                job.in_codec(part.codec)
                good = outcomes == Outcome.OK
                if promote and good.any():
                    self._copier.loaded(member, _keys(batch, good))
                if len(members) > 1 and not self.cancelling and not good.all():
                    rest = np.flatnonzero(~good)
                    at = rest if rows is None else rows[rest]
                    self._distribute(job, batch.take(rest), at, members[1:], promote)

        self._start(member, "load", batch, done)

    @contextmanager
    def _finishing(self, job: Job, moved: int = 0) -> Iterator[None]:
        """Finish a part of a job in the end, whatever goes wrong.

        Whoever gave the job would wait for ever otherwise, or would use its memory while another
        part of it is still under way.
        """
        try:
            yield
        except Exception:  # a fault of ours, or no memory: what is not done is missing
            _log.exception("LifeboatCache: a part of a job was lost; please report this")
        finally:
            self._desk.finish_part(job, moved)

    def _start(
        self, member: Member, kind: str, batch: BlockBatch, done: Callable[[Job], None]
    ) -> None:
        """Give a part to a member's store; one that is not there any more refuses it."""
        store = member.store
        if store is not None:
            try:
                run = store.store if kind == "store" else store.load
                run(batch, on_done=done)
                return
            except StoreClosedError:
                pass
            except Exception:  # such as no memory: it has not taken the part on
                _log.exception("LifeboatCache: a target refused blocks; please report this")
        refused = Job("store" if kind == "store" else "load", batch, done)
        refused.outcomes[:] = Outcome.DISABLED if kind == "store" else Outcome.MISSING
        refused.finish_part()
        refused.publish()


def _put(job: Job, rows: _Rows | None, outcomes: npt.NDArray[np.uint8]) -> None:
    if rows is None:
        job.outcomes[:] = outcomes
    else:
        job.outcomes[rows] = outcomes


def _keys(batch: BlockBatch, which: npt.NDArray[np.bool_]) -> Sequence[bytes]:
    if which.all():
        return batch.keys
    return [batch.keys[row] for row in np.flatnonzero(which).tolist()]
