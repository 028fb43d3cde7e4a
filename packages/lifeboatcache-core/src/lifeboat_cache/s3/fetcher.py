"""Brings parts of objects to where the kernels read them.

What a load reads from the bucket is cut into ranges: neighbouring records are one range, also
with a little unused space between them, and large ranges are several requests. They are read in
parallel into memory that looks like a file; then the load goes on as one from a disk does, and
verifies and decodes from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lifeboat_cache.outcome import Outcome
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.health import Health
from lifeboat_cache.s3.landing import Landing, LandingArea
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.store.workers import WorkerPool
from lifeboat_cache.targets.direct import ALIGNMENT

__all__ = ["Fetcher", "Source"]

_log = logging.getLogger("lifeboat_cache")

#: Requests that are under way at the same time.
_PARALLEL = 16

#: One request reads so much at most.
_RANGE_BYTES = 8 << 20

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
    """A part of an object, and the runs of a task that lie in it."""

    source: Source
    begin: int
    end: int
    runs: list[int]
    at: int = 0  # where it begins in the landing


@dataclass(eq=False)
class _Fetched:
    """What is under way, or there, for one task."""

    landing: Landing
    left: int = 0
    failed: list[tuple[int, int, Outcome]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Fetcher:
    """Reads from one bucket. Thread-safe.

    Parameters
    ----------
    client, health
        The bucket.
    timeout_s
        What has not come after so many seconds is given up.
    """

    def __init__(self, client: S3Client, health: Health, timeout_s: float) -> None:
        self._client = client
        self._health = health
        self._timeout_s = timeout_s
        self._area = LandingArea()
        self._pool = WorkerPool(_PARALLEL)

    def fetch(
        self,
        tasks: Sequence[IoTask],
        sources: Callable[[int], Source | None],
        ready: Callable[[list[IoTask]], None],
        failed: Callable[[list[IoTask]], None],
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
            Called with tasks of which nothing was read; their outcomes are filled in.
        """
        deadline = time.monotonic() + self._timeout_s
        for task in tasks:
            # It is handed to the threads when the job has been planned long since.
            task.progress = None
            if not self._start(task, sources, deadline, ready, failed):
                task.outcomes[:] = Outcome.UNAVAILABLE
                failed([task])

    def _start(
        self,
        task: IoTask,
        sources: Callable[[int], Source | None],
        deadline: float,
        ready: Callable[[list[IoTask]], None],
        failed: Callable[[list[IoTask]], None],
    ) -> bool:
        if not self._health.may_try():
            return False
        ranges = _ranges(task, sources)
        size = 0
        for one in ranges:
            one.at = size
            size += -(-(one.end - one.begin) // ALIGNMENT) * ALIGNMENT
        landing = self._area.take(size, max(0.0, deadline - time.monotonic()))
        if landing is None:
            return False
        fetched = _Fetched(landing)
        pieces: list[Callable[[], None]] = []
        for one in ranges:
            _move(task, one, landing.fd)
            for first in range(one.begin, one.end, _RANGE_BYTES):
                last = min(one.end, first + _RANGE_BYTES)
                pieces.append(
                    partial(self._piece, task, fetched, one, first, last, deadline, ready, failed)
                )
        fetched.left = len(pieces)
        task.holds = (*task.holds, fetched)
        self._pool.submit("load", pieces)
        return True

    def _piece(
        self,
        task: IoTask,
        fetched: _Fetched,
        of: _Range,
        first: int,
        last: int,
        deadline: float,
        ready: Callable[[list[IoTask]], None],
        failed: Callable[[list[IoTask]], None],
    ) -> None:
        outcome = self._read(fetched.landing, of, first, last, deadline)
        with fetched.lock:
            if outcome is not None:
                for run in of.runs:
                    begin = int(task.runs[run, 2])
                    fetched.failed.append((begin, begin + int(task.runs[run, 3]), outcome))
            fetched.left -= 1
            if fetched.left:
                return
        lost = np.zeros(task.outcomes.shape[0], dtype=bool)
        for begin, end, _ in fetched.failed:
            lost[begin:end] = True
        if lost.all():
            self.settle(task)
            failed([task])
        else:
            ready([task])

    def _read(
        self, landing: Landing, of: _Range, first: int, last: int, deadline: float
    ) -> Outcome | None:
        """Read a part of a range; what its blocks are if that fails."""
        at = of.at + first - of.begin
        try:
            with landing.view[at : at + last - first] as into:
                self._client.read(of.source.key, first, into, deadline)
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
        found = [one for one in task.holds if isinstance(one, _Fetched)]
        if not found:
            return
        task.holds = tuple(one for one in task.holds if not isinstance(one, _Fetched))
        for one in found:
            for begin, end, outcome in one.failed:
                task.outcomes[begin:end] = outcome
            self._area.give_back(one.landing)

    def tidy(self) -> None:
        """Give memory back that was not used for a while."""
        self._area.tidy()

    def close(self) -> None:
        """End its threads when nothing is under way any more."""
        self._pool.stop()


def _ranges(task: IoTask, sources: Callable[[int], Source | None]) -> list[_Range]:
    """What a task reads from objects, neighbours together."""
    found: list[_Range] = []
    before = 0
    for number, (fd, _, first, count) in enumerate(task.runs.tolist()):
        source = sources(fd) if fd < -1 else None
        if source is None:
            continue
        begin = int(task.offsets[first])
        end = int(task.offsets[first + count - 1] + task.lengths[first + count - 1])
        last = found[-1] if found else None
        if last is not None and fd == before and 0 <= begin - last.end <= _GAP_BYTES:
            last.end = end
            last.runs.append(number)
        else:
            found.append(_Range(source, begin, end, [number]))
        before = fd
    return found


def _move(task: IoTask, of: _Range, fd: int) -> None:
    """Have a task read from a landing what lies in a range."""
    for run in of.runs:
        first, count = int(task.runs[run, 2]), int(task.runs[run, 3])
        task.offsets[first : first + count] += of.at - of.begin
        task.runs[run, 0] = fd
