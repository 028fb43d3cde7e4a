"""A block store against a model of it, through any sequence of operations."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.targets import segment_writer
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, sample_keys

KEYS = 6
NAMESPACE = Namespace.from_identity({"engine": "stateful"})


@dataclass(frozen=True)
class Shape:
    size: int
    layout: int


@dataclass(eq=False)
class Record:
    """A record that the index knows."""

    shape: Shape
    #: Whether its bytes are still there; a purge by somebody else takes them away.
    on_disk: bool = True
    #: Whether its writer has ended, so that a purge may take it.
    of_dead_writer: bool = False


numbers = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5)
shapes = st.builds(
    Shape, size=st.sampled_from([1, 100, 4096, 5000, 8192, 12_288]), layout=st.sampled_from([0, 9])
)
cuts = st.sampled_from([(), (1,), (0, 1)])


class BlockStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.segment_bytes = segment_writer.SEGMENT_BYTES
        segment_writer.SEGMENT_BYTES = 40_000
        self.records: dict[int, list[Record]] = {number: [] for number in range(KEYS)}
        self.pins: Counter[int] = Counter()
        self.store: BlockStore

    def teardown(self) -> None:
        segment_writer.SEGMENT_BYTES = self.segment_bytes
        assert self.store.close()
        shutil.rmtree(self.place)

    def open(self) -> BlockStore:
        store = BlockStore(NAMESPACE, [FilesystemTarget(self.place / "kv")], io_workers=2)
        assert store.wait_recovered(60)
        assert store.state is State.READY
        assert store.counters().bad_entries == 0
        return store

    @initialize()
    def start(self) -> None:
        self.store = self.open()

    def driver(self, shape: Shape, cut: tuple[int, ...] = ()) -> StoreDriver:
        fits = tuple(at for at in cut if at <= shape.size)
        return StoreDriver(self.store, size=shape.size, cuts=fits, layout=shape.layout)

    # What the model expects ---------------------------------------------------

    def planned_store(self, wanted: list[int], shape: Shape) -> list[Outcome]:
        outcomes = []
        there = {number: bool(self.records[number]) for number in wanted}
        new = []
        for number in wanted:
            known = self.records[number]
            if there[number] and known and known[0].shape == shape:
                outcomes.append(Outcome.PRESENT)
                continue
            if there[number] and self.pins[number]:
                outcomes.append(Outcome.MISMATCH)
                continue
            if there[number]:
                self.records[number] = []
            outcomes.append(Outcome.OK)
            new.append(number)
        for number in new:
            self.records[number].append(Record(shape))
        return outcomes

    def planned_load(self, wanted: list[int], shape: Shape) -> list[Outcome]:
        outcomes = []
        vanished = []
        for number in wanted:
            known = self.records[number]
            if not known:
                outcomes.append(Outcome.MISSING)
            elif known[0].shape != shape:
                outcomes.append(Outcome.MISMATCH)
            elif known[0].on_disk:
                outcomes.append(Outcome.OK)
            else:
                outcomes.append(Outcome.MISSING)
                vanished.append((number, known[0]))
        for number, record in vanished:
            if record in self.records[number]:
                self.records[number].remove(record)
        return outcomes

    # Operations -----------------------------------------------------------------

    @rule(wanted=numbers, shape=shapes, cut=cuts)
    def stores(self, wanted: list[int], shape: Shape, cut: tuple[int, ...]) -> None:
        expected = self.planned_store(wanted, shape)
        assert self.driver(shape, cut).store(wanted) == expected

    @rule(wanted=numbers, shape=shapes, cut=cuts)
    def loads(self, wanted: list[int], shape: Shape, cut: tuple[int, ...]) -> None:
        expected = self.planned_load(wanted, shape)
        assert self.driver(shape, cut).load(wanted) == expected

    @rule(cut=cuts)
    def loads_everything_as_it_is(self, cut: tuple[int, ...]) -> None:
        for number in range(KEYS):
            if self.records[number]:
                shape = self.records[number][0].shape
                expected = self.planned_load([number], shape)
                assert self.driver(shape, cut).load([number]) == expected

    @rule(wanted=numbers)
    def deletes(self, wanted: list[int]) -> None:
        expected = []
        for number in wanted:
            free = not self.pins[number]
            expected.append(free and bool(self.records[number]))
            if free:
                self.records[number] = []
        assert self.store.delete(sample_keys(wanted)).tolist() == expected

    @rule(wanted=numbers)
    def pins_what_it_finds(self, wanted: list[int]) -> None:
        found = self.store.lookup(sample_keys(wanted), pin=True)
        assert found.tolist() == [
            Lookup.HIT if self.records[number] else Lookup.MISS for number in wanted
        ]
        self.pins.update(number for number in wanted if self.records[number])

    @rule(wanted=numbers)
    def unpins(self, wanted: list[int]) -> None:
        self.store.unpin(sample_keys(wanted))
        for number in wanted:
            self.pins[number] = max(0, self.pins[number] - 1)

    @rule(wanted=numbers)
    def touches(self, wanted: list[int]) -> None:
        self.store.touch(sample_keys(wanted))

    @rule()
    def drains(self) -> None:
        assert self.store.drain(60)
        assert not self.store.busy()

    @rule()
    def is_opened_again(self) -> None:
        assert self.store.close()
        self.pins.clear()
        for number, records in self.records.items():
            self.records[number] = [record for record in records if record.on_disk]
            for record in self.records[number]:
                record.of_dead_writer = True
        self.store = self.open()

    @rule()
    def somebody_purges(self) -> None:
        assert self.store.drain(60)
        FilesystemTarget(self.place / "kv").purge(NAMESPACE.hex)
        for records in self.records.values():
            for record in records:
                record.on_disk = record.on_disk and not record.of_dead_writer

    @rule(wanted=numbers, shape=shapes)
    def somebody_else_stores_and_ends(self, wanted: list[int], shape: Shape) -> None:
        """Another process adds what is not on disk; this one reads its journal."""
        assert self.store.drain(60)
        missing = {
            number
            for number in wanted
            if not any(record.on_disk for record in self.records[number])
        }
        other = self.open()
        driver = StoreDriver(other, size=shape.size, layout=shape.layout)
        assert driver.store(sorted(missing)) == [Outcome.OK] * len(missing)
        assert other.close()
        self.store._keeper.follower.follow(recovering=False)
        for number in missing:
            self.records[number].append(Record(shape, of_dead_writer=True))

    # What always holds ----------------------------------------------------------

    @invariant()
    def lookups_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        keys = sample_keys(range(KEYS))
        there = [bool(self.records[number]) for number in range(KEYS)]
        assert self.store.lookup(keys).tolist() == there
        assert len(self.store) == sum(there)
        assert set(self.store.keys()) == {
            key for key, found in zip(keys, there, strict=True) if found
        }
        assert self.store.sizes(keys).tolist() == [
            records[0].shape.size if records else -1 for records in self.records.values()
        ]
        assert self.store.layouts(keys).tolist() == [
            records[0].shape.layout if records else 0 for records in self.records.values()
        ]


TestBlockStore = BlockStoreMachine.TestCase
TestBlockStore.settings = settings(max_examples=40, stateful_step_count=40)


class LongerMachine(BlockStoreMachine):
    """The same, for longer."""


TestBlockStoreLonger = pytest.mark.full(LongerMachine.TestCase)
TestBlockStoreLonger.settings = settings(
    max_examples=1500, stateful_step_count=60, derandomize=False
)
