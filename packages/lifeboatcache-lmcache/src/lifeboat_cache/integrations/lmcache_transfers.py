"""Stores and loads of LMCache's objects, from the task to its result."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult

from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.integrations.lmcache_batches import (
    load_batch,
    store_batch,
    whole_objects,
    with_names,
)
from lifeboat_cache.integrations.lmcache_layout import ObjectLayout
from lifeboat_cache.integrations.lmcache_prefixes import Prefixes
from lifeboat_cache.integrations.lmcache_space import ModelSpace
from lifeboat_cache.integrations.lmcache_spaces import Spaces
from lifeboat_cache.integrations.lmcache_stock import Stock
from lifeboat_cache.integrations.lmcache_tasks import Results, TaskParts
from lifeboat_cache.interface import Job, Outcome

__all__ = ["Loads", "Stores"]

_log = logging.getLogger("lifeboat_cache")

#: What is wrong with objects, not with us. It is said once.
_REFUSED = (StoreClosedError, NotImplementedError, ValueError)


class _Said:
    """Logs what happens again and again once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, what: str) -> None:
        if what not in self._said and len(self._said) < 100:
            self._said.add(what)
            _log.warning("LifeboatCache: %s", what)


class Stores:
    """Tasks that store objects.

    Parameters
    ----------
    spaces, stock, prefixes
        Of the adapter.
    results
        Takes the answers.
    """

    def __init__(
        self, spaces: Spaces, stock: Stock, prefixes: Prefixes, results: Results[L2StoreResult]
    ) -> None:
        self._spaces, self._stock, self._prefixes = spaces, stock, prefixes
        self._results = results
        self._say = _Said()

    def submit(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to store objects, which may be of different sizes."""
        task = self._results.begin()
        try:
            parts = self._spaces.rows(keys)
            whole = TaskParts(len(parts), partial(self._ended, task))
            for space, rows in parts:
                self._start(space, [keys[n] for n in rows], [objects[n] for n in rows], whole)
        except Exception:
            # LMCache waits for a result of every task.
            _log.exception("LifeboatCache: a store could not be started; please report this")
            self._ended(task, False, 0)
        return task

    def _ended(self, task: int, good: bool, moved: int) -> None:
        self._results.end(task, L2StoreResult(good, moved))

    def _start(
        self,
        space: ModelSpace | None,
        keys: list[ObjectKey],
        objects: list[Any],
        whole: TaskParts,
    ) -> None:
        try:
            if space is None:
                whole.part(False, 0)
                return
            layouts = space.layouts_of(objects)
            batch = store_batch(space, keys, layouts, objects, self._prefixes)
            known = self._stock.known
            named = [n for n, key in enumerate(keys) if known.layout(key) is not layouts[n]]
            if named:
                batch = with_names(batch, [keys[n] for n in named], [layouts[n] for n in named])
            space.store.store(batch, on_done=partial(self._finish, space, keys, layouts, whole))
        except _REFUSED as exc:
            self._say(f"objects are not kept: {exc}")
            whole.part(False, 0)
        except Exception:  # the memory of other parts is in use until these have ended
            _log.exception("LifeboatCache: a store could not be started; please report this")
            whole.part(False, 0)

    def _finish(
        self,
        space: ModelSpace,
        keys: list[ObjectKey],
        layouts: list[ObjectLayout],
        whole: TaskParts,
        job: Job,
    ) -> None:
        """On an I/O thread."""
        good: list[bool] = []
        try:
            good = whole_objects(job, layouts, present=True)
            there = [n for n, fine in enumerate(good) if fine]
            self._stock.add([keys[n] for n in there], [layouts[n] for n in there])
            if not all(good):
                _say_refused(space, job)
        finally:
            # LMCache never asks for a failed task again, but drops what it was told is stored.
            whole.part(bool(good) and all(good), job.bytes_moved)


def _say_refused(space: ModelSpace, job: Job) -> None:
    outcomes = {Outcome(int(outcome)).name for outcome in set(job.outcomes.tolist())}
    bad = sorted(outcomes - {"OK", "PRESENT"})
    _log.debug("LifeboatCache: a store of %s ended as %s", space.model_name, ", ".join(bad))


class Loads:
    """Tasks that load objects.

    Parameters
    ----------
    spaces, stock
        Of the adapter.
    results
        Takes the answers.
    """

    def __init__(self, spaces: Spaces, stock: Stock, results: Results[Bitmap]) -> None:
        self._spaces, self._stock = spaces, stock
        self._results = results
        self._lock = threading.Lock()
        self._say = _Said()

    def submit(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to load into the memory of ``objects``."""
        task = self._results.begin()
        answer = Bitmap(len(keys))
        try:
            parts = self._spaces.rows(keys)
            whole = TaskParts(len(parts), lambda _good, _moved: self._results.end(task, answer))
            for space, rows in parts:
                self._start(space, keys, objects, rows, answer, whole)
        except Exception:
            _log.exception("LifeboatCache: a load could not be started; please report this")
            self._results.end(task, Bitmap(len(keys)))
        return task

    def _start(
        self,
        space: ModelSpace | None,
        keys: list[ObjectKey],
        objects: list[Any],
        rows: list[int],
        answer: Bitmap,
        whole: TaskParts,
    ) -> None:
        try:
            if space is None:
                whole.part(False, 0)
                return
            mine, memory = [keys[n] for n in rows], [objects[n] for n in rows]
            layouts = space.layouts_of(memory)
            space.store.load(
                load_batch(space, mine, layouts, memory),
                on_done=partial(self._finish, space, mine, layouts, rows, answer, whole),
            )
        except _REFUSED as exc:
            self._say(f"objects are not loaded: {exc}")
            whole.part(False, 0)
        except Exception:  # the memory of other parts is in use until these have ended
            _log.exception("LifeboatCache: a load could not be started; please report this")
            whole.part(False, 0)

    def _finish(
        self,
        space: ModelSpace,
        keys: list[ObjectKey],
        layouts: list[ObjectLayout],
        rows: list[int],
        answer: Bitmap,
        whole: TaskParts,
        job: Job,
    ) -> None:
        """On an I/O thread."""
        good: list[bool] = []
        try:
            good = whole_objects(job, layouts, present=False)
            if not self._spaces.current(space):
                good = [False] * len(good)  # weights have changed while it was read
            with self._lock:  # a bitmap of several parts is written by several threads
                for row, fine in zip(rows, good, strict=True):
                    if fine:
                        answer.set(row)
            if not all(good):
                # Before it is answered: who asks again finds what is true.
                self._stock.remove_missing(space, keys, layouts, good)
        finally:
            whole.part(bool(good) and all(good), job.bytes_moved)
        fine_rows = [n for n, fine in enumerate(good) if fine]
        space.served([keys[n] for n in fine_rows], [layouts[n] for n in fine_rows])
