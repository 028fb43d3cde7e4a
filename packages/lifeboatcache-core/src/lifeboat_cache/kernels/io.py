"""What the native I/O threads run: whole tasks, and the loop that takes them.

A task is laid out by :class:`lifeboat_cache.store.io_task.IoTask`; here it is a table
of 64-bit words. Nothing in this module touches a Python object, so the threads never
want the interpreter lock, however busy the engine keeps it.
"""

from __future__ import annotations

import errno as errors
from typing import Any

import numpy as np

from lifeboat_cache.kernels import io_layout as L  # noqa: N812
from lifeboat_cache.kernels import raw, xxh3
from lifeboat_cache.kernels.coders import decode_block, encode_block
from lifeboat_cache.kernels.jit import helper, inline, native
from lifeboat_cache.kernels.libc import (
    errno,
    memcpy,
    memset,
    poll,
    pread,
    preadv,
    preadv_cached,
    pwrite,
    pwritev,
    read,
    write,
)
from lifeboat_cache.kernels.memory import bytes_at, words_at
from lifeboat_cache.kernels.xxh3 import STATE_BYTES
from lifeboat_cache.outcome import Outcome

__all__ = ["io_thread"]

_OK = np.uint8(Outcome.OK)
_MISSING = np.uint8(Outcome.MISSING)
_CORRUPT = np.uint8(Outcome.CORRUPT)
_RESERVE = np.uint8(Outcome.RESERVE)
_CANCELLED = np.uint8(Outcome.CANCELLED)
_FAILED = np.uint8(Outcome.FAILED)

_PAGE = np.int64(4096)
_IOV_MAX = np.int64(1024)
_BINDING = np.int64(96)
_CHECKSUM = np.int64(16)
#: Zeros between the binding and the payload: XXH3 treats short inputs differently.
_PADDING = 160

_ENOENT = errors.ENOENT
_EINTR = errors.EINTR
_EIO = errors.EIO
_EINVAL = errors.EINVAL
_ENOSPC = errors.ENOSPC
_ESTALE = errors.ESTALE
_EDQUOT = errors.EDQUOT
_POLLIN = 1


@inline
def _begin(task: Any, block: Any, state: Any) -> Any:
    """Begin the checksum of a block: what it is bound to."""
    padding = raw.stack(_PADDING)
    raw.zero(padding, _PADDING)
    xxh3.begin(state)
    xxh3.update(state, task[L.TASK_BINDINGS] + block * _BINDING, _BINDING)
    xxh3.update(state, padding, _PADDING)


@inline
def _judge(task: Any, block: Any, state: Any, scratch: Any) -> Any:
    """Set the outcome of a block whose bytes are all there and in the checksum."""
    low, high = xxh3.finish(state)
    xxh3.store_digest(np.uint64(scratch), low, high)
    found, wanted = words_at(scratch), words_at(task[L.TASK_CHECKSUMS] + block * _CHECKSUM)
    same = found[0] == wanted[0] and found[1] == wanted[1]
    bytes_at(task[L.TASK_OUTCOMES])[block] = _OK if same else _CORRUPT


@helper
def _take_turn(task: Any) -> Any:
    """Wait until this thread may compute on what it has read, or will write.

    Threads that compute all at a time share the cores, are done at the same time and ask the
    device at the same time, which is idle in between. In turns, each asks as soon as it can.
    """
    while task[L.TASK_TURN_IN] >= 0:
        if read(np.int32(task[L.TASK_TURN_IN]), task[L.TASK_TURN], np.uint64(1)) == 1:
            return
        if errno() != _EINTR:
            task[L.TASK_TURN_IN] = np.int64(-1)  # then without


@helper
def _give_turn(task: Any) -> Any:
    """Let the next thread compute."""
    while task[L.TASK_TURN_IN] >= 0:
        if write(np.int32(task[L.TASK_TURN_OUT]), task[L.TASK_TURN], np.uint64(1)) == 1:
            return
        if errno() != _EINTR:
            return


@helper
def _sum_up(task: Any, block: Any, state: Any) -> Any:
    """Put a whole block into its checksum; what fills its last page does not belong to it."""
    starts, iov = words_at(task[L.TASK_STARTS]), words_at(task[L.TASK_IOV])
    left = words_at(task[L.TASK_LENGTHS])[block]
    _begin(task, block, state)
    for piece in range(starts[block], starts[block + 1]):
        part = min(iov[2 * piece + 1], left)
        xxh3.update(state, iov[2 * piece], part)
        left -= part


@helper
def _checksum(task: Any, block: Any, out: Any) -> Any:
    """Write the canonical checksum of a block to the address ``out``."""
    state = raw.stack(STATE_BYTES)
    _sum_up(task, block, state)
    low, high = xxh3.finish(state)
    xxh3.store_digest(np.uint64(out), low, high)


@helper
def _verify(task: Any, block: Any, scratch: Any) -> Any:
    """Set the outcome of a block whose bytes are all there."""
    state = raw.stack(STATE_BYTES)
    _sum_up(task, block, state)
    _judge(task, block, state, scratch)


@helper
def _scatter_read(task: Any, fd: Any, first: Any, last: Any, cached: Any, sums: Any) -> Any:
    """Read blocks ``first:last``, which lie one after the other, into their pieces.

    What one call has brought is hashed at once, while it is in the cache. With ``cached``
    only what the page cache holds is read, by a thread whose turn it is. Returns the first
    block that is not wholly read, and the error number.
    """
    chunk = task[L.TASK_CHUNK]
    if cached:
        chunk = min(chunk, np.int64(L.CACHED_CHUNK_BYTES))
    starts, iov = words_at(task[L.TASK_STARTS]), words_at(task[L.TASK_IOV])
    offsets, lengths = words_at(task[L.TASK_OFFSETS]), words_at(task[L.TASK_LENGTHS])
    state = raw.stack(STATE_BYTES)
    end, position = starts[last], offsets[first]
    block, piece, skip = first, starts[first], np.int64(0)
    wanted = lengths[block]  # bytes of the block that are still to come
    _begin(task, block, state)
    while True:
        while wanted == 0:
            _judge(task, block, state, sums)
            block += 1
            if block == last:
                return block, np.int64(0)
            piece, skip = starts[block], np.int64(0)
            wanted = lengths[block]
            _begin(task, block, state)
        count, size = np.int64(0), -skip
        while piece + count < end and count < _IOV_MAX and size < chunk:
            size += iov[2 * (piece + count) + 1]
            count += 1
        beyond = max(size - chunk, np.int64(0))
        tail = 2 * (piece + count - 1) + 1
        iov[tail] -= beyond
        iov[2 * piece] += skip
        iov[2 * piece + 1] -= skip
        if cached:
            moved = preadv_cached(fd, task[L.TASK_IOV] + piece * 16, count, position)
        else:
            moved = preadv(fd, task[L.TASK_IOV] + piece * 16, count, position)
        error = np.int64(0)
        if moved < 0:
            error = np.int64(errno())
        iov[2 * piece] -= skip
        iov[2 * piece + 1] += skip
        iov[tail] += beyond
        if error == _EINTR:
            continue
        if error == _EINVAL and position > offsets[first]:
            # O_DIRECT at the end of a file that was cut at an odd length.
            return block, np.int64(0)
        if error != 0 or moved == 0:
            return block, error
        position += moved
        if not cached:
            _take_turn(task)
        while moved > 0:
            part = min(iov[2 * piece + 1] - skip, moved)
            xxh3.update(state, iov[2 * piece] + skip, part)
            moved -= part
            wanted -= part
            skip += part
            if skip == iov[2 * piece + 1]:
                piece += 1
                skip = np.int64(0)
            while wanted == 0:
                _judge(task, block, state, sums)
                block += 1
                if block == last:
                    if not cached:
                        _give_turn(task)
                    return block, np.int64(0)
                piece, skip = starts[block], np.int64(0)
                wanted = lengths[block]
                _begin(task, block, state)
        if not cached:
            _give_turn(task)


@helper
def _bounce_read(
    task: Any, fd: Any, first: Any, last: Any, scratch: Any, room: Any, sums: Any
) -> Any:
    """Read blocks through an aligned buffer; see :func:`_scatter_read`."""
    starts, iov = words_at(task[L.TASK_STARTS]), words_at(task[L.TASK_IOV])
    offsets, lengths = words_at(task[L.TASK_OFFSETS]), words_at(task[L.TASK_LENGTHS])
    position = offsets[first]
    end = offsets[last - 1] + (lengths[last - 1] + _PAGE - 1) // _PAGE * _PAGE
    block, inside = first, np.int64(0)
    piece, skip = starts[first], np.int64(0)
    while True:
        while block < last and inside == lengths[block]:
            _verify(task, block, sums)
            block += 1
            inside = np.int64(0)
            piece, skip = starts[block], np.int64(0)
        if position >= end or block >= last:
            return block, np.int64(0)
        moved = pread(fd, scratch, min(room, end - position), position)
        if moved < 0:
            error = np.int64(errno())
            if error == _EINTR:
                continue
            if error == _EINVAL and position > offsets[first]:
                return block, np.int64(0)
            return block, error
        if moved == 0:
            return block, np.int64(0)
        _take_turn(task)
        while block < last and offsets[block] + inside < position + moved:
            at = offsets[block] + inside - position
            left = min(lengths[block] - inside, moved - at)
            inside += left
            while left > 0:
                part = min(left, iov[2 * piece + 1] - skip)
                memcpy(iov[2 * piece] + skip, scratch + at, part)
                at += part
                left -= part
                skip += part
                if skip == iov[2 * piece + 1]:
                    piece += 1
                    skip = np.int64(0)
            if inside < lengths[block]:
                break
            _verify(task, block, sums)
            block += 1
            inside = np.int64(0)
            if block < last:
                piece, skip = starts[block], np.int64(0)
        _give_turn(task)
        position += moved
        if moved % _PAGE != 0 and position < end:
            return block, np.int64(0)  # the end of the file


@inline
def _whole_pages(size: Any) -> Any:
    return (size + _PAGE - 1) // _PAGE * _PAGE


@helper
def _sum_up_stored(task: Any, block: Any, state: Any, stored: Any) -> Any:
    """Put a block whose stored bytes lie at an address into its checksum."""
    _begin(task, block, state)
    xxh3.update(state, stored, words_at(task[L.TASK_LENGTHS])[block])


@helper
def _restore(task: Any, block: Any, stored: Any, work: Any, sums: Any) -> Any:
    """Verify a block whose stored bytes lie at an address; only then touch the caller's memory."""
    outcomes = bytes_at(task[L.TASK_OUTCOMES])
    state = raw.stack(STATE_BYTES)
    _sum_up_stored(task, block, state, stored)
    _judge(task, block, state, sums)
    if outcomes[block] != _OK:
        return
    whole = decode_block(
        task[L.TASK_ROWS],
        task[L.TASK_ROW_COUNT],
        task[L.TASK_IOV] + 16 * words_at(task[L.TASK_STARTS])[block],
        task[L.TASK_WHICH],
        task[L.TASK_WITHIN],
        stored,
        words_at(task[L.TASK_LENGTHS])[block],
        work,
    )
    if whole != 1:
        outcomes[block] = _CORRUPT


@inline
def _pread_cached(fd: Any, address: Any, size: Any, position: Any) -> Any:
    iov = raw.stack(16)
    words = words_at(np.int64(iov))
    words[0], words[1] = address, size
    return preadv_cached(fd, np.int64(iov), np.int64(1), position)


@helper
def _coded_read(
    task: Any,
    fd: Any,
    first: Any,
    last: Any,
    cached: Any,
    scratch: Any,
    room: Any,
    work: Any,
    sums: Any,
) -> Any:
    """Read stored blocks whole, verify them and restore them; see :func:`_scatter_read`."""
    offsets, lengths = words_at(task[L.TASK_OFFSETS]), words_at(task[L.TASK_LENGTHS])
    block = first
    while block < last:
        begin = offsets[block]
        end, size = block, np.int64(0)
        while end < last:
            stop = offsets[end] + _whole_pages(lengths[end]) - begin
            if stop > room or (end > block and stop > task[L.TASK_CHUNK]):
                break
            size = stop
            end += 1
        if end == block:
            return block, np.int64(_EIO)  # the planner knows the room there is
        got, error = np.int64(0), np.int64(0)
        while got < size:
            if cached:
                moved = _pread_cached(fd, scratch + got, size - got, begin + got)
            else:
                moved = pread(fd, scratch + got, np.uint64(size - got), begin + got)
            if moved < 0:
                error = np.int64(errno())
                if error == _EINTR:
                    error = np.int64(0)
                    continue
                if error == _EINVAL and got > 0:
                    # O_DIRECT at the end of a file that was cut at an odd length.
                    error = np.int64(0)
                break
            got += moved
            if moved == 0 or got % _PAGE != 0:
                break  # the end of the file
        if not cached:
            _take_turn(task)
        while block < end and offsets[block] - begin + lengths[block] <= got:
            _restore(task, block, scratch + (offsets[block] - begin), work, sums)
            block += 1
        if not cached:
            _give_turn(task)
        if block < end:
            return block, error
    return block, np.int64(0)


@helper
def _read_blocks(
    task: Any,
    fd: Any,
    mode: Any,
    first: Any,
    last: Any,
    scratch: Any,
    room: Any,
    work: Any,
    sums: Any,
) -> Any:
    if task[L.TASK_ROWS] != 0:
        return _coded_read(task, fd, first, last, False, scratch, room, work, sums)
    if mode == L.BOUNCE:
        return _bounce_read(task, fd, first, last, scratch, room, sums)
    return _scatter_read(task, fd, first, last, False, sums)


@helper
def _read_cached(
    task: Any, fd: Any, first: Any, last: Any, scratch: Any, room: Any, work: Any, sums: Any
) -> Any:
    """Read the blocks that the page cache holds; returns the first one that it does not."""
    if task[L.TASK_ROWS] != 0:
        block, _ = _coded_read(task, fd, first, last, True, scratch, room, work, sums)
        return block
    offsets, lengths = words_at(task[L.TASK_OFFSETS]), words_at(task[L.TASK_LENGTHS])
    while first < last:
        # In a run that goes through the aligned buffer, there may be gaps between blocks.
        end = first + 1
        while end < last and offsets[end] == offsets[end - 1] + lengths[end - 1]:
            end += 1
        block, _ = _scatter_read(task, fd, first, end, True, sums)
        if block < end:
            return block
        first = end
    return last


@helper
def _load(task: Any, scratch: Any, room: Any, work: Any, sums: Any) -> Any:
    runs = words_at(task[L.TASK_RUN_TABLE])
    outcomes = bytes_at(task[L.TASK_OUTCOMES])
    for run in range(task[L.TASK_RUNS]):
        fd = np.int32(runs[L.RUN_COLUMNS * run])
        mode = runs[L.RUN_COLUMNS * run + 1]
        first = runs[L.RUN_COLUMNS * run + 2]
        last = first + runs[L.RUN_COLUMNS * run + 3]
        warm = np.int32(runs[L.RUN_COLUMNS * run + 4])
        if warm >= 0:
            # All of it is computing: more threads than there are cores would only drive what
            # each has copied out of the cache before it is hashed.
            _take_turn(task)
            first = _read_cached(task, warm, first, last, scratch, room, work, sums)
            _give_turn(task)
        if first == last:
            continue
        block, error = _read_blocks(task, fd, mode, first, last, scratch, room, work, sums)
        if error != 0 and task[L.TASK_ERRNO] == 0:
            task[L.TASK_ERRNO] = error
        gone = error in (0, _ENOENT, _ESTALE)
        if gone:
            while block < last:
                outcomes[block] = _MISSING
                block += 1
        # One bad sector must not cost its neighbours.
        while block < last:
            done, error = _read_blocks(task, fd, mode, block, block + 1, scratch, room, work, sums)
            if done == block:
                gone = error in (0, _ENOENT, _ESTALE)
                outcomes[block] = _MISSING if gone else _FAILED
            block += 1


@helper
def _scatter_write(task: Any, fd: Any, first: Any, last: Any) -> Any:
    """Write the pieces of blocks that lie one after the other; returns the error number."""
    starts, iov = words_at(task[L.TASK_STARTS]), words_at(task[L.TASK_IOV])
    piece, end = starts[first], starts[last]
    position = words_at(task[L.TASK_OFFSETS])[first]
    skip = np.int64(0)
    while piece < end:
        if iov[2 * piece + 1] == skip:
            piece += 1
            skip = np.int64(0)
            continue
        count = min(end - piece, _IOV_MAX)
        iov[2 * piece] += skip
        iov[2 * piece + 1] -= skip
        moved = pwritev(fd, task[L.TASK_IOV] + piece * 16, count, position)
        error = np.int64(0)
        if moved < 0:
            error = np.int64(errno())
        iov[2 * piece] -= skip
        iov[2 * piece + 1] += skip
        if error == _EINTR:
            continue
        if error != 0:
            return error
        if moved == 0:
            return np.int64(_EIO)  # no progress
        position += moved
        left = moved + skip
        while piece < end and left >= iov[2 * piece + 1]:
            left -= iov[2 * piece + 1]
            piece += 1
        skip = left
    return np.int64(0)


@helper
def _write_and_sum_up(task: Any, fd: Any, block: Any) -> Any:
    """Write the pieces of a long block into the page cache; returns the error number.

    Each part is hashed just before it is copied, so that it comes from memory only once.
    """
    starts, iov = words_at(task[L.TASK_STARTS]), words_at(task[L.TASK_IOV])
    piece, end = starts[block], starts[block + 1]
    position, left = words_at(task[L.TASK_OFFSETS])[block], words_at(task[L.TASK_LENGTHS])[block]
    state = raw.stack(STATE_BYTES)
    _begin(task, block, state)
    skip, hashed = np.int64(0), np.int64(0)  # of this piece: written; in front of it: hashed
    while piece < end:
        count, size = np.int64(0), -skip
        while piece + count < end and count < _IOV_MAX and size < task[L.TASK_CHUNK]:
            size += iov[2 * (piece + count) + 1]
            count += 1
        beyond = max(size - task[L.TASK_CHUNK], np.int64(0))
        tail = 2 * (piece + count - 1) + 1
        iov[tail] -= beyond
        iov[2 * piece] += skip
        iov[2 * piece + 1] -= skip
        ahead = hashed  # a short write leaves some that are in the checksum already
        for part in range(piece, piece + count):
            known = min(ahead, iov[2 * part + 1])
            new = min(iov[2 * part + 1] - known, left)
            xxh3.update(state, iov[2 * part] + known, new)
            ahead -= known
            hashed += new
            left -= new
        moved = pwritev(fd, task[L.TASK_IOV] + piece * 16, count, position)
        error = np.int64(0)
        if moved < 0:
            error = np.int64(errno())
        iov[2 * piece] -= skip
        iov[2 * piece + 1] += skip
        iov[tail] += beyond
        if error == _EINTR:
            continue
        if error != 0:
            return error
        if moved == 0:
            return np.int64(_EIO)  # no progress
        position += moved
        hashed = max(hashed - moved, np.int64(0))
        moved += skip
        while piece < end and moved >= iov[2 * piece + 1]:
            moved -= iov[2 * piece + 1]
            piece += 1
        skip = moved
    low, high = xxh3.finish(state)
    xxh3.store_digest(np.uint64(task[L.TASK_CHECKSUMS] + block * _CHECKSUM), low, high)
    return np.int64(0)


@helper
def _write_all(fd: Any, address: Any, size: Any, position: Any) -> Any:
    while size > 0:
        moved = pwrite(fd, address, size, position)
        if moved < 0:
            error = np.int64(errno())
            if error == _EINTR:
                continue
            return error
        if moved == 0:
            return np.int64(_EIO)
        address += moved
        position += moved
        size -= moved
    return np.int64(0)


@helper
def _bounce_write(task: Any, fd: Any, first: Any, last: Any, scratch: Any, room: Any) -> Any:
    """Write blocks through an aligned buffer, zeros between them."""
    starts, iov = words_at(task[L.TASK_STARTS]), words_at(task[L.TASK_IOV])
    offsets, lengths = words_at(task[L.TASK_OFFSETS]), words_at(task[L.TASK_LENGTHS])
    position, filled = offsets[first], np.int64(0)
    for block in range(first, last):
        gap = offsets[block] - (position + filled)
        piece = starts[block]
        skip, left = np.int64(0), lengths[block]
        while gap > 0 or left > 0:
            if filled == room:
                error = _write_all(fd, scratch, filled, position)
                if error != 0:
                    return error
                position += filled
                filled = np.int64(0)
            if gap > 0:
                part = min(gap, room - filled)
                memset(scratch + filled, np.int32(0), part)
                gap -= part
            else:
                part = min(left, room - filled, iov[2 * piece + 1] - skip)
                memcpy(scratch + filled, iov[2 * piece] + skip, part)
                left -= part
                skip += part
                if skip == iov[2 * piece + 1]:
                    piece += 1
                    skip = np.int64(0)
            filled += part
    padded = (filled + _PAGE - 1) // _PAGE * _PAGE
    memset(scratch + filled, np.int32(0), padded - filled)
    return _write_all(fd, scratch, padded, position)


@helper
def _encode_into(task: Any, block: Any, stored: Any, room: Any, work: Any) -> Any:
    """Store a block in memory, filled with zeros to whole pages; returns its length or -1."""
    size = encode_block(
        task[L.TASK_ROWS],
        task[L.TASK_ROW_COUNT],
        task[L.TASK_IOV] + 16 * words_at(task[L.TASK_STARTS])[block],
        task[L.TASK_WHICH],
        task[L.TASK_WITHIN],
        stored,
        room,
        work,
    )
    if size >= 0:
        memset(stored + size, np.int32(0), np.uint64(_whole_pages(size) - size))
    return size


@helper
def _encode(task: Any, work: Any) -> Any:
    """Store all blocks of a task in memory."""
    places, sizes = words_at(task[L.TASK_PLACES]), words_at(task[L.TASK_SIZES])
    runs, outcomes = words_at(task[L.TASK_RUN_TABLE]), bytes_at(task[L.TASK_OUTCOMES])
    for block in range(runs[2], runs[2] + runs[3]):
        room = places[block + 1] - places[block]
        sizes[block] = _encode_into(task, block, task[L.TASK_STAGING] + places[block], room, work)
        outcomes[block] = _OK if sizes[block] >= 0 else _FAILED


@helper
def _fill(
    task: Any,
    block: Any,
    last: Any,
    single: Any,
    scratch: Any,
    room: Any,
    work: Any,
) -> Any:
    """Store blocks in the aligned buffer while it has room for them; returns the block after.

    What cannot be stored is ``FAILED``, and its place is left as it is.
    """
    offsets, lengths = words_at(task[L.TASK_OFFSETS]), words_at(task[L.TASK_LENGTHS])
    outcomes = bytes_at(task[L.TASK_OUTCOMES])
    state = raw.stack(STATE_BYTES)
    begin, end, filled = offsets[block], block, np.int64(0)
    while end < last:
        at = offsets[end] - begin
        stop = at + _whole_pages(lengths[end])
        if stop > room or (end > block and (single or stop > task[L.TASK_CHUNK])):
            break
        memset(scratch + filled, np.int32(0), np.uint64(at - filled))
        if _encode_into(task, end, scratch + at, lengths[end], work) != lengths[end]:
            outcomes[end] = _FAILED
            memset(scratch + at, np.int32(0), np.uint64(stop - at))
        else:
            _sum_up_stored(task, end, state, scratch + at)
            low, high = xxh3.finish(state)
            xxh3.store_digest(np.uint64(task[L.TASK_CHECKSUMS] + end * _CHECKSUM), low, high)
        filled = stop
        end += 1
    return end, filled


@helper
def _coded_store(task: Any, scratch: Any, room: Any, work: Any) -> Any:
    """Store blocks through their coders, of which the length is known, and write them."""
    runs, offsets = words_at(task[L.TASK_RUN_TABLE]), words_at(task[L.TASK_OFFSETS])
    outcomes = bytes_at(task[L.TASK_OUTCOMES])
    for run in range(task[L.TASK_RUNS]):
        fd = np.int32(runs[L.RUN_COLUMNS * run])
        block = runs[L.RUN_COLUMNS * run + 2]
        last = block + runs[L.RUN_COLUMNS * run + 3]
        error = np.int64(0)
        single = False
        while block < last and error == 0:
            _take_turn(task)
            end, filled = _fill(task, block, last, single, scratch, room, work)
            _give_turn(task)
            if end == block:
                error = np.int64(_EIO)  # the planner knows the room there is
                break
            error = _write_all(fd, scratch, filled, offsets[block])
            if error == 0:
                for done in range(block, end):
                    if outcomes[done] != _FAILED:
                        outcomes[done] = _OK
                block = end
            elif error in (_ENOSPC, _EDQUOT) and not single and end > block + 1:
                # What there is room for is kept.
                single = True
                error = np.int64(0)
        _say_lost(task, block, last, error)


@helper
def _say_lost(task: Any, block: Any, last: Any, error: Any) -> Any:
    """Set the outcomes of blocks that an error has kept from being written."""
    if error == 0:
        return
    outcomes = bytes_at(task[L.TASK_OUTCOMES])
    if task[L.TASK_ERRNO] == 0:
        task[L.TASK_ERRNO] = error
    full = error in (_ENOSPC, _EDQUOT)
    for lost in range(block, last):
        outcomes[lost] = _RESERVE if full else _FAILED


@helper
def _store(task: Any, scratch: Any, room: Any) -> Any:
    runs = words_at(task[L.TASK_RUN_TABLE])
    lengths = words_at(task[L.TASK_LENGTHS])
    outcomes = bytes_at(task[L.TASK_OUTCOMES])
    cached = task[L.TASK_CHUNK] < L.DIRECT_CHUNK_BYTES
    for run in range(task[L.TASK_RUNS]):
        fd = np.int32(runs[L.RUN_COLUMNS * run])
        mode = runs[L.RUN_COLUMNS * run + 1]
        block = runs[L.RUN_COLUMNS * run + 2]
        last = block + runs[L.RUN_COLUMNS * run + 3]
        error = np.int64(0)
        single = False
        while block < last and error == 0:
            if cached and mode == L.SCATTER and lengths[block] > task[L.TASK_CHUNK]:
                error = _write_and_sum_up(task, fd, block)
                if error == 0:
                    outcomes[block] = _OK
                    block += 1
                continue
            end, size = block, np.int64(0)
            _take_turn(task)
            while end < last and (end == block or size + lengths[end] <= task[L.TASK_CHUNK]):
                _checksum(task, end, task[L.TASK_CHECKSUMS] + end * _CHECKSUM)
                size += lengths[end]
                end += 1
                if single:
                    break
            _give_turn(task)
            if mode == L.BOUNCE:
                error = _bounce_write(task, fd, block, end, scratch, room)
            else:
                error = _scatter_write(task, fd, block, end)
            if error == 0:
                for done in range(block, end):
                    outcomes[done] = _OK
                block = end
            elif error in (_ENOSPC, _EDQUOT) and not single and end > block + 1:
                # What there is room for is kept.
                single = True
                error = np.int64(0)
        _say_lost(task, block, last, error)


@helper
def _cancel(task: Any) -> Any:
    """Give up a task that has not started."""
    runs = words_at(task[L.TASK_RUN_TABLE])
    outcomes = bytes_at(task[L.TASK_OUTCOMES])
    for run in range(task[L.TASK_RUNS]):
        first = runs[L.RUN_COLUMNS * run + 2]
        for block in range(first, first + runs[L.RUN_COLUMNS * run + 3]):
            outcomes[block] = _CANCELLED


@helper
def _take(context: Any, waits: Any) -> Any:
    """Wait for a task; returns its address and its lane, loads first."""
    own = words_at(context)
    taken = context + 8 * L.THREAD_TAKEN
    while True:
        # struct pollfd: descriptor (32 bits), events (16), revents (16).
        waits[0] = own[L.THREAD_LOADS] | (_POLLIN << 32)
        waits[1] = own[L.THREAD_STORES] | (_POLLIN << 32)
        poll(context + 8 * L.THREAD_POLL, np.uint64(own[L.THREAD_LANES]), np.int32(-1))
        for lane in range(own[L.THREAD_LANES]):
            got = read(np.int32(own[L.THREAD_LOADS + lane]), taken, np.uint64(8))
            if got == 8:
                return words_at(taken)[0], lane


@helper
def _work(task: Any, own: Any, lane: Any, turn: Any, sums: Any) -> Any:
    direct = task[L.TASK_CHUNK] >= L.DIRECT_CHUNK_BYTES
    copies = task[L.TASK_OP] == L.OP_STORE and not direct
    turns = direct or copies
    task[L.TASK_TURN_IN] = own[L.THREAD_TURNS + 2 * lane] if turns else np.int64(-1)
    task[L.TASK_TURN_OUT] = own[L.THREAD_TURNS + 2 * lane + 1]
    task[L.TASK_TURN] = turn
    scratch, room, work = own[L.THREAD_SCRATCH], own[L.THREAD_ROOM], own[L.THREAD_WORK]
    if task[L.TASK_ROWS] == 0:  # copies stay in the cache
        room = min(room, np.int64(L.BOUNCE_BYTES))
    turn_in = np.int64(-1)
    if copies:
        # All of it is one turn: a file takes one copy into the page cache at a time, and more
        # threads than there are cores would wait for that awake.
        _take_turn(task)
        turn_in = task[L.TASK_TURN_IN]
        task[L.TASK_TURN_IN] = np.int64(-1)
    if task[L.TASK_OP] == L.OP_LOAD:
        _load(task, scratch, room, work, sums)
    elif task[L.TASK_OP] == L.OP_ENCODE:
        _encode(task, work)
    elif task[L.TASK_ROWS] != 0:
        _coded_store(task, scratch, room, work)
    else:
        _store(task, scratch, room)
    if copies:
        task[L.TASK_TURN_IN] = turn_in
        _give_turn(task)


@native("int64(int64)")
def io_thread(context: Any) -> Any:
    """Work through tasks until a 0 comes.

    Parameters
    ----------
    context
        Address of the thread's words (``io_layout.py``).
    """
    own = words_at(context)
    waits = words_at(context + 8 * L.THREAD_POLL)
    answer = context + 8 * L.THREAD_ANSWER
    while True:
        address, lane = _take(context, waits)
        if address != 0:
            task = words_at(address)
            if words_at(own[L.THREAD_FLAGS])[0] != 0:
                _cancel(task)
            else:
                _work(task, own, lane, context + 8 * L.THREAD_TURN, context + 8 * L.THREAD_SUMS)
        words_at(answer)[0] = address
        while write(np.int32(own[L.THREAD_LOADS_DONE + lane]), answer, np.uint64(8)) != 8:
            if errno() != _EINTR:
                break
        if address == 0:
            return np.int64(0)
