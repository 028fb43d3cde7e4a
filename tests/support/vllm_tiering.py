"""Drives vLLM's real tiering manager and a tier of ours, without an engine.

Everything is vLLM's own (specification, manager, CPU tier, shared memory) except
that nobody computes: the test writes and reads the CPU tier itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

__all__ = ["Engine", "offload_keys", "random_chunks"]

_STEP_END = ScheduleEndContext([], [])


def offload_keys(count: int, *, seed: int = 0, group: int = 0) -> list[bytes]:
    """Offload keys with random block hashes."""
    rng = np.random.default_rng(seed)
    return [bytes(make_offload_key(rng.bytes(32), group)) for _ in range(count)]


def random_chunks(count: int, row_bytes: int, *, seed: int = 1) -> npt.NDArray[np.uint8]:
    """uint8 ``(count, row_bytes)`` of noise."""
    return np.random.default_rng(seed).integers(0, 255, (count, row_bytes), dtype=np.uint8)


class Engine:
    """A tiering manager with one tier of ours, as it would stand in an engine.

    Parameters
    ----------
    tier
        Configuration of the secondary tier.
    rows
        Chunks that the CPU tier holds.
    row_bytes
        Bytes of a chunk.
    model, dtype, tokens_per_block, tp_size
        Of the engine that is pretended.
    events
        Whether it publishes KV events.
    tiers
        Several secondary tiers instead of the one.
    """

    def __init__(
        self,
        tier: dict[str, Any],
        *,
        rows: int = 64,
        row_bytes: int = 64 << 10,
        model: str = "pretended",
        dtype: str = "bfloat16",
        tokens_per_block: int = 128,
        tp_size: int = 1,
        events: bool = False,
        tiers: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.engine_id = f"test_{uuid.uuid4().hex}"
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block, ("layer.0",), 0),),
            worker_kv_bytes_per_block=row_bytes // tp_size,
            enable_kv_cache_events=events,
            extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": rows * row_bytes,
                "secondary_tiers": [dict(one) for one in tiers or (tier,)],
            },
            engine_id=self.engine_id,
            model=OffloadingModelConfig(model, dtype),
            cache=OffloadingCacheConfig(tokens_per_block, 1),
            parallel=OffloadingParallelConfig(0, tp_size, tp_size, 1, 1, 1, 0, 1, None, True),
        )
        self.tokens_per_block = tokens_per_block
        self.spec = OffloadingSpecFactory.create_spec(config)
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self._requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def shared_memory(self) -> Path:
        """The CPU tier's file."""
        return Path(f"/dev/shm/vllm_offload_{self.engine_id}.mmap")

    def request(self, keys: Sequence[bytes]) -> Any:
        """A new request whose prompt has these chunks."""
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self.manager.on_new_request(context)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * self.tokens_per_block)
        return context

    def table(self) -> npt.NDArray[np.uint8]:
        """The CPU tier. Let go of it before :meth:`shutdown`."""
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def step(self) -> None:
        """An engine step without requests."""
        self.manager.on_schedule_end(_STEP_END)

    def settle(self, timeout: float = 30.0) -> None:
        """Step until nothing is under way."""
        end = time.monotonic() + timeout
        while self.manager.has_pending_work():
            if time.monotonic() > end:
                raise TimeoutError("jobs are still under way")
            self.step()
            time.sleep(0.001)

    def store(self, keys: Sequence[bytes], chunks: npt.NDArray[np.uint8]) -> None:
        """Compute a prompt: its chunks go to the CPU tier and from there to ours."""
        context = self.request(keys)
        out = self.manager.prepare_store(list(keys), context)
        assert out is not None, "the CPU tier has no room"
        table = self.table()
        by_key = dict(zip(keys, chunks, strict=True))
        for row, key in zip(out.store_spec.chunk_ids, out.keys_to_store, strict=True):
            table[row] = by_key[bytes(key)]
        del table
        self.manager.complete_store(out.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()

    def restore(
        self, keys: Sequence[bytes], timeout: float = 30.0
    ) -> dict[bytes, npt.NDArray[np.uint8]]:
        """Ask for a prompt as the scheduler does; the chunks found, by key."""
        context = self.request(keys)
        end = time.monotonic() + timeout
        while True:
            answers = []
            for key in keys:
                answers.append(self.manager.lookup(key, context))
                if answers[-1] is LookupResult.MISS:
                    break
            self.step()
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers):
                break
            if time.monotonic() > end:
                raise TimeoutError(f"lookups do not end: {answers}")
            time.sleep(0.001)
        hits = [
            key for key, answer in zip(keys, answers, strict=False) if answer is LookupResult.HIT
        ]
        found: dict[bytes, npt.NDArray[np.uint8]] = {}
        if hits:
            spec = self.manager.prepare_load(hits, context)
            table = self.table()
            for key, row in zip(hits, spec.chunk_ids, strict=True):
                found[key] = table[row].copy()
            del table
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        self.settle()
        return found

    def shutdown(self) -> None:
        """End the engine in order."""
        self.manager.shutdown()
