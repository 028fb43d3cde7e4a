"""Safetensors headers: well-formed, truncated, foreign, hostile."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors_file import Tensor, header_bytes, write_file

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import weights_identity
from lifeboat_cache.identity.safetensors_header import (
    MAX_HEADER_BYTES,
    TensorEntry,
    parse_header,
    read_header,
)


def entry(
    dtype: object = "F32", shape: Sequence[object] = (2, 2), extent: Sequence[int] = (0, 16)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(extent)}


def write(tmp_path: Path, header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def read(path: Path) -> list[TensorEntry]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, path)
    finally:
        os.close(fd)


def test_it_lists_tensors_by_offset(tmp_path: Path) -> None:
    tensors = {
        "b": Tensor.of(np.zeros((3, 4), np.float32)),
        "a": Tensor.of(np.zeros(5, np.int8)),
        "empty": Tensor.of(np.zeros((0, 7), np.float16)),
    }
    path = tmp_path / "model.safetensors"
    write_file(path, tensors, {"format": "pt"})
    found = {item.name: item for item in read(path)}
    assert found.keys() == tensors.keys()
    assert found["b"].shape == (3, 4)
    assert found["a"].dtype == "I8"
    assert found["a"].offset == found["b"].offset + 48
    assert found["empty"].length == 0
    assert found["a"].offset + 5 == path.stat().st_size


def test_an_unknown_dtype_is_taken_as_it_is(tmp_path: Path) -> None:
    (found,) = read(write(tmp_path, {"w": entry("F4_NEW", (3, 3), (0, 5))}))
    assert (found.dtype, found.length) == ("F4_NEW", 5)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"w": entry(extent=(0, 4000))}, "behind the end"),
        ({"w": entry(extent=(8, 4))}, "data_offsets"),
        ({"w": entry(extent=(-4, 12))}, "data_offsets"),
        ({"w": entry(extent=(0, 15))}, "does not fit"),
        ({"w": entry(shape=(2, 3))}, "does not fit"),
        ({"w": entry(shape=(True, 4))}, "shape"),
        ({"w": entry(dtype=7)}, "dtype"),
        ({"w": [1, 2]}, "not an object"),
        ([1, 2], "not a JSON object"),
        (b"{" * 50_000, "damaged"),
        (b'{"w":' * 50_000, "damaged"),
        (b"\xff\xfe{}", "damaged"),
        (b'{"w": 1, "w": 2}', "twice"),
    ],
)
def test_damaged_headers_are_refused_with_file_and_remedy(
    tmp_path: Path, header: Any, words: str
) -> None:
    path = write(tmp_path, header)
    with pytest.raises(IdentityError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "copy the file again" in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"w": Tensor.of(np.zeros((64, 1024), np.float32))}
    write_file(path, tensors)
    whole = path.read_bytes()
    header = len(header_bytes(tensors))
    for size in (0, 7, 8, header - 1, header, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(IdentityError, match="copy the file again"):
            weights_identity(tmp_path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    path = write(tmp_path, {"w": entry()}, length=length)
    with pytest.raises(IdentityError, match="not a safetensors file"):
        read(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="truncated"):
        read(write(tmp_path, {"w": entry()}, length=1 << 20))


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", b"PK\x03\x04" * 99],
    ids=["lfs-pointer", "zip"],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(IdentityError, match=r"model\.safetensors"):
        weights_identity(tmp_path)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_arbitrary_bytes_are_refused_or_listed_inside_the_file(text: bytes, spare: int) -> None:
    size = 8 + len(text) + spare
    try:
        found = parse_header(text, size, "file")
    except IdentityError:
        return
    assert all(item.offset + item.length <= size for item in found)
