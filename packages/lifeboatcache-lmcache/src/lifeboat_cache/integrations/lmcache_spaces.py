"""The stores of the models whose KV passes through an LMCache server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey

from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.integrations.lmcache_space import ModelSpace
from lifeboat_cache.interface import State

__all__ = ["Spaces"]

_log = logging.getLogger("lifeboat_cache")

#: :meth:`Spaces.close` says after so many seconds that storage does not answer.
_CLOSE_S = 30.0

#: How often it is looked whether a store that opens has taken what came before.
_LOOK_S = 0.02


class Spaces:
    """Opens the store of a model when it is first asked for, and closes all in the end.

    Parameters
    ----------
    config
        The configuration; without one there are no stores.
    version
        Of LMCache.
    pending_bytes
        Bound of bytes of a store that wait to be written.
    """

    def __init__(self, config: LiveConfig | None, version: str, pending_bytes: int) -> None:
        self._config = config
        self._version = version
        self._pending_bytes = pending_bytes
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], ModelSpace] = {}
        self._left: set[str] = set()
        self._retiring: list[threading.Thread] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether no store is opened any more."""
        return self._closed

    def of(self, key: ObjectKey) -> ModelSpace | None:
        """The store of a key's model; ``None`` also for one that was left."""
        name = _name(key)
        found = self._open.get(name)
        if found is not None or self._config is None:
            return found
        with self._lock:
            found = self._open.get(name)
            if found is None and not self._closed and name[0] not in self._left:
                found = ModelSpace(self._config, *name, self._version, self._pending_bytes)
                self._open[name] = found
        return found

    def rows(self, keys: Sequence[ObjectKey]) -> list[tuple[ModelSpace | None, list[int]]]:
        """Rows of a task by the store that they belong to; nearly always one."""
        rows: dict[tuple[str, int], list[int]] = {}
        for number, key in enumerate(keys):
            rows.setdefault(_name(key), []).append(number)
        return [(self.of(keys[numbers[0]]), numbers) for numbers in rows.values()]

    def all(self) -> list[ModelSpace]:
        """Those that are open."""
        return list(self._open.values())

    def current(self, space: ModelSpace) -> bool:
        """Whether a store is still that of its model: its weights have not changed."""
        return space is self._open.get((space.model_name, space.world_size))

    def left(self) -> list[str]:
        """Models whose weights have changed."""
        return sorted(self._left)

    def leave(self, space: ModelSpace) -> None:
        """Close a store in the background, whose model's weights have changed.

        Nobody gets a new one: an engine that holds the weights of before goes on, and its KV
        would be found by one that is started with those of now.
        """
        with self._lock:
            name = space.model_name, space.world_size
            self._left.add(space.model_name)
            if self._open.get(name) is space:
                del self._open[name]
        thread = threading.Thread(target=_close, args=(space,), name="lifeboat-retire", daemon=True)
        thread.start()
        self._retiring.append(thread)

    def shut(self) -> bool:
        """Open no store any more; whether that is new."""
        with self._lock:
            before, self._closed = self._closed, True
        return not before

    def close(self) -> None:
        """Write what is queued; returns when nothing touches LMCache's memory any more."""
        for space in self.all():
            _close(space)
        for thread in self._retiring:
            thread.join()


def _name(key: ObjectKey) -> tuple[str, int]:
    """The model of a key, and into how many shards its KV is cut."""
    return key.model_name, (key.kv_rank >> 24) & 0xFF


def _close(space: ModelSpace) -> None:
    end = time.monotonic() + _CLOSE_S
    # What came before the store was open is written too, unless weights or a disk hang.
    while space.store.busy() and space.store.state is State.OPENING and time.monotonic() < end:
        time.sleep(_LOOK_S)
    quiet = space.close(_CLOSE_S)
    while not quiet:
        # LMCache frees its memory next. Who wants to end a server whose storage has died
        # has to kill it.
        _log.error(
            "LifeboatCache: storage does not answer, and its I/O may still touch LMCache's "
            "memory: check the disk"
        )
        quiet = space.store.drain(_CLOSE_S)
