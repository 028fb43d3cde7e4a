"""``LifeboatL2Adapter``: LifeboatCache as the second tier of an LMCache server.

Runs inside the server, under the threads that store, prefetch and evict: no method waits for
storage but :meth:`LifeboatL2Adapter.close`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from lifeboat_cache.errors import ConfigError, LifeboatError, StoreClosedError
from lifeboat_cache.integrations.lmcache_batches import (
    addresses_of,
    buffers_of,
    whole_objects,
    with_names,
)
from lifeboat_cache.integrations.lmcache_identity import read_tag
from lifeboat_cache.integrations.lmcache_keys import NAMES_GROUP
from lifeboat_cache.integrations.lmcache_known import KnownObjects
from lifeboat_cache.integrations.lmcache_layout import ObjectLayout
from lifeboat_cache.integrations.lmcache_prefixes import Prefixes, family
from lifeboat_cache.integrations.lmcache_published import show_stand_down
from lifeboat_cache.integrations.lmcache_space import ModelSpace
from lifeboat_cache.integrations.lmcache_tasks import Lookups, Results, TaskParts, Waiting
from lifeboat_cache.integrations.lmcache_versions import lmcache_version, refuse
from lifeboat_cache.interface import (
    BlockBatch,
    Job,
    Lookup,
    Outcome,
    State,
    require_interface,
    salt_tag,
)

__all__ = ["LifeboatL2Adapter"]

_log = logging.getLogger("lifeboat_cache")

#: Stores wait for the disk in LMCache's own memory. At most this part of it may do so, so
#: that there is room for new KV; but always so many bytes.
_PENDING_SHARE = 0.5
_LEAST_PENDING_BYTES = 2 << 30

#: How often what has to be looked at now and then is looked at, in seconds.
_TICK_S = 2.0

#: How often lookups ask again that came while journals are being read, in seconds.
_RETRY_S = 0.02

#: How often known objects are compared with what is stored, in seconds.
_COMPARE_S = 30.0

#: :meth:`LifeboatL2Adapter.close` says after so many seconds that storage does not answer.
_CLOSE_S = 30.0

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
        memory = int(getattr(l1_memory_desc, "size", 0) or 0)
        self._pending_bytes = max(int(memory * _PENDING_SHARE), _LEAST_PENDING_BYTES)
        self._version = lmcache_version()
        self._store_done, self._lookup_done, self._load_done = (
            create_event_notifier() for _ in range(3)
        )
        self._stored: Results[L2StoreResult] = Results(self._store_done.notify)
        self._looked: Results[Bitmap] = Results(self._lookup_done.notify)
        self._loaded: Results[Bitmap] = Results(self._load_done.notify)
        self._lookups = Lookups()
        self._known = KnownObjects()
        self._prefixes = Prefixes()
        self._lock = threading.Lock()
        # Locks of objects, each with the blocks that it has pinned.
        self._locks: dict[ObjectKey, list[tuple[ModelSpace, list[bytes]]]] = {}
        self._spaces: dict[tuple[str, int], ModelSpace] = {}
        self._retiring: list[threading.Thread] = []
        self._fault = ""
        self._closed = False
        self._config: LiveConfig | None = None
        self._wait_s = 0.0
        try:
            named = params.get("config")
            self._config = LiveConfig(load_config(Path(named) if named else None))
            self._wait_s = self._config.config.engine.native_promotion_wait_s
        except LifeboatError as exc:
            # A typing error in a file must not take the server down.
            self._stand_down(str(exc))
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._said: set[str] = set()
        self._threads = [
            threading.Thread(target=work, name=f"lifeboat-lmcache-{name}", daemon=True)
            for name, work in (("lookups", self._ask_again), ("keeper", self._keep))
        ]
        for thread in self._threads:
            thread.start()

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

    # Spaces -----------------------------------------------------------------

    def _space(self, key: ObjectKey) -> ModelSpace | None:
        """The store of a key's model, opened when it is first asked for."""
        name = key.model_name, (key.kv_rank >> 24) & 0xFF
        found = self._spaces.get(name)
        if found is not None or self._config is None:
            return found
        with self._lock:
            found = self._spaces.get(name)
            if found is None and not self._closed:
                found = ModelSpace(self._config, *name, self._version, self._pending_bytes)
                self._spaces[name] = found
        return found

    def _by_space(self, keys: Sequence[ObjectKey]) -> list[tuple[ModelSpace | None, list[int]]]:
        """Rows of a task by the space that they belong to; nearly always one."""
        rows: dict[tuple[str, int], list[int]] = {}
        for number, key in enumerate(keys):
            rows.setdefault((key.model_name, (key.kv_rank >> 24) & 0xFF), []).append(number)
        return [(self._space(keys[numbers[0]]), numbers) for numbers in rows.values()]

    # Stores -----------------------------------------------------------------

    @override
    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Queue objects for storing; they may be of different sizes."""
        task = self._stored.begin()
        try:
            parts = self._by_space(keys)
            whole = TaskParts(len(parts), partial(self._store_ended, task))
            for space, rows in parts:
                self._store(space, [keys[n] for n in rows], [objects[n] for n in rows], whole)
        except Exception:
            # LMCache waits for a result of every task.
            _log.exception("LifeboatCache: a store could not be started; please report this")
            self._stored.end(task, L2StoreResult(False, 0))
        return task

    def _store_ended(self, task: int, good: bool, moved: int) -> None:
        self._stored.end(task, L2StoreResult(good, moved))

    def _store(
        self,
        space: ModelSpace | None,
        keys: list[ObjectKey],
        objects: list[Any],
        whole: TaskParts,
    ) -> None:
        try:
            if space is None:
                whole.part(False, 0)
                return
            layouts = [space.layouts.of_object(one) for one in objects]
            batch = self._batch(space, keys, layouts, objects)
            named = [n for n, key in enumerate(keys) if self._known.layout(key) is not layouts[n]]
            if named:
                batch = with_names(batch, [keys[n] for n in named], [layouts[n] for n in named])
            space.store.store(
                batch, on_done=partial(self._finish_store, space, keys, layouts, whole)
            )
        except (StoreClosedError, NotImplementedError, ValueError) as exc:
            self._say(f"objects are not kept: {exc}")
            whole.part(False, 0)

    def _batch(
        self,
        space: ModelSpace,
        keys: list[ObjectKey],
        layouts: list[ObjectLayout],
        objects: list[Any],
    ) -> BlockBatch:
        """The blocks of objects that are to be stored."""
        addresses = addresses_of(objects, layouts)
        for layout in {layout.signature: layout for layout in layouts}.values():
            space.describe(layout)
        blocks = space.blocks(keys, layouts)
        tags: list[int] = []
        positions: list[int] = []
        groups: list[int] = []
        families: list[int] = []
        parents: list[int] = []
        salts: list[int] = []
        for key, layout in zip(keys, layouts, strict=True):
            depth, parent = self._prefixes.place(key)
            parts = len(layout.parts)
            tags += [part.tag for part in layout.parts]
            positions += [(depth + 1) * layout.tokens] * parts
            groups += [min(key.object_group_id, NAMES_GROUP - 1)] * parts
            families += [family(key)] * parts
            parents += [parent] * parts
            salts += [salt_tag(key.cache_salt)] * parts
        return BlockBatch(
            [block for parts in blocks for block in parts],
            buffers_of(addresses, layouts, objects),
            tags,
            positions=positions,
            groups=groups,
            families=families,
            parents=parents,
            salt=salts,
        )

    def _finish_store(
        self,
        space: ModelSpace,
        keys: list[ObjectKey],
        layouts: list[ObjectLayout],
        whole: TaskParts,
        job: Job,
    ) -> None:
        """On an I/O thread."""
        good: list[bool] = []
        try:
            good = whole_objects(job, layouts, present=True)
            there = [n for n, fine in enumerate(good) if fine]
            self._tell_stored([keys[n] for n in there], [layouts[n] for n in there])
            if not all(good):
                self._say_refused(space, job)
        finally:
            # LMCache never asks for a failed task again, but drops what it was told is stored.
            whole.part(bool(good) and all(good), job.bytes_moved)

    def _say_refused(self, space: ModelSpace, job: Job) -> None:
        outcomes = {Outcome(int(outcome)).name for outcome in set(job.outcomes.tolist())}
        bad = sorted(outcomes - {"OK", "PRESENT"})
        _log.debug("LifeboatCache: a store of %s ended as %s", space.model_name, ", ".join(bad))

    @override
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of all stores that ended since the last call."""
        return self._stored.pop_all()

    # Lookups ----------------------------------------------------------------

    @override
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Find out which objects are there in the layout that is expected, and lock them.

        Answered from memory; while journals are still being read it is asked again for some
        seconds (``engine.native_promotion_wait_s``).
        """
        task = self._looked.begin()
        keys = list(keys)
        try:
            self._prefixes.seen(keys)
            ask = partial(self._look_up, keys, dict(group_layout_descs))
            answer = ask(False)
            if answer is None:
                self._lookups.add(Waiting(task, len(keys), time.monotonic() + self._wait_s, ask))
                self._wake.set()
            else:
                self._looked.end(task, answer)
        except Exception:
            _log.exception("LifeboatCache: a lookup failed; please report this")
            self._looked.end(task, Bitmap(len(keys)))
        return task

    def _look_up(
        self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc], final: bool
    ) -> Bitmap | None:
        """Look up and lock; ``None`` if it is not known yet, unless it has to be final."""
        locked: list[tuple[int, ModelSpace, list[bytes]]] = []
        found: list[tuple[ObjectKey, ObjectLayout]] = []
        retry = False
        for space, rows in self._by_space(keys):
            if space is None:
                continue
            expected = self._expected(space, keys, rows, descs)
            wanted = [n for n in rows if n in expected]
            layouts = [expected[n] for n in wanted]
            blocks = space.blocks([keys[n] for n in wanted], layouts)
            answers = space.store.lookup([one for parts in blocks for one in parts], pin=True)
            at = 0
            for number, layout, parts in zip(wanted, layouts, blocks, strict=True):
                states = answers[at : at + len(parts)].tolist()
                at += len(parts)
                if all(state == Lookup.HIT for state in states):
                    locked.append((number, space, parts))
                    found.append((keys[number], layout))
                    continue
                retry = retry or Lookup.RETRY in states
                space.store.unpin(
                    [p for p, state in zip(parts, states, strict=True) if state == Lookup.HIT]
                )
        if retry and not final:
            for _, space, parts in locked:
                space.store.unpin(parts)
            return None
        answer = Bitmap(len(keys))
        with self._lock:
            for number, space, parts in locked:
                answer.set(number)
                self._locks.setdefault(keys[number], []).append((space, parts))
        for space in {id(space): space for _, space, _ in locked}.values():
            space.store.touch([p for _, other, parts in locked if other is space for p in parts])
        if found:
            self._tell_stored(*map(list, zip(*found, strict=True)))  # others' stores, too
            self._tell(self._notify_keys_accessed, [key for key, _ in found])
        return answer

    def _expected(
        self,
        space: ModelSpace,
        keys: list[ObjectKey],
        rows: list[int],
        descs: dict[int, MemoryLayoutDesc],
    ) -> dict[int, ObjectLayout]:
        """The layout that is expected of each object; where nothing is said, that of the store."""
        by_group: dict[int, ObjectLayout | None] = {}
        for group, desc in descs.items():
            try:
                by_group[group] = space.layouts.of(desc.shapes, desc.dtypes)
            except ValueError:
                by_group[group] = None
        expected: dict[int, ObjectLayout] = {}
        for number in rows:
            key = keys[number]
            if key.object_group_id in by_group:
                layout = by_group[key.object_group_id]
            else:
                layout = self._known.layout(key)
            if layout is not None:
                expected[number] = layout
        for layout in {layout.signature: layout for layout in expected.values()}.values():
            space.describe(layout)
        return expected

    @override
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """The result of a lookup, once."""
        return self._looked.pop(task_id)

    @override
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Undo one lock of each key. Never fails."""
        pinned: dict[int, tuple[ModelSpace, list[bytes]]] = {}
        with self._lock:
            for key in keys:
                locks = self._locks.get(key)
                if not locks:
                    continue
                space, parts = locks.pop()
                if not locks:
                    del self._locks[key]
                pinned.setdefault(id(space), (space, []))[1].extend(parts)
        for space, blocks in pinned.values():
            space.store.unpin(blocks)

    # Loads ------------------------------------------------------------------

    @override
    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Queue objects for loading into the memory of ``objects``."""
        task = self._loaded.begin()
        answer = Bitmap(len(keys))
        try:
            parts = self._by_space(keys)
            whole = TaskParts(len(parts), lambda _good, _moved: self._loaded.end(task, answer))
            for space, rows in parts:
                self._load(space, keys, objects, rows, answer, whole)
        except Exception:
            _log.exception("LifeboatCache: a load could not be started; please report this")
            self._loaded.end(task, Bitmap(len(keys)))
        return task

    def _load(
        self,
        space: ModelSpace | None,
        keys: list[ObjectKey],
        objects: list[Any],
        rows: list[int],
        answer: Bitmap,
        whole: TaskParts,
    ) -> None:
        try:
            if space is None:
                whole.part(False, 0)
                return
            mine, memory = [keys[n] for n in rows], [objects[n] for n in rows]
            layouts = [space.layouts.of_object(one) for one in memory]
            for layout in {layout.signature: layout for layout in layouts}.values():
                space.describe(layout)
            batch = BlockBatch(
                [block for parts in space.blocks(mine, layouts) for block in parts],
                buffers_of(addresses_of(memory, layouts), layouts, memory),
                [part.tag for layout in layouts for part in layout.parts],
            )
            space.store.load(
                batch, on_done=partial(self._finish_load, space, mine, layouts, rows, answer, whole)
            )
        except (StoreClosedError, NotImplementedError, ValueError) as exc:
            self._say(f"objects are not loaded: {exc}")
            whole.part(False, 0)

    def _finish_load(
        self,
        space: ModelSpace,
        keys: list[ObjectKey],
        layouts: list[ObjectLayout],
        rows: list[int],
        answer: Bitmap,
        whole: TaskParts,
        job: Job,
    ) -> None:
        """On an I/O thread."""
        good: list[bool] = []
        try:
            good = whole_objects(job, layouts, present=False)
            if space is not self._spaces.get((space.model_name, space.world_size)):
                good = [False] * len(good)  # weights have changed while it was read
            with self._lock:  # a bitmap of several parts is written by several threads
                for row, fine in zip(rows, good, strict=True):
                    if fine:
                        answer.set(row)
            fine_rows = [n for n, fine in enumerate(good) if fine]
            space.served([keys[n] for n in fine_rows], [layouts[n] for n in fine_rows])
            self._forget(space, keys, layouts, good)
        finally:
            whole.part(bool(good) and all(good), job.bytes_moved)

    @override
    def query_load_result(self, task_id: int) -> Bitmap | None:
        """The result of a load, once."""
        return self._loaded.pop(task_id)

    # What is stored, and what LMCache is told of it -------------------------

    def _tell(self, notify: Callable[..., None], *arguments: Any) -> None:
        """Listeners are LMCache's: what they raise must not end a thread of ours."""
        try:
            notify(*arguments)
        except Exception:
            _log.exception("LifeboatCache: a listener of LMCache's failed")

    def _tell_stored(self, keys: list[ObjectKey], layouts: list[ObjectLayout]) -> None:
        changed = []
        for key, layout in zip(keys, layouts, strict=True):
            known = self._known.layout(key)
            if known is not None and known.signature != layout.signature:
                changed.append(key)
        self._tell_deleted(changed)  # of another size
        fresh, sizes = self._known.add(keys, layouts)
        if fresh:
            self._tell(self._notify_keys_stored, fresh, sizes)

    def _tell_deleted(self, keys: Sequence[ObjectKey]) -> None:
        gone, sizes = self._known.remove(keys)
        if gone:
            self._tell(self._notify_keys_deleted, gone, sizes)

    def _forget(
        self,
        space: ModelSpace,
        keys: Sequence[ObjectKey],
        layouts: Sequence[ObjectLayout],
        good: Sequence[bool] | None = None,
    ) -> None:
        """Tell LMCache of objects that are not there any more."""
        doubtful = [n for n in range(len(keys)) if good is None or not good[n]]
        there = space.present([keys[n] for n in doubtful], [layouts[n] for n in doubtful])
        self._tell_deleted([keys[n] for n, fine in zip(doubtful, there, strict=True) if not fine])

    @override
    def register_listener(self, listener: L2AdapterListener) -> None:
        """Also tell a new listener what is known to be stored already."""
        super().register_listener(listener)
        known = self._known.items()
        if known:
            keys = [key for key, _ in known]
            self._tell(listener.on_l2_keys_stored, keys, [layout.nbytes for _, layout in known])

    @override
    @guarded(None)
    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, but none that is locked. In memory at once, on storage soon after."""
        with self._lock:
            free = [key for key in keys if key not in self._locks]
        for space, rows in self._by_space(free):
            if space is None:
                continue
            known = [(free[n], self._known.layout(free[n])) for n in rows]
            mine = [(key, layout) for key, layout in known if layout is not None]
            blocks = space.blocks([key for key, _ in mine], [layout for _, layout in mine])
            space.store.delete([block for parts in blocks for block in parts])
            self._forget(space, [key for key, _ in mine], [layout for _, layout in mine])

    @override
    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List objects, in a fixed order."""
        return self._known.page(model_name, page_size, cursor)

    @override
    @guarded({"is_healthy": False})
    def report_status(self) -> dict[str, Any]:
        """What ``/status`` shows of the adapter. Unhealthy: something is not kept."""
        spaces = [space.status() for space in list(self._spaces.values())]
        faults = [self._fault] if self._fault else []
        faults += [str(one["reason"]) for one in spaces if one["state"] == State.DISABLED.value]
        return {
            "is_healthy": not faults and not self._closed,
            "type": "lifeboat",
            "faults": faults,
            "objects": len(self._known),
            "locked": len(self._locks),
            "stores_under_way": len(self._stored.open()),
            "loads_under_way": len(self._loaded.open()),
            "models": spaces,
        }

    def _say(self, what: str) -> None:
        """Log what happens again and again once."""
        if what not in self._said and len(self._said) < 100:
            self._said.add(what)
            _log.warning("LifeboatCache: %s", what)

    # Background -------------------------------------------------------------

    def _ask_again(self) -> None:
        """Answer lookups that came while journals were being read."""
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            while self._lookups and not self._stop.is_set():
                for waiting in self._lookups.take():
                    try:
                        answer = waiting.ask(time.monotonic() >= waiting.deadline)
                    except Exception:
                        _log.exception("LifeboatCache: a lookup failed; please report this")
                        answer = Bitmap(waiting.keys)
                    if answer is None:
                        self._lookups.add(waiting)
                    else:
                        self._looked.end(waiting.task, answer)
                self._stop.wait(_RETRY_S)

    def _keep(self) -> None:
        """See to what is not a task: names of before, changed weights, what was evicted."""
        compared = time.monotonic()
        while not self._stop.wait(_TICK_S if self._named() else _TICK_S / 10):
            try:
                for space in list(self._spaces.values()):
                    self._look_after(space)
                if time.monotonic() - compared > _COMPARE_S:
                    compared = time.monotonic()
                    self._compare()
            except StoreClosedError:
                continue
            except Exception:
                _log.exception("LifeboatCache: looking after a store failed; please report this")

    def _named(self) -> bool:
        return all([space.named for space in list(self._spaces.values())])

    def _look_after(self, space: ModelSpace) -> None:
        if space.changed():
            self._leave(space)
            return
        if not space.named and space.store.state is State.READY:
            named = space.names()
            space.named = True
            self._tell_stored([key for key, _ in named], [layout for _, layout in named])
        elif space.store.state is State.DISABLED:
            space.named = True

    def _leave(self, space: ModelSpace) -> None:
        """The model's weights are others now: what is stored belongs to those of before."""
        _log.warning(
            "LifeboatCache: the weights of %s have changed; its KV is not used from here on",
            read_tag(space.model_name)[0],
        )
        with self._lock:
            name = space.model_name, space.world_size
            if self._spaces.get(name) is space:
                del self._spaces[name]
        self._tell_deleted(
            [key for key, _ in self._known.items() if key.model_name == space.model_name]
        )
        thread = threading.Thread(
            target=self._close_space, args=(space,), name="lifeboat-retire", daemon=True
        )
        thread.start()
        self._retiring.append(thread)

    def _compare(self) -> None:
        """Notice what was evicted by the agent, or deleted by another server."""
        known = self._known.items()
        for space, rows in self._by_space([key for key, _ in known]):
            if space is not None and space.store.state is State.READY:
                self._forget(space, [known[n][0] for n in rows], [known[n][1] for n in rows])

    # End --------------------------------------------------------------------

    def _close_space(self, space: ModelSpace) -> None:
        """Close a store; ends when no I/O touches LMCache's memory any more."""
        end = time.monotonic() + _CLOSE_S
        # What came before the store was open is written too, unless weights or a disk hang.
        while space.store.busy() and space.store.state is State.OPENING and time.monotonic() < end:
            time.sleep(_RETRY_S)
        quiet = space.close(_CLOSE_S)
        while not quiet:
            # LMCache frees its memory next. Who wants to end a server whose storage has died
            # has to kill it.
            _log.error(
                "LifeboatCache: storage does not answer, and its I/O may still touch LMCache's "
                "memory: check the disk"
            )
            quiet = space.store.drain(_CLOSE_S)

    @override
    def close(self) -> None:
        """Write what is queued, and return when nothing touches LMCache's memory any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            spaces = list(self._spaces.values())
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()
        waiting = len(self._stored.open())
        if waiting:
            _log.info("LifeboatCache: %d queued stores are written before the end", waiting)
        for space in spaces:
            self._close_space(space)
        for thread in self._retiring:
            thread.join()
        for task in self._looked.open():
            self._looked.end(task, Bitmap(0))
        for notifier in (self._store_done, self._lookup_done, self._load_done):
            notifier.close()
