"""Parts of a tensor: what the exact coders look at in one go.

A tensor is tokens times columns, a column being one element of one head. A part is at most
256 tokens and 4,096 columns and one MiB; of a tensor with one token, it is one MiB.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lifeboat_cache.kernels import codec_layout as C  # noqa: N812
from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, inline
from lifeboat_cache.kernels.libc import memcpy
from lifeboat_cache.kernels.memory import bytes_at, words_at

__all__ = [
    "MOST_COLUMNS",
    "PART_BYTES",
    "PART_CONSTANT",
    "PART_COPY",
    "PART_TOKENS",
    "bring",
    "element_of",
    "flat",
    "gather",
    "is_constant",
    "part_columns",
    "part_tokens",
    "put",
    "repeat",
    "scatter",
    "token_start",
]

PART_BYTES = 1 << 20
PART_TOKENS = 256
MOST_COLUMNS = 4096

# The first byte of a stored part.
#: Its elements follow.
PART_COPY = 0
#: All its elements are the one that follows.
PART_CONSTANT = 1


@inline
def element_of(dtype: Any) -> Any:
    """Bytes of an element."""
    if dtype == C.DTYPE_FP32:
        return np.int64(4)
    if dtype == C.DTYPE_BF16 or dtype == C.DTYPE_FP16:
        return np.int64(2)
    return np.int64(1)


@inline
def part_columns(tokens: Any, columns: Any, item: Any) -> Any:
    """Most columns of a part."""
    most = np.int64(MOST_COLUMNS) if tokens > 1 else np.int64(PART_BYTES) // item
    return min(columns, most)


@inline
def part_tokens(tokens: Any, columns: Any, item: Any) -> Any:
    """Most tokens of a part."""
    most = max(np.int64(1), np.int64(PART_BYTES) // (columns * item))
    return min(tokens, min(most, np.int64(PART_TOKENS)))  # noqa: PLW3301 (numba)


@inline
def _row_width(words: Any) -> Any:
    """Bytes of one vector."""
    return words[C.ROW_DIM] * element_of(words[C.ROW_DTYPE])


@inline
def token_start(words: Any, start: Any, token: Any) -> Any:
    """Address of a token's first vector."""
    inner = words[C.ROW_INNER]
    return (
        start
        + (token // inner) * words[C.ROW_OUTER_STRIDE]
        + (token % inner) * words[C.ROW_INNER_STRIDE]
    )


@helper
def flat(
    row: Any, item: Any, start: Any, token: Any, tokens: Any, column: Any, columns: Any
) -> Any:
    """Address of a part whose elements lie one after the other, or 0 if they do not."""
    words = words_at(row)
    width = _row_width(words)
    heads, inner = words[C.ROW_HEADS], words[C.ROW_INNER]
    whole = width * heads
    if heads > 1 and words[C.ROW_HEAD_STRIDE] != width:
        return np.int64(0)
    if tokens > 1:
        if columns * item != whole:
            return np.int64(0)
        if inner > 1 and words[C.ROW_INNER_STRIDE] != whole:
            return np.int64(0)
        if words[C.ROW_OUTER] > 1 and words[C.ROW_OUTER_STRIDE] != whole * inner:
            return np.int64(0)
    return token_start(words, start, token) + column * item


@inline
def _move(
    row: Any,
    item: Any,
    start: Any,
    token: Any,
    column: Any,
    columns: Any,
    first: Any,
    count: Any,
    buffer: Any,
    gathering: Any,
) -> None:
    words = words_at(row)
    width = _row_width(words)
    stride = words[C.ROW_HEAD_STRIDE]
    together = words[C.ROW_HEADS] == 1 or stride == width
    token += first // columns
    skipped = first % columns
    left = count * item
    while left > 0:
        at = (column + skipped) * item
        run = min(left, (columns - skipped) * item)
        left -= run
        skipped = np.int64(0)
        vector = token_start(words, start, token)
        token += 1
        if together:
            if gathering:
                memcpy(buffer, vector + at, np.uint64(run))
            else:
                memcpy(vector + at, buffer, np.uint64(run))
            buffer += run
            continue
        vector += (at // width) * stride
        at %= width
        while run > 0:
            some = min(run, width - at)
            if gathering:
                memcpy(buffer, vector + at, np.uint64(some))
            else:
                memcpy(vector + at, buffer, np.uint64(some))
            buffer += some
            run -= some
            vector += stride
            at = np.int64(0)


@helper
def gather(
    row: Any,
    item: Any,
    start: Any,
    token: Any,
    column: Any,
    columns: Any,
    first: Any,
    count: Any,
    to: Any,
) -> None:
    """Copy elements ``first`` up to before ``first + count`` of a part to where they lie together.

    The part begins at a token and column and has so many columns; elements are counted row
    by row.
    """
    _move(row, item, start, token, column, columns, first, count, to, True)


@helper
def scatter(
    row: Any,
    item: Any,
    start: Any,
    token: Any,
    column: Any,
    columns: Any,
    first: Any,
    count: Any,
    source: Any,
) -> None:
    """The reverse of :func:`gather`."""
    _move(row, item, start, token, column, columns, first, count, source, False)


@helper
def bring(
    row: Any,
    item: Any,
    start: Any,
    token: Any,
    tokens: Any,
    column: Any,
    columns: Any,
    buffer: Any,
) -> Any:
    """Address of a part's elements one after the other; in a buffer if they lie elsewhere."""
    source = flat(row, item, start, token, tokens, column, columns)
    if source != 0:
        return source
    gather(row, item, start, token, column, columns, np.int64(0), tokens * columns, buffer)
    return buffer


@helper
def put(source: Any, size: Any, mode: Any, dst: Any, room: Any) -> Any:
    """Write a part as its first byte and bytes at an address; returns its bytes, or -1."""
    if room < 1 + size:
        return np.int64(-1)
    bytes_at(dst)[0] = np.uint8(mode)
    memcpy(dst + 1, source, np.uint64(size))
    return 1 + size


@helper
def is_constant(source: Any, size: Any, item: Any) -> Any:
    """Whether all elements at an address are the same, bit by bit."""
    at = np.int64(0)
    end = size - item
    while at + 8 <= end:
        if raw.load_u64(source + at) != raw.load_u64(source + at + item):
            return False
        at += 8
    while at < end:
        if raw.load_u8(source + at) != raw.load_u8(source + at + item):
            return False
        at += 1
    return True


@helper
def repeat(to: Any, element: Any, item: Any, count: Any) -> None:
    """Fill memory with copies of an element."""
    for number in range(count):
        memcpy(to + number * item, element, np.uint64(item))
