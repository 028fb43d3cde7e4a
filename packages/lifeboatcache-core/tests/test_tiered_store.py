"""A ladder of targets: where blocks go, where they are found, and what happens if one fails."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from breakable_tiers import Tier

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.names import FP8, LBQ4, RAW
from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.interface import Job, Lookup, Namespace, Outcome, State, Store
from lifeboat_cache.store import copier, member, speedometer, tiered_store, write_modes
from lifeboat_cache.store.tiered_store import TieredStore, Tiering
from lifeboat_cache.store.write_modes import WriteMode
from lifeboat_cache.testing import StoreDriver, flip_byte, sample_keys

OK, PRESENT, MISSING = Outcome.OK, Outcome.PRESENT, Outcome.MISSING
HIT, MISS, RETRY = Lookup.HIT, Lookup.MISS, Lookup.RETRY

Open = Callable[..., StoreDriver]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets are looked after every few milliseconds."""
    monkeypatch.setattr(member, "_LEAST_PAUSE_S", 0.02)
    monkeypatch.setattr(member, "_LOOK_S", 0.02)
    monkeypatch.setattr(member, "_SUSPICION_S", 0.0)
    monkeypatch.setattr(tiered_store, "_TICK_S", 0.01)
    monkeypatch.setattr(copier, "_LOOK_S", 0.02)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[dict[str, Tier]]:
    """A local one, a shared one, and the archive."""
    made = {
        "nvme": Tier(tmp_path / "nvme"),
        "nfs": Tier(tmp_path / "nfs", "shared"),
        "tape": Tier(tmp_path / "tape", "archive"),
    }
    yield made
    for tier in made.values():
        tier.go_on()


@pytest.fixture
def open_ladder(namespace: Namespace) -> Iterator[Open]:
    opened: list[TieredStore] = []

    def make(
        *tiers: Tier, mode: WriteMode = "first", size: int = 8192, recovered: bool = True
    ) -> StoreDriver:
        tiering = Tiering.fixed([tier.spec() for tier in tiers], mode)
        store = TieredStore(namespace, tiering, pending_bytes=1 << 20)
        opened.append(store)
        if recovered:
            assert store.wait_recovered(60)
        return StoreDriver(store, size=size)

    yield make
    for store in opened:
        store.close()


def until(condition: Callable[[], object]) -> None:
    """Wait for what is bound to happen."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.005)


def ladder_of(driver: StoreDriver) -> TieredStore:
    assert isinstance(driver.driven, TieredStore)
    return driver.driven


def status(driver: StoreDriver, name: str) -> dict[str, object]:
    (found,) = [one for one in driver.driven.targets() if one.name == name]
    return {"state": found.state, "reason": found.reason, "writing": found.writing, **found.facts}


def copied(driver: StoreDriver) -> None:
    """Wait until everything has been copied that can be."""
    assert ladder_of(driver)._copier.wait_idle(60)


def held(tier: Tier, namespace: Namespace, count: int) -> int:
    return sum(tier.holds(namespace, sample_keys(range(count))))


# --- where blocks go ------------------------------------------------------------------------------


def test_the_first_usable_target_takes_new_blocks(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    assert driver.driven.state is State.READY
    assert driver.driven.reason == ""
    assert driver.store(range(20)) == [OK] * 20
    assert driver.store(range(20)) == [PRESENT] * 20
    assert driver.load(range(25)) == [OK] * 20 + [MISSING] * 5
    assert [one.writing for one in driver.driven.targets()] == [True, False]
    driver.driven.close()
    assert held(tiers["nvme"], namespace, 20) == 20
    assert held(tiers["nfs"], namespace, 20) == 0


def test_the_order_of_the_configuration_decides_not_the_rung(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nfs"], tiers["nvme"])
    assert driver.store(range(5)) == [OK] * 5
    driver.driven.close()
    assert held(tiers["nfs"], namespace, 5) == 5


def test_a_target_without_room_leaves_blocks_to_the_next(
    tmp_path: Path, tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    small = Tier(tmp_path / "small", capacity=100_000)
    driver = open_ladder(small, tiers["nfs"])
    assert driver.store(range(8)) == [OK] * 8
    assert set(driver.store(range(8, 40))) == {OK}
    assert set(driver.load(range(40))) == {OK}
    driver.driven.close()
    assert 8 <= held(small, namespace, 40) < 40
    assert held(small, namespace, 40) + held(tiers["nfs"], namespace, 40) == 40


def test_all_write_modes_differ(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    """By what has been written where when a store is done, and when all is quiet."""
    shares: dict[str, list[int]] = {}
    modes: tuple[WriteMode, ...] = ("first", "local_first", "all")
    for number, mode in enumerate(modes):
        space = b"%d" % number
        driver = open_ladder(tiers["nfs"], tiers["nvme"], mode=mode)
        driver.space = space
        assert driver.store(range(8)) == [OK] * 8
        copied(driver)
        assert driver.driven.close()
        keys = sample_keys(range(8), space=space)
        shares[mode] = [sum(tiers[name].holds(namespace, keys)) for name in ("nfs", "nvme")]
    assert shares == {"first": [8, 0], "local_first": [8, 8], "all": [8, 8]}


def test_local_first_does_not_wait_for_the_slower_target(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nfs"], tiers["nvme"], mode="local_first")
    tiers["nfs"].stop()
    assert driver.store(range(6)) == [OK] * 6
    assert driver.load(range(6)) == [OK] * 6
    assert [one.blocks for one in driver.driven.targets()] == [0, 6]
    tiers["nfs"].go_on()
    copied(driver)
    assert [one.blocks for one in driver.driven.targets()] == [6, 6]
    assert status(driver, "nfs")["copied_blocks"] == 6


def test_all_waits_for_every_target(tiers: dict[str, Tier], open_ladder: Open) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    tiers["nfs"].stop()
    memory = np.zeros((3, 4096), dtype=np.uint8)
    batch = BlockBatch(sample_keys(range(3)), BlockBuffers.from_buffers(list(memory)))
    job = driver.driven.store(batch)
    until(lambda: len(driver.driven) == 3)
    assert not job.wait(0.05)
    tiers["nfs"].go_on()
    assert job.wait(60)
    assert job.outcomes.tolist() == [OK] * 3
    assert job.bytes_moved == memory.nbytes
    assert driver.driven.poll() == [job]
    assert [one.blocks for one in driver.driven.targets()] == [3, 3]


def test_all_is_content_with_what_one_target_has_kept(
    tiers: dict[str, Tier], open_ladder: Open
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    assert driver.store(range(2)) == [OK] * 2
    tiers["nvme"].break_()
    assert driver.store(range(4)) == [PRESENT] * 2 + [OK] * 2


def test_copies_go_down_rung_by_rung(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], tiers["tape"], mode="local_first")
    assert driver.store(range(700)) == [OK] * 700
    copied(driver)
    assert driver.driven.close()
    for tier in tiers.values():
        assert held(tier, namespace, 700) == 700


def test_copies_know_what_their_blocks_are(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="local_first")
    memory = np.arange(4 * 5000, dtype=np.uint8).reshape(4, 5000)
    batch = BlockBatch(
        sample_keys(range(4)),
        BlockBuffers.from_buffers(list(memory)),
        layout=[7, 8, 7, 8],
        positions=[16, 32, 48, 64],
        groups=[1, 2, 1, 2],
        families=[2**63 + 1, 2, 3, 4],
        parents=[0, 5, 6, 2**64 - 1],
        salt=[9, 9, 0, 2**63],
    )
    job = driver.driven.store(batch, lambda _: None)
    assert job.wait(60)
    assert job.ok
    copied(driver)
    driver.driven.close()
    near, far = tiers["nvme"].alone(namespace), tiers["nfs"].alone(namespace)
    first, second = near.records(batch.keys), far.records(batch.keys)
    for name in ("key", "layout", "position", "group", "family", "parent", "salt", "raw_length"):
        assert first[name].tolist() == second[name].tolist()
    assert second["parent"].tolist() == [0, 5, 6, 2**64 - 1]
    near.close()
    far.close()


def test_what_is_deleted_is_not_copied_any_more(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="local_first")
    tiers["nfs"].stop()
    assert driver.store(range(6)) == [OK] * 6
    until(lambda: status(driver, "nvme")["copies_queued"] == 0)
    assert driver.delete(range(3)) == [True] * 3
    tiers["nfs"].go_on()
    copied(driver)
    assert driver.lookup(range(6)) == [MISS] * 3 + [HIT] * 3
    assert driver.driven.drain(60)
    driver.driven.close()
    assert held(tiers["nfs"], namespace, 6) == 3


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "deleted and stored"])
def test_what_is_deleted_while_it_is_copied_is_never_seen_again(
    tiers: dict[str, Tier],
    open_ladder: Open,
    monkeypatch: pytest.MonkeyPatch,
    again: bool,
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="local_first")
    far = tiers["nfs"].stores[-1]
    release = threading.Event()
    running = copier.Copier._run

    def delayed(
        self: copier.Copier, start: Callable[..., Job], batch: BlockBatch
    ) -> npt.NDArray[np.uint8] | None:
        outcomes = running(self, start, batch)
        assert start != far.store or release.wait(60)
        return outcomes

    monkeypatch.setattr(copier.Copier, "_run", delayed)
    tiers["nfs"].stop()
    assert driver.store(range(6)) == [OK] * 6
    until(far.busy)  # they are being copied now
    assert driver.delete(range(3)) == [True] * 3
    if again:
        assert driver.store([0]) == [OK]
    gone = [1, 2] if again else [0, 1, 2]
    tiers["nfs"].go_on()
    until(lambda: far.lookup(sample_keys(range(6))).all())
    # Their copies are there, and have not been deleted yet.
    kept = [number for number in range(6) if number not in gone]
    keys = driver.keys(range(6))
    sizes = [-1 if number in gone else 8192 for number in range(6)]
    assert driver.driven.lookup(keys, pin=True).tolist() == [n not in gone for n in range(6)]
    driver.driven.unpin(driver.keys(kept))
    assert sorted(driver.driven.keys()) == sorted(driver.keys(kept))
    assert driver.driven.sizes(keys).tolist() == sizes
    assert driver.load(range(6)) == [MISSING if size < 0 else OK for size in sizes]
    release.set()
    copied(driver)
    assert driver.lookup(range(6)) == [MISS if size < 0 else HIT for size in sizes]
    assert far.lookup(keys).tolist() == [size > 0 for size in sizes]
    assert driver.delete(range(6)) == [size > 0 for size in sizes]


def test_copies_that_do_not_fit_in_the_queue_are_counted(
    tiers: dict[str, Tier], open_ladder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "MOST_BLOCKS", 10)
    tiers["nfs"].break_()
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="local_first")
    for first in range(0, 24, 6):
        assert driver.store(range(first, first + 6)) == [OK] * 6
    assert status(driver, "nvme")["copies_queued"] == 6
    assert status(driver, "nvme")["copies_dropped"] == {"queue": 18}
    tiers["nfs"].mend()
    until(lambda: status(driver, "nfs")["copied_blocks"] == 6)
    assert status(driver, "nvme")["copies_queued"] == 0


def test_what_waits_for_a_target_that_is_away_keeps_no_other_copies_waiting(
    tiers: dict[str, Tier],
    open_ladder: Open,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier, "MOST_BLOCKS", 10)
    alone = tiers["nfs"].alone(namespace)
    assert set(StoreDriver(alone).store(range(100, 104))) == {OK}
    alone.close()
    tiers["tape"].break_()
    driver = open_ladder(tiers["nvme"], tiers["nfs"], tiers["tape"], mode="local_first")
    assert driver.store(range(10)) == [OK] * 10  # to nvme, to nfs, and they wait for the tape
    until(lambda: status(driver, "nfs")["copies_queued"] == 10)
    assert driver.load(range(100, 104)) == [OK] * 4
    until(lambda: held(tiers["nvme"], namespace, 104) == 14)
    assert status(driver, "nfs")["copies_dropped"] == {}


def test_stores_are_not_slowed_down_by_what_waits_to_be_copied(
    tiers: dict[str, Tier], open_ladder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers["nfs"].break_()
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="local_first")
    asked = [0]

    def counted(members: Sequence[member.Member], source: member.Member) -> member.Member | None:
        asked[0] += 1
        return write_modes.below(members, source)

    monkeypatch.setattr(copier, "below", counted)
    for number in range(200):
        assert driver.store([number]) == [OK]
    # Each store wakes the thread, which asks once: not for each of those that wait.
    with ladder_of(driver)._copier._wake:
        asked[0] = 0
        assert ladder_of(driver)._copier._next() is None
        assert asked[0] == 1
    tiers["nfs"].mend()
    until(lambda: status(driver, "nfs")["copied_blocks"] == 200)


# --- where blocks are found -----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["first", "second", "next"])
def test_a_load_that_there_is_no_memory_to_divide_ends(
    tiers: dict[str, Tier],
    open_ladder: Open,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    for tier, numbers in ((tiers["nvme"], range(6)), (tiers["nfs"], range(3, 12))):
        alone = tier.alone(namespace)
        assert set(StoreDriver(alone).store(numbers)) == {OK}
        alone.close()
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    fails_at = {"first": 1, "second": 2, "next": 3}[what]
    if what == "next":
        tiers["nvme"].break_()  # what it does not give is asked of the other one
    calls = [0]
    take = BlockBatch.take

    def short(self: BlockBatch, blocks: npt.NDArray[np.int64]) -> BlockBatch:
        calls[0] += 1
        if calls[0] == fails_at:
            raise MemoryError
        return take(self, blocks)

    monkeypatch.setattr(BlockBatch, "take", short)
    outcomes = driver.load(range(12))
    assert calls[0] >= fails_at
    assert OK in outcomes[6:] or what != "next"
    assert set(outcomes) != {OK}
    assert driver.driven.drain(60)
    monkeypatch.undo()
    # What could not be read on the first target is a miss from then on.
    assert driver.load(range(3, 12)) == [OK] * 9


def test_a_store_that_there_is_no_memory_to_pass_on_ends(
    tiers: dict[str, Tier], open_ladder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    tiers["nvme"].break_()

    def none_left(self: BlockBatch, blocks: npt.NDArray[np.int64]) -> BlockBatch:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(BlockBatch, "take", none_left)
        assert driver.store(range(4)) == [Outcome.FAILED] * 4
    assert driver.driven.drain(60)
    assert driver.store(range(4)) == [OK] * 4


def test_blocks_are_found_wherever_they_are(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    for tier, numbers in ((tiers["nvme"], range(0, 12, 2)), (tiers["nfs"], range(0, 12, 3))):
        alone = tier.alone(namespace)
        assert set(StoreDriver(alone, layout=tier.name == "nfs").store(numbers)) == {OK}
        alone.close()
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    there = [number % 2 == 0 or number % 3 == 0 for number in range(12)]
    keys = sample_keys(range(12))
    assert driver.lookup(range(12)) == [HIT if found else MISS for found in there]
    assert driver.driven.sizes(keys).tolist() == [8192 if found else -1 for found in there]
    layouts = [0 if number % 2 == 0 else int(number % 3 == 0) for number in range(12)]
    assert driver.driven.layouts(keys).tolist() == layouts
    assert driver.driven.records(keys)["kind"].tolist() == there
    assert set(driver.driven.keys()) == {
        key for key, found in zip(keys, there, strict=True) if found
    }
    assert len(driver.driven.keys()) == sum(there)
    # Each is read from where it is, the copy of the faster one first.
    driver.layout = 0
    assert driver.load(range(12)) == [
        OK if number % 2 == 0 else Outcome.MISMATCH if number % 3 == 0 else MISSING
        for number in range(12)
    ]
    driver.layout = 1
    assert driver.load(range(0, 12, 3)) == [OK] * 4
    counters = driver.driven.counters()
    assert (counters.lookups, counters.lookup_hits) == (12, sum(there))


def test_the_fastest_copy_is_read(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nfs"], tiers["nvme"], mode="all")
    assert driver.store(range(5)) == [OK] * 5
    tiers["nfs"].stop()
    assert driver.load(range(5)) == [OK] * 5
    slow, fast = (one.counters for one in driver.driven.targets())
    assert (slow.blocks_loaded, fast.blocks_loaded) == (0, 5)


def test_a_copy_that_cannot_be_read_is_read_elsewhere_in_the_same_job(
    tiers: dict[str, Tier], open_ladder: Open
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], tiers["tape"], mode="all")
    assert driver.store(range(9)) == [OK] * 9
    driver.driven.close()
    for segment in tiers["nvme"].root.rglob("*.segment"):
        for block in range(3):
            flip_byte(segment, 4096 + 8192 * block + 100)
    for segment in tiers["nfs"].root.rglob("*.segment"):
        flip_byte(segment, 4096 + 100)
    driver = open_ladder(tiers["nvme"], tiers["nfs"], tiers["tape"])
    done: list[Job] = []
    memory = [np.zeros(8192, dtype=np.uint8) for _ in range(9)]
    batch = BlockBatch(sample_keys(range(9)), BlockBuffers.from_buffers(memory))
    job = driver.driven.load(batch, done.append)
    assert job.wait(60)
    assert done == [job]
    assert job.outcomes.tolist() == [OK] * 9
    assert job.bytes_moved == 9 * 8192
    loaded = [one.counters.blocks_loaded for one in driver.driven.targets()]
    assert sum(loaded) == 9
    assert min(loaded) >= 1
    assert driver.driven.counters().load_outcomes == {"ok": 9}
    assert driver.load(range(9)) == [OK] * 9


def test_what_is_lost_everywhere_is_missing(tiers: dict[str, Tier], open_ladder: Open) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    assert driver.store(range(4)) == [OK] * 4
    for tier in ("nvme", "nfs"):
        tiers[tier].break_()
    assert {*driver.load(range(4))} <= {Outcome.FAILED, MISSING}
    assert driver.driven.busy() is False


@pytest.mark.parametrize("mode", ["first", "local_first", "all"])
def test_what_is_loaded_from_a_slower_rung_is_kept_on_the_faster_one(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace, mode: WriteMode
) -> None:
    alone = tiers["nfs"].alone(namespace)
    assert StoreDriver(alone).store(range(5)) == [OK] * 5
    alone.close()
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode=mode)
    assert driver.load(range(3)) == [OK] * 3
    copied(driver)
    expected = 0 if mode == "first" else 3
    assert [one.blocks for one in driver.driven.targets()] == [expected, 5]
    assert driver.load(range(3)) == [OK] * 3
    assert driver.driven.targets()[0].counters.blocks_loaded == expected
    driver.driven.close()
    assert held(tiers["nvme"], namespace, 5) == expected


def test_of_several_copies_the_one_that_turns_out_faster_is_read(
    tiers: dict[str, Tier],
    open_ladder: Open,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = tiers["nfs"].alone(namespace)
    assert StoreDriver(alone).store(range(1)) == [OK]
    alone.close()
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    assert driver.store(range(1, 2)) == [OK]

    def order() -> list[object]:
        return [status(driver, name)["read_order"] for name in ("nvme", "nfs")]

    assert order() == [1, 2]
    monkeypatch.setattr(copier.Copier, "loaded", lambda *_: None)  # nothing is promoted
    tiers["nvme"].faults.late_s = 0.3
    for _ in range(4):
        assert driver.load([0]) == [OK]
        assert driver.load([1]) == [OK]
    until(lambda: order() == [2, 1])
    before = [one.counters.blocks_loaded for one in driver.driven.targets()]
    assert driver.load([0, 1]) == [OK] * 2
    after = [one.counters.blocks_loaded for one in driver.driven.targets()]
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 2]
    # Some time later the other one is tried again.
    monkeypatch.setattr(speedometer, "_RECENT_S", 0.0)
    until(lambda: order() == [1, 2])


def test_only_loads_of_the_same_size_are_compared() -> None:
    far, near = speedometer.Speedometer(), speedometer.Speedometer()
    for _ in range(8):
        near.note(4096, 0.001)  # 4 MB/s
        far.note(64 << 20, 0.1)  # 670 MB/s
    assert not far.beats(near)
    for _ in range(3):
        far.note(4096, 0.0001)
    assert not far.beats(near), "three loads say nothing"
    far.note(4096, 0.0001)
    assert far.beats(near)
    assert not near.beats(far)
    for _ in range(4):
        near.note(64 << 20, 0.1)
    assert not far.beats(near), "not for large loads"


# --- pins and deletions ---------------------------------------------------------------------------


def test_pins_protect_copies_on_every_target(tiers: dict[str, Tier], open_ladder: Open) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    driver.store(range(4))
    keys = sample_keys(range(4))
    assert driver.driven.lookup(keys[:2], pin=True).tolist() == [HIT] * 2
    assert driver.driven.lookup(keys[:1], pin=True).tolist() == [HIT]
    assert driver.delete(range(4)) == [False, False, True, True]
    driver.driven.unpin(keys)
    assert driver.delete(range(4)) == [False, True, False, False]
    assert driver.lookup([0]) == [HIT]
    driver.driven.unpin(keys)
    driver.driven.unpin(keys)
    assert driver.delete([0]) == [True]
    assert len(driver.driven) == 0


@pytest.mark.parametrize("leaves", [False, True])
def test_a_deletion_that_a_target_cannot_take_is_made_up_for(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace, leaves: bool
) -> None:
    nvme = tiers["nvme"]
    first = open_ladder(nvme)
    assert first.store(range(3)) == [OK] * 3
    first.driven.close()
    driver = open_ladder(nvme)  # it has not written anything yet, and cannot begin to
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    nvme.break_()
    assert driver.delete([0, 1]) == [True] * 2
    assert set(driver.driven.undone_deletions()) == set(driver.keys([0, 1]))
    if leaves:
        away = nvme.root.rename(nvme.root.with_name("away"))
        until(lambda: status(driver, "nvme")["state"] is State.DISABLED)
        away.rename(nvme.root)
    nvme.mend()
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    assert driver.lookup(range(3)) == [MISS, MISS, HIT]
    until(lambda: not driver.driven.undone_deletions())
    assert driver.driven.close()
    assert nvme.holds(namespace, driver.keys(range(3))) == [False, False, True]


def test_what_is_deleted_while_a_target_is_away_does_not_come_back_with_it(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    assert driver.store(range(6)) == [OK] * 6
    tiers["nfs"].break_()
    driver.store(range(6, 7))
    until(lambda: status(driver, "nfs")["state"] is State.DISABLED)
    assert driver.delete(range(3)) == [True] * 3
    assert status(driver, "nfs")["owed_deletions"] == 3
    seen: set[tuple[Lookup, ...]] = set()

    def back() -> bool:
        seen.add(tuple(driver.lookup(range(3))))
        now = status(driver, "nfs")
        return now["state"] is State.READY and now["owed_deletions"] == 0

    tiers["nfs"].mend()
    until(back)
    assert driver.lookup(range(7)) == [MISS] * 3 + [HIT] * 4
    assert seen == {(MISS,) * 3}
    driver.driven.drain(60)
    driver.driven.close()
    assert held(tiers["nfs"], namespace, 6) == 3


def test_a_store_that_fails_does_not_bring_back_what_was_deleted(
    tiers: dict[str, Tier], open_ladder: Open
) -> None:
    driver = open_ladder(tiers["nvme"])
    assert driver.store(range(3)) == [OK] * 3
    tiers["nvme"].break_()
    driver.store(range(3, 4))
    until(lambda: status(driver, "nvme")["state"] is State.DISABLED)
    driver.delete(range(2))
    assert driver.store([0]) == [Outcome.DISABLED]
    tiers["nvme"].mend()
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    assert driver.lookup(range(3)) == [MISS, MISS, HIT]


# --- targets that fail, and come back -------------------------------------------------------------


def test_a_target_that_cannot_be_used_is_skipped_and_taken_back(
    tiers: dict[str, Tier], open_ladder: Open, caplog: pytest.LogCaptureFixture
) -> None:
    tiers["nvme"].break_()
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    assert driver.driven.state is State.READY
    assert "nvme: " in driver.driven.reason
    assert "is broken: mend it" in driver.driven.reason
    first = status(driver, "nvme")
    assert first["state"] is State.DISABLED
    assert "mend it" in str(first["reason"])
    assert driver.store(range(4)) == [OK] * 4
    assert [one.writing for one in driver.driven.targets()] == [False, True]
    tiers["nvme"].mend()
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    assert driver.driven.reason == ""
    assert driver.store(range(4, 8)) == [OK] * 4
    assert [one.blocks for one in driver.driven.targets()] == [4, 4]
    assert driver.load(range(8)) == [OK] * 8
    said = [record.message for record in caplog.records]
    assert sum("nvme is skipped" in text for text in said) == 1
    assert sum("nvme is used again" in text for text in said) == 1
    assert not any("stands down" in text for text in said)


def test_a_target_that_breaks_later_is_left_and_taken_back(
    tiers: dict[str, Tier], open_ladder: Open
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    assert driver.store(range(4)) == [OK] * 4
    tiers["nvme"].break_()
    # The very job that finds out is not lost.
    assert driver.store(range(4, 8)) == [OK] * 4
    until(lambda: status(driver, "nvme")["state"] is State.DISABLED)
    assert driver.store(range(8, 12)) == [OK] * 4
    assert driver.lookup(range(12)) == [MISS] * 4 + [HIT] * 8
    tiers["nvme"].mend()
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    assert status(driver, "nvme")["left"] == 1
    assert driver.load(range(12)) == [OK] * 12
    assert driver.store(range(12, 13)) == [OK]
    assert [one.writing for one in driver.driven.targets()] == [True, False]
    # What the old store counted is not lost with it.
    assert driver.driven.targets()[0].counters.blocks_stored == 5


def test_a_directory_that_was_removed_is_noticed(tiers: dict[str, Tier], open_ladder: Open) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    assert driver.store(range(4)) == [OK] * 4
    shutil.rmtree(tiers["nvme"].root)
    until(lambda: status(driver, "nvme")["left"] == 1)
    # It can be made again, so it is.
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    assert driver.load(range(4)) == [OK] * 4
    assert driver.store(range(5)) == [OK] * 5


def test_another_directory_in_its_place_is_noticed(
    tmp_path: Path, tiers: dict[str, Tier], open_ladder: Open
) -> None:
    """As when a mount goes away, or comes: what is there now is served, nothing else."""
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    assert driver.store(range(4)) == [OK] * 4
    until(lambda: ladder_of(driver)._members[0]._seen)
    tiers["nvme"].root.rename(tmp_path / "elsewhere")
    tiers["nvme"].root.mkdir()
    until(lambda: status(driver, "nvme")["left"] == 1)
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    assert driver.lookup(range(4)) == [MISS] * 4
    assert driver.store(range(4, 6)) == [OK] * 2
    tiers["nvme"].root.rename(tmp_path / "beneath")
    (tmp_path / "elsewhere").rename(tiers["nvme"].root)
    until(lambda: driver.lookup(range(6)) == [HIT] * 4 + [MISS] * 2)
    assert driver.load(range(4)) == [OK] * 4


def test_a_target_that_does_not_answer_holds_up_nobody(
    tiers: dict[str, Tier], open_ladder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "PATIENCE_S", 1.0)
    monkeypatch.setattr(tiered_store, "PATIENCE_S", 1.0)
    tiers["nvme"].stop()
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    assert driver.driven.state is State.READY
    assert driver.store(range(4)) == [OK] * 4
    assert driver.lookup(range(5)) == [HIT] * 4 + [MISS]
    until(lambda: "has not answered" in driver.driven.reason)
    assert status(driver, "nvme")["state"] is State.DISABLED
    tiers["nvme"].go_on()
    until(lambda: status(driver, "nvme")["state"] is State.READY)
    assert driver.store(range(4, 6)) == [OK] * 2
    assert [one.blocks for one in driver.driven.targets()] == [2, 4]


def test_stores_wait_until_a_target_is_usable(tiers: dict[str, Tier], open_ladder: Open) -> None:
    tiers["nvme"].stop()
    driver = open_ladder(tiers["nvme"], recovered=False)
    assert driver.driven.state is State.OPENING
    assert driver.lookup([0]) == [RETRY]
    memory = [np.full(4096, 7, dtype=np.uint8)]
    job = driver.driven.store(BlockBatch(sample_keys([0]), BlockBuffers.from_buffers(memory)))
    big = [np.zeros(2 << 20, dtype=np.uint8)]
    refused = driver.driven.store(BlockBatch(sample_keys([1]), BlockBuffers.from_buffers(big)))
    assert refused.outcomes.tolist() == [Outcome.BUSY]
    assert driver.driven.queue()["pending_bytes"] == 4096
    assert not job.done()
    tiers["nvme"].go_on()
    assert job.wait(60)
    assert job.outcomes.tolist() == [OK]
    assert driver.driven.wait_recovered(60)
    assert driver.lookup(range(2)) == [HIT, MISS]


def test_a_close_right_after_a_target_has_opened_writes_what_waited_for_it(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = TieredStore._release

    def late(self: TieredStore, *, cancel: bool = False) -> None:
        if threading.current_thread() is threading.main_thread():  # the keeper does not come to it
            release(self, cancel=cancel)

    monkeypatch.setattr(TieredStore, "_release", late)
    tiers["nvme"].stop()
    driver = open_ladder(tiers["nvme"], recovered=False)
    memory = [np.full(4096, 7, dtype=np.uint8)]
    job = driver.driven.store(BlockBatch(sample_keys([0]), BlockBuffers.from_buffers(memory)))
    assert not job.done()
    tiers["nvme"].go_on()
    until(lambda: driver.driven.state is State.READY)
    assert ladder_of(driver).close(10)
    assert job.outcomes.tolist() == [OK]
    assert held(tiers["nvme"], namespace, 1) == 1


def test_without_any_usable_target_it_stands_down_until_there_is_one(
    tiers: dict[str, Tier], open_ladder: Open
) -> None:
    for tier in tiers.values():
        tier.break_()
    driver = open_ladder(*tiers.values())
    assert driver.driven.state is State.DISABLED
    assert "no storage target is usable (nvme: " in driver.driven.reason
    assert "run `lifeboat-cache doctor`" in driver.driven.reason
    assert driver.lookup(range(2)) == [MISS] * 2
    assert driver.store(range(2)) == [Outcome.DISABLED] * 2
    assert driver.load(range(2)) == [MISSING] * 2
    tiers["tape"].mend()
    until(lambda: driver.driven.state is State.READY)
    assert driver.store(range(2)) == [OK] * 2


def test_the_fallback_is_used_only_if_nothing_else_is(
    tmp_path: Path, tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    fallback = Tier(tmp_path / "fallback", fallback=True)
    driver = open_ladder(tiers["nfs"], fallback)
    assert driver.store(range(2)) == [OK] * 2
    assert not fallback.root.exists()
    assert status(driver, "fallback")["state"] is State.CLOSED
    tiers["nfs"].break_()
    driver.store([2])
    until(lambda: status(driver, "fallback")["writing"])
    assert driver.store(range(2, 5)) == [OK] * 3
    tiers["nfs"].mend()
    until(lambda: status(driver, "nfs")["writing"])
    assert driver.store(range(5, 7)) == [OK] * 2
    # What is there stays readable, now and in the next process.
    assert driver.load(range(7)) == [OK] * 7
    driver.driven.close()
    assert held(fallback, namespace, 7) == 3
    again = open_ladder(tiers["nfs"], fallback)
    until(lambda: again.lookup(range(7)) == [HIT] * 7)
    assert again.load(range(7)) == [OK] * 7
    assert [one.writing for one in again.driven.targets()] == [True, False]


def test_a_broken_first_target_leads_to_the_fallback_at_once(
    tmp_path: Path, tiers: dict[str, Tier], open_ladder: Open
) -> None:
    tiers["nfs"].break_()
    driver = open_ladder(tiers["nfs"], Tier(tmp_path / "fallback", fallback=True), recovered=False)
    assert driver.store(range(4)) == [OK] * 4
    assert driver.driven.wait_recovered(60)
    assert driver.driven.state is State.READY
    assert driver.load(range(4)) == [OK] * 4


# --- a configuration that changes -----------------------------------------------------------------


def test_targets_come_and_go_and_change_places(
    tiers: dict[str, Tier], namespace: Namespace
) -> None:
    specs = {name: tier.spec() for name, tier in tiers.items()}
    now = [specs["nvme"], specs["nfs"]]
    mode: list[WriteMode] = ["first"]
    store = TieredStore(namespace, Tiering(lambda: now, lambda: mode[0]), pending_bytes=1 << 20)
    driver = StoreDriver(store)
    assert store.wait_recovered(60)
    assert driver.store(range(3)) == [OK] * 3
    now = [specs["nfs"], specs["nvme"]]
    until(lambda: [one.name for one in store.targets()] == ["nfs", "nvme"])
    assert driver.store(range(3, 6)) == [OK] * 3
    assert [one.blocks for one in store.targets()] == [3, 3]
    assert len(tiers["nvme"].stores) == 1
    now = [specs["nfs"]]
    until(lambda: driver.lookup(range(6)) == [MISS] * 3 + [HIT] * 3)
    now = [specs["nfs"], specs["tape"], specs["nvme"]]
    until(lambda: driver.lookup(range(6)) == [HIT] * 6)
    mode[0] = "all"
    until(lambda: all(one.writing for one in store.targets()))
    assert driver.store(range(6, 8)) == [OK] * 2
    assert [one.blocks for one in store.targets()] == [5, 2, 5]
    assert store.close()


# --- the end --------------------------------------------------------------------------------------


def test_closing_ends_stores_that_wait_for_a_target(
    tiers: dict[str, Tier], open_ladder: Open
) -> None:
    tiers["nvme"].stop()
    driver = open_ladder(tiers["nvme"], recovered=False)
    job = driver.driven.store(BlockBatch(sample_keys([0]), BlockBuffers.from_buffers([b"x"])))
    threading.Timer(0.2, tiers["nvme"].go_on).start()
    assert driver.driven.close()
    assert job.outcomes.tolist() == [Outcome.CANCELLED]
    assert driver.driven.state is State.CLOSED
    assert driver.lookup([0]) == [MISS]
    assert driver.delete([0]) == [False]
    with pytest.raises(StoreClosedError):
        driver.store([0])
    assert driver.driven.close()


def test_what_waits_to_be_copied_is_copied_before_the_end(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="local_first")
    for first in range(0, 400, 20):
        driver.store(range(first, first + 20))
    assert driver.driven.close()
    assert held(tiers["nfs"], namespace, 400) == 400


def test_a_drain_that_cancels_leads_to_no_other_target(
    tiers: dict[str, Tier], open_ladder: Open
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"])
    tiers["nvme"].stop()
    memory = [np.zeros(4096, dtype=np.uint8) for _ in range(4)]
    jobs = [
        driver.driven.store(BlockBatch(sample_keys([n]), BlockBuffers.from_buffers([memory[n]])))
        for n in range(4)
    ]
    assert not driver.driven.drain(0.1)
    threading.Timer(0.2, tiers["nvme"].go_on).start()
    assert driver.driven.drain(60, cancel=True)
    outcomes = {Outcome(int(job.outcomes[0])) for job in jobs}
    assert outcomes <= {OK, Outcome.CANCELLED}
    assert driver.driven.targets()[1].blocks == 0
    assert sorted(map(id, driver.driven.poll())) == sorted(map(id, jobs))


def test_purging_reaches_every_target(
    tiers: dict[str, Tier], open_ladder: Open, namespace: Namespace
) -> None:
    driver = open_ladder(tiers["nvme"], tiers["nfs"], mode="all")
    driver.store(range(3))
    assert driver.driven.close()
    driver.driven.purge()
    for name in ("nvme", "nfs"):
        assert not (tiers[name].root / namespace.directory).exists()


def test_a_layout_described_while_a_store_is_being_opened_is_not_lost(
    tiers: dict[str, Tier], namespace: Namespace
) -> None:
    layouts = [KVLayout.opaque(4096), KVLayout.opaque(8192)]
    described = layouts[:1]
    one = member.Member(tiers["nvme"].spec())
    opening = one.spec.open

    def opened(of: Namespace) -> Store:
        store = opening(of)
        first = store.describe

        def describe(layout: KVLayout) -> int:
            if layouts[1] not in described:
                # An adapter does so on its own thread, and does not see this store yet.
                assert one.store is None
                described.append(layouts[1])
            return first(layout)

        store.describe = describe  # type: ignore[method-assign]
        return store

    one.spec = dataclasses.replace(one.spec, open=opened)
    one.start(namespace, lambda: list(described))
    assert one.store is not None
    (store,) = tiers["nvme"].stores
    assert all(store._codings.layout(layout.tag) for layout in layouts)
    assert one.close(30)


def test_codecs_of_rungs_are_never_larger_than_what_a_copy_is_made_of(
    tmp_path: Path, open_ladder: Open, namespace: Namespace
) -> None:
    tensor = TensorLayout("key", "bfloat16", 0, 1, 64, 2, 64, 64 * 256, 256, 128, 0)
    layout = KVLayout.of(64 * 256, [tensor])
    halves = np.random.default_rng(1).standard_normal((5, 64 * 128)).astype(np.float32)
    payloads = (halves.view(np.uint32) >> 16).astype(np.uint16)
    for near, far, expected in (("raw", "fp8", FP8), ("lbq4", "fp8", LBQ4), ("raw", "raw", RAW)):
        place = tmp_path / f"{near}-{far}"
        local = Tier(place / "local", codec=near)  # type: ignore[arg-type]
        shared = Tier(place / "shared", "shared", codec=far)  # type: ignore[arg-type]
        driver = open_ladder(local, shared, mode="local_first")
        driver.driven.describe(layout)
        batch = BlockBatch(
            sample_keys(range(5)),
            BlockBuffers.from_buffers(list(payloads)),
            layout.tag,
        )
        assert driver.driven.store(batch, lambda _: None).wait(60)
        copied(driver)
        stores = [one.store for one in ladder_of(driver)._members]
        codecs = [
            store.records(batch.keys)["codec"].tolist() for store in stores if store is not None
        ]
        assert codecs[1] == [expected] * 5, (near, far)
