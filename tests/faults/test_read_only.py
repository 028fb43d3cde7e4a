"""A filesystem that becomes read-only under a running store, and writable again."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from faultkit.disks import Disk

from lifeboat_cache.interface import Lookup, Outcome, State
from lifeboat_cache.store import storage
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

OK, PRESENT, FAILED, MISSING = Outcome.OK, Outcome.PRESENT, Outcome.FAILED, Outcome.MISSING


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a writer again at once, so that the tests need not wait."""
    monkeypatch.setattr(storage, "_WRITER_RETRY_S", 0.0)


def test_writing_store_on_a_disk_that_becomes_read_only(
    open_driver: Open, small_disk: Disk
) -> None:
    if small_disk.kind != "ext4":
        pytest.skip("only ext4 becomes read-only by itself, under files open for writing")
    before = open_driver(small_disk.root)
    assert before.store(range(4)) == [OK] * 4
    assert before.block_store.close()
    os.sync()
    driver = open_driver(small_disk.root)
    assert driver.store(range(10, 14)) == [OK] * 4
    os.sync()
    small_disk.meet_an_error()
    for _ in range(3):
        assert OK not in driver.store(range(20, 24))
        assert driver.load([*range(4), *range(10, 14)]) == [OK] * 8
    assert driver.delete([3]) == [True]
    assert driver.lookup([3]) == [Lookup.MISS]
    driver.block_store.touch(driver.keys(range(4)))
    # A process that starts now serves what is there, and stores nothing.
    starting = open_driver(small_disk.root)
    if starting.block_store.state is State.READY:
        assert set(starting.load(range(3))) == {OK}
        assert OK not in starting.store([30])
    else:
        assert "not writable" in starting.block_store.reason
    assert driver.block_store.close()

    # After a reboot.
    small_disk.mount_again()
    again = open_driver(small_disk.root)
    assert set(again.load([*range(4), *range(10, 14)])) <= {OK, MISSING, Outcome.CORRUPT}
    assert all(outcome.good for outcome in again.store(range(34)))
    assert again.load(range(34)) == [OK] * 34


def test_reading_store_on_a_disk_that_becomes_read_only_and_writable_again(
    open_driver: Open, small_disk: Disk
) -> None:
    before = open_driver(small_disk.root)
    assert before.store(range(4)) == [OK] * 4
    assert before.block_store.close()
    driver = open_driver(small_disk.root)
    assert driver.load(range(4)) == [OK] * 4
    small_disk.remount(writable=False)
    for _ in range(3):
        assert driver.store([9]) == [FAILED]
        assert driver.load(range(4)) == [OK] * 4
    small_disk.remount(writable=True)
    assert driver.store([9]) == [OK]
    assert driver.load([*range(4), 9]) == [OK] * 5


def test_read_only_from_the_start_serves_what_is_there(open_driver: Open, small_disk: Disk) -> None:
    # An image of a cache that is mounted read-only for many readers.
    before = open_driver(small_disk.root)
    assert before.store(range(4)) == [OK] * 4
    assert before.block_store.close()
    small_disk.remount(writable=False)
    driver = open_driver(small_disk.root)
    assert driver.block_store.state is State.DISABLED
    assert "not writable" in driver.block_store.reason
    assert driver.load(range(4)) == [MISSING] * 4
    small_disk.remount(writable=True)
    again = open_driver(small_disk.root)
    assert again.load(range(4)) == [OK] * 4
