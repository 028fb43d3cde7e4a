"""The Python twin of the native I/O threads: the same tasks, with the same results."""

from __future__ import annotations

import ctypes
import errno
import mmap

import numpy as np

from lifeboat_cache.checksum import payload_checksum
from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.targets.direct import ALIGNMENT, read_into, write_from

__all__ = ["execute", "verify"]

#: What a vanished file looks like. ESTALE: deleted by another NFS client.
_GONE = frozenset({errno.ENOENT, errno.ESTALE})

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def execute(task: IoTask, key: bytes | None = None) -> None:
    """Work through a task.

    Parameters
    ----------
    task
        Its outcomes and, of a store, its checksums are filled in.
    key
        The integrity key, for keyed checksums.
    """
    for fd, mode, first, count in task.runs.tolist():
        if task.kind == "load":
            _load_run(task, fd, mode, first, first + count, key)
        else:
            _store_run(task, fd, mode, first, first + count, key)


def verify(task: IoTask, block: int, key: bytes | None = None) -> bool:
    """Whether the caller's memory of a block matches its checksum."""
    wanted: bytes = task.checksums[block].tobytes()
    return _checksum(task, block, key) == wanted


def _checksum(task: IoTask, block: int, key: bytes | None) -> bytes:
    return payload_checksum(
        task.bindings[block].tobytes(),
        _pieces(task, block, block + 1),
        algorithm=int(task.algorithms[block]),
        key=key,
    )


def _pieces(task: IoTask, first: int, last: int) -> list[memoryview]:
    """Views of the caller's memory for some blocks."""
    views = []
    for address, length in task.iov[task.starts[first] : task.starts[last]].tolist():
        if length:
            views.append(memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B"))
    return views


def _extent(task: IoTask, first: int, last: int, mode: int) -> tuple[int, int]:
    """Where blocks begin in their file, and how many bytes they take there."""
    begin = int(task.offsets[first])
    end = int(task.offsets[last - 1]) + int(task.lengths[last - 1])
    if mode == layout.BOUNCE:
        end = -(-end // ALIGNMENT) * ALIGNMENT
    return begin, end - begin


def _load_run(task: IoTask, fd: int, mode: int, first: int, last: int, key: bytes | None) -> None:
    begin, size = _extent(task, first, last, mode)
    try:
        if mode == layout.BOUNCE:
            moved = _read_bounced(task, fd, first, last, begin, size)
        else:
            moved = read_into(fd, _pieces(task, first, last), begin)
    except OSError as exc:
        task.errno = task.errno or exc.errno or errno.EIO
        if exc.errno in _GONE:
            task.outcomes[first:last] = Outcome.MISSING
        elif last - first == 1:
            task.outcomes[first] = Outcome.FAILED
        else:
            # One bad sector must not cost its neighbours.
            for block in range(first, last):
                _load_run(task, fd, mode, block, block + 1, key)
        return
    for block in range(first, last):
        if int(task.offsets[block]) + int(task.lengths[block]) > begin + moved:
            task.outcomes[block] = Outcome.MISSING
        else:
            good = verify(task, block, key)
            task.outcomes[block] = Outcome.OK if good else Outcome.CORRUPT


def _read_bounced(task: IoTask, fd: int, first: int, last: int, begin: int, size: int) -> int:
    buffer = mmap.mmap(-1, size) if size else None
    if buffer is None:
        return 0
    try:
        with memoryview(buffer) as view:
            moved = read_into(fd, [view], begin)
            for block in range(first, last):
                at = int(task.offsets[block]) - begin
                for piece in _pieces(task, block, block + 1):
                    part = max(0, min(piece.nbytes, moved - at))
                    piece[:part] = view[at : at + part]
                    at += piece.nbytes
    finally:
        buffer.close()
    return moved


def _store_run(task: IoTask, fd: int, mode: int, first: int, last: int, key: bytes | None) -> None:
    for block in range(first, last):
        task.checksums[block] = np.frombuffer(_checksum(task, block, key), dtype=np.uint8)
    begin, size = _extent(task, first, last, mode)
    try:
        if mode == layout.BOUNCE and size:
            with mmap.mmap(-1, size) as buffer, memoryview(buffer) as view:
                for block in range(first, last):
                    at = int(task.offsets[block]) - begin
                    for piece in _pieces(task, block, block + 1):
                        view[at : at + piece.nbytes] = piece
                        at += piece.nbytes
                write_from(fd, [view], begin)
        else:
            write_from(fd, _pieces(task, first, last), begin)
    except OSError as exc:
        task.errno = task.errno or exc.errno or errno.EIO
        full = exc.errno in _FULL
        if full and last - first > 1:
            # What there is room for is kept.
            for block in range(first, last):
                _store_run(task, fd, mode, block, block + 1, key)
            return
        task.outcomes[first:last] = Outcome.RESERVE if full else Outcome.FAILED
    else:
        task.outcomes[first:last] = Outcome.OK
