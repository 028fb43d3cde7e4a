"""Directories that vanish, are not ours, cannot be read or cannot be written."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store import storage
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.targets import segment_reader, segment_writer
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import ROOT_MARKER
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

OK, PRESENT, FAILED, MISSING = Outcome.OK, Outcome.PRESENT, Outcome.FAILED, Outcome.MISSING


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_WRITER_RETRY_S", 0.0)
    monkeypatch.setattr(segment_reader, "_LOOK_S", -1.0)  # open files may be deleted at once


def test_removed_namespace_directory_is_noticed_and_made_again(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    driver = open_driver()
    assert driver.store(range(4)) == [OK] * 4
    assert driver.load([0]) == [OK]
    shutil.rmtree(root / namespace.directory)
    # A block in a deleted file would not outlive this process: it is not stored.
    assert driver.store([4]) == [FAILED]
    assert driver.load(range(5)) == [MISSING] * 5
    assert driver.store(range(5)) == [OK] * 5
    assert driver.load(range(5)) == [OK] * 5
    assert driver.block_store.close()
    assert open_driver().load(range(5)) == [OK] * 5


def test_emptied_root_is_marked_again(open_driver: Open, root: Path) -> None:
    driver = open_driver()
    assert driver.store(range(4)) == [OK] * 4
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    assert driver.store([4]) == [FAILED]
    assert driver.store(range(5)) == [PRESENT] * 4 + [OK]
    assert driver.load(range(5)) == [MISSING] * 4 + [OK]
    assert driver.store(range(5)) == [OK] * 4 + [PRESENT]
    assert driver.block_store.close()
    assert open_driver().load(range(5)) == [OK] * 5


def test_removed_segment_is_noticed_and_replaced(open_driver: Open, root: Path) -> None:
    driver = open_driver()
    assert driver.store(range(3)) == [OK] * 3
    (segment,) = root.glob("*/*.segment")
    segment.unlink()
    assert driver.store([3]) == [FAILED]
    assert driver.store([3]) == [OK]
    assert driver.load(range(4)) == [MISSING] * 3 + [OK]
    assert driver.block_store.close()
    again = open_driver()
    assert again.block_store.counters().bad_entries == 0
    assert again.load(range(4)) == [MISSING] * 3 + [OK]


def test_a_writer_that_is_replaced_while_journals_are_followed_is_no_fault(
    open_driver: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stores closes one whose files are gone, and starts another."""
    driver = open_driver()
    assert driver.store(range(4)) == [OK] * 4
    other = open_driver()
    assert other.store(range(4, 8)) == [OK] * 4
    follower = driver.block_store._keeper.follower
    kept = follower._storage

    class Replaced:
        """As the store's, but the writer is gone when it is looked at again."""

        looks = 0

        def __getattr__(self, name: str) -> object:
            return getattr(kept, name)

        @property
        def writer(self) -> object:
            self.looks += 1
            return kept.writer if self.looks % 2 else None

    monkeypatch.setattr(follower, "_storage", Replaced())
    follower.follow(recovering=False)
    assert driver.block_store.state is State.READY
    assert driver.load(range(8)) == [OK] * 8


def test_removed_root_fails_stores_and_nothing_else(open_driver: Open, root: Path) -> None:
    driver = open_driver()
    assert driver.store(range(4)) == [OK] * 4
    shutil.rmtree(root)
    for _ in range(3):
        assert driver.store([9]) == [FAILED]
        assert driver.load(range(4)) == [MISSING] * 4
        assert driver.lookup(range(4)) == [Lookup.MISS] * 4
    # It may have been a mount: nothing is made where it was.
    assert not root.exists()
    driver.block_store.touch(driver.keys(range(4)))
    assert driver.block_store.close()


def test_deleted_segments_give_their_space_back(open_driver: Open, root: Path) -> None:
    stored = open_driver()
    assert stored.store(range(3)) == [OK] * 3
    assert stored.block_store.close()
    driver = open_driver()
    assert driver.load(range(3)) == [OK] * 3
    (segment,) = root.glob("*/*.segment")
    held = [
        link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(segment)
    ]
    assert held
    segment.unlink()
    assert driver.load(range(3)) == [MISSING] * 3
    for link in held:
        target = os.readlink(link) if os.path.lexists(link) else ""
        assert segment.name not in target


def test_read_only_filesystem_serves_loads(open_driver: Open, small_disk: Path, root: Path) -> None:
    root = small_disk / "kv"
    before = open_driver(target=FilesystemTarget(root))
    assert before.store(range(4)) == [OK] * 4
    assert before.block_store.close()
    driver = open_driver(target=FilesystemTarget(root))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert driver.load(range(4)) == [OK] * 4
    assert driver.store([9]) == [FAILED]
    assert driver.delete([3]) == [True]
    driver.block_store.touch(driver.keys([0]))
    assert driver.load(range(4)) == [OK] * 3 + [MISSING]
    assert driver.block_store.drain(60)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert driver.store([9]) == [OK]
    assert driver.load([0, 9]) == [OK] * 2


def refused(namespace: Namespace, *targets: FilesystemTarget) -> str:
    store = BlockStore(namespace, targets, io_workers=1)
    assert store.wait_recovered(60)
    assert store.state is State.DISABLED
    driver = StoreDriver(store)
    assert driver.lookup([1]) == [Lookup.MISS]
    assert driver.store([1]) == [Outcome.DISABLED]
    assert driver.load([1]) == [MISSING]
    assert driver.delete([1]) == [False]
    reason = store.reason
    assert store.close()
    return reason


def test_path_that_is_a_file(namespace: Namespace, root: Path) -> None:
    root.write_text("not a directory")
    assert "Not a directory" in refused(namespace, FilesystemTarget(root))
    assert "Not a directory" in refused(namespace, FilesystemTarget(root / "below"))
    assert root.read_text() == "not a directory"


def test_foreign_directory(namespace: Namespace, root: Path) -> None:
    root.mkdir()
    (root / "thesis.tex").write_text("years of work")
    assert "holds other files" in refused(namespace, FilesystemTarget(root))
    assert os.listdir(root) == ["thesis.tex"]


def test_lost_marker_is_made_again_where_nothing_is_but_namespaces(
    open_driver: Open, namespace: Namespace, root: Path
) -> None:
    # Who empties a directory in use takes the marker, while an engine makes its namespace's.
    driver = open_driver()
    assert driver.store(range(4)) == [OK] * 4
    assert driver.block_store.close()
    whole = (root / ROOT_MARKER).read_bytes()
    (root / ROOT_MARKER).unlink()
    (root / ("0" * 32)).mkdir()
    assert [info.digest for info in FilesystemTarget(root).namespaces()] != []
    assert not (root / ROOT_MARKER).exists()  # who only looks makes nothing
    driver = open_driver()
    assert driver.load(range(4)) == [OK] * 4
    assert driver.store([4]) == [OK]
    assert (root / ROOT_MARKER).read_bytes() == whole


@pytest.mark.parametrize("where", ["in-a-namespace", "beside", "link", "file"])
def test_lost_marker_is_not_made_again_beside_what_is_not_ours(
    open_driver: Open, namespace: Namespace, root: Path, tmp_path: Path, where: str
) -> None:
    assert open_driver().store([1]) == [OK]
    (root / ROOT_MARKER).unlink()
    if where == "in-a-namespace":
        (root / namespace.directory / "thesis.tex").write_text("years of work")
    elif where == "beside":
        (root / "thesis.tex").write_text("years of work")
    elif where == "link":
        (root / ("0" * 32)).symlink_to(tmp_path)
    else:
        (root / ("0" * 32)).write_text("a checksum")
    assert "holds other files" in refused(namespace, FilesystemTarget(root))
    assert not (root / ROOT_MARKER).exists()


@pytest.mark.parametrize(
    "marker", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": null}', b"[" * 100_000, b"{}"]
)
def test_damaged_marker_is_an_error_with_a_remedy(
    namespace: Namespace, root: Path, marker: bytes
) -> None:
    FilesystemTarget(root).probe()
    (root / ROOT_MARKER).write_bytes(marker)
    assert "delete that one file" in refused(namespace, FilesystemTarget(root))
    assert (root / ROOT_MARKER).read_bytes() == marker


def test_newer_format_is_left_alone(namespace: Namespace, root: Path, open_driver: Open) -> None:
    assert open_driver().store([1]) == [OK]
    (root / ROOT_MARKER).write_text('{"format": 2}')
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert "upgrade lifeboatcache-core" in refused(namespace, FilesystemTarget(root))
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_second_target_is_used_when_the_first_is_not_usable(
    namespace: Namespace, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    first = FilesystemTarget(tmp_path / "file", name="fast")
    second = FilesystemTarget(tmp_path / "kv", name="slow")
    store = BlockStore(namespace, [first, second], io_workers=1)
    assert store.wait_recovered(60)
    assert store.state is State.READY
    assert store.target is second
    assert store.reason.startswith("fast: ")
    assert StoreDriver(store).store([1]) == [OK]
    assert store.close()


def test_directory_of_another_namespace_is_not_written(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    other = Namespace.from_identity({"engine": "test", "model": "other"})
    FilesystemTarget(root).probe()
    (root / namespace.directory).mkdir()
    (root / namespace.directory / "namespace.json").write_text(other.to_json())
    driver = open_driver()
    for _ in range(3):
        assert driver.store([1]) == [FAILED]
    assert os.listdir(root / namespace.directory) == ["namespace.json"]


def test_directory_with_the_document_of_another_namespace_is_shown_as_a_problem(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    driver = open_driver()
    assert driver.store([1]) == [OK]
    assert driver.block_store.close()
    copy = root / ("ab" * 16)
    shutil.copytree(root / namespace.directory, copy)
    infos = {info.digest: info for info in FilesystemTarget(root).namespaces()}
    assert set(infos) == {namespace.hex, copy.name}
    assert "whose directory is another one" in infos[copy.name].problems[0]
    # So that purging what is shown purges that, and nothing else.
    FilesystemTarget(root).purge(copy.name)
    assert not copy.exists()
    assert open_driver().load([1]) == [OK]


def test_running_out_of_file_descriptors_costs_no_blocks(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 20_000)
    driver = open_driver(io_workers=1)
    for number in range(40):
        assert driver.store([number]) == [OK]
    assert len(list(root.glob("*/*.segment"))) > 12
    assert driver.block_store.close()
    again = open_driver(io_workers=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 8, hard))
        outcomes = [again.load([number])[0] for number in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert outcomes == [OK] * 40


def test_purge_takes_a_digest_and_nothing_else(root: Path) -> None:
    FilesystemTarget(root).probe()
    (root.parent / "namespace.json").write_text("of somebody else")
    for nonsense in ("..", "../..", "", "x" * 64, "AB" * 32):
        with pytest.raises(ValueError, match="not a namespace digest"):
            FilesystemTarget(root).purge(nonsense)
    assert (root.parent / "namespace.json").read_text() == "of somebody else"


UNREADABLE = """
import os, sys
from pathlib import Path
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver
if not os.geteuid():
    os.setegid(65534)
    os.seteuid(65534)  # root may read everything
root = Path(sys.argv[1])

def driver():
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    store.wait_recovered(60)
    return StoreDriver(store)

before = driver()
print(*(outcome.name for outcome in before.store(range(3))))
before.block_store.close()
for kind in sys.argv[2:]:
    for path in root.glob("*/*." + kind):
        path.chmod(0)
after = driver()
print(after.block_store.state.name, *(outcome.name for outcome in after.load(range(3))))
print(*(outcome.name for outcome in after.store(range(3))))
print(*(outcome.name for outcome in after.load(range(3))))
"""


@pytest.mark.parametrize("kind", ["journal", "segment", "lock", "json"])
def test_unreadable_files(kind: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", UNREADABLE, f"{place}/kv", kind],
            capture_output=True,
            text=True,
            check=True,
        )
    stored, loaded, again, at_last = done.stdout.splitlines()
    assert stored == "OK OK OK"
    expected = {
        "journal": ("MISSING MISSING MISSING", "OK OK OK"),
        "segment": ("FAILED FAILED FAILED", "OK OK OK"),
        "lock": ("OK OK OK", "PRESENT PRESENT PRESENT"),
        "json": ("OK OK OK", "PRESENT PRESENT PRESENT"),
    }[kind]
    assert (loaded, again) == (f"READY {expected[0]}", expected[1])
    assert at_last == "OK OK OK"
