"""Disks that fill up for real: stores are dropped, loads go on, space comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from faultkit.disks import Disk

from lifeboat_cache.interface import BlockStore, Namespace, Outcome, State
from lifeboat_cache.store import storage
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, sample_keys

Open = Callable[..., StoreDriver]

OK, PRESENT, RESERVE, FAILED = Outcome.OK, Outcome.PRESENT, Outcome.RESERVE, Outcome.FAILED

SIZE = 128 << 10


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a writer again at once, so that the tests need not wait."""
    monkeypatch.setattr(storage, "_WRITER_RETRY_S", 0.0)


def numbered(first: int, outcomes: list[Outcome]) -> list[int]:
    """Numbers of the blocks that are kept."""
    return [first + at for at, outcome in enumerate(outcomes) if outcome.good]


@pytest.mark.parametrize("size", [SIZE, 100_000, 3000])
def test_disk_that_fills_up_and_gets_space_again(
    open_driver: Open, small_disk: Disk, size: int
) -> None:
    driver = open_driver(small_disk.root, size=size)
    kept: list[int] = []
    first, refused = 0, 0
    count = max(8, (1 << 20) // size)
    while refused < 3:
        outcomes = driver.store(range(first, first + count))
        assert set(outcomes) <= {OK, RESERVE, FAILED}
        kept += numbered(first, outcomes)
        refused += OK not in outcomes
        first += count
    assert len(kept) * size > 4 << 20
    assert driver.load(kept) == [OK] * len(kept)
    # Whoever opens it now is served too.
    second = open_driver(small_disk.root, size=size)
    assert second.load(kept) == [OK] * len(kept)
    assert second.block_store.counters().bad_entries == 0
    assert second.block_store.close()

    small_disk.fill()
    assert OK not in driver.store(range(first, first + 2))
    assert driver.block_store.close()
    namespace = driver.block_store.namespace
    assert namespace is not None
    small_disk.give_space()
    assert FilesystemTarget(small_disk.root).purge(namespace.hex).bytes > 4 << 20
    again = open_driver(small_disk.root, size=size)
    assert again.store(range(8)) == [OK] * 8
    assert again.load(range(8)) == [OK] * 8


def test_others_take_and_give_space_while_blocks_are_stored(
    open_driver: Open, small_disk: Disk
) -> None:
    # The free space changes between looking and writing, so that every kind of write fails.
    driver = open_driver(small_disk.root, size=20_000)
    stop = threading.Event()

    def rival() -> None:
        while not stop.is_set():
            small_disk.fill()
            stop.wait(0.01)
            small_disk.give_space()
            stop.wait(0.01)

    thread = threading.Thread(target=rival)
    thread.start()
    kept: list[int] = []
    try:
        for round_ in range(60):
            outcomes = driver.store(range(round_ * 8, round_ * 8 + 8))
            assert set(outcomes) <= {OK, RESERVE, FAILED}
            kept += numbered(round_ * 8, outcomes)
            assert set(driver.load(kept[-8:])) <= {OK}
    finally:
        stop.set()
        thread.join()
    assert driver.block_store.close()
    fresh = open_driver(small_disk.root, size=20_000)
    assert fresh.load(kept) == [OK] * len(kept)
    assert fresh.block_store.counters().bad_entries == 0
    assert fresh.store([9999]) == [OK]


def test_no_inodes_left(open_driver: Open, small_disk: Disk) -> None:
    # Space for bytes, none for files.
    driver = open_driver(small_disk.root)
    assert driver.store(range(4)) == [OK] * 4
    many = small_disk.mount / "many"
    many.mkdir()
    while os.statvfs(many).f_favail:
        (many / os.urandom(8).hex()).touch()
    assert driver.store(range(4, 8)) == [OK] * 4
    second = open_driver(small_disk.root)
    assert second.load(range(8)) == [OK] * 8
    assert OK not in second.store([100])
    for path in list(many.iterdir())[:20]:
        path.unlink()
    assert second.store([100]) == [OK]
    assert second.load([100]) == [OK]


def test_quota_is_a_full_disk(small_disk: Disk, namespace: Namespace) -> None:
    # The process may write no file beyond a size: EFBIG, as some quotas answer.
    program = """
import resource, signal, sys
from pathlib import Path
from lifeboat_cache.interface import BlockStore, Namespace
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
store = BlockStore(Namespace.from_identity({"engine": "test", "model": "small"}),
                   [FilesystemTarget(Path(sys.argv[1]))], io_workers=2)
store.wait_recovered(60)
driver = StoreDriver(store, size=50_000)
stored = [driver.store([number])[0] for number in range(20)]
good = [number for number, outcome in enumerate(stored) if outcome.good]
loaded = driver.load(good)
print(len(good), {o.name for o in loaded}, {o.name for o in stored} - {"OK"}, store.close())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(small_disk.root)],
        capture_output=True,
        text=True,
        check=True,
    )
    count, rest = done.stdout.split(maxsplit=1)
    assert int(count) >= 4
    assert rest in ("{'OK'} {'FAILED'} True\n", "{'OK'} set() True\n")
    store = BlockStore(namespace, [FilesystemTarget(small_disk.root)], io_workers=2)
    assert store.wait_recovered(60)
    found = store.lookup(sample_keys(range(20))).tolist()
    assert found.count(1) == int(count)
    assert store.close()


def test_first_start_on_a_full_disk(small_disk: Disk, namespace: Namespace) -> None:
    small_disk.fill()
    store = BlockStore(namespace, [FilesystemTarget(small_disk.root)], io_workers=1)
    assert store.wait_recovered(60)
    driver = StoreDriver(store)
    assert not driver.store([1])[0].good
    assert driver.load([1]) == [Outcome.MISSING]
    assert store.close()
    small_disk.give_space()
    again = BlockStore(namespace, [FilesystemTarget(small_disk.root)], io_workers=1)
    assert again.wait_recovered(60)
    assert again.state is State.READY
    assert StoreDriver(again).store([1]) == [OK]
    assert again.close()
