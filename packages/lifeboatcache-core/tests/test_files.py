"""What is no file under a name of ours, reads that are short, and errors that come late."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lifeboat_cache.interface import BlockStore, Namespace, Outcome
from lifeboat_cache.targets.files import (
    NotAFileError,
    close_file,
    cut_file,
    is_gone,
    late_errors,
    open_file,
    read_document,
    read_range,
)
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver


def make_link(path: Path) -> None:
    outside = path.with_name("outside")
    outside.write_text("of somebody else")
    path.symlink_to(outside)


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
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))


MAKERS = [make_link, make_socket, make_device, os.mkfifo, os.mkdir]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_strangers_are_not_opened(tmp_path: Path, make: Callable[[Path], None], flags: int) -> None:
    make(tmp_path / "x.journal")
    held = os.listdir("/proc/self/fd")
    with pytest.raises(NotAFileError):
        open_file(tmp_path / "x.journal", flags)
    assert os.listdir("/proc/self/fd") == held


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_strangers_are_neither_read_nor_cut(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "namespace.json")
    with pytest.raises(NotAFileError):
        read_document(tmp_path / "namespace.json")
    with pytest.raises(NotAFileError):
        cut_file(tmp_path / "namespace.json", 0)
    if make is make_link:
        assert (tmp_path / "outside").read_text() == "of somebody else"


def test_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(7, length), at))
    fd = open_file(tmp_path / "file")
    assert read_range(fd, 100, 50) == bytes(range(50, 150))
    assert read_range(fd, 100, 150) == bytes(range(150, 200))
    assert read_range(fd, 100, 200) == b""
    assert close_file(fd)
    assert read_document(tmp_path / "file") == bytes(range(200))


def test_long_documents_are_not_ours(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="too long"):
        read_document(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"12345")
    assert read_document(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="too long"):
        read_document(tmp_path / "file", 4)


def test_unknown_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_gone(tmp_path / "file")
    (tmp_path / "file").symlink_to("nowhere")
    assert not is_gone(tmp_path / "file")
    assert is_gone(tmp_path / "file" / "below")

    def fails(path: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "lstat", fails)
    with pytest.raises(OSError, match="Input/output"):
        is_gone(tmp_path / "file")


def test_errors_at_closing_are_counted_and_said_once(
    tmp_path: Path,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = BlockStore(namespace, [FilesystemTarget(tmp_path / "kv")], io_workers=1)
    assert store.wait_recovered(60)
    driver = StoreDriver(store)
    assert driver.store([1]) == [Outcome.OK]
    before = late_errors()
    close = os.close

    def late(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if name.startswith(str(tmp_path)):
            raise OSError(errno.EIO, "Input/output error")

    with caplog.at_level(logging.WARNING, "lifeboat_cache"):
        monkeypatch.setattr(os, "close", late)
        assert store.close()
        monkeypatch.undo()
    assert late_errors() > before
    said = [r for r in caplog.records if "not all has been written" in r.getMessage()]
    assert len(said) == 1


def test_purge_leaves_what_a_link_leads_to(tmp_path: Path, namespace: Namespace) -> None:
    root = tmp_path / "kv"
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    assert StoreDriver(store).store([1]) == [Outcome.OK]
    assert store.close()
    (segment,) = root.glob("*/*.segment")
    outside = tmp_path / "thesis.tex"
    outside.write_text("years of work")
    segment.unlink()
    segment.symlink_to(outside)
    FilesystemTarget(root).purge(namespace.hex)
    assert outside.read_text() == "years of work"
    assert segment.is_symlink(), "nobody asked whose it is"
