"""Whole blocks through a codec, in the caller's thread."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.codecs.recipes import CodedLayout, coder
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import codec_layout as columns

__all__ = ["decode_block", "encode_block"]

_own = threading.local()


def encode_block(coded: CodedLayout, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Store a block.

    Parameters
    ----------
    coded
        Its layout and codec.
    payload
        uint8 ``(coded.layout.nbytes,)``, contiguous.

    Returns
    -------
    uint8, 1-D: the stored block.
    """
    _check(coded, payload)
    if kernels.ready():
        from lifeboat_cache.kernels.coders import encode_blocks

        stored = np.empty(max(coded.most_bytes, 1), dtype=np.uint8)
        call = _Call(coded, payload, stored, coded.most_bytes)
        if encode_blocks(*call.arguments) == 1:
            return stored[: int(call.sizes[0])]
        raise ValueError("a coder needs more room than it says")
    parts = [
        coder(number).encode(tensor, payload, bits)
        for tensor, (number, bits) in zip(coded.layout.tensors, coded.coders, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)


def decode_block(
    coded: CodedLayout, stored: npt.NDArray[np.uint8], payload: npt.NDArray[np.uint8]
) -> None:
    """Restore a block into ``payload``; see :func:`encode_block`.

    Raises
    ------
    FormatError
        If these bytes are not a stored block of this layout; ``payload`` then holds anything.
    """
    _check(coded, payload)
    if kernels.ready():
        from lifeboat_cache.kernels.coders import decode_blocks

        call = _Call(coded, payload, np.ascontiguousarray(stored), stored.shape[0])
        call.sizes[0] = stored.shape[0]
        if decode_blocks(*call.arguments) != 1:
            raise FormatError(_MALFORMED)
        return
    at = 0
    for tensor, (number, bits) in zip(coded.layout.tensors, coded.coders, strict=True):
        at += coder(number).decode(tensor, stored[at:], payload, bits)
    if at != stored.shape[0]:
        raise FormatError(_MALFORMED)


_MALFORMED = "the bytes are not a stored block of this layout: it is computed again"


def _check(coded: CodedLayout, payload: npt.NDArray[np.uint8]) -> None:
    if payload.shape != (coded.layout.nbytes,) or not payload.flags.c_contiguous:
        raise ValueError(
            f"a payload of this layout is contiguous and has {coded.layout.nbytes} bytes"
        )


class _Call:
    """Arguments of a kernel for one block in one piece."""

    def __init__(
        self,
        coded: CodedLayout,
        payload: npt.NDArray[np.uint8],
        stored: npt.NDArray[np.uint8],
        room: int,
    ) -> None:
        self.sizes = np.zeros(1, dtype=np.int64)
        tensors = coded.layout.tensors
        within = np.array([tensor.offset for tensor in tensors], dtype=np.int64)
        arrays = (
            coded.rows,
            np.array([payload.ctypes.data, payload.nbytes], dtype=np.uint64),
            np.array([0, 1], dtype=np.int64),
            np.zeros(len(tensors), dtype=np.int64),
            within,
            np.array([0, room], dtype=np.int64),
        )
        self._alive = (arrays, payload, stored)
        rows, iov, starts, which, within, places = arrays
        self.arguments = (
            rows.ctypes.data,
            len(tensors),
            iov.ctypes.data,
            starts.ctypes.data,
            which.ctypes.data,
            within.ctypes.data,
            1,
            stored.ctypes.data,
            places.ctypes.data,
            self.sizes.ctypes.data,
            scratch(),
        )


def scratch() -> int:
    """Address of this thread's working memory for coders."""
    memory = getattr(_own, "memory", None)
    if memory is None:
        memory = np.zeros(columns.SCRATCH_BYTES + 64, dtype=np.uint8)
        _own.memory = memory
    return (int(memory.ctypes.data) + 63) // 64 * 64
