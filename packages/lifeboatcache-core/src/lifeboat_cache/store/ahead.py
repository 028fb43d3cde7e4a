"""Segments are opened when their blocks are found, before these are loaded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial

from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.index import Index
from lifeboat_cache.store.executor import Executor
from lifeboat_cache.store.storage import Storage

__all__ = ["AHEAD_LEAST", "OpeningAhead"]

#: The segments of every so many of the blocks found by a lookup are opened before they are
#: loaded: each takes several system calls, and each of these up to 5 ms beside an engine that
#: computes in Python. Not for lookups of fewer keys, nor again within so many seconds.
_AHEAD_EVERY = 32
AHEAD_LEAST = 8
_AHEAD_S = 10.0
_MOST_AHEAD = 4096


class OpeningAhead:
    """Has the segments of blocks opened that have been found.

    Parameters
    ----------
    storage, index, executor
        Those of the store.
    stop
        Set when the store is being closed.
    """

    def __init__(
        self, storage: Storage, index: Index, executor: Executor, stop: threading.Event
    ) -> None:
        self._storage = storage
        self._index = index
        self._executor = executor
        self._stop = stop
        self._ahead: dict[tuple[int, int], float] = {}  # segments opened ahead, and when

    def begin(self, keys: Sequence[bytes]) -> None:
        """Have the segments of blocks opened on an I/O thread: they will be loaded soon."""
        now = time.monotonic()
        last = self._ahead.get
        wanted = [
            place
            for place in self._index.segments_of(keys[::_AHEAD_EVERY])
            if now - last(place, -_AHEAD_S) > _AHEAD_S
        ]
        if wanted:
            if len(self._ahead) > _MOST_AHEAD:
                self._ahead = {}
            self._ahead.update(dict.fromkeys(wanted, now))
            self._executor.plan("load", partial(self._open, wanted))

    def _open(self, places: Sequence[tuple[int, int]]) -> None:
        for writer, segment in places:
            reader = self._storage.reader
            if reader is not None and not self._stop.is_set():
                # What is wrong is found out, and said, when blocks are loaded.
                with contextlib.suppress(OSError, LifeboatError):
                    reader.open_segment(self._index.writer_id(writer), segment)
