"""Flipped bits, wherever they are: at most the block they are in, never a wrong byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from faultkit.trees import Tree, load_all, opened, store_all
from hypothesis import given, settings
from hypothesis import strategies as st

from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES
from lifeboat_cache.interface import Namespace, State
from lifeboat_cache.testing import flip_byte

#: Fields of the header of every file: offset and bytes, as docs/format.md has them.
HEADER = {
    "magic": (0, 8), "format": (8, 4), "header length": (12, 4), "namespace": (16, 32),
    "writer": (48, 16), "segment": (64, 4), "reserved": (68, 4), "created": (72, 8),
    "padding": (80, 4008), "checksum": (4088, 8),
}  # fmt: skip

ENTRY_FIELDS = {
    name: (int(ENTRY.fields[name][1]), int(ENTRY.fields[name][0].itemsize))
    for name in ENTRY.names or ()
    if ENTRY.fields is not None
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    return Tree(tmp_path_factory.mktemp("original") / "kv", namespace)


@pytest.fixture
def damaged(tree: Tree, tmp_path: Path) -> Path:
    """A copy of the tree to damage."""
    return tree.copy(tmp_path / "damaged")


def ends(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """The lowest bit of the first byte and the highest bit of the last one."""
    yield offset, 0x01
    yield offset + length - 1, 0x80


@pytest.mark.parametrize("field", HEADER)
@pytest.mark.parametrize("kind", ["journal", "segment", "dead", "access"])
def test_every_field_of_every_header(tree: Tree, tmp_path: Path, kind: str, field: str) -> None:
    name = tree.of_kind(kind)[0]
    for offset, mask in ends(*HEADER[field]):
        root = tree.copy(tmp_path / "damaged")
        flip_byte(root / name, offset, mask)
        tree.verify(root, tree.touched_by(name, offset, offset))


@pytest.mark.parametrize("field", ENTRY_FIELDS)
def test_every_field_of_a_journal_entry(tree: Tree, tmp_path: Path, field: str) -> None:
    for name in tree.of_kind("journal"):
        count = ((tree.root / name).stat().st_size - HEADER_BYTES) // ENTRY_BYTES
        # The last one of the second writer is a tombstone.
        for at, mask in ends(*ENTRY_FIELDS[field]):
            index = count - 1 if mask == 0x80 else count // 2
            offset = HEADER_BYTES + index * ENTRY_BYTES + at
            root = tree.copy(tmp_path / "damaged")
            flip_byte(root / name, offset, mask)
            tree.verify(root, tree.touched_by(name, offset, offset), bad=1)


@pytest.mark.parametrize("bit", range(0, 256, 17))
def test_flipped_bit_of_a_key_serves_the_block_under_neither_key(
    tree: Tree, damaged: Path, bit: int
) -> None:
    name = tree.of_kind("journal")[1]
    at = HEADER_BYTES + 3 * ENTRY_BYTES + bit // 8
    before = (damaged / name).read_bytes()
    key = before[HEADER_BYTES + 3 * ENTRY_BYTES :][:32]
    flip_byte(damaged / name, at, 1 << bit % 8)
    flipped = (damaged / name).read_bytes()[HEADER_BYTES + 3 * ENTRY_BYTES :][:32]
    store = opened(damaged, tree.namespace)
    assert store.lookup([key, flipped]).tolist() == [0, 0]
    assert store.close()
    tree.verify(damaged, tree.touched_by(name, at, at), bad=1)


@given(data=st.data())
def test_any_bits_of_any_files(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tree.copy(tmp_path_factory.getbasetemp() / "flipped")
    lost: set[int] = set()
    names = [name for name in tree.files() if not name.endswith("lifeboat-cache.json")]
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(names))
        size = (tree.root / name).stat().st_size
        # Half of the flips outside of the payloads, which are most of the bytes.
        near = st.integers(0, min(size, HEADER_BYTES + 2000) - 1)
        at = data.draw(near | st.integers(0, size - 1))
        flip_byte(root / name, at, 1 << data.draw(st.integers(0, 7)))
        lost |= tree.touched_by(name, at, at)
    tree.verify(root, lost)


@pytest.mark.full
@settings(max_examples=3000, derandomize=False)
@given(data=st.data())
def test_any_bits_of_any_files_at_length(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    test_any_bits_of_any_files.hypothesis.inner_test(tree, tmp_path_factory, data)  # type: ignore[attr-defined]


@given(data=st.data())
def test_whole_ranges_overwritten(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    # A lost page: zeros, ones, or what lay elsewhere.
    root = tree.copy(tmp_path_factory.getbasetemp() / "overwritten")
    names = [name for name in tree.files() if not name.endswith("lifeboat-cache.json")]
    name = data.draw(st.sampled_from(names))
    content = (root / name).read_bytes()
    first = data.draw(st.integers(0, len(content) - 1))
    last = min(len(content), first + data.draw(st.sampled_from((1, 8, 128, 512, 4096, 1 << 16))))
    patch = data.draw(st.sampled_from((b"\0", b"\xff", b"LBJOURNL", content[:512], content[-512:])))
    patch = (patch * (last - first))[: last - first]
    (root / name).write_bytes(content[:first] + patch + content[last:])
    tree.verify(root, tree.touched_by(name, first, last - 1))


@given(data=st.data())
def test_flips_under_open_stores(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tree.copy(tmp_path_factory.getbasetemp() / "open")
    store = opened(root, tree.namespace)
    assert load_all(store, tree.everything) == set(tree.blocks)
    lost: set[int] = set()
    for _ in range(3):
        name = data.draw(st.sampled_from(tree.of_kind("segment") + tree.of_kind("journal")))
        at = data.draw(st.integers(0, (root / name).stat().st_size - 1))
        flip_byte(root / name, at, 1 << data.draw(st.integers(0, 7)))
        lost |= tree.touched_by(name, at, at)
    assert load_all(store, tree.everything) >= set(tree.blocks) - lost
    assert store_all(store, tree.everything) == set(tree.everything)
    assert load_all(store, tree.everything) == set(tree.everything)
    assert store.close()
    again = opened(root, tree.namespace)
    # What was in the index before its journal entry was hit is not known to a new process.
    assert load_all(again, tree.everything) >= set(tree.everything) - lost
    assert again.close()


def test_every_bit_of_the_marker(tree: Tree, damaged: Path) -> None:
    # It has no checksum and closes the whole directory: the store stands down with a
    # remedy, or all is there. It never takes blocks for something else.
    marker = damaged / "lifeboat-cache.json"
    before = marker.read_bytes()
    for bit in range(len(before) * 8):
        flip_byte(marker, bit // 8, 1 << bit % 8)
        store = opened(damaged, tree.namespace)
        if store.state is State.READY:
            assert load_all(store, tree.blocks) == set(tree.blocks)
            assert "format" in json.loads(marker.read_bytes())
        else:
            assert store.state is State.DISABLED
            assert "delete that one file" in store.reason or "upgrade" in store.reason
            assert load_all(store, tree.blocks) == set()
        assert store.close()
        marker.write_bytes(before)
    tree.verify(damaged, set())
