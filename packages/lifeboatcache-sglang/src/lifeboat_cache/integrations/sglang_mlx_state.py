"""The recurrent state of hybrid models on SGLang's MLX backend, as bytes.

SGLang keeps it as snapshots of mlx-lm's cache objects: trees of lists, arrays and plain
values, one for each layer without attention. A state belongs to exactly one length of a
prefix and cannot be cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

__all__ = ["read_state", "write_state"]

_DTYPES: dict[str, Any] = {
    name: getattr(mx, name)
    for name in ("float16", "bfloat16", "float32", "int32", "int64", "uint32", "uint8", "bool_")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_PARTS = ("state", "meta_state", "attrs")


def write_state(snapshots: Mapping[int, Any]) -> npt.NDArray[np.uint8]:
    """A copy of the state of all layers.

    Parameters
    ----------
    snapshots
        SGLang's ``_CacheSnapshot`` of each layer; evaluated.

    Raises
    ------
    ValueError
        If something is in them that cannot be brought back as it was.
    """
    arrays: list[mx.array] = []
    layers = {
        str(number): [_flatten(getattr(one, part), arrays) for part in _PARTS]
        for number, one in snapshots.items()
    }
    facts = [[_NAMES[array.dtype], list(array.shape)] for array in arrays]
    head = json.dumps({"layers": layers, "arrays": facts}, separators=(",", ":")).encode()
    data = [np.array(mx.contiguous(array).view(mx.uint8)).reshape(-1) for array in arrays]
    length = np.frombuffer(len(head).to_bytes(8, "little"), dtype=np.uint8)
    return np.concatenate([length, np.frombuffer(head, dtype=np.uint8), *data])


def _flatten(value: Any, arrays: list[mx.array]) -> Any:
    if isinstance(value, mx.array):
        if value.dtype not in _NAMES or not value.size or not value.ndim:
            raise ValueError(f"a state with {value.shape} of {value.dtype} is not stored")
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(item, arrays) for item in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a state with names that are not texts is not stored")
        return {"dict": [[key, _flatten(item, arrays)] for key, item in value.items()]}
    if value is None or isinstance(value, (bool, int, str)):
        return {"value": value}
    if type(value) is object:
        return {"missing": True}  # SGLang's mark of what a cache does not have
    raise ValueError(f"a state with a {type(value).__name__} is not stored")


def read_state(data: npt.NDArray[np.uint8]) -> dict[int, Any]:
    """The snapshots that :func:`write_state` was given.

    Raises
    ------
    ValueError
        If the bytes are not understood.
    """
    from sglang.srt.hardware_backend.mlx.kv_cache import auxiliary_state

    try:
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        head = json.loads(data[8:begin].tobytes())
        arrays: list[mx.array] = []
        for name, shape in head["arrays"]:
            dtype = _DTYPES[name]
            end = begin + int(np.prod(shape, dtype=np.int64)) * int(dtype.size)
            array = mx.array(data[begin:end])
            arrays.append((array if dtype == mx.uint8 else array.view(dtype)).reshape(shape))
            begin = end
        if begin != data.shape[0]:
            raise ValueError("a stored state has another length than it says")
        mx.eval(arrays)
        missing = auxiliary_state._MISSING
        return {
            int(number): auxiliary_state._CacheSnapshot(
                **{
                    part: _build(tree, arrays, missing)
                    for part, tree in zip(_PARTS, trees, strict=True)
                }
            )
            for number, trees in head["layers"].items()
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"a stored state is not understood: {error!r}") from error


def _build(tree: Any, arrays: list[mx.array], missing: object) -> Any:
    ((kind, inner),) = tree.items()
    if kind == "array":
        return arrays[inner]
    if kind == "list":
        return [_build(item, arrays, missing) for item in inner]
    if kind == "tuple":
        return tuple(_build(item, arrays, missing) for item in inner)
    if kind == "dict":
        return {key: _build(item, arrays, missing) for key, item in inner}
    return missing if kind == "missing" else inner
