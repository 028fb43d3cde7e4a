"""Moves the KV pages of one of SGLang's operations ahead of the calls that ask for them.

SGLang transfers an operation, a prefetch or a backup, in calls for 128 pages each and waits for
every one. Of pages of one token a call is 16 MiB, and the disk would be idle at its begin and at
its end. The memory of all pages of an operation is the operation's until the function that makes
the calls returns: the rest of a prefetch is released, and a backup is unlocked, by what follows.
So further windows are started while a call waits for its own, and none of them outlives that
function, which is wrapped here.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.integrations.sglang_moves import Mover, Pages
from lifeboat_cache.integrations.sglang_windows import WINDOW_BYTES, Kind, Windows
from lifeboat_cache.interface import BlockBatch, Store

__all__ = ["Ahead", "Operations", "install"]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_ahead"

_I64 = npt.NDArray[np.int64]


class Ahead:
    """The KV pages of one operation, and those of its windows that are under way.

    Parameters
    ----------
    mover
        Counts what is moved, and bounds the time of a call.
    kind, store
        What is done with the pages, and where.
    hashes, pages
        Of all pages of the operation: SGLang's hashes, and their numbers in the pool.
    page_bytes
        Of each page.
    step
        Pages of a call.
    pages_of
        Some of the pages, ``[first, last)``, as they are moved.
    """

    def __init__(
        self,
        mover: Mover,
        kind: Kind,
        store: Store,
        hashes: Sequence[str],
        pages: _I64,
        page_bytes: int,
        step: int,
        pages_of: Callable[[int, int], Pages],
    ) -> None:
        self._mover = mover
        self._hashes, self._pages = hashes, pages
        self._page_bytes = page_bytes
        self._pages_of = pages_of
        self._at = 0
        count = len(hashes)
        # A window ends where a call does, or the call would wait for more than it asks for.
        size = max(1, min(step, WINDOW_BYTES // page_bytes))
        bounds = [
            (first, min(first + size, begin + step, count))
            for begin in range(0, count, step)
            for first in range(begin, min(begin + step, count), size)
        ]
        self._windows = Windows(kind, store, bounds, self._batch)
        self._busy = ExitStack()
        self._busy.enter_context(mover.busy())

    @property
    def store(self) -> Store:
        """Where to or from the pages are moved."""
        return self._windows.store

    def _batch(self, first: int, last: int) -> BlockBatch:
        pages = self._pages_of(first, last)
        return pages.to_load() if self._windows.kind == "load" else pages.to_store()

    def take(self, hashes: Sequence[str], pages: _I64) -> npt.NDArray[np.bool_] | None:
        """What a call asks for; ``None`` if that is not what comes next in the operation.

        bool ``(n,)``: which pages are loaded, or stored, now or before.
        """
        first, last = self._at, self._at + len(hashes)
        if list(self._hashes[first:last]) != list(hashes) or not np.array_equal(
            self._pages[first:last], pages
        ):
            self.close()
            return None
        self._at = last
        sizes = np.full(len(hashes), self._page_bytes, dtype=np.int64)
        return self._mover.go(self._windows, first, last, sizes)

    def close(self) -> None:
        """Wait for what is under way; nothing touches the memory of the pages afterwards."""
        with self._busy:
            self._windows.stop()
            self._windows.wait()


class Operations:
    """The operations of SGLang's threads; each of them works on one at a time."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def under_way(self, operation: Any) -> Iterator[None]:
        """An operation whose calls follow, on this thread."""
        self._local.operation, self._local.ahead = operation, None
        try:
            yield
        finally:
            ahead: Ahead | None = self._local.ahead
            self._local.operation = self._local.ahead = None
            if ahead is not None:
                ahead.close()

    def take(
        self,
        hashes: Sequence[str],
        pages: _I64,
        begin: Callable[[Any, int], Ahead | None],
    ) -> tuple[Ahead, npt.NDArray[np.bool_]] | None:
        """What a call of an operation asks for; ``None``: it has to see to that itself.

        Parameters
        ----------
        hashes, pages
            What the call asks for.
        begin
            Called with an operation that has more pages than its first call, and how many
            that one asks for.
        """
        local = self._local
        operation = getattr(local, "operation", None)
        if operation is None:
            return None
        if local.ahead is None:
            local.ahead = begin(operation, len(hashes))
        ahead: Ahead | None = local.ahead
        found = None if ahead is None else ahead.take(hashes, pages)
        if ahead is None or found is None:
            local.operation = local.ahead = None  # from here on call by call
            return None
        return ahead, found


def install() -> None:
    """Tell our backends which operations SGLang's controllers begin and end. Idempotent.

    Where this SGLang has no such functions, pages are moved call by call.
    """
    try:
        from sglang.srt.managers.cache_controller import HiCacheController

        for name in ("_page_transfer", "_page_backup"):
            original = getattr(HiCacheController, name)
            if not hasattr(original, _MARK):
                setattr(HiCacheController, name, _wrapped(original))
    except (ImportError, AttributeError) as exc:  # another release
        _log.info("LifeboatCache: this SGLang does not say which pages follow: %s", exc)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(self, "storage_backend", None)
        # SGLang's injector of failures wraps what it injects them into.
        operations = getattr(getattr(backend, "_backend", backend), "lifeboat_operations", None)
        if operations is None:
            return original(self, operation, *args, **kwargs)
        with operations.under_way(operation):
            return original(self, operation, *args, **kwargs)

    setattr(run, _MARK, True)
    return run
