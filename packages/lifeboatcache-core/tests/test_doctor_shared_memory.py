from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifeboat_cache.doctor import shared_memory
from lifeboat_cache.doctor.shared_memory import (
    Leftover,
    check_shared_memory,
    find_leftovers,
    remove_leftover,
)

SIZE = 1 << 20

HOLDER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mapping = mmap.mmap(fd, 0)
os.close(fd)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of its own in real shared memory."""
    directory = Path(f"/dev/shm/lifeboat-test-{os.getpid()}")
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def left(shm: Path) -> Path:
    path = shm / "vllm_offload_abc.mmap"
    path.write_bytes(b"x" * SIZE)
    (shm / "vllm_offload_directory.mmap").mkdir()
    (shm / "vllm_offload_link.mmap").symlink_to(path)
    (shm / "somebody_elses.mmap").write_bytes(b"x")
    return path


@pytest.fixture
def held(left: Path) -> Iterator[int]:
    """The id of another process that has the file mapped, and no longer open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(left)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    yield process.pid
    process.communicate()


def test_nothing_left(shm: Path) -> None:
    assert find_leftovers(shm) == ((), 0)
    check = check_shared_memory(shm)
    assert (check.status, check.fix) == ("ok", None)


def test_a_file_that_nobody_maps_is_offered_and_removed(left: Path, shm: Path) -> None:
    (leftover,), _ = find_leftovers(shm)
    assert (leftover.path, leftover.size, leftover.pids, leftover.state) == (
        left,
        SIZE,
        (),
        "unused",
    )
    check = check_shared_memory(shm)
    assert check.status == "warn"
    assert "1 file of dead vLLM processes hold 1.0 MB" in check.summary
    assert "lifeboat-cache doctor --fix" in check.remedy
    assert check.fix is not None
    assert left.exists()
    assert check.fix.apply() == (f"removed {left} (1.0 MB)",)
    assert not left.exists()
    assert (shm / "somebody_elses.mmap").exists()
    assert check_shared_memory(shm).status == "ok"


def test_a_file_that_a_process_maps_is_left(left: Path, shm: Path, held: int) -> None:
    (leftover,), _ = find_leftovers(shm)
    assert (leftover.pids, leftover.state) == ((held,), "used")
    check = check_shared_memory(shm)
    assert (check.status, check.fix) == ("ok", None)
    assert "1 in use" in check.summary
    assert any(f"pid {held}" in line for line in check.details)


def test_a_process_that_proc_does_not_show_still_counts(
    left: Path, shm: Path, held: int, tmp_path: Path
) -> None:
    # As in another container that shares /dev/shm but not the process ids.
    (leftover,), hidden = find_leftovers(shm, proc=tmp_path)
    assert (leftover.pids, leftover.state, hidden) == ((), "used", 0)


def test_a_file_taken_into_use_meanwhile_is_left(left: Path, shm: Path) -> None:
    check = check_shared_memory(shm)
    assert check.fix is not None
    with left.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    try:
        assert check.fix.apply() == (f"left {left}: somebody uses it now",)
        assert left.exists()
    finally:
        mapping.close()


def test_a_file_removed_meanwhile_is_said(left: Path, shm: Path) -> None:
    check = check_shared_memory(shm)
    assert check.fix is not None
    left.unlink()
    assert check.fix.apply() == (f"left {left}: No such file or directory",)


def test_a_link_put_in_its_place_is_not_followed(left: Path, shm: Path) -> None:
    target = shm / "precious"
    target.write_bytes(b"x")
    (leftover,), _ = find_leftovers(shm)
    left.unlink()
    left.symlink_to(target)
    assert remove_leftover(leftover).startswith(f"left {left}: ")
    assert target.exists()


def test_where_the_kernel_cannot_tell_nothing_is_offered(
    left: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(fd: int, command: int, argument: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    check = check_shared_memory(shm)
    assert (check.status, check.fix) == ("warn", None)
    assert "cannot be told" in check.summary
    assert "as root" in check.remedy
    assert remove_leftover(Leftover(left, SIZE, (), "unused")).startswith("left ")
    assert left.exists()


def test_processes_that_cannot_be_looked_into_are_counted(
    left: Path, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in ("1", "2", "self"):
        (tmp_path / pid).mkdir()
    (tmp_path / "2/maps").write_text(
        "00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/x\n"
        "7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n"
        "\n"
    )
    original = Path.read_text

    def read_text(self: Path, *args: object, **kwargs: object) -> str:
        if self == tmp_path / "1/maps":
            raise PermissionError(13, "Permission denied")
        return original(self, errors="replace")

    monkeypatch.setattr(Path, "read_text", read_text)
    (leftover,), hidden = find_leftovers(shm, proc=tmp_path)
    # The lease still tells.
    assert (leftover.state, hidden) == ("unused", 1)
    monkeypatch.setattr(shared_memory, "_state_by_lease", lambda path: "unknown")
    monkeypatch.setattr(shared_memory, "_mapping_processes", lambda wanted, proc: ({}, 1))
    check = check_shared_memory(shm)
    assert check.fix is None
    assert "the mappings of other users' processes (1) could not be read" in check.details


def test_asking_does_not_end_the_process_that_opens_the_file(left: Path) -> None:
    # Somebody opens the file while it is leased: the kernel signals the holder.
    fd = os.open(left, os.O_RDONLY)
    try:
        assert shared_memory._take_lease(fd) == "unused"
        with pytest.raises(BlockingIOError):
            os.open(left, os.O_RDWR | os.O_NONBLOCK)
    finally:
        os.close(fd)
    os.close(os.open(left, os.O_RDWR | os.O_NONBLOCK))
