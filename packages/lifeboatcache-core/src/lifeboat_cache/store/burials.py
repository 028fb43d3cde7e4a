"""Deletions on their way to storage."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.journal import Entries

__all__ = ["Burials", "Told"]

#: Told whether the tombstones of a deletion are on storage.
Told = Callable[[bool], None]

#: So many deletions that failed are tried again; what was deleted then may be found once more.
_MOST = 4096


class Burials:
    """Deletions until their tombstones are on storage.

    Parameters
    ----------
    idle
        Notified when none is under way any more; its lock guards this, too.
    bury
        Writes the tombstones of records, given the numbers of their writers; whether it could.
    """

    def __init__(
        self,
        idle: threading.Condition,
        bury: Callable[[npt.NDArray[np.uint32], Entries], bool],
    ) -> None:
        self._idle = idle
        self._bury = bury
        self._left: dict[int, tuple[npt.NDArray[np.uint32], Entries, Told | None]] = {}
        self._number = 0
        self.under_way = 0

    def add(
        self, owners: npt.NDArray[np.uint32], records: Entries, told: Told | None = None
    ) -> int:
        """Note a deletion; its number, which :meth:`run` is to be called with. Under the lock.

        ``told`` is called after each attempt with whether it has succeeded.
        """
        self._number += 1
        self._left[self._number] = owners, records, told
        self.under_way += 1
        return self._number

    def again(self) -> list[int]:
        """Numbers of the deletions that failed: each to be run again."""
        with self._idle:
            if self.under_way:
                return []
            numbers = list(self._left)
            for number in numbers[:-_MOST]:
                del self._left[number]
            self.under_way = len(self._left)
            return list(self._left)

    def run(self, number: int) -> None:
        """Write the tombstones of a deletion."""
        done = False
        owners, records, told = self._left[number]
        try:
            done = self._bury(owners, records)
        finally:
            if told is not None:
                told(done)
            with self._idle:
                self.under_way -= 1
                if done:
                    del self._left[number]
                self._idle.notify_all()

    def keys(self) -> list[bytes]:
        """Keys whose records may still be on storage."""
        with self._idle:
            left = [records["key"] for _, records, _ in self._left.values()]
        return [bytes(key) for keys in left for key in keys]
