"""Where the pages of SGLang's host pools lie, against what the pools say themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_rig import Case, _kv_pool, _mamba_pool

from lifeboat_cache.integrations.sglang_keys import PageKeys, is_sharded, key_space
from lifeboat_cache.integrations.sglang_pools import UnusablePoolError, describe_pool

CASES = [
    Case(layout=layout, kind=kind, dim=80, tokens=tokens, pages=5)
    for kind in ("mha", "mla")
    for layout in ("layer_first", "page_first", "page_first_direct")
    for tokens in (1, 16)
] + [Case(layout="page_head", pages=5, tokens=16)]


def name(case: Case) -> str:
    return f"{case.kind}-{case.layout}-{case.tokens}"


def payload(pages: Any, number: int) -> bytes:
    buffers = pages.buffers(np.array([number]))
    return b"".join(bytes(piece) for piece in buffers.pieces(0))


def fill(pool: Any, seed: int = 3) -> None:
    import torch

    buffers = pool.kv_buffer
    for buffer in buffers if isinstance(buffers, (list, tuple)) else [buffers]:
        raw = buffer.view(torch.uint8)
        random = np.random.default_rng(seed).integers(0, 256, tuple(raw.shape), dtype=np.uint8)
        raw.copy_(torch.from_numpy(random))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_payload_is_the_pools_own_flat_page(model: Path, case: Case) -> None:
    import torch

    pool = _kv_pool(case)
    fill(pool)
    pages = describe_pool(pool, "kv")
    for number in (0, 3, case.pages):
        flat = pool.get_data_page(number * case.tokens, flat=True)
        assert payload(pages, number) == flat.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_layout_says_what_every_byte_is(model: Path, case: Case) -> None:
    """K, V and the latent, layer by layer and token by token, as the pool's tensor has them."""
    import torch
    from sglang_rig import _views

    pool = _kv_pool(case)
    fill(pool)
    pages = describe_pool(pool, "kv")
    assert pages.facts == {}
    assert {one.dtype for one in pages.layout.tensors} == {"bfloat16"}
    whole = np.frombuffer(payload(pages, 2), dtype=np.uint8)
    views = _views(pool, 2 * case.tokens, case)
    roles = ["latent"] if case.kind == "mla" else ["key", "value"]
    assert sum(one.nbytes for one in pages.layout.tensors) == pages.page_bytes
    for tensor in pages.layout.tensors:
        expected = views[roles.index(tensor.role)][tensor.layer].contiguous()
        assert np.array_equal(tensor.gather(whole), expected.view(torch.uint8).numpy())


def test_zero_copy_addresses_hold_the_same_bytes(model: Path) -> None:
    """SGLang lists pieces in another order for layer_first; they are the same pieces."""
    import torch

    for case in CASES:
        pool = _kv_pool(case)
        pages = describe_pool(pool, "kv")
        addresses, sizes = pool.get_page_buffer_meta(torch.arange(2 * case.tokens, 3 * case.tokens))
        buffers = pages.buffers(np.array([2]))
        ours = set(zip(buffers.addresses.tolist(), buffers.lengths.tolist(), strict=True))
        assert _covered(ours) == _covered(set(zip(addresses, sizes, strict=True))), name(case)


def _covered(pieces: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges that pieces cover, put together where they touch."""
    found: list[tuple[int, int]] = []
    for begin, size in sorted(pieces):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], begin + size)
        else:
            found.append((begin, begin + size))
    return found


def test_a_state_is_all_of_its_tensors(model: Path) -> None:
    import torch

    pool = _mamba_pool(Case(mamba=True))
    fill(pool)
    pages = describe_pool(pool, "mamba")
    assert (pages.tokens, pages.layout.tensors[0].role) == (1, "opaque")
    flat = pool.get_data_page(4, flat=True).view(torch.uint8).numpy().tobytes()
    assert payload(pages, 4) == flat
    assert pages.facts["states"] == [
        [[3, 1, 4, 16, 16], "torch.float32"],
        [[3, 1, 96, 3], "torch.bfloat16"],
    ]


def test_side_states_of_a_slot_are_part_of_it(model: Path) -> None:
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, 8, 4, 8),
        conv=(torch.zeros(2, 8, 6, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(8, 5),),
    )
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, layout="page_first")
    fill(pool)
    with pytest.raises(NotImplementedError):
        pool.get_page_buffer_meta(torch.arange(1))
    pages = describe_pool(pool, "mamba")
    flat = pool.get_data_page(3, flat=True).view(torch.uint8).numpy().tobytes()
    assert payload(pages, 3) == flat


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pools_of_rows_are_addressed_too(model: Path, layout: str) -> None:
    import torch
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    device = [torch.zeros(4, 96, dtype=torch.uint8) for _ in range(3)]
    pool = DeepSeekV4PagedHostPool(
        "deepseek_v4_c4", device, 96, 6, 16, layout=layout, pin_memory=False
    )
    fill(pool)
    pages = describe_pool(pool, "deepseek_v4_c4")
    assert pages.facts["layout"] == layout
    flat = pool.get_data_page(5 * 16, flat=True).view(torch.uint8).numpy().tobytes()
    assert payload(pages, 5) == flat


def test_a_pool_that_only_counts_pages_has_none(model: Path) -> None:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    pages = describe_pool(LogicalHostPool(256, 64), "kv")
    assert (pages.page_bytes, pages.tokens) == (0, 64)


def test_a_pool_without_pages_that_can_be_stored_is_refused(model: Path) -> None:
    class Scaled:
        page_size, size, size_per_token, layout = 16, 160, 8, "page_first"
        kv_buffer = np.zeros(1)

        def get_data_page(self, index: int, flat: bool = True) -> Any:
            raise NotImplementedError("no pages")

        get_page_buffer_meta = get_data_page

    with pytest.raises(UnusablePoolError, match="choose another --hicache-mem-layout"):
        describe_pool(Scaled(), "kv")


def test_pages_that_do_not_lie_evenly_are_refused(model: Path) -> None:
    case = Case(layout="page_first", tokens=16, pages=5)
    pool = _kv_pool(case)
    original = pool.get_page_buffer_meta

    def scattered(indices: Any) -> Any:
        addresses, sizes = original(indices)
        return [one + (int(indices[0]) // 16 == 6) * 64 for one in addresses], sizes

    def no_page(index: int, flat: bool = True) -> Any:
        raise NotImplementedError

    pool.get_data_page, pool.get_page_buffer_meta = no_page, scattered
    with pytest.raises(UnusablePoolError, match="evenly"):
        describe_pool(pool, "kv")


def test_key_spaces_tell_apart_what_is_not_alike(model: Path) -> None:
    spaces: dict[bytes, list[str]] = {}
    for case in CASES:
        spaces.setdefault(key_space(describe_pool(_kv_pool(case), "kv"), ()), []).append(name(case))
    assert sorted(map(sorted, spaces.values())) == sorted(
        [
            ["mha-layer_first-1", "mha-page_first-1", "mha-page_first_direct-1"],
            ["mha-layer_first-16", "mha-page_first_direct-16"],
            ["mha-page_first-16"],
            ["mha-page_head-16"],
            ["mla-layer_first-1", "mla-page_first-1", "mla-page_first_direct-1"],
            ["mla-layer_first-16", "mla-page_first_direct-16"],
            ["mla-page_first-16"],
        ]
    )


def test_keys_of_pools_and_shards_never_meet(model: Path) -> None:
    pool = _kv_pool(Case(tokens=16, pages=3))
    hashes = [f"{number:064x}" for number in range(10)]
    found = [
        PageKeys(describe_pool(pool, name), shard).keys(hashes)
        for name in ("kv", "swa", "draft")
        for shard in ((), (0, 2), (1, 2), (0, 4))
    ]
    assert len({key for keys in found for key in keys}) == len(found) * len(hashes)


def test_which_pools_ranks_share(model: Path) -> None:
    mla, mha = _kv_pool(Case(kind="mla", dim=80, pages=2)), _kv_pool(Case(pages=2))
    mamba = _mamba_pool(Case())
    assert [is_sharded(pool, replicated=True) for pool in (mla, mha, mamba)] == [False, True, True]
    assert all(is_sharded(pool, replicated=False) for pool in (mla, mha, mamba))
