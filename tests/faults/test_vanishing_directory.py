"""The directory is removed, unmounted or replaced under running engines."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faultkit.disks import Disk
from faultkit.engine import engines

from lifeboat_cache.interface import Namespace, Outcome
from lifeboat_cache.store import storage
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

OK, PRESENT, FAILED, MISSING = Outcome.OK, Outcome.PRESENT, Outcome.FAILED, Outcome.MISSING


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a writer again at once, so that the tests need not wait."""
    monkeypatch.setattr(storage, "_WRITER_RETRY_S", 0.0)


def store_until_kept(driver: StoreDriver, numbers: range) -> None:
    give_up = time.monotonic() + 60
    while not all(outcome.good for outcome in driver.store(numbers)):
        assert time.monotonic() < give_up, "stores do not go on"
        time.sleep(0.1)


@pytest.mark.parametrize("what", ["root", "namespace", "files"])
def test_removed_again_and_again_while_engines_store_and_load(
    root: Path, open_driver: Open, namespace: Namespace, what: str
) -> None:
    driver = open_driver()
    stop = threading.Event()

    def remove() -> None:
        while not stop.wait(0.05):
            if what == "files":
                for path in list(root.glob("*/*")):
                    path.unlink(missing_ok=True)
            else:
                place = root if what == "root" else root / namespace.directory
                shutil.rmtree(place, ignore_errors=True)
            FilesystemTarget(root).probe()

    remover = threading.Thread(target=remove)
    with engines(root, 2) as others:
        for seed, engine in enumerate(others):
            engine.tell("churn", [seed, 1.0, 200])
        remover.start()
        try:
            for round_ in range(30):
                numbers = range(round_ * 8, round_ * 8 + 8)
                assert set(driver.store(numbers)) <= {OK, PRESENT, FAILED}
                assert set(driver.load(range(round_ * 8 + 8))) <= {OK, MISSING, FAILED}
        finally:
            stop.set()
            remover.join()
            said = [engine.hear() for engine in others]
        for counts in said:
            assert sum(counts["load"].values()) > 0
            assert set(counts["load"]) <= {"OK", "MISSING", "FAILED"}
        # Peace: everything that is stored now is there, for everybody.
        driver.load(range(320))
        driver.load(range(320))
        store_until_kept(driver, range(1000, 1008))
        assert driver.load(range(1000, 1008)) == [OK] * 8
    assert driver.block_store.close()
    assert open_driver().load(range(1000, 1008)) == [OK] * 8


def test_lazily_unmounted(open_driver: Open, small_disk: Disk) -> None:
    driver = open_driver(small_disk.root)
    assert driver.store(range(4)) == [OK] * 4
    assert driver.load(range(4)) == [OK] * 4
    small_disk.detach()
    # The open files go on; a block that only they hold would be lost with them, or not:
    # what is reported is loadable, what is not is a miss.
    for round_ in range(3):
        numbers = range(10 + round_ * 4, 14 + round_ * 4)
        for number, outcome in zip(numbers, driver.store(numbers), strict=True):
            if outcome.good:
                assert driver.load([number])[0] in (OK, MISSING, FAILED)
        assert set(driver.load(range(4))) <= {OK, MISSING, FAILED}
    # Nothing is made below the mount point: it would fill the wrong disk.
    assert list(small_disk.mount.iterdir()) == []
    assert driver.block_store.close()


def test_unmounted_before_the_first_store(open_driver: Open, small_disk: Disk) -> None:
    before = open_driver(small_disk.root)
    assert before.store(range(4)) == [OK] * 4
    assert before.block_store.close()
    driver = open_driver(small_disk.root)
    small_disk.detach()
    assert driver.load(range(4)) == [MISSING] * 4
    assert OK not in driver.store(range(8))
    assert list(small_disk.mount.iterdir()) == []
    assert driver.block_store.close()


def test_replaced_by_another_cache(open_driver: Open, root: Path) -> None:
    # Blocks of the same keys, but another process made them: a backup is put back.
    backup = root.parent / "backup"
    other = open_driver(backup)
    assert other.store(range(8)) == [OK] * 8
    assert other.block_store.close()
    driver = open_driver(root)
    assert driver.store(range(4)) == [OK] * 4
    assert driver.load(range(2)) == [OK] * 2
    root.rename(root.parent / "old")
    backup.rename(root)
    assert set(driver.load(range(4))) <= {OK, MISSING}
    driver.load(range(4))
    store_until_kept(driver, range(20, 24))
    assert driver.load(range(20, 24)) == [OK] * 4
    assert driver.block_store.close()
    again = open_driver(root)
    assert again.load([*range(8), *range(20, 24)]) == [OK] * 12


def test_replaced_by_something_else(open_driver: Open, root: Path) -> None:
    driver = open_driver(root)
    assert driver.store(range(4)) == [OK] * 4
    root.rename(root.parent / "old")
    root.mkdir()
    (root / "thesis.tex").write_text("years of work")
    for _ in range(3):
        assert driver.store(range(10, 14)) == [FAILED] * 4
        assert set(driver.load(range(4))) <= {MISSING, OK}
    assert os.listdir(root) == ["thesis.tex"]
    assert driver.block_store.close()
    assert os.listdir(root) == ["thesis.tex"]


def test_replaced_by_a_link_to_elsewhere(open_driver: Open, root: Path) -> None:
    driver = open_driver(root)
    assert driver.store(range(4)) == [OK] * 4
    moved = root.parent / "moved"
    root.rename(moved)
    root.symlink_to(moved)
    # The administrator moved it to a larger disk.
    assert driver.load(range(4)) == [OK] * 4
    store_until_kept(driver, range(10, 14))
    assert driver.block_store.close()
    assert open_driver(root).load([*range(4), *range(10, 14)]) == [OK] * 8
