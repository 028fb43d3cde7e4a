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
from lifeboat_cache.store.coding import Coding

__all__ = ["IoTask", "cut", "gather_pieces", "new_progress", "slices"]

#: So much is planned at a time: it takes less time than reading it does, and not so
#: little that letting go of the interpreter after each would matter.
_SLICE_BYTES = 64 << 20


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
        are may be longer than the block: what follows fills its last page.
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
    words: npt.NDArray[np.int64] = field(init=False)

    def address(self) -> int:
        """Lay the task out for the native threads; returns where it begins."""
        laid_out = np.zeros(1 + layout.TASK_WORDS, dtype=np.int64)
        laid_out[0] = 0 if self.progress is None else self.progress.ctypes.data
        words = laid_out[1:]
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
            if not array.flags.c_contiguous:
                raise ValueError("the arrays of a task have to be contiguous")
            words[at] = array.ctypes.data
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
        self.words = words
        return int(words.ctypes.data)
