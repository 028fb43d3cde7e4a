"""``LifeboatHiCacheStorage``: a storage backend of SGLang's hierarchical cache.

Built by SGLang in every scheduler process. Its calls come from three threads of the
cache controller at once, which wait for the answer; none of them raises. Works with
SGLang 0.5.23. Importing this module has no side effects.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from typing_extensions import override

from lifeboat_cache.config import Config, load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.engines.guard import guarded
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrations import (
    sglang_ahead,
    sglang_epoch,
    sglang_exit,
    sglang_lora,
    sglang_prompts,
)
from lifeboat_cache.integrations.sglang_engine_store import CLOSE_S, EngineStore, close_store
from lifeboat_cache.integrations.sglang_keys import is_sharded
from lifeboat_cache.integrations.sglang_moves import Mover
from lifeboat_cache.integrations.sglang_page_calls import KV, PageCalls, Pool
from lifeboat_cache.integrations.sglang_pool_hits import hashes_of, pool_hits, within
from lifeboat_cache.integrations.sglang_pools import describe_pool, flat_buffers
from lifeboat_cache.integrations.sglang_prefixes import Hits, longest_run
from lifeboat_cache.integrations.sglang_published import storage_metrics
from lifeboat_cache.integrations.sglang_settings import SettingsError, read_settings
from lifeboat_cache.interface import Namespace, State, Store, require_interface

__all__ = ["LifeboatHiCacheStorage"]

_log = logging.getLogger("lifeboat_cache")


class LifeboatHiCacheStorage(HiCacheStorage):
    """Keeps pages of SGLang's host pools on storage and gives them back, verified.

    Parameters
    ----------
    storage_config
        As SGLang passes it. ``extra_config`` may hold ``config``, the path of a
        configuration file; without it the usual resolution applies.
    kwargs
        As SGLang passes it: empty. Tests and tools may give ``namespace`` and
        ``config`` objects instead of the engine's.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        self._storage_config = storage_config
        self._given = dict(kwargs or {})
        self._pools: dict[str, Pool] = {}
        self._mover = Mover()
        self._kept = EngineStore(storage_config, self._describe_pools)
        #: What the controller's functions tell of their operations (``sglang_ahead``).
        self.lifeboat_operations = sglang_ahead.Operations()
        self._calls = PageCalls(self._kept, self._pools, self._mover, self.lifeboat_operations)
        if storage_config.extra_config is None:
            storage_config.extra_config = {}
        self._choose_interface(storage_config.extra_config)
        try:
            self._begin(storage_config.extra_config.get("config"))
        except LifeboatError as exc:
            # A typing error in a file must not take the engine down.
            self._kept.stand_down(str(exc))
        except Exception:
            _log.exception("LifeboatCache stands down: it could not start; please report this")
            self._kept.stand_down("it could not start: see the log, and report this")

    @staticmethod
    def _choose_interface(extra_config: dict[str, Any]) -> None:
        """Ask for zero copy; SGLang looks at this after it has built the backend."""
        if "interface_v1" in extra_config:
            return
        try:
            extra_config["interface_v1"] = int(read_settings().zero_copy)
        except SettingsError as exc:
            extra_config["interface_v1"] = 1
            _log.warning("LifeboatCache: pages move without a copy: %s", exc)

    def _begin(self, config: str | None) -> None:
        require_interface(1, 4, "lifeboatcache-sglang")
        settings: Config | None = self._given.get("config")
        followed: Config | LiveConfig
        if settings is None:
            loaded = load_config(Path(config) if config else None)
            settings, followed = loaded.config, LiveConfig(loaded)
        else:
            followed = settings
        namespace: Namespace | None = self._given.get("namespace")
        if namespace is not None:
            self._kept.begin(followed, namespace)
        else:
            self._follow_engine()
            salt = settings.security.namespace_salt.get_secret_value()
            self._kept.begin(followed, partial(self._kept.identify, salt))
        sglang_ahead.install()
        sglang_exit.at_exit(self)

    def _follow_engine(self) -> None:
        """Install what has to be there before the first request."""
        from sglang.srt.runtime_context import get_context

        # First: without it nobody would notice that weights change.
        sglang_epoch.on_change(self._kept.weights_changed)
        sglang_exit.install()
        sglang_prompts.install()
        try:
            resolved = get_context().resolved_server_args_dict()
        except Exception:
            resolved = {}  # no engine: the namespace will not be found, and says so
        sglang_lora.install(resolved)
        problem = sglang_lora.hook_problem()
        if problem is not None:
            raise LifeboatError(problem)

    # Pools ------------------------------------------------------------------

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the model's KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, KV)

    @override
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool, the KV's among them."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, pool: Any, name: str) -> None:
        """Find out where a pool's pages lie; never raises, which would end the engine."""
        known = self._pools.get(name)
        if known is not None and known.pool is pool:
            return  # SGLang names the KV's pool twice
        try:
            config = self._storage_config
            pages = describe_pool(pool, name)
            sharded = bool(config.is_mla_model) and is_sharded(pool, True)
            shard = (int(config.tp_rank), int(config.tp_size)) if sharded else ()
            found = self._pools[name] = Pool(pool, pages, shard)
            store = self._kept.store
            if store is not None:
                found.describe(store)
        except LifeboatError as exc:
            self._kept.stand_down(str(exc))
        except Exception as exc:
            _log.exception("LifeboatCache: a host pool was not understood; please report this")
            self._kept.stand_down(f"the host pool {name!r} was not understood ({exc}): report this")

    def _describe_pools(self, store: Store) -> None:
        for pool in tuple(self._pools.values()):
            pool.describe(store)

    # Lookups ----------------------------------------------------------------

    @override
    @guarded(False)
    def exists(self, key: str) -> bool:
        """Whether a page of the KV pool is there."""
        return self.batch_exists([key]) == 1

    @override
    @guarded(0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many of the first pages are there without a gap; from memory.

        A second at most while the store recovers after a start.
        """
        pool, store = self._pools.get(KV), self._kept.store
        if pool is None or store is None or not keys or not pool.pages.page_bytes:
            return 0
        wanted = pool.keys.keys(keys)
        run = longest_run(self._kept.there(store, wanted))
        self._touch(store, pool, wanted[:run], extra_info)
        return run

    @override
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Which prefixes of the pages all pools of a hybrid model can restore; from memory."""
        try:
            return self._exists_in_all(keys, pool_transfers or [], extra_info)
        except Exception:
            _log.exception("LifeboatCache: a prefix was not looked up; please report this")
            return PoolTransferResult(0, {}, [])

    def _exists_in_all(
        self,
        keys: list[str],
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> PoolTransferResult:
        pool, store = self._pools.get(KV), self._kept.store
        if pool is None or store is None or not keys:
            return PoolTransferResult(0, {}, [])
        asked: list[bytes] = []
        parts: list[slice] = []
        for name, hashes in (
            (KV, keys),
            *((str(transfer.name), hashes_of(transfer, keys)) for transfer in transfers),
        ):
            found = self._pools.get(name)
            begin = len(asked)
            if found is not None and found.pages.page_bytes:
                asked += found.keys.keys(hashes)
            parts.append(slice(begin, len(asked)))
        there = self._kept.there(store, asked)
        if pool.pages.page_bytes:
            run = longest_run(there[parts[0]])
        else:
            # A pool that only counts pages: what they hold is in the other pools.
            run = len(keys) if transfers else 0
        hits = Hits(run)
        for transfer, part in zip(transfers, parts[1:], strict=True):
            hits.add(transfer.name, pool_hits(transfer, there[part], run))
        prefix = hits.longest
        if prefix:
            self._touch(store, pool, asked[parts[0]][:prefix], extra_info)
            for transfer, part in zip(transfers, parts[1:], strict=True):
                store.touch(within(transfer, asked[part], prefix))
        return PoolTransferResult(prefix, hits.by_pool(PoolName.KV), hits.prefixes)

    @staticmethod
    def _touch(
        store: Store,
        pool: Pool,
        keys: Sequence[bytes],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> None:
        """Mark pages, and those before them as far as SGLang tells of them, as used."""
        before = getattr(extra_info, "prefix_keys", None) or []
        if keys:
            store.touch([*pool.keys.keys(before), *keys])

    # Zero copy --------------------------------------------------------------

    @override
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages straight into the KV pool; the leading run counts."""
        return self._calls.get(KV, keys, host_indices)

    @override
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages straight out of the KV pool; True also for what is there already."""
        return self._calls.set(KV, keys, host_indices, extra_info)

    @override
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools."""
        return {
            transfer.name: self._calls.get(
                str(transfer.name), list(transfer.keys or []), transfer.host_indices
            )
            for transfer in transfers
        }

    @override
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        return {
            transfer.name: self._calls.set(
                str(transfer.name), list(transfer.keys or []), transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    # The copying interface ----------------------------------------------------

    @override
    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> Any | None:
        """Load a page of the KV pool into a flat tensor."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    @override
    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[Any | None]:
        """Load pages of the KV pool into flat tensors; ``None`` for what is not there."""
        missing: list[Any | None] = [None] * len(keys)
        try:
            pool, store = self._pools.get(KV), self._kept.store
            tensors = list(target_locations or [])
            if pool is None or store is None or not keys or len(tensors) != len(keys):
                return missing
            if not pool.pages.page_bytes:
                return tensors
            buffers = flat_buffers(tensors, pool.pages.page_bytes)
            done = self._calls.load(store, pool, list(keys), buffers)
            return [tensor if fine else None for tensor, fine in zip(tensors, done, strict=True)]
        except Exception:
            _log.exception("LifeboatCache: pages were not loaded; please report this")
            return missing

    @override
    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store a page of the KV pool out of a flat tensor."""
        return self.batch_set([key], [value])

    @override
    @guarded(False)
    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store pages of the KV pool out of flat tensors: the same bytes as without a copy."""
        pool, store = self._pools.get(KV), self._kept.to_fill()
        tensors = list(values or [])
        if pool is None or store is None or not keys or len(tensors) != len(keys):
            return False
        if not pool.pages.page_bytes:
            return True
        buffers = flat_buffers([tensor.contiguous() for tensor in tensors], pool.pages.page_bytes)
        return all(self._calls.keep(store, pool, list(keys), buffers))

    # The rest -----------------------------------------------------------------

    @override
    def get_stats(self) -> Any:
        """What was moved since the last call, for SGLang's metrics."""
        try:
            return storage_metrics(self._mover.moves)
        except Exception as exc:  # another release may name them otherwise
            _log.debug("LifeboatCache: no storage metrics for SGLang: %s", exc)
            return None

    @override
    @guarded(None)
    def clear(self) -> None:
        """Delete all pages of this model and rank, for every process that shares them."""
        store = self._kept.store
        if store is not None:
            store.delete(store.keys())
            store.drain(CLOSE_S)

    def finish(self, timeout: float) -> None:
        """Let calls under way end and write down what is known. Idempotent."""
        stores = self._kept.leave()
        self._mover.wait_idle(timeout)
        for one in stores:
            close_store(one, timeout)

    @guarded(None)
    def close(self) -> None:
        """SGLang detaches the backend: let go of all files and of the host pools."""
        self.finish(CLOSE_S)
        self._pools.clear()

    @property
    def state(self) -> State:
        """State of the store, for tests and tools."""
        store = self._kept.store
        return store.state if store is not None else State.DISABLED

    @property
    def reason(self) -> str:
        """Why the backend stands down, for tests and tools."""
        store = self._kept.store
        return self._kept.reason or (store.reason if store is not None else "")

    @property
    def store(self) -> Store | None:
        """The block store, for tests and tools."""
        return self._kept.store

    @property
    def moves(self) -> dict[str, float]:
        """What was moved, and how many calls were cut short, by name."""
        return self._mover.moves.totals()
