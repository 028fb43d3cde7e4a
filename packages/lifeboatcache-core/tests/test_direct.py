"""Vectored I/O with and without O_DIRECT."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from lifeboat_cache.errors import TargetError
from lifeboat_cache.targets import direct
from lifeboat_cache.targets.direct import read_into, supports_direct, write_from


class ShortIo:
    """System calls that move at most so many bytes, as signals and full disks make them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.calls = 0
        self.most = most
        self._read, self._write = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", self.read)
        monkeypatch.setattr(os, "pwritev", self.write)

    def part(self, pieces: Sequence[memoryview]) -> list[memoryview]:
        self.calls += 1
        left, out = self.most, []
        for piece in pieces:
            out.append(piece[:left])
            left -= out[-1].nbytes
        return [piece for piece in out if piece.nbytes]

    def read(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        return self._read(fd, self.part(pieces), offset)

    def write(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        return self._write(fd, self.part(pieces), offset)


@pytest.mark.parametrize("most", [1, 7, 100, 10_000])
def test_short_reads_and_writes_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    content = bytes(number % 251 for number in range(1000))
    cuts = [0, 1, 1, 300, 999, 1000]
    pieces = [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)]
    io = ShortIo(monkeypatch, most)
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    write_from(fd, pieces, 50)
    assert io.calls >= 1000 // most
    memory = bytearray(1000)
    into = [memoryview(memory)[a:b] for a, b in itertools.pairwise(cuts)]
    assert read_into(fd, into, 50) == 1000
    assert memory == content
    assert read_into(fd, [memoryview(bytearray(100))], 1000) == 50
    assert read_into(fd, [memoryview(bytearray(100))], 5000) == 0
    os.close(fd)


def test_a_write_that_moves_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: 0)
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    with pytest.raises(OSError, match="no progress"):
        write_from(fd, [memoryview(b"x")], 0)
    os.close(fd)


def test_the_odd_end_of_a_cut_file_is_an_end_and_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some filesystems refuse to go on at an odd offset with O_DIRECT.
    (tmp_path / "file").write_bytes(bytes(5000))
    read = os.preadv

    def strict(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        if offset % 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", strict)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    assert read_into(fd, [memoryview(bytearray(8192))], 0) == 5000
    with pytest.raises(OSError, match="Invalid argument"):
        read_into(fd, [memoryview(bytearray(8192))], 100)
    os.close(fd)


def test_direct_io_that_is_demanded_and_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "O_DIRECT", 0)
    assert not supports_direct(tmp_path, "auto")
    assert not supports_direct(tmp_path, "off")
    with pytest.raises(TargetError, match="set direct_io to auto or off"):
        supports_direct(tmp_path, "on")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("error", "answer"), [(errno.EINVAL, False), (errno.ENOSPC, True)])
def test_direct_io_is_tried_and_not_only_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, answer: bool
) -> None:
    def refuses(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pwritev", refuses)
    monkeypatch.setattr(direct, "O_DIRECT", getattr(os, "O_DIRECT", 0) or os.O_SYNC)
    if not supports_open(tmp_path):
        pytest.skip("this filesystem does not open files with O_DIRECT")
    assert supports_direct(tmp_path, "auto") is answer
    assert os.listdir(tmp_path) == []


def supports_open(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "file", os.O_CREAT | os.O_WRONLY | direct.O_DIRECT, 0o600))
    except OSError:
        return False
    os.unlink(directory / "file")
    return True


def test_looking_for_direct_io_leaves_nothing(tmp_path: Path) -> None:
    supports_direct(tmp_path, "auto")
    assert os.listdir(tmp_path) == []


def test_memory_is_not_bypassed(small_disk: Path) -> None:
    # tmpfs, which takes O_DIRECT.
    assert not supports_direct(small_disk, "auto")
    assert not supports_direct(small_disk, "off")
    assert supports_direct(small_disk, "on")
