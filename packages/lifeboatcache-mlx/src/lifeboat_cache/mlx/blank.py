"""New arrays whose memory nobody has written to.

``mx.zeros`` writes every byte, and so do all other functions of MLX that make arrays. For
what is filled from storage at once that is half of the work. The exception is an array that
is read from a file: here from one that leaves the memory as it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from lifeboat_cache.mlx.arrays import DTYPES

__all__ = ["blank_arrays"]

_log = logging.getLogger("lifeboat_cache")

#: Of less than so many bytes, zeros are made sooner.
_LEAST_BYTES = 4 << 20

#: Types by their names in safetensors files.
_NAMES = {
    "bool_": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "complex64": "C64",
}


class _Untouched:
    """A safetensors file, to be read by MLX, that gives a header and no contents."""

    closed = False

    def __init__(self, header: bytes) -> None:
        self._header = header
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> None:
        self._at = offset + (0, self._at, 1 << 62)[whence]

    def read(self, size: int) -> bytes:
        data = self._header[self._at : self._at + size]
        self._at += size
        return data

    def readinto(self, room: Any) -> int:
        size = len(room)
        known = self._header[self._at : self._at + size]
        room[: len(known)] = known
        self._at += size
        return size


def blank_arrays(wanted: Sequence[tuple[Sequence[int], str]]) -> list[mx.array]:
    """Arrays with memory of their own, which hold anything until they are filled.

    Parameters
    ----------
    wanted
        Shape and type of each, by the name it is stored under.
    """
    sizes = [
        int(np.prod(shape, dtype=np.int64)) * int(DTYPES[dtype].size) for shape, dtype in wanted
    ]
    if sum(sizes) >= _LEAST_BYTES:
        try:
            return _untouched(wanted, sizes)
        except Exception as exc:  # another MLX may read files in another way
            _log.debug("LifeboatCache: MLX makes no arrays without writing to them: %s", exc)
    arrays = [_zeros(shape, dtype) for shape, dtype in wanted]
    mx.eval(arrays)
    return arrays


def _zeros(shape: Sequence[int], dtype: str) -> mx.array:
    return mx.zeros(tuple(shape), DTYPES[dtype])


def _untouched(wanted: Sequence[tuple[Sequence[int], str]], sizes: Sequence[int]) -> list[mx.array]:
    entries: dict[str, Any] = {}
    begin = 0
    for number, ((shape, dtype), size) in enumerate(zip(wanted, sizes, strict=True)):
        if not size:
            continue
        entries[str(number)] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, begin + size],
        }
        begin += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    file = _Untouched(len(header).to_bytes(8, "little") + header)
    found = mx.load(file, format="safetensors")
    arrays = [
        found[str(number)] if size else _zeros(*wanted[number]) for number, size in enumerate(sizes)
    ]
    mx.eval(arrays)
    for array, (shape, dtype) in zip(arrays, wanted, strict=True):
        if array.shape != tuple(shape) or array.dtype != DTYPES[dtype]:
            raise ValueError(f"{array.shape} of {array.dtype} instead of {shape} of {dtype}")
    return arrays
