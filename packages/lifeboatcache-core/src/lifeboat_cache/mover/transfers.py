"""Jobs of an engine on their way to a mover and back."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.errors import FormatError
from lifeboat_cache.job import Job
from lifeboat_cache.mover.arena import Extent, padded_offsets
from lifeboat_cache.mover.breaker import Breaker
from lifeboat_cache.mover.link import Link
from lifeboat_cache.mover.wire import CODED, REQUEST, Kind, Message
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.records import void

__all__ = ["Transfers", "answer_of"]

_log = logging.getLogger("lifeboat_cache")

Lane = Literal["load", "store"]

#: A job is cut into parts of about so many bytes, and so many blocks at most.
_PART_BYTES = 8 << 20
_PART_BLOCKS = 2048

#: As many bytes may be stored at a time, however slow the target is.
_LEAST_WINDOW = 16 << 20

#: Times of so many parts are kept.
_LATENCIES = 512

#: Messages that may wait to be sent beside jobs.
_MOST_MESSAGES = 4096


@dataclass(eq=False)
class _Part:
    number: int
    task: _Task
    blocks: npt.NDArray[np.int64]
    batch: BlockBatch
    sizes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    extent: Extent | None = None
    asked: float = 0.0
    ahead: int = 0

    @property
    def nbytes(self) -> int:
        return int(self.offsets[-1])


@dataclass(eq=False)
class _Task:
    job: Job
    lane: Lane
    size: int
    since: float
    planning: bool = False
    over: bool = False
    planned: bool = False
    parts: deque[_Part] = field(default_factory=deque)


class Transfers:
    """The queue between a store and its mover, with a deadline for everything in it.

    Three threads work here: one sends, one (of the store) hands in what the mover says, and
    one (of the store) calls :meth:`tick`. No lock is held while memory is copied or
    something is sent.

    Parameters
    ----------
    plan
        Says which blocks of a job are to be moved (int64 ``(n,)``), and gives all others their
        outcomes.
    complete
        Called with a job that is done, and what it was submitted with.
    account
        Told what of a part of a job went through which codec, a ``CODED`` array.
    breaker
        Is told how the target answers.
    timeout_s
        A part that is not done so many seconds after it was sent is given up; so is one
        that could not be sent for as long.
    """

    def __init__(
        self,
        plan: Callable[[Job], npt.NDArray[np.int64]],
        complete: Callable[[Job, int], None],
        account: Callable[[Job, npt.NDArray[Any]], None],
        breaker: Breaker,
        timeout_s: float,
    ) -> None:
        self._plan_job = plan
        self._account = account
        self._complete = complete
        self._breaker = breaker
        self._timeout_s = timeout_s
        self._ready = threading.Condition()
        self._lanes: dict[Lane, deque[_Task]] = {"load": deque(), "store": deque()}
        self._messages: deque[tuple[Kind, int, bytes]] = deque()
        self._link: Link | None = None
        self._sent: dict[int, _Part] = {}
        self._abandoned: dict[int, tuple[Lane, Extent]] = {}
        self._left: list[tuple[Link, int]] = []  # links lost with bytes under way
        self._numbers = itertools.count(1)
        self._used: dict[Lane, int] = {"load": 0, "store": 0}
        self._window = _LEAST_WINDOW
        self._touched = False
        self._latencies: dict[Lane, deque[float]] = {
            "load": deque(maxlen=_LATENCIES),
            "store": deque(maxlen=_LATENCIES),
        }
        self.progress = 0
        self.abandoned_total = 0
        self.dropped_messages = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lifeboat-mover-out", daemon=True)
        self._thread.start()

    # From the store ---------------------------------------------------------

    def submit(self, job: Job, size: int) -> None:
        """Queue a job of ``size`` bytes. Returns at once."""
        task = _Task(job, job.kind, size, time.monotonic())
        with self._ready:
            self._lanes[job.kind].append(task)
            self._ready.notify_all()

    def tell(self, kind: Kind, body: bytes, number: int = 0) -> bool:
        """Queue a message; whether there was room for it, and a mover."""
        with self._ready:
            if self._link is None or len(self._messages) >= _MOST_MESSAGES:
                self.dropped_messages += 1
                return False
            self._messages.append((kind, number, body))
            self._ready.notify_all()
            return True

    def waiting(self) -> bool:
        """Whether something has a deadline."""
        return bool(self._sent or self._lanes["load"] or self._lanes["store"])

    @property
    def abandoned_bytes(self) -> int:
        """Bytes that a mover may still touch, of parts that were given up."""
        with self._ready:
            return self._abandoned_now()

    def _abandoned_now(self) -> int:
        self._left = [(link, size) for link, size in self._left if not link.dead()]
        here = sum(extent.length for _, extent in self._abandoned.values())
        return here + sum(size for _, size in self._left)

    def latency(self, lane: Lane) -> tuple[float, float]:
        """Median and 99th percentile of the seconds that parts took lately; 0.0 if none did."""
        with self._ready:
            times = sorted(self._latencies[lane])
        if not times:
            return 0.0, 0.0
        return times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]

    # The mover comes and goes -----------------------------------------------

    def attach(self, link: Link) -> None:
        """Send to this mover from now on."""
        with self._ready:
            self._link = link
            self._window = _LEAST_WINDOW
            self._touched = False
            self._used = {"load": 0, "store": 0}
            self._messages.clear()
            self._ready.notify_all()

    def wake(self) -> None:
        """Look again whether there is something to do."""
        with self._ready:
            self._ready.notify_all()

    def detach(self, link: Link) -> None:
        """The mover has gone: what it had is lost."""
        with self._ready:
            if self._link is not link:
                return
            self._link = None
            lost = list(self._sent.values())
            self._sent.clear()
            size = sum(part.extent.length for part in lost if part.extent is not None)
            size += sum(extent.length for _, extent in self._abandoned.values())
            self._abandoned.clear()
            if size:
                self._left.append((link, size))
            self._messages.clear()
        for part in lost:
            self._end(part, Outcome.UNAVAILABLE)

    def room(self, arena_bytes: int) -> bool:
        """Whether another arena may be made, or too many are held by movers that do not die."""
        with self._ready:
            return self._abandoned_now() < arena_bytes

    def trim(self) -> None:
        """Let go of the arena's memory, if nothing uses it. To be called when all is quiet."""
        with self._ready:
            link = self._link
            if link is None or not self._touched or link.arena.used:
                return
            extent = link.arena.take(link.arena.size)
            self._touched = False
        if extent is None:
            return
        try:
            # Without the lock: it takes a moment.
            link.arena.forget(extent)
        except OSError:
            pass  # it is kept
        with self._ready:
            link.arena.give_back(extent)
            self._ready.notify_all()

    # Sending ----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._ready:
                found = self._next()
                while found is None:
                    if self._stopping:
                        return
                    self._ready.wait()
                    found = self._next()
                link = self._link
            try:
                if isinstance(found, _Task):
                    self._cut(found)
                elif isinstance(found, _Part):
                    self._move(found, link)
                elif link is not None:
                    kind, number, body = found
                    link.send(kind, number, body)
            except OSError:
                if link is not None:
                    link.shut()  # its reader tells the store
            except Exception:
                _log.exception("LifeboatCache: sending to a mover failed; please report this")
            del found, link  # they hold the engine's memory

    def _next(self) -> _Task | _Part | tuple[Kind, int, bytes] | None:
        """What to do next; under the lock."""
        if self._link is None:
            return None
        if self._messages:
            return self._messages.popleft()
        if not (self._link.usable() and self._breaker.closed):
            return None
        for lane, tasks in self._lanes.items():
            while tasks:
                task = tasks[0]
                if task.over:
                    tasks.popleft()
                    continue
                if not task.planned:
                    task.planning = True
                    return task
                if not task.parts:
                    tasks.popleft()
                    continue
                extent = self._take(lane, task.parts[0].nbytes)
                if extent is None:
                    break
                part = task.parts.popleft()
                part.extent = extent
                part.ahead = self._used[lane]
                return part
        return None

    def _take(self, lane: Lane, size: int) -> Extent | None:
        """Room in the arena; one half is never used by stores."""
        link = self._link
        if link is None:
            return None
        used = self._used[lane]
        if lane == "store" and used and used + size > min(self._window, link.arena.size // 2):
            return None
        extent = link.arena.take(size)
        if extent is not None:
            self._used[lane] += extent.length
            self._touched = True
        return extent

    def _cut(self, task: _Task) -> None:
        """Plan a job and cut it into parts."""
        try:
            parts = self._parts(task, self._plan_job(task.job))
        except Exception:  # a fault of ours: the job fails, the engine goes on
            _log.exception("LifeboatCache: planning a job failed; please report this")
            parts = []
            outcomes = task.job.outcomes
            outcomes[outcomes == Outcome.PENDING] = Outcome.FAILED
        task.job.add_parts(len(parts))
        with self._ready:
            task.planned = True
            task.parts.extend(parts)
            task.planning = False
        self._finish(task, 0)

    def _parts(self, task: _Task, blocks: npt.NDArray[np.int64]) -> list[_Part]:
        link = self._link
        batch = task.job.batch
        sizes = batch.buffers.sizes()[blocks]
        if link is not None:
            large = sizes > link.arena.size // 2
            if large.any():
                task.job.outcomes[blocks[large]] = Outcome.FAILED
                blocks, sizes = blocks[~large], sizes[~large]
        parts = []
        first, total = 0, 0
        for at, size in enumerate((*sizes.tolist(), -1)):
            full = at - first >= _PART_BLOCKS or (total and total + size > _PART_BYTES)
            if size < 0 or full:
                if at > first:
                    mine, its = blocks[first:at], sizes[first:at]
                    # Blocks are numbered in order: as many as there are, are all of them.
                    piece = batch if at - first == len(batch) else batch.take(mine)
                    offsets = padded_offsets(its)
                    parts.append(_Part(next(self._numbers), task, mine, piece, its, offsets))
                first, total = at, 0
            total += size
        return parts

    def _move(self, part: _Part, link: Link | None) -> None:
        """Copy a part into the arena, if it is stored, and tell the mover of it."""
        extent, lane = part.extent, part.task.lane
        if link is None or extent is None:
            self._end(part, Outcome.UNAVAILABLE)
            return
        try:
            if lane == "store":
                link.arena.fill(extent, part.batch.buffers, part.sizes)
            request = _requests(part, extent)
        except OSError as error:
            _log.warning("LifeboatCache: the memory for a transfer cannot be had: %s", error)
            self._give_back(link, part)
            self._end(part, Outcome.FAILED)
            return
        with self._ready:
            if self._link is not link:
                lost = True
            else:
                lost = False
                part.asked = time.monotonic()
                self._sent[part.number] = part
        if lost:
            self._end(part, Outcome.UNAVAILABLE)
            return
        link.send(Kind.STORE if lane == "store" else Kind.LOAD, part.number, request)

    # What the mover says ----------------------------------------------------

    def done(self, link: Link, message: Message) -> None:
        """The mover has done a part."""
        now = time.monotonic()
        coded, said = answer_of(message)
        with self._ready:
            if self._link is not link:
                return
            part = self._sent.pop(message.number, None)
            if part is None:
                # Given up before: only now is its memory nobody's any more.
                late = self._abandoned.pop(message.number, None)
                if late is not None:
                    self._return(link, *late)
                    self._ready.notify_all()
                return
            self.progress += 1
            part.task.since = now
            self._note(part, now - part.asked)
        self._account(part.task.job, coded)
        outcomes = np.array(said, dtype=np.uint8)
        if outcomes.shape[0] != part.blocks.shape[0]:
            outcomes = np.full(part.blocks.shape[0], Outcome.FAILED, dtype=np.uint8)
        if part.task.lane == "load" and (outcomes == Outcome.OK).any() and part.extent:
            try:
                link.arena.empty(part.extent, part.batch.buffers, part.sizes)
            except OSError as error:
                _log.warning("LifeboatCache: a load could not be copied: %s", error)
                outcomes[:] = Outcome.FAILED
        self._judge(outcomes)
        self._give_back(link, part)
        self._end(part, outcomes)

    def _note(self, part: _Part, seconds: float) -> None:
        """Take in how long a part took; under the lock."""
        lane = part.task.lane
        self._latencies[lane].append(seconds)
        link = self._link
        if lane != "store" or link is None:
            return
        # What is under way should take no more than a quarter of the deadline.
        wanted = self._timeout_s / 4
        if seconds > wanted:
            part_of = max(0.5, wanted / seconds)
            self._window = max(_LEAST_WINDOW, int(self._window * part_of))
        elif part.ahead > self._window // 2:
            self._window = min(link.arena.size // 2, int(1.25 * self._window))

    def _judge(self, outcomes: npt.NDArray[np.uint8]) -> None:
        # A mover answers so for a target that it reaches over a network of its own.
        lost = (outcomes == Outcome.FAILED) | (outcomes == Outcome.UNAVAILABLE)
        if lost.all():
            self._breaker.failed("the target answers with errors; see mover.log")
        elif not (outcomes == Outcome.UNAVAILABLE).any():
            self._breaker.succeeded()

    def _give_back(self, link: Link, part: _Part) -> None:
        with self._ready:
            if self._link is link:
                if part.extent is not None:
                    self._return(link, part.task.lane, part.extent)
                    part.extent = None
                self._ready.notify_all()

    def _return(self, link: Link, lane: Lane, extent: Extent) -> None:
        link.arena.give_back(extent)
        self._used[lane] -= extent.length

    # Deadlines and the end --------------------------------------------------

    def tick(self) -> None:
        """End what has passed its deadline; to be called ten times a second."""
        now = time.monotonic()
        with self._ready:
            late = [p for p in self._sent.values() if now - p.asked > self._timeout_s]
            for part in late:
                self._abandon(part)
        for part in late:
            self._breaker.timed_out(part.asked, f"it has not answered within {self._timeout_s:g} s")
            self._end(part, Outcome.TIMEOUT)
        for lane in self._lanes:
            with self._ready:
                link = self._link
                answers = link is not None and link.usable() and self._breaker.closed
                # A target that does not answer now is not waited for.
                oldest = now - self._timeout_s if self._breaker.closed else now
                tasks, parts = self._expired(lane, oldest)
            outcome = Outcome.UNAVAILABLE
            if answers:
                outcome = Outcome.BUSY if lane == "store" else Outcome.TIMEOUT
            self._end_waiting(tasks, parts, outcome)

    def _abandon(self, part: _Part) -> None:
        """Give a part up whose memory the mover may still touch; under the lock."""
        del self._sent[part.number]
        if part.extent is not None:
            self._abandoned[part.number] = (part.task.lane, part.extent)
            self.abandoned_total += part.extent.length

    def _expired(self, lane: Lane, oldest: float) -> tuple[list[_Task], list[_Part]]:
        """Take tasks from before some time out of the line, with their parts; under the lock."""
        tasks: list[_Task] = []
        parts: list[_Part] = []
        kept: deque[_Task] = deque()
        for task in self._lanes[lane]:
            if task.planning or task.since > oldest:
                kept.append(task)
                continue
            task.over = True
            if not task.planned:
                tasks.append(task)
            parts.extend(task.parts)
            task.parts.clear()
        self._lanes[lane] = kept
        return tasks, parts

    def _end_waiting(self, tasks: list[_Task], parts: list[_Part], outcome: Outcome) -> None:
        for part in parts:
            self._end(part, outcome)
        for task in tasks:
            task.job.outcomes[:] = outcome
            self._finish(task, 0)

    def cancel(self, outcome: Outcome = Outcome.CANCELLED, *, sent: bool = False) -> None:
        """End everything that waits, and with ``sent`` what the mover has too."""
        with self._ready:
            found = [self._expired(lane, math.inf) for lane in self._lanes]
            given_up = list(self._sent.values()) if sent else []
            for part in given_up:
                self._abandon(part)
        for part in given_up:
            self._end(part, outcome)
        for tasks, parts in found:
            self._end_waiting(tasks, parts, outcome)

    def after_fork(self) -> None:
        """In a forked child: the threads stayed with the parent, and with them the lock."""
        self._ready = threading.Condition()
        self._link = None
        self._lanes = {"load": deque(), "store": deque()}

    def stop(self) -> None:
        """Let the thread end; nothing may be under way."""
        with self._ready:
            self._stopping = True
            self._link = None
            self._ready.notify_all()

    def _end(self, part: _Part, outcomes: Outcome | npt.NDArray[np.uint8]) -> None:
        job = part.task.job
        job.outcomes[part.blocks] = outcomes
        good = job.outcomes[part.blocks] == Outcome.OK
        self._finish(part.task, int(part.sizes[good].sum()))

    def _finish(self, task: _Task, moved: int) -> None:
        if task.job.finish_part(moved):
            self._complete(task.job, task.size)


def answer_of(message: Message) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """What went through which codec, and the outcomes.

    Raises
    ------
    FormatError
        If the message is not whole.
    """
    body = message.table(np.dtype(np.uint8))
    rows = int(np.frombuffer(body[:8].tobytes().ljust(8, b"\0"), dtype=np.uint64)[0])
    end = 8 + rows * CODED.itemsize
    if body.shape[0] < end:
        raise FormatError("an answer is not whole: restart the engine")
    return np.frombuffer(body[8:end].tobytes(), dtype=CODED), body[end:]


def _requests(part: _Part, extent: Extent) -> bytes:
    batch = part.batch
    rows = np.zeros(len(batch), dtype=REQUEST)
    rows["key"] = void(np.frombuffer(b"".join(batch.keys), dtype=np.uint8).reshape(-1, 32))
    rows["offset"] = part.offsets[:-1] + extent.offset
    rows["length"] = part.sizes
    rows["layout"] = batch.tags()
    rows["salt"] = batch.salt
    for name, values in (
        ("position", batch.positions),
        ("group", batch.groups),
        ("family", batch.families),
        ("parent", batch.parents),
        ("codec", batch.codecs),
    ):
        if values is not None:
            rows[name] = np.asarray(values, dtype=REQUEST[name])
    return rows.tobytes()
