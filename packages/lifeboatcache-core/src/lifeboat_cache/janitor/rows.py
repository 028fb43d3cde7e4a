"""The records of one segment, as far as a janitor needs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.journal import Entries
from lifeboat_cache.targets.direct import ALIGNMENT

__all__ = ["ROW", "Bools", "Census", "Rows", "padded"]

#: 86 bytes a record. ``key`` holds the first 8 bytes; ``entry`` is the number of the
#: journal entry; ``marked`` is the monotonic time when the dead bit was first seen,
#: 0 = alive; ``born`` is when it was stored, as far as the clock of whoever stored it is to
#: be believed; ``done`` says that the space was given back, and ``erase`` that its bytes have
#: to go, however few they are.
ROW = np.dtype(
    [
        ("key", "<u8"),
        ("offset", "<u8"),
        ("family", "<u8"),
        ("parent", "<u8"),
        ("salt", "<u8"),
        ("marked", "<f8"),
        ("slot", "<u4"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("position", "<u4"),
        ("time", "<u4"),
        ("born", "<u4"),
        ("used", "<u4"),
        ("entry", "<u4"),
        ("codec", "u1"),
        ("done", "?"),
        ("erase", "?"),
    ]
)

#: By codec: records, bytes of their payloads, bytes that are stored.
Census = dict[int, tuple[int, int, int]]

Bools = npt.NDArray[np.bool_]

_LATEST = (1 << 32) - 1


def padded(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """What payloads of these lengths take in a segment."""
    whole: npt.NDArray[np.int64] = -(-lengths.astype(np.int64) // ALIGNMENT) * ALIGNMENT
    return whole


class Rows:
    """A growing array of rows, with a way from slots to rows."""

    __slots__ = ("_array", "_census", "_count", "_order")

    def __init__(self) -> None:
        self._census: tuple[tuple[int, int], Census] = ((0, 0), {})
        self._array: npt.NDArray[Any] = np.zeros(0, dtype=ROW)
        self._count = 0
        self._order: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def array(self) -> npt.NDArray[Any]:
        """``ROW`` array of all rows; changes to it stay."""
        return self._array[: self._count]

    def add(self, entries: Entries, numbers: npt.NDArray[np.int64], latest: int = _LATEST) -> None:
        """Take in journal entries of records of this segment.

        Parameters
        ----------
        entries
            ``ENTRY`` array ``(n,)``.
        numbers
            Their numbers in the journal.
        latest
            None of them was stored later than that, whatever they say.
        """
        count = entries.shape[0]
        if self._count + count > self._array.shape[0]:
            # Exactly, at first: most segments come in one piece, and stay.
            size = max(self._count + count, self._count * 3 // 2)
            grown = np.zeros(size, dtype=ROW)
            grown[: self._count] = self.array
            self._array = grown
        new = self._array[self._count : self._count + count]
        keys = np.ascontiguousarray(entries["key"]).view(np.uint8).reshape(count, 32)
        new["key"] = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0]
        for name, source in (
            ("offset", "offset"),
            ("family", "family"),
            ("parent", "parent"),
            ("salt", "salt"),
            ("slot", "slot"),
            ("stored", "stored_length"),
            ("raw", "raw_length"),
            ("codec", "codec"),
            ("position", "position"),
            ("time", "time"),
            ("used", "time"),
        ):
            new[name] = entries[source]
        new["born"] = np.minimum(entries["time"], np.uint32(latest))
        new["entry"] = numbers
        self._count += count
        self._order = None

    def at(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """int64 ``(n,)``: the row of each slot, -1 if there is none."""
        if not self._count:
            return np.full(slots.shape[0], -1, dtype=np.int64)
        if self._order is None:
            self._order = np.argsort(self.array["slot"], kind="stable")
        known = self.array["slot"][self._order]
        place = np.minimum(np.searchsorted(known, slots), self._count - 1)
        found: npt.NDArray[np.int64] = np.where(known[place] == slots, self._order[place], -1)
        return found

    def live(self) -> Bools:
        """Which rows are alive."""
        alive: Bools = self.array["marked"] == 0
        return alive

    def census(self) -> Census:
        """Live records by codec: their number, and bytes of their payloads raw and stored."""
        live = self.live()
        # Records are added and die, and nothing else.
        state = (self._count, int(np.count_nonzero(live)))
        if state != self._census[0]:
            mine = self.array[live]
            sums = [np.bincount(mine["codec"])]
            sums += [np.bincount(mine["codec"], mine[name]) for name in ("raw", "stored")]
            self._census = (
                state,
                {
                    codec: (int(sums[0][codec]), int(sums[1][codec]), int(sums[2][codec]))
                    for codec in np.flatnonzero(sums[0]).tolist()
                },
            )
        return self._census[1]

    def live_bytes(self) -> int:
        """What the live records take in the segment."""
        return int(padded(self.array["stored"][self.live()]).sum())

    def end(self) -> int:
        """Where the last record ends, 0 if there is none."""
        if not self._count:
            return 0
        rows = self.array
        return int((rows["offset"].astype(np.int64) + padded(rows["stored"])).max())
