"""Which objects of a bucket are to go, and what of them is worth moving to another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.janitor.eviction import choose_victims

__all__ = ["MOST_MOVED", "Choice", "Records", "choose_objects"]

#: An object of which more than this part would have to be moved stays where it is.
MOST_MOVED = 0.5

#: How often more is taken for victims, until enough objects hold little else.
_ROUNDS = 12

_I64 = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Records:
    """Live records of all objects, ``(n,)`` each.

    Attributes
    ----------
    object
        int64: which object each lies in.
    keys, units, parents
        uint64; see :func:`~lifeboat_cache.janitor.eviction.choose_victims`. Records with equal
        keys stand for each other.
    positions, used, sizes, spared
        See there.
    """

    object: _I64
    keys: npt.NDArray[np.uint64]
    units: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.uint64]
    positions: npt.NDArray[Any]
    used: npt.NDArray[Any]
    sizes: _I64
    spared: _Bools

    def victims(self, wanted: int) -> _Bools:
        """Those that go first, of so many bytes."""
        return choose_victims(
            units=self.units,
            parents=self.parents,
            positions=self.positions,
            used=self.used,
            sizes=self.sizes,
            spared=self.spared,
            wanted=wanted,
        )


@dataclass(frozen=True)
class Choice:
    """What is to be done.

    Attributes
    ----------
    objects
        bool ``(m,)``: those to delete.
    moved
        bool ``(n,)``: records of theirs that are to be moved first.
    freed
        Bytes that this gives back, less what is moved.
    """

    objects: _Bools
    moved: _Bools
    freed: int


def choose_objects(records: Records, object_bytes: _I64, fixed: _Bools, wanted: int) -> Choice:
    """Choose whole objects, so that what was used least recently goes and the rest stays.

    Records are put into the order in which a janitor evicts them. Objects are taken that hold
    mostly what goes first; what else is in them is moved. If there are too few of those, more
    counts as to go.

    Parameters
    ----------
    records
        All live records. Objects are numbered from the oldest to the youngest.
    object_bytes
        int64 ``(m,)``: what deleting each object gives back.
    fixed
        bool ``(m,)``: objects that must stay.
    wanted
        Bytes to give back. The choice may hold less, if there is not enough.
    """
    count = object_bytes.shape[0]
    best = Choice(np.zeros(count, dtype=np.bool_), np.zeros(records.sizes.shape[0], np.bool_), 0)
    if wanted <= 0 or not count:
        return best
    everything = int(records.sizes.sum())
    aim = wanted
    for _ in range(_ROUNDS):
        # Of the last object that is taken, not all is needed to go; but what would be next in
        # line is not worth moving.
        more = min(aim + int(object_bytes.max()), max(aim, everything // 2))
        victims = records.victims(aim), records.victims(more)
        best = _choose(records, object_bytes, fixed, *victims, wanted)
        if best.freed >= wanted or aim >= everything:
            return best
        aim = 2 * aim
    return best


def _choose(
    records: Records,
    object_bytes: _I64,
    fixed: _Bools,
    victims: _Bools,
    next_victims: _Bools,
    wanted: int,
) -> Choice:
    count = object_bytes.shape[0]
    kept = np.zeros(count, dtype=np.int64)
    np.add.at(kept, records.object[~victims], records.sizes[~victims])
    last_use = np.zeros(count, dtype=np.int64)
    np.maximum.at(last_use, records.object, records.used.astype(np.int64))
    share = kept / np.maximum(object_bytes, 1)
    # What is least to move for what it gives back; among equals, what was used least recently.
    order = np.lexsort((last_use, share))
    order = order[~fixed[order] & (share[order] <= MOST_MOVED)]
    gains = np.cumsum((object_bytes - kept)[order])
    upto = int(np.searchsorted(gains, wanted)) + 1
    objects = np.zeros(count, dtype=np.bool_)
    objects[order[:upto]] = True
    moved = _without_doubles(records, objects, objects[records.object] & ~next_victims)
    freed = int(object_bytes[objects].sum()) - int(records.sizes[moved].sum())
    return Choice(objects, moved, freed)


def _without_doubles(records: Records, objects: _Bools, moved: _Bools) -> _Bools:
    """Leave out what another object keeps, and what is moved already.

    Only a younger object counts: should two janitors be at work, neither drops a record for the
    sake of the one that the other drops.
    """
    chosen = np.flatnonzero(moved)
    others = np.flatnonzero(~objects[records.object])
    order = np.argsort(records.keys[others], kind="stable")
    keys, first = np.unique(records.keys[others][order], return_index=True)
    if keys.shape[0]:
        youngest = np.maximum.reduceat(records.object[others][order], first)
        place = np.minimum(np.searchsorted(keys, records.keys[chosen]), keys.shape[0] - 1)
        stays = (keys[place] == records.keys[chosen]) & (youngest[place] > records.object[chosen])
        chosen = chosen[~stays]
    _, first = np.unique(records.keys[chosen], return_index=True)
    out = np.zeros(moved.shape[0], dtype=np.bool_)
    out[chosen[first]] = True
    return out
