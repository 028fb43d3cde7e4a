"""The conformance suite of storage targets.

A target from anywhere is right if it passes this suite::

    class TestMyTarget(TargetTests):
        @pytest.fixture
        def target(self, tmp_path):
            return lambda **options: MyTarget(tmp_path / "kv", **options)

        def remove_segment(self, place): ...
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.errors import ForeignDataError, NewerFormatError
from lifeboat_cache.format.access import ACCESS
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import Place, Target, TargetReader, TargetWriter
from lifeboat_cache.testing.blocks import (
    cut_at,
    empty_like,
    payload_of,
    sample_keys,
    sample_records,
)

__all__ = ["TargetTests"]

#: Sizes that O_DIRECT does not take: below, at and around a page, and odd ones.
_ODD_SIZES = (1, 17, 4095, 4097, 10_007, 65_537)

#: Sizes that suit O_DIRECT.
_PAGE_SIZES = (4096, 8192, 4096, 65_536, 131_072)

_Memory = Sequence[Sequence[npt.NDArray[np.uint8]]]


def _place(writer: bytes, entry: Any) -> Place:
    return Place(writer, int(entry["segment"]), int(entry["offset"]), int(entry["stored_length"]))


def _content(pieces: Sequence[npt.NDArray[np.uint8]]) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces)


def _same(memory: _Memory, expected: _Memory) -> bool:
    return [_content(pieces) for pieces in memory] == [_content(pieces) for pieces in expected]


class TargetTests:
    """What every :class:`~lifeboat_cache.targets.base.Target` must do.

    Subclass it in a test module, give the class a fixture ``target`` and fill in
    the methods that reach behind the target's back (below). ``target`` is a
    function of keyword arguments ``capacity`` and ``reserve`` (bytes, both
    optional); each call returns a new target on the *same* place, as another
    process would open it.
    """

    namespace = Namespace.from_identity({"suite": "TargetTests", "model": "one"})
    other_namespace = Namespace.from_identity({"suite": "TargetTests", "model": "two"})

    # Behind the target's back -------------------------------------------------

    def remove_segment(self, place: Place) -> None:
        """Make the segment that holds ``place`` of :attr:`namespace` vanish."""
        raise NotImplementedError("say how a segment of this target is removed")

    def cut_segment(self, place: Place, length: int) -> None:
        """Cut the segment of ``place`` off at ``length`` bytes."""
        raise NotImplementedError("say how a segment of this target is cut")

    def declare_dead(self, place: Place, slots: Sequence[int]) -> None:
        """Write a dead bitmap for the segment of ``place``, as a janitor does."""
        raise NotImplementedError("say how a dead bitmap reaches this target")

    def plant_foreign_data(self) -> Callable[[], bytes]:
        """Put data of somebody else where the target will be.

        Returns a function that reads it back.
        """
        raise NotImplementedError("say how foreign data gets where this target is")

    def plant_newer_target(self) -> None:
        """Mark the place as a target of the next format."""
        raise NotImplementedError("say how this target's format is marked")

    def plant_newer_writer(self) -> bytes:
        """Add a writer of the next format to :attr:`namespace`; returns its identity."""
        raise NotImplementedError("say how a writer of the next format looks here")

    def snapshot(self) -> dict[str, bytes]:
        """All data of the target by name, to see that nothing changed."""
        raise NotImplementedError("say how this target's data is listed")

    # Tools ----------------------------------------------------------------------

    @staticmethod
    def opened(target: Callable[..., Target], **options: int) -> Target:
        """A probed target."""
        made = target(**options)
        made.probe()
        return made

    def append(
        self,
        writer: TargetWriter,
        numbers: Sequence[int],
        memory: _Memory,
        *,
        namespace: Namespace | None = None,
        expect: Outcome = Outcome.OK,
    ) -> Entries:
        """Append blocks and return their entries with their places."""
        keys = sample_keys(numbers)
        buffers = BlockBuffers.from_buffers([list(pieces) for pieces in memory])
        entries = sample_records(namespace or self.namespace, keys, buffers)
        outcomes = writer.append(entries, buffers, range(len(keys)))
        assert outcomes == [expect] * len(keys)
        return entries

    def blocks(
        self, sizes: Sequence[int], cuts: Sequence[int] = (), *, first: int = 0
    ) -> list[list[npt.NDArray[np.uint8]]]:
        """Numbered blocks of the given sizes, all cut in the same way."""
        keys = sample_keys(range(first, first + len(sizes)))
        return [cut_at(payload_of(key, size), cuts) for key, size in zip(keys, sizes, strict=True)]

    @staticmethod
    def read(
        reader: TargetReader, places: Sequence[Place], memory: _Memory
    ) -> tuple[list[int], list[list[npt.NDArray[np.uint8]]]]:
        """Read places into memory shaped like ``memory``."""
        into = empty_like(memory)
        buffers = BlockBuffers.from_buffers(into)
        return reader.read(places, buffers, range(len(places))), into

    @staticmethod
    def found(reader: TargetReader, skip: bytes | None = None) -> dict[bytes, tuple[bytes, Any]]:
        """Key → (writer, entry) of the records of all pages; nothing may be bad."""
        records: dict[bytes, tuple[bytes, Any]] = {}
        for page in reader.poll(skip):
            assert page.bad == 0
            for entry in page.entries:
                if entry["kind"] == KIND_RECORD:
                    key = entry["key"].tobytes()
                    assert key not in records, "a record was handed out twice"
                    records[key] = (page.writer, entry)
        return records

    def check_round_trip(
        self, target: Callable[..., Target], memory: list[list[npt.NDArray[np.uint8]]]
    ) -> None:
        """Append, find and read back blocks through two views of the place."""
        numbers = range(len(memory))
        writer = self.opened(target).writer(self.namespace)
        self.append(writer, numbers, memory)
        reader = self.opened(target).reader(self.namespace)
        records = self.found(reader)
        keys = sample_keys(numbers)
        assert set(records) == set(keys)
        places = [_place(*records[key]) for key in keys]
        outcomes, into = self.read(reader, places, memory)
        assert outcomes == [Outcome.OK] * len(memory)
        assert _same(into, memory)
        writer.close()
        reader.close()

    # Probing --------------------------------------------------------------------

    def test_probing_twice_changes_nothing(self, target: Callable[..., Target]) -> None:
        self.opened(target)
        before = self.snapshot()
        self.opened(target)
        assert self.snapshot() == before

    def test_says_where_it_is(self, target: Callable[..., Target]) -> None:
        made = target()
        assert made.name
        assert made.location

    def test_refuses_a_place_with_foreign_data(self, target: Callable[..., Target]) -> None:
        read_back = self.plant_foreign_data()
        before = read_back()
        try:
            target().probe()
        except ForeignDataError:
            pass
        else:
            raise AssertionError("foreign data was taken for a target")
        assert read_back() == before

    def test_refuses_a_place_of_a_newer_format(self, target: Callable[..., Target]) -> None:
        self.opened(target)
        self.plant_newer_target()
        before = self.snapshot()
        for call in (
            lambda: target().probe(),
            lambda: target().namespaces(),
            lambda: target().purge(self.namespace.hex),
        ):
            try:
                call()
            except NewerFormatError:
                continue
            raise AssertionError("a place of a newer format was used")
        assert self.snapshot() == before

    # Appending and reading ------------------------------------------------------

    def test_blocks_of_odd_sizes_come_back(self, target: Callable[..., Target]) -> None:
        self.check_round_trip(target, self.blocks(_ODD_SIZES))

    def test_blocks_of_whole_pages_come_back(self, target: Callable[..., Target]) -> None:
        self.check_round_trip(target, self.blocks(_PAGE_SIZES))

    def test_odd_sizes_between_whole_pages_come_back(self, target: Callable[..., Target]) -> None:
        self.check_round_trip(target, self.blocks((4096, 1, 8192, 4097, 4096, 12_288, 5)))

    def test_blocks_in_pieces_of_whole_pages_come_back(self, target: Callable[..., Target]) -> None:
        self.check_round_trip(target, self.blocks((16_384, 12_288), cuts=(4096, 8192)))

    def test_blocks_in_odd_pieces_come_back(self, target: Callable[..., Target]) -> None:
        self.check_round_trip(target, self.blocks((10_000, 5_000), cuts=(1, 4096, 4099)))

    def test_blocks_of_very_many_pieces_come_back(self, target: Callable[..., Target]) -> None:
        # More pieces than one system call takes (1,024 on Linux).
        self.check_round_trip(target, self.blocks((3_000, 3_001), cuts=range(1, 2_000)))

    def test_pages_in_very_many_pieces_come_back(self, target: Callable[..., Target]) -> None:
        cuts = range(4096, 4096 * 1_100, 4096)
        self.check_round_trip(target, self.blocks((4096 * 1_100,), cuts=cuts))

    def test_empty_pieces_are_skipped(self, target: Callable[..., Target]) -> None:
        self.check_round_trip(target, self.blocks((8192, 8192), cuts=(4096, 4096)))

    def test_an_empty_block_is_a_block(self, target: Callable[..., Target]) -> None:
        self.check_round_trip(target, self.blocks((0, 100, 0, 4096, 100, 0)))

    def test_a_block_larger_than_one_write_comes_back(self, target: Callable[..., Target]) -> None:
        size = 17 << 20
        self.check_round_trip(target, self.blocks((4096, size, 4096)))

    def test_blocks_are_read_in_any_order_and_number(self, target: Callable[..., Target]) -> None:
        memory = self.blocks([4096 + 4096 * (n % 3) + 11 * (n % 2) for n in range(24)])
        made = self.opened(target)
        writer, reader = made.writer(self.namespace), made.reader(self.namespace)
        entries = self.append(writer, range(24), memory)
        for order in (range(23, -1, -1), range(0, 24, 5), [3, 3, 3], [7]):
            places = [_place(writer.writer, entries[number]) for number in order]
            wanted = [memory[number] for number in order]
            outcomes, into = self.read(reader, places, wanted)
            assert outcomes == [Outcome.OK] * len(places)
            assert _same(into, wanted)
        writer.close()

    def test_a_batch_is_addressed_by_block_number(self, target: Callable[..., Target]) -> None:
        memory = self.blocks([5_000] * 6)
        buffers = BlockBuffers.from_buffers(memory)
        keys = sample_keys(range(6))
        made = self.opened(target)
        writer, reader = made.writer(self.namespace), made.reader(self.namespace)
        chosen = [4, 1, 5]
        entries = sample_records(self.namespace, keys, buffers)[chosen]
        assert writer.append(entries, buffers, chosen) == [Outcome.OK] * 3
        into = empty_like(memory)
        places = [_place(writer.writer, entry) for entry in entries]
        outcomes = reader.read(places, BlockBuffers.from_buffers(into), chosen)
        assert outcomes == [Outcome.OK] * 3
        for number in range(6):
            expected = _content(memory[number]) if number in chosen else bytes(5_000)
            assert _content(into[number]) == expected
        writer.close()

    def test_places_of_a_batch_ascend_and_are_unique(self, target: Callable[..., Target]) -> None:
        writer = self.opened(target).writer(self.namespace)
        memory = self.blocks((4096, 100, 4096, 9_000))
        seen: set[tuple[int, int]] = set()
        end = -1
        for _ in range(3):
            entries = self.append(writer, range(4), memory)
            for entry in entries:
                if int(entry["segment"]) == int(entries[0]["segment"]):
                    assert int(entry["offset"]) >= end
                    end = int(entry["offset"]) + int(entry["stored_length"])
                place = int(entry["segment"]), int(entry["slot"])
                assert place not in seen
                seen.add(place)
        writer.close()

    # Journals -------------------------------------------------------------------

    def test_pages_hold_what_is_new(self, target: Callable[..., Target]) -> None:
        writer = self.opened(target).writer(self.namespace)
        reader = self.opened(target).reader(self.namespace)
        assert self.found(reader) == {}
        for first in (0, 3, 6):
            memory = self.blocks([4096] * 3, first=first)
            self.append(writer, range(first, first + 3), memory)
            assert set(self.found(reader)) == set(sample_keys(range(first, first + 3)))
            assert self.found(reader) == {}
        writer.close()

    def test_entries_come_in_the_order_of_their_appends(
        self, target: Callable[..., Target]
    ) -> None:
        writer = self.opened(target).writer(self.namespace)
        for number in (5, 2, 9, 0):
            self.append(writer, [number], self.blocks([4096], first=number))
        reader = self.opened(target).reader(self.namespace)
        assert list(self.found(reader)) == sample_keys([5, 2, 9, 0])
        writer.close()

    def test_entries_keep_every_field(self, target: Callable[..., Target]) -> None:
        memory = self.blocks((5_000,))
        buffers = BlockBuffers.from_buffers(memory)
        entries = sample_records(self.namespace, sample_keys([0]), buffers, layout=2**64 - 1)
        for name, value in (
            ("salt", 2**64 - 2),
            ("family", 2**64 - 3),
            ("parent", 2**64 - 4),
            ("position", 2**32 - 5),
            ("group", 2**16 - 6),
            ("time", 2**32 - 7),
        ):
            entries[name] = value
        made = self.opened(target)
        writer = made.writer(self.namespace)
        assert writer.append(entries, buffers, [0]) == [Outcome.OK]
        ((_, found),) = self.found(made.reader(self.namespace)).values()
        for name in ENTRY.names or ():
            if name != "checksum":
                assert found[name] == entries[0][name], name
        writer.close()

    def test_a_writer_can_be_left_out(self, target: Callable[..., Target]) -> None:
        made = self.opened(target)
        first, second = made.writer(self.namespace), made.writer(self.namespace)
        assert len(first.writer) == 16
        assert first.writer != second.writer
        self.append(first, [1], self.blocks([4096], first=1))
        self.append(second, [2], self.blocks([4096], first=2))
        reader = made.reader(self.namespace)
        assert set(self.found(reader, skip=first.writer)) == set(sample_keys([2]))
        first.close()
        second.close()

    def test_namespaces_do_not_meet(self, target: Callable[..., Target]) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        self.append(writer, [1], self.blocks([4096], first=1))
        other = made.writer(self.other_namespace)
        memory = self.blocks([4096], first=2)
        self.append(other, [2], memory, namespace=self.other_namespace)
        for namespace, number in ((self.namespace, 1), (self.other_namespace, 2)):
            records = self.found(made.reader(namespace))
            assert set(records) == set(sample_keys([number]))
        writer.close()
        other.close()

    def test_tombstones_reach_every_reader(self, target: Callable[..., Target]) -> None:
        writer = self.opened(target).writer(self.namespace)
        entries = self.append(writer, range(2), self.blocks([4096] * 2))
        buryer = self.opened(target).writer(self.namespace)
        tombstone = np.zeros(1, dtype=ENTRY)
        tombstone["kind"] = KIND_TOMBSTONE
        tombstone["payload_checksum"][0] = np.void(writer.writer)
        for name in ("key", "segment", "slot"):
            tombstone[name] = entries[name][:1]
        buryer.bury(tombstone)
        found = [
            (page.writer, entry)
            for page in self.opened(target).reader(self.namespace).poll()
            for entry in page.entries
            if entry["kind"] == KIND_TOMBSTONE
        ]
        assert len(found) == 1
        assert found[0][0] == buryer.writer
        for name in ("key", "payload_checksum", "segment", "slot"):
            assert found[0][1][name] == tombstone[0][name]
        writer.close()
        buryer.close()

    def test_dead_slots_are_left_out(self, target: Callable[..., Target]) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        entries = self.append(writer, range(12), self.blocks([4096] * 12))
        place = _place(writer.writer, entries[0])
        dead = [0, 3, 9, 11]
        self.declare_dead(place, [int(entries["slot"][number]) for number in dead])
        alive = sorted(set(range(12)) - set(dead))
        for reader in (made.reader(self.namespace), self.opened(target).reader(self.namespace)):
            places = [_place(writer.writer, entry) for entry in entries]
            slots = entries["slot"].tolist()
            declared = reader.declared_dead(places, slots)
            assert declared == [number in dead for number in range(12)]
            assert reader.declared_dead([place], [1000]) == [False]
        reader = self.opened(target).reader(self.namespace)
        assert set(self.found(reader)) == set(sample_keys(alive))
        writer.close()

    def test_accesses_come_back(self, target: Callable[..., Target]) -> None:
        writer = self.opened(target).writer(self.namespace)
        entries = self.append(writer, range(3), self.blocks([4096] * 3))
        expected = []
        for round_, slots in enumerate(([0, 1], [2])):
            accesses = np.zeros(len(slots), dtype=ACCESS)
            accesses["writer"] = np.void(writer.writer)
            accesses["segment"] = entries["segment"][slots]
            accesses["slot"] = entries["slot"][slots]
            accesses["time"] = 1_700_000_000 + round_
            writer.log_access(accesses)
            expected += [(int(a["slot"]), int(a["time"])) for a in accesses]
        reader = self.opened(target).reader(self.namespace)
        found = [
            (int(access["slot"]), int(access["time"]))
            for page in reader.accesses()
            for access in page
            if access["writer"].tobytes() == writer.writer
        ]
        assert sorted(found) == sorted(expected)
        writer.close()

    def test_accesses_of_a_process_that_only_reads_are_kept(
        self, target: Callable[..., Target]
    ) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        self.append(writer, [0], self.blocks([4096]))
        writer.close()
        only_reads = made.writer(self.namespace)
        access = np.zeros(1, dtype=ACCESS)
        access["writer"][0] = np.void(writer.writer)
        access["time"] = 1_700_000_000
        only_reads.log_access(access)
        only_reads.close()
        (page,) = self.opened(target).reader(self.namespace).accesses()
        assert page["time"].tolist() == [1_700_000_000]

    # What goes wrong ------------------------------------------------------------

    def test_a_vanished_segment_is_missing_and_not_an_error(
        self, target: Callable[..., Target]
    ) -> None:
        memory = self.blocks([4096, 5_000])
        writer = self.opened(target).writer(self.namespace)
        entries = self.append(writer, range(2), memory)
        writer.close()
        places = [_place(writer.writer, entry) for entry in entries]
        self.remove_segment(places[0])
        reader = self.opened(target).reader(self.namespace)
        outcomes, _ = self.read(reader, places, memory)
        assert outcomes == [Outcome.MISSING] * 2
        assert self.found(reader) == {}

    def test_what_a_cut_segment_lost_is_missing(self, target: Callable[..., Target]) -> None:
        memory = self.blocks([8192] * 4)
        made = self.opened(target)
        writer, reader = made.writer(self.namespace), made.reader(self.namespace)
        entries = self.append(writer, range(4), memory)
        places = [_place(writer.writer, entry) for entry in entries]
        self.cut_segment(places[0], places[2].offset + 100)
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3], [2]):
            outcomes, into = self.read(
                reader, [places[n] for n in order], [memory[n] for n in order]
            )
            assert outcomes == [Outcome.OK if n < 2 else Outcome.MISSING for n in order]
            for at, number in enumerate(order):
                if number < 2:
                    assert _content(into[at]) == _content(memory[number])
        self.cut_segment(places[0], 0)
        outcomes, _ = self.read(made.reader(self.namespace), places, memory)
        assert outcomes == [Outcome.MISSING] * 4
        writer.close()

    def test_a_place_beyond_the_end_is_missing(self, target: Callable[..., Target]) -> None:
        memory = self.blocks([4096])
        made = self.opened(target)
        writer, reader = made.writer(self.namespace), made.reader(self.namespace)
        entries = self.append(writer, [0], memory)
        place = _place(writer.writer, entries[0])
        for wrong in (
            Place(place.writer, place.segment, place.offset + (1 << 40), place.length),
            Place(place.writer, place.segment + 7, place.offset, place.length),
            Place(bytes(16), 0, place.offset, place.length),
        ):
            outcomes, _ = self.read(reader, [wrong, place], [*memory, *memory])
            assert outcomes == [Outcome.MISSING, Outcome.OK]
        writer.close()

    def test_a_closed_writer_and_a_closed_reader_fail_quietly(
        self, target: Callable[..., Target]
    ) -> None:
        memory = self.blocks([4096])
        made = self.opened(target)
        writer, reader = made.writer(self.namespace), made.reader(self.namespace)
        entries = self.append(writer, [0], memory)
        place = _place(writer.writer, entries[0])
        for part in (writer, reader):
            part.close()
            part.close()
        self.append(writer, [0], memory, expect=Outcome.FAILED)
        writer.bury(np.zeros(1, dtype=ENTRY))
        writer.log_access(np.zeros(1, dtype=ACCESS))
        outcomes, _ = self.read(reader, [place], memory)
        assert outcomes == [Outcome.FAILED]

    def test_a_writer_that_stored_nothing_leaves_nothing(
        self, target: Callable[..., Target]
    ) -> None:
        made = self.opened(target)
        made.writer(self.namespace).close()
        assert [info.blocks for info in made.namespaces()] in ([], [0])
        assert all(not info.writers for info in made.namespaces())

    def test_a_writer_of_a_newer_format_is_skipped_and_kept(
        self, target: Callable[..., Target]
    ) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        self.append(writer, [0], self.blocks([4096]))
        writer.close()
        newer = self.plant_newer_writer()
        before = {name: data for name, data in self.snapshot().items() if newer.hex() in name}
        assert before
        assert set(self.found(made.reader(self.namespace))) == set(sample_keys([0]))
        report = made.purge(self.namespace.hex)
        assert [name for name, _ in report.kept] == [newer.hex()]
        after = {name: data for name, data in self.snapshot().items() if newer.hex() in name}
        assert after == before

    # Space ------------------------------------------------------------------------

    def test_usage_counts_what_is_stored(self, target: Callable[..., Target]) -> None:
        made = self.opened(target, capacity=1 << 30, reserve=4096)
        assert made.usage().used < 64 << 10
        writer = made.writer(self.namespace)
        self.append(writer, range(8), self.blocks([256 << 10] * 8))
        usage = made.usage()
        assert 2 << 20 <= usage.used < 3 << 20
        assert (usage.capacity, usage.reserve) == (1 << 30, 4096)
        assert usage.free > 0
        writer.close()

    def test_a_full_target_drops_stores(self, target: Callable[..., Target]) -> None:
        made = self.opened(target, capacity=1 << 20)
        writer = made.writer(self.namespace)
        self.append(writer, range(4), self.blocks([128 << 10] * 4))
        memory = self.blocks([128 << 10] * 8)
        self.append(writer, range(8), memory, expect=Outcome.FULL)
        # What is there already counts for the next process too.
        late = self.opened(target, capacity=1 << 20).writer(self.namespace)
        self.append(late, range(8), memory, expect=Outcome.FULL)
        reader = made.reader(self.namespace)
        assert len(self.found(reader)) == 4
        writer.close()
        late.close()
        made.purge(self.namespace.hex)
        again = made.writer(self.namespace)
        self.append(again, range(4), self.blocks([128 << 10] * 4))
        again.close()

    def test_the_free_space_reserve_is_left_alone(self, target: Callable[..., Target]) -> None:
        made = self.opened(target, reserve=1 << 60)
        writer = made.writer(self.namespace)
        self.append(writer, [0], self.blocks([4096]), expect=Outcome.RESERVE)
        assert made.usage().used < 64 << 10
        writer.close()

    # Purging ----------------------------------------------------------------------

    def test_namespaces_says_what_is_there(self, target: Callable[..., Target]) -> None:
        made = self.opened(target)
        assert made.namespaces() == []
        writer = made.writer(self.namespace)
        self.append(writer, range(3), self.blocks([4096] * 3))
        (info,) = made.namespaces()
        assert (info.digest, info.identity) == (self.namespace.hex, dict(self.namespace.identity))
        assert (info.blocks, info.problems) == (3, ())
        assert info.bytes >= 3 * 4096
        assert 0 < info.created <= time.time() + 1
        (described,) = info.writers
        assert (described.writer, described.alive) == (writer.writer.hex(), True)
        writer.close()
        (info,) = made.namespaces()
        assert [described.alive for described in info.writers] == [False]

    def test_looking_does_not_make_a_living_writer_look_dead(
        self, target: Callable[..., Target]
    ) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        self.append(writer, [0], self.blocks([4096]))
        for _ in range(2):
            (info,) = self.opened(target).namespaces()
            assert [described.alive for described in info.writers] == [True]
            self.opened(target).purge(self.namespace.hex)
        assert set(self.found(made.reader(self.namespace))) == set(sample_keys([0]))
        writer.close()

    def test_purge_removes_dead_writers_and_spares_living_ones(
        self, target: Callable[..., Target]
    ) -> None:
        made = self.opened(target)
        dead, alive = made.writer(self.namespace), made.writer(self.namespace)
        self.append(dead, range(4), self.blocks([4096] * 4))
        self.append(alive, [9], self.blocks([4096], first=9))
        dead.close()
        report = made.purge(self.namespace.hex)
        assert report.blocks == 4
        assert report.bytes >= 4 * 4096
        assert [name for name, _ in report.kept] == [alive.writer.hex()]
        assert set(self.found(made.reader(self.namespace))) == set(sample_keys([9]))
        alive.close()
        assert made.purge(self.namespace.hex).blocks == 1
        assert made.namespaces() == []
        assert made.purge(self.namespace.hex).files == 0

    def test_a_dry_run_counts_the_same_and_removes_nothing(
        self, target: Callable[..., Target]
    ) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        self.append(writer, range(4), self.blocks([4096] * 4))
        writer.close()
        before = self.snapshot()
        counted = made.purge(self.namespace.hex, dry_run=True)
        assert self.snapshot() == before
        done = made.purge(self.namespace.hex)
        assert (counted.files, counted.bytes, counted.blocks) == (
            done.files,
            done.bytes,
            done.blocks,
        )
        assert counted.blocks == 4

    def test_purge_by_age_keeps_what_is_young(self, target: Callable[..., Target]) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        entries = self.append(writer, range(2), self.blocks([4096] * 2))
        writer.close()
        burier = made.writer(self.namespace)
        tombstone = np.zeros(1, dtype=ENTRY)
        tombstone["kind"] = KIND_TOMBSTONE
        tombstone["payload_checksum"][0] = np.void(writer.writer)
        for name in ("key", "segment", "slot"):
            tombstone[name] = entries[name][:1]
        burier.bury(tombstone)
        burier.close()
        before = self.snapshot()
        report = made.purge(self.namespace.hex, older_than_s=3600.0)
        assert report.files == 0
        assert self.snapshot() == before
        assert made.purge(self.namespace.hex, older_than_s=-3600.0).blocks == 3

    def test_purge_leaves_other_namespaces_alone(self, target: Callable[..., Target]) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        self.append(writer, [0], self.blocks([4096]))
        writer.close()
        before = self.snapshot()
        assert made.purge(self.other_namespace.hex).files == 0
        for nonsense in ("", ".", "..", "../x", "/", "zz" * 32, self.namespace.hex.upper()):
            try:
                assert made.purge(nonsense).files == 0
            except ValueError:
                continue
        assert self.snapshot() == before

    def test_reading_what_a_purge_took_is_missing(self, target: Callable[..., Target]) -> None:
        memory = self.blocks([4096, 10_000])
        made = self.opened(target)
        writer = made.writer(self.namespace)
        entries = self.append(writer, range(2), memory)
        places = [_place(writer.writer, entry) for entry in entries]
        writer.close()
        warm, cold = made.reader(self.namespace), made.reader(self.namespace)
        assert self.read(warm, places, memory)[0] == [Outcome.OK] * 2
        self.opened(target).purge(self.namespace.hex)
        for reader in (warm, cold):
            assert self.read(reader, places, memory)[0] == [Outcome.MISSING] * 2

    # Threads ----------------------------------------------------------------------

    def test_appends_of_many_threads_do_not_overlap(self, target: Callable[..., Target]) -> None:
        made = self.opened(target)
        writer = made.writer(self.namespace)
        threads, rounds = 6, 8
        faults: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for round_ in range(rounds):
                    first = (number * rounds + round_) * 3
                    sizes = (4096, 4096, 8192) if number % 2 else (100, 5_000, 4096)
                    self.append(writer, range(first, first + 3), self.blocks(sizes, first=first))
            except BaseException as exc:
                faults.append(exc)

        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not faults
        reader = made.reader(self.namespace)
        records = self.found(reader)
        count = threads * rounds * 3
        assert set(records) == set(sample_keys(range(count)))
        taken = sorted(
            (int(entry["segment"]), int(entry["offset"]), int(entry["stored_length"]))
            for _, entry in records.values()
        )
        for before, after in itertools.pairwise(taken):
            assert before[0] < after[0] or before[1] + before[2] <= after[1]
        keys = list(records)
        places = [_place(*records[key]) for key in keys]
        expected = [
            cut_at(payload_of(key, place.length)) for key, place in zip(keys, places, strict=True)
        ]
        outcomes, into = self.read(reader, places, expected)
        assert outcomes == [Outcome.OK] * count
        assert _same(into, expected)
        writer.close()
