"""docs/format.md and docs/interface.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lifeboat_cache import checksum
from lifeboat_cache.checksum import Binding
from lifeboat_cache.format.access import ACCESS
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_DEAD, FileHeader
from lifeboat_cache.format.journal import ENTRY
from lifeboat_cache.targets import layout
from lifeboat_cache.targets.layout import parse_name

DOCUMENT = (Path(__file__).parents[3] / "docs" / "format.md").read_text()

#: Type names of the document by kind and size of a numpy field.
TYPES = {("V", 0): "bytes", ("u", 1): "u8", ("u", 2): "u16", ("u", 4): "u32", ("u", 8): "u64"}

Row = tuple[int, int, str, str]


def table(name: str) -> list[Row]:
    """Offset, size, type and name of each field."""
    marker = f"<!-- table: {name} -->\n"
    assert DOCUMENT.count(marker) == 1
    rows = []
    for line in DOCUMENT.split(marker)[1].splitlines()[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 5
        rows.append((int(cells[0]), int(cells[1]), cells[2], cells[3]))
    assert rows
    return rows


def of_dtype(dtype: np.dtype[Any]) -> list[Row]:
    rows = []
    assert dtype.fields is not None
    for name in dtype.names or ():
        field, offset = dtype.fields[name][:2]
        size = field.itemsize
        rows.append((offset, size, TYPES[field.kind, 0 if field.kind == "V" else size], name))
    return rows


def check_covers(rows: list[Row], size: int) -> None:
    """No gaps, no overlaps, and integers as large as their type says."""
    end = 0
    for offset, length, kind, _ in rows:
        assert offset == end
        end += length
        if kind.startswith("u"):
            assert length == int(kind[1:]) // 8
    assert end == size


def cut(data: bytes, rows: list[Row]) -> dict[str, bytes]:
    return {name: data[offset : offset + size] for offset, size, _, name in rows}


def number(value: bytes) -> int:
    return int.from_bytes(value, "little")


def test_entry_table() -> None:
    check_covers(table("entry"), 128)
    assert table("entry") == of_dtype(ENTRY)


def test_access_table() -> None:
    check_covers(table("access"), 32)
    assert table("access") == of_dtype(ACCESS)


def test_header_table() -> None:
    rows = table("header")
    check_covers(rows, HEADER_BYTES)
    header = FileHeader(MAGIC_DEAD, bytes(range(32)), bytes(range(50, 66)), 0xABCDEF01, 2**40)
    fields = cut(header.pack(), rows)
    assert fields["magic"] == MAGIC_DEAD
    assert number(fields["format"]) == 1
    assert number(fields["header length"]) == 4096
    assert fields["namespace"] == header.namespace
    assert fields["writer"] == header.writer
    assert number(fields["segment"]) == header.segment
    assert number(fields["created"]) == header.created
    for _, size, kind, name in rows:
        if kind == "zeros":
            assert fields[name] == bytes(size)
    assert fields["checksum"] == checksum.header_checksum(header.pack()[:4088])


def test_binding_table() -> None:
    rows = table("binding")
    check_covers(rows, 96)
    key, digest = bytes(range(32)), bytes(range(100, 132))
    fields = cut(Binding(digest).pack(key, 2**63 + 5, 1000, 900, 77), rows)
    assert fields == {
        "key": key,
        "namespace": digest,
        "layout": (2**63 + 5).to_bytes(8, "little"),
        "raw_length": (1000).to_bytes(4, "little"),
        "stored_length": (900).to_bytes(4, "little"),
        "codec": (77).to_bytes(2, "little"),
        "algorithm": b"\x01",
        "reserved": bytes(13),
    }


def test_entry_context_table() -> None:
    rows = table("entry context")
    check_covers(rows, 60)
    writer, digest = bytes(range(16)), bytes(range(100, 132))
    packed = checksum._ENTRY_CONTEXT.pack(writer, 7, 2**40, digest)
    assert cut(packed, rows) == {
        "writer": writer,
        "segment": (7).to_bytes(4, "little"),
        "index": (2**40).to_bytes(8, "little"),
        "namespace": digest,
    }


@pytest.mark.parametrize("context", ["block key v1", "namespace identity v1"])
def test_contexts(context: str) -> None:
    source = Path(checksum.__file__).parent
    module = {"block key v1": "keys.py", "namespace identity v1": "namespace.py"}[context]
    assert f'"lifeboatcache 2026 {context}"' in (source / module).read_text()
    assert f"`lifeboatcache 2026 {context}`" in DOCUMENT.replace("\n", " ")


def test_file_names() -> None:
    listing = DOCUMENT.split("```")[1]
    assert listing.split("/")[1].startswith(layout.ROOT_MARKER)
    kinds = re.findall(r"<writer>\.(<n>\.)?(\w+) ", listing)
    assert sorted(kind for _, kind in kinds) == ["access", "dead", "journal", "lock", "segment"]
    for numbered, kind in kinds:
        parsed = parse_name("0" * 32 + (".00000003" if numbered else "") + f".{kind}")
        assert parsed is not None
        assert parsed.kind == kind
    # The code tells the same.
    for line in listing.strip().splitlines():
        assert line.split("  ")[0].strip() in (layout.__doc__ or "")


def test_tests_named_on_the_interface_page_exist() -> None:
    page = (Path(__file__).parents[3] / "docs" / "interface.md").read_text()
    tests = (Path(__file__).parent / "test_interface_contracts.py").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    assert named == there
    for module in re.findall(r"`(test_\w+\.py)`", page):
        assert (Path(__file__).parent / module).exists()
