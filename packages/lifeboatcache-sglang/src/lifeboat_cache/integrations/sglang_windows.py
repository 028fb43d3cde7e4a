"""Blocks on their way to or from storage, in windows of which a few are under way at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.interface import BlockBatch, Job, Outcome, Store

__all__ = ["WINDOW_BYTES", "Kind", "Windows", "cut"]

#: Bytes of a window, about, and how many are under way at a time. A window is planned in one
#: go, so that those under way are read in the order of their places, and there are enough of
#: them to keep the disk busy while the oldest is waited for.
WINDOW_BYTES = 48 << 20
_WINDOWS = 4

Kind = Literal["store", "load"]


class Windows:
    """Consecutive blocks that are stored or loaded window by window. Not thread-safe.

    Parameters
    ----------
    kind, store
        What is done with them, and where.
    bounds
        ``[first, last)`` of each window.
    batch_of
        The blocks of a window; asked for when it is its turn.

    Attributes
    ----------
    kind, store, batch_of
        As given.
    outcomes
        uint8, one per block: ``CANCELLED`` as long as its window is not waited for.
    """

    def __init__(
        self,
        kind: Kind,
        store: Store,
        bounds: Sequence[tuple[int, int]],
        batch_of: Callable[[int, int], BlockBatch],
    ) -> None:
        self.kind: Kind = kind
        self.store = store
        self.batch_of = batch_of
        self._run = store.store if kind == "store" else store.load
        self._left = deque(bounds)
        self._under_way: deque[tuple[int, int, Job]] = deque()
        self._done = 0
        count = bounds[-1][1] if bounds else 0
        self.outcomes: npt.NDArray[np.uint8] = np.full(count, Outcome.CANCELLED, dtype=np.uint8)

    def go(self, end: int, deadline: float) -> bool:
        """Go on until the blocks before ``end`` are done, or it is no use.

        Windows behind them may be under way then.

        Parameters
        ----------
        end
            Blocks from the first on.
        deadline
            Of the monotonic clock: no window but the first is started later.

        Returns
        -------
        bool
            Whether there was time for all that is of use.
        """
        started = bool(self._under_way)
        while self._done < end:
            while self._left and len(self._under_way) < _WINDOWS:
                if started and time.monotonic() >= deadline:
                    break
                started = True
                self._start()
            if not self._under_way:
                return not self._left
            self._take()
        return True

    def stop(self) -> None:
        """Start no further window."""
        self._left.clear()

    def wait(self) -> None:
        """Wait for what is under way: no system call touches the memory afterwards."""
        while self._under_way:
            self._take()

    def _start(self) -> None:
        first, last = self._left.popleft()
        try:
            job = self._run(self.batch_of(first, last), on_done=_nothing)
        except LifeboatError:
            self.stop()  # closed meanwhile
        else:
            self._under_way.append((first, last, job))

    def _take(self) -> None:
        """Wait for the oldest window."""
        first, last, job = self._under_way[0]
        job.wait()
        self._under_way.popleft()
        self.outcomes[first:last] = job.outcomes
        self._done = last
        # Pages behind one that is missing are of no use to the engine.
        if self.kind == "load" and not bool((job.outcomes == Outcome.OK).all()):
            self.stop()


def _nothing(job: Job) -> None:
    """Of jobs that are waited for; without a callback the store would hand them out, too."""


def cut(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut blocks into consecutive windows of about :data:`WINDOW_BYTES`."""
    if not sizes.shape[0]:
        return []
    window = (np.cumsum(sizes) - sizes) // WINDOW_BYTES
    starts = np.flatnonzero(np.diff(window, prepend=-1)).tolist()
    return list(zip(starts, [*starts[1:], int(sizes.shape[0])], strict=True))
