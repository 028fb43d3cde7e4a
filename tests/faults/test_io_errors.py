"""The system reports errors: each is a counted miss, nothing else, and heals."""

from __future__ import annotations

import errno
import gc
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from faultkit.disks import Disk, FaultyDisk

from lifeboat_cache.interface import BlockStore, Lookup, Namespace, Outcome, State
from lifeboat_cache.store import storage
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]

OK, PRESENT, MISSING, FAILED = Outcome.OK, Outcome.PRESENT, Outcome.MISSING, Outcome.FAILED

SIZE = 64 << 10


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a writer again at once, so that the tests need not wait."""
    monkeypatch.setattr(storage, "_WRITER_RETRY_S", 0.0)


def store_until_kept(driver: StoreDriver, numbers: range) -> None:
    """After an error the store leaves the disk alone for some seconds."""
    give_up = time.monotonic() + 60
    while not all(outcome.good for outcome in driver.store(numbers)):
        assert time.monotonic() < give_up, "stores do not go on after the fault has gone"
        time.sleep(0.2)


def test_bad_sector_costs_its_block_and_no_other(open_driver: Open, faulty: FaultyDisk) -> None:
    driver = open_driver(faulty.root, size=SIZE)
    assert driver.store(range(8)) == [OK] * 8
    first = 4096 + 3 * SIZE
    faulty.rules(
        {"op": "read", "match": "segment$", "do": "error", "errno": errno.EIO,
         "bytes": [first + 5000, first + 5001]},
    )  # fmt: skip
    assert driver.load(range(8)) == [OK] * 3 + [FAILED] + [OK] * 4
    # It is a miss from then on, and stored again elsewhere.
    assert driver.lookup(range(8)) == [Lookup.HIT] * 3 + [Lookup.MISS] + [Lookup.HIT] * 4
    assert driver.store(range(8)) == [PRESENT] * 3 + [OK] + [PRESENT] * 4
    assert driver.load(range(8)) == [OK] * 8
    assert driver.block_store.close()
    assert set(open_driver(faulty.root, size=SIZE).load([0, 1, 2, 4, 5, 6, 7])) == {OK}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, errno.EACCES, errno.ESTALE])
def test_all_reads_fail_for_a_while(open_driver: Open, faulty: FaultyDisk, number: int) -> None:
    driver = open_driver(faulty.root, size=SIZE)
    assert driver.store(range(8)) == [OK] * 8
    faulty.rules({"op": "read", "match": "segment$", "do": "error", "errno": number})
    assert set(driver.load(range(8))) == {MISSING if number == errno.ESTALE else FAILED}
    assert faulty.applied() > 0
    assert driver.load(range(8)) == [MISSING] * 8
    faulty.rules()
    # The records were never bad: another process has them at once.
    assert open_driver(faulty.root, size=SIZE).load(range(8)) == [OK] * 8
    assert all(outcome.good for outcome in driver.store(range(8)))
    assert driver.load(range(8)) == [OK] * 8


#: Where payloads are; headers come before.
PAYLOADS = [4096, 1 << 40]


@pytest.mark.parametrize(("size", "cuts"), [(SIZE, (4096, 20_480)), (10_001, (1, 77))])
def test_short_reads_and_writes_of_the_kernel(
    open_driver: Open, faulty: FaultyDisk, size: int, cuts: tuple[int, ...]
) -> None:
    driver = open_driver(faulty.root, size=size, cuts=cuts)
    faulty.rules(
        {"op": "write", "match": "segment$|journal$", "do": "short"},
        {"op": "read", "match": "segment$", "do": "short", "bytes": PAYLOADS},
    )
    assert driver.store(range(8)) == [OK] * 8
    assert driver.load(range(8)) == [OK] * 8
    assert faulty.applied() > 16
    again = open_driver(faulty.root, size=size)
    assert again.load(range(8)) == [OK] * 8


@pytest.mark.parametrize("file", ["segment$", "journal$"])
def test_short_reads_of_headers_and_journals(
    open_driver: Open, faulty: FaultyDisk, file: str
) -> None:
    driver = open_driver(faulty.root)
    assert driver.store(range(100)) == [OK] * 100
    assert driver.block_store.close()
    faulty.rules({"op": "read", "match": file, "do": "short"})
    again = open_driver(faulty.root)
    assert again.load(range(100)) == [OK] * 100
    assert again.block_store.counters().bad_entries == 0


def test_bits_that_flip_on_the_way_are_never_served(open_driver: Open, faulty: FaultyDisk) -> None:
    driver = open_driver(faulty.root, size=SIZE)
    assert driver.store(range(8)) == [OK] * 8
    faulty.rules({"op": "read", "match": "segment$", "do": "flip"})
    assert OK not in driver.load(range(8))[:1]
    faulty.rules({"op": "write", "match": "segment$", "do": "late", "errno": errno.EIO})
    assert OK not in driver.store(range(100, 104))
    faulty.rules()
    assert set(driver.load(range(100, 104))) == {MISSING}
    store_until_kept(driver, range(110))
    assert driver.load(range(110)) == [OK] * 110


CALLS = [
    ("write", "segment$"), ("write", "journal$"), ("write", "access$"), ("write", "lock"),
    ("create", "segment$"), ("create", "journal$"), ("create", "lock"), ("create", "namespace"),
    ("rename", "lock"), ("rename", "namespace"), ("mkdir", ""), ("open", "segment$"),
    ("open", "journal$"), ("open", "lifeboat-cache.json"), ("read", "segment$"),
    ("read", "journal$"), ("read", "json$"), ("getattr", "segment$"), ("getattr", "journal$"),
    ("lookup", "segment$"), ("lookup", "kv$"), ("opendir", ""), ("readdir", ""), ("statfs", ""),
    ("flush", ""),
]  # fmt: skip


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(("op", "match"), CALLS, ids=lambda word: str(word).strip("$") or "any")
def test_every_kind_of_call_may_fail_at_any_time(
    open_driver: Open, faulty: FaultyDisk, namespace: Namespace, op: str, match: str, number: int
) -> None:
    before = open_driver(faulty.root)
    assert before.store(range(4)) == [OK] * 4
    assert before.block_store.close()

    running = open_driver(faulty.root)
    assert running.load([0]) == [OK]
    faulty.rules({"op": op, "match": match, "do": "error", "errno": number})
    reported = set(range(4))

    def use(driver: StoreDriver, first: int) -> None:
        outcomes = driver.store(range(first, first + 4))
        reported.update(n for n, o in zip(range(first, first + 4), outcomes, strict=True) if o.good)
        assert Outcome.CORRUPT not in driver.load(range(first + 4))
        driver.block_store.touch(driver.keys(range(4)))

    use(running, 100)
    starting = BlockStore(namespace, [FilesystemTarget(faulty.root)], io_workers=2)
    assert starting.wait_recovered(60)
    use(StoreDriver(starting), 200)
    assert starting.close()
    use(running, 300)
    faulty.rules()

    store_until_kept(running, range(400, 404))
    assert running.block_store.close()
    fresh = open_driver(faulty.root)
    assert fresh.block_store.state is State.READY
    numbers = sorted(reported | set(range(400, 404)))
    assert fresh.load(numbers) == [OK] * len(numbers)
    assert fresh.block_store.counters().bad_entries == 0


@pytest.mark.parametrize("file", ["segment$", "journal$"])
def test_error_at_closing_a_file_is_not_an_error_of_the_engine(
    open_driver: Open, faulty: FaultyDisk, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    # NFS and FUSE report late errors of writes here.
    driver = open_driver(faulty.root)
    assert driver.store(range(4)) == [OK] * 4
    assert driver.load(range(4)) == [OK] * 4
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    faulty.rules({"op": "flush", "match": file, "do": "error", "errno": errno.EIO})
    assert driver.block_store.close()
    gc.collect()
    assert faulty.applied() > 0
    faulty.rules()
    assert not unraisable
    assert open_driver(faulty.root).load(range(4)) == [OK] * 4


@pytest.mark.parametrize("what", ["error", "late"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_journal_that_cannot_be_written_after_its_payloads_were(
    open_driver: Open, faulty: FaultyDisk, what: str, number: int
) -> None:
    driver = open_driver(faulty.root)
    assert driver.store(range(4)) == [OK] * 4
    faulty.rules({"op": "write", "match": "journal$", "do": what, "errno": number})
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert set(driver.store(range(10, 14))) == {Outcome.RESERVE if full else FAILED}
    assert faulty.applied() > 0
    faulty.rules()
    assert driver.store(range(20, 24)) == [OK] * 4
    assert driver.store(range(10, 14)) == [OK] * 4
    everything = [*range(4), *range(10, 14), *range(20, 24)]
    assert driver.load(everything) == [OK] * 12
    assert driver.block_store.close()
    again = open_driver(faulty.root)
    assert again.load(everything) == [OK] * 12
    assert again.block_store.counters().bad_entries == 0


@pytest.mark.parametrize(
    "rounds", [pytest.param(25, id="quick"), pytest.param(1000, id="full", marks=pytest.mark.full)]
)
def test_calls_that_fail_at_random(open_driver: Open, faulty: FaultyDisk, rounds: int) -> None:
    choice = random.Random(rounds)
    reported: set[int] = set()
    driver = open_driver(faulty.root)
    for round_ in range(rounds):
        rules: list[dict[str, Any]] = []
        for _ in range(choice.randint(0, 3)):
            op, match = choice.choice(CALLS)
            what = choice.choice(("error", "short" if op in ("read", "write") else "late", "late"))
            rules.append({
                "op": op, "match": match, "do": what, "skip": choice.randint(0, 4),
                "errno": choice.choice((errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EAGAIN)),
                "times": choice.randint(1, 3),
            })  # fmt: skip
        faulty.rules(*rules)
        numbers = range(round_ * 6, round_ * 6 + 6)
        for number, outcome in zip(numbers, driver.store(numbers), strict=True):
            if outcome.good:
                reported.add(number)
        assert Outcome.CORRUPT not in driver.load(choice.sample(range(round_ * 6 + 6), 6))
        if choice.random() < 0.2:
            driver.block_store.close()
            faulty.rules()
            driver = open_driver(faulty.root)
    faulty.rules()
    assert len(reported) > rounds
    fresh = open_driver(faulty.root)
    numbers_kept = sorted(reported)
    assert fresh.load(numbers_kept) == [OK] * len(numbers_kept)
    assert fresh.block_store.counters().bad_entries == 0


def test_filesystem_that_shuts_down_is_a_power_loss(open_driver: Open, loop: Disk) -> None:
    before = open_driver(loop.root, size=SIZE)
    assert before.store(range(8)) == [OK] * 8
    assert before.block_store.close()
    loop.remount(writable=True)  # flushes
    driver = open_driver(loop.root, size=SIZE)
    assert driver.store(range(100, 108)) == [OK] * 8
    loop.shut_down()
    for _ in range(2):
        assert OK not in driver.store(range(200, 204))
        assert set(driver.load(range(100, 108))) <= {OK, FAILED, MISSING}
    assert driver.block_store.close()

    loop.mount_again()
    fresh = open_driver(loop.root, size=SIZE)
    assert fresh.block_store.state is State.READY
    # StoreDriver compares every byte of what is good.
    found = fresh.load([*range(8), *range(100, 108)])
    assert set(found[8:]) <= {OK, MISSING, Outcome.CORRUPT}
    assert all(outcome.good for outcome in fresh.store(range(204)))
    assert fresh.load(range(204)) == [OK] * 204
