"""What other processes do on the target of a store is taken into its index."""

from __future__ import annotations

import threading
import time

from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.index import Index
from lifeboat_cache.store.counters import Counters
from lifeboat_cache.store.records import servable, untrusted
from lifeboat_cache.store.storage import Storage

__all__ = ["Follower"]


class Follower:
    """Follows the journals of other writers, and what janitors and purges take away.

    Parameters
    ----------
    storage, index, policy, counters
        Those of the store.
    integrity_key
        What records have to be guarded with, if there is one.
    stop
        Set when the store is being closed.
    """

    def __init__(
        self,
        storage: Storage,
        index: Index,
        policy: CodecPolicy,
        counters: Counters,
        integrity_key: bytes | None,
        stop: threading.Event,
    ) -> None:
        self._storage = storage
        self._index = index
        self._policy = policy
        self._counters = counters
        self._integrity_key = integrity_key
        self._stop = stop

    def recover(self) -> int:
        """Take in all that is there, and when it was used; returns how many blocks there are."""
        started = time.monotonic()
        self.follow(recovering=True)
        reader = self._storage.reader
        if reader is not None:
            self._index.apply_accesses(reader.accesses())
        blocks = len(self._index)
        self._counters.add(recovered_blocks=blocks)
        self._counters.add_seconds("recovery", time.monotonic() - started)
        return blocks

    def follow(self, *, recovering: bool) -> None:
        """Take in what other writers have journaled since the last time."""
        storage = self._storage
        reader = storage.reader
        if reader is None:
            return
        own = storage.writer  # read once: a lost one is replaced by whoever stores
        for page in reader.poll(own.writer if own is not None else None):
            writer = storage.writer
            if writer is not None and page.writer == writer.writer:
                continue  # started just now; what it stores is in the index already
            storage.beat()
            usable = servable(page.entries, self._integrity_key, exact=self._policy.exact)
            self._index.insert(page.writer, page.entries[usable])
            bad = page.bad + untrusted(page.entries, self._integrity_key)
            if bad:
                self._counters.add(bad_entries=bad)
            if self._stop.is_set():
                return
            if recovering:
                time.sleep(0)  # let go of the interpreter between pages
        if reader.complete:
            self._index.settled()

    def forget_reclaimed(self) -> None:
        """Take out of the index what a janitor or a purge has taken from storage."""
        reader = self._storage.reader
        if reader is None:
            return
        for owner, segment, dead in reader.poll_dead():
            self._index.drop_dead(owner, segment, dead)
        for owner, gone in reader.take_vanished():
            if gone is None:
                self._index.drop_writer(owner)
            else:
                self._index.drop_segment(owner, gone)
