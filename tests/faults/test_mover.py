"""Targets that hang, fail and lie behind a mover: the engine never waits and is never wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import gone, until
from faultkit.children import in_child
from faultkit.disks import EVERYTHING_HANGS, FaultyDisk, faulty_disk
from faultkit.movers import Movers, movers

from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Job,
    Lookup,
    Namespace,
    Outcome,
    State,
    block_keys,
)
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, aligned_memory, payload_of

OK, TIMEOUT, UNAVAILABLE = Outcome.OK, Outcome.TIMEOUT, Outcome.UNAVAILABLE
SIZE = 64 << 10

READ = {"op": "read", "match": "segment$", "do": "hang", "bytes": [4096, 1 << 40]}
WRITE = {"op": "write", "match": "segment$", "do": "hang"}
JOURNAL = {"op": "write", "match": "journal$", "do": "hang"}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDisk]:
    with faulty_disk(tmp_path_factory.mktemp("disk")) as made:
        yield made


@pytest.fixture(scope="module")
def everybody(
    tmp_path_factory: pytest.TempPathFactory, kernel_home: Path, disk: FaultyDisk
) -> Iterator[Movers]:
    """One mover for all of these tests; each has a namespace of its own."""
    with (
        pytest.MonkeyPatch.context() as patch,
        movers(tmp_path_factory.mktemp("home"), patch, kernel_home) as made,
    ):
        yield made
        disk.rules()
        disk.release()


@pytest.fixture
def faulty(disk: FaultyDisk) -> Iterator[FaultyDisk]:
    yield disk
    disk.rules()
    disk.release()


@pytest.fixture
def rig(everybody: Movers, faulty: FaultyDisk, request: pytest.FixtureRequest) -> Iterator[Movers]:
    everybody.namespace = Namespace.from_identity({"engine": "test", "of": request.node.name})
    yield everybody
    faulty.rules()
    faulty.release()
    everybody.close()


@pytest.fixture
def tier(rig: Movers, faulty: FaultyDisk) -> Tier:
    return rig.tier(faulty.root)


@pytest.fixture
def driver(rig: Movers, tier: Tier) -> StoreDriver:
    """A store with blocks 0 … 15."""
    made = rig.open(tier, size=SIZE)
    assert made.store(range(16)) == [OK] * 16
    return made


def remote(driver: StoreDriver) -> RemoteStore:
    store = driver.driven
    assert isinstance(store, RemoteStore)
    return store


def begin(driver: StoreDriver, kind: str, numbers: Sequence[int]) -> tuple[Job, list[Any]]:
    """A job under way, with its memory; that of a load is full of 7s."""
    keys = driver.keys(numbers)
    memory = [aligned_memory(driver.size) for _ in numbers]
    for block, key in zip(memory, keys, strict=True):
        block[:] = 7 if kind == "load" else np.frombuffer(payload_of(key, SIZE), dtype=np.uint8)
    batch = BlockBatch(keys, BlockBuffers.from_buffers(memory))
    store = driver.driven
    return (store.load if kind == "load" else store.store)(batch), memory


def answers(driver: StoreDriver) -> None:
    """Wait until the target is in use again."""
    until(lambda: remote(driver).usable, "the target to be taken back")


def test_blocks_go_through_the_mover_and_are_found_by_the_next_engine(
    rig: Movers, tier: Tier, driver: StoreDriver
) -> None:
    assert driver.lookup(range(17)) == [Lookup.HIT] * 16 + [Lookup.MISS]
    assert driver.load(range(16)) == [OK] * 16
    assert driver.store(range(12, 20)) == [Outcome.PRESENT] * 4 + [OK] * 4
    assert driver.delete([3, 99]) == [True, False]
    assert driver.lookup([3]) == [Lookup.MISS]
    assert driver.driven.drain(60)
    second = rig.open(tier, size=SIZE)
    until(lambda: second.lookup([3]) == [Lookup.MISS], "the deletion to be seen")
    assert second.load([0, 3, 19]) == [OK, Outcome.MISSING, OK]
    # What one stores the other finds at once: they share the mover's store.
    assert second.store([50]) == [OK]
    until(lambda: driver.lookup([50]) == [Lookup.HIT], "the other engine's block")
    assert driver.load([50]) == [OK]


def test_what_blocks_take_on_storage_is_counted_for_the_engine_that_moves_them(
    rig: Movers, tier: Tier
) -> None:
    tensor = TensorLayout("key", "bfloat16", 0, 1, 64, 2, 64, 16384, 256, 128, 0)
    layout = KVLayout.of(16384, [tensor])
    config = {"compression": {"ladder": {"local": "fp8"}}}
    one, other = (rig.open(tier, config=config).driven for _ in range(2))
    payloads = np.random.default_rng(1).standard_normal((6, 8192)).astype(np.float32)
    memory = np.ascontiguousarray((payloads.view(np.uint32) >> 16).astype(np.uint16))
    keys = block_keys([bytes([number]) * 32 for number in range(6)])
    for store in (one, other):
        store.describe(layout)

    def moved(start: Callable[[BlockBatch], Job], blocks: slice) -> None:
        buffers = BlockBuffers.from_buffers([row.view(np.uint8) for row in memory[blocks]])
        job = start(BlockBatch(keys[blocks], buffers, layout.tag))
        assert job.wait(60)
        assert set(job.outcomes.tolist()) == {OK}

    moved(one.store, slice(0, 6))
    until(lambda: other.lookup(keys).all(), "the blocks to be found by the other engine")
    moved(other.load, slice(0, 4))
    stored, loaded = one.counters(), other.counters()
    assert stored.bytes_stored == 6 * layout.nbytes
    assert 6 * layout.nbytes // 3 < stored.bytes_written < 6 * layout.nbytes * 2 // 3
    assert loaded.bytes_read * 6 == stored.bytes_written * 4
    assert (stored.bytes_read, loaded.bytes_written) == (0, 0)
    assert isinstance(one, RemoteStore)
    assert one.codec_counts.values() == {
        "encoded_blocks:fp8": 6,
        "encoded_raw_bytes:fp8": stored.bytes_stored,
        "encoded_bytes:fp8": stored.bytes_written,
    }


@pytest.mark.parametrize("size", [1, 5000, 8192, 300_000])
def test_blocks_of_any_size_and_in_pieces(rig: Movers, tier: Tier, size: int) -> None:
    store = rig.open(tier).driven
    assert isinstance(store, RemoteStore)
    cuts = tuple(sorted({size // 3, size // 2} - {0}))
    driver = StoreDriver(store, size=size, cuts=cuts)
    assert driver.store(range(9)) == [OK] * 9
    assert driver.load(range(10)) == [OK] * 9 + [Outcome.MISSING]
    assert store.sizes(driver.keys([0, 99])).tolist() == [size, -1]


@pytest.mark.parametrize(("kind", "rule"), [("load", READ), ("store", WRITE), ("store", JOURNAL)])
def test_job_on_a_target_that_hangs_ends_at_its_deadline(
    driver: StoreDriver, faulty: FaultyDisk, kind: str, rule: dict[str, Any]
) -> None:
    store = remote(driver)
    numbers = [0, 1, 2] if kind == "load" else [100, 101, 102]
    faulty.rules(rule)
    job, memory = begin(driver, kind, numbers)
    faulty.wait_hanging()
    assert job.wait(60)
    assert job.outcomes.tolist() == [TIMEOUT] * 3
    # From now on the memory is somebody else's, whatever the target does.
    for block in memory:
        block[:] = 9
    until(lambda: store.facts()["breaker"] != "closed", "the breaker to open")
    assert store.facts()["abandoned_bytes"] == 3 * SIZE
    assert driver.lookup(range(16)) == [Lookup.MISS] * 16
    assert driver.load(range(4)) == [UNAVAILABLE] * 4
    assert driver.store([200]) == [UNAVAILABLE]
    assert "has not answered" in store.reason
    assert not store.targets()[0].writing
    faulty.rules()
    faulty.release()
    answers(driver)
    until(lambda: store.facts()["abandoned_bytes"] == 0, "the memory to come back")
    assert driver.load(range(16)) == [OK] * 16
    assert driver.store([200]) == [OK]
    assert all(bool((block == 9).all()) for block in memory)
    if kind == "store":
        # What was given up has come there all the same, or not: never wrongly.
        for outcome in driver.load(numbers):
            assert outcome in (OK, Outcome.MISSING)


def test_everything_hangs_and_another_target_goes_on(
    rig: Movers, driver: StoreDriver, faulty: FaultyDisk, tmp_path: Path
) -> None:
    other = rig.open(rig.tier(tmp_path / "other", name="other"), size=SIZE)
    assert other.store(range(16)) == [OK] * 16
    local = BlockStore(rig.namespace, [FilesystemTarget(tmp_path / "local")], io_workers=2)
    assert local.wait_recovered(60)
    near = StoreDriver(local, size=SIZE)
    faulty.rules(*EVERYTHING_HANGS)
    jobs = [begin(driver, "load", [n])[0] for n in range(8)]
    jobs += [begin(driver, "store", [100 + n])[0] for n in range(8)]
    for first in range(0, 64, 16):
        driver.lookup(range(16))
        driver.driven.poll()
        assert near.store(range(first, first + 16)) == [OK] * 16
        assert near.load(range(first, first + 16)) == [OK] * 16
        assert other.load(range(16)) == [OK] * 16
        assert other.store(range(first + 100, first + 116)) == [OK] * 16
    for job in jobs:
        assert job.wait(60)
        assert set(job.outcomes.tolist()) <= {TIMEOUT, UNAVAILABLE, Outcome.MISSING}
    # Closing does not wait for it either, and says that nobody's memory is in use.
    assert driver.driven.close()
    faulty.rules()
    faulty.release()
    fresh = rig.open(rig.tier(faulty.root), start=False, size=SIZE)
    assert fresh.load(range(16)) == [OK] * 16
    assert local.close()


_ENGINE = """
import json, sys
from pathlib import Path
from lifeboat_cache.config.schema import Config, Tier
from lifeboat_cache.interface import Namespace
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.testing import StoreDriver

namespace = Namespace.from_identity(json.loads(sys.argv[3]))
tier = Tier.model_validate(json.loads(sys.argv[2]))
store = RemoteStore(namespace, tier, home=Path(sys.argv[1]), config=Config.model_validate({}))
assert store.wait_recovered(60)
driver = StoreDriver(store, size=65536)
print("ready", flush=True)
sys.stdin.readline()
from lifeboat_cache.interface import BlockBatch, BlockBuffers
from lifeboat_cache.testing import aligned_memory
memory = [aligned_memory(65536)]
job = store.load(BlockBatch(driver.keys([0]), BlockBuffers.from_buffers(memory)))
other = store.store(BlockBatch(driver.keys([900]), BlockBuffers.from_buffers(memory)))
print("begun", flush=True)
sys.stdin.readline()
"""


def test_engine_exits_while_its_target_hangs(
    rig: Movers, tier: Tier, driver: StoreDriver, faulty: FaultyDisk
) -> None:
    waiting = tier.model_copy(update={"timeout_s": 600.0})
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _ENGINE,
            str(rig.home),
            waiting.model_dump_json(),
            json.dumps(dict(rig.namespace.identity)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        faulty.rules(READ, WRITE)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "begun\n"
        faulty.wait_hanging()
        # It has jobs under way that have ten minutes, and ends.
        print(file=process.stdin, flush=True)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    faulty.rules()
    faulty.release()
    answers(driver)
    assert driver.load(range(16)) == [OK] * 16


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_errors_are_outcomes_and_open_the_breaker(
    driver: StoreDriver, faulty: FaultyDisk, number: int
) -> None:
    store = remote(driver)
    # The probe writes too, so the target stays out of use as long as that fails.
    faulty.rules({"op": "write", "match": "", "do": "error", "errno": number})
    bad = {Outcome.FAILED, Outcome.RESERVE, Outcome.FULL, UNAVAILABLE}
    for first in range(100, 140):
        outcomes = set(driver.store(range(first, first + 1)))
        assert outcomes <= bad
        if outcomes == {UNAVAILABLE}:
            break
    if number != errno.ENOSPC:
        assert store.facts()["breaker_opened"] == 1
    faulty.rules()
    answers(driver)
    until(lambda: driver.store([150]) == [OK] or driver.lookup([150]) == [Lookup.HIT], "a store")
    assert driver.load([*range(16), 150]) == [OK] * 17


@pytest.mark.parametrize("do", ["torn", "flip"])
def test_what_is_not_what_was_stored_is_never_served(
    driver: StoreDriver, faulty: FaultyDisk, do: str
) -> None:
    faulty.rules({"op": "read", "match": "segment$", "do": do, "bytes": [4096, 1 << 40]})
    # StoreDriver compares every block that is called good. One read is of many blocks. What
    # is wrong on a mount that others use too may only be on its way, and counts as missing.
    assert {Outcome.CORRUPT, Outcome.MISSING} & set(driver.load(range(16)))
    faulty.rules()
    answers(driver)
    assert set(driver.store(range(16))) <= {OK, Outcome.PRESENT}
    assert driver.load(range(16)) == [OK] * 16


def test_journals_that_become_visible_late(
    rig: Movers, tier: Tier, driver: StoreDriver, faulty: FaultyDisk
) -> None:
    faulty.rules(
        {"op": "readdir", "match": "journal$", "do": "hide"},
        {"op": "lookup", "match": "journal$", "do": "hide"},
    )
    # A second mover's store, as that of another node: it sees an empty directory for now.
    store = BlockStore(rig.namespace, [FilesystemTarget(faulty.root)], io_workers=2)
    assert store.wait_recovered(60)
    near = StoreDriver(store, size=SIZE)
    assert near.lookup([0]) == [Lookup.MISS]
    faulty.rules()
    until(lambda: near.lookup(range(16)) == [Lookup.HIT] * 16, "the journal")
    assert near.load(range(16)) == [OK] * 16
    assert store.close()


def test_target_that_is_slow_is_waited_for(
    rig: Movers, driver: StoreDriver, faulty: FaultyDisk
) -> None:
    slow = rig.tier(faulty.root, timeout_s=60.0)
    store = rig.open(slow, start=False, size=SIZE)
    faulty.rules(
        {"op": "read", "match": "segment$", "do": "delay", "seconds": 0.3},
        {"op": "write", "match": "segment$", "do": "delay", "seconds": 0.3},
    )
    assert store.load(range(16)) == [OK] * 16
    assert store.store([300]) == [OK]
    assert remote(store).facts()["breaker_opened"] == 0


def test_opening_a_target_that_hangs(rig: Movers, tier: Tier, faulty: FaultyDisk) -> None:
    # Another namespace of the same mover is opened while nothing answers.
    rig.open(tier)
    rig.namespace = Namespace.from_identity({"engine": "test", "of": "a target that hangs"})
    faulty.rules(*EVERYTHING_HANGS)
    store = rig.open(tier, size=SIZE, wait=False)
    until(lambda: remote(store).facts()["mover"], "the mover")
    job, _ = begin(store, "store", [0])
    assert job.wait(60)
    assert job.outcomes.tolist() == [UNAVAILABLE]
    assert store.lookup([0]) == [Lookup.RETRY]
    assert store.driven.state is State.OPENING
    faulty.rules()
    faulty.release()
    assert store.driven.wait_recovered(60)
    assert store.store([0]) == [OK]


def test_mover_that_is_stopped_is_not_waited_for(
    rig: Movers, tier: Tier, driver: StoreDriver
) -> None:
    with rig.stopped(tier):
        jobs = [begin(driver, "load", [n]) for n in range(8)]
        for job, _ in jobs:
            assert job.wait(60)
            assert job.outcomes.tolist() in ([TIMEOUT], [UNAVAILABLE])
        for _, memory in jobs:
            for block in memory:
                block[:] = 9
        assert driver.lookup(range(4)) == [Lookup.MISS] * 4
    answers(driver)
    assert driver.load(range(16)) == [OK] * 16
    assert all(bool((b == 9).all()) for _, memory in jobs for b in memory)


def test_mover_is_killed_in_the_middle_of_jobs(
    rig: Movers, tier: Tier, driver: StoreDriver
) -> None:
    good: set[int] = set(range(16))
    jobs = [(n, begin(driver, "store", [n])[0]) for n in range(100, 140)]
    loads = [begin(driver, "load", [n]) for n in range(16)]
    jobs[3][1].wait(60)
    rig.kill(tier)
    for number, job in jobs:
        assert job.wait(60)
        if job.outcomes.tolist() in ([OK], [Outcome.PRESENT]):
            good.add(number)
    for number, (job, memory) in enumerate(loads):
        assert job.wait(60)
        if job.ok:
            assert memory[0].tobytes() == payload_of(driver.keys([number])[0], SIZE)
    assert driver.lookup([0]) == [Lookup.MISS]
    rig.start(tier)
    until(lambda: remote(driver).state is State.READY, "the next mover")
    answers(driver)
    assert driver.load(sorted(good)) == [OK] * len(good)
    assert remote(driver).facts()["abandoned_bytes"] == 0


def test_deletions_that_a_mover_has_not_taken_over_are_told_to_the_next(
    rig: Movers, tier: Tier, driver: StoreDriver
) -> None:
    pid = rig.pid(tier)
    os.kill(pid, signal.SIGSTOP)
    assert driver.delete([0, 1]) == [True] * 2
    assert driver.lookup(range(3)) == [Lookup.MISS, Lookup.MISS, Lookup.HIT]
    assert driver.driven.undone_deletions() == driver.keys([0, 1])
    os.kill(pid, signal.SIGKILL)
    until(partial(gone, pid), "the end of the mover")
    rig.start(tier)
    until(lambda: not driver.driven.undone_deletions(), "the deletions to be taken over")
    assert driver.lookup(range(3)) == [Lookup.MISS, Lookup.MISS, Lookup.HIT]


def test_deletion_of_which_a_mover_dies_is_told_to_the_next(
    rig: Movers, tier: Tier, driver: StoreDriver, faulty: FaultyDisk
) -> None:
    faulty.rules(JOURNAL)
    assert driver.delete([0, 1]) == [True] * 2
    faulty.wait_hanging()
    # The mover knows of it, and that is not enough: it is not on storage yet.
    assert not driver.driven.drain(0.05)
    assert set(driver.driven.undone_deletions()) == set(driver.keys([0, 1]))
    pid = rig.pid(tier)
    os.kill(pid, signal.SIGKILL)
    faulty.rules()
    faulty.release(errno.EIO)
    until(partial(gone, pid), "the end of the mover")
    seen = set()

    def deleted() -> bool:
        seen.update(driver.lookup([0, 1]))
        return not driver.driven.undone_deletions()

    rig.start(tier)
    until(deleted, "the deletion to be on storage")
    assert driver.driven.drain(60)
    assert seen <= {Lookup.MISS, Lookup.RETRY}
    # It is: whoever comes next does not find them, either.
    rig.kill(tier)
    rig.start(tier)
    until(lambda: remote(driver).state is State.READY, "the next mover")
    assert driver.lookup(range(3)) == [Lookup.MISS, Lookup.MISS, Lookup.HIT]


def test_deletion_that_fails_is_not_waited_for_and_is_tried_again(
    driver: StoreDriver, faulty: FaultyDisk
) -> None:
    faulty.rules({**JOURNAL, "do": "error", "errno": errno.EIO})
    assert driver.delete([0, 1]) == [True] * 2
    assert driver.driven.drain(60)
    assert set(driver.driven.undone_deletions()) == set(driver.keys([0, 1]))
    # What is stored again meanwhile is not deleted by it.
    faulty.rules()
    assert driver.store([1]) == [OK]
    until(lambda: not driver.driven.undone_deletions(), "the deletion to be on storage")
    assert driver.lookup(range(3)) == [Lookup.MISS, Lookup.HIT, Lookup.HIT]
    assert driver.load([1]) == [OK]


def test_mover_that_cannot_even_be_killed(
    rig: Movers, tier: Tier, driver: StoreDriver, faulty: FaultyDisk
) -> None:
    faulty.rules(READ)
    job, memory = begin(driver, "load", [0, 1])
    faulty.wait_hanging()
    pid = rig.pid(tier)
    # A request that the file system has taken cannot be given up, not even by dying.
    os.kill(pid, signal.SIGKILL)
    assert job.wait(60)
    assert OK not in job.outcomes.tolist()
    for block in memory:
        block[:] = 9
    assert driver.lookup([0]) == [Lookup.MISS]
    assert set(driver.store([100])) <= {TIMEOUT, UNAVAILABLE}
    assert not gone(pid)
    faulty.rules()
    faulty.release()
    until(lambda: gone(pid), "the end of the mover")
    assert all(bool((block == 9).all()) for block in memory)
    rig.start(tier)
    answers(driver)
    until(lambda: driver.lookup([0]) == [Lookup.HIT], "the records")
    assert driver.load(range(16)) == [OK] * 16


def test_engine_is_killed_in_the_middle_of_stores(
    rig: Movers, tier: Tier, driver: StoreDriver
) -> None:
    code = _ENGINE + (
        "\nn = 1000\nwhile True:\n    print(n, [int(o) for o in driver.store([n])], flush=True)\n"
        "    n += 1\n"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            str(rig.home),
            tier.model_dump_json(),
            json.dumps(dict(rig.namespace.identity)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    print("\n", file=process.stdin, flush=True)
    said = [process.stdout.readline() for _ in range(30)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    stored = [int(line.split()[0]) for line in said if line.endswith("[1]\n")]
    assert len(stored) > 20
    until(lambda: Lookup.MISS not in driver.lookup(stored), "all that was stored")
    assert driver.load(stored) == [OK] * len(stored)


def test_bandwidth_limit_holds_for_all_engines_together(rig: Movers, tmp_path: Path) -> None:
    # 10 MB/s, of which the first quarter of a second is free.
    tier = rig.tier(tmp_path / "kv", timeout_s=60.0, bandwidth_limit_gbps=0.08)
    drivers = [rig.open(tier, size=SIZE), rig.open(tier, size=SIZE, start=False)]
    begun = time.monotonic()
    jobs = [
        begin(driver, "store", range(100 * at + 1000 * n, 100 * at + 1000 * n + 16))[0]
        for at in range(4)
        for n, driver in enumerate(drivers)
    ]
    for job in jobs:
        assert job.wait(60)
        assert job.ok
    # The last of eight jobs of 1 MiB begins when all before it are paid for.
    assert time.monotonic() - begun > (7 * 16 * SIZE - 2.5e6) / 10e6 - 0.05


def test_forked_child_leaves_its_parents_connection_alone(
    rig: Movers, tier: Tier, driver: StoreDriver
) -> None:
    store = driver.driven

    def child() -> None:
        assert driver.lookup([0]) == [Lookup.MISS]
        store.touch(driver.keys([0]))
        assert not store.delete(driver.keys([0])).any()
        with pytest.raises(StoreClosedError, match="forked"):
            driver.load([0])
        assert store.targets()[0].facts["mover"] == 0
        assert store.close()

    in_child(child)
    assert driver.load(range(16)) == [OK] * 16
    assert driver.store([700]) == [OK]


def test_mover_ends_when_nobody_wants_it(rig: Movers, tmp_path: Path) -> None:
    tier = rig.tier(tmp_path / "kv")
    store = rig.open(tier, start=False, wait=False)
    rig.start(tier, lease=3.0)
    assert store.driven.wait_recovered(60)
    pid = rig.pid(tier)
    assert store.driven.close()
    until(lambda: gone(pid), "the end of the mover")
    assert not rig.places(tier).socket.exists()


def test_store_without_a_mover(rig: Movers, tmp_path: Path) -> None:
    store = rig.open(rig.tier(tmp_path / "kv"), start=False, wait=False, size=SIZE)
    begun = time.monotonic()
    job, _ = begin(store, "store", [0])
    assert job.wait(60)
    assert job.outcomes.tolist() == [UNAVAILABLE]
    assert store.load([0]) == [Outcome.MISSING]
    assert store.lookup([0]) == [Lookup.RETRY]
    assert "not running" in store.driven.reason
    assert store.driven.close()
    assert time.monotonic() - begun < 60


@pytest.mark.full
def test_target_that_hangs_for_a_minute(rig: Movers, faulty: FaultyDisk, tmp_path: Path) -> None:
    tier = rig.tier(faulty.root, timeout_s=10.0)
    driver = rig.open(tier, size=SIZE)
    assert driver.store(range(64)) == [OK] * 64
    other = rig.open(rig.tier(tmp_path / "other", name="other"), size=SIZE)
    faulty.rules(*EVERYTHING_HANGS)
    store = driver.driven
    begun, longest, number, jobs = time.monotonic(), 0.0, 1000, []
    while time.monotonic() - begun < 60:
        number += 1
        for kind in ("load", "store"):
            before = time.monotonic()
            driver.lookup(range(64))
            jobs.append(begin(driver, kind, [number % 64 if kind == "load" else number])[0])
            store.poll()
            longest = max(longest, time.monotonic() - before)
        if number % 100 == 0:
            assert other.store(range(number, number + 8)) == [OK] * 8
            assert other.load(range(number, number + 8)) == [OK] * 8
        time.sleep(0.005)
    assert longest < tier.timeout_s, "a call has waited for the deadline"
    for job in jobs:
        assert job.wait(60)
        assert job.seconds < 3 * tier.timeout_s
    faulty.rules()
    faulty.release()
    answers(driver)
    assert driver.load(range(64)) == [OK] * 64
    assert driver.store([900]) == [OK]
    until(lambda: remote(driver).facts()["abandoned_bytes"] == 0, "the memory to come back")


@pytest.mark.full
def test_faults_and_kills_over_a_hundred_thousand_blocks(rig: Movers, faulty: FaultyDisk) -> None:
    choice = random.Random(6)
    tier = rig.tier(faulty.root, timeout_s=1.0)
    driver = rig.open(tier, size=4096)
    good: list[int] = []
    dropped: set[int] = set()
    moved, first = 0, 0
    faults: list[list[dict[str, Any]]] = [
        [],
        [],
        [{"op": "write", "match": "", "do": "error", "errno": errno.EIO, "times": 5}],
        [{"op": "read", "match": "segment$", "do": "error", "errno": errno.ESTALE, "times": 3}],
        [{"op": "read", "match": "segment$", "do": "flip", "bytes": [4096, 1 << 40], "times": 3}],
        [{"op": "read", "match": "segment$", "do": "torn", "bytes": [4096, 1 << 40], "times": 3}],
        [{"op": "write", "match": "segment$", "do": "short", "times": 3}],
        [READ | {"times": 2}],
        [WRITE | {"times": 2}],
        [JOURNAL | {"times": 1}],
    ]
    end = time.monotonic() + 180
    while moved < 100_000 or time.monotonic() < end:
        faulty.rules(*choice.choice(faults))
        killing = choice.random() < 0.02
        for _ in range(8):
            numbers = range(first, first + 256)
            first += 256
            # The content of every block that is called good is compared.
            outcomes = driver.store(numbers)
            stored = [n for n, outcome in zip(numbers, outcomes, strict=True) if outcome is OK]
            good += stored
            moved += len(stored)
            if good:
                sample = choice.sample(good, min(len(good), 256))
                answer = driver.load(sample)
                moved += answer.count(OK)
                # What was read wrongly, or could not be read, may be dropped. A part of what
                # took too long may have been read after all.
                dropped.update(n for n, o in zip(sample, answer, strict=True) if o is not OK)
        faulty.rules()
        if killing:
            pid = rig.pid(tier)
            os.kill(pid, signal.SIGKILL)
        faulty.release()
        if killing:
            # It could not end while a thread of it was waiting for the target.
            until(partial(gone, pid), "the end of the mover")
            rig.start(tier)
        answers(driver)
    kept = [number for number in good if number not in dropped]
    assert len(kept) > len(good) // 2
    for at in range(0, len(kept), 1024):
        assert driver.load(kept[at : at + 1024]) == [OK] * len(kept[at : at + 1024])
