"""The pretended engine of ``lifeboat-cache selftest vllm``.

Everything is vLLM's own (specification, tiering manager, CPU tier, shared memory,
request contexts), except that nobody computes: the CPU tier is written and read here.
No device is touched.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lifeboat_cache.integrations.vllm_activation import TIER_MODULE, TIER_TYPE

__all__ = [
    "BLOCK_TOKENS",
    "CHUNKS",
    "CHUNK_BYTES",
    "JobRecorder",
    "PretendedEngine",
    "Restored",
    "block_hashes",
    "chunk_bytes",
    "offload_keys",
    "shared_memory_of",
]

#: Chunks that are stored, and bytes and tokens of each.
CHUNKS = 32
CHUNK_BYTES = 256 << 10
BLOCK_TOKENS = 128

#: Room of the CPU tier, in chunks: 12 MiB, which even a container's /dev/shm has.
_ROWS = 48

#: Nothing here takes a second; what takes so many does not end.
_PATIENCE_S = 60.0

_SHARED_MEMORY = Path("/dev/shm")


def block_hashes(count: int, *, seed: int) -> list[bytes]:
    """Block hashes of a prompt that nobody wrote."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(count)]


def offload_keys(count: int, *, seed: int) -> list[bytes]:
    """Offload keys of that prompt's chunks."""
    from vllm.v1.kv_offload.base import make_offload_key

    return [bytes(make_offload_key(value, 0)) for value in block_hashes(count, seed=seed)]


def chunk_bytes(count: int, *, seed: int) -> npt.NDArray[np.uint8]:
    """uint8 ``(count, CHUNK_BYTES)`` of noise, the same in every process."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, CHUNK_BYTES), dtype=np.uint8)


def shared_memory_of(directory: Path) -> list[Path]:
    """What engines with a configuration in ``directory`` have in shared memory."""
    mark = f"{directory.name.lstrip('.')}_"
    return sorted(path for path in _SHARED_MEMORY.iterdir() if mark in path.name)


class JobRecorder:
    """Stands between vLLM's manager and the tier and counts jobs.

    Attributes
    ----------
    submitted, reported
        How often each job was submitted and reported, by job id.
    failed
        Ids of jobs reported as not successful.
    loads
        How often each key was asked for.
    """

    def __init__(self, tier: Any) -> None:
        self.submitted: Counter[int] = Counter()
        self.reported: Counter[int] = Counter()
        self.failed: list[int] = []
        self.loads: Counter[bytes] = Counter()
        store, load, finished = tier.submit_store, tier.submit_load, tier.get_finished_jobs

        def submit_store(job_metadata: Any) -> None:
            self.submitted[job_metadata.job_id] += 1
            store(job_metadata)

        def submit_load(job_metadata: Any) -> None:
            self.submitted[job_metadata.job_id] += 1
            self.loads.update(map(bytes, job_metadata.keys))
            load(job_metadata)

        def get_finished_jobs() -> Iterable[Any]:
            results = list(finished())
            for result in results:
                self.reported[result.job_id] += 1
                if not result.success:
                    self.failed.append(result.job_id)
            return results

        tier.submit_store, tier.submit_load = submit_store, submit_load
        tier.get_finished_jobs = get_finished_jobs

    def problems(self) -> list[str]:
        """Jobs that were not reported exactly once, a line each."""
        return [
            f"job {job}: submitted {self.submitted[job]}, reported {self.reported[job]} times"
            for job in sorted(set(self.submitted) | set(self.reported))
            if self.submitted[job] != 1 or self.reported[job] != 1
        ]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a prompt found.

    Attributes
    ----------
    chunks
        The chunks that were loaded, by key, in the prompt's order.
    seconds
        From the first lookup to the last byte.
    """

    chunks: dict[bytes, npt.NDArray[np.uint8]]
    seconds: float


def _filled(kind: type[Any], **known: Any) -> Any:
    """Make one of vLLM's configuration records.

    A field of a newer release that nothing here depends on becomes ``None``.
    """
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = {
        name: None
        for name, field in fields.items()
        if name not in known
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }
    return kind(**known, **unknown)


class PretendedEngine:
    """vLLM's tiering manager with our tier, as it stands in an engine.

    Parameters
    ----------
    config
        Configuration file for the tier, in a directory of its own.
    dtype
        KV data type of the pretended model: another one is another identity.
    """

    def __init__(self, config: Path, *, dtype: str = "bfloat16") -> None:
        from vllm.v1.kv_offload import config as records
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        # Says whose it is: what a process that was killed leaves can be found and removed.
        self.engine_id = f"{config.parent.name.lstrip('.')}_{uuid.uuid4().hex}"
        offloading = _filled(
            records.OffloadingConfig,
            groups=(
                _filled(
                    records.OffloadingGroupConfig,
                    tokens_per_block=BLOCK_TOKENS,
                    layer_names=("layer.0",),
                    group_id=0,
                ),
            ),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": _ROWS * CHUNK_BYTES,
                "secondary_tiers": [
                    {"type": TIER_TYPE, "module_path": TIER_MODULE, "config": str(config)}
                ],
            },
            engine_id=self.engine_id,
            model=_filled(records.OffloadingModelConfig, name="lifeboat-selftest", dtype=dtype),
            cache=_filled(
                records.OffloadingCacheConfig, tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=1
            ),
            parallel=_filled(
                records.OffloadingParallelConfig,
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
        )
        self._spec = OffloadingSpecFactory.create_spec(offloading)
        self._manager: Any = self._spec.get_manager()
        self.tier: Any = self._manager.secondary_tiers[0]
        self.jobs = JobRecorder(self.tier)
        self._requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.shutdown()
        except Exception:
            # What went wrong first is what is worth knowing.
            if kind is None:
                raise

    def _request(self, keys: Sequence[bytes]) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self._manager.on_new_request(context)
        for number, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, number * BLOCK_TOKENS)
        return context

    def _table(self) -> npt.NDArray[np.uint8]:
        """The CPU tier; vLLM can only release it once nobody holds this."""
        return np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def _step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self._manager.on_schedule_end(ScheduleEndContext([], []))

    def _settle(self) -> None:
        end = time.monotonic() + _PATIENCE_S
        while self._manager.has_pending_work():
            if time.monotonic() > end:
                raise TimeoutError(f"jobs are still under way after {_PATIENCE_S:g} s")
            self._step()
            time.sleep(0.001)

    def store(self, keys: Sequence[bytes], chunks: npt.NDArray[np.uint8]) -> float:
        """Pretend to compute a prompt; its chunks go to the CPU tier and from there to ours.

        Returns
        -------
        float
            Seconds until everything was reported.
        """
        context = self._request(keys)
        out = self._manager.prepare_store(list(keys), context)
        if out is None:
            raise RuntimeError("vLLM's CPU tier gave no room to an engine that stores nothing else")
        by_key = dict(zip(keys, chunks, strict=True))
        table = self._table()
        for row, key in zip(out.store_spec.chunk_ids, out.keys_to_store, strict=True):
            table[row] = by_key[bytes(key)]
        del table
        begin = time.perf_counter()
        self._manager.complete_store(out.keys_to_store, context)
        self._manager.on_request_finished(context)
        self._settle()
        return time.perf_counter() - begin

    def restore(self, keys: Sequence[bytes]) -> Restored:
        """Ask for a prompt as vLLM's scheduler does.

        Raises
        ------
        TimeoutError
            If lookups never end.
        """
        from vllm.v1.kv_offload.base import LookupResult

        context = self._request(keys)
        begin = time.perf_counter()
        while True:
            answers = []
            for key in keys:
                answers.append(self._manager.lookup(key, context))
                if answers[-1] is LookupResult.MISS:
                    break
            self._step()
            if all(answer in (LookupResult.HIT, LookupResult.MISS) for answer in answers):
                break
            if time.perf_counter() - begin > _PATIENCE_S:
                raise TimeoutError(f"lookups do not end: {[answer.name for answer in answers]}")
            time.sleep(0.001)
        hits = [
            key for key, answer in zip(keys, answers, strict=False) if answer is LookupResult.HIT
        ]
        found: dict[bytes, npt.NDArray[np.uint8]] = {}
        seconds = time.perf_counter() - begin
        if hits:
            spec = self._manager.prepare_load(hits, context)
            table = self._table()
            for key, row in zip(hits, spec.chunk_ids, strict=True):
                found[key] = table[row].copy()
            del table
            self._manager.complete_load(hits, context)
        self._manager.on_request_finished(context)
        self._settle()
        return Restored(found, seconds)

    def shutdown(self) -> None:
        """End the engine in order."""
        self._manager.shutdown()
