"""``LifeboatL2Adapter``: LifeboatCache as the second tier of an LMCache server.

Runs inside the server, under the threads that store, prefetch and evict: no method waits for
storage but :meth:`LifeboatL2Adapter.close`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier
from typing_extensions import override

from lifeboat_cache.config import load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.engines.guard import guarded
from lifeboat_cache.errors import ConfigError, LifeboatError
from lifeboat_cache.integrations.lmcache_keeper import Keeper
from lifeboat_cache.integrations.lmcache_locks import Locks
from lifeboat_cache.integrations.lmcache_lookups import LookupDesk
from lifeboat_cache.integrations.lmcache_prefixes import Prefixes
from lifeboat_cache.integrations.lmcache_published import show_stand_down
from lifeboat_cache.integrations.lmcache_spaces import Spaces
from lifeboat_cache.integrations.lmcache_stock import Stock
from lifeboat_cache.integrations.lmcache_tasks import Results
from lifeboat_cache.integrations.lmcache_transfers import Loads, Stores
from lifeboat_cache.integrations.lmcache_versions import lmcache_version, refuse
from lifeboat_cache.interface import State, require_interface

__all__ = ["LifeboatL2Adapter"]

_log = logging.getLogger("lifeboat_cache")

#: Stores wait for the disk in LMCache's own memory. At most this part of it may do so, so
#: that there is room for new KV; but always so many bytes.
_PENDING_SHARE = 0.5
_LEAST_PENDING_BYTES = 2 << 30

#: What ``adapter_params`` may hold.
_PARAMETERS = frozenset({"config"})


class LifeboatL2Adapter(L2AdapterInterface):
    """Keeps LMCache's objects on storage and gives them back, verified.

    Parameters
    ----------
    params
        ``adapter_params`` of ``--l2-adapter``: ``config``, the path of a configuration file;
        without it the usual resolution applies.
    l1_memory_desc
        LMCache's memory, as it describes it.

    Raises
    ------
    InterfaceError
        If this LMCache, or this core, is not one that the adapter works with.
    ConfigError
        If ``params`` holds something else.
    """

    def __init__(self, params: Mapping[str, Any] | None = None, l1_memory_desc: Any = None) -> None:
        # First: nothing is left behind where it is refused.
        require_interface(1, 3, "lifeboatcache-lmcache")
        refuse()
        params = dict(params or {})
        unknown = sorted(set(params) - _PARAMETERS)
        if unknown:
            raise ConfigError(
                f"adapter_params of LifeboatL2Adapter holds {', '.join(unknown)}: it takes "
                "`config` only, the path of a configuration file"
            )
        # 0: LMCache evicts nothing here, the agent does.
        super().__init__(max_capacity_bytes=0)
        self._version = lmcache_version()
        self._store_done, self._lookup_done, self._load_done = (
            create_event_notifier() for _ in range(3)
        )
        self._stored: Results[L2StoreResult] = Results(self._store_done.notify)
        self._looked: Results[Bitmap] = Results(self._lookup_done.notify)
        self._loaded: Results[Bitmap] = Results(self._load_done.notify)
        self._fault = ""
        config = self._read_config(params.get("config"))
        memory = int(getattr(l1_memory_desc, "size", 0) or 0)
        pending = max(int(memory * _PENDING_SHARE), _LEAST_PENDING_BYTES)
        self._spaces = Spaces(config, self._version, pending)
        self._stock = Stock(
            self._notify_keys_stored, self._notify_keys_accessed, self._notify_keys_deleted
        )
        self._locks = Locks()
        prefixes = Prefixes()
        wait_s = config.config.engine.native_promotion_wait_s if config is not None else 0.0
        self._lookups = LookupDesk(
            self._spaces, self._stock, self._locks, prefixes, self._looked, wait_s
        )
        self._stores = Stores(self._spaces, self._stock, prefixes, self._stored)
        self._loads = Loads(self._spaces, self._stock, self._loaded)
        self._keeper = Keeper(self._spaces, self._stock)
        self._threads = [
            threading.Thread(target=work, name=f"lifeboat-lmcache-{name}", daemon=True)
            for name, work in (("lookups", self._lookups.run), ("keeper", self._keeper.run))
        ]
        for thread in self._threads:
            thread.start()

    def _read_config(self, named: str | None) -> LiveConfig | None:
        try:
            return LiveConfig(load_config(Path(named) if named else None))
        except LifeboatError as exc:
            # A typing error in a file must not take the server down.
            self._stand_down(str(exc))
            return None

    def _stand_down(self, reason: str) -> None:
        self._fault = reason
        _log.error("LifeboatCache stands down: %s", reason)
        show_stand_down(reason, self._version)

    # Descriptors ------------------------------------------------------------

    @override
    def get_store_event_fd(self) -> int:
        """Signalled when stores have ended."""
        return int(self._store_done.fileno())

    @override
    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when lookups have ended."""
        return int(self._lookup_done.fileno())

    @override
    def get_load_event_fd(self) -> int:
        """Signalled when loads have ended."""
        return int(self._load_done.fileno())

    # Tasks ------------------------------------------------------------------

    @override
    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Queue objects for storing; they may be of different sizes."""
        return self._stores.submit(keys, objects)

    @override
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of all stores that ended since the last call."""
        return self._stored.pop_all()

    @override
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Find out which objects are there in the layout that is expected, and lock them.

        Answered from memory; while journals are still being read it is asked again for some
        seconds (``engine.native_promotion_wait_s``).
        """
        return self._lookups.submit(keys, group_layout_descs)

    @override
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """The result of a lookup, once."""
        return self._looked.pop(task_id)

    @override
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Undo one lock of each key. Never fails."""
        self._locks.release(keys)

    @override
    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Queue objects for loading into the memory of ``objects``."""
        return self._loads.submit(keys, objects)

    @override
    def query_load_result(self, task_id: int) -> Bitmap | None:
        """The result of a load, once."""
        return self._loaded.pop(task_id)

    # What is stored ---------------------------------------------------------

    @override
    def register_listener(self, listener: L2AdapterListener) -> None:
        """Also tell a new listener what is known to be stored already."""
        super().register_listener(listener)
        self._stock.greet(listener)

    @override
    @guarded(None)
    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, but none that is locked. In memory at once, on storage soon after."""
        free = self._locks.without(keys)
        for space, rows in self._spaces.rows(free):
            if space is None:
                continue
            known = [(free[n], self._stock.known.layout(free[n])) for n in rows]
            mine = [(key, layout) for key, layout in known if layout is not None]
            there, layouts = [key for key, _ in mine], [layout for _, layout in mine]
            blocks = space.blocks(there, layouts)
            space.store.delete([block for parts in blocks for block in parts])
            self._stock.remove_missing(space, there, layouts)

    @override
    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List objects, in a fixed order."""
        return self._stock.known.page(model_name, page_size, cursor)

    @override
    @guarded({"is_healthy": False})
    def report_status(self) -> dict[str, Any]:
        """What ``/status`` shows of the adapter. Unhealthy: something is not kept."""
        spaces = [space.status() for space in self._spaces.all()]
        faults = [self._fault] if self._fault else []
        faults += [str(one["reason"]) for one in spaces if one["state"] == State.DISABLED.value]
        faults += [
            f"the weights of {name} have changed: restart its engines, then this server"
            for name in self._spaces.left()
        ]
        return {
            "is_healthy": not faults and not self._spaces.closed,
            "type": "lifeboat",
            "faults": faults,
            "objects": len(self._stock.known),
            "locked": len(self._locks),
            "stores_under_way": len(self._stored.open()),
            "loads_under_way": len(self._loaded.open()),
            "models": spaces,
        }

    @override
    def close(self) -> None:
        """Write what is queued, and return when nothing touches LMCache's memory any more."""
        if not self._spaces.shut():
            return
        self._lookups.stop()
        self._keeper.stop()
        for thread in self._threads:
            thread.join()
        waiting = len(self._stored.open())
        if waiting:
            _log.info("LifeboatCache: %d queued stores are written before the end", waiting)
        self._spaces.close()
        for task in self._looked.open():
            self._looked.end(task, Bitmap(0))
        for notifier in (self._store_done, self._lookup_done, self._load_done):
            notifier.close()
