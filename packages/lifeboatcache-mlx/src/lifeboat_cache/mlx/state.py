"""A cache's whole state as bytes.

A header (its length in 8 bytes, then JSON) says what lies behind it: arrays, in the order
in which the header names them. The store verifies the bytes before anybody reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from lifeboat_cache.mlx.arrays import bytes_of, dtype_name, from_bytes

__all__ = ["Written", "read_state", "write_state"]

_FORMAT = 1
_DEPTH = 16


class Written:
    """A state as pieces of memory.

    Attributes
    ----------
    pieces
        uint8 arrays, the header first.
    owners
        Keep the memory of the pieces.
    """

    def __init__(self, header: bytes, arrays: Sequence[mx.array]) -> None:
        first = len(header).to_bytes(8, "little") + header
        self.pieces: list[npt.NDArray[np.uint8]] = [np.frombuffer(first, dtype=np.uint8)]
        self.owners: list[Any] = [first]
        for array in arrays:
            memory, owner = bytes_of(array)
            if memory.shape[0]:
                self.pieces.append(memory)
                self.owners.append(owner)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.shape[0] for piece in self.pieces)


def write_state(state: Any) -> Written:
    """A tree of arrays, numbers, texts, lists and tuples as bytes.

    Raises
    ------
    ValueError
        If it holds something else.
    """
    arrays: list[mx.array] = []
    tree = _write(state, arrays, 0)
    mx.eval(arrays)
    header = json.dumps({"format": _FORMAT, "tree": tree}, separators=(",", ":"))
    return Written(header.encode(), arrays)


def _write(value: Any, arrays: list[mx.array], depth: int) -> Any:
    if depth > _DEPTH:
        raise ValueError("the state of a cache is nested too deeply to be stored")
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"a": [list(value.shape), dtype_name(value.dtype)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        name = "l" if isinstance(value, list) else "t"
        return {name: [_write(item, arrays, depth + 1) for item in value]}
    raise ValueError(
        f"the state of a cache holds a {type(value).__name__}, which cannot be stored: "
        "report this with mlx-lm's version"
    )


def read_state(data: npt.NDArray[np.uint8]) -> Any:
    """What :func:`write_state` wrote, with arrays of their own.

    Raises
    ------
    ValueError
        If the bytes are not such a state.
    """
    length = int.from_bytes(data[:8].tobytes(), "little")
    if data.shape[0] < 8 + length:
        raise ValueError("the stored state is shorter than it says")
    header = json.loads(data[8 : 8 + length].tobytes())
    if header["format"] != _FORMAT:
        raise ValueError(f"the stored state has the unknown format {header['format']}")
    rest = _Rest(data[8 + length :])
    tree = _read(header["tree"], rest)
    if rest.data.shape[0]:
        raise ValueError("the stored state is longer than it says")
    return tree


class _Rest:
    """Bytes that have not been read yet."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data

    def take(self, shape: list[int], dtype: str) -> mx.array:
        size = int(np.prod(shape, dtype=np.int64)) * _item(dtype)
        mine, self.data = self.data[:size], self.data[size:]
        return from_bytes(mine, shape, dtype)


def _item(dtype: str) -> int:
    from lifeboat_cache.mlx.arrays import DTYPES

    return int(DTYPES[dtype].size)


def _read(value: Any, rest: _Rest) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, items),) = value.items()
    if name == "a":
        return rest.take(*items)
    read = [_read(item, rest) for item in items]
    return read if name == "l" else tuple(read)
