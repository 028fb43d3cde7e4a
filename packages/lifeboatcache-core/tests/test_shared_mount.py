"""A directory that other hosts use too: leases, late sight, and calls that are tried again.

There is no NFS client where this is tested: functions answer as one would.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lifeboat_cache import system
from lifeboat_cache.errors import TargetError
from lifeboat_cache.janitor import Janitor, JanitorClock, JanitorPolicy, catalogue, journal_follower
from lifeboat_cache.janitor import lease as janitor_lease
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store import keeper
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets import hosts, layout, segment_writer, server_clock, writer_lock
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import JANITOR_LEASE, write_atomically
from lifeboat_cache.targets.traits import PRIVATE, Traits, declare, traits_of
from lifeboat_cache.targets.writer_lock import WriterLock, lease_expired, writer_alive
from lifeboat_cache.testing import StoreDriver

OK, MISSING, CORRUPT, FAILED = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED
WRITER = bytes(range(16))
NAME = WRITER.hex()


class Clocks:
    """This host's clock and the server's, which pass when they are told to."""

    def __init__(self) -> None:
        self.here = 1000.0
        self.offset = 1e9  # of the server's clock
        self.read_only = False

    def tick(self, seconds: float) -> None:
        self.here += seconds

    def there(self, _: Path) -> float | None:
        return None if self.read_only else self.here + self.offset


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    one = Clocks()
    for module in (writer_lock, janitor_lease):
        monkeypatch.setattr(module, "boot_seconds", lambda: one.here)
    monkeypatch.setattr(writer_lock, "file_time", one.there)
    touch = os.utime

    def utime(file: Any, times: Any = None, **options: Any) -> None:
        now = one.here + one.offset
        touch(file, times if times or options else (now, now), **options)

    monkeypatch.setattr(os, "utime", utime)
    return one


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A namespace's directory on a shared mount."""
    directory = tmp_path / "root" / "ns"
    directory.mkdir(parents=True)
    declare(tmp_path / "root", Traits(shared=True))
    yield directory
    declare(tmp_path / "root", PRIVATE)


def seen_from_elsewhere(directory: Path, **changes: object) -> None:
    """Make a lock file one of another host's."""
    path = directory / f"{NAME}.lock"
    owner = {**json.loads(path.read_text()), "host": "other", "boot": "another", **changes}
    before = path.stat()
    path.write_text(json.dumps(owner))
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    writer_lock._own.pop(NAME, None)


# --- leases ----------------------------------------------------------------------------------


def test_a_writer_of_another_host_lives_as_long_as_it_shows_itself(
    shared: Path, clocks: Clocks
) -> None:
    lock = WriterLock(shared, WRITER)
    os.utime(lock._fd)
    seen_from_elsewhere(shared)
    fcntl.lockf(lock._fd, fcntl.LOCK_UN)  # as if locks did not hold between hosts
    for _ in range(40):
        clocks.tick(50)
        os.utime(shared / f"{NAME}.lock")
        assert writer_alive(shared, NAME)
    clocks.tick(299)
    assert writer_alive(shared, NAME)
    clocks.tick(2)
    assert not writer_alive(shared, NAME)


def test_a_server_whose_clock_jumps_kills_nobody(shared: Path, clocks: Clocks) -> None:
    lock = WriterLock(shared, WRITER)
    os.utime(lock._fd)
    seen_from_elsewhere(shared)
    assert writer_alive(shared, NAME)
    clocks.offset += 1800  # all files look old at once
    assert writer_alive(shared, NAME)
    clocks.tick(30)
    assert writer_alive(shared, NAME)
    os.utime(shared / f"{NAME}.lock")
    clocks.tick(61)
    assert writer_alive(shared, NAME)


def test_this_hosts_own_clock_does_not_matter(
    shared: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = WriterLock(shared, WRITER)
    os.utime(lock._fd)
    seen_from_elsewhere(shared)
    for wrong in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        assert writer_alive(shared, NAME)
    clocks.tick(61)
    clocks.offset += 300
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not writer_alive(shared, NAME)


def test_without_a_time_nobody_is_dead(shared: Path, clocks: Clocks) -> None:
    WriterLock(shared, WRITER)
    seen_from_elsewhere(shared)
    clocks.tick(1e6)
    clocks.read_only = True
    assert writer_alive(shared, NAME)


def test_a_lock_that_seems_held_for_ever_does_not_keep_a_writer_alive(
    shared: Path, clocks: Clocks
) -> None:
    lock = WriterLock(shared, WRITER)
    os.utime(lock._fd)
    seen_from_elsewhere(shared)
    writer_alive(shared, NAME)
    clocks.tick(301)
    assert not writer_alive(shared, NAME)
    assert lock._fd >= 0


def test_an_end_is_seen_at_once(shared: Path, clocks: Clocks) -> None:
    lock = WriterLock(shared, WRITER)
    lock.release()
    assert json.loads((shared / f"{NAME}.lock").read_text())["ended"] is True
    assert not writer_alive(shared, NAME)
    # What is not a lease says nothing; neither does a file that is not seen whole.
    (shared / f"{NAME}.lock").write_text("")
    os.utime(shared / f"{NAME}.lock")
    assert writer_alive(shared, NAME)


def test_a_process_of_this_host_that_is_gone_is_dead_at_once(shared: Path, clocks: Clocks) -> None:
    child = os.fork()
    if not child:
        WriterLock(shared, WRITER)
        os._exit(0)
    os.waitpid(child, 0)
    assert not writer_alive(shared, NAME)


@pytest.mark.parametrize("what", ["host", "boot", "space"])
def test_process_numbers_mean_something_on_one_host_only(
    shared: Path, clocks: Clocks, what: str
) -> None:
    lock = WriterLock(shared, WRITER)
    os.utime(lock._fd)
    same = hosts.this_host()
    here = {"host": same.name, "boot": same.boot, "space": same.space}
    seen_from_elsewhere(shared, **{**here, "start": 1})
    assert not writer_alive(shared, NAME), "another process has its number now"
    seen_from_elsewhere(shared, **{**here, "start": 1, what: "x"})
    assert writer_alive(shared, NAME)


def test_a_hidden_process_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    me = hosts.this_process()
    assert not me.ended()
    read = Path.read_bytes

    def hidden(path: Path) -> bytes:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "hidepid")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", hidden)
    assert not me.ended()


def test_a_writer_gives_itself_up_before_others_do(shared: Path, clocks: Clocks) -> None:
    lock = WriterLock(shared, WRITER)
    lock.beat()
    for _ in range(20):
        clocks.tick(30)
        lock.beat()
        assert not lock.lapsed
    verdicts = []
    for seconds in (119, 2, 0):
        clocks.tick(seconds)
        verdicts.append(lock.lapsed)
        if verdicts[-1]:
            lock.beat()
    assert verdicts == [False, True, True], "it does not come back"
    lock.release()


def test_a_frozen_machine_learns_it_from_the_server(shared: Path, clocks: Clocks) -> None:
    lock = WriterLock(shared, WRITER)
    os.utime(lock._fd)
    lock._server = os.fstat(lock._fd).st_mtime
    clocks.tick(25)
    lock.beat()
    assert not lock.lapsed
    clocks.offset += 7 * 86400  # a week passed, and its own clocks stood still
    clocks.tick(25)
    lock.beat()
    assert lock.lapsed


def test_a_local_disk_needs_none_of_it(tmp_path: Path, clocks: Clocks) -> None:
    directory = tmp_path / "plain" / "ns"
    directory.mkdir(parents=True)
    lock = WriterLock(directory, WRITER)
    assert "lease_s" not in json.loads((directory / f"{NAME}.lock").read_text())
    clocks.tick(1e6)
    assert not lock.lapsed
    lock.release()
    assert not writer_alive(directory, NAME)


def test_the_servers_time_comes_from_a_file(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = shared.parent
    monkeypatch.setattr(time, "time", lambda: 5.0)
    server_clock._answers.clear()
    there = server_clock.file_time(root)
    assert there is not None
    (root / "x").touch()
    assert abs((root / "x").stat().st_mtime - there) < 60
    assert [path.name for path in root.iterdir()] in (["ns", "x"], ["x", "ns"])
    server_clock._answers.clear()
    monkeypatch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS)))
    assert server_clock.file_time(root) is None


# --- stores ----------------------------------------------------------------------------------


@pytest.fixture
def node(root: Path, namespace: Namespace) -> Iterator[Callable[..., StoreDriver]]:
    """Opens stores as hosts on a shared mount do."""
    opened = []

    def open_(**options: Any) -> StoreDriver:
        target = FilesystemTarget(root, kind="nfs")
        store = BlockStore(namespace, [target], io_workers=2)
        assert store.wait_recovered(60)
        opened.append(store)
        return StoreDriver(store, **options)

    yield open_
    for store in opened:
        store.close()
    declare(root, PRIVATE)


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_writer_whose_lease_lapsed_is_replaced(
    node: Callable[..., StoreDriver], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = node()
    assert driver.store([1]) == [OK]
    passed = [0.0]
    monkeypatch.setattr(writer_lock, "boot_seconds", lambda: system.boot_seconds() + passed[0])
    passed[0] = 7 * 86400
    assert driver.store([2]) == [FAILED], "nobody might find it"
    assert driver.store([2]) == [OK]
    assert len(list(root.glob("*/*.journal"))) == 2
    other = node()
    assert other.load([1, 2]) == [OK, OK]


def test_payloads_are_flushed_before_the_journal(
    node: Callable[..., StoreDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = node()
    assert driver.store([0]) == [OK]
    flushed: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    assert driver.store(range(1, 9)) == [OK] * 8
    assert ".segment" in flushed
    assert flushed.index(".segment") < flushed.index(".journal")
    flushed.clear()

    def full(fd: int) -> None:
        raise OSError(errno.EIO, "the server is away")

    monkeypatch.setattr(os, "fsync", full)
    assert driver.store([20]) == [FAILED]


def test_records_are_found_when_their_segment_is_seen(
    node: Callable[..., StoreDriver], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is seen before the segment has grown, as with stale attributes."""
    monkeypatch.setattr(keeper, "_TAIL_S", 0.05)
    one = node()
    assert one.store([1]) == [OK]
    other = node()
    stale = {path: path.stat().st_size for path in root.glob("*/*.segment")}
    look = os.stat

    def stat_(path: Any, *args: Any, **options: Any) -> os.stat_result:
        found = look(path, *args, **options)
        size = stale.get(Path(path)) if isinstance(path, (str, Path)) else None
        if size is None:
            return found
        fields = list(found)
        fields[stat.ST_SIZE] = size
        return os.stat_result(fields, {"st_mtime_ns": found.st_mtime_ns})

    monkeypatch.setattr(os, "stat", stat_)
    assert one.store([2]) == [OK]
    time.sleep(0.5)
    assert other.lookup([1, 2]) == [Lookup.HIT, Lookup.MISS]
    stale.clear()
    assert until(lambda: other.lookup([2]) == [Lookup.HIT])
    assert other.load([1, 2]) == [OK, OK]
    assert other.block_store.counters().bad_entries == 0


def test_entries_that_come_late_are_waited_for(
    node: Callable[..., StoreDriver], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of the journal that reads as zeros is followed by others, and seen later."""
    monkeypatch.setattr(keeper, "_TAIL_S", 0.05)
    one = node()
    assert one.store(range(8)) == [OK] * 8
    (journal,) = root.glob("*/*.journal")
    data = journal.read_bytes()
    with journal.open("r+b") as file:
        file.seek(4096 + 128 * 2)
        file.write(bytes(128))
    other = node()
    assert other.lookup(range(8)) == [Lookup.HIT] * 2 + [Lookup.MISS] * 6
    with journal.open("r+b") as file:
        file.write(data)
    assert until(lambda: other.lookup(range(8)) == [Lookup.HIT] * 8)
    assert other.load(range(8)) == [OK] * 8


@pytest.mark.parametrize("first", [0, 3], ids=["all", "the rest"])
def test_a_janitor_removes_nothing_whose_entries_may_come_late(
    node: Callable[..., StoreDriver], root: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The writer is dead; of its journal a page reads as zeros, for longer than a minute."""
    monkeypatch.setattr(catalogue, "_VISIBLE_S", 0.0)
    one = node()
    assert one.store(range(8)) == [OK] * 8
    assert all(one.delete(range(first)))
    assert one.block_store.close()
    (journal,) = root.glob("*/*.journal")
    data = journal.read_bytes()
    with journal.open("r+b") as file:
        file.seek(4096 + 128 * first)
        file.write(bytes(len(data) - file.tell()))
    for lock in root.glob("*/*.lock"):
        lock.unlink()
    now = time.monotonic()
    clock = JanitorClock(lambda: now, time.time)
    monkeypatch.setattr(journal_follower, "time", SimpleNamespace(monotonic=lambda: now))
    keeper = Janitor(FilesystemTarget(root, kind="nfs"), policy=JanitorPolicy(), clock=clock)
    for _ in range(4):
        keeper.run_once()
        now += 150.0
    with journal.open("r+b") as file:
        file.write(data)
    other = node()
    assert other.load(range(first, 8)) == [OK] * (8 - first)


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("damage", ["torn", "short"])
def test_bytes_that_come_late_are_not_called_corrupt(
    node: Callable[..., StoreDriver], root: Path, damage: str
) -> None:
    one = node(size=8192)
    assert one.store(range(3)) == [OK] * 3
    other = node(size=8192)
    (segment,) = root.glob("*/*.segment")
    data = segment.read_bytes()
    if damage == "torn":
        with segment.open("r+b") as file:
            file.seek(4096 + 2 * 8192)
            file.write(bytes(4096))
    else:
        os.truncate(segment, 4096 + 2 * 8192 + 4096)
    assert other.load(range(3)) == [OK, OK, MISSING]
    assert other.lookup([2]) == [Lookup.HIT], "it is asked for again"
    with segment.open("r+b") as file:
        file.write(data)
    assert other.load(range(3)) == [OK] * 3
    third = node(size=8192)
    assert third.load(range(3)) == [OK] * 3, "nobody has buried it"


@pytest.mark.parametrize("damage", ["torn", "zeros"])
def test_head_of_a_segment_that_comes_late_costs_no_block(
    node: Callable[..., StoreDriver],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    """A soak buried all blocks of a segment whose head had been seen in pieces."""
    from lifeboat_cache.targets import segment_reader

    one = node(size=8192)
    assert one.store(range(3)) == [OK] * 3
    other, third = node(size=8192), node(size=8192)
    (segment,) = root.glob("*/*.segment")
    data = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(2048 if damage == "torn" else 0)
        file.write(bytes(4096 - file.tell()))
    assert other.load(range(3)) == [MISSING] * 3
    assert other.lookup(range(3)) == [Lookup.HIT] * 3, "they are asked for again"
    with segment.open("r+b") as file:
        file.write(data)
    assert other.load(range(3)) == [OK] * 3
    assert third.load(range(3)) == [OK] * 3, "nobody has buried them"
    # If it stays so, they are given up.
    with segment.open("r+b") as file:
        file.write(bytes(4096))
    monkeypatch.setattr(segment_reader, "_VISIBLE_S", 0.0)
    last = node(size=8192)
    assert last.load(range(3)) == [CORRUPT] * 3
    assert last.lookup(range(3)) == [Lookup.MISS] * 3


def test_what_stays_wrong_is_corrupt(
    node: Callable[..., StoreDriver], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache.targets import segment_reader

    one = node(size=8192)
    assert one.store(range(3)) == [OK] * 3
    other = node(size=8192)
    (segment,) = root.glob("*/*.segment")
    data = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(4096 + 2 * 8192)
        file.write(bytes(4096))
    assert other.load([2]) == [MISSING]
    with segment.open("r+b") as file:
        file.write(data)
    assert other.load([2]) == [OK]
    monkeypatch.setattr(segment_reader, "_VISIBLE_S", 3600.0)
    with segment.open("r+b") as file:
        file.seek(4096 + 2 * 8192)
        file.write(bytes(4096))
    assert other.load([2]) == [MISSING], "the doubt of before was cleared"
    assert other.block_store._storage.reader.doubts == 1  # type: ignore[union-attr]
    monkeypatch.setattr(segment_reader, "_VISIBLE_S", 0.0)
    assert other.load([2]) == [CORRUPT]
    assert other.lookup([2]) == [Lookup.MISS]


def test_a_stale_handle_is_opened_anew(
    node: Callable[..., StoreDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node()
    assert one.store(range(3)) == [OK] * 3
    other = node()
    assert other.load([0]) == [OK]
    reader = other.block_store._storage.reader
    held = {opened.fd for opened in reader._open.values()}  # type: ignore[union-attr]
    assert held
    look = os.fstat

    def stale(fd: int) -> os.stat_result:
        if fd in held:
            held.discard(fd)
            raise OSError(errno.ESTALE, "Stale file handle")
        return look(fd)

    monkeypatch.setattr(os, "fstat", stale)
    assert other.load(range(3)) == [OK] * 3
    assert not held


def test_a_new_journal_of_a_dead_writer_is_looked_at_for_a_while(
    node: Callable[..., StoreDriver], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_TAIL_S", 0.05)
    one = node()
    assert one.store(range(4)) == [OK] * 4
    (journal,) = root.glob("*/*.journal")
    one.block_store.close()
    data = journal.read_bytes()
    os.truncate(journal, 4096 + 128 * 2)  # the rest is on its way
    other = node()
    assert other.lookup(range(4)) == [Lookup.HIT] * 2 + [Lookup.MISS] * 2
    with journal.open("r+b") as file:
        file.write(data)
    assert until(lambda: other.lookup(range(4)) == [Lookup.HIT] * 4)


def test_silly_renames_are_not_ours(root: Path, node: Callable[..., StoreDriver]) -> None:
    one = node()
    assert one.store([1]) == [OK]
    (directory,) = [path for path in root.iterdir() if path.is_dir()]
    before = FilesystemTarget.allocated(directory)
    for name in (".nfs000000000001", "../.nfs0002"):
        (directory / name).write_bytes(bytes(1 << 20))
    assert FilesystemTarget.allocated(directory) == before
    report = Janitor(FilesystemTarget(root, kind="nfs")).run_once()
    assert report.used_after == before
    assert not report.problems
    assert (directory / ".nfs000000000001").exists()
    FilesystemTarget(root, kind="nfs").probe()


# --- calls that are tried again --------------------------------------------------------------


def test_a_file_that_was_made_at_the_first_try_is_taken(
    node: Callable[..., StoreDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = os.open
    again: list[str] = []

    def retried(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_EXCL and str(path).endswith((".journal", ".segment")):
            os.close(open_(path, flags, *args, **options))  # whose answer is lost
            again.append(str(path))
        return open_(path, flags, *args, **options)

    monkeypatch.setattr(segment_writer.os, "open", retried)  # type: ignore[attr-defined]
    driver = node()
    assert driver.store([1]) == [OK]
    assert len(again) == 2
    monkeypatch.undo()
    assert node().load([1]) == [OK]


def test_a_rename_that_was_done_at_the_first_try_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def retried(source: Any, destination: Any) -> None:
        replace(source, destination)
        replace(source, destination)

    monkeypatch.setattr(layout.os, "replace", retried)  # type: ignore[attr-defined]
    write_atomically(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"

    def lost(source: Any, destination: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", str(source))

    monkeypatch.setattr(layout.os, "replace", lost)  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "x", b"newer")


def test_a_filesystem_without_locks(
    node: Callable[..., StoreDriver], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    driver = node()
    assert driver.store([1]) == [OK]
    assert driver.block_store.close()
    (lock,) = root.glob("*/*.lock")
    assert not writer_alive(lock.parent, lock.name.split(".")[0])
    assert not Janitor(FilesystemTarget(root, kind="nfs")).run_once().busy


# --- one janitor -----------------------------------------------------------------------------


def janitor(root: Path, clocks: Clocks) -> Janitor:
    clock = JanitorClock(lambda: clocks.here, lambda: clocks.here + clocks.offset)
    return Janitor(FilesystemTarget(root, kind="nfs"), policy=JanitorPolicy(), clock=clock)


def test_another_host_takes_over_when_a_janitor_is_gone(
    root: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    FilesystemTarget(root, kind="nfs").probe()
    first = janitor(root, clocks)
    assert not first.run_once().busy
    lease = root / JANITOR_LEASE
    owner = json.loads(lease.read_text())
    assert owner["pid"] == os.getpid()
    lease.write_text(json.dumps({**owner, "host": "other", "boot": "another"}))
    os.utime(lease)
    second = janitor(root, clocks)
    for _ in range(20):
        clocks.tick(20)
        os.utime(lease)
        report = second.run_once()
        assert report.busy
        assert report.holder == f"pid {os.getpid()} on other"
    clocks.tick(100)
    assert second.run_once().busy
    clocks.tick(30)
    assert not second.run_once().busy
    assert json.loads(lease.read_text())["host"] == owner["host"]
    second.close()
    assert not lease.exists(), "who ends lets others begin at once"
    assert not janitor(root, clocks).run_once().busy


def test_janitors_of_one_host_share_its_lease(root: Path, clocks: Clocks) -> None:
    FilesystemTarget(root, kind="nfs").probe()
    agent, command = janitor(root, clocks), janitor(root, clocks)
    assert not agent.run_once().busy
    assert not command.run_once().busy
    command.close()
    assert not agent.run_once().busy


# --- several users ---------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "12345"])
def test_files_get_the_mode_and_group_that_are_configured(
    root: Path, namespace: Namespace, group: str | None
) -> None:
    if group and os.geteuid():
        pytest.skip("only root may give files to any group")
    target = FilesystemTarget(root, file_mode=0o660, group=group)
    before = os.umask(0o077)
    try:
        target.probe()
        store = BlockStore(namespace, [target], io_workers=1)
        assert store.wait_recovered(60)
        driver = StoreDriver(store)
        assert driver.store(range(4)) == [OK] * 4
        driver.block_store.touch(driver.keys([0]) if hasattr(driver, "keys") else [])
        driver.block_store.delete(store.keys()[:1])
        assert store.drain(60)
        Janitor(target).run_once()
        assert store.close()
    finally:
        os.umask(before)
        declare(root, PRIVATE)
    found = {path: path.stat() for path in [root, *root.rglob("*")]}
    assert any(path.suffix == ".dead" for path in found)
    for path, status in found.items():
        mode = stat.S_IMODE(status.st_mode)
        assert mode == ((0o2770 if group else 0o770) if path.is_dir() else 0o660), path
        assert group is None or status.st_gid == int(group), path


def test_a_group_that_does_not_exist(root: Path) -> None:
    with pytest.raises(TargetError, match="there is no group 'nobody-has-this' on this host"):
        FilesystemTarget(root, group="nobody-has-this").probe()


def test_directories_that_nothing_was_said_of_are_private(tmp_path: Path) -> None:
    declare(tmp_path / "a", Traits(shared=True, file_mode=0o640))
    assert traits_of(tmp_path / "a" / "ns" / "file").file_mode == 0o640
    assert traits_of(tmp_path / "ab") == PRIVATE
    assert Traits(file_mode=0o640).directory_mode == 0o750
    assert Traits(file_mode=0o600).directory_mode == 0o700
    declare(tmp_path / "a", PRIVATE)


def test_ages_are_the_servers(shared: Path, clocks: Clocks) -> None:
    file = shared.parent / JANITOR_LEASE
    file.touch()
    os.utime(file)
    touched = file.stat().st_mtime
    assert not lease_expired(file, touched, 10)
    clocks.tick(59)
    assert not lease_expired(file, touched, 10), "it was not watched long enough"
    clocks.tick(2)
    assert lease_expired(file, touched, 10)


def test_a_clone_serves_what_was_stored_and_goes_its_own_way(
    root: Path, tmp_path: Path, namespace: Namespace
) -> None:
    def opened(place: Path) -> StoreDriver:
        store = BlockStore(namespace, [FilesystemTarget(place, kind="ontap")], io_workers=2)
        assert store.wait_recovered(60)
        return StoreDriver(store)

    original = opened(root)
    assert original.store(range(8)) == [OK] * 8
    # A FlexClone is made while its writer lives; other inodes, another device and path.
    clone = opened(shutil.copytree(root, tmp_path / "clone"))
    assert clone.load(range(8)) == [OK] * 8
    assert clone.store(range(8, 12)) == [OK] * 4
    assert original.store(range(12, 16)) == [OK] * 4
    assert clone.driven.close()
    assert original.driven.close()
    for place, there in ((root, [*range(8), *range(12, 16)]), (tmp_path / "clone", range(12))):
        again = opened(place)
        found = again.lookup(range(16))
        assert [number for number in range(16) if found[number] == Lookup.HIT] == list(there)
        assert again.load(there) == [OK] * 12
        assert again.driven.close()
