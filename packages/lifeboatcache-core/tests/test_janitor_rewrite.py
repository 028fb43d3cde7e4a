"""Rewriting sparse and small segments: nothing is lost, nothing corrupt is carried on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import janitors
import numpy as np
import pytest
from janitors import THEN, Block, Clock, chain, janitor, leave, names, run_until_quiet, verified

from lifeboat_cache.checksum import ALGORITHM_KEYED_BLAKE3
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.format.journal import Entries, parse_entries
from lifeboat_cache.integrity import IntegrityKey, namespace_with_integrity
from lifeboat_cache.janitor import Janitor, JanitorPolicy, copying
from lifeboat_cache.janitor.steps import rewriting
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store import keeper
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, flip_byte, sample_records

Open = Callable[..., StoreDriver]

SIZE = 64 << 10
OK, MISSING = Outcome.OK, Outcome.MISSING

#: Everything of an entry but where the record lies.
KEPT = (
    "key",
    "payload_checksum",
    "layout",
    "salt",
    "family",
    "parent",
    "stored_length",
    "raw_length",
    "position",
    "time",
    "group",
    "codec",
    "algorithm",
)


def records(root: Path, namespace: Namespace) -> dict[bytes, Entries]:
    """Entries of all journals by key."""
    found = {}
    for path in root.glob("*/*.journal"):
        data = path.read_bytes()[HEADER_BYTES:]
        entries, bad = parse_entries(data, bytes.fromhex(path.name[:32]), 0, namespace.digest)
        assert not bad
        found.update({entry["key"].tobytes(): entry for entry in entries[entries["kind"] == 1]})
    return found


@pytest.mark.parametrize(
    "count", [pytest.param(200, id="quick"), pytest.param(1000, id="full", marks=pytest.mark.full)]
)
def test_ended_writers_become_a_few_files(
    open_driver: Open, root: Path, namespace: Namespace, count: int
) -> None:
    for number in range(count):
        leave(root, [Block(number, family=number + 1, time=THEN + number)], namespace, 4096)
    before = records(root, namespace)
    used = FilesystemTarget(root).usage().used
    clock = Clock()
    reports = run_until_quiet(janitor(root, clock), clock, 5)
    assert sum(report.merged_segments for report in reports) >= count
    assert sum(report.writers_removed for report in reports) >= count
    files = [path.name for path in root.rglob("*") if path.is_file()]
    assert len(files) < 12, files
    assert reports[-1].used_after < used // 2
    after = records(root, namespace)
    assert before.keys() == after.keys()
    for key, entry in before.items():
        for name in KEPT:
            assert entry[name] == after[key][name], name
    assert open_driver(size=4096).load(range(count)) == [OK] * count
    assert verified(root) == count
    # Nothing more is to be done.
    assert reports[-1].copied_blocks == reports[-1].writers_removed == 0


def test_a_sparse_segment_is_rewritten(open_driver: Open, root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 64), namespace, SIZE)
    driver = open_driver(size=SIZE)
    dead = [number for number in range(64) if number % 4]
    assert all(driver.delete(dead))
    assert driver.block_store.close()
    clock = Clock(4e9)
    one = janitor(root, clock)
    reports = run_until_quiet(one, clock)
    # The runs are too short to be punched.
    assert sum(report.punched_bytes for report in reports) == 0
    assert sum(report.compacted_segments for report in reports) == 1
    assert sum(report.copied_blocks for report in reports) == 16
    assert reports[-1].used_after <= 17 * SIZE
    expected = [OK if number % 4 == 0 else MISSING for number in range(64)]
    assert open_driver(size=SIZE).load(range(64)) == expected
    assert verified(root) == 16


def test_copies_are_as_recent_as_their_originals(root: Path, namespace: Namespace) -> None:
    for number in range(40):
        leave(root, [Block(number, family=number + 1)], namespace, SIZE)
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    driver = StoreDriver(store, size=SIZE)
    store.touch(driver.keys(range(0, 40, 4)))
    assert store.close()
    clock = Clock(4e9)
    run_until_quiet(janitor(root, clock), clock)
    assert len(names(root, "segment")) == 1
    # One that has seen nothing of it.
    run_until_quiet(janitor(root, clock, capacity=40 * SIZE, low=0.28), clock)
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    left = StoreDriver(store, size=SIZE).load(range(40))
    assert [n for n in range(40) if left[n] is OK] == list(range(0, 40, 4))
    assert store.close()


def test_corrupt_records_are_not_copied(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    for number in range(20):
        leave(root, [Block(number)], namespace, SIZE)
    journals = records(root, namespace)
    driver = StoreDriver.__new__(StoreDriver)
    driver.space = b""
    (bad,) = driver.keys([7])
    for path in root.glob("*/*.segment"):
        writer = path.name[:32]
        journal = path.parent / f"{writer}.journal"
        if bad in journal.read_bytes():
            flip_byte(path, HEADER_BYTES + 1000)
    assert bad in journals
    clock = Clock()
    reports = run_until_quiet(janitor(root, clock), clock)
    assert sum(report.corrupt_blocks for report in reports) == 1
    assert sum(report.copied_blocks for report in reports) == 19
    assert open_driver(size=SIZE).load(range(20)) == [OK] * 7 + [MISSING] + [OK] * 12
    assert verified(root) == 19


@pytest.mark.parametrize("size", [1, 100, 5000, 70_000])
def test_records_of_odd_lengths_are_copied(
    open_driver: Open, root: Path, namespace: Namespace, size: int
) -> None:
    for number in range(0, 40, 2):
        leave(root, chain(number, 2), namespace, size)
    clock = Clock()
    reports = run_until_quiet(janitor(root, clock), clock)
    assert sum(report.copied_blocks for report in reports) == 40
    assert sum(report.corrupt_blocks for report in reports) == 0
    assert open_driver(size=size).load(range(40)) == [OK] * 40
    assert verified(root) == 40


def test_what_cannot_be_read_stays(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        leave(root, [Block(number)], namespace, SIZE)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(copying, "read_into", broken)
    clock = Clock()
    one = janitor(root, clock)
    for _ in range(3):
        report = one.run_once()
        clock.tick(100)
        assert report.problems
        assert report.copied_blocks == report.corrupt_blocks == 0
    assert len(names(root, "segment")) == 20
    monkeypatch.undo()
    run_until_quiet(one, clock)
    assert len(names(root, "segment")) == 1
    assert verified(root) == 20


def test_equal_records_of_two_writers_are_not_copied_twice(
    open_driver: Open, root: Path, namespace: Namespace
) -> None:
    for _ in range(20):
        leave(root, chain(0, 4), namespace, SIZE)
    assert verified(root) == 80
    clock = Clock()
    reports = run_until_quiet(janitor(root, clock), clock)
    assert sum(report.copied_blocks for report in reports) == 4
    assert open_driver(size=SIZE).load(range(4)) == [OK] * 4
    assert verified(root) == 4


def test_copies_do_not_touch_the_reserve(small_disk: Path, namespace: Namespace) -> None:
    root = small_disk / "kv"
    for number in range(20):
        leave(root, [Block(number)], namespace, SIZE)
    clock = Clock()
    free = janitor(root, clock).run_once(dry_run=True).free
    one = janitor(root, clock, reserve=free - SIZE, eviction="none")
    for report in run_until_quiet(one, clock, 3):
        assert report.copied_blocks <= 1
    assert verified(root) == 20


def test_copies_overshoot_the_capacity_by_a_bounded_amount(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "_LENT_BYTES", 5 * SIZE)
    for first in range(0, 64, 16):
        leave(root, chain(first, 16), namespace, SIZE)
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    driver = StoreDriver(store, size=SIZE)
    assert all(driver.delete([number for number in range(64) if number % 4]))
    assert store.close()
    clock = Clock(4e9)
    one = janitor(root, clock, capacity=60 * SIZE, eviction="none")
    copied = []
    for _ in range(20):
        report = one.run_once()
        copied.append(report.copied_blocks)
        assert report.used_after <= (64 + 5 + 2) * SIZE
        clock.tick(10)
    # One at first; more once what it replaced has been given back.
    assert copied[:3] == [4, 0, 0]
    assert sum(copied) == 16
    assert verified(root) == 16


def test_keyed_records_are_copied_by_who_has_the_key_only(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = IntegrityKey.from_content(bytes(range(32)))
    keyed = namespace_with_integrity(namespace, key)
    monkeypatch.setattr(
        janitors,
        "sample_records",
        partial(
            sample_records,
            algorithms=[ALGORITHM_KEYED_BLAKE3],
            integrity_key=key.secret,
        ),
    )
    for number in range(20):
        leave(root, [Block(number)], keyed, SIZE)
    monkeypatch.undo()
    assert {int(e["algorithm"]) for e in records(root, keyed).values()} == {3}
    clock = Clock()
    other = IntegrityKey.from_content(b"x" * 32)
    policy = JanitorPolicy(margin_bytes=0)
    for wrong in (None, other):
        one = Janitor(FilesystemTarget(root), policy=policy, key=wrong, clock=clock.both)
        reports = run_until_quiet(one, clock, 3)
        assert sum(r.copied_blocks + r.corrupt_blocks for r in reports) == 0
        assert not any(report.problems for report in reports)
    assert len(names(root, "segment")) == 20
    one = Janitor(FilesystemTarget(root), policy=policy, key=key, clock=clock.both)
    assert sum(report.copied_blocks for report in run_until_quiet(one, clock)) == 20
    assert len(names(root, "segment")) == 1
    # It can be evicted without a key.
    run_until_quiet(janitor(root, clock, capacity=10 * SIZE), clock)
    assert len(records(root, keyed)) > 0
    assert FilesystemTarget(root).usage().used < 11 * SIZE


def test_a_namespace_whose_document_comes_back_is_rewritten_then(
    root: Path, namespace: Namespace
) -> None:
    for number in range(20):
        leave(root, [Block(number)], namespace, SIZE)
    document = root / namespace.directory / "namespace.json"
    text = document.read_bytes()
    document.unlink()
    clock = Clock()
    one = janitor(root, clock)
    reports = run_until_quiet(one, clock, 3)
    # Who knows whether its records are protected by a key?
    assert sum(report.copied_blocks for report in reports) == 0
    assert reports[-1].used_after >= 20 * SIZE
    document.write_bytes(text)
    reports = run_until_quiet(one, clock, 4)
    assert sum(report.copied_blocks for report in reports) == 20
    assert verified(root) == 20


def test_a_merge_keeps_the_order_of_writing(root: Path, namespace: Namespace) -> None:
    for at in range(18):
        leave(root, chain(at * 10, 4, THEN + (at * 7) % 18), namespace, 4096)
    clock = Clock()
    run_until_quiet(janitor(root, clock), clock)
    entries = sorted(records(root, namespace).values(), key=lambda entry: int(entry["offset"]))
    times = np.array([int(entry["time"]) for entry in entries])
    assert (np.diff(times) >= 0).all()
    positions = [int(entry["position"]) for entry in entries]
    assert positions == [256, 512, 768, 1024] * 18


@pytest.mark.parametrize("when", ["copy", "copied", "marked", "later"])
def test_what_is_deleted_while_it_is_copied_does_not_come_back(
    root: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    # An engine that does not hear of copies yet.
    monkeypatch.setattr(keeper, "_TAIL_S", 3600.0)
    for number in range(20):
        leave(root, [Block(number, family=number + 1)], namespace, SIZE)
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    driver = StoreDriver(store, size=SIZE)
    clock = Clock()
    one = janitor(root, clock)
    left = [when]

    def step(name: str) -> None:
        if name in left:
            left.clear()
            assert driver.delete([3, 4]) == [True, True]
            assert store.drain(60)

    one.estate.on_step = step
    assert one.run_once().copied_blocks == 20
    step("later")
    assert not left
    assert store.close()
    run_until_quiet(one, clock)
    again = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert again.wait_recovered(60)
    expected = [MISSING if number in (3, 4) else OK for number in range(20)]
    assert StoreDriver(again, size=SIZE).load(range(20)) == expected
    assert again.close()
    assert verified(root) == 18


def test_what_is_purged_while_it_is_copied_does_not_come_back(
    root: Path, namespace: Namespace
) -> None:
    for number in range(20):
        leave(root, [Block(number, family=number + 1)], namespace, SIZE)
    clock = Clock()
    one = janitor(root, clock)
    left = ["copy"]

    def step(name: str) -> None:
        if name in left:
            left.clear()
            (kept,) = FilesystemTarget(root).purge(namespace.hex).kept
            assert "in use by" in kept[1]  # whom the copies belong to

    one.estate.on_step = step
    assert one.run_once().copied_blocks > 0
    assert not left
    run_until_quiet(one, clock)
    assert verified(root) == 0
