"""The test-only worker copies the right blocks to the right places."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
host_worker = pytest.importorskip("lifeboat_test_cpu_offload.host_worker")

_BLOCKS, _CHUNKS = 40, 12
_PAGES = (96, 64)  # bytes of a block in each of two tensors
_IN_USE = 80  # the first tensor's pages are padded


class _Region:
    """A worker's part of each row of the offload region."""

    def __init__(self, bytes_per_row: int) -> None:
        self.rows = torch.zeros((_CHUNKS, bytes_per_row), dtype=torch.int8)
        self.closed = False
        self._next = 0

    def create_next_worker_view(self, size: int) -> Any:
        view = self.rows[:, self._next : self._next + size]
        self._next += size
        return view

    def cleanup(self) -> None:
        self.closed = True


def _caches(seed: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        SimpleNamespace(
            tensor=torch.randint(-128, 128, (_BLOCKS, page), dtype=torch.int8, generator=generator),
            page_size_bytes=page,
        )
        for page in _PAGES
    ]
    # Two groups: the first uses both tensors, the second only the second one.
    refs = [
        [
            SimpleNamespace(tensor_idx=0, page_size_bytes=_IN_USE),
            SimpleNamespace(tensor_idx=1, page_size_bytes=_PAGES[1]),
        ],
        [SimpleNamespace(tensor_idx=1, page_size_bytes=_PAGES[1])],
    ]
    return SimpleNamespace(tensors=tensors, group_data_refs=refs)


def _blocks(ids: list[int], sizes: list[int], first: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        block_ids=np.array(ids, dtype=np.int32), group_sizes=sizes, block_indices=first
    )


def _chunks(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(block_ids=np.array(ids, dtype=np.int32))


@pytest.mark.parametrize("per_chunk", [1, 2, 4])
def test_blocks_return_to_other_places(per_chunk: int) -> None:
    source, target = _caches(1), _caches(2)
    region = _Region(sum(_PAGES) * per_chunk)
    stores = host_worker.HostCopyWorker(source, per_chunk, _CHUNKS, region)
    region._next = 0
    loads = host_worker.HostCopyWorker(target, per_chunk, _CHUNKS, region)

    count = 2 * per_chunk
    saved = list(range(30, 30 + count)), [5, 17]
    stores.submit_store(
        7, _blocks([*saved[0], *saved[1][:1]], [count, 1], [0, 0]), _chunks(9, 3, 6)
    )
    (result,) = stores.get_finished()
    assert (result.job_id, result.success) == (7, True)
    assert result.transfer_size == count * (_IN_USE + _PAGES[1]) + _PAGES[1]
    assert stores.get_finished() == []

    # The second half alone: a transfer that begins `per_chunk` blocks into the request.
    before = target.tensors[0].tensor.clone()
    wanted = list(range(1, 1 + per_chunk))
    loads.submit_load(8, _chunks(3), _blocks(wanted, [per_chunk, 0], [per_chunk, 0]))
    for at, block in enumerate(wanted):
        origin = 30 + per_chunk + at
        got, expected = target.tensors[0].tensor[block], source.tensors[0].tensor[origin]
        assert torch.equal(got[:_IN_USE], expected[:_IN_USE])
        assert torch.equal(got[_IN_USE:], before[block, _IN_USE:])
        assert torch.equal(target.tensors[1].tensor[block], source.tensors[1].tensor[origin])
    untouched = [block for block in range(_BLOCKS) if block not in wanted]
    assert torch.equal(target.tensors[0].tensor[untouched], before[untouched])


def test_load_may_begin_inside_a_chunk() -> None:
    source, target = _caches(1), _caches(2)
    region = _Region(sum(_PAGES) * 4)
    worker = host_worker.HostCopyWorker(source, 4, _CHUNKS, region)
    worker.submit_store(1, _blocks([0, 1, 2, 3], [4, 0], [0, 0]), _chunks(11))
    region._next = 0
    other = host_worker.HostCopyWorker(target, 4, _CHUNKS, region)
    other.submit_load(2, _chunks(11), _blocks([20, 21], [2, 0], [2, 0]), expedited=True)
    assert torch.equal(target.tensors[1].tensor[[20, 21]], source.tensors[1].tensor[[2, 3]])


def test_transfer_that_does_not_add_up_is_refused() -> None:
    worker = host_worker.HostCopyWorker(_caches(1), 2, _CHUNKS, _Region(sum(_PAGES) * 2))
    with pytest.raises(AssertionError, match="do not correspond"):
        worker.submit_store(1, _blocks([0, 1], [2, 0], [0, 0]), _chunks(4, 5))


def test_shutdown_releases_the_region() -> None:
    region = _Region(sum(_PAGES))
    worker = host_worker.HostCopyWorker(_caches(1), 1, _CHUNKS, region)
    worker.shutdown()
    worker.shutdown()
    assert region.closed
