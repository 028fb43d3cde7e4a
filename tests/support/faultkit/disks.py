"""Small filesystems for one test: on a loop device, in memory, and one that fails on demand."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["EVERYTHING_HANGS", "Disk", "FaultyDisk", "faulty_disk", "loop_disk", "memory_disk"]

_PATIENCE_S = 60.0

#: EXT4_IOC_SHUTDOWN, which XFS takes too: from now on every call fails with EIO.
_SHUTDOWN = 0x8004587D


_servers: list[subprocess.Popen[bytes]] = []


def _run(*command: str | Path, needs: str) -> str:
    """Run a command that not every machine lets a test run; skip the test if it fails."""
    try:
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip(f"{needs}: there is no program {command[0]}")
    if done.returncode:
        pytest.skip(f"{needs}: {command[0]} says {done.stderr.strip()}")
    return done.stdout.strip()


class Disk:
    """A mounted filesystem of its own."""

    def __init__(self, mount: Path, kind: str, image: Path | None = None) -> None:
        self.mount = mount
        self.kind = kind
        self.image = image

    @property
    def root(self) -> Path:
        """Where a target goes."""
        return self.mount / "kv"

    def free(self) -> int:
        """Bytes that can still be written."""
        found = os.statvfs(self.mount)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Take all space but about ``leave`` bytes, for real."""
        fd = os.open(self.mount / "filler", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            at = os.fstat(fd).st_size
            step = 1 << 20
            while step >= 4096:
                try:
                    if self.free() - step < leave:
                        raise OSError(errno.ENOSPC, "enough")
                    os.posix_fallocate(fd, at, step)
                    at += step
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise
                    step //= 2
        finally:
            os.close(fd)

    def give_space(self) -> None:
        """Undo :meth:`fill`."""
        (self.mount / "filler").unlink()

    def remount(self, *, writable: bool) -> None:
        """As the administrator does, or the kernel after an error."""
        option = "remount," + ("rw" if writable else "ro")
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            done = subprocess.run(
                ["mount", "-o", option, str(self.mount)], capture_output=True, check=False
            )
            if not done.returncode:
                return
            # Busy while a file is open for writing; `abort` needs no such patience.
            if time.monotonic() > give_up:
                raise AssertionError(done.stderr.decode())
            time.sleep(0.05)

    def meet_an_error(self) -> None:
        """The kernel finds an inconsistency and makes ext4 read-only, open files or not."""
        subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(self.mount)], check=True)
        device = next(
            line.split()[0]
            for line in Path("/proc/mounts").read_text().splitlines()
            if line.split()[1] == str(self.mount)
        )
        trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
        try:
            trigger.write_text("a test")
        except OSError as exc:
            pytest.skip(f"{trigger} cannot be used: {exc}")

    def shut_down(self) -> None:
        """The filesystem meets a fatal error: every call fails from now on."""
        fd = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", 2))
        finally:
            os.close(fd)

    def mount_again(self) -> None:
        """Unmount, as a reboot does, and mount the same image."""
        give_up = time.monotonic() + _PATIENCE_S
        while subprocess.run(["umount", str(self.mount)], check=False).returncode:
            if time.monotonic() > give_up:
                raise AssertionError(f"{self.mount} is still in use")
            time.sleep(0.1)
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.mount)], check=True)

    def detach(self) -> None:
        """Lazy unmount: open files go on, the directory is what lay below."""
        subprocess.run(["umount", "--lazy", str(self.mount)], check=True)


def _need_root(needs: str) -> None:
    if os.geteuid():
        pytest.skip(f"{needs} needs root")


@contextmanager
def loop_disk(place: Path, kind: str, size: int) -> Iterator[Disk]:
    """A filesystem of ``size`` bytes in a file; ``kind`` is ext4 or xfs."""
    _need_root("mounting a loop device")
    image, mount = place / f"{kind}.image", place / f"{kind}-disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    options = ("-q", "-E", "lazy_itable_init=0", "-m", "0") if kind == "ext4" else ("-q",)
    needs = f"making a {kind} filesystem"
    _run(f"mkfs.{kind}", *options, image, needs=needs)
    _run("mount", "-o", "loop", image, mount, needs=needs)
    try:
        yield Disk(mount, kind, image)
    finally:
        while os.path.ismount(mount):
            subprocess.run(["umount", "--lazy", str(mount)], check=True)


@contextmanager
def memory_disk(place: Path, size: int) -> Iterator[Disk]:
    """A tmpfs of ``size`` bytes."""
    _need_root("mounting a tmpfs")
    mount = place / "tmpfs-disk"
    mount.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700,nr_inodes=4096", "tmpfs", mount,
         needs="mounting a tmpfs")  # fmt: skip
    try:
        yield Disk(mount, "tmpfs")
    finally:
        while os.path.ismount(mount):
            subprocess.run(["umount", "--lazy", str(mount)], check=True)


#: Rules: nothing that concerns a file or directory of the target is answered.
EVERYTHING_HANGS = [
    {"op": op, "match": "kv", "do": "hang"}
    for op in (
        "create", "fsync", "getattr", "lookup", "mkdir", "open", "opendir", "read", "readdir",
        "rename", "setattr", "unlink", "write",
    )
]  # fmt: skip


class FaultyDisk:
    """A filesystem whose every call can be made to fail or hang; see ``fuse_server.py``."""

    def __init__(
        self, mount: Path, backing: Path, control: socket.socket, server: subprocess.Popen[bytes]
    ) -> None:
        self.mount = mount
        self.backing = backing
        self._control = control
        self._server = server
        self._lines = control.makefile("r")

    @property
    def root(self) -> Path:
        """Where a target goes."""
        return self.mount / "kv"

    def hear(self) -> dict[str, Any]:
        """One answer of the server."""
        line = self._lines.readline()
        if not line:
            raise AssertionError("the FUSE server died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, **command: Any) -> dict[str, Any]:
        """Send one command and return the answer."""
        self._control.sendall(json.dumps(command).encode() + b"\n")
        return self.hear()

    def rules(self, *rules: dict[str, Any]) -> None:
        """Replace the rules; without any, all is well."""
        self.tell(rules=list(rules))

    def applied(self) -> int:
        """How often the rules have applied since they were set."""
        return sum(self.tell()["hit"])

    def hanging(self) -> int:
        """Requests that hang now."""
        return int(self.tell()["hanging"])

    def waiting(self) -> list[bytes]:
        """The command lines of the processes whose threads wait for what hangs now."""
        found = []
        for thread in self.tell()["threads"]:
            with contextlib.suppress(FileNotFoundError):  # it has been killed meanwhile
                found.append(Path(f"/proc/{thread}/cmdline").read_bytes())
        return found

    def wait_hanging(self, count: int = 1) -> None:
        """Wait until so many requests hang."""
        self._wait(lambda: self.hanging() >= count, "nothing hangs")

    def release(self, number: int = 0) -> None:
        """Let what hangs go on, or fail with an error number."""
        self.tell(release=True, errno=number)

    @contextmanager
    def dead(self) -> Iterator[None]:
        """Meanwhile no call is even taken: unlike one that hangs, it ends with its process."""
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def _wait(self, there: Callable[[], bool], otherwise: str) -> None:
        give_up = time.monotonic() + _PATIENCE_S
        while not there():
            if time.monotonic() > give_up:
                raise AssertionError(otherwise)
            time.sleep(0.005)


@contextmanager
def faulty_disk(place: Path) -> Iterator[FaultyDisk]:
    """A :class:`FaultyDisk` that keeps its files below ``place``."""
    needs = "a FUSE filesystem"
    _need_root(needs)
    if not os.path.exists("/dev/fuse"):
        pytest.skip(f"{needs}: the kernel has no /dev/fuse")
    backing, mount = place / "backing", place / "faulty-disk"
    backing.mkdir()
    mount.mkdir()
    ours, its = socket.socketpair()
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fuse_server.py")), str(backing),
         str(mount), str(its.fileno())],
        pass_fds=[its.fileno()],
    )  # fmt: skip
    its.close()
    ours.settimeout(_PATIENCE_S)
    try:
        disk = FaultyDisk(mount, backing, ours, server)
        problem = disk.hear().get("error")
        if problem:
            pytest.skip(f"{needs}: {problem}")
        yield disk
    finally:
        with contextlib.suppress(OSError, AssertionError):
            disk.rules()
            disk.release()
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
        # The server goes on until the last open file is closed, which a test may do late.
        ours.close()
        _servers.append(server)
        _servers[:] = [one for one in _servers if one.poll() is None]
