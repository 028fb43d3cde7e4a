"""The Python twin of the native I/O threads: the same tasks, with the same results."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lifeboat_cache.checksum import payload_checksum
from lifeboat_cache.codecs.blocks import decode_block, encode_block
from lifeboat_cache.errors import FormatError
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
    for fd, mode, first, count, _ in task.runs.tolist():
        if task.kind == "encode":
            _encode(task, first, first + count)
        elif task.kind == "load":
            _load_run(task, fd, mode, first, first + count, key)
        else:
            _store_run(task, fd, mode, first, first + count, key)


def verify(task: IoTask, block: int, key: bytes | None = None) -> bool:
    """Whether the caller's memory of a block matches its checksum."""
    wanted: bytes = task.checksums[block].tobytes()
    return _checksum(task, block, _own_pieces(task, block), key) == wanted


def _checksum(task: IoTask, block: int, pieces: Sequence[memoryview], key: bytes | None) -> bytes:
    return payload_checksum(
        task.bindings[block].tobytes(),
        pieces,
        algorithm=int(task.algorithms[block]),
        key=key,
    )


def _own_pieces(task: IoTask, block: int) -> list[memoryview]:
    """Views of a block's memory, without what fills its last page."""
    views, left = [], int(task.lengths[block])
    for view in _pieces(task, block, block + 1):
        views.append(view[:left])
        left -= views[-1].nbytes
    return views


def _stored_from_memory(task: IoTask, block: int) -> npt.NDArray[np.uint8]:
    """A block of the caller's memory, through its coders."""
    if task.coding is None:
        raise ValueError("a task without coders")
    payload = np.concatenate(
        [np.frombuffer(view, dtype=np.uint8) for view in _pieces(task, block, block + 1)]
    )
    return encode_block(task.coding.coded, payload)


def _restore(task: IoTask, block: int, stored: memoryview, key: bytes | None) -> Outcome:
    """Verify the stored bytes of a block; only then touch the caller's memory."""
    if task.coding is None:
        raise ValueError("a task without coders")
    if _checksum(task, block, [stored], key) != task.checksums[block].tobytes():
        return Outcome.CORRUPT
    payload = np.empty(task.coding.coded.layout.nbytes, dtype=np.uint8)
    try:
        decode_block(task.coding.coded, np.frombuffer(stored, dtype=np.uint8), payload)
    except FormatError:
        return Outcome.CORRUPT
    at = 0
    for piece in _pieces(task, block, block + 1):
        piece[:] = payload[at : at + piece.nbytes].data
        at += piece.nbytes
    return Outcome.OK


def _encode(task: IoTask, first: int, last: int) -> None:
    """Store blocks in memory, where their task says."""
    if task.staging is None or task.places is None:
        raise ValueError("an encode task without memory")
    for block in range(first, last):
        stored = _stored_from_memory(task, block)
        at, size = int(task.places[block]), stored.shape[0]
        filled = -(-size // ALIGNMENT) * ALIGNMENT
        task.staging[at : at + size] = stored
        task.staging[at + size : at + filled] = 0
        task.lengths[block] = size
        task.outcomes[block] = Outcome.OK


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
        if task.coding is not None:
            _read_coded(task, fd, first, last, begin, size, key)
            return
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


def _read_coded(
    task: IoTask, fd: int, first: int, last: int, begin: int, size: int, key: bytes | None
) -> None:
    """Read stored blocks, verify and restore them; sets their outcomes."""
    with mmap.mmap(-1, max(size, 1)) as buffer, memoryview(buffer) as view:
        with view[:size] as room:
            moved = read_into(fd, [room], begin)
        for block in range(first, last):
            at, length = int(task.offsets[block]) - begin, int(task.lengths[block])
            if at + length > moved:
                task.outcomes[block] = Outcome.MISSING
            else:
                # A copy: what numpy holds on to must not keep the buffer open.
                stored = memoryview(bytes(view[at : at + length]))
                task.outcomes[block] = _restore(task, block, stored, key)


def _write_coded(
    task: IoTask, fd: int, first: int, stored: Sequence[npt.NDArray[np.uint8]], size: int
) -> None:
    begin = int(task.offsets[first])
    with mmap.mmap(-1, max(size, 1)) as buffer, memoryview(buffer) as view:
        for block, data in enumerate(stored, first):
            if data.shape[0] != int(task.lengths[block]):
                raise ValueError("a stored block is longer or shorter than its codec says")
            at = int(task.offsets[block]) - begin
            view[at : at + data.shape[0]] = data.data
        with view[:size] as room:
            write_from(fd, [room], begin)


def _store_run(task: IoTask, fd: int, mode: int, first: int, last: int, key: bytes | None) -> None:
    stored = []
    if task.coding is not None:
        stored = [_stored_from_memory(task, block) for block in range(first, last)]
    for block in range(first, last):
        pieces = [stored[block - first].data] if stored else _own_pieces(task, block)
        checksum = _checksum(task, block, pieces, key)
        task.checksums[block] = np.frombuffer(checksum, dtype=np.uint8)
    begin, size = _extent(task, first, last, mode)
    try:
        if stored:
            _write_coded(task, fd, first, stored, size)
        elif mode == layout.BOUNCE and size:
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
