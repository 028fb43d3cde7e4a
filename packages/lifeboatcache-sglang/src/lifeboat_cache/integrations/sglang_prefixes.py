"""How far a prefix can be restored, by what is there of each pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Hits", "longest_run", "trailing_hits"]

_Flags = npt.NDArray[np.bool_]


def longest_run(there: _Flags) -> int:
    """How many of the first entries are true without a gap."""
    missing = np.flatnonzero(~there)
    return int(missing[0]) if missing.shape[0] else int(there.shape[0])


def trailing_hits(there: _Flags, window: int) -> _Flags:
    """Whether the last ``window`` pages up to each page are all there.

    Before the window has filled, all pages up to it. Bool ``(n,)``, as ``there``.
    """
    count = there.shape[0]
    missing = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(~there, out=missing[1:])
    ends = np.arange(1, count + 1)
    begins = np.maximum(ends - window, 0)
    good: _Flags = missing[ends] == missing[begins]
    return good


class Hits:
    """The prefixes that every pool can restore.

    Parameters
    ----------
    run
        Pages of KV that are there without a gap.
    """

    def __init__(self, run: int) -> None:
        self._run = run
        self._good = np.ones(run + 1, dtype=bool)
        self._good[0] = False
        self._boundaries: dict[Any, int] = {}

    def add(self, name: Any, hits: tuple[int, _Flags | None]) -> None:
        """Take in a pool: its own boundary, and the prefixes it can restore."""
        boundary, prefixes = hits
        if boundary:
            self._boundaries[name] = boundary
        if prefixes is not None:
            self._good &= prefixes

    @property
    def prefixes(self) -> list[int]:
        """Lengths of all restorable prefixes, in pages, growing."""
        return [int(length) for length in np.flatnonzero(self._good)]

    @property
    def longest(self) -> int:
        """Length of the longest restorable prefix."""
        lengths = self.prefixes
        return lengths[-1] if lengths else 0

    def by_pool(self, kv: Any) -> dict[Any, int]:
        """The boundary of every pool that has one, the KV's under ``kv``."""
        return {**({kv: self._run} if self._run else {}), **self._boundaries}
