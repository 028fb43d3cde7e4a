"""The index of a mover's store, told to engines as it changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.journal import ENTRY, KIND_TOMBSTONE, Entries
from lifeboat_cache.index import Index
from lifeboat_cache.index_answers import Keys
from lifeboat_cache.mover.wire import SLOTS, Kind, Message
from lifeboat_cache.store.records import void

__all__ = ["FedIndex", "Subscription", "take_in"]

#: Entries in one message.
_PAGE = 4096

#: An engine that lets so much pile up is told all of it anew.
_MOST_BYTES = 64 << 20

_WRITER = 16


@dataclass(frozen=True)
class _Change:
    kind: Kind
    body: bytes


class Subscription:
    """What one engine has not been told yet."""

    def __init__(self, index: FedIndex, wake: Callable[[], None]) -> None:
        self._index = index
        self._wake = wake
        self._lock = threading.Lock()
        self._changes: deque[_Change] = deque()
        self._bytes = 0
        self._snapshot: Iterator[_Change] | None = None
        self._lost = True

    def add(self, change: _Change) -> None:
        """Note a change."""
        with self._lock:
            if self._lost:
                return
            self._changes.append(change)
            self._bytes += len(change.body)
            if self._bytes > _MOST_BYTES:
                self._changes.clear()
                self._bytes = 0
                self._lost = True
        self._wake()

    def next(self) -> tuple[Kind, bytes] | None:
        """What to tell next; ``None`` = the engine knows all. One thread asks."""
        if self._lost:
            # From now on changes are noted; what is there now is told first.
            with self._index.still():
                with self._lock:
                    self._lost = False
                self._snapshot = self._index.pages()
            return Kind.RESET, b""
        if self._snapshot is not None:
            page = next(self._snapshot, None)
            if page is not None:
                return page.kind, page.body
            self._snapshot = None
        with self._lock:
            if not self._changes:
                return None
            change = self._changes.popleft()
            self._bytes -= len(change.body)
        return change.kind, change.body


class FedIndex(Index):
    """An index whose changes are noted for subscribers.

    Records are noted before they are taken in, and drops after they are done: a drop can
    only be of what was taken in, so nobody is told of them in the wrong order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taking = threading.Lock()
        self._subscribers: list[Subscription] = []
        self._tombstones = 0

    def subscribe(self, wake: Callable[[], None]) -> Subscription:
        """Note changes for one more engine from now on.

        Parameters
        ----------
        wake
            Called when there is something new, on any thread. It must not wait.
        """
        subscription = Subscription(self, wake)
        with self._taking:
            self._subscribers = [*self._subscribers, subscription]
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop noting them."""
        with self._taking:
            self._subscribers = [one for one in self._subscribers if one is not subscription]

    def still(self) -> threading.Lock:
        """Held while no records are being taken in."""
        return self._taking

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys of which there is no record, nor one that is noted and just being taken in.

        So who tells an engine to forget them does not say it after it has told of a record.
        """
        if not keys:
            return []
        with self._taking:
            there = self.contains(keys)
        return [key for key, hit in zip(keys, there, strict=True) if not hit]

    def pages(self) -> Iterator[_Change]:
        """All records, in pages of one writer each."""
        for numbers, entries in self.rows(_PAGE):
            for number in dict.fromkeys(numbers.tolist()):
                mine = np.ascontiguousarray(entries[numbers == number])
                yield _Change(Kind.INSERT, self.writer_id(number) + mine.tobytes())

    def _note_change(self, kind: Kind, body: bytes) -> None:
        for subscriber in self._subscribers:
            subscriber.add(_Change(kind, body))

    def insert(self, writer: bytes, entries: Entries) -> int:
        """See :meth:`Index.insert`."""
        added = 0
        for first in range(0, entries.shape[0], _PAGE):
            part = np.ascontiguousarray(entries[first : first + _PAGE])
            with self._taking:
                if self._subscribers:
                    self._note_change(Kind.INSERT, writer + part.tobytes())
                if (part["kind"] == KIND_TOMBSTONE).any():
                    self._tombstones = 2
                added += super().insert(writer, part)
        return added

    def settled(self) -> None:
        """See :meth:`Index.settled`."""
        super().settled()
        if self._tombstones:
            # Two times each: what was declared dead before the first is forgotten then.
            self._tombstones -= 1
            self._note_change(Kind.SETTLED, b"")

    def remove_many(
        self, keys: Keys, writers: npt.ArrayLike, segments: npt.ArrayLike, slots: npt.ArrayLike
    ) -> npt.NDArray[np.bool_]:
        """See :meth:`Index.remove_many`."""
        done = super().remove_many(keys, writers, segments, slots)
        if self._subscribers and done.any():
            rows = self.as_keys(keys)[done]
            numbers = np.asarray(writers)[done]
            self._tell_removed(rows, numbers, np.asarray(segments)[done], np.asarray(slots)[done])
        return done

    def take_many(
        self, keys: Keys
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32], Entries]:
        """See :meth:`Index.take_many`."""
        done, numbers, entries = super().take_many(keys)
        if self._subscribers and entries.shape[0]:
            rows = np.ascontiguousarray(entries["key"]).view(np.uint8).reshape(-1, 32)
            self._tell_removed(rows, numbers, entries["segment"], entries["slot"])
        return done, numbers, entries

    def _tell_removed(
        self,
        keys: npt.NDArray[np.uint8],
        numbers: npt.NDArray[np.uint32],
        segments: npt.NDArray[np.uint32],
        slots: npt.NDArray[np.uint32],
    ) -> None:
        rows = np.zeros(keys.shape[0], dtype=SLOTS)
        rows["key"] = void(keys)
        owners = b"".join(self.writer_id(int(number)) for number in numbers)
        rows["writer"] = np.frombuffer(owners, dtype="V16")
        rows["segment"], rows["slot"] = segments, slots
        for first in range(0, rows.shape[0], _PAGE):
            self._note_change(Kind.REMOVE, rows[first : first + _PAGE].tobytes())

    def drop_dead(self, writer: bytes, segment: int, dead: npt.NDArray[np.bool_]) -> int:
        """See :meth:`Index.drop_dead`."""
        dropped = super().drop_dead(writer, segment, dead)
        if dropped:
            body = writer + segment.to_bytes(4, "little") + dead.astype(np.uint8).tobytes()
            self._note_change(Kind.DEAD, body)
        return dropped

    def drop_segment(self, writer: bytes, segment: int) -> int:
        """See :meth:`Index.drop_segment`."""
        dropped = super().drop_segment(writer, segment)
        self._note_change(Kind.GONE, writer + segment.to_bytes(4, "little"))
        return dropped


def take_in(index: Index, message: Message) -> bool:
    """Do to an engine's index what a mover tells; whether the message was about it.

    Raises
    ------
    FormatError
        If the message is not whole.
    """
    body = message.body
    writer = bytes(body[:_WRITER])
    segment = int.from_bytes(body[_WRITER : _WRITER + 4], "little")
    if message.kind == Kind.INSERT:
        index.insert(writer, message.table(ENTRY, _WRITER))
    elif message.kind == Kind.REMOVE:
        rows = message.table(SLOTS)
        numbers = [index.writer_number(owner) for owner in rows["writer"].tolist()]
        known = np.array([number is not None for number in numbers], dtype=bool)
        if known.any():
            keys = np.ascontiguousarray(rows["key"][known]).view(np.uint8).reshape(-1, 32)
            mine = [number for number in numbers if number is not None]
            index.remove_many(keys, mine, rows["segment"][known], rows["slot"][known])
    elif message.kind == Kind.DEAD:
        dead = message.table(np.dtype(np.uint8), _WRITER + 4).astype(bool)
        index.drop_dead(writer, segment, dead)
    elif message.kind == Kind.GONE:
        index.drop_segment(writer, segment)
    elif message.kind == Kind.FORGET:
        index.take_many(message.table(np.dtype((np.uint8, (32,)))))
    elif message.kind == Kind.SETTLED:
        index.settled()
    else:
        return False
    return True
