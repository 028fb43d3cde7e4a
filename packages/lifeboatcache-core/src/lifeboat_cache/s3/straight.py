"""Reading from a bucket straight into the caller's memory, and verifying what is there.

Where blocks are stored as they are, nothing has to be decoded: their bytes go from the socket to
where they belong, and are hashed there. It saves a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from lifeboat_cache import kernels
from lifeboat_cache.checksum import ALGORITHM_XXH3
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.io_task import IoTask

__all__ = ["cut_views", "verify", "views_of"]

#: Each piece of memory costs a call: on average they are no smaller.
_LEAST_PIECE = 64 << 10


def views_of(task: IoTask, run: int) -> list[memoryview] | None:
    """The memory that a run of a load goes to, in the order of its bytes.

    Returns
    -------
    list of memoryview or None
        ``None`` where that cannot be: the bytes are in a codec, there is a gap between them, the
        memory is in small pieces, or there are no kernels to verify them with.
    """
    algorithms = task.algorithms.tobytes()
    if task.coding is not None or algorithms.count(ALGORITHM_XXH3) != len(algorithms):
        return None
    if not kernels.ready():
        return None
    first, count = int(task.runs[run, 2]), int(task.runs[run, 3])
    offsets = task.offsets[first : first + count]
    lengths = task.lengths[first : first + count]
    starts = task.starts[first : first + count + 1]
    pieces = task.iov[starts[0] : starts[-1]].astype(np.int64)
    sizes = np.add.reduceat(pieces[:, 1], starts[:-1] - starts[0])
    if (offsets[1:] != offsets[:-1] + lengths[:-1]).any() or (sizes != lengths).any():
        return None
    ends = pieces[:, 0] + pieces[:, 1]
    begins = np.flatnonzero(np.concatenate(([True], pieces[1:, 0] != ends[:-1])))
    total = int(lengths.sum())
    if total < begins.shape[0] * _LEAST_PIECE:
        return None
    last = np.append(begins[1:], pieces.shape[0]) - 1
    spans = zip(pieces[begins, 0].tolist(), ends[last].tolist(), strict=True)
    return [_memory(begin, end - begin) for begin, end in spans]


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def cut_views(views: Sequence[memoryview], first: int, last: int) -> Iterator[memoryview]:
    """The bytes from ``first`` up to before ``last``, of all views together."""
    at = 0
    for view in views:
        begin, end = max(first - at, 0), min(last - at, view.nbytes)
        if begin < end:
            yield view[begin:end]
        at += view.nbytes


def verify(task: IoTask) -> None:
    """Fill in the outcomes of a load all of whose bytes are in the caller's memory."""
    from lifeboat_cache.kernels.xxh3 import xxh3_blocks  # ready() has been asked

    begin, end = int(task.starts[0]), int(task.starts[-1])
    addresses, lengths = np.ascontiguousarray(task.iov[begin:end].T)
    found = np.zeros((task.outcomes.shape[0], 16), dtype=np.uint8)
    xxh3_blocks(np.ascontiguousarray(task.bindings), addresses, lengths, task.starts - begin, found)
    same = (found == task.checksums).all(axis=1)
    task.outcomes[:] = np.where(same, np.uint8(Outcome.OK), np.uint8(Outcome.CORRUPT))
