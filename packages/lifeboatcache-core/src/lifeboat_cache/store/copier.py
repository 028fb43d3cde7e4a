"""Copies of blocks from one target to another, in the background."""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.format.journal import KIND_RECORD, Entries
from lifeboat_cache.job import Job
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.member import Member
from lifeboat_cache.store.protocol import Store
from lifeboat_cache.store.write_modes import below, expects_below, faster

__all__ = ["Copier"]

_log = logging.getLogger("lifeboat_cache")

#: So many blocks wait to be copied, at most; more are dropped.
MOST_BLOCKS = 1 << 16

#: So many blocks are handled at a time …
_CHUNK_BLOCKS = 512
#: … or as many as have so many bytes.
_CHUNK_BYTES = 32 << 20

#: Loads go first, but not longer than so many seconds.
_YIELD_S = 0.25

#: As long as there is no target to copy to, one is looked for every so many seconds.
_LOOK_S = 0.5

_PAGE = 4096


@dataclass(frozen=True)
class _Item:
    """Blocks to copy; ``up``: to a faster target."""

    source: Member
    keys: Sequence[bytes]
    up: bool


class Copier:
    """Copies blocks on one thread, which is started with the first of them.

    Blocks are read from their source and stored as anybody's: in the codec of the
    destination, but never in a larger one than what they were read from
    (:attr:`BlockBatch.codecs`).

    Parameters
    ----------
    members
        Gives the targets now.
    before
        Called before each part, to let others go first, with the most seconds to wait.
    """

    def __init__(
        self, members: Callable[[], Sequence[Member]], before: Callable[[float], None]
    ) -> None:
        self._members = members
        self._before = before
        self._wake = threading.Condition()
        # By source: whether any of it can be copied now is the same for all of it.
        self._down: dict[Member, deque[_Item]] = {}
        self._up: deque[_Item] = deque()
        # Each way for itself: what waits for a target that is away keeps nothing else waiting.
        self._queued = {True: 0, False: 0}
        self._working = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._deleted: set[bytes] = set()  # while something is being copied
        self._waiting: Counter[str] = Counter()  # by the source's name, as are drops
        self._blocks: Counter[str] = Counter()  # by the name of where they went
        self._bytes: Counter[str] = Counter()
        self._dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._memory: npt.NDArray[np.uint8] | None = None

    # What is to be copied ---------------------------------------------------

    def stored(self, source: Member, keys: Sequence[bytes]) -> None:
        """Blocks have been stored on a target: copy them to the next slower rung."""
        if expects_below(self._members(), source):
            self._add(_Item(source, keys, up=False))

    def loaded(self, source: Member, keys: Sequence[bytes]) -> None:
        """Blocks have been loaded from a target: copy them to a faster one, if there is one."""
        if faster(self._members(), source) is not None:
            self._add(_Item(source, keys, up=True))

    def deleted(self, keys: Sequence[bytes]) -> None:
        """Blocks are deleted: what is being copied just now must not bring them back."""
        with self._wake:
            if self._working:  # what waits is looked up when its turn comes
                self._deleted.update(keys)

    def wanted(self, keys: Sequence[bytes]) -> None:
        """Blocks are stored: a copy of them may stay, even if they have just been deleted."""
        if self._deleted:
            with self._wake:
                self._deleted.difference_update(keys)

    def doomed(self) -> frozenset[bytes]:
        """Blocks that are deleted, although a copy may just have been made. Nearly always none."""
        with self._wake:
            return frozenset(self._deleted)

    def hidden(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_] | None:
        """Which blocks are doomed, bool ``(n,)``; ``None`` if none of them is."""
        deleted = self._deleted
        if not deleted:
            return None
        found = np.array([key in deleted for key in keys], dtype=bool)
        return found if found.any() else None

    def _add(self, item: _Item) -> None:
        with self._wake:
            name = item.source.spec.name
            if self._stopping:
                self._dropped[name]["closed"] += len(item.keys)
                return
            queued = self._queued[item.up]
            if queued and queued + len(item.keys) > MOST_BLOCKS:
                self._dropped[name]["queue"] += len(item.keys)
                return
            self._line(item).append(item)
            self._queued[item.up] += len(item.keys)
            self._waiting[name] += len(item.keys)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="lifeboat-copy", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no threads are left: another time
                    return
                self._thread = thread
            self._wake.notify_all()

    def _line(self, item: _Item) -> deque[_Item]:
        return self._up if item.up else self._down.setdefault(item.source, deque())

    # What is known of it ----------------------------------------------------

    def facts(self, name: str) -> dict[str, object]:
        """What is published of a target: what was copied to it, and what not from it and why."""
        with self._wake:
            return {
                "copied_blocks": self._blocks[name],
                "copied_bytes": self._bytes[name],
                "copies_queued": self._waiting[name],
                "copies_dropped": dict(self._dropped[name]),
            }

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is left that could be copied now; whether that is so."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not (self._working or self._up or self._ready()), timeout
            )

    def _ready(self) -> bool:
        members = self._members()
        return any(below(members, source) is not None for source in self._down)

    def stop(self, timeout: float) -> None:
        """Drop what waits and end after the part at hand."""
        with self._wake:
            self._stopping = True
            for name, blocks in self._waiting.items():
                if blocks:
                    self._dropped[name]["closed"] += blocks
            self._queued = {True: 0, False: 0}
            self._waiting.clear()
            self._up.clear()
            self._down.clear()
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def after_fork(self) -> None:
        """In a forked child: the thread stayed with the parent."""
        self._wake = threading.Condition()
        self._stopping = True
        self._deleted.clear()

    # The thread -------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                item = self._next()
                while item is None and not self._stopping:
                    self._wake.notify_all()
                    self._wake.wait(_LOOK_S if self._down else None)
                    item = self._next()
                if item is None:
                    return
                self._working = True
            try:
                self._copy(item)
            except StoreClosedError:
                self._drop(item, "gone", len(item.keys))
            except Exception:  # a fault of ours: these are not copied, the rest is
                _log.exception("LifeboatCache: copying blocks failed; please report this")
                self._drop(item, "failed", len(item.keys))
            with self._wake:
                self._working = False
                self._deleted.clear()
                if not any(self._queued.values()):
                    self._wake.notify_all()

    def _next(self) -> _Item | None:
        """What to copy now; under the lock."""
        item = self._first()
        if item is None:
            return None
        if len(item.keys) > _CHUNK_BLOCKS:
            rest = _Item(item.source, item.keys[_CHUNK_BLOCKS:], item.up)
            self._line(item).appendleft(rest)
            item = _Item(item.source, item.keys[:_CHUNK_BLOCKS], item.up)
        self._queued[item.up] -= len(item.keys)
        self._waiting[item.source.spec.name] -= len(item.keys)
        return item

    def _first(self) -> _Item | None:
        """Take what comes next out of its line; under the lock."""
        if self._up:
            return self._up.popleft()
        members = self._members()
        for source, line in self._down.items():
            if below(members, source) is not None:
                item = line.popleft()
                # What other sources have comes before the rest of it.
                del self._down[source]
                if line:
                    self._down[source] = line
                return item
        return None

    def _drop(self, item: _Item, reason: str, blocks: int) -> None:
        if blocks:
            with self._wake:
                self._dropped[item.source.spec.name][reason] += blocks

    def _copy(self, item: _Item) -> None:
        members = self._members()
        goal = faster(members, item.source) if item.up else below(members, item.source)
        source = item.source.store
        store = None if goal is None else goal.store
        if goal is None or store is None or source is None or not source.usable:
            self._drop(item, "gone", len(item.keys))
            return
        there = store.lookup(item.keys) == Lookup.HIT
        keys = [key for key, hit in zip(item.keys, there.tolist(), strict=True) if not hit]
        records = source.records(keys)
        here = records["kind"] == KIND_RECORD
        self._drop(item, "gone", int(np.count_nonzero(~here)))
        keys = [key for key, found in zip(keys, here.tolist(), strict=True) if found]
        records = records[here]
        copied: list[bytes] = []
        for first, last in _parts(records["raw_length"].astype(np.int64)):
            if self._stopping:
                self._drop(item, "closed", len(keys) - first)
                break
            self._before(_YIELD_S)
            part = slice(first, last)
            copied += self._move(item, source, goal, store, keys[part], records[part])
        if copied and not item.up:
            self.stored(goal, copied)

    def _move(
        self,
        item: _Item,
        source: Store,
        member: Member,
        goal: Store,
        keys: list[bytes],
        records: Entries,
    ) -> list[bytes]:
        """Read some blocks and store them elsewhere; which of them were."""
        buffers, sizes = self._buffers(records["raw_length"].astype(np.int64))
        read = BlockBatch(keys, buffers, records["layout"].tolist())
        loaded = self._run(source.load, read)
        if loaded is None:
            return []
        good = np.flatnonzero(loaded == Outcome.OK)
        self._drop(item, "gone", len(keys) - good.shape[0])
        if not good.shape[0]:
            return []
        some = records[good]
        write = BlockBatch(
            [keys[row] for row in good.tolist()],
            buffers.take(good),
            some["layout"].tolist(),
            positions=some["position"].tolist(),
            groups=some["group"].tolist(),
            families=some["family"].tolist(),
            parents=some["parent"].tolist(),
            salt=some["salt"].tolist(),
            codecs=some["codec"].tolist(),
        )
        outcomes = self._run(goal.store, write)
        if outcomes is None:
            return []
        kept = (outcomes == Outcome.OK) | (outcomes == Outcome.PRESENT)
        for value in set(outcomes[~kept].tolist()):
            self._drop(item, Outcome(value).name.lower(), int(np.count_nonzero(outcomes == value)))
        done = [key for key, fine in zip(write.keys, kept.tolist(), strict=True) if fine]
        new = outcomes == Outcome.OK
        name = member.spec.name
        with self._wake:
            self._blocks[name] += int(np.count_nonzero(new))
            self._bytes[name] += int(sizes[good][new].sum())
            doomed = [key for key in done if key in self._deleted] if self._deleted else []
            if doomed:
                # Under the lock: a block that is stored anew right now must not go with them.
                gone = goal.delete(doomed).tolist()
                # The target may have been given up meanwhile.
                left = [key for key, ok in zip(doomed, gone, strict=True) if not ok]
                member.owe(left, hide=True)
        return [key for key in done if key not in doomed] if doomed else done

    def _run(self, start: Callable[..., Job], batch: BlockBatch) -> npt.NDArray[np.uint8] | None:
        """Have a store do something; ``None`` if that is given up."""
        job = start(batch, lambda _: None)
        while not job.wait(_LOOK_S):
            if self._stopping:
                # Storage does not answer. The memory stays with the job, whenever it ends.
                self._memory = None
                return None
        return job.outcomes

    def _buffers(self, sizes: npt.NDArray[np.int64]) -> tuple[BlockBuffers, npt.NDArray[np.int64]]:
        """Memory for blocks, each at a page boundary."""
        room = -(-sizes // _PAGE) * _PAGE
        total = int(room.sum())
        memory = self._memory
        if memory is None or memory.shape[0] < total:
            pages = mmap.mmap(-1, max(total, _PAGE))
            memory = self._memory = np.frombuffer(pages, dtype=np.uint8)
        starts = np.zeros(sizes.shape[0], dtype=np.int64)
        np.cumsum(room[:-1], out=starts[1:])
        addresses = (starts + memory.ctypes.data).astype(np.uint64)
        pieces = np.arange(sizes.shape[0] + 1, dtype=np.int64)
        return BlockBuffers(addresses, sizes.astype(np.uint64), pieces, memory), sizes


def _parts(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Consecutive blocks of about :data:`_CHUNK_BYTES` together."""
    parts: list[tuple[int, int]] = []
    first, total = 0, 0
    for number, size in enumerate(sizes.tolist()):
        if total and total + size > _CHUNK_BYTES:
            parts.append((first, number))
            first, total = number, 0
        total += size
    if first < sizes.shape[0]:
        parts.append((first, sizes.shape[0]))
    return parts
