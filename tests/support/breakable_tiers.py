"""Ladders of directories for tests, and targets that can be broken."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lifeboat_cache.codecs.ladder import Rung
from lifeboat_cache.codecs.names import CodecName
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.errors import TargetError
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.store.member import MemberSpec
from lifeboat_cache.store.protocol import Store
from lifeboat_cache.targets.base import OpenFile, Reservation, TargetReader, TargetWriter
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["Breakable", "Tier"]


@dataclass
class Faults:
    """What is wrong with a target now."""

    broken: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    probes: int = 0
    #: Each file is opened for reading so many seconds late.
    late_s: float = 0.0
    #: Held by what makes files: nothing is made any more once it is broken.
    making: threading.RLock = field(default_factory=threading.RLock)

    def check(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")


class Breakable(FilesystemTarget):
    """A directory that fails, or does not answer, while a test wants it to."""

    def __init__(self, root: Path, faults: Faults, *, capacity: int | None = None) -> None:
        super().__init__(root, name=root.name, capacity=capacity)
        self.faults = faults

    def probe(self) -> None:
        self.faults.probes += 1
        self.faults.gate.wait()
        with self.faults.making:
            if self.faults.broken:
                raise TargetError(errno.EIO, f"{self.location} is broken: mend it")
            super().probe()

    def writer(self, namespace: Namespace) -> TargetWriter:
        with self.faults.making:
            self.faults.check()
            writer = super().writer(namespace)
        reserve, faults = writer.reserve, self.faults

        def gated(entries: Entries, part_bytes: int) -> list[Reservation]:
            faults.gate.wait()
            if faults.broken:
                return [Reservation(0, len(entries), None, Outcome.FAILED)]
            return reserve(entries, part_bytes)

        writer.reserve = gated  # type: ignore[method-assign]
        return writer

    def reader(self, namespace: Namespace) -> TargetReader:
        reader = super().reader(namespace)
        opening, faults = reader.open_segment, self.faults

        def gated(writer: bytes, segment: int) -> OpenFile:
            faults.gate.wait()
            time.sleep(faults.late_s)
            faults.check()
            return opening(writer, segment)

        reader.open_segment = gated  # type: ignore[method-assign]
        return reader


class Tier:
    """One target of a ladder, which a test can break, stop and mend."""

    def __init__(
        self,
        root: Path,
        rung: Rung = "local",
        *,
        codec: CodecName = "raw",
        capacity: int | None = None,
        fallback: bool = False,
    ) -> None:
        self.root, self.rung, self.codec = root, rung, codec
        self.capacity, self.fallback = capacity, fallback
        self.faults = Faults()
        self.faults.gate.set()
        self.stores: list[BlockStore] = []

    @property
    def name(self) -> str:
        return self.root.name

    def target(self) -> Breakable:
        target = Breakable(self.root, self.faults, capacity=self.capacity)
        target.rung = self.rung
        return target

    def break_(self) -> None:
        """It fails from now on."""
        with self.faults.making:
            self.faults.broken = True

    def mend(self) -> None:
        """It works again."""
        self.faults.broken = False

    def stop(self) -> None:
        """It does not answer from now on."""
        self.faults.gate.clear()

    def go_on(self) -> None:
        """It answers again."""
        self.faults.gate.set()

    def spec(self) -> MemberSpec:
        def probe() -> Hashable:
            target = self.target()
            target.probe()
            return target.identity()

        def opened(namespace: Namespace) -> Store:
            store = BlockStore(
                namespace,
                [self.target()],
                io_workers=2,
                codecs=CodecPolicy.fixed(self.codec),
                quiet=True,
            )
            self.stores.append(store)
            return store

        return MemberSpec(
            name=self.name,
            type="filesystem",
            rung=self.rung,
            location=str(self.root),
            open=opened,
            probe=probe,
            look=self.target().identity,
            identity=self.name,
            fallback=self.fallback,
            wanted=lambda namespace: (self.root / namespace.directory).is_dir(),
        )

    def alone(self, namespace: Namespace) -> BlockStore:
        """A store on this target only, as another process would open it."""
        store = BlockStore(namespace, [FilesystemTarget(self.root)], io_workers=1)
        assert store.wait_recovered(60)
        return store

    def holds(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks another process would find here."""
        store = self.alone(namespace)
        try:
            return [bool(hit) for hit in store.lookup(keys)]
        finally:
            store.close()
