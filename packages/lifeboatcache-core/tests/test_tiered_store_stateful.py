"""Any order of stores, loads, deletions, outages and restarts on a ladder of targets."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from breakable_tiers import Tier
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lifeboat_cache.interface import Lookup, Namespace, Outcome, State
from lifeboat_cache.store import copier, member, tiered_store
from lifeboat_cache.store.tiered_store import TieredStore, Tiering
from lifeboat_cache.store.write_modes import WriteMode
from lifeboat_cache.testing import StoreDriver

NAMESPACE = Namespace.from_identity({"engine": "test", "model": "small"})
KEYS = 12
NAMES = ("nvme", "nfs", "tape")

numbers = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=6, unique=True)
names = st.sampled_from(NAMES)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.002)


class TieredStoreMachine(RuleBasedStateMachine):
    """Whatever happens, no block is wrong, none that was deleted returns, and none is lost.

    Not lost: found again as soon as all targets are there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.patches = [
            mock.patch.object(member, "_LEAST_PAUSE_S", 0.005),
            mock.patch.object(member, "_MOST_PAUSE_S", 0.005),
            mock.patch.object(member, "_LOOK_S", 0.005),
            mock.patch.object(member, "_SUSPICION_S", 0.0),
            mock.patch.object(tiered_store, "_TICK_S", 0.005),
            mock.patch.object(copier, "_LOOK_S", 0.005),
        ]
        for patch in self.patches:
            patch.start()
        self.tiers = {
            "nvme": Tier(self.place / "nvme"),
            "nfs": Tier(self.place / "nfs", "shared"),
            "tape": Tier(self.place / "tape", "archive"),
        }
        self.away: set[str] = set()
        self.stored: set[int] = set()
        self.deleted: set[int] = set()
        self.store: TieredStore

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for name in sorted(self.away):
                self.target_returns(name)
            self.everything_is_found_once_all_are_there()
            assert self.store.close()
        for patch in self.patches:
            patch.stop()
        shutil.rmtree(self.place)

    @initialize(mode=st.sampled_from(["first", "local_first", "all"]))
    def start(self, mode: WriteMode) -> None:
        self.mode = mode
        self.open()

    def open(self) -> None:
        specs = [tier.spec() for tier in self.tiers.values()]
        self.store = TieredStore(NAMESPACE, Tiering.fixed(specs, self.mode), pending_bytes=1 << 20)
        self.driver = StoreDriver(self.store, size=5000)
        assert self.store.wait_recovered(60)

    def state_of(self, name: str) -> State:
        (found,) = [one for one in self.store.targets() if one.name == name]
        return found.state

    # Operations -----------------------------------------------------------------

    @rule(wanted=numbers)
    def stores(self, wanted: list[int]) -> None:
        outcomes = self.driver.store(wanted)
        if len(self.away) < len(NAMES):
            assert set(outcomes) <= {Outcome.OK, Outcome.PRESENT}
        for number, outcome in zip(wanted, outcomes, strict=True):
            if outcome.good:
                self.stored.add(number)
                self.deleted.discard(number)

    @rule(wanted=numbers)
    def loads(self, wanted: list[int]) -> None:
        # The driver compares every byte of what is reported good.
        outcomes = self.driver.load(wanted)
        for number, outcome in zip(wanted, outcomes, strict=True):
            if number in self.deleted:
                assert outcome is Outcome.MISSING
            if number in self.stored and not self.away:
                assert outcome is Outcome.OK

    @rule(wanted=numbers)
    def deletes(self, wanted: list[int]) -> None:
        done = self.driver.delete(wanted)
        for number, was_there in zip(wanted, done, strict=True):
            if not self.away:
                assert was_there == (number in self.stored)
            self.stored.discard(number)
            self.deleted.add(number)

    @rule(wanted=numbers)
    def pins_protect(self, wanted: list[int]) -> None:
        keys = self.driver.keys(wanted)
        found = self.store.lookup(keys, pin=True).tolist()
        done = self.store.delete(keys).tolist()
        assert not any(gone for gone, hit in zip(done, found, strict=True) if hit == Lookup.HIT)
        self.store.unpin(keys)
        for number, hit in zip(wanted, found, strict=True):
            if hit != Lookup.HIT:  # it may be on a target that is away
                self.stored.discard(number)
                self.deleted.add(number)

    @rule(wanted=numbers)
    def touches(self, wanted: list[int]) -> None:
        self.store.touch(self.driver.keys(wanted))

    @rule(name=names)
    def target_goes(self, name: str) -> None:
        if name in self.away:
            return
        tier = self.tiers[name]
        tier.break_()
        tier.root.rename(tier.root.with_name(f"{name} away"))
        self.away.add(name)
        until(lambda: self.state_of(name) is State.DISABLED)

    @rule(name=names)
    def target_returns(self, name: str) -> None:
        if name not in self.away:
            return
        tier = self.tiers[name]
        tier.root.with_name(f"{name} away").rename(tier.root)
        tier.mend()
        self.away.remove(name)
        until(lambda: self.state_of(name) is State.READY)

    @rule()
    def waits_for_copies(self) -> None:
        assert self.store._copier.wait_idle(30)

    @rule()
    def is_opened_again(self) -> None:
        # A deletion that a target has missed is known to this process only.
        for name in sorted(self.away):
            self.target_returns(name)
        until(lambda: not any(one.facts["owed_deletions"] for one in self.store.targets()))
        assert self.store.close()
        self.open()

    # What always holds ----------------------------------------------------------

    @invariant()
    def what_was_deleted_is_not_found(self) -> None:
        if hasattr(self, "store") and self.deleted:
            found = self.driver.lookup(sorted(self.deleted))
            assert set(found) <= {Lookup.MISS}

    @invariant()
    def everything_is_found_once_all_are_there(self) -> None:
        if not hasattr(self, "store") or self.away:
            return
        wanted = sorted(self.stored)
        until(lambda: not any(one.facts["owed_deletions"] for one in self.store.targets()))
        assert self.driver.lookup(wanted) == [Lookup.HIT] * len(wanted)
        keys = set(self.driver.keys(wanted))
        assert set(self.store.keys()) == keys
        assert self.store.sizes(sorted(keys)).tolist() == [5000] * len(keys)


TestTieredStore = TieredStoreMachine.TestCase
TestTieredStore.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


class LongerMachine(TieredStoreMachine):
    """The same, for longer."""


TestTieredStoreLonger = pytest.mark.full(LongerMachine.TestCase)
TestTieredStoreLonger.settings = settings(
    max_examples=150, stateful_step_count=50, derandomize=False, deadline=None
)
