"""MLX arrays as plain memory.

MLX keeps arrays in memory that the CPU can address, on Apple silicon too. What lies
behind an array may be updated in place by whoever continues with it, but not while
another array shares it: that is why a view made here is an array of its own, and is held
as long as the memory is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

__all__ = ["DTYPES", "bytes_of", "dtype_name", "from_bytes", "memories_of", "memory_of"]

#: MLX's types by the names they are stored under.
DTYPES: dict[str, Any] = {
    name: getattr(mx, name)
    for name in (
        "bool_", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "bfloat16", "float32", "complex64",
    )
}  # fmt: skip

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: Any) -> str:
    """The name of a type of MLX.

    Raises
    ------
    ValueError
        If it is one that is not stored.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise ValueError(f"arrays of {dtype} cannot be stored: report this with MLX's version")
    return name


def _shared(array: mx.array) -> mx.array:
    """Another array over the same memory, as bytes."""
    return array.view(mx.int8 if array.dtype == mx.uint8 else mx.uint8)


def memory_of(array: mx.array, *, row: int = 1) -> tuple[npt.NDArray[Any], mx.array]:
    """The memory of an array; see :func:`memories_of`."""
    (found,) = memories_of([array], row=row)
    return found


def memories_of(
    arrays: Sequence[mx.array], *, row: int = 1
) -> list[tuple[npt.NDArray[Any], mx.array]]:
    """The memory of some arrays.

    Parameters
    ----------
    arrays
        Evaluated here if they are not yet. One whose last ``row`` axes do not lie together is
        copied.
    row
        How many of the last axes have to be contiguous.

    Returns
    -------
    list, for each array, of
        numpy array
            One-byte elements, of the shape of the array but for the last axis. Writing into it
            changes the array.
        mx.array
            Keeps the memory, unchanged by others, as long as it lives.
    """
    arrays = [array if array.ndim else array.reshape(1) for array in arrays]
    views = [_shared(array) for array in arrays]
    mx.eval(views)  # at once: each by itself waits for MLX's thread
    found = []
    for array, shared in zip(arrays, views, strict=True):
        view, memory = shared, np.array(shared, copy=False)
        expected = 1
        for axis in range(1, row + 1):
            if memory.shape[-axis] > 1 and memory.strides[-axis] != expected:
                view = _shared(mx.contiguous(array))
                memory = np.array(view, copy=False)
                break
            expected *= memory.shape[-axis]
        found.append((memory, view))
    return found


def bytes_of(array: mx.array) -> tuple[npt.NDArray[np.uint8], mx.array]:
    """An array's bytes in C order, without a copy where they lie so already."""
    memory, owner = memory_of(array, row=max(1, array.ndim))
    return memory.reshape(-1).view(np.uint8), owner


def from_bytes(data: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> mx.array:
    """An array with a copy of some bytes."""
    kind = DTYPES[dtype]
    size = int(np.prod(shape, dtype=np.int64)) * kind.size
    if data.shape[0] != size:
        raise ValueError(f"{data.shape[0]} bytes are not an array of {size}")
    if not size:
        return mx.zeros(tuple(shape), kind)
    array = mx.array(data)
    return (array.view(kind) if kind != mx.uint8 else array).reshape(tuple(shape))
