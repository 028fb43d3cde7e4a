"""An offloading worker that copies with numpy inside the host's memory."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

__all__ = ["HostCopyWorker"]


class HostCopyWorker(OffloadingWorker):
    """Stand-in for vLLM's ``CPUOffloadingWorker``, built with the same arguments.

    Each transfer is done when it is submitted. ``pages[t]`` views KV tensor
    ``t`` as ``(blocks, bytes)`` and ``slots[t]`` its part of the offload region
    as ``(chunks, blocks per chunk, bytes)``.
    """

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: Any = None,
        canonical_layout: bool = False,
    ) -> None:
        if mmap_region is None or canonical_layout:
            msg = (
                "the CPU test worker copies into the tiers' shared region in the direct layout "
                "only; use TieringOffloadingSpec without canonical_layout"
            )
            raise ValueError(msg)
        self._blocks_per_chunk = blocks_per_chunk
        self._region = mmap_region
        self._refs = kv_caches.group_data_refs
        self._finished: list[Any] = []
        self._pages: list[npt.NDArray[np.int8]] = []
        self._slots: list[npt.NDArray[np.int8]] = []
        for cache in kv_caches.tensors:
            size = cache.page_size_bytes
            self._pages.append(cache.tensor.view(torch.int8).view((-1, size)).numpy())
            view = mmap_region.create_next_worker_view(size * blocks_per_chunk)
            self._slots.append(view.unflatten(1, (blocks_per_chunk, size)).numpy())

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy KV blocks into the offload region."""
        return self._copy(job_id, blocks=src_spec, chunks=dst_spec, store=True)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Copy chunks of the offload region into KV blocks."""
        return self._copy(job_id, blocks=dst_spec, chunks=src_spec, store=False)

    def _copy(self, job_id: int, *, blocks: Any, chunks: Any, store: bool) -> bool:
        begin = time.perf_counter()
        copied = 0
        next_block = next_chunk = 0
        for refs, count, first in zip(
            self._refs, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            if not count:
                continue
            # A transfer may begin inside a chunk.
            place = np.arange(count) + first % self._blocks_per_chunk
            in_use = int(place[-1]) // self._blocks_per_chunk + 1
            block = blocks.block_ids[next_block : next_block + count]
            chunk = chunks.block_ids[next_chunk : next_chunk + in_use]
            next_block += count
            next_chunk += in_use
            row, column = chunk[place // self._blocks_per_chunk], place % self._blocks_per_chunk
            for ref in refs:
                page, slot = self._pages[ref.tensor_idx], self._slots[ref.tensor_idx]
                size = ref.page_size_bytes
                if store:
                    slot[row, column, :size] = page[block, :size]
                else:
                    page[block, :size] = slot[row, column, :size]
                copied += count * size
        if next_block != len(blocks.block_ids) or next_chunk != len(chunks.block_ids):
            msg = f"job {job_id}: blocks and chunks of the transfer do not correspond"
            raise AssertionError(msg)
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=copied,
                transfer_time=time.perf_counter() - begin,
            )
        )
        return True

    def get_finished(self) -> list[Any]:
        """Return the results since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every transfer was done when it was submitted."""

    def shutdown(self) -> None:
        """Release the views, then the region they lie in."""
        self._pages.clear()
        self._slots.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None
