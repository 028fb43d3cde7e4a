"""Which records go first: an order over all records of a target."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["choose_victims", "inherit_use"]

_I64 = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]

#: A chain of more blocks than 2 to this power is not a prefix of anything real.
_MOST_DOUBLINGS = 32


def inherit_use(used: npt.NDArray[Any], parents: _I64) -> npt.NDArray[Any]:
    """Times of last use that count for prefixes: a block is used whenever one behind it is.

    Parameters
    ----------
    used
        ``(n,)``, when each block was used itself.
    parents
        int64 ``(n,)``, the block before each one, -1 if there is none.

    Returns
    -------
    ``(n,)``
        When each block, or one behind it, was last used.
    """
    used = used.copy()
    above = parents.copy()
    # Each round, everybody has told those up to twice as far away as in the one before.
    for _ in range(_MOST_DOUBLINGS):
        below = np.flatnonzero(above >= 0)
        if not below.shape[0]:
            break
        np.maximum.at(used, above[below], used[below])
        next_above = above.copy()
        next_above[below] = above[above[below]]
        above = next_above
    return used


def choose_victims(
    *,
    units: _U64,
    parents: _U64,
    positions: npt.NDArray[Any],
    used: npt.NDArray[Any],
    sizes: _I64,
    spared: npt.NDArray[np.bool_],
    wanted: int,
) -> npt.NDArray[np.bool_]:
    """Choose records to evict: what was used least recently, whole prefixes from their tail.

    Parameters
    ----------
    units
        uint64 ``(n,)``: records with the same number go together; 0 = alone.
    parents
        uint64 ``(n,)``: the unit before each record's; 0 = unknown.
    positions
        ``(n,)``: ends in the prefix, in tokens.
    used
        ``(n,)``: when each record was used last.
    sizes
        int64 ``(n,)``: bytes that each record frees.
    spared
        bool ``(n,)``: records that must stay, and their units with them.
    wanted
        Bytes to free.

    Returns
    -------
    bool ``(n,)``
        The victims. They may hold less than was wanted.
    """
    count = units.shape[0]
    if not count or wanted <= 0:
        return np.zeros(count, dtype=np.bool_)
    # Records that are alone get numbers of their own.
    names, number = np.unique(units, return_inverse=True)
    number = number.astype(np.int64)
    alone = units == 0
    total = names.shape[0] + int(alone.sum())
    number[alone] = np.arange(names.shape[0], total)
    unit_used = np.zeros(total, dtype=np.int64)
    np.maximum.at(unit_used, number, used.astype(np.int64))
    unit_depth = np.zeros(total, dtype=np.int64)
    np.maximum.at(unit_depth, number, positions.astype(np.int64))
    unit_size = np.zeros(total, dtype=np.int64)
    np.add.at(unit_size, number, sizes)
    unit_spared = np.zeros(total, dtype=np.bool_)
    np.logical_or.at(unit_spared, number, spared)
    unit_parent = np.full(total, -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(names, parents), names.shape[0] - 1)
    known = (parents != 0) & (names[place] == parents) & (place != number)
    unit_parent[number[known]] = place[known]
    unit_used = inherit_use(unit_used, unit_parent)

    present = np.zeros(total, dtype=np.bool_)
    present[number] = True
    order = np.lexsort((-unit_depth, unit_used))
    order = order[present[order] & ~unit_spared[order]]
    freed = np.cumsum(unit_size[order])
    upto = int(np.searchsorted(freed, wanted)) + 1
    chosen = np.zeros(total, dtype=np.bool_)
    chosen[order[:upto]] = True
    chosen_rows: npt.NDArray[np.bool_] = chosen[number]
    return chosen_rows
