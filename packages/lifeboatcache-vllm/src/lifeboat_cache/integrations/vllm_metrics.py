"""``lifeboat_*`` metrics on vLLM's own ``/metrics``."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, WeakValueDictionary

from lifeboat_cache.interface import JOB_BOUNDS, Job, Outcome, Store

__all__ = ["TierMetrics"]

_STORED_BLOCKS = "lifeboat_blocks_stored"
_STORED_BYTES = "lifeboat_bytes_stored"
_LOADED_BLOCKS = "lifeboat_blocks_loaded"
_LOADED_BYTES = "lifeboat_bytes_loaded"
_STORE_DROPS = "lifeboat_store_blocks_dropped"
_LOAD_FAILURES = "lifeboat_load_blocks_failed"
_INDEXED = "lifeboat_blocks_indexed"
_STORE_SECONDS = "lifeboat_store_seconds"
_LOAD_SECONDS = "lifeboat_load_seconds"


class _Engine:
    """The metrics of all tiers of one engine."""

    def __init__(self) -> None:
        self.tiers: WeakSet[TierMetrics] = WeakSet()


_engines: WeakValueDictionary[str, _Engine] = WeakValueDictionary()


class TierMetrics:
    """Counts jobs and hands the counts to vLLM. Used under vLLM's manager lock.

    Parameters
    ----------
    engine_id
        VLLM's name of the engine. vLLM adds up the counters of an engine's tiers, but
        keeps only the last value of a gauge, which therefore holds the sum.
    """

    def __init__(self, engine_id: str) -> None:
        self._counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self._taken: list[tuple[str, str, float]] = []  # what, codec, seconds
        self._engine = _engines.setdefault(engine_id, _Engine())
        self._engine.tiers.add(self)
        self._indexed = 0  # of this tier
        self._shown = -1  # of all

    @staticmethod
    def definitions() -> dict[str, Any]:
        """Name to vLLM's metric metadata. Prometheus adds ``_total`` to counters."""
        from vllm.v1.kv_offload.base import (
            OffloadingCounterMetadata,
            OffloadingGaugeMetadata,
            OffloadingHistogramMetadata,
        )

        return {
            _STORED_BLOCKS: OffloadingCounterMetadata("Chunks written to storage."),
            _STORED_BYTES: OffloadingCounterMetadata("KV bytes written to storage."),
            _STORE_SECONDS: OffloadingHistogramMetadata(
                "Store jobs that moved chunks, from submission to completion.",
                labelnames=("codec",),
                buckets=JOB_BOUNDS,
            ),
            _LOADED_BLOCKS: OffloadingCounterMetadata("Chunks read from storage and verified."),
            _LOADED_BYTES: OffloadingCounterMetadata("KV bytes read from storage and verified."),
            _LOAD_SECONDS: OffloadingHistogramMetadata(
                "Load jobs that moved chunks, from submission to completion.",
                labelnames=("codec",),
                buckets=JOB_BOUNDS,
            ),
            _STORE_DROPS: OffloadingCounterMetadata(
                "Chunks not stored, by reason.", labelnames=("reason",)
            ),
            _LOAD_FAILURES: OffloadingCounterMetadata(
                "Chunks not loaded and therefore recomputed, by reason.", labelnames=("reason",)
            ),
            _INDEXED: OffloadingGaugeMetadata(
                "Chunks known to be on storage, of all tiers of the engine."
            ),
        }

    def _add(self, name: str, amount: float, labels: tuple[str, ...] = ()) -> None:
        key = (name, labels)
        self._counts[key] = self._counts.get(key, 0) + amount

    def job(self, job: Job) -> None:
        """Account for a finished job."""
        storing = job.kind == "store"
        outcomes = job.outcomes.tobytes()
        for value in set(outcomes):
            outcome, amount = Outcome(value), outcomes.count(value)
            if outcome is Outcome.OK:
                self._add(_STORED_BLOCKS if storing else _LOADED_BLOCKS, amount)
            elif outcome is not Outcome.PRESENT:
                self._add(
                    _STORE_DROPS if storing else _LOAD_FAILURES, amount, (outcome.name.lower(),)
                )
        self._add(_STORED_BYTES if storing else _LOADED_BYTES, job.bytes_moved)
        if job.bytes_moved:
            name = _STORE_SECONDS if storing else _LOAD_SECONDS
            self._taken.append((name, job.codec or "unknown", job.seconds))

    def disabled(self, chunks: int) -> None:
        """Account for chunks that were to be stored without a store."""
        self._add(_STORE_DROPS, chunks, (Outcome.DISABLED.name.lower(),))

    def take(self, store: Store | None) -> Any:
        """VLLM's stats object with everything since the last call, ``None`` if nothing."""
        self._indexed = len(store) if store is not None else 0
        indexed = sum(tier._indexed for tier in self._engine.tiers)
        if not self._counts and not self._taken and indexed == self._shown:
            return None
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        stats = OffloadingConnectorStats()
        for (name, labels), amount in self._counts.items():
            if amount:
                stats.increase_counter(name, amount, labels)
        self._counts.clear()
        for name, codec, seconds in self._taken:
            stats.observe_histogram(name, seconds, (codec,))
        self._taken.clear()
        if indexed != self._shown:
            stats.set_gauge(_INDEXED, indexed)
            self._shown = indexed
        return stats
