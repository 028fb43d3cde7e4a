"""The header of a safetensors file: which tensors it holds and where.

Reads the header only, without the ``safetensors`` package. A file is eight
bytes little-endian header length, the header (a JSON object), then the data.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifeboat_cache.errors import IdentityError

__all__ = ["MAX_HEADER_BYTES", "TensorEntry", "parse_header", "read_header"]

#: The format's own limit. It bounds what a foreign file can make us allocate.
MAX_HEADER_BYTES = 100_000_000

_LENGTH_BYTES = 8

#: Bits of one element. Types unknown here are taken as they are: their extent
#: is in the header too.
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

_REMEDY = "download or copy the file again, or remove it if it is not part of the checkpoint"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file.

    Attributes
    ----------
    name, dtype
        As the header spells them.
    shape
        Elements per dimension.
    offset
        Bytes from the start of the file to the tensor's first byte.
    length
        Bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Parsers differ in which of two equal keys wins, so such a file has no one meaning.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _entry(name: str, value: object, start: int, data_bytes: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise ValueError(f"tensor {name!r} is not an object")
    dtype, shape, extent = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str):
        raise ValueError(f"tensor {name!r} has no dtype")
    for label, numbers in (("shape", shape), ("data_offsets", extent)):
        if not isinstance(numbers, list) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise ValueError(f"tensor {name!r} has no valid {label}")
    assert isinstance(shape, list)
    assert isinstance(extent, list)
    if len(extent) != 2 or extent[0] > extent[1]:
        raise ValueError(f"tensor {name!r} has no valid data_offsets")
    first, last = extent
    if last > data_bytes:
        raise ValueError(
            f"tensor {name!r} ends {last - data_bytes} bytes behind the end of the file"
        )
    bits = _BITS.get(dtype)
    if bits is not None:
        for size in shape:
            bits *= size
        if bits != 8 * (last - first):
            raise ValueError(f"tensor {name!r} has a shape that does not fit its extent")
    return TensorEntry(name, dtype, tuple(shape), start + first, last - first)


def parse_header(text: bytes, file_bytes: int, where: str) -> list[TensorEntry]:
    """Check a header and list its tensors.

    Parameters
    ----------
    text
        The header without its length.
    file_bytes
        Size of the whole file.
    where
        The file's name, for errors.

    Returns
    -------
    list of TensorEntry
        By offset. The header's ``__metadata__`` is left out: it does not
        change what a tensor holds.

    Raises
    ------
    IdentityError
        If the header is not a safetensors header, or points outside the file.
    """
    start = _LENGTH_BYTES + len(text)
    try:
        # RecursionError: JSON nested without end is a ValueError's close cousin here.
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        entries = [
            _entry(name, value, start, file_bytes - start)
            for name, value in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, RecursionError) as exc:
        raise IdentityError(f"{where}: damaged safetensors header ({exc}): {_REMEDY}") from exc
    entries.sort(key=lambda entry: (entry.offset, entry.length, entry.name))
    return entries


def read_header(fd: int, path: Path) -> list[TensorEntry]:
    """List the tensors of an open safetensors file, by offset.

    Parameters
    ----------
    fd
        The open file.
    path
        Its name, for errors.

    Raises
    ------
    IdentityError
        If the file is truncated, is something else, or cannot be read.
    """
    try:
        size = os.fstat(fd).st_size
        prefix = os.pread(fd, _LENGTH_BYTES, 0)
        if len(prefix) < _LENGTH_BYTES:
            raise IdentityError(
                f"{path}: {size} bytes are too few for a safetensors file: {_REMEDY}"
            )
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise IdentityError(
                f"{path}: not a safetensors file (a header of {length} bytes, the format allows "
                f"{MAX_HEADER_BYTES}): {_REMEDY}"
            )
        if length > size - _LENGTH_BYTES:
            raise IdentityError(
                f"{path}: truncated (a header of {length} bytes in a file of {size}): {_REMEDY}"
            )
        text = os.pread(fd, length, _LENGTH_BYTES)
    except OSError as exc:
        raise IdentityError(
            f"{path}: cannot be read ({exc.strerror}): check the file and its filesystem"
        ) from exc
    if len(text) != length:
        raise IdentityError(f"{path}: truncated while it was read: {_REMEDY}")
    return parse_header(text, size, str(path))
