"""``LifeboatTier``: a secondary tier of vLLM's native KV offloading.

Runs in the engine core under the scheduler: no method waits for storage, except
:meth:`LifeboatTier.drain_jobs` and :meth:`LifeboatTier.shutdown`. Works with vLLM
0.32 and 0.33. Importing this module has no side effects; vLLM also does it in the
API server.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from lifeboat_cache.config import load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.engines.guard import guarded
from lifeboat_cache.errors import LifeboatError, StoreClosedError
from lifeboat_cache.integrations import vllm_epoch, vllm_lora, vllm_prompts
from lifeboat_cache.integrations.vllm_handover import engine_config
from lifeboat_cache.integrations.vllm_layout import UnknownLayoutError, chunk_layouts
from lifeboat_cache.integrations.vllm_lora import EngineAdapters
from lifeboat_cache.integrations.vllm_metrics import TierMetrics
from lifeboat_cache.integrations.vllm_namespace import find_namespace
from lifeboat_cache.integrations.vllm_published import Published, show_stand_down
from lifeboat_cache.integrations.vllm_requests import RequestKeys
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    Job,
    KVLayout,
    Lookup,
    Namespace,
    Outcome,
    State,
    Store,
    open_block_store,
    require_interface,
)
from lifeboat_cache.registry import attach

__all__ = ["LifeboatTier"]

_log = logging.getLogger("lifeboat_cache")

#: After vLLM has emptied its CPU tier, a worker may still write a slot for a transfer
#: of before. vLLM 0.33 waits for the workers' reports before it fills slots again; with
#: 0.32 nothing is offered for so many steps and seconds, whichever end first.
_RESET_STEPS, _RESET_S = 16, 5.0
_RESET_IS_FENCED = hasattr(OffloadingManager, "on_reset_flushed")

_HIT, _RETRY = int(Lookup.HIT), int(Lookup.RETRY)

#: Longest time to wait at the end for stores that were left before, in seconds.
_RETIRE_S = 60.0


class LifeboatTier(SecondaryTierManager):
    """Keeps KV chunks on storage and gives them back, verified.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        As vLLM passes them. The view has shape ``(num_chunks, row_bytes)``.
    config
        Path of a configuration file; without it the usual resolution applies.
    ignored
        Keywords that newer releases of vLLM may add.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        config: str | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__(
            offloading_spec=offloading_spec,
            primary_kv_view=primary_kv_view,
            tier_type=tier_type,
            backpressure_detector=backpressure_detector,
        )
        if ignored:
            _log.info("LifeboatCache: tier settings not used: %s", ", ".join(sorted(ignored)))
        strides, shape = primary_kv_view.strides, primary_kv_view.shape
        if strides is None or shape is None:
            raise ValueError("vLLM's CPU tier is not a table: report this with vLLM's version")
        self._row_bytes = int(strides[0])
        # Only the address is kept: an exported array would forbid vLLM to release the view.
        self._base = int(np.asarray(primary_kv_view).ctypes.data)
        self._live: set[str] = set()
        self._requests: dict[str, RequestKeys] = {}
        self._step = 0
        self._said_small = False
        self._adapters = EngineAdapters()
        self._held = (0, 0.0)  # step and time until which nothing is offered
        # Jobs without a result yet; the value says whether the store has them.
        self._jobs: dict[int, bool] = {}
        self._jobs_lock = threading.Lock()
        self._done: deque[tuple[int, list[OffloadKey], Store, Job]] = deque()
        self._refused: deque[tuple[int, list[OffloadKey], bool]] = deque()
        self._events: deque[OffloadingEvent] = deque()
        self._publish_events = bool(
            getattr(
                getattr(offloading_spec, "kv_events_config", None), "enable_kv_cache_events", False
            )
        )
        self._metrics = TierMetrics(offloading_spec.config.engine_id)
        self._published = Published(offloading_spec)
        self._stopping = threading.Event()
        self._closed = False
        self._epoch = ""
        self._epoch_used = False  # whether anything was given to the epoch's store
        self._store: Store | None = None
        self._retired: list[Store] = []
        self._retiring: list[threading.Thread] = []
        self._config: LiveConfig | None = None
        self._layouts: list[KVLayout] = []  # by group number; empty if not known
        self._wait_s = 0.0
        self._rows = int(shape[0])
        self._pending_bytes = max(self._row_bytes, self._rows * self._row_bytes // 2)
        try:
            self._begin(Path(config) if config else None)
        except LifeboatError as exc:
            # A typing error in a file must not take the engine down.
            _log.error("LifeboatCache stands down: %s", exc)
            show_stand_down(str(exc))
        except Exception:
            _log.exception("LifeboatCache stands down: it could not start; please report this")
            show_stand_down("it could not start: see the log, and report this")

    def _begin(self, config: Path | None) -> None:
        require_interface(1, 4, "lifeboatcache-vllm")
        handed = engine_config(self._offloading_spec.config.engine_id)
        if handed is not None:
            # Of this engine: others of the process may apply the same adapters otherwise.
            self._adapters = EngineAdapters(getattr(handed.vllm_config, "lora_config", None))
        self._config = LiveConfig(load_config(config))
        settings = self._config.config
        self._wait_s = settings.engine.native_promotion_wait_s
        if handed is not None:
            self._layouts = self._describe(handed.vllm_config, handed.kv_cache_config)
        # First: without it nobody would notice that weights change.
        vllm_epoch.on_change(self._weights_changed)
        vllm_prompts.install()
        self._store = self._open(
            partial(self._identify, settings.security.namespace_salt.get_secret_value())
        )

    def _describe(self, vllm_config: Any, kv_cache_config: Any) -> list[KVLayout]:
        try:
            return chunk_layouts(
                vllm_config, kv_cache_config, self._offloading_spec.config, self._row_bytes
            )
        except UnknownLayoutError as exc:
            _log.info("LifeboatCache: chunks are kept as they are, in no codec: %s", exc)
            return []

    # Identity ---------------------------------------------------------------

    def _open(self, namespace: Any) -> Store:
        if self._config is None:
            raise RuntimeError("the tier stands down and opens no store")
        store = open_block_store(
            self._config, namespace, pending_bytes=self._pending_bytes, native=True
        )
        for layout in self._layouts:
            store.describe(layout)
        self._published = Published(self._offloading_spec)  # each store has counts of its own
        attach(store, self._published.facts)
        return store

    def _identify(self, salt: str) -> Namespace:
        """Name the namespace; on a thread of the store, since weights are read."""
        found = find_namespace(
            self._offloading_spec.config, salt, self._row_bytes, self._stopping.is_set
        )
        _log.info(
            "LifeboatCache: namespace %s for %s",
            found.hex[:12],
            found.display.get("model", "this model"),
        )
        return found

    def _weights_changed(self, what: str) -> None:
        """The engine's weights are others from now on: leave the namespace.

        What is stored afterwards goes to a namespace of this process's own, which
        is removed at its end, for nobody can tell what weights they are.
        """
        old, config = self._store, self._config
        if old is None or config is None or self._closed:
            return
        self._requests.clear()
        if self._epoch and not self._epoch_used:
            return  # nothing to leave: a trainer may announce weights tensor by tensor
        self._store = None  # whatever goes wrong below
        self._epoch, self._epoch_used = uuid.uuid4().hex, False
        _log.warning(
            "LifeboatCache: weights may have changed (%s); stored KV is not used from here on", what
        )
        identity = {"engine": "vllm", "epoch": self._epoch}
        display = {"model": "after a change of weights", "temporary": True}
        self._retired.append(old)
        self._store = self._open(Namespace.from_identity(identity, display))
        thread = threading.Thread(
            target=self._retire, args=(old,), name="lifeboat-retire", daemon=True
        )
        thread.start()
        self._retiring = [*(one for one in self._retiring if one.is_alive()), thread]

    def _retire(self, store: Store) -> None:
        """Close a store that was left, on a thread of its own: it may have to wait."""
        if self._close(store):
            self._retired.remove(store)

    def _keys_of(self, context: ReqContext) -> RequestKeys | None:
        """The request's keys, or ``None`` if its KV is not for keeping."""
        known = self._requests.get(context.req_id)
        if known is not None:
            return known
        space = self._adapters.key_space(context)
        if space is None:
            return None
        known = RequestKeys(context, space, self._rows)
        if context.req_id in self._live:  # else nobody would ever say that it is finished
            self._requests[context.req_id] = known
        return known

    # Lookup -----------------------------------------------------------------

    @override
    @guarded(LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from memory. ``RETRY`` while recovery runs, but not for ever."""
        store = self._store
        if store is None:
            return LookupResult.MISS
        if self._step < self._held[0] and time.monotonic() < self._held[1]:
            return LookupResult.MISS
        request = self._requests.get(req_context.req_id) or self._keys_of(req_context)
        if request is None:
            pending = self._adapters.pending(req_context)
            return LookupResult.RETRY if pending else LookupResult.MISS
        answer = request.answer(key, self._step, store.lookup)
        if answer == _HIT:
            if request.promotions.offer(key, self._step):
                return LookupResult.HIT
            self._say_small()
        if answer == _RETRY and time.monotonic() - request.started < self._wait_s:
            return LookupResult.RETRY
        return LookupResult.MISS

    def _say_small(self) -> None:
        if not self._said_small:
            self._said_small = True
            _log.warning(
                "LifeboatCache: vLLM's CPU tier of %d chunks is too small for a prompt whose KV is "
                "on storage: the rest of it is computed; raise engine.native_cpu_gb",
                self._rows,
            )

    # Jobs -------------------------------------------------------------------

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue chunks of the CPU tier for storing."""
        self._submit(job_metadata, store=True)

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue chunks for loading into the CPU tier."""
        self._submit(job_metadata, store=False)

    def _submit(self, job: TransferJob, *, store: bool) -> None:
        keys = list(job.keys)  # may be a set: listed once, parallel to chunk_ids
        with self._jobs_lock:
            self._jobs[job.job_id] = False
        try:
            target = self._store
            request = self._keys_of(job.req_context)
            if target is None or request is None or self._closed:
                self._refuse(job.job_id, keys, store)
                return
            rows = np.asarray(job.chunk_ids, dtype=np.int64)
            if bool(((rows < 0) | (rows >= self._rows)).any()):
                raise ValueError(f"vLLM's job {job.job_id} names rows that its CPU tier has not")
            buffers = BlockBuffers.from_rows(
                self._base, self._row_bytes, rows, self._row_bytes, self._primary_kv_view
            )
            if store:
                self._epoch_used = True
                facts = request.facts(keys)
                batch = BlockBatch(
                    request.store_keys(keys),
                    buffers,
                    self._tags(keys),
                    positions=facts.positions,
                    groups=facts.groups,
                    families=facts.families,
                    parents=facts.parents,
                )
            else:
                batch = BlockBatch(request.store_keys(keys), buffers, self._tags(keys))
                request.promotions.loading(keys)
            start = partial(self._start, target, batch, job.job_id, keys, store)
            if store and vllm_lora.lora_of(job.req_context) is not None:
                # Kept only if the adapter's files are still what was fingerprinted.
                self._adapters.confirm(job.req_context, start)
            else:
                start(True)
        except Exception:
            # vLLM waits for a result of every job; a fault of ours is a miss, not a hang.
            _log.exception("LifeboatCache: a job could not be started; please report this")
            self._refuse(job.job_id, keys, store)

    def _tags(self, keys: list[OffloadKey]) -> int | list[int]:
        """Layout tag of each chunk."""
        layouts = self._layouts
        if len(layouts) == 1:
            return layouts[0].tag
        if not layouts:
            return 0
        return [layouts[int(get_offload_group_idx(key))].tag for key in keys]

    def _start(
        self,
        target: Store,
        batch: BlockBatch,
        job_id: int,
        keys: list[OffloadKey],
        store: bool,
        allowed: bool,
    ) -> None:
        """Give a job to the store, or report that it is not wanted."""
        with self._jobs_lock:
            if self._jobs.get(job_id) is not False:
                return  # reported already: its rows are somebody else's by now
            self._jobs[job_id] = allowed
        try:
            if allowed:
                run = target.store if store else target.load
                run(batch, on_done=partial(self._finished, job_id, keys, target))
                return
        except StoreClosedError:
            pass
        except Exception:
            _log.exception("LifeboatCache: a job could not be started; please report this")
        with self._jobs_lock:
            self._jobs[job_id] = False
        self._refuse(job_id, keys, store)

    def _refuse(self, job_id: int, keys: list[OffloadKey], store: bool) -> None:
        """Report a job that the store has not got as failed, once."""
        with self._jobs_lock:
            if self._jobs.get(job_id) is not False:
                return
            self._refused.append((job_id, keys, store))
            del self._jobs[job_id]

    def _finished(self, job_id: int, keys: list[OffloadKey], target: Store, job: Job) -> None:
        """On an I/O thread."""
        with self._jobs_lock:
            self._done.append((job_id, keys, target, job))
            self._jobs.pop(job_id, None)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Results of all jobs that ended since the last call, each once."""
        results = []
        while self._refused:
            job_id, keys, store = self._refused.popleft()
            if not store:
                self._miss(keys)
            elif self._store is None:
                self._metrics.disabled(len(keys))
            results.append(JobResult(job_id=job_id, success=False))
        while self._done:
            job_id, keys, target, job = self._done.popleft()
            try:
                self._metrics.job(job)
                if job.kind == "load" and target is self._store:
                    self._published.loaded(keys, job.outcomes)
                results.append(self._result(job_id, keys, target, job))
            except Exception:  # see _submit
                _log.exception("LifeboatCache: a job's end was not understood; please report this")
                results.append(JobResult(job_id=job_id, success=False))
        return results

    def _result(self, job_id: int, keys: list[OffloadKey], target: Store, job: Job) -> JobResult:
        if job.kind == "load" and target is not self._store:
            done = []  # weights have changed while it was read
        elif job.ok:
            done = keys
        else:
            good = (job.outcomes == Outcome.OK) | (job.outcomes == Outcome.PRESENT)
            done = [key for key, fine in zip(keys, good.tolist(), strict=True) if fine]
        if job.kind == "load":
            if len(done) < len(keys):
                self._miss(set(keys) - set(done))
        elif self._publish_events:
            fresh = [
                key
                for key, outcome in zip(keys, job.outcomes.tolist(), strict=True)
                if outcome == Outcome.OK
            ]
            if fresh:
                self._events.append(
                    OffloadingEvent(keys=fresh, medium=Medium.STORAGE, removed=False)
                )
        return JobResult(
            job_id=job_id,
            success=len(done) == len(keys),
            successful_keys=done if job.kind == "load" else None,
            transfer_time=job.seconds,
            transfer_bytes=job.bytes_moved,
        )

    def _miss(self, failed: Collection[OffloadKey]) -> None:
        """Answer MISS for what could not be loaded; vLLM would ask for ever otherwise."""
        if failed:
            for request in self._requests.values():
                request.forget(failed)

    @override
    def has_pending_work(self) -> bool:
        """Whether results are still to come."""
        return bool(self._jobs or self._done or self._refused)

    # Requests ---------------------------------------------------------------

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunk-level offloading, as vLLM does by default."""
        self._live.add(req_context.req_id)
        return RequestOffloadingContext()

    @override
    @guarded(None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as used. vLLM 0.32 and 0.33 never call this."""
        store, request = self._store, self._keys_of(req_context)
        if store is not None and request is not None and keys:
            store.touch(request.store_keys(list(keys)))

    @override
    @guarded(None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Mark everything the request used, wherever vLLM found it.

        Chunks found in GPU or CPU memory never reach the tier; without this the
        most used prefixes would look the coldest.
        """
        try:
            request = self._keys_of(req_context)
            if request is not None:
                positions = request.positions()
                if positions and self._store is not None:
                    self._store.touch(request.store_keys(list(positions)))
        finally:
            self._live.discard(req_context.req_id)
            self._requests.pop(req_context.req_id, None)

    @override
    @guarded(None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step ends: answers that were not final may be asked for again."""
        self._step += 1
        for req_id in context.preempted_req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                request.promotions.clear()
        vllm_lora.expire()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        """KV events of chunks that reached storage."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    # Metrics ----------------------------------------------------------------

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Definitions of the ``lifeboat_*`` metrics on vLLM's ``/metrics``."""
        return TierMetrics.definitions()

    @override
    @guarded(None)
    def get_stats(self) -> Any:
        """What happened since the last call, ``None`` if nothing did."""
        return self._metrics.take(self._store)

    # End --------------------------------------------------------------------

    @override
    def drain_jobs(self) -> None:
        """Wait until no I/O touches the CPU tier. Queued jobs are finished, not dropped.

        Except those that wait for the model's identity for too long: weights may
        lie on a disk that does not answer.
        """
        patience = time.monotonic() + self._wait_s
        vllm_lora.expire()
        while self._jobs:  # stores of adapters' KV may still wait to be confirmed
            vllm_lora.expire()
            late = time.monotonic() > patience
            for store in self._stores():
                store.drain(0.1, cancel=late and store.state is State.OPENING)
            time.sleep(0.001)
        for request in self._requests.values():
            request.promotions.clear()  # the CPU tier is emptied
        if not _RESET_IS_FENCED:
            self._held = (self._step + _RESET_STEPS, time.monotonic() + _RESET_S)

    def _stores(self) -> list[Store]:
        return [*self._retired, *([self._store] if self._store is not None else [])]

    def _close(self, store: Store) -> bool:
        """Close a store; whether its I/O touches the CPU tier no more."""
        quiet = store.close()
        namespace = store.namespace
        if quiet and namespace is not None and "epoch" in namespace.identity:
            store.purge()
        return quiet

    @override
    def shutdown(self) -> None:
        """Write what is queued and let go of the CPU tier.

        Raises
        ------
        RuntimeError
            If storage does not answer; vLLM then keeps the memory it may still
            write to.
        """
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        vllm_epoch.forget(self._weights_changed)
        for thread in self._retiring:
            thread.join(_RETIRE_S)
        quiet = all([self._close(store) for store in self._stores()])
        if not quiet:
            raise RuntimeError(
                "LifeboatCache: storage does not answer, its I/O may still touch the CPU tier; "
                "check the disk"
            )

    @property
    def state(self) -> State:
        """State of the store, for tests and tools."""
        return self._store.state if self._store is not None else State.DISABLED

    @property
    def store(self) -> Store | None:
        """The block store, for tests and tools."""
        return self._store
