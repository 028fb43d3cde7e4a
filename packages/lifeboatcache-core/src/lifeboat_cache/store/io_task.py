"""One part of a job as plain arrays, which an I/O thread works through without Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.codecs.names import RAW
from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.coding import Coding

__all__ = ["IoTask", "Together", "cut", "gather_pieces", "new_progress", "slices"]

#: So much is planned at a time: it takes less time than reading it does, and not so
#: little that letting go of the interpreter after each would matter.
_SLICE_BYTES = 64 << 20


#: To ask an enumeration for a member takes as long as to count the outcomes of a task.
_OK = int(Outcome.OK)

_OPERATIONS = {
    "load": layout.OP_LOAD,
    "store": layout.OP_STORE,
    "encode": layout.OP_ENCODE,
}


def gather_pieces(
    buffers: BlockBuffers, blocks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Pieces of some blocks of a batch, in that order.

    Returns
    -------
    iov
        uint64 ``(n_pieces, 2)``: address and length in bytes, as ``struct iovec``.
    starts
        int64 ``(len(blocks) + 1,)``: pieces of block ``i`` are ``starts[i]:starts[i + 1]``.
    """
    first = buffers.starts[blocks]
    counts = buffers.starts[blocks + 1] - first
    starts = np.zeros(blocks.shape[0] + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    at = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1], dtype=np.int64)
    iov = np.empty((at.shape[0], 2), dtype=np.uint64)
    iov[:, 0] = buffers.addresses[at]
    iov[:, 1] = buffers.lengths[at]
    return iov, starts


def slices(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut the blocks of a job into what is planned at a time; returns ``[first, last)``.

    The first blocks are under way while the last ones are still being planned.
    """
    return cut(sizes, _SLICE_BYTES)


def cut(sizes: npt.NDArray[np.int64], part_bytes: int) -> list[tuple[int, int]]:
    """Cut blocks into consecutive parts of about ``part_bytes``; returns ``[first, last)``."""
    if not sizes.shape[0]:
        return []
    ends = np.cumsum(sizes)
    # Each block belongs to the part in which its middle lies.
    part = (ends - (sizes + 1) // 2) // part_bytes
    inner = (np.flatnonzero(part[1:] != part[:-1]) + 1).tolist()
    return list(zip([0, *inner], [*inner, int(sizes.shape[0])], strict=True))


def new_progress() -> npt.NDArray[np.int64]:
    """How far native threads are with a job: tasks handed over, finished; whether all are there.

    Who waits for finished tasks (:mod:`lifeboat_cache.kernels.collect`) counts the second,
    the planning thread writes the others.
    """
    return np.zeros(3, dtype=np.int64)


@dataclass(eq=False)
class IoTask:
    """Blocks to read and verify, or to hash and write, or only to put through their coders.

    Attributes
    ----------
    kind
        ``"load"``, ``"store"``, or ``"encode"``: nothing is written yet, because how long the
        blocks become is not known before.
    blocks
        int64 ``(n,)``: which blocks of the job's batch these are, in the order of their
        places.
    runs
        int64 ``(n_runs, 5)``: descriptor, ``SCATTER`` or ``BOUNCE``, first block (of this
        task), number of blocks, and a descriptor from which native threads read first what
        the page cache holds, or -1. The blocks of a run lie one after the other in one file.
    offsets, lengths
        int64 ``(n,)``: where each block's bytes begin in its file and how many they are. Of an
        ``"encode"`` task the lengths are filled in.
    iov, starts
        The caller's memory; see :func:`gather_pieces`. Pieces of blocks that are written as they
        are may be longer than the block: what follows fills its last page. ``iov`` may hold
        pieces of other blocks, too.
    bindings
        uint8 ``(n, 96)``: what the checksums are bound to.
    checksums
        uint8 ``(n, 16)``: expected (load) or to be filled in (store).
    chunk_bytes
        How much one system call moves, about.
    algorithms
        uint8 ``(n,)``: algorithm of each checksum.
    outcomes
        uint8 ``(n,)`` of :class:`Outcome`, filled in.
    holds
        What has to stay alive meanwhile: open files, the caller's memory.
    codec
        In which codec the blocks are stored.
    coding
        The coders between the caller's memory and the file, if any.
    staging, places
        Of an ``"encode"`` task: memory that the blocks go to (uint8, on a page boundary), and
        where each begins and ends there at most (int64 ``(n + 1,)``).
    job, detail
        Whatever the submitter wants to find again.
    errno
        First error number met, 0 if none.
    progress
        Of the job, for native threads; see :func:`new_progress`.
    laid_out
        The task as native threads want it, if :class:`Together` has made it; in front of it is
        room for where the progress is. Who changes the arrays of a task does so in place.
    """

    kind: Literal["load", "store", "encode"]
    blocks: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    iov: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    bindings: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint8]
    algorithms: npt.NDArray[np.uint8]
    chunk_bytes: int
    outcomes: npt.NDArray[np.uint8]
    holds: Sequence[Any] = ()
    codec: int = RAW
    coding: Coding | None = None
    staging: npt.NDArray[np.uint8] | None = None
    places: npt.NDArray[np.int64] | None = None
    job: Any = None
    detail: Any = None
    errno: int = 0
    progress: npt.NDArray[np.int64] | None = None
    laid_out: npt.NDArray[np.int64] | None = None
    words: npt.NDArray[np.int64] = field(init=False)

    @property
    def whole(self) -> bool:
        """Whether all of its blocks are where they should be."""
        outcomes = self.outcomes.tobytes()
        return outcomes.count(_OK) == len(outcomes)

    def address(self) -> int:
        """Lay the task out for the native threads; returns where it begins."""
        laid_out = self.laid_out
        if laid_out is None:
            laid_out = np.zeros(1 + layout.TASK_WORDS, dtype=np.int64)
            self._lay_out(laid_out[1:])
        laid_out[0] = 0 if self.progress is None else self.progress.ctypes.data
        self.words = laid_out[1:]
        return int(laid_out.ctypes.data) + 8

    def _lay_out(self, words: npt.NDArray[np.int64]) -> None:
        words[layout.TASK_OP] = _OPERATIONS[self.kind]
        words[layout.TASK_RUNS] = self.runs.shape[0]
        for at, array in (
            (layout.TASK_RUN_TABLE, self.runs),
            (layout.TASK_STARTS, self.starts),
            (layout.TASK_IOV, self.iov),
            (layout.TASK_OFFSETS, self.offsets),
            (layout.TASK_LENGTHS, self.lengths),
            (layout.TASK_BINDINGS, self.bindings),
            (layout.TASK_CHECKSUMS, self.checksums),
            (layout.TASK_OUTCOMES, self.outcomes),
        ):
            words[at] = _address(array)
        words[layout.TASK_CHUNK] = self.chunk_bytes
        if self.coding is not None:
            which, within = self.coding.which, self.coding.within
            if which is None or within is None:
                raise ValueError("the blocks of this task have to be put together in Python")
            rows = self.coding.coded.rows
            words[layout.TASK_ROWS] = rows.ctypes.data
            words[layout.TASK_ROW_COUNT] = rows.shape[0]
            words[layout.TASK_WHICH] = which.ctypes.data
            words[layout.TASK_WITHIN] = within.ctypes.data
        if self.staging is not None and self.places is not None:
            words[layout.TASK_STAGING] = self.staging.ctypes.data
            words[layout.TASK_PLACES] = self.places.ctypes.data
            words[layout.TASK_SIZES] = self.lengths.ctypes.data


@dataclass(frozen=True)
class Together:
    """Blocks that are planned together, and cut into tasks of consecutive ones.

    What numpy does for each array costs the same for all of them as for those of one task.

    Attributes
    ----------
    kind, codec, coding
        Of all tasks.
    blocks, offsets, lengths, iov, starts, bindings, checksums
        As those of a task, of all blocks.
    algorithm
        Of all checksums.
    """

    kind: Literal["load", "store"]
    blocks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    iov: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    bindings: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint8]
    algorithm: int
    codec: int
    coding: Coding | None

    def tasks(
        self,
        bounds: Sequence[tuple[int, int]],
        chunks: Sequence[int],
        descriptors: npt.NDArray[np.int64],
        modes: npt.NDArray[np.int64],
        breaks: npt.NDArray[np.bool_],
        warm: npt.NDArray[np.int64] | None = None,
    ) -> list[IoTask]:
        """Tasks of the blocks ``[first, last)`` each; who plans adds what else belongs to them.

        Parameters
        ----------
        bounds
            Of the tasks, growing; blocks between them belong to none.
        chunks
            :attr:`IoTask.chunk_bytes` of each task.
        descriptors, modes, breaks
            Of each block: its file, how it is moved there, and whether it does not follow the
            block before it.
        warm
            Of each block: a descriptor to read first what the page cache holds; -1 stands for
            none, and so does ``None``.
        """
        if not bounds:
            return []
        firsts, lasts = np.array(bounds, dtype=np.int64).T
        count = self.blocks.shape[0]
        breaks[firsts] = True
        breaks[lasts[lasts < count]] = True
        begins = np.flatnonzero(breaks)
        runs = np.empty((begins.shape[0], layout.RUN_COLUMNS), dtype=np.int64)
        runs[:, 0] = descriptors[begins]
        runs[:, 1] = modes[begins]
        runs[:, 3] = np.diff(begins, append=count)
        # A task counts its blocks from its first one.
        runs[:, 2] = begins - firsts[np.searchsorted(firsts, begins, side="right") - 1]
        runs[:, 4] = -1 if warm is None else warm[begins]
        own, end = np.searchsorted(begins, firsts), np.searchsorted(begins, lasts)
        outcomes = np.full(count, Outcome.PENDING, dtype=np.uint8)
        algorithms = np.full(count, self.algorithm, dtype=np.uint8)
        tables = self._tables(firsts, chunks, runs, own, end - own, outcomes)
        return [
            IoTask(
                kind=self.kind,
                blocks=self.blocks[first:last],
                runs=runs[one:other],
                offsets=self.offsets[first:last],
                lengths=self.lengths[first:last],
                iov=self.iov,
                starts=self.starts[first : last + 1],
                bindings=self.bindings[first:last],
                checksums=self.checksums[first:last],
                algorithms=algorithms[first:last],
                chunk_bytes=chunk,
                outcomes=outcomes[first:last],
                codec=self.codec,
                coding=self.coding,
                laid_out=laid_out,
            )
            for (first, last), chunk, one, other, laid_out in zip(
                bounds, chunks, own.tolist(), end.tolist(), tables, strict=True
            )
        ]

    def _tables(
        self,
        firsts: npt.NDArray[np.int64],
        chunks: Sequence[int],
        runs: npt.NDArray[np.int64],
        own: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        outcomes: npt.NDArray[np.uint8],
    ) -> Sequence[npt.NDArray[np.int64] | None]:
        """The tasks as native threads want them; see :meth:`IoTask.address`."""
        coding = self.coding
        if coding is not None and (coding.which is None or coding.within is None):
            return [None] * firsts.shape[0]  # not for them
        tables = np.zeros((firsts.shape[0], 1 + layout.TASK_WORDS), dtype=np.int64)
        words = tables[:, 1:]
        words[:, layout.TASK_OP] = _OPERATIONS[self.kind]
        words[:, layout.TASK_RUNS] = counts
        words[:, layout.TASK_CHUNK] = chunks
        words[:, layout.TASK_IOV] = _address(self.iov)
        for at, array, begin in (
            (layout.TASK_RUN_TABLE, runs, own),
            (layout.TASK_STARTS, self.starts, firsts),
            (layout.TASK_OFFSETS, self.offsets, firsts),
            (layout.TASK_LENGTHS, self.lengths, firsts),
            (layout.TASK_BINDINGS, self.bindings, firsts),
            (layout.TASK_CHECKSUMS, self.checksums, firsts),
            (layout.TASK_OUTCOMES, outcomes, firsts),
        ):
            words[:, at] = _address(array) + begin * array.strides[0]
        if coding is not None and coding.which is not None and coding.within is not None:
            rows = coding.coded.rows
            words[:, layout.TASK_ROWS] = _address(rows)
            words[:, layout.TASK_ROW_COUNT] = rows.shape[0]
            words[:, layout.TASK_WHICH] = _address(coding.which)
            words[:, layout.TASK_WITHIN] = _address(coding.within)
        return list(tables)


def _address(array: npt.NDArray[Any]) -> int:
    """Where an array begins in memory."""
    if not array.flags.c_contiguous:
        raise ValueError("the arrays of a task have to be contiguous")
    return int(array.ctypes.data)
