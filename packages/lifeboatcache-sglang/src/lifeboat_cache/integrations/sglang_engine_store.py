"""The store of a backend: opened, left when weights change, and closed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from lifeboat_cache.config import Config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.integrations import sglang_epoch
from lifeboat_cache.integrations.sglang_identity import find_namespace
from lifeboat_cache.integrations.sglang_notice import show_stand_down
from lifeboat_cache.integrations.sglang_published import Published
from lifeboat_cache.interface import Lookup, Namespace, Store, open_block_store
from lifeboat_cache.registry import attach

__all__ = ["CLOSE_S", "EngineStore", "close_store"]

_log = logging.getLogger("lifeboat_cache")

#: How long a call waits for the store to end, in seconds. SGLang gives its threads ten.
CLOSE_S = 4.0

#: After a start, a lookup waits so many seconds for the store to recover: SGLang's own patience
#: with storage is not less …
_LOOKUP_S = 1.0
#: … but not once the store has been open for so many: storage may hang.
_RECOVERY_S = 20.0
#: How often it looks, in seconds.
_LOOK_S = 0.01


class EngineStore:
    """What a backend keeps pages in. Thread-safe.

    Parameters
    ----------
    storage_config
        As SGLang passes it to the backend.
    describe
        Called with a store that has just been opened, to say what pages are.

    Attributes
    ----------
    store
        The store to use now; ``None`` if there is none.
    reason
        Why there is none, if the backend stands down.
    published
        What is shown of the store.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, describe: Callable[[Store], None]
    ) -> None:
        self._storage_config = storage_config
        self._describe = describe
        self._config: Config | LiveConfig | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._epoch = ""
        self._epoch_used = False
        self._retired: list[Store] = []
        self._recovered_by = 0.0
        self.store: Store | None = None
        self.reason = ""
        self.published = self._new_published()

    def begin(
        self, config: Config | LiveConfig, namespace: Namespace | Callable[[], Namespace]
    ) -> None:
        """Open the store; where weights have changed already, one that begins empty."""
        self._config = config
        if sglang_epoch.has_changed():  # before the backend was attached, or attached again
            self.store = self._open(self._next_epoch())
            _say_changed("before the backend was attached")
        else:
            self.store = self._open(namespace)

    def _next_epoch(self) -> Namespace:
        """A namespace of this process's own: nobody can tell what weights there are now."""
        self._epoch, self._epoch_used = uuid.uuid4().hex, False
        identity = {"engine": "sglang", "epoch": self._epoch}
        display = {"model": "after a change of weights", "temporary": True}
        return Namespace.from_identity(identity, display)

    def _open(self, namespace: Any) -> Store:
        if self._config is None:
            raise RuntimeError("the backend stands down and opens no store")
        store = open_block_store(self._config, namespace)
        self._recovered_by = time.monotonic() + _RECOVERY_S
        self.published = self._new_published()
        attach(store, self.published.facts)
        self._describe(store)
        return store

    def _new_published(self) -> Published:
        config = self._storage_config
        ranks = (getattr(config, name, 0) or 0 for name in ("tp_rank", "pp_rank"))
        return Published(str(config.model_name or ""), first=not any(ranks))

    def identify(self, salt: str) -> Namespace:
        """Name the namespace; on a thread of the store, since weights are read."""
        found = find_namespace(self._storage_config, salt, self._stopping.is_set)
        _log.info(
            "LifeboatCache: namespace %s for %s",
            found.hex[:12],
            found.display.get("model", "this model"),
        )
        return found

    def weights_changed(self, what: str) -> None:
        """The weights are others from now on: leave the namespace.

        What is stored afterwards goes to a namespace of this process's own, which is
        removed at its end, for nobody can tell what weights they are.
        """
        with self._lock:
            old, config = self.store, self._config
            if old is None or config is None or self._stopping.is_set():
                return
            if self._epoch and not self._epoch_used:
                return  # nothing to leave: a trainer sends weights tensor by tensor
            self.store = None  # whatever goes wrong below
            first = not self._epoch
            self._retired.append(old)
            self.store = self._open(self._next_epoch())
        if first:
            _say_changed(what)
        threading.Thread(
            target=self._retire, args=(old,), name="lifeboat-retire", daemon=True
        ).start()

    def there(self, store: Store, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which pages are there, bool ``(n,)``; while the store recovers it is waited for.

        Not by the main thread, which schedules: there what is not known yet is not there.
        """
        give_up = min(time.monotonic() + _LOOKUP_S, self._recovered_by)
        while True:
            found = store.lookup(keys)
            if (
                not (found == Lookup.RETRY).any()
                or time.monotonic() >= give_up
                or threading.current_thread() is threading.main_thread()
            ):
                hits: npt.NDArray[np.bool_] = found == Lookup.HIT
                return hits
            time.sleep(_LOOK_S)

    def to_fill(self) -> Store | None:
        """The store for pages that exist now; it counts as used from here on.

        In one step: pages of before a change of weights must not get into a store that the
        end of the change takes for unused.
        """
        with self._lock:
            self._epoch_used = True
            return self.store

    def _retire(self, store: Store) -> None:
        """Close a store that was left, on a thread of its own: it may have to wait."""
        if close_store(store, 30.0):
            with self._lock, contextlib.suppress(ValueError):
                self._retired.remove(store)

    def stand_down(self, reason: str) -> None:
        """Keep nothing from now on, and say why."""
        store, self.store = self.store, None
        self.reason = reason
        _log.error("LifeboatCache stands down: %s", reason)
        show_stand_down(reason)
        if store is not None:
            self._stopping.set()
            threading.Thread(
                target=store.close, args=(CLOSE_S,), name="lifeboat-retire", daemon=True
            ).start()

    def leave(self) -> list[Store]:
        """Use no store any more; those that have to be closed. Idempotent."""
        self._stopping.set()
        sglang_epoch.forget(self.weights_changed)
        with self._lock:
            store, self.store = self.store, None
            stores = [*self._retired, *([store] if store is not None else [])]
            self._retired = []
        return stores


def _say_changed(what: str) -> None:
    _log.warning(
        "LifeboatCache: weights may have changed (%s); stored KV is not used from here on", what
    )


def close_store(store: Store, timeout: float) -> bool:
    """Close a store; whether its I/O touches the host pools no more."""
    quiet = store.close(timeout)
    namespace = store.namespace
    if quiet and namespace is not None and "epoch" in namespace.identity:
        store.purge()
    return quiet
