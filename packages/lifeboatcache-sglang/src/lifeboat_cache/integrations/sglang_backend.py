"""``LifeboatHiCacheStorage``: a storage backend of SGLang's hierarchical cache.

Built by SGLang in every scheduler process. Its calls come from three threads of the
cache controller at once, which wait for the answer; none of them raises. Works with
SGLang 0.5.23. Importing this module has no side effects.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
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
from lifeboat_cache.integrations.sglang_identity import find_namespace
from lifeboat_cache.integrations.sglang_keys import PageKeys, is_sharded
from lifeboat_cache.integrations.sglang_moves import Mover, Pages
from lifeboat_cache.integrations.sglang_notice import show_stand_down
from lifeboat_cache.integrations.sglang_pools import PoolPages, describe_pool
from lifeboat_cache.integrations.sglang_prefixes import Hits, longest_run, trailing_hits
from lifeboat_cache.integrations.sglang_published import Published, storage_metrics
from lifeboat_cache.integrations.sglang_settings import SettingsError, read_settings
from lifeboat_cache.integrations.sglang_windows import Kind
from lifeboat_cache.interface import (
    BlockBuffers,
    Lookup,
    Namespace,
    State,
    Store,
    open_block_store,
    require_interface,
    tag,
)
from lifeboat_cache.registry import attach

__all__ = ["LifeboatHiCacheStorage"]

_log = logging.getLogger("lifeboat_cache")

_KV = "kv"

#: How long a call waits for the store to end, in seconds. SGLang gives its threads ten.
_CLOSE_S = 4.0


class _Pool:
    """A registered host pool: where its pages lie, and their keys."""

    def __init__(self, pool: Any, pages: PoolPages, shard: Sequence[int]) -> None:
        self.pool = pool
        self.pages = pages
        self.keys = PageKeys(pages, shard)


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
        self._pools: dict[str, _Pool] = {}
        self._mover = Mover()
        #: What the controller's functions tell of their operations (``sglang_ahead``).
        self.lifeboat_operations = sglang_ahead.Operations()
        self._published = self._new_published()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._epoch = ""
        self._epoch_used = False
        self._store: Store | None = None
        self._retired: list[Store] = []
        self._config: Config | LiveConfig | None = None
        self._reason = ""
        if storage_config.extra_config is None:
            storage_config.extra_config = {}
        self._choose_interface(storage_config.extra_config)
        try:
            self._begin(storage_config.extra_config.get("config"))
        except LifeboatError as exc:
            # A typing error in a file must not take the engine down.
            self._stand_down(str(exc))
        except Exception:
            _log.exception("LifeboatCache stands down: it could not start; please report this")
            self._stand_down("it could not start: see the log, and report this")

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
        self._config = settings
        if settings is None:
            loaded = load_config(Path(config) if config else None)
            settings, self._config = loaded.config, LiveConfig(loaded)
        namespace: Namespace | None = self._given.get("namespace")
        if namespace is not None:
            self._store = self._open(namespace)
        else:
            self._follow_engine()
            salt = settings.security.namespace_salt.get_secret_value()
            self._store = self._open(partial(self._identify, salt))
        sglang_ahead.install()
        sglang_exit.at_exit(self)

    def _follow_engine(self) -> None:
        """Install what has to be there before the first request."""
        from sglang.srt.runtime_context import get_context

        # First: without it nobody would notice that weights change.
        sglang_epoch.on_change(self._weights_changed)
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

    # Identity ---------------------------------------------------------------

    def _open(self, namespace: Any) -> Store:
        if self._config is None:
            raise RuntimeError("the backend stands down and opens no store")
        store = open_block_store(self._config, namespace)
        self._published = self._new_published()
        attach(store, self._published.facts)
        for pool in tuple(self._pools.values()):
            self._describe(store, pool.pages)
        return store

    def _new_published(self) -> Published:
        config = self._storage_config
        ranks = (getattr(config, name, 0) or 0 for name in ("tp_rank", "pp_rank"))
        return Published(str(config.model_name or ""), first=not any(ranks))

    @staticmethod
    def _describe(store: Store, pages: PoolPages) -> None:
        """Have pages of the KV pool stored as configured; all others are stored exactly."""
        if pages.name == _KV and pages.page_bytes:
            store.describe(pages.layout)

    def _identify(self, salt: str) -> Namespace:
        """Name the namespace; on a thread of the store, since weights are read."""
        found = find_namespace(self._storage_config, salt, self._stopping.is_set)
        _log.info(
            "LifeboatCache: namespace %s for %s",
            found.hex[:12],
            found.display.get("model", "this model"),
        )
        return found

    def _weights_changed(self, what: str) -> None:
        """The weights are others from now on: leave the namespace.

        What is stored afterwards goes to a namespace of this process's own, which is
        removed at its end, for nobody can tell what weights they are.
        """
        with self._lock:
            old, config = self._store, self._config
            if old is None or config is None or self._stopping.is_set():
                return
            if self._epoch and not self._epoch_used:
                return  # nothing to leave: a trainer sends weights tensor by tensor
            self._store = None  # whatever goes wrong below
            first = not self._epoch
            self._epoch, self._epoch_used = uuid.uuid4().hex, False
            self._retired.append(old)
            identity = {"engine": "sglang", "epoch": self._epoch}
            display = {"model": "after a change of weights", "temporary": True}
            self._store = self._open(Namespace.from_identity(identity, display))
        if first:
            _log.warning(
                "LifeboatCache: weights may have changed (%s); stored KV is not used from here on",
                what,
            )
        threading.Thread(
            target=self._retire, args=(old,), name="lifeboat-retire", daemon=True
        ).start()

    def _store_to_fill(self) -> Store | None:
        """The store for pages that exist now; it counts as used from here on.

        In one step: pages of before a change of weights must not get into a store that the
        end of the change takes for unused.
        """
        with self._lock:
            self._epoch_used = True
            return self._store

    def _retire(self, store: Store) -> None:
        """Close a store that was left, on a thread of its own: it may have to wait."""
        if self._close_store(store, 30.0):
            with self._lock, contextlib.suppress(ValueError):
                self._retired.remove(store)

    def _stand_down(self, reason: str) -> None:
        store, self._store = self._store, None
        self._reason = reason
        _log.error("LifeboatCache stands down: %s", reason)
        show_stand_down(reason)
        if store is not None:
            self._stopping.set()
            threading.Thread(
                target=store.close, args=(_CLOSE_S,), name="lifeboat-retire", daemon=True
            ).start()

    # Pools ------------------------------------------------------------------

    @override
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the model's KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, _KV)

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
            self._pools[name] = _Pool(pool, pages, shard)
            if self._store is not None:
                self._describe(self._store, pages)
        except LifeboatError as exc:
            self._stand_down(str(exc))
        except Exception as exc:
            _log.exception("LifeboatCache: a host pool was not understood; please report this")
            self._stand_down(f"the host pool {name!r} was not understood ({exc}): report this")

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
        """How many of the first pages are there without a gap; from memory."""
        pool, store = self._pools.get(_KV), self._store
        if pool is None or store is None or not keys or not pool.pages.page_bytes:
            return 0
        wanted = pool.keys.keys(keys)
        run = longest_run(store.lookup(wanted) == Lookup.HIT)
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
        pool, store = self._pools.get(_KV), self._store
        if pool is None or store is None or not keys:
            return PoolTransferResult(0, {}, [])
        asked: list[bytes] = []
        parts: list[slice] = []
        for name, hashes in (
            (_KV, keys),
            *((str(transfer.name), _hashes_of(transfer, keys)) for transfer in transfers),
        ):
            found = self._pools.get(name)
            begin = len(asked)
            if found is not None and found.pages.page_bytes:
                asked += found.keys.keys(hashes)
            parts.append(slice(begin, len(asked)))
        there = store.lookup(asked) == Lookup.HIT
        if pool.pages.page_bytes:
            run = longest_run(there[parts[0]])
        else:
            # A pool that only counts pages: what they hold is in the other pools.
            run = len(keys) if transfers else 0
        hits = Hits(run)
        for transfer, part in zip(transfers, parts[1:], strict=True):
            hits.add(transfer.name, _pool_hits(transfer, there[part], run))
        prefix = hits.longest
        if prefix:
            self._touch(store, pool, asked[parts[0]][:prefix], extra_info)
            for transfer, part in zip(transfers, parts[1:], strict=True):
                store.touch(_within(transfer, asked[part], prefix))
        return PoolTransferResult(prefix, hits.by_pool(PoolName.KV), hits.prefixes)

    @staticmethod
    def _touch(
        store: Store,
        pool: _Pool,
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
        return self._get(_KV, keys, host_indices)

    @override
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages straight out of the KV pool; True also for what is there already."""
        return self._set(_KV, keys, host_indices, extra_info)

    @override
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools."""
        return {
            transfer.name: self._get(
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
            transfer.name: self._set(
                str(transfer.name), list(transfer.keys or []), transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def _get(self, name: str, hashes: list[str], indices: Any) -> list[bool]:
        try:
            pool, store = self._pools.get(name), self._store
            if pool is None or store is None or not hashes:
                return [False] * len(hashes)
            pages = pool.pages.starts(indices, len(hashes))
            if not pool.pages.page_bytes:
                return [True] * len(hashes)
            ahead = self._ahead("load", store, pool, hashes, pages)
            if ahead is not None:
                return self._loaded(ahead[0].store, pool, ahead[1])
            return self._load(store, pool, hashes, pool.pages.buffers(pages))
        except Exception:
            _log.exception("LifeboatCache: pages were not loaded; please report this")
            return [False] * len(hashes)

    def _set(
        self,
        name: str,
        hashes: list[str],
        indices: Any,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        try:
            pool, store = self._pools.get(name), self._store_to_fill()
            if pool is None or store is None or not hashes:
                return [False] * len(hashes)
            pages = pool.pages.starts(indices, len(hashes))
            if not pool.pages.page_bytes:
                return [True] * len(hashes)
            ahead = self._ahead("store", store, pool, hashes, pages)
            if ahead is not None:
                found: list[bool] = ahead[1].tolist()
                return found
            return self._keep(store, pool, hashes, pool.pages.buffers(pages), extra_info)
        except Exception:
            _log.exception("LifeboatCache: pages were not stored; please report this")
            return [False] * len(hashes)

    def _ahead(
        self, kind: Kind, store: Store, pool: _Pool, hashes: list[str], pages: Any
    ) -> tuple[sglang_ahead.Ahead, npt.NDArray[np.bool_]] | None:
        """What a call of an operation asks for, if the operation's pages are moved ahead."""
        if pool.pages.name != _KV:
            return None

        def begin(operation: Any, step: int) -> sglang_ahead.Ahead | None:
            every = list(operation.hash_value or ())
            if len(every) <= step:
                return None  # there are no others
            try:
                numbers = pool.pages.starts(operation.host_indices, len(every))
            except ValueError:
                return None  # a call for those that are wrong says so
            prefix = operation.prefix_keys

            def pages_of(first: int, last: int) -> Pages:
                # As SGLang would say it of a call for these: all that lies before them.
                before = None if prefix is None else len(prefix) + first
                parent = every[first - 1] if first else (prefix[-1] if prefix else None)
                buffers = pool.pages.buffers(numbers[first:last])
                return self._pages(pool, every[first:last], buffers, before, parent)

            return sglang_ahead.Ahead(
                self._mover, kind, store, every, numbers, pool.pages.page_bytes, step, pages_of
            )

        return self.lifeboat_operations.take(hashes, pages, begin)

    def _load(
        self, store: Store, pool: _Pool, hashes: list[str], buffers: BlockBuffers
    ) -> list[bool]:
        done = self._mover.load(store, self._pages(pool, hashes, buffers))
        return self._loaded(store, pool, done)

    def _loaded(self, store: Store, pool: _Pool, done: npt.NDArray[np.bool_]) -> list[bool]:
        if store is not self._store:
            done[:] = False  # weights have changed while it was read
        if pool.pages.name == _KV:
            self._published.served(longest_run(done) * pool.pages.tokens)
        found: list[bool] = done.tolist()
        return found

    def _keep(
        self,
        store: Store,
        pool: _Pool,
        hashes: list[str],
        buffers: BlockBuffers,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        before = getattr(extra_info, "prefix_keys", None)
        pages = self._pages(
            pool,
            hashes,
            buffers,
            None if before is None else len(before),
            before[-1] if before else None,
        )
        done = self._mover.store(store, pages)
        found: list[bool] = done.tolist()
        return found

    def _pages(
        self,
        pool: _Pool,
        hashes: list[str],
        buffers: BlockBuffers,
        before: int | None = None,
        parent: str | None = None,
    ) -> Pages:
        """Pages as they are moved, with how many lie before them and the last one of those."""
        kv = self._pools.get(_KV)
        tokens = kv.pages.tokens if kv is not None else pool.pages.tokens
        return Pages(
            hashes,
            pool.keys.keys(hashes),
            buffers,
            layout=pool.pages.layout.tag,
            group=pool.keys.group,
            depth=-1 if before is None else before * tokens,
            tokens=tokens,
            parent=0 if before is None or parent is None else tag(parent.encode()),
        )

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
            pool, store = self._pools.get(_KV), self._store
            tensors = list(target_locations or [])
            if pool is None or store is None or not keys or len(tensors) != len(keys):
                return missing
            if not pool.pages.page_bytes:
                return tensors
            buffers = _flat(tensors, pool.pages.page_bytes)
            done = self._load(store, pool, list(keys), buffers)
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
        pool, store = self._pools.get(_KV), self._store_to_fill()
        tensors = list(values or [])
        if pool is None or store is None or not keys or len(tensors) != len(keys):
            return False
        if not pool.pages.page_bytes:
            return True
        buffers = _flat([tensor.contiguous() for tensor in tensors], pool.pages.page_bytes)
        return all(self._keep(store, pool, list(keys), buffers))

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
        store = self._store
        if store is not None:
            store.delete(store.keys())
            store.drain(_CLOSE_S)

    def finish(self, timeout: float) -> None:
        """Let calls under way end and write down what is known. Idempotent."""
        self._stopping.set()
        sglang_epoch.forget(self._weights_changed)
        with self._lock:
            store, self._store = self._store, None
            stores = [*self._retired, *([store] if store is not None else [])]
            self._retired = []
        self._mover.wait_idle(timeout)
        for one in stores:
            self._close_store(one, timeout)

    def _close_store(self, store: Store, timeout: float) -> bool:
        """Close a store; whether its I/O touches the host pools no more."""
        quiet = store.close(timeout)
        namespace = store.namespace
        if quiet and namespace is not None and "epoch" in namespace.identity:
            store.purge()
        return quiet

    @guarded(None)
    def close(self) -> None:
        """SGLang detaches the backend: let go of all files and of the host pools."""
        self.finish(_CLOSE_S)
        self._pools.clear()

    @property
    def state(self) -> State:
        """State of the store, for tests and tools."""
        store = self._store
        return store.state if store is not None else State.DISABLED

    @property
    def reason(self) -> str:
        """Why the backend stands down, for tests and tools."""
        store = self._store
        return self._reason or (store.reason if store is not None else "")

    @property
    def store(self) -> Store | None:
        """The block store, for tests and tools."""
        return self._store

    @property
    def moves(self) -> dict[str, float]:
        """What was moved, and how many calls were cut short, by name."""
        return self._mover.moves.totals()


def _flat(tensors: Iterable[Any], page_bytes: int) -> BlockBuffers:
    """The memory of flat pages, one tensor each.

    Raises
    ------
    ValueError
        If one is not of a page's size, or not contiguous.
    """
    kept = list(tensors)
    for tensor in kept:
        size = int(tensor.numel()) * int(tensor.element_size())
        if size != page_bytes or not tensor.is_contiguous():
            raise ValueError(f"a flat page has {size} bytes instead of {page_bytes}")
    addresses = np.array([tensor.data_ptr() for tensor in kept], dtype=np.uint64)
    return BlockBuffers(
        addresses,
        np.full(len(kept), page_bytes, dtype=np.uint64),
        np.arange(len(kept) + 1, dtype=np.int64),
        kept,
    )


def _hashes_of(transfer: PoolTransfer, keys: list[str]) -> list[str]:
    """Which pages of a pool decide whether it can restore a prefix of ``keys``."""
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        return list(transfer.keys or [])
    return keys


def _pool_hits(
    transfer: PoolTransfer, there: npt.NDArray[np.bool_], run: int
) -> tuple[int, npt.NDArray[np.bool_] | None]:
    """A pool's own verdict, and which prefixes it can restore (``None``: all of them).

    The second is bool ``(run + 1,)``, by length of the prefix in pages.
    """
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        group, block = int(transfer.group_pages), int(transfer.block_pages)
        if group < 1 or block < 1:
            return 0, None
        whole = there.shape[0] // group
        complete: npt.NDArray[np.bool_] = np.all(
            there[: whole * group].reshape(whole, group), axis=1
        )
        return longest_run(complete) * block, None
    page_there = np.zeros(run, dtype=bool)
    page_there[: there.shape[0]] = there[:run]
    prefixes = np.zeros(run + 1, dtype=bool)
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        boundary = longest_run(page_there)
        prefixes[1 : boundary + 1] = True
        return boundary, prefixes
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        prefixes[1:] = trailing_hits(page_there, max(1, len(transfer.keys or ())))
        ends = np.flatnonzero(prefixes)
        return int(ends[-1]) if ends.shape[0] else 0, prefixes
    return 0, prefixes  # a policy of a later release


def _within(transfer: PoolTransfer, keys: Sequence[bytes], prefix: int) -> Sequence[bytes]:
    """Those of a pool's keys that restoring a prefix needs."""
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return keys[max(0, prefix - max(1, len(transfer.keys or ()))) : prefix]
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        return keys
    return keys[:prefix]
