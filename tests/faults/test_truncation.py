"""Files that are cut, or longer than they should be, at every length that may matter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faultkit.trees import KINDS, Tree, load_all, opened, store_all
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.format.journal import ENTRY_BYTES
from lifeboat_cache.interface import Namespace


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    return Tree(tmp_path_factory.mktemp("original") / "kv", namespace)


def lengths(size: int) -> list[int]:
    """Nothing, pieces of headers, whole headers, whole and torn entries, page boundaries."""
    header = HEADER_BYTES
    wanted = {
        0, 1, 7, 8, 11, 12, 16, 48, 64, 100, 512, 4080, 4088, header - 1, header, header + 1,
        header + ENTRY_BYTES - 1, header + ENTRY_BYTES, header + ENTRY_BYTES + 1,
        header + 3 * ENTRY_BYTES + 64, 2 * header - 1, 2 * header, 2 * header + 1,
        header + 5000, 3 * header, 5 * header + 77, size // 2, size - ENTRY_BYTES, size - 1,
    }  # fmt: skip
    return sorted(length for length in wanted if 0 <= length < size)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_while_nobody_looks(tree: Tree, tmp_path: Path, kind: str) -> None:
    for name in tree.of_kind(kind):
        size = (tree.root / name).stat().st_size
        for length in lengths(size):
            root = tree.copy(tmp_path / "damaged")
            os.truncate(root / name, length)
            tree.verify(root, tree.touched_by(name, length, size - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_cut_under_an_open_store(tree: Tree, tmp_path: Path, kind: str) -> None:
    name = tree.of_kind(kind)[0]
    size = (tree.root / name).stat().st_size
    for length in lengths(size)[::3]:
        root = tree.copy(tmp_path / "damaged")
        store = opened(root, tree.namespace)
        assert load_all(store, tree.blocks) == set(tree.blocks)
        os.truncate(root / name, length)
        lost = tree.touched_by(name, length, size - 1)
        assert load_all(store, tree.blocks) >= set(tree.blocks) - lost
        assert store_all(store, tree.everything) == set(tree.everything)
        assert load_all(store, tree.everything) == set(tree.everything)
        assert store.close()
        tree.verify(root, lost)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", [b"\0", bytes(4096), b"\xff" * 129, b"LBSEGMNT" * 700])
def test_bytes_behind_the_end(tree: Tree, tmp_path: Path, kind: str, tail: bytes) -> None:
    for name in tree.of_kind(kind):
        root = tree.copy(tmp_path / "damaged")
        with (root / name).open("ab") as file:
            file.write(tail)
        dead = set(tree.blocks) if kind == "dead" and tail.strip(b"\0") else set()
        tree.verify(root, dead)


@given(data=st.data())
def test_any_files_cut_anywhere(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tree.copy(tmp_path_factory.getbasetemp() / "cut")
    lost: set[int] = set()
    names = [name for name in tree.files() if not name.endswith("lifeboat-cache.json")]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)):
        size = (tree.root / name).stat().st_size
        length = data.draw(st.integers(0, size - 1))
        os.truncate(root / name, length)
        lost |= tree.touched_by(name, length, size - 1)
    tree.verify(root, lost)


@pytest.mark.parametrize("length", [0, 1, 13])
def test_cut_marker_is_refused_with_a_remedy(tree: Tree, tmp_path: Path, length: int) -> None:
    root = tree.copy(tmp_path / "damaged")
    before = (root / "lifeboat-cache.json").read_bytes()
    os.truncate(root / "lifeboat-cache.json", length)
    store = opened(root, tree.namespace)
    whole = length == 13
    assert (load_all(store, tree.blocks) == set(tree.blocks)) is whole
    assert whole or "delete that one file" in store.reason
    assert store.close()
    (root / "lifeboat-cache.json").write_bytes(before)
    tree.verify(root, set())
