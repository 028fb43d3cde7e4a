"""Moves pages between SGLang's memory and a block store while one of its threads waits.

SGLang wants an answer from the call itself, and a call must not take ten seconds: a
flush, a reset or a detach fails when its threads do not end within that time. Memory
that a system call may still touch must not be given back before, so a call cannot be
abandoned. It is cut into windows instead (:mod:`lifeboat_cache.integrations.sglang_windows`):
each is small enough for a disk that works, and when the time is up no further one is
started. What was not started is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.integrations.sglang_keys import families
from lifeboat_cache.integrations.sglang_windows import Kind, Windows, cut
from lifeboat_cache.interface import BlockBatch, BlockBuffers, Outcome, State, Store

__all__ = ["Mover", "Moves", "Pages"]

_log = logging.getLogger("lifeboat_cache")

#: No window is started when a call has taken this long, in seconds.
CALL_S = 5.0

#: Stores that failed are tried again so often, each time after this many seconds.
_RETRIES, _RETRY_S = 2, 0.05

#: How often it is said that calls are cut short, in seconds.
_SAY_AGAIN_S = 600.0

#: A pause may mend these: too much is queued, or the system reported an error.
_PASSING = (int(Outcome.BUSY), int(Outcome.FAILED))


@dataclass(frozen=True)
class Pages:
    """Pages of one pool to move.

    Attributes
    ----------
    hashes
        SGLang's hash of each page.
    keys
        Our key of each page.
    buffers
        The memory of each page.
    layout
        Tag of what a page holds.
    group
        Number of the pool.
    depth
        Tokens before the first page in its prefix, -1 if not known.
    tokens
        Tokens of a page in its prefix, 0 if not known.
    parent
        Tag of the page before the first one, 0 if not known.
    """

    hashes: Sequence[str]
    keys: Sequence[bytes]
    buffers: BlockBuffers
    layout: int
    group: int
    depth: int = -1
    tokens: int = 0
    parent: int = 0

    def to_load(self) -> BlockBatch:
        """The pages as the store wants them to load them: what they are to others is known."""
        return BlockBatch(self.keys, self.buffers, layout=self.layout)

    def to_store(self) -> BlockBatch:
        """The pages as the store wants them to keep them."""
        tags = families(self.hashes)
        known = self.depth >= 0 and self.tokens > 0
        ends = range(1, len(self.keys) + 1)
        return BlockBatch(
            self.keys,
            self.buffers,
            layout=self.layout,
            positions=[self.depth + self.tokens * end for end in ends] if known else None,
            groups=[self.group] * len(self.keys),
            families=tags,
            parents=[self.parent, *tags[:-1]] if tags else None,
        )


class Moves:
    """What has been moved. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = {kind: [0, 0, 0.0] for kind in ("store", "load")}
        # Of as many calls as matter to who looks now and then.
        self._calls: dict[str, deque[tuple[int, int, float]]] = {
            kind: deque(maxlen=4096) for kind in ("store", "load")
        }
        self._cut_short = 0

    def add(self, kind: Kind, pages: int, size: int, seconds: float) -> None:
        """Count a call: pages and bytes that it has moved, and how long it took."""
        if not pages:
            return
        with self._lock:
            for at, amount in enumerate((pages, size, seconds)):
                self._totals[kind][at] += amount
            self._calls[kind].append((pages, size, seconds))

    def cut_short(self) -> None:
        """Count a call that ran out of time before all its pages were tried."""
        with self._lock:
            self._cut_short += 1

    def take(self, kind: str) -> list[tuple[int, int, float]]:
        """Pages, bytes and seconds of each call since the last time."""
        with self._lock:
            calls = list(self._calls[kind])
            self._calls[kind].clear()
        return calls

    def totals(self) -> dict[str, float]:
        """All there is to know, by name."""
        with self._lock:
            found = {
                f"{kind}_{name}": value
                for kind, values in self._totals.items()
                for name, value in zip(("pages", "bytes", "seconds"), values, strict=True)
            }
            found["calls_cut_short"] = self._cut_short
        return found


class Mover:
    """Stores and loads pages, and waits for it.

    Parameters
    ----------
    call_s
        No window is started when a call has taken this many seconds.
    """

    def __init__(self, call_s: float = CALL_S) -> None:
        self.moves = Moves()
        self._call_s = call_s
        self._said = -_SAY_AGAIN_S
        self._idle = threading.Condition()
        self._under_way = 0

    def load(self, store: Store, pages: Pages) -> npt.NDArray[np.bool_]:
        """Load pages; bool ``(n,)``, which of them are there, verified."""
        return self._move("load", store, pages)

    def store(self, store: Store, pages: Pages) -> npt.NDArray[np.bool_]:
        """Store pages; bool ``(n,)``, which of them are stored now, or were before."""
        return self._move("store", store, pages)

    def _opened(self, store: Store, deadline: float) -> bool:
        """Wait until a store is open: what it is given before it would keep until then."""
        while store.state is State.OPENING and time.monotonic() < deadline:
            time.sleep(0.005)
        if store.state is State.OPENING:
            self._cut_short()
            return False
        return True

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no call is under way."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._under_way, timeout)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While memory of SGLang's may be touched; see :meth:`wait_idle`."""
        with self._idle:
            self._under_way += 1
        try:
            yield
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    def go(
        self, windows: Windows, first: int, last: int, sizes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Move blocks ``[first, last)`` of some that are moved window by window.

        Parameters
        ----------
        windows
            Of all the blocks; those before ``first`` were moved already.
        first, last
            Which of them.
        sizes
            int64 ``(last - first,)``: their bytes.

        Returns
        -------
        bool ``(last - first,)``
            Which of them are loaded, or stored, now or before.
        """
        began = time.monotonic()
        deadline = began + self._call_s
        if windows.kind == "store" and not self._opened(windows.store, deadline):
            return np.zeros(last - first, dtype=bool)
        if not windows.go(last, deadline):
            self._cut_short()
        outcomes = windows.outcomes[first:last]
        if windows.kind == "store":
            outcomes = self._again(windows, first, outcomes, sizes, deadline)
        good = outcomes == Outcome.OK
        seconds = time.monotonic() - began
        self.moves.add(windows.kind, int(good.sum()), int(sizes[good].sum()), seconds)
        done: npt.NDArray[np.bool_] = good | (outcomes == Outcome.PRESENT)
        return done

    def _move(self, kind: Kind, store: Store, pages: Pages) -> npt.NDArray[np.bool_]:
        with self.busy():
            batch = pages.to_load() if kind == "load" else pages.to_store()
            sizes = batch.buffers.sizes()
            windows = Windows(kind, store, cut(sizes), batch.window)
            try:
                return self.go(windows, 0, len(batch), sizes)
            finally:
                # Whatever happens, no system call may touch the memory after this returns.
                windows.wait()

    def _again(
        self,
        windows: Windows,
        begin: int,
        outcomes: npt.NDArray[np.uint8],
        sizes: npt.NDArray[np.int64],
        deadline: float,
    ) -> npt.NDArray[np.uint8]:
        """Try once more what may go better then: SGLang gives a whole node up for one page."""
        for _ in range(_RETRIES):
            passing = np.isin(outcomes, _PASSING)
            if not passing.any() or time.monotonic() >= deadline:
                break
            time.sleep(_RETRY_S)
            first = int(passing.argmax())
            last = len(outcomes) - int(passing[::-1].argmax())
            # Pages between that are stored already are answered from memory.
            batch = windows.batch_of(begin + first, begin + last)
            again = Windows("store", windows.store, cut(sizes[first:last]), batch.window)
            try:
                if not again.go(len(batch), deadline):
                    self._cut_short()
            finally:
                again.wait()
            outcomes[first:last] = np.where(
                passing[first:last], again.outcomes, outcomes[first:last]
            )
        return outcomes

    def _cut_short(self) -> None:
        self.moves.cut_short()
        now = time.monotonic()
        if now - self._said > _SAY_AGAIN_S:
            self._said = now
            _log.warning(
                "LifeboatCache: storage took more than %.0f s for one call of SGLang; the rest of "
                "its pages is computed or not kept: check the disk with `lifeboat-cache bench`",
                self._call_s,
            )
