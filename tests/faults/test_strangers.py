"""Files of newer releases and of other people among ours: skipped, never changed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from faultkit.children import in_child
from faultkit.trees import KINDS, Tree, load_all, opened, store_all

from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.interface import BlockStore, Namespace, State
from lifeboat_cache.targets.filesystem import FilesystemTarget


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    return Tree(tmp_path_factory.mktemp("original") / "kv", namespace)


@pytest.fixture
def root(tree: Tree, tmp_path: Path) -> Path:
    """A copy of the tree."""
    return tree.copy(tmp_path / "kv")


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("kind", ["journal", "segment", "dead", "access"])
def test_files_of_a_newer_format(tree: Tree, root: Path, kind: str, sealed: bool) -> None:
    name = tree.of_kind(kind)[0]
    data = bytearray((root / name).read_bytes())
    data[8:12] = (7).to_bytes(4, "little")
    data[HEADER_BYTES:] = os.urandom(len(data) - HEADER_BYTES)
    if sealed:
        data[4088:4096] = blake3(bytes(data[:4088])).digest(length=8)
    (root / name).write_bytes(bytes(data))
    writer = Path(name).name[:32]
    before = {path: path.read_bytes() for path in root.rglob(f"{writer}*")}
    lost = tree.touched_by(name, 0, len(data)) if kind in ("journal", "segment") else set()
    if kind == "dead":
        lost = set()
    tree.verify(root, lost)
    FilesystemTarget(root).purge(tree.namespace.hex)
    assert {path: path.read_bytes() for path in root.rglob(f"{writer}*")} == before


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


def make_link(path: Path) -> None:
    outside = path.parent.parent.parent / "outside"
    outside.write_bytes(b"of somebody else" * 1000)
    path.symlink_to(outside)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # socket paths are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path) -> None:
    if os.geteuid():
        pytest.skip("making a device needs root")
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: it never ends


STRANGERS = [make_fifo, make_directory, make_link, make_dangling_link, make_socket, make_device]

FOREIGN_NAMES = [
    "thesis.tex", ".hidden", "lost+found", "core", "A" * 200, "x.journal", "0.segment",
    "0123456789abcdef0123456789abcdef.journal.bak", "0123456789ABCDEF0123456789ABCDEF.journal",
    "0123456789abcdef0123456789abcdef.123.segment", "\udcff\udcfe", "line\nbreak.journal",
]  # fmt: skip


def test_foreign_files_are_left_alone(tree: Tree, root: Path) -> None:
    places = [root, root / tree.namespace.directory]
    for place in places:
        for name in FOREIGN_NAMES:
            (place / name).write_bytes(b"of somebody else")
    (root / ("ab" * 16)).mkdir()  # looks like a namespace
    (root / ("cd" * 16)).write_text("a file that looks like one")
    tree.verify(root, set())
    FilesystemTarget(root).namespaces()
    FilesystemTarget(root).purge(tree.namespace.hex)
    for place in places:
        for name in FOREIGN_NAMES:
            assert (place / name).read_bytes() == b"of somebody else"


def newcomer(kind: str) -> str:
    """Name of a file of a writer that never was."""
    middle = ".00000000." if kind in ("segment", "dead") else "."
    return "0123456789abcdef" * 2 + middle + kind


def by_name(make: Callable[[Path], None]) -> str:
    """Name of a case."""
    return make.__name__.removeprefix("make_")


#: Seconds: opening some of them would hang, and reading others would never end.
PATIENCE = 20


@pytest.mark.parametrize("make", STRANGERS, ids=by_name)
@pytest.mark.parametrize("kind", ["journal", "segment", "dead", "access", "lock"])
def test_what_is_no_file_under_a_name_of_ours(
    tree: Tree, root: Path, kind: str, make: Callable[[Path], None]
) -> None:
    place = root / tree.namespace.directory / newcomer(kind)
    make(place)
    before = os.lstat(place)

    def use() -> None:
        tree.verify(root, set())
        FilesystemTarget(root).namespaces()

    in_child(use, timeout=PATIENCE)
    after = os.lstat(place)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("make", STRANGERS, ids=by_name)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_where_one_of_ours_was(
    tree: Tree, root: Path, kind: str, make: Callable[[Path], None]
) -> None:
    name = tree.of_kind(kind)[0]
    size = (root / name).stat().st_size
    (root / name).unlink()
    make(root / name)

    def use() -> None:
        if kind != "namespace.json":
            lost = tree.touched_by(name, 0, size) if kind in ("journal", "segment") else set()
            tree.verify(root, lost)
            FilesystemTarget(root).namespaces()
            return
        # Whose blocks they are is in every header; loads go on, stores may not.
        store = opened(root, tree.namespace)
        assert load_all(store, tree.blocks) == set(tree.blocks)
        store_all(store, {100: 4096})
        assert store.close(5)
        FilesystemTarget(root).namespaces()

    in_child(use, timeout=PATIENCE)


@pytest.mark.parametrize(
    "make", [make_fifo, make_link, make_dangling_link, make_socket, make_device], ids=by_name
)
@pytest.mark.parametrize("kind", ["marker", "root"])
def test_root_that_is_no_directory_of_ours(
    tree: Tree, root: Path, kind: str, make: Callable[[Path], None]
) -> None:
    where = root
    if kind == "root":
        (root / "a" / "b").mkdir(parents=True)
        where = root / "a" / "b" / "kv"
        make(where)
    else:
        (root / "lifeboat-cache.json").unlink()
        make(root / "lifeboat-cache.json")

    def use() -> None:
        store = BlockStore(tree.namespace, [FilesystemTarget(where)], io_workers=1)
        assert store.wait_recovered(60)
        assert store.state is State.DISABLED
        assert store.reason
        assert load_all(store, tree.blocks) == set()
        assert store.close(5)

    in_child(use, timeout=PATIENCE)
