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
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from lifeboat_cache.config import Config, load_config
from lifeboat_cache.errors import LifeboatError, StoreClosedError
from lifeboat_cache.integrations import vllm_epoch, vllm_lora
from lifeboat_cache.integrations.vllm_metrics import TierMetrics
from lifeboat_cache.integrations.vllm_namespace import find_namespace
from lifeboat_cache.integrations.vllm_requests import RequestKeys
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Job,
    Lookup,
    Namespace,
    Outcome,
    State,
    open_block_store,
)

__all__ = ["LifeboatTier"]

_log = logging.getLogger("lifeboat_cache")


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
        self._requests: dict[str, RequestKeys] = {}
        self._step = 0
        self._done: deque[tuple[int, list[OffloadKey], Job]] = deque()
        self._refused: deque[JobResult] = deque()
        self._active = 0
        self._active_lock = threading.Lock()
        self._events: deque[OffloadingEvent] = deque()
        self._publish_events = bool(
            getattr(
                getattr(offloading_spec, "kv_events_config", None), "enable_kv_cache_events", False
            )
        )
        self._metrics = TierMetrics()
        self._stopping = threading.Event()
        self._closed = False
        self._epoch = ""
        self._store: BlockStore | None = None
        self._retired: list[BlockStore] = []
        self._config: Config | None = None
        self._wait_s = 0.0
        try:
            self._config = load_config(Path(config) if config else None).config
        except LifeboatError as exc:
            # A typing error in a file must not take the engine down.
            _log.error("LifeboatCache stands down: %s", exc)
            return
        self._wait_s = self._config.engine.native_promotion_wait_s
        rows = int(shape[0])
        self._pending_bytes = max(self._row_bytes, rows * self._row_bytes // 2)
        self._store = self._open(
            partial(self._identify, self._config.security.namespace_salt.get_secret_value())
        )
        vllm_epoch.on_change(self._weights_changed)

    # Identity ---------------------------------------------------------------

    def _open(self, namespace: Any) -> BlockStore:
        if self._config is None:
            raise RuntimeError("the tier stands down and opens no store")
        return open_block_store(self._config, namespace, pending_bytes=self._pending_bytes)

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
        self._epoch = uuid.uuid4().hex
        _log.warning(
            "LifeboatCache: weights may have changed (%s); stored KV is not used from here on", what
        )
        identity = {"engine": "vllm", "epoch": self._epoch}
        display = {"model": "after a change of weights", "temporary": True}
        self._retired.append(old)
        self._requests.clear()
        self._store = self._open(Namespace.from_identity(identity, display))

    def _keys_of(self, context: ReqContext) -> RequestKeys | None:
        """The request's keys, or ``None`` if its KV is not for keeping."""
        known = self._requests.get(context.req_id)
        if known is not None:
            return known
        space = vllm_lora.key_space(context)
        if space is None:
            return None
        known = self._requests[context.req_id] = RequestKeys(context, space)
        return known

    # Lookup -----------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from memory. ``RETRY`` while recovery runs, but not for ever."""
        store = self._store
        if store is None:
            return LookupResult.MISS
        request = self._keys_of(req_context)
        if request is None:
            pending = vllm_lora.pending(req_context)
            return LookupResult.RETRY if pending else LookupResult.MISS
        answer = request.answer(key, self._step, store.lookup)
        if answer == Lookup.HIT:
            return LookupResult.HIT
        if answer == Lookup.RETRY and time.monotonic() - request.started < self._wait_s:
            return LookupResult.RETRY
        return LookupResult.MISS

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
        try:
            target = self._store
            request = self._keys_of(job.req_context)
            if target is None or request is None or self._closed:
                self._refuse(job.job_id)
                return
            buffers = BlockBuffers.from_rows(
                self._base, self._row_bytes, job.chunk_ids, self._row_bytes, self._primary_kv_view
            )
            if store:
                facts = request.facts(keys)
                batch = BlockBatch(
                    request.store_keys(keys),
                    buffers,
                    positions=facts.positions,
                    groups=facts.groups,
                    families=facts.families,
                    parents=facts.parents,
                )
            else:
                batch = BlockBatch(request.store_keys(keys), buffers)
            start = partial(self._start, target, batch, job.job_id, keys, store)
            with self._active_lock:
                self._active += 1
            if store and vllm_lora.lora_of(job.req_context) is not None:
                # Kept only if the adapter's files are still what was fingerprinted.
                vllm_lora.confirm(job.req_context, start)
            else:
                start(True)
        except Exception:
            # vLLM waits for a result of every job; a fault of ours is a miss, not a hang.
            _log.exception("LifeboatCache: a job could not be started; please report this")
            self._refuse(job.job_id)

    def _start(
        self,
        target: BlockStore,
        batch: BlockBatch,
        job_id: int,
        keys: list[OffloadKey],
        store: bool,
        allowed: bool,
    ) -> None:
        """Give a job to the store, or report that it is not wanted."""
        try:
            if allowed:
                run = target.store if store else target.load
                run(batch, on_done=partial(self._finished, job_id, keys))
                return
        except StoreClosedError:
            pass
        except Exception:
            _log.exception("LifeboatCache: a job could not be started; please report this")
        self._refuse(job_id)
        with self._active_lock:
            self._active -= 1

    def _refuse(self, job_id: int) -> None:
        self._refused.append(JobResult(job_id=job_id, success=False))

    def _finished(self, job_id: int, keys: list[OffloadKey], job: Job) -> None:
        """On an I/O thread."""
        self._done.append((job_id, keys, job))
        with self._active_lock:
            self._active -= 1

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Results of all jobs that ended since the last call, each once."""
        results = []
        while self._refused:
            results.append(self._refused.popleft())
        while self._done:
            job_id, keys, job = self._done.popleft()
            self._metrics.job(job)
            results.append(self._result(job_id, keys, job))
        return results

    def _result(self, job_id: int, keys: list[OffloadKey], job: Job) -> JobResult:
        good = (job.outcomes == Outcome.OK) | (job.outcomes == Outcome.PRESENT)
        done = [key for key, fine in zip(keys, good.tolist(), strict=True) if fine]
        if job.kind == "load":
            failed = set(keys) - set(done)
            if failed:
                for request in self._requests.values():
                    request.forget(failed)
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

    @override
    def has_pending_work(self) -> bool:
        """Whether results are still to come."""
        return bool(self._active or self._done or self._refused)

    # Requests ---------------------------------------------------------------

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunk-level offloading, as vLLM does by default."""
        return RequestOffloadingContext()

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as used. vLLM 0.32 and 0.33 never call this."""
        store, request = self._store, self._keys_of(req_context)
        if store is not None and request is not None and keys:
            store.touch(request.store_keys(list(keys)))

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Mark everything the request used, wherever vLLM found it.

        Chunks found in GPU or CPU memory never reach the tier; without this the
        most used prefixes would look the coldest.
        """
        request = self._keys_of(req_context)
        if request is not None:
            positions = request.positions()
            if positions and self._store is not None:
                self._store.touch(request.store_keys(list(positions)))
        self._requests.pop(req_context.req_id, None)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step ends: answers that were not final may be asked for again."""
        self._step += 1
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
    def get_stats(self) -> Any:
        """What happened since the last call, ``None`` if nothing did."""
        return self._metrics.take(self._store)

    # End --------------------------------------------------------------------

    @override
    def drain_jobs(self) -> None:
        """Wait until no I/O touches the CPU tier. Queued jobs are finished, not dropped."""
        vllm_lora.expire()
        while self._active:  # stores of adapters' KV may still wait to be confirmed
            vllm_lora.expire()
            for store in self._stores():
                store.drain(0.1)
            time.sleep(0.001)
        self._close_retired()

    def _stores(self) -> list[BlockStore]:
        return [*self._retired, *([self._store] if self._store is not None else [])]

    def _close_retired(self) -> None:
        for store in list(self._retired):
            if not store.busy():
                self._close(store)
                self._retired.remove(store)

    def _close(self, store: BlockStore) -> bool:
        quiet = store.close()
        namespace, target = store.namespace, store.target
        if (
            quiet
            and namespace is not None
            and target is not None
            and ("epoch" in namespace.identity)
        ):
            target.purge(namespace.hex)
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
    def store(self) -> BlockStore | None:
        """The block store, for tests and tools."""
        return self._store
