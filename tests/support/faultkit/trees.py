"""A store with every kind of file in it, copied for each damage, and its blocks by number."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lifeboat_cache.format.bitmap import set_dead
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_DEAD, FileHeader
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES, KIND_RECORD
from lifeboat_cache.interface import BlockStore, Namespace, Outcome, State
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, sample_keys

__all__ = ["KINDS", "Tree", "load_all", "opened", "store_all"]

KINDS = ("journal", "segment", "dead", "access", "lock", "namespace.json")

_SIZES = (1, 5000, 8192, 20_000, 4096, 65_536)

#: What a load of a damaged store may answer; nothing raises, nothing else is said.
_HONEST = {Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED, Outcome.MISMATCH}


def opened(root: Path, namespace: Namespace) -> BlockStore:
    """A store that has recovered."""
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    assert store.wait_recovered(60), "it does not recover"
    return store


def _by_size(blocks: Mapping[int, int]) -> dict[int, list[int]]:
    grouped: dict[int, list[int]] = {}
    for number, size in blocks.items():
        grouped.setdefault(size, []).append(number)
    return grouped


def load_all(store: BlockStore, blocks: Mapping[int, int]) -> set[int]:
    """Load blocks (size by number), compare every byte, and return which are good."""
    good = set()
    for size, numbers in _by_size(blocks).items():
        outcomes = StoreDriver(store, size=size).load(numbers)
        assert set(outcomes) <= _HONEST
        good |= {n for n, o in zip(numbers, outcomes, strict=True) if o is Outcome.OK}
    return good


def store_all(store: BlockStore, blocks: Mapping[int, int]) -> set[int]:
    """Store blocks and return which are kept."""
    good = set()
    for size, numbers in _by_size(blocks).items():
        outcomes = StoreDriver(store, size=size).store(numbers)
        good |= {n for n, o in zip(numbers, outcomes, strict=True) if o.good}
    return good


@dataclass(frozen=True)
class _Record:
    number: int
    writer: str
    segment: int
    offset: int
    size: int
    slot: int
    index: int


class Tree:
    """Blocks of two writers that have ended, one deleted, one declared dead by a janitor.

    Attributes
    ----------
    root
        The original; never changed after it is made.
    blocks
        Bytes by number of the blocks that can be loaded.
    """

    def __init__(self, root: Path, namespace: Namespace) -> None:
        self.root = root
        self.namespace = namespace
        first = opened(root, namespace)
        blocks = {number: _SIZES[number % len(_SIZES)] for number in range(12)}
        assert store_all(first, blocks) == set(blocks)
        assert first.close()
        second = opened(root, namespace)
        more = {number: _SIZES[number % len(_SIZES)] for number in range(12, 18)}
        assert store_all(second, more) == set(more)
        time.sleep(1.1)  # times are whole seconds
        second.touch(StoreDriver(second).keys(range(0, 18, 2)))
        assert second.delete(StoreDriver(second).keys([1])).all()
        assert second.close()
        self.blocks = blocks | more
        del self.blocks[1]
        self._records = {record.number: record for record in self._read_records()}
        self._bury(self._records[2])
        self.dead = {1, 2}
        del self.blocks[2]
        self.everything = blocks | more
        check = opened(root, namespace)
        assert load_all(check, self.everything) == set(self.blocks)
        assert check.close()

    @property
    def directory(self) -> Path:
        """Where the namespace's files are."""
        return self.root / self.namespace.directory

    def _read_records(self) -> Iterable[_Record]:
        numbers = {key: n for n, key in enumerate(sample_keys(range(18)))}
        for journal in self.directory.glob("*.journal"):
            entries = np.frombuffer(journal.read_bytes()[HEADER_BYTES:], dtype=ENTRY)
            for index, entry in enumerate(entries):
                number = numbers[bytes(entry["key"].tobytes())]
                if entry["kind"] == KIND_RECORD:
                    yield _Record(
                        number, journal.stem, int(entry["segment"]), int(entry["offset"]),
                        int(entry["stored_length"]), int(entry["slot"]), index,
                    )  # fmt: skip

    def _bury(self, record: _Record) -> None:
        writer = bytes.fromhex(record.writer)
        header = FileHeader(MAGIC_DEAD, self.namespace.digest, writer, record.segment, 1)
        path = self.directory / f"{record.writer}.{record.segment:08d}.dead"
        path.write_bytes(header.pack() + set_dead(b"", [record.slot]))

    def files(self) -> list[str]:
        """Paths of all files relative to the root, in an order that does not change."""
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        # By kind and size: the writers' names differ from run to run.
        paths.sort(key=lambda path: (self.kind(path), path.stat().st_size))
        return [str(path.relative_to(self.root)) for path in paths]

    def of_kind(self, kind: str) -> list[str]:
        """The files of one of :data:`KINDS`."""
        return [name for name in self.files() if self.kind(Path(name)) == kind]

    @staticmethod
    def kind(path: Path) -> str:
        """One of :data:`KINDS`, or the whole name."""
        return path.suffix[1:] if path.name[:32].isalnum() and "." in path.name else path.name

    def copy(self, to: Path) -> Path:
        """A copy to damage."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.root, to)
        return to

    def touched_by(self, name: str, first: int, last: int) -> set[int]:
        """Blocks that a damage to bytes ``first`` … ``last`` of a file may cost.

        Padding between payloads means nothing, so a damage to it costs nothing.
        """
        path = Path(name)
        kind, writer = self.kind(path), path.name[:32]
        mine = [record for record in self._records.values() if record.writer == writer]
        if kind == "segment":
            if first < HEADER_BYTES:
                return {record.number for record in mine}
            return {r.number for r in mine if r.offset <= last and first < r.offset + r.size}
        if kind == "journal":
            if first < HEADER_BYTES:
                return {record.number for record in mine}
            lost = range(
                (first - HEADER_BYTES) // ENTRY_BYTES, (last - HEADER_BYTES) // ENTRY_BYTES + 1
            )
            return {record.number for record in mine if record.index in lost}
        if kind == "dead" and last >= HEADER_BYTES:
            slots = range((first - HEADER_BYTES) * 8, (last - HEADER_BYTES + 1) * 8)
            return {record.number for record in mine if record.slot in slots}
        return set()

    def verify(self, damaged: Path, may_lose: set[int], *, bad: int | None = None) -> None:
        """A damaged copy is readable, lies about nothing, loses no more than it must, and heals.

        ``bad`` is how many bad entries must be counted, if that is known.
        """
        store = opened(damaged, self.namespace)
        assert store.state is State.READY, store.reason
        good = load_all(store, self.everything)
        assert set(self.blocks) - may_lose <= good, "a block was lost that was not damaged"
        # The deleted and the dead may come back: their bytes are right all the same.
        assert good <= set(self.everything)
        if bad is not None:
            assert store.counters().bad_entries == bad
        assert store_all(store, self.everything) == set(self.everything)
        assert load_all(store, self.everything) == set(self.everything)
        assert store.close()
        again = opened(damaged, self.namespace)
        # A key may have a record that cannot be read and one that can: the first answers
        # once, the second from then on.
        assert load_all(again, self.everything) >= set(self.everything) - may_lose
        assert load_all(again, self.everything) == set(self.everything)
        assert again.close()
