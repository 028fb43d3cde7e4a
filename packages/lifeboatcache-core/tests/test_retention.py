"""How long blocks are kept: ``eviction.max_age``, and purging by namespace, age and salt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from janitors import THEN, Block, Clock, chain, janitor, leave, names, run_until_quiet, verified
from janitors import write as write_blocks

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.cli import purge_command
from lifeboat_cache.cli.main import main
from lifeboat_cache.interface import salt_tag
from lifeboat_cache.janitor import Janitor, JanitorPolicy, Purged, Selection, reclaim
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, payload_of, sample_keys

Open = Callable[..., StoreDriver]

SIZE = 64 << 10
HOUR = 3600
OK, MISSING = Outcome.OK, Outcome.MISSING


def bytes_of(number: int) -> bytes:
    (key,) = sample_keys([number])
    return payload_of(key, SIZE)


def on_disk(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.glob("*/*.segment")))


@pytest.fixture
def quick_purge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Purges with a grace of nothing, and without the wait for it."""
    monkeypatch.setattr(purge_command, "JanitorPolicy", partial(JanitorPolicy, grace_s=0.0))
    monkeypatch.setattr(purge_command.time, "sleep", lambda _: None)  # type: ignore[attr-defined]


@pytest.fixture
def no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that cannot punch holes, as NFS before 4.2."""
    monkeypatch.setattr(reclaim, "punch_hole", lambda *_: False)


# --- max_age ---------------------------------------------------------------------------------


def test_what_is_too_old_goes_and_the_rest_stays(root: Path, namespace: Namespace) -> None:
    clock = Clock(THEN + 10 * HOUR)
    leave(root, chain(0, 4, THEN), namespace, SIZE)
    leave(root, chain(10, 4, THEN + 9 * HOUR), namespace, SIZE)
    kept = janitor(root, clock)
    assert not kept.run_once().expired_blocks, "without max_age everything stays"
    one = janitor(root, clock, max_age_s=2.0 * HOUR)
    assert one.run_once().expired_blocks == 4
    run_until_quiet(one, clock)
    assert verified(root) == 4
    assert all(bytes_of(number) not in on_disk(root) for number in range(4))
    assert len(names(root, "segment")) == 1
    clock.tick(2 * HOUR)
    run_until_quiet(one, clock)
    assert not names(root, "segment")


def test_a_block_that_is_used_all_the_time_goes_too(root: Path, namespace: Namespace) -> None:
    clock = Clock(THEN + 10 * HOUR)
    leave(root, chain(0, 4, THEN), namespace, SIZE)
    one = janitor(root, clock, max_age_s=2.0 * HOUR)
    one.estate.survey()
    for segment in one.estate.segments():
        segment.rows.array["used"] = THEN + 10 * HOUR
    assert one.run_once().expired_blocks == 4


@pytest.mark.parametrize("holes", [True, False])
def test_the_bytes_go_too_however_few_and_from_a_living_writer(
    root: Path, namespace: Namespace, holes: bool, request: pytest.FixtureRequest
) -> None:
    if not holes:
        request.getfixturevalue("no_holes")
    clock = Clock(THEN + 10 * HOUR)
    # One old block between young ones: too short a run for a hole that makes room.
    blocks = [Block(0, time=THEN + 9 * HOUR), Block(1, time=THEN), Block(2, time=THEN + 9 * HOUR)]
    writer = write_blocks(root, blocks, namespace, size=SIZE)
    one = janitor(root, clock, max_age_s=2.0 * HOUR)
    assert one.run_once().expired_blocks == 1
    assert bytes_of(1) in on_disk(root), "readers have a grace"
    clock.tick(31)
    report = one.run_once()
    assert report.erased_bytes == (0 if holes else SIZE)
    found = on_disk(root)
    assert [bytes_of(number) in found for number in range(3)] == [True, False, True]
    assert not one.run_once().erased_bytes, "not again and again"
    writer.close()
    assert verified(root) == 2


def test_a_clock_that_is_ahead_does_not_keep_blocks_for_ever(
    root: Path, namespace: Namespace
) -> None:
    day = 24 * HOUR
    ahead = int(time.time()) + 300 * day
    leave(root, chain(0, 4, ahead), namespace, SIZE)
    clock = Clock(time.time() + 2 * day)
    one = janitor(root, clock, max_age_s=float(day))
    assert one.run_once().expired_blocks == 4


def test_copies_do_not_take_the_future_along(root: Path, namespace: Namespace) -> None:
    day = 24 * HOUR
    for number in range(0, 40, 2):
        leave(root, chain(number, 2, int(time.time()) + 300 * day), namespace, SIZE)
    clock = Clock(time.time())
    (merged, *_) = [r for r in run_until_quiet(janitor(root, clock), clock) if r.merged_segments]
    assert merged.copied_blocks == 40
    clock.set(time.time() + 2 * day)
    assert janitor(root, clock, max_age_s=float(day)).run_once().expired_blocks == 40


# --- purge -----------------------------------------------------------------------------------


def purge(root: Path, selection: Selection) -> Purged:
    one = Janitor(FilesystemTarget(root), policy=JanitorPolicy(eviction="none", grace_s=0.0))
    done = one.doom(selection)
    done.left = one.erase_doomed()
    return done


def salted(driver: StoreDriver, numbers: range, salts: list[str]) -> None:
    keys = sample_keys(numbers)
    payloads = [payload_of(key, SIZE) for key in keys]
    batch = BlockBatch(
        keys, BlockBuffers.from_buffers(payloads), salt=[salt_tag(salt) for salt in salts]
    )
    job = driver.block_store.store(batch)
    assert job.wait(60)
    assert job.ok


@pytest.mark.parametrize("holes", [True, False])
def test_purge_by_salt_also_from_a_living_engine(
    open_driver: Open, root: Path, holes: bool, request: pytest.FixtureRequest
) -> None:
    if not holes:
        request.getfixturevalue("no_holes")
    living = open_driver(size=SIZE)
    salted(living, range(6), ["ann", "bob", "ann", "", "bob", "ann"])
    ended = open_driver(size=SIZE)
    salted(ended, range(10, 12), ["bob", "ann"])
    assert ended.block_store.close()
    done = purge(root, Selection(salt=salt_tag("ann")))
    assert (done.blocks, done.left) == (4, 0)
    found = on_disk(root)
    for number in (0, 2, 5, 11):
        assert bytes_of(number) not in found
    for number in (1, 3, 4, 10):
        assert bytes_of(number) in found
    assert purge(root, Selection(salt=salt_tag("nobody"))).blocks == 0
    # The living engine learns of it, and stores what is asked for again.
    deadline = time.monotonic() + 30
    while living.lookup([0])[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert living.load(range(6)) == [MISSING, OK, MISSING, OK, OK, MISSING]
    assert living.store([0]) == [OK]
    assert living.load([0]) == [OK]


@pytest.mark.usefixtures("quick_purge")
def test_the_command_erases_what_running_engines_stored(
    open_driver: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    tiers = ", ".join(
        f"{{name: {root.name}, type: filesystem, path: {root}, min_free_gb: 0}}" for root in roots
    )
    (home / "lifeboat.yaml").write_text(f"storage: {{tiers: [{tiers}]}}\n")
    for number, root in enumerate(roots):
        driver = open_driver(target=FilesystemTarget(root), size=SIZE)
        salted(driver, range(number * 10, number * 10 + 2), ["ann", "bob"])
    assert main(["purge", "--salt", "ann", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would remove 1 single blocks") == 2
    assert main(["purge", "--salt", "ann", "--yes"]) == 0
    captured = capsys.readouterr()
    assert [f"{root.name}: removed 1 single blocks" in captured.out for root in roots] == [True] * 2
    for number, root in enumerate(roots):
        assert bytes_of(number * 10) not in on_disk(root)
        assert bytes_of(number * 10 + 1) in on_disk(root)
    assert main(["purge", "--all", "--yes"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count(f"in use by pid {os.getpid()}") == 4, "planned and done"
    for root in roots:
        assert not np.frombuffer(on_disk(root)[4096:], dtype=np.uint8).any()
    assert main(["purge", "--all", "--yes"]) == 0
    assert "single blocks" not in capsys.readouterr().out, "nothing is left to erase"
    assert main(["purge", "--salt", "", "--yes"]) == 2


@pytest.mark.usefixtures("quick_purge")
def test_what_is_copied_back_meanwhile_goes_too(
    open_driver: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    tiers = ", ".join(
        f"{{name: {root.name}, type: filesystem, path: {root}, min_free_gb: 0}}" for root in roots
    )
    (home / "lifeboat.yaml").write_text(f"storage: {{tiers: [{tiers}]}}\n")
    first, second = (open_driver(target=FilesystemTarget(root), size=SIZE) for root in roots)
    salted(first, range(1), ["ann"])
    salted(second, range(1, 2), ["ann"])
    copies = [range(1), range(1, 2)]

    def promoted(_: float) -> None:
        # An engine had read it on the other target, and stores it without its salt.
        if copies:
            numbers = copies.pop(0)
            assert (second if numbers.start == 0 else first).store(numbers) == [OK]

    monkeypatch.setattr(purge_command.time, "sleep", promoted)  # type: ignore[attr-defined]
    assert main(["purge", "--salt", "ann", "--yes"]) == 0
    assert not copies
    assert capsys.readouterr().err.count("waiting") == 3
    for root in roots:
        assert bytes_of(0) not in on_disk(root)
        assert bytes_of(1) not in on_disk(root)


def test_purge_by_age_takes_single_blocks(root: Path, namespace: Namespace) -> None:
    now = int(time.time())
    blocks = [Block(0, time=now - 30 * HOUR), Block(1, time=now)]
    writer = write_blocks(root, blocks, namespace, size=SIZE)
    done = purge(root, Selection(older_than_s=24.0 * HOUR))
    assert (done.blocks, done.left) == (1, 0)
    assert bytes_of(0) not in on_disk(root)
    writer.close()
    assert verified(root) == 1


def test_purge_of_one_namespace_leaves_the_others(root: Path, namespace: Namespace) -> None:
    other = Namespace.from_identity({"model": "another"})
    for number, one in enumerate((namespace, other)):
        write_blocks(root, chain(10 * number, 2), one, size=SIZE).close()
    done = purge(root, Selection(directories=frozenset([other.directory])))
    assert (done.blocks, done.left) == (2, 0)
    assert verified(root) == 2


def test_an_engine_may_go_on_while_it_is_purged(root: Path, namespace: Namespace) -> None:
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    assert store.wait_recovered(60)
    driver = StoreDriver(store, size=SIZE)
    for first in range(0, 60, 10):
        assert driver.store(range(first, first + 10)) == [OK] * 10
        done = purge(root, Selection())
        assert done.left == 0
        # Whatever is found is right: the driver compares.
        assert set(driver.load(range(first, first + 10))) <= {OK, MISSING}
    assert store.close()
