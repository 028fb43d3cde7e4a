"""What macOS is asked, from recorded answers; and the store's suite without what it lacks."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lifeboat_cache import darwin
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.errors import TargetError
from lifeboat_cache.mover import hanging
from lifeboat_cache.targets import direct, holes, mounts

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]


def _statfs(flags: int, kind: str, point: str, source: str) -> bytes:
    """As ``struct statfs`` of ``sys/mount.h`` has it: field by field."""
    numbers = struct.pack("@IiQQQQQiiIII", 4096, 1 << 20, 1, 2, 3, 4, 5, 6, 7, 501, 26, flags)
    names = struct.pack("@I16s1024s1024s", 1, kind.encode(), point.encode(), source.encode())
    return numbers + names + bytes(32)


def test_mounts_are_read_from_the_systems_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = b"".join(
        [
            _statfs(0x1000, "apfs", "/", "/dev/disk3s1s1"),
            _statfs(0x1001, "hfs", "/Volumes/Old disk", "/dev/disk9"),
            _statfs(0, "smbfs", "/Volumes/share", "//me@server/share"),
            _statfs(0, "strangefs", "/Volumes/strange", "somewhere"),
            _statfs(0x1000, "macfuse", "/Volumes/fuse", "sshfs"),
        ]
    )
    assert len(table) == 5 * 2168
    found = darwin.parse_mounts(table)
    assert found[1] == darwin.Mounted("/Volumes/Old disk", "hfs", "/dev/disk9", False, True)
    monkeypatch.setattr(mounts, "DARWIN", True)
    monkeypatch.setattr(darwin, "mounted", lambda: found)
    by_point = {str(mount.point): mount for mount in mounts.mounts()}
    assert by_point["/Volumes/Old disk"].options == {"ro": ""}
    kinds = {point: mounts.kind_of(mount.type) for point, mount in by_point.items()}
    assert kinds == {
        "/": "local",
        "/Volumes/Old disk": "local",
        "/Volumes/share": "network",
        "/Volumes/strange": "network",
        "/Volumes/fuse": "fuse",
    }


@pytest.mark.parametrize(
    ("path", "hangs"),
    [("/Users/me/kv", False), ("/Volumes/share/kv", True), ("/Volumes/fuse", True)],
)
def test_only_local_disks_are_used_by_the_process_itself(
    path: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = [
        darwin.Mounted("/", "apfs", "/dev/disk3s1s1", True, True),
        darwin.Mounted("/Volumes/share", "nfs", "server:/", True, False),
        darwin.Mounted("/Volumes/fuse", "macfuse", "sshfs", True, True),
    ]
    monkeypatch.setattr(mounts, "DARWIN", True)
    monkeypatch.setattr(darwin, "mounted", lambda: table)
    tier = Tier.model_validate({"name": "kv", "type": "filesystem", "path": path})
    assert hanging.can_hang(tier) is hangs
    if hangs:
        monkeypatch.setattr(hanging, "hosts_movers", lambda: False)
        with pytest.raises(TargetError, match=r"kv: targets that can hang .* need Linux: use a"):
            hanging.require_movers(tier)


def test_the_start_of_a_process_is_read_from_its_description() -> None:
    words = struct.pack("@11I", 0, 2, 0, 4711, 1, 501, 20, 501, 20, 501, 20)
    names = struct.pack("@I16s32s", 0, b"python3.12", b"python3.12")
    rest = struct.pack("@5Ii", 12, 4711, 0, 0, 0, 0)
    description = words + names + rest + struct.pack("@QQ", 1_790_000_000, 123_456)
    assert len(description) == 136
    assert darwin.parse_start(description) == 1_790_000_000_123_456


def test_what_this_system_lacks_is_unknown() -> None:
    if sys.platform == "darwin":
        pytest.skip("this is macOS")
    assert darwin.boot_session() == ""
    assert darwin.process_start(os.getpid()) is None
    assert darwin.mounted() == []


class _Asked:
    """In the place of ``fcntl``: remembers what was asked."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.asked: list[tuple[int, object]] = []

    def __call__(self, fd: int, command: int, argument: object) -> object:
        self.asked.append((command, argument))
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return argument


def test_holes_are_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Asked()
    monkeypatch.setattr(holes, "DARWIN", True)
    monkeypatch.setattr(fcntl, "fcntl", asked)
    assert holes.punch_hole(3, 4095, 3 * 4096)
    assert asked.asked == [(99, struct.pack("@IIqq", 0, 0, 4096, 2 * 4096))]
    assert holes.punch_hole(3, 1, 4095)
    assert len(asked.asked) == 1  # there is no whole block inside
    assert holes.take_space(3, 8192, 65536)
    assert asked.asked[1:] == [(42, struct.pack("@Iiqqq", 4, 3, 0, 65536, 0))]


def test_a_filesystem_without_holes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holes, "DARWIN", True)
    monkeypatch.setattr(fcntl, "fcntl", _Asked(errno.ENOTSUP))
    assert not holes.punch_hole(3, 0, 4096)
    assert not holes.take_space(3, 0, 4096)
    monkeypatch.setattr(fcntl, "fcntl", _Asked(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        holes.take_space(3, 0, 4096)


def test_the_page_cache_is_bypassed_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _Asked()
    monkeypatch.setattr(direct, "DARWIN", True)
    monkeypatch.setattr(fcntl, "fcntl", asked)
    assert not direct.supports_direct(tmp_path, "auto")
    assert not asked.asked
    assert direct.supports_direct(tmp_path, "on")
    assert asked.asked == [(48, 1)]
    assert list(tmp_path.iterdir()) == []


#: What these tests do themselves needs Linux.
_NEED_LINUX = ("test_journal_reader.py::test_a_journal_that_cannot_be_read_now_is_read_later",)
#: Without holes a segment goes as a whole, unless what is live in it can be copied.
_NEED_HOLES = ("test_janitor_rewrite.py::test_keyed_records_are_copied_by_who_has_the_key_only",)
_NOT_HERE = (*_NEED_LINUX, *_NEED_HOLES)
_WITHOUT_HOLES = ("test_target_filesystem.py", "test_janitor_rewrite.py")
_QUICK = ("test_target_filesystem.py",)
_ALL = (
    *_QUICK,
    "test_block_store_stateful.py",
    "test_concurrency.py",
    "test_corruption.py",
    "test_janitor_eviction.py",
    "test_janitor_reclaim.py",
    "test_janitor_rewrite.py",
    "test_janitor_writers.py",
    "test_journal_reader.py",
    "test_kill.py",
    "test_processes.py",
    "test_retention.py",
    "test_space.py",
    "test_tiered_store.py",
)


def _run_like_macos(names: tuple[str, ...], kernels: str, holes: str = "on") -> None:
    paths = (TESTS / "children", ROOT / "tools", ROOT / "tests" / "support")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "macos_like", "-m", "not full",
            "--no-header", *(str(TESTS / name) for name in names),
            *(f"--deselect={(TESTS / name).relative_to(ROOT)}" for name in _NOT_HERE),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)]),
            "LIFEBOAT_TEST_KERNELS": kernels,
            "LIFEBOAT_TEST_HOLES": holes,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_store_works_with_what_macos_has() -> None:
    _run_like_macos(_QUICK, "off")


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_the_whole_store_works_with_what_macos_has(kernels: str) -> None:
    _run_like_macos(_ALL, kernels)


@pytest.mark.full
def test_the_store_works_without_holes() -> None:
    _run_like_macos(_WITHOUT_HOLES, "off", "off")
