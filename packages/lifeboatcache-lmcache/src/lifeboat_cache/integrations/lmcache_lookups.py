"""Lookups of LMCache's: answered from memory, and asked again while journals are read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from lifeboat_cache.integrations.lmcache_layout import ObjectLayout
from lifeboat_cache.integrations.lmcache_locks import Locks
from lifeboat_cache.integrations.lmcache_prefixes import Prefixes
from lifeboat_cache.integrations.lmcache_space import ModelSpace
from lifeboat_cache.integrations.lmcache_spaces import Spaces
from lifeboat_cache.integrations.lmcache_stock import Stock
from lifeboat_cache.integrations.lmcache_tasks import Lookups, Results, Waiting
from lifeboat_cache.interface import Lookup

__all__ = ["LookupDesk"]

_log = logging.getLogger("lifeboat_cache")

#: How often lookups ask again that came while journals are being read, in seconds.
_RETRY_S = 0.02


class LookupDesk:
    """Finds out which objects are there in the layout that is expected, and locks them.

    Parameters
    ----------
    spaces, stock, locks, prefixes
        Of the adapter.
    results
        Takes the answers.
    wait_s
        So long a lookup is asked again that cannot be answered yet.
    """

    def __init__(
        self,
        spaces: Spaces,
        stock: Stock,
        locks: Locks,
        prefixes: Prefixes,
        results: Results[Bitmap],
        wait_s: float,
    ) -> None:
        self._spaces, self._stock, self._locks = spaces, stock, locks
        self._prefixes = prefixes
        self._results = results
        self._wait_s = wait_s
        self._waiting = Lookups()
        self._wake = threading.Event()
        self._stop = threading.Event()

    def submit(self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> int:
        """Begin a lookup; returns the number of its task."""
        task = self._results.begin()
        keys = list(keys)
        try:
            self._prefixes.seen(keys)
            ask = partial(self._look_up, keys, dict(descs))
            answer = ask(False)
            if answer is None:
                until = time.monotonic() + self._wait_s
                self._waiting.add(Waiting(task, len(keys), until, ask))
                self._wake.set()
            else:
                self._results.end(task, answer)
        except Exception:
            # LMCache waits for a result of every task.
            _log.exception("LifeboatCache: a lookup failed; please report this")
            self._results.end(task, Bitmap(len(keys)))
        return task

    def _look_up(
        self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc], final: bool
    ) -> Bitmap | None:
        """Look up and lock; ``None`` if it is not known yet, unless it has to be final."""
        locked: list[tuple[int, ModelSpace, list[bytes]]] = []
        found: list[tuple[ObjectKey, ObjectLayout]] = []
        retry = False
        for space, rows in self._spaces.rows(keys):
            if space is None:
                continue
            expected = self._expected(space, keys, rows, descs)
            wanted = [n for n in rows if n in expected]
            layouts = [expected[n] for n in wanted]
            blocks = space.blocks([keys[n] for n in wanted], layouts)
            answers = space.store.lookup([one for parts in blocks for one in parts], pin=True)
            at = 0
            for number, layout, parts in zip(wanted, layouts, blocks, strict=True):
                states = answers[at : at + len(parts)].tolist()
                at += len(parts)
                if all(state == Lookup.HIT for state in states):
                    locked.append((number, space, parts))
                    found.append((keys[number], layout))
                    continue
                retry = retry or Lookup.RETRY in states
                space.store.unpin(
                    [p for p, state in zip(parts, states, strict=True) if state == Lookup.HIT]
                )
        if retry and not final:
            for _, space, parts in locked:
                space.store.unpin(parts)
            return None
        answer = Bitmap(len(keys))
        for number, _, _ in locked:
            answer.set(number)
        self._locks.add((keys[number], space, parts) for number, space, parts in locked)
        for space in {id(space): space for _, space, _ in locked}.values():
            space.store.touch([p for _, other, parts in locked if other is space for p in parts])
        if found:
            self._stock.add(*map(list, zip(*found, strict=True)))  # others' stores, too
            self._stock.used([key for key, _ in found])
        return answer

    def _expected(
        self,
        space: ModelSpace,
        keys: Sequence[ObjectKey],
        rows: Sequence[int],
        descs: dict[int, MemoryLayoutDesc],
    ) -> dict[int, ObjectLayout]:
        """The layout that is expected of each object; where nothing is said, that of the store."""
        by_group: dict[int, ObjectLayout | None] = {}
        for group, desc in descs.items():
            try:
                by_group[group] = space.layouts.of(desc.shapes, desc.dtypes)
            except ValueError:
                by_group[group] = None
        expected: dict[int, ObjectLayout] = {}
        for number in rows:
            key = keys[number]
            if key.object_group_id in by_group:
                layout = by_group[key.object_group_id]
            else:
                layout = self._stock.known.layout(key)
            if layout is not None:
                expected[number] = layout
        for layout in {layout.signature: layout for layout in expected.values()}.values():
            space.describe(layout)
        return expected

    def run(self) -> None:
        """Answer lookups that came while journals were being read, until :meth:`stop`."""
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            while self._waiting and not self._stop.is_set():
                for waiting in self._waiting.take():
                    try:
                        answer = waiting.ask(time.monotonic() >= waiting.deadline)
                    except Exception:
                        _log.exception("LifeboatCache: a lookup failed; please report this")
                        answer = Bitmap(waiting.keys)
                    if answer is None:
                        self._waiting.add(waiting)
                    else:
                        self._results.end(waiting.task, answer)
                self._stop.wait(_RETRY_S)

    def stop(self) -> None:
        """Let :meth:`run` return."""
        self._stop.set()
        self._wake.set()
