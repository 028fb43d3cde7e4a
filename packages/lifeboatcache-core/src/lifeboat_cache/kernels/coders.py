"""Blocks through their coders: which kernel stores and restores each tensor.

The numpy twins are in ``lifeboat_cache.codecs``; a row is described in
``codec_layout.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import coder_dense, coder_fp8, coder_lbq, coder_lossless
from lifeboat_cache.kernels.jit import helper, kernel
from lifeboat_cache.kernels.libc import memcpy
from lifeboat_cache.kernels.memory import words_at

__all__ = ["decode_block", "decode_blocks", "encode_block", "encode_blocks"]

_REFUSED = np.int64(-1)


@helper
def _item_bytes(dtype: Any) -> Any:
    if dtype == C.DTYPE_FP32:
        return np.int64(4)
    if dtype in (C.DTYPE_BF16, C.DTYPE_FP16):
        return np.int64(2)
    return np.int64(1)


@helper
def _copy(row: Any, start: Any, stored: Any, room: Any, storing: Any) -> Any:
    """Copy the vectors of a tensor to or from where they lie one after the other."""
    words = words_at(row)
    width = words[C.ROW_DIM] * _item_bytes(words[C.ROW_DTYPE])
    heads, inner, outer = words[C.ROW_HEADS], words[C.ROW_INNER], words[C.ROW_OUTER]
    if outer * inner * heads * width > room:
        return _REFUSED
    # Axes that lie as they are stored are moved in one go.
    if heads == 1 or words[C.ROW_HEAD_STRIDE] == width:
        width, heads = width * heads, np.int64(1)
        if inner == 1 or words[C.ROW_INNER_STRIDE] == width:
            width, inner = width * inner, np.int64(1)
            if outer == 1 or words[C.ROW_OUTER_STRIDE] == width:
                width, outer = width * outer, np.int64(1)
    at = stored
    for o in range(outer):
        for i in range(inner):
            vector = start + o * words[C.ROW_OUTER_STRIDE] + i * words[C.ROW_INNER_STRIDE]
            for _ in range(heads):
                if storing:
                    memcpy(at, vector, np.uint64(width))
                else:
                    memcpy(vector, at, np.uint64(width))
                vector += words[C.ROW_HEAD_STRIDE]
                at += width
    return at - stored


@helper
def _encode(row: Any, start: Any, dst: Any, room: Any, scratch: Any) -> Any:
    coder = words_at(row)[C.ROW_CODER]
    if coder == C.CODER_COPY:
        return _copy(row, start, dst, room, True)
    if coder == C.CODER_LOSSLESS:
        return coder_lossless.encode(row, start, dst, room, scratch)
    if coder == C.CODER_DENSE:
        return coder_dense.encode(row, start, dst, room, scratch)
    if coder == C.CODER_FP8:
        return coder_fp8.encode(row, start, dst, room, scratch)
    if coder == C.CODER_LBQ:
        return coder_lbq.encode(row, start, dst, room, scratch)
    return _REFUSED


@helper
def _decode(row: Any, start: Any, src: Any, size: Any, scratch: Any) -> Any:
    coder = words_at(row)[C.ROW_CODER]
    if coder == C.CODER_COPY:
        return _copy(row, start, src, size, False)
    if coder == C.CODER_LOSSLESS:
        return coder_lossless.decode(row, start, src, size, scratch)
    if coder == C.CODER_DENSE:
        return coder_dense.decode(row, start, src, size, scratch)
    if coder == C.CODER_FP8:
        return coder_fp8.decode(row, start, src, size, scratch)
    if coder == C.CODER_LBQ:
        return coder_lbq.decode(row, start, src, size, scratch)
    return _REFUSED


@helper
def encode_block(
    rows: Any, count: Any, iov: Any, which: Any, within: Any, dst: Any, room: Any, scratch: Any
) -> Any:
    """Store the tensors of a block one after the other.

    Parameters
    ----------
    rows, count
        Address of the tensors' rows, and how many they are.
    iov
        Address of the pieces of the block, as ``struct iovec``.
    which, within
        Addresses of int64 ``(count,)``: the piece in which each tensor lies, and the byte of
        the piece at which it begins.
    dst, room
        Where it goes, and how many bytes there are.
    scratch
        ``SCRATCH_BYTES`` of working memory, aligned to 64.

    Returns
    -------
    Bytes that it took, or -1 if there was not enough room.
    """
    pieces, numbers, offsets = words_at(iov), words_at(which), words_at(within)
    filled = np.int64(0)
    for tensor in range(count):
        size = _encode(
            rows + tensor * (8 * C.ROW_WORDS),
            pieces[2 * numbers[tensor]] + offsets[tensor],
            dst + filled,
            room - filled,
            scratch,
        )
        if size < 0:
            return _REFUSED
        filled += size
    return filled


@helper
def decode_block(
    rows: Any, count: Any, iov: Any, which: Any, within: Any, src: Any, size: Any, scratch: Any
) -> Any:
    """Restore the tensors of a block; see :func:`encode_block`.

    Returns
    -------
    1 if the stored bytes were such a block and nothing else, or 0.
    """
    pieces, numbers, offsets = words_at(iov), words_at(which), words_at(within)
    taken = np.int64(0)
    for tensor in range(count):
        part = _decode(
            rows + tensor * (8 * C.ROW_WORDS),
            pieces[2 * numbers[tensor]] + offsets[tensor],
            src + taken,
            size - taken,
            scratch,
        )
        if part < 0:
            return np.int64(0)
        taken += part
    return np.int64(taken == size)


@kernel(
    "int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)",
)
def encode_blocks(
    rows: Any,
    count: Any,
    iov: Any,
    starts: Any,
    which: Any,
    within: Any,
    blocks: Any,
    dst: Any,
    places: Any,
    sizes: Any,
    scratch: Any,
) -> Any:
    """Store blocks of one layout.

    Parameters
    ----------
    rows, count, which, within, scratch
        As in :func:`encode_block`.
    iov, starts, blocks
        Pieces of ``blocks`` blocks; those of block ``i`` are ``starts[i]:starts[i + 1]``
        (addresses of uint64 ``(n_pieces, 2)`` and int64 ``(blocks + 1,)``).
    dst, places
        Block ``i`` goes to ``dst + places[i]``, at most up to ``dst + places[i + 1]`` (address
        of int64 ``(blocks + 1,)``).
    sizes
        Address of int64 ``(blocks,)``: bytes of each stored block, or -1.

    Returns
    -------
    Blocks that were stored.
    """
    first, place, size = words_at(starts), words_at(places), words_at(sizes)
    done = np.int64(0)
    for block in range(blocks):
        size[block] = encode_block(
            rows,
            count,
            iov + 16 * first[block],
            which,
            within,
            dst + place[block],
            place[block + 1] - place[block],
            scratch,
        )
        done += np.int64(size[block] >= 0)
    return done


@kernel(
    "int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)",
)
def decode_blocks(
    rows: Any,
    count: Any,
    iov: Any,
    starts: Any,
    which: Any,
    within: Any,
    blocks: Any,
    src: Any,
    places: Any,
    sizes: Any,
    scratch: Any,
) -> Any:
    """Restore blocks of one layout; see :func:`encode_blocks`.

    ``sizes`` says how many bytes each stored block has; it is set to -1 for a block whose
    bytes are not a stored block of this layout. Returns the blocks that were restored.
    """
    first, place, size = words_at(starts), words_at(places), words_at(sizes)
    done = np.int64(0)
    for block in range(blocks):
        good = decode_block(
            rows,
            count,
            iov + 16 * first[block],
            which,
            within,
            src + place[block],
            size[block],
            scratch,
        )
        if not good:
            size[block] = _REFUSED
        done += good
    return done
