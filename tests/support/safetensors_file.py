"""Writes safetensors files with numpy only, well-formed or damaged on purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Tensor", "bfloat16", "header_bytes", "write_file", "write_sharded"]

_DTYPES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int64": "I64",
    "uint8": "U8",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor as safetensors spells it: dtype, shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Tensor:
        """Take a numpy array as it is."""
        return cls(_DTYPES[array.dtype.name], array.shape, np.ascontiguousarray(array).tobytes())


def bfloat16(array: npt.NDArray[Any]) -> Tensor:
    """Round an array to bf16, which numpy does not have."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return Tensor("BF16", array.shape, rounded.astype("<u2").tobytes())


def header_bytes(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    padding: int = 0,
) -> bytes:
    """The length and header for tensors that lie in the mapping's order."""
    header: dict[str, object] = {}
    if metadata is not None:
        header["__metadata__"] = dict(metadata)
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        offset += len(tensor.data)
    text = json.dumps(header).encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    padding: int = 0,
) -> None:
    """Write one safetensors file."""
    with path.open("wb") as file:
        file.write(header_bytes(tensors, metadata, padding))
        for tensor in tensors.values():
            file.write(tensor.data)


def write_sharded(directory: Path, shards: Sequence[Mapping[str, Tensor]]) -> None:
    """Write ``model-0000I-of-0000N.safetensors`` and their index."""
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(directory / name, tensors, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
