"""Killed at random points, many times over: what was reported stored is there, and right.

Writers with many jobs under way, engines that follow and load meanwhile, janitors that
evict, punch, compact and remove: each is killed, and after each death the store is read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from faultkit.engine import engines
from faultkit.mortal import Life, Nursery
from faultkit.trees import load_all, opened

from lifeboat_cache.check import Finding, check_targets
from lifeboat_cache.interface import Namespace, State
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import sample_keys

#: Block numbers of one life: more than it can store.
_LIFE = 1_000_000


@dataclass(frozen=True)
class Place:
    """A target to check."""

    path: Path
    name: str = "local"
    direct_io: Literal["auto", "on", "off"] = "auto"


def faults_of(root: Path) -> list[Finding]:
    """What `lifeboat-cache check` would end with 1 for."""
    report = check_targets([Place(root)])
    faults = [f for t in report.targets for f in t.all_findings() if f.level == "fault"]
    assert report.status == ("faulty" if faults else "ok")
    return faults


def assert_clean(root: Path) -> None:
    """`check` would end with 0: no fault, only what dead processes have left."""
    # A janitor was killed between cutting a segment to nothing and unlinking it: a
    # fault of `check` that test_reclaim.py shows.
    assert not [f for f in faults_of(root) if (root / f.path).stat().st_size > 0]


def assert_all_there(root: Path, namespace: Namespace, expected: dict[int, int]) -> None:
    """A new process finds every block; load_all compares every byte."""
    store = opened(root, namespace)
    assert store.state is State.READY, store.reason
    lost = set(expected) - load_all(store, expected)
    assert not lost, f"reported as stored and not there: {sorted(lost)[:10]}"
    outcomes = store.counters().load_outcomes
    assert outcomes.get("corrupt", 0) == outcomes.get("failed", 0) == 0
    assert store.close()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with closing(Nursery()) as made:
        yield made


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(2000, id="quick"),
        pytest.param(100_000, id="full", marks=pytest.mark.full),
    ],
)
def test_writers_are_killed(
    root: Path, namespace: Namespace, nursery: Nursery, blocks: int
) -> None:
    choice = random.Random(blocks)
    everything: dict[int, int] = {}
    total = lives = 0
    with engines(root, 2) as readers:
        while total < blocks:
            first = lives * _LIFE
            pause = choice.choice((0.0, 0.001, 0.01, 0.05, 0.2)) * choice.random()
            life = nursery.live_and_die(["writer", lives, first, str(root)], pause)
            lives += 1
            assert life.stored or life.deleted
            assert_all_there(root, namespace, life.stored)
            total += len(life.stored)
            everything |= life.stored
            # Engines that follow: their driver compares the bytes of what has its size.
            numbers = [n for n, size in life.stored.items() if size == 8192][:50]
            for reader in readers:
                reader.tell("load", numbers)
            for reader in readers:
                assert set(reader.hear()) <= {"OK", "MISSING"}
            if len(everything) > 10_000:  # keep the disk small
                assert_all_there(root, namespace, everything)
                assert_clean(root)
                FilesystemTarget(root).purge(namespace.hex)
                everything = {}
        assert_all_there(root, namespace, everything)
        assert_clean(root)
        for reader in readers:
            assert reader.ask("counters")[1].get("corrupt", 0) == 0
    print(f"{total} blocks of {lives} killed writers")


@pytest.mark.parametrize(
    "lives", [pytest.param(12, id="quick"), pytest.param(300, id="full", marks=pytest.mark.full)]
)
def test_killed_while_they_start(
    root: Path, namespace: Namespace, nursery: Nursery, lives: int
) -> None:
    choice = random.Random(lives)
    everything: dict[int, int] = {}
    for number in range(lives):
        what = ["writer", number, number * _LIFE, str(root)]
        life = nursery.live_and_die(what, choice.random() * 0.02, after=0)
        everything |= life.stored
    assert_all_there(root, namespace, everything)
    assert_clean(root)


@pytest.mark.parametrize(
    "rounds", [pytest.param(8, id="quick"), pytest.param(300, id="full", marks=pytest.mark.full)]
)
def test_janitors_are_killed(
    root: Path, namespace: Namespace, nursery: Nursery, rounds: int
) -> None:
    # No capacity is exceeded: nothing that was not deleted may go, at any moment of
    # tidying: merging, compaction, punching, removing, folding of access logs.
    choice = random.Random(rounds)
    expected: dict[int, int] = {}
    with closing(Nursery()) as janitors:
        for round_ in range(rounds):
            what = ["writer", round_, round_ * _LIFE, str(root)]
            life = nursery.live_and_die(what, choice.random() * 0.05)
            expected |= life.stored
            what = ["janitor", 1 << 40, 0.0, str(root)]
            janitors.live_and_die(what, choice.random() * 0.02, after=choice.randint(0, 40))
            store = opened(root, namespace)
            lost = set(expected) - load_all(store, expected)
            assert not lost, f"a killed janitor took {sorted(lost)[:10]}"
            assert store.counters().load_outcomes.get("corrupt", 0) == 0
            # So that there is something to reclaim.
            doomed = choice.sample(sorted(expected), len(expected) // 3)
            assert store.delete(sample_keys(doomed)).all()
            for number in doomed:
                del expected[number]
            assert store.close()
            assert_clean(root)
            if len(expected) > 6000:
                FilesystemTarget(root).purge(namespace.hex)
                expected = {}


@pytest.mark.parametrize(
    "rounds", [pytest.param(6, id="quick"), pytest.param(200, id="full", marks=pytest.mark.full)]
)
def test_evicting_janitors_and_writers_are_killed_while_engines_load(
    root: Path, namespace: Namespace, nursery: Nursery, rounds: int
) -> None:
    choice = random.Random(rounds)
    recent: list[int] = []
    with closing(Nursery()) as janitors, engines(root, 2) as readers:
        for round_ in range(rounds):
            what = ["writer", round_, round_ * _LIFE, str(root)]
            life: Life = nursery.live_and_die(what, choice.random() * 0.1)
            recent = [n for n, size in life.stored.items() if size == 8192] + recent[:100]
            for reader in readers:
                reader.tell("load", recent)
            # A grace of nothing: every reader lags behind.
            janitors.live_and_die(
                ["janitor", 4 << 20, 0.0, str(root)], choice.random() * 0.05, choice.randint(0, 50)
            )
            for reader in readers:
                # Zeros, short files and no files are missing: never corrupt, never wrong.
                assert set(reader.hear()) <= {"OK", "MISSING"}
            assert_clean(root)
        for reader in readers:
            assert set(reader.ask("counters")[1]) <= {"ok", "missing"}
        time.sleep(0.01)
    store = opened(root, namespace)
    assert store.state is State.READY
    assert store.counters().bad_entries == 0
    assert store.close()
