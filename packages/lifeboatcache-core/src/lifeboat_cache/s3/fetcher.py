"""Brings parts of objects to where the kernels read them.

What a load reads from the bucket is cut into ranges: neighbouring records are one range, also
with a little unused space between them, and large ranges are several requests. A small load is
spread over several connections, for time counts; the more is under way, the larger are requests,
for each costs the server as much as some MiB. They are read in parallel into memory that looks
like a file; then the load goes on as one from a disk does, and verifies and decodes from there.
What needs no decoding goes straight to the caller's memory (:mod:`lifeboat_cache.s3.straight`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lifeboat_cache.outcome import Outcome
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.health import Health
from lifeboat_cache.s3.landing import Landing, LandingArea
from lifeboat_cache.s3.straight import cut_views, verify, views_of
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.store.workers import WorkerPool
from lifeboat_cache.targets.direct import ALIGNMENT

__all__ = ["Fetcher", "Source"]

_log = logging.getLogger("lifeboat_cache")

#: What is called with tasks.
_Then = Callable[[list[IoTask]], None]

#: Requests that are under way at the same time.
_PARALLEL = 16

#: One request reads about so much.
_RANGE_BYTES = 8 << 20

#: While fewer requests are under way (first), one asks for about so much (second), if more waits.
_SPREAD = ((4, 2 << 20), (8, 4 << 20))

#: So many times that much is no more than it.
_ABOUT = 1.25

#: So much unused space between two records is read rather than asked around.
_GAP_BYTES = 512 << 10


@dataclass(frozen=True)
class Source:
    """Where a segment is, for the ranges of it.

    Attributes
    ----------
    key
        The object.
    missing
        Called when it is not there; whether it is gone for good.
    """

    key: str
    missing: Callable[[], bool]


@dataclass
class _Range:
    """A part of an object, and the runs of tasks that lie in it."""

    source: Source
    begin: int
    end: int
    runs: list[tuple[IoTask, int]]
    at: int = 0  # where it begins in the landing
    views: list[memoryview] = field(default_factory=list)  # or in the caller's memory


@dataclass(frozen=True, eq=False)
class _Wait:
    """A task that waits for memory; see :meth:`Fetcher.fetch`."""

    task: IoTask
    sources: Callable[[int], Source | None]
    deadline: float
    ready: _Then
    failed: _Then


@dataclass(eq=False)
class _Group:
    """Tasks that are fetched together.

    Attributes
    ----------
    landing
        Where to; ``None``: straight to the caller's memory.
    ready, failed
        See :meth:`Fetcher.fetch`.
    left
        Requests that are under way.
    lost
        What could not be read: task, first and last block, and what they are.
    users
        Tasks that have not been settled.
    """

    tasks: list[IoTask]
    landing: Landing | None
    ready: _Then
    failed: _Then
    left: int = 0
    lost: list[tuple[IoTask, int, int, Outcome]] = field(default_factory=list)
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Fetcher:
    """Reads from one bucket. Thread-safe.

    Parameters
    ----------
    client, health
        The bucket.
    timeout_s
        What has not come after so many seconds is given up; may be changed.
    """

    def __init__(self, client: S3Client, health: Health, timeout_s: float) -> None:
        self._client = client
        self._health = health
        self.timeout_s = timeout_s
        self._area = LandingArea()
        self._pool = WorkerPool(_PARALLEL)
        self._lock = threading.Lock()
        self._under_way = 0  # requests
        self._waiting: deque[_Wait] = deque()

    def fetch(
        self,
        tasks: Sequence[IoTask],
        sources: Callable[[int], Source | None],
        ready: _Then,
        failed: _Then,
    ) -> None:
        """Fetch what tasks read, and hand each of them on.

        Parameters
        ----------
        tasks
            Loads. Descriptors in their tables that are below -1 stand for segments.
        sources
            From such a descriptor to the object; ``None`` if it stands for none.
        ready
            Called with tasks that can be run now.
        failed
            Called with tasks that are over: nothing of them was read, or all of it has been
            verified. Their outcomes are filled in.
        """
        deadline = time.monotonic() + self.timeout_s
        for task in tasks:
            # It is handed to the threads when the job has been planned long since.
            task.progress = None
        with self._lock:
            self._waiting.extend(_Wait(task, sources, deadline, ready, failed) for task in tasks)
        self._go_on()

    def _go_on(self) -> None:
        """Start what waits, as far as there is memory; give up what has waited too long.

        To be called whenever something waits, has been read, or memory has become free. While
        anything waits something is under way, and that ends before long.
        """
        while True:
            with self._lock:
                group = self._next()
            if group is None:
                return
            late = time.monotonic() >= group[0].deadline
            if late or not self._health.may_try() or not self._started(group):
                tasks = [one.task for one in group]
                for task in tasks:
                    task.outcomes[:] = Outcome.UNAVAILABLE
                group[0].failed(tasks)

    def _next(self) -> list[_Wait] | None:
        """What to start now; under the lock."""
        if not self._waiting or not self._area.free or self._under_way >= _PARALLEL:
            return None
        most = next((size for count, size in _SPREAD if self._under_way < count), _RANGE_BYTES)
        if most == _RANGE_BYTES and not self._much_waits():
            return None  # with what comes until one of many requests is done, it is a large one
        group = [self._waiting.popleft()]
        room = _ABOUT * most - _bytes_of(group[0].task)
        while self._waiting:
            other = self._waiting[0]
            if other.ready != group[0].ready or _bytes_of(other.task) > room:
                break
            room -= _bytes_of(other.task)
            group.append(self._waiting.popleft())
        return group

    def _much_waits(self) -> bool:
        """Whether what waits is worth a large request; under the lock."""
        total = 0
        for one in self._waiting:
            total += _bytes_of(one.task)
            if total >= _RANGE_BYTES:
                return True
        return False

    def _started(self, waited: list[_Wait]) -> bool:
        try:
            return self._start(waited)
        except Exception:  # a fault of ours: the blocks are missing, no job waits for ever
            _log.exception("LifeboatCache: a load from a bucket failed; please report this")
            return False

    def _start(self, waited: list[_Wait]) -> bool:
        tasks, sources = [one.task for one in waited], waited[0].sources
        deadline, ready, failed = waited[0].deadline, waited[0].ready, waited[0].failed
        ranges = _ranges(tasks, sources)
        landing: Landing | None = None
        if not _lead_straight(tasks, ranges):
            size = 0
            for one in ranges:
                one.at = size
                size += -(-(one.end - one.begin) // ALIGNMENT) * ALIGNMENT
            try:
                landing = self._area.take(size)
            except OSError as exc:  # no memory, or no descriptors
                _log.warning("LifeboatCache: no memory for a load from a bucket: %s", exc)
                return False
        group = _Group(tasks, landing, ready, failed, users=len(tasks))
        try:
            pieces = self._pieces(group, ranges, deadline)
        except BaseException:
            if landing is not None:
                self._area.give_back(landing)
            raise
        group.left = len(pieces)
        for task in tasks:
            task.holds = (*task.holds, group)
        if not pieces:
            # By a thread of the pool: it ends with the next one that waits.
            self._pool.submit("load", [partial(self._hand_on, group)])
            return True
        with self._lock:
            self._under_way += len(pieces)
        self._pool.submit("load", pieces)
        return True

    def _pieces(
        self, group: _Group, ranges: Sequence[_Range], deadline: float
    ) -> list[Callable[[], None]]:
        """Requests for ranges, whose runs are led to the landing."""
        pieces: list[Callable[[], None]] = []
        for one in ranges:
            if group.landing is not None:
                _move(one, group.landing.fd)
            size = one.end - one.begin
            step = size if size <= _ABOUT * _RANGE_BYTES else _RANGE_BYTES
            for first in range(one.begin, one.end, step):
                last = min(one.end, first + step)
                pieces.append(partial(self._piece, group, one, first, last, deadline))
        # Segments that went while their loads waited.
        found = {(id(task), run) for one in ranges for task, run in one.runs}
        for task in group.tasks:
            for run, (fd, _, begin, count, *_) in enumerate(task.runs.tolist()):
                if fd < -1 and (id(task), run) not in found:
                    group.lost.append((task, begin, begin + count, Outcome.MISSING))
        return pieces

    def _piece(self, group: _Group, of: _Range, first: int, last: int, deadline: float) -> None:
        outcome = self._read(group, of, first, last, deadline)
        with self._lock:
            self._under_way -= 1
        self._go_on()
        with group.lock:
            if outcome is not None:
                for task, run in of.runs:
                    begin = int(task.runs[run, 2])
                    group.lost.append((task, begin, begin + int(task.runs[run, 3]), outcome))
            group.left -= 1
            if group.left:
                return
        self._hand_on(group)

    def _hand_on(self, group: _Group) -> None:
        """Hand tasks on when nothing of theirs is under way any more."""
        there: list[IoTask] = []
        gone: list[IoTask] = []
        for task in group.tasks:
            lost = np.zeros(task.outcomes.shape[0], dtype=bool)
            for whose, begin, end, _ in group.lost:
                if whose is task:
                    lost[begin:end] = True
            if group.landing is None and not lost.all():
                _verify(task)
            over = group.landing is None or lost.all()
            (gone if over else there).append(task)
        for task in gone:
            self.settle(task)
        if gone:
            group.failed(gone)
        if there:
            group.ready(there)

    def _read(
        self, group: _Group, of: _Range, first: int, last: int, deadline: float
    ) -> Outcome | None:
        """Read a part of a range; what its blocks are if that fails."""
        at, key = of.at + first - of.begin, of.source.key
        try:
            if group.landing is None:
                into = list(cut_views(of.views, first - of.begin, last - of.begin))
                self._client.read(key, first, into, deadline)
            else:
                with group.landing.view[at : at + last - first] as part:
                    self._client.read(key, first, [part], deadline)
        except S3Error as exc:
            if exc.fault is Fault.MISSING:
                self._health.good()
                gone = of.source.missing()
                return Outcome.MISSING if gone else Outcome.UNAVAILABLE
            self._health.bad(str(exc))
            return Outcome.UNAVAILABLE
        except Exception:  # a fault of ours: the blocks fail, the engine goes on
            _log.exception("LifeboatCache: reading from a bucket failed; please report this")
            return Outcome.UNAVAILABLE
        self._health.good()
        return None

    def settle(self, task: IoTask) -> None:
        """Take in that a task is over: what could not be fetched was not read, whatever it says."""
        group = next((one for one in task.holds if isinstance(one, _Group)), None)
        if group is None:
            return
        task.holds = tuple(one for one in task.holds if one is not group)
        for whose, begin, end, outcome in group.lost:
            if whose is task:
                task.outcomes[begin:end] = outcome
        with group.lock:
            group.users -= 1
            over = not group.users
        if over and group.landing is not None:
            self._area.give_back(group.landing)
            self._go_on()

    def tidy(self) -> None:
        """Give memory back that was not used for a while."""
        self._area.tidy()

    def close(self) -> None:
        """End its threads when nothing is under way any more."""
        self._pool.stop()


def _bytes_of(task: IoTask) -> int:
    return int(task.lengths.sum())


def _ranges(tasks: Sequence[IoTask], sources: Callable[[int], Source | None]) -> list[_Range]:
    """What tasks read from objects, neighbours together."""
    found: list[_Range] = []
    before = 0
    for task in tasks:
        for number, (fd, _, first, count, *_) in enumerate(task.runs.tolist()):
            source = sources(fd) if fd < -1 else None
            if source is None:
                continue
            begin = int(task.offsets[first])
            end = int(task.offsets[first + count - 1] + task.lengths[first + count - 1])
            last = found[-1] if found else None
            if last is not None and fd == before and 0 <= begin - last.end <= _GAP_BYTES:
                last.end = end
                last.runs.append((task, number))
            else:
                found.append(_Range(source, begin, end, [(task, number)]))
            before = fd
    return found


def _lead_straight(tasks: Sequence[IoTask], ranges: Sequence[_Range]) -> bool:
    """Have ranges read to the caller's memory, if that goes for all that the tasks read."""
    if any((task.runs[:, 0] >= -1).any() for task in tasks):
        return False  # what is staged here is read by the kernels, when the rest has come
    for one in ranges:
        for task, run in one.runs:
            views = views_of(task, run)
            if views is None:
                return False
            one.views += views
        if sum(view.nbytes for view in one.views) != one.end - one.begin:
            return False  # there are gaps between runs
    return bool(ranges)


def _verify(task: IoTask) -> None:
    try:
        verify(task)
    except Exception:  # a fault of ours: the blocks fail, the engine goes on
        _log.exception("LifeboatCache: verifying what was loaded failed; please report this")
        task.outcomes[:] = Outcome.FAILED


def _move(of: _Range, fd: int) -> None:
    """Have tasks read from a landing what lies in a range."""
    for task, run in of.runs:
        first, count = int(task.runs[run, 2]), int(task.runs[run, 3])
        task.offsets[first : first + count] += of.at - of.begin
        task.runs[run, 0] = fd
