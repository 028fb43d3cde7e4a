"""Janitors beside writers: capacity for all of them together, and their access logs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from janitors import THEN, Block, Clock, chain, check, janitor, leave, names, verified, write

from lifeboat_cache.janitor import Janitor, JanitorPolicy
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets import filesystem
from lifeboat_cache.targets.base import Usage
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

SIZE = 256 << 10
OK, FULL, MISSING = Outcome.OK, Outcome.FULL, Outcome.MISSING


def fill(root: Path, namespace: Namespace, first: int, capacity: int) -> None:
    """Store in a process of its own until the target is full."""
    target = FilesystemTarget(root, capacity=capacity)
    store = BlockStore(namespace, [target], io_workers=1)
    store.wait_recovered(60)
    driver = StoreDriver(store, size=SIZE)
    for number in range(first, first + 1000):
        if driver.store([number]) == [FULL]:
            break
    store.close()


@pytest.mark.parametrize("published", [False, True])
def test_writers_stop_at_the_capacity_of_all(
    root: Path, namespace: Namespace, published: bool
) -> None:
    capacity = 64 << 20
    FilesystemTarget(root).probe()
    if published:
        leave(root, [Block(9999)], namespace)
        assert Janitor(FilesystemTarget(root, capacity=capacity)).run_once().used_after
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            try:
                fill(root, namespace, number * 1000, capacity)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    used = FilesystemTarget(root).usage().used
    assert used >= 0.9 * capacity
    assert used <= capacity + 4 * (filesystem._LEAST_SHARE + (1 << 20))


def test_a_writer_sees_what_others_write_after_the_measurement(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write(root, chain(0, 4), namespace, size=SIZE)
    Janitor(FilesystemTarget(root)).run_once()
    write(root, chain(10, 8), namespace, size=SIZE, writer=old)
    new = write(root, chain(20, 8), namespace, size=SIZE)
    target = FilesystemTarget(root, capacity=22 * SIZE)
    scans = []
    usage = target.usage

    def scan() -> Usage:
        scans.append(1)
        return usage()

    monkeypatch.setattr(target, "usage", scan)
    assert target._allow(SIZE) is None
    assert target._allow(SIZE) is FULL
    assert not scans
    old.close()
    new.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2}', b'{"format": 1}'])
def test_a_damaged_measurement_is_ignored(root: Path, namespace: Namespace, content: bytes) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    (root / "usage.json").write_bytes(content)
    assert FilesystemTarget(root, capacity=2 * SIZE)._allow(1) is FULL
    assert FilesystemTarget(root, capacity=8 * SIZE)._allow(1) is None


@pytest.mark.parametrize("age", [-3600, 31])
def test_a_measurement_that_is_not_fresh_is_ignored(
    root: Path, namespace: Namespace, age: int
) -> None:
    leave(root, chain(0, 4), namespace, SIZE)
    usage: dict[str, Any] = {"format": 1, "time": time.time() - age, "used": 0, "settled": 0}
    usage["known"] = {namespace.directory: {name[:12]: 10 for name in names(root, "lock")}}
    (root / "usage.json").write_text(json.dumps(usage))
    assert FilesystemTarget(root, capacity=2 * SIZE)._allow(1) is FULL
    usage["time"] = time.time()
    (root / "usage.json").write_text(json.dumps(usage))
    assert FilesystemTarget(root, capacity=2 * SIZE)._allow(1) is None


def test_stores_go_on_in_a_full_target(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "_REFUSAL_AGE_S", 0.0)
    capacity = 40 * SIZE
    policy = JanitorPolicy(grace_s=0.0, young_s=0.0, margin_bytes=0, punch_bytes=SIZE)
    with_policy = Janitor(FilesystemTarget(root, capacity=capacity), policy=policy)
    driver = open_driver(target=FilesystemTarget(root, capacity=capacity), size=SIZE)
    outcomes = []
    for number in range(200):
        outcomes += driver.store([number])
        if number % 2:
            with_policy.run_once()
    assert outcomes.count(OK) == 200
    # The last ones are there.
    assert driver.load(range(190, 200)) == [OK] * 10
    assert with_policy.run_once().used_after <= capacity
    assert driver.block_store.close()
    assert 20 < verified(root) <= 40


def test_stores_find_room_after_a_refusal(
    open_driver: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "_REFUSAL_AGE_S", 0.0)
    driver = open_driver(target=FilesystemTarget(root, capacity=8 * SIZE), size=SIZE)
    outcomes = driver.store(range(10))
    assert FULL in outcomes
    target = FilesystemTarget(root, capacity=8 * SIZE)
    policy = JanitorPolicy(grace_s=0.0, young_s=0.0, margin_bytes=0, punch_bytes=SIZE)
    one = Janitor(target, policy=policy)
    one.run_once()
    one.run_once()
    assert driver.store([20]) == [OK]


# Access logs ------------------------------------------------------------------


def use(store: BlockStore, driver: StoreDriver, numbers: range) -> None:
    store.touch(driver.keys(numbers))
    store._flush_accesses()


def test_the_log_of_a_living_process_is_folded_and_punched(
    open_driver: Open, root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(root, chain(0, 600), namespace, 4096)
    driver = open_driver(size=4096)
    store = driver.block_store
    use(store, driver, range(300))
    clock = Clock(4e9)
    one = janitor(root, clock)
    assert one.run_once().logs_folded == 1
    summary = root / namespace.directory / f"{'0' * 32}.access"
    (log,) = [path for path in root.glob("*/*.access") if path != summary]
    size = log.stat().st_size
    assert size == 4096 + 300 * 32
    assert log.read_bytes()[4096 : 4096 + 8192] == bytes(8192)
    first = summary.stat().st_size
    assert first == 4096 + 300 * 32
    # It goes on; only what is new is read.
    use(store, driver, range(300, 600))
    clock.tick(61)
    assert one.run_once().logs_folded == 1
    assert summary.stat().st_size == 4096 + 600 * 32
    # Another janitor, later, and the end of the process.
    use(store, driver, range(10))
    other = janitor(root, clock)
    other.run_once()
    assert store.close()
    assert not check(root).faults
    clock.tick(61)
    other.run_once()
    assert not log.exists()
    assert summary.stat().st_size == 4096 + 600 * 32
    assert not check(root).faults


def test_recency_is_not_lost_when_the_summary_cannot_be_written(
    open_driver: Open, root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache.janitor import accesses

    leave(root, chain(0, 4), namespace)
    driver = open_driver()
    use(driver.block_store, driver, range(4))
    assert driver.block_store.close()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(accesses, "write_atomically", full)
    clock = Clock(4e9)
    one = janitor(root, clock)
    report = one.run_once()
    assert report.logs_folded == 0
    assert any("No space" in problem for problem in report.problems)
    assert len(names(root, "access")) == 1
    monkeypatch.undo()
    clock.tick(61)
    assert one.run_once().logs_folded == 1


def test_a_damaged_summary_costs_recency_only(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 4), namespace)
    summary = root / namespace.directory / f"{'0' * 32}.access"
    summary.write_bytes(b"LBACCESS" + b"\xff" * 5000)
    clock = Clock()
    report = janitor(root, clock).run_once()
    assert report.records == 4
    assert verified_records(root) == 4


def verified_records(root: Path) -> int:
    return sum(n.records.verified for t in check(root).targets for n in t.namespaces)


def test_the_summary_is_no_writer_and_goes_with_the_namespace(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 4), namespace)
    driver = open_driver()
    use(driver.block_store, driver, range(4))
    assert driver.block_store.close()
    clock = Clock(4e9)
    one = janitor(root, clock)
    for _ in range(3):
        one.run_once()
        clock.tick(100)
    janitor(root, clock, capacity=4096).run_once()
    assert names(root, "access") == [f"{'0' * 32}.access"]
    target = FilesystemTarget(root)
    (info,) = target.namespaces()
    assert len(info.writers) == 1
    assert info.blocks == 4
    report = check(root)
    assert report.targets[0].namespaces[0].writers == 1
    assert not target.purge(namespace.hex).kept
    assert not (root / namespace.directory).exists()
    assert {path.name for path in root.iterdir()} == {
        "lifeboat-cache.json",
        "usage.json",
        ".janitor.lock",
    }


def test_purging_by_age_keeps_the_summary_of_what_stays(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    leave(root, chain(0, 4, THEN), namespace)
    driver = open_driver()
    use(driver.block_store, driver, range(4))
    assert driver.block_store.close()
    clock = Clock(4e9)
    one = janitor(root, clock)
    for _ in range(3):
        one.run_once()
        clock.tick(100)
    report = FilesystemTarget(root).purge(namespace.hex, older_than_s=3600)
    assert report.files == 0
    assert [writer for writer, _ in report.kept] == [n[:32] for n in names(root, "journal")]
    assert names(root, "access") == [f"{'0' * 32}.access"]
