"""Loads: blocks are found, read, and taken out of the index where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.index import Index
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.coding import Codings
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.store.load_plan import LoadPlan, Places
from lifeboat_cache.store.records import tombstones_at
from lifeboat_cache.store.storage import Storage
from lifeboat_cache.targets.base import OpenFile, Place

__all__ = ["Loading"]

_log = logging.getLogger("lifeboat_cache")

#: What says nothing about a record that was to be read.
_UNREAD = (Outcome.CANCELLED, Outcome.TIMEOUT, Outcome.UNAVAILABLE)


class Loading:
    """Plans the loads of a store, and deals with what has come of them.

    Parameters
    ----------
    storage, index, codings
        Those of the store.
    page_cache
        Whether what is read may be in the page cache: then it is taken from there.
    """

    def __init__(
        self, storage: Storage, index: Index, codings: Codings, *, page_cache: bool
    ) -> None:
        self._storage = storage
        self._index = index
        self._codings = codings
        self._page_cache = page_cache

    def plan(
        self,
        opened: dict[tuple[bytes, int], OpenFile],
        batch: BlockBatch,
        outcomes: npt.NDArray[np.uint8],
        part_bytes: int,
    ) -> Iterator[list[IoTask]]:
        """Find the records and cut them into tasks, in the order of their places."""
        reader, binding = self._storage.reader, self._storage.binding
        if reader is None or binding is None:
            raise RuntimeError("a load was planned before the namespace was known")
        keys = self._index.as_keys(batch.keys)
        plan = LoadPlan(
            batch,
            keys,
            self._index,
            reader,
            binding,
            opened,
            self._codings,
            cached=self._page_cache,
        )
        if plan.lost.shape[0]:
            lost, places = plan.lost, plan.lost_places
            # Even the head of a file may be seen in pieces.
            wrong = np.flatnonzero(plan.outcomes[lost] == Outcome.CORRUPT)
            doubted = self._doubted(places, wrong)
            plan.outcomes[lost[doubted]] = Outcome.MISSING
            self._forget(places[~doubted], plan.outcomes[lost[~doubted]])
        outcomes[:] = plan.outcomes
        yield from plan.tasks(part_bytes)

    def finish(self, tasks: list[IoTask]) -> None:
        """Deal with what was not read, or is not what it should be."""
        for task in tasks:
            if self._storage.reader is not None:
                self._storage.reader.settle(task)
            self._believe(task)
            if task.whole:
                continue
            bad = np.flatnonzero(task.outcomes != Outcome.OK)
            places: Places = task.detail[bad]
            outcomes = task.outcomes[bad]
            wrong = np.flatnonzero(outcomes == Outcome.CORRUPT)
            short = np.flatnonzero(outcomes == Outcome.MISSING)
            reader = self._storage.reader
            if wrong.shape[0] and reader is not None:
                dead = reader.declared_dead(
                    [
                        Place(self._index.writer_id(writer), segment, 0, 0)
                        for writer, segment, _ in places[wrong].rows()
                    ],
                    [slot for _, _, slot in places[wrong].rows()],
                )
                outcomes[wrong[np.array(dead, dtype=bool)]] = Outcome.MISSING
                wrong = wrong[~np.array(dead, dtype=bool)]
            doubted = self._doubted(places, np.concatenate((wrong, short)))
            outcomes[doubted] = Outcome.MISSING
            task.outcomes[bad] = outcomes
            lost = np.flatnonzero(~np.isin(outcomes, _UNREAD) & ~doubted)
            self._forget(places[lost], outcomes[lost])

    def _believe(self, task: IoTask) -> None:
        """Doubt no more what has turned out right."""
        reader = self._storage.reader
        if reader is None or not reader.doubts:
            return
        good: Places = task.detail[np.flatnonzero(task.outcomes == Outcome.OK)]
        for writer, segment, slot in good.rows():
            reader.believe(self._index.writer_id(writer), segment, slot)

    def _doubted(self, places: Places, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of some records may only not be seen yet, as another host has just written them."""
        doubted = np.zeros(places.slots.shape[0], dtype=bool)
        reader = self._storage.reader
        if reader is not None:
            for row, (writer, segment, slot) in zip(
                rows.tolist(), places[rows].rows(), strict=True
            ):
                doubted[row] = reader.doubtful(self._index.writer_id(writer), segment, slot)
        return doubted

    def _forget(self, places: Places, outcomes: npt.NDArray[np.uint8]) -> None:
        """Take records that could not be read out of the index; bury those that are wrong.

        A read that failed is a miss from now on: the block is computed and stored again,
        instead of failing for every request to come.
        """
        self._index.remove_many(places.keys, places.writers, places.segments, places.slots)
        corrupt = np.flatnonzero(outcomes == Outcome.CORRUPT)
        if not corrupt.shape[0]:
            return
        _log.warning(
            "LifeboatCache: %d corrupt block(s) at %s; dropped, they will be recomputed",
            corrupt.shape[0],
            self._storage.location,
        )
        wrong = places[corrupt]
        owners = [self._index.writer_id(number) for number in wrong.writers.tolist()]
        self._storage.bury(tombstones_at(wrong.keys, owners, wrong.segments, wrong.slots))
