"""Jobs at work: cut into tasks, run, and put together again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.codecs.names import codec_name
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.job import Job
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.coding import Codings
from lifeboat_cache.store.counters import Counters
from lifeboat_cache.store.executor import Executor
from lifeboat_cache.store.io_task import IoTask, new_progress
from lifeboat_cache.store.job_queue import JobQueue
from lifeboat_cache.store.loading import Loading
from lifeboat_cache.store.notices import Notices
from lifeboat_cache.store.staging import Staging, StagingArea
from lifeboat_cache.store.storage import Storage
from lifeboat_cache.store.store_plan import Unsized, Written
from lifeboat_cache.store.storing import Storing

__all__ = ["JobRunner"]

_log = logging.getLogger("lifeboat_cache")

#: So many blocks of a job are planned at a time. numpy lets go of the interpreter for arrays
#: of more than 500 elements, and beside an engine that computes in Python it costs up to
#: 5 ms to win it back, each time.
_WINDOW = 448

#: A job is waited for so many seconds at most while it is being planned, which takes about one
#: millisecond; a segment may have to be opened.
_TURN_S = 0.05


class JobRunner:
    """Runs the jobs of a store.

    Parameters
    ----------
    storage, queue, counters, codings, policy, notices
        Those of the store.
    storing, loading
        Plan jobs, and deal with tasks that are done.
    io_workers
        I/O threads.
    integrity_key
        Checksums are keyed with it.

    Attributes
    ----------
    executor
        Who does the I/O, and runs :meth:`start`.
    """

    def __init__(
        self,
        storage: Storage,
        queue: JobQueue,
        counters: Counters,
        codings: Codings,
        policy: CodecPolicy,
        notices: Notices,
        storing: Storing,
        loading: Loading,
        *,
        io_workers: int,
        integrity_key: bytes | None,
    ) -> None:
        self._storage = storage
        self._queue = queue
        self._counters = counters
        self._codings = codings
        self._policy = policy
        self._notices = notices
        self._storing = storing
        self._loading = loading
        self.executor = Executor(io_workers, self._finish_tasks, integrity_key)
        self._staging = StagingArea(self.executor.submit, self._give_encoding_up)
        self._parts = threading.Lock()  # of what is staged
        self._turns = {"store": threading.Lock(), "load": threading.Lock()}  # to plan

    def start(self, job: Job, reserved: int, size: int) -> None:
        """Cut a job into tasks and run them."""
        batch = job.batch
        plan = self._storing.plan if job.kind == "store" else partial(self._loading.plan, {})
        part_bytes = self.executor.part_bytes(size)
        progress = new_progress()
        try:
            for first in range(0, len(batch), _WINDOW):
                last = min(first + _WINDOW, len(batch))
                window = batch if last - first == len(batch) else batch.window(first, last)
                with self._turn(job):
                    for tasks in plan(window, job.outcomes[first:last], part_bytes):
                        job.add_parts(len(tasks))
                        for task in tasks:
                            task.blocks += first
                            task.job = (job, reserved)
                        self._hand_over(tasks, progress)
        except Exception:  # a fault of ours: the rest fails, the engine goes on
            _log.exception("LifeboatCache: planning a job failed; please report this")
            job.outcomes[job.outcomes == Outcome.PENDING] = Outcome.FAILED
        progress[2] = 1
        self._queue.finish(job, reserved)

    @contextmanager
    def _turn(self, job: Job) -> Iterator[None]:
        """Plan in turns, unless another job takes long over it.

        Of several that shared the interpreter, all would be done at the same time, and until
        then the device had nothing to do. What takes long is storage that hangs.
        """
        turn = self._turns[job.kind]
        mine = turn.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            if mine:
                turn.release()

    def _hand_over(self, tasks: list[IoTask], progress: npt.NDArray[np.int64]) -> None:
        """Have tasks of one kind run."""
        if tasks and tasks[0].kind == "encode":
            self._staging.submit(tasks)
            return
        for task in tasks:
            task.progress = progress
        reader = self._storage.reader
        if reader is not None and tasks and tasks[0].kind == "load":
            reader.fetch(tasks, self.executor.submit, self._finish_tasks)
        else:
            self.executor.submit(tasks)

    def _finish_tasks(self, tasks: list[IoTask]) -> None:
        """Take finished tasks of one kind, whatever has become of them."""
        encoded = [task for task in tasks if task.kind == "encode"]
        for task in encoded:
            self._finish_encoding(task)
        if encoded:
            tasks = [task for task in tasks if task.kind != "encode"]
        if not tasks:
            return
        finish = self._storing.finish if tasks[0].kind == "store" else self._loading.finish
        try:
            finish(tasks)
        except Exception:  # a fault of ours: the parts fail, the engine goes on
            _log.exception("LifeboatCache: completing I/O failed; please report this")
            for task in tasks:
                task.outcomes[:] = Outcome.FAILED
        for task in tasks:
            job, size = task.job
            job.outcomes[task.blocks] = task.outcomes
            moved = 0
            try:
                if isinstance(task.detail, Written):
                    task.detail.writer.settle(task.detail.entries)
                    if task.detail.staging is not None:
                        self._unstage(task.detail.staging)
                moved = self._account(job, task)
            except Exception:  # a fault of ours, or no memory: neither this job nor others wait
                _log.exception("LifeboatCache: accounting for I/O failed; please report this")
            if job.finish_part(moved):
                self._queue.complete(job, size)

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
            self.executor.submit(tasks)
        self._unstage(staging)
        if job.finish_part():
            self._queue.complete(job, size)

    def _give_encoding_up(self, tasks: list[IoTask]) -> None:
        """There is no memory for what tasks encode to: their blocks are not kept."""
        self._notices.no_memory_to_encode()
        for task in tasks:
            job, size = task.job
            job.outcomes[task.blocks] = Outcome.FAILED
            if job.finish_part():
                self._queue.complete(job, size)

    def _unstage(self, staging: Staging) -> None:
        with self._parts:
            staging.parts -= 1
            done = staging.parts == 0
        if done:
            self._staging.release(staging)
