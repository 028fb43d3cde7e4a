"""What the adapter says of a chunk's bytes, against what vLLM's own worker puts there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny_llama

pytest.importorskip("vllm")

import torch
from lifeboat_test_cpu_offload.host_worker import HostCopyWorker
from vllm_configs import Handed, hand_over

from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.integrations import vllm_layout
from lifeboat_cache.integrations.vllm_layout import UnknownLayoutError, chunk_layouts

pytestmark = pytest.mark.engine

_BLOCKS = 2  # of a chunk


class _Region:
    """The part of vLLM's shared region that workers use."""

    def __init__(self, chunks: int, row_bytes: int, worker: int, area: int) -> None:
        self.table = torch.zeros((chunks, row_bytes), dtype=torch.int8)
        self._next = worker * area

    def create_next_worker_view(self, size: int) -> torch.Tensor:
        first, self._next = self._next, self._next + size
        return self.table[:, first : first + size]

    def cleanup(self) -> None:
        """Nothing to let go of."""


class _Spec:
    """Stands between vLLM's connector worker and the test's copy."""

    def __init__(self, handed: Handed, region: _Region) -> None:
        self.config = handed.offloading_config
        self.replicated_layout = self.config.replicated_layout
        self._region = region

    def get_worker(self, caches: Any) -> HostCopyWorker:
        return HostCopyWorker(caches, _BLOCKS, 4, self._region)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "tiny")


def _row_bytes(handed: Handed) -> int:
    offloading = handed.offloading_config
    size = offloading.worker_kv_bytes_per_block * _BLOCKS * offloading.parallel.world_size
    return -(-int(size) // 4096) * 4096


def _layouts(handed: Handed) -> list[KVLayout]:
    return chunk_layouts(
        handed.vllm_config, handed.kv_cache_config, handed.offloading_config, _row_bytes(handed)
    )


def _chunk(handed: Handed, worker: int) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """A chunk of blocks 3 and 1 as vLLM's worker registers and lays it out, and its caches."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.worker.utils import allocate_kv_cache

    order = KVCacheLayout[handed.offloading_config.kv_cache_layout]
    caches = allocate_kv_cache(handed.kv_cache_config, torch.device("cpu"), order)
    generator = torch.Generator().manual_seed(worker)
    for cache in caches.values():
        cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))
    area = int(handed.offloading_config.worker_kv_bytes_per_block) * _BLOCKS
    region = _Region(4, _row_bytes(handed), worker, area)
    spec: Any = _Spec(handed, region)
    connector = OffloadingConnectorWorker(spec, handed.vllm_config, handed.kv_cache_config)
    connector.register_kv_caches(dict(caches))
    assert connector.worker is not None
    groups = len(handed.kv_cache_config.kv_cache_groups)
    source = GPULoadStoreSpec([3, 1], [2] + [0] * (groups - 1), [0] * groups)
    assert connector.worker.submit_store(1, source, CPULoadStoreSpec([2]))
    return region.table[2].numpy().view(np.uint8).copy(), caches


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_keys_and_values_are_where_they_are_said_to_be(
    model: Path, monkeypatch: pytest.MonkeyPatch, order: str, dtype: str, ranks: int
) -> None:
    # As on a GPU; the kernels of the CPU platform have an order of their own.
    monkeypatch.setattr(vllm_layout, "_keys_then_values", lambda: False)
    handed = hand_over(
        model, dtype=dtype, tensor_parallel_size=ranks, extra={"blocks_per_chunk": _BLOCKS}
    )
    handed.vllm_config.cache_config.kv_cache_layout = order
    handed = Handed(
        handed.vllm_config,
        handed.kv_cache_config,
        _with_order(handed.offloading_config, order),
    )
    (layout,) = _layouts(handed)
    heads = tiny_llama.KV_HEADS // ranks
    known = [tensor for tensor in layout.tensors if tensor.role != "opaque"]
    names = handed.kv_cache_config.kv_cache_groups[0].layer_names
    assert len(known) == 2 * len(names) * ranks
    for worker in range(ranks):
        row, caches = _chunk(handed, worker)
        mine = iter(known[2 * len(names) * worker :])
        for number, name in enumerate(names):
            cache = caches[name]  # logical (blocks, heads, tokens, keys and values)
            wanted = torch.cat([cache[3], cache[1]], dim=1).transpose(0, 1)
            for at, role in enumerate(("key", "value")):
                tensor = next(mine)
                assert (tensor.role, tensor.layer, tensor.dtype) == (role, number, dtype)
                assert (tensor.heads, tensor.dim) == (heads, tiny_llama.HEAD_SIZE)
                first = at * tiny_llama.HEAD_SIZE
                part = wanted[..., first : first + tiny_llama.HEAD_SIZE].contiguous()
                found = tensor.gather(row)
                assert np.array_equal(found, part.view(torch.uint8).numpy())


def _with_order(offloading: Any, order: str) -> Any:
    from dataclasses import replace

    return replace(offloading, kv_cache_layout=order)


def test_on_the_cpu_platform_a_head_has_its_keys_first(model: Path) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not built for CPUs")
    handed = hand_over(model, dtype="bfloat16", extra={"blocks_per_chunk": _BLOCKS})
    (layout,) = _layouts(handed)
    row, caches = _chunk(handed, 0)
    names = handed.kv_cache_config.kv_cache_groups[0].layer_names
    known = iter(tensor for tensor in layout.tensors if tensor.role != "opaque")
    for name in names:
        cache = caches[name]
        blocks, heads, tokens, _ = cache.shape
        # As vLLM's CPU attention views a layer's cache.
        halves = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        for half in halves:
            wanted = torch.cat([half[3], half[1]], dim=1).transpose(0, 1).contiguous()
            found = next(known).gather(row)
            assert np.array_equal(found, wanted.view(torch.uint8).numpy())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"extra": {"canonical_layout": True}}, "canonical_layout"),
    ],
)
def test_what_is_not_understood_is_kept_as_it_is(
    model: Path, options: dict[str, Any], why: str
) -> None:
    handed = hand_over(model, **options)
    with pytest.raises(UnknownLayoutError, match=why):
        _layouts(handed)


def test_sizes_that_do_not_fit_are_not_understood(model: Path) -> None:
    handed = hand_over(model, extra={"blocks_per_chunk": _BLOCKS})
    row = _row_bytes(handed)
    with pytest.raises(UnknownLayoutError, match="do not add up"):
        chunk_layouts(
            handed.vllm_config, handed.kv_cache_config, handed.offloading_config, row + 8192
        )
    tensors = handed.kv_cache_config.kv_cache_tensors
    tensors[0].block_stride *= 2
    with pytest.raises(UnknownLayoutError, match="packed"):
        _layouts(handed)
