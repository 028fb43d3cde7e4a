"""The backend through SGLang's real controller and host pools."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_rig import BACKEND, Case, Restored, Rig

from lifeboat_cache.integrations import sglang_engine_store
from lifeboat_cache.store.follower import Follower

Attach = Callable[..., Rig]

EVERYWHERE = [
    pytest.param(Case(), id="page_first_direct"),
    pytest.param(Case(layout="page_first"), id="page_first"),
    pytest.param(Case(layout="layer_first"), id="layer_first"),
    pytest.param(Case(layout="page_head"), id="page_head"),
    pytest.param(Case(mamba=True), id="mamba"),
    pytest.param(Case(mamba=True, layout="page_first"), id="mamba-page_first"),
    pytest.param(Case(mamba=True, layout="layer_first"), id="mamba-layer_first"),
    pytest.param(Case(kind="mla", dim=80), id="mla"),
    pytest.param(Case(kind="mla", dim=80, layout="page_first"), id="mla-page_first"),
    pytest.param(Case(kind="mla", dim=80, layout="layer_first"), id="mla-layer_first"),
    pytest.param(Case(kind="asymmetric"), id="asymmetric"),
    pytest.param(Case(kind="asymmetric", layout="page_first"), id="asymmetric-page_first"),
    pytest.param(Case(tokens=1, pages=2000), id="tokens"),
    pytest.param(Case(tokens=1, pages=2000, layout="layer_first"), id="tokens-layer_first"),
    pytest.param(Case(dtype="float32", dim=24), id="pages-that-are-not-aligned"),
]


def everything(case: Case) -> Restored:
    return Restored(case.pages, case.pages, same=True, state=case.mamba)


NOTHING = Restored(0, 0, same=True, state=False)


@pytest.mark.parametrize("case", EVERYWHERE)
def test_pages_come_back_as_they_were(attach: Attach, case: Case) -> None:
    with attach(case) as before:
        assert before.restore() == NOTHING
        assert before.store() == case.pages
        assert before.restore() == everything(case)
    assert attach(case).restore() == everything(case)


@pytest.mark.parametrize("writes", [True, False], ids=["zero-copy", "copies"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "page_head"])
def test_what_one_interface_stores_the_other_reads(
    attach: Attach, layout: str, writes: bool
) -> None:
    case = Case(layout=layout, zero_copy=writes)
    with attach(case) as writer:
        assert writer.store() == case.pages
    reader = attach(case.but(zero_copy=not writes))
    assert (reader.controller.page_get_func.__name__ == "_page_get_zero_copy") is not writes
    assert reader.restore() == everything(case)
    stored = dict(reader.ours.moves)
    assert reader.store() == case.pages
    assert reader.ours.moves["store_pages"] == stored["store_pages"]  # all there already


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_layouts_whose_pages_are_alike_share_them(attach: Attach, kind: str) -> None:
    case = Case(kind=kind, layout="page_first_direct", dim=80)
    with attach(case) as writer:
        assert writer.store() == case.pages
    assert attach(case.but(layout="layer_first")).restore() == everything(case)


def test_pages_of_one_token_are_alike_in_every_layout(attach: Attach) -> None:
    case = Case(tokens=1, pages=300, layout="page_first")
    with attach(case) as writer:
        assert writer.store() == case.pages
    for layout in ("page_first_direct", "layer_first"):
        with attach(case.but(layout=layout)) as rig:
            assert rig.restore() == everything(case)


def test_zero_copy_is_asked_for_without_a_word_in_the_configuration(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attach(Case(pages=2)).controller.page_set_func.__name__ == "_page_set_zero_copy"
    monkeypatch.setenv("LIFEBOAT_SGLANG_ZERO_COPY", "0")
    assert attach(Case(pages=2)).controller.page_set_func.__name__ == "_generic_page_set"
    given = attach(Case(pages=2), backend={**BACKEND, "interface_v1": 1})
    assert given.controller.page_set_func.__name__ == "_page_set_zero_copy"


def test_a_prefix_ends_where_the_state_of_a_hybrid_model_does(attach: Attach) -> None:
    case = Case(mamba=True, pages=12)
    rig = attach(case)
    assert rig.store(pages=7) == 7
    # The KV of more pages, without their state: SGLang stores no state between nodes.
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    indices = rig.kv.alloc(12 * case.tokens)
    hashes = rig.hashes()
    assert all(rig.ours.batch_set_v1(hashes, indices))
    state = [
        PoolTransfer(PoolName.MAMBA, keys=[hashes[-1]], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    ]
    found = rig.ours.batch_exists_v2(hashes, state)
    assert found.kv_hit_pages == 7
    assert found.restorable_prefix_pages == [7]
    assert found.extra_pool_hit_pages == {PoolName.KV: 12, PoolName.MAMBA: 7}


def test_every_policy_of_a_sidecar(attach: Attach) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    rig = attach(Case(pages=12))
    ours = rig.ours
    rig.ready()
    hashes = rig.hashes()
    # The indexer's pages lie beside the KV's; here in a second pool like it.
    ours.register_mem_host_pool_v2(rig.kv, PoolName.INDEXER)
    indices = rig.kv.alloc(12 * rig.case.tokens)
    assert all(ours.batch_set_v1(hashes, indices))

    def has(pages: list[int], **options: Any) -> Any:
        mine = [hashes[page] for page in pages]
        part = [indices[page * rig.case.tokens : (page + 1) * rig.case.tokens] for page in pages]
        import torch

        done = ours.batch_set_v2(
            [PoolTransfer(PoolName.INDEXER, host_indices=torch.cat(part), keys=mine)]
        )
        assert done == {PoolName.INDEXER: [True] * len(pages)}
        return ours.batch_exists_v2(hashes, [PoolTransfer(PoolName.INDEXER, **options)])

    pages = [0, 1, 2, 4, 5, 9]
    found = has(pages)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
    found = has(pages, keys=hashes[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [1, 2, 3, 6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 12, PoolName.INDEXER: 6}
    found = has(
        pages,
        keys=hashes[:6],
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=4,
        group_pages=2,
    )
    # Groups of pages (0, 1), (2, 3), (4, 5): the first is whole and stands for 4 pages.
    assert found.extra_pool_hit_pages == {PoolName.KV: 12, PoolName.INDEXER: 4}
    assert found.kv_hit_pages == 12
    unknown = ours.batch_exists_v2(hashes, [PoolTransfer(PoolName.SWA)])
    assert (unknown.kv_hit_pages, unknown.restorable_prefix_pages) == (0, [])


def test_a_page_that_is_there_is_not_stored_again_and_answered_true(attach: Attach) -> None:
    rig = attach()
    assert rig.store() == rig.case.pages
    moved = rig.ours.moves["store_pages"]
    assert rig.store() == rig.case.pages
    assert rig.ours.moves["store_pages"] == moved


def test_ranks_have_pages_of_their_own(attach: Attach) -> None:
    case = Case(ranks=2)
    with attach(case) as first:
        assert first.store() == case.pages
    with attach(case.but(rank=1)) as second:
        assert second.restore() == NOTHING
        assert second.store() == case.pages
        assert second.restore() == everything(case)
    assert attach(case).restore() == everything(case)
    assert attach(case.but(ranks=1)).restore() == NOTHING


def test_ranks_share_kv_that_is_the_same_on_all_of_them(attach: Attach) -> None:
    case = Case(kind="mla", dim=80, ranks=2)
    with attach(case) as writer:
        assert writer.store() == case.pages
    with attach(case.but(rank=1)) as other:
        assert not other.controller.storage_config.is_storage_writer
        assert other.restore(content=case) == everything(case)
    # Another size of tensor parallelism has the same latent.
    assert attach(case.but(rank=3, ranks=4)).restore(content=case) == everything(case)


def test_ranks_that_share_kv_keep_their_own_states(attach: Attach) -> None:
    case = Case(kind="mla", dim=80, ranks=2, mamba=True)
    with attach(case) as writer:
        assert writer.store() == case.pages
    with attach(case.but(rank=1)) as other:
        assert other.restore(content=case) == NOTHING  # its state is not there
        other.store()
        found = other.restore(content=case)
        assert (found.hit_pages, found.state) == (case.pages, True)


def test_a_cache_salt_keeps_requests_apart(attach: Attach) -> None:
    case = Case(salt="tenant-a")
    with attach(case) as writer:
        assert writer.store() == case.pages
    for salt in (None, "tenant-b"):
        with attach(case.but(salt=salt)) as other:
            assert other.restore() == NOTHING
    assert attach(case).restore() == everything(case)


def test_a_model_whose_kv_is_in_further_pools_only(model: Path, home: Path) -> None:
    """DeepSeek V4: the KV pool counts pages and holds nothing."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool

    from lifeboat_cache.integrations.sglang_selftest_pages import open_backend

    device = [torch.zeros(4, 96, dtype=torch.uint8) for _ in range(3)]
    rows = DeepSeekV4PagedHostPool("c4", device, 96, 10, 64, layout="page_first", pin_memory=False)
    rows.kv_buffer.copy_(torch.randint(0, 256, rows.kv_buffer.shape, dtype=torch.uint8))
    kept = rows.kv_buffer.clone()
    ours = open_backend(home / "lifeboat.yaml", LogicalHostPool(640, 64))
    ours.register_mem_host_pool_v2(rows, PoolName.DEEPSEEK_V4_C4)
    hashes = [f"{page:064x}" for page in range(8)]
    indices = torch.arange(8 * 64)
    name = PoolName.DEEPSEEK_V4_C4

    def restorable() -> int:
        return int(ours.batch_exists_v2(hashes, [PoolTransfer(name)]).kv_hit_pages)

    assert ours.batch_set_v1(hashes, indices) == [True] * 8
    assert restorable() == 0
    first = PoolTransfer(name, indices[: 5 * 64], keys=hashes[:5])
    assert ours.batch_set_v2([first]) == {name: [True] * 5}
    assert restorable() == 5
    assert ours.batch_exists(hashes) == 0  # of the KV alone nothing can be said
    rows.kv_buffer.zero_()
    assert ours.batch_get_v1(hashes[:5], indices[: 5 * 64]) == [True] * 5
    assert ours.batch_get_v2([first]) == {name: [True] * 5}
    assert torch.equal(rows.kv_buffer[:5], kept[:5])
    assert not rows.kv_buffer[5:].any()
    ours.close()


def test_three_threads_at_once_get_no_wrong_byte(attach: Attach) -> None:
    """SGLang asks, loads and stores on threads of their own."""
    case = Case(pages=60)
    rig = attach(case)
    assert rig.store() == case.pages
    ours, hashes = rig.ours, rig.hashes()
    stop = threading.Event()
    problems: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            if ours.batch_exists(hashes) != case.pages:
                problems.append("a page was not found")
            time.sleep(0.001)  # else each step of the others' waits 5 ms for the interpreter

    def keep() -> None:
        turn = 0
        indices = rig.kv.alloc(2 * case.tokens)
        while not stop.is_set():
            turn += 1
            new = [f"{turn:032x}{page:032x}" for page in range(2)]
            if not all(ours.batch_set_v1(new, indices)):
                problems.append("a page was not kept")

    # The pool has room for the prompt and two pages more.
    workers = [threading.Thread(target=work) for work in (ask, keep)]
    for worker in workers:
        worker.start()
    try:
        found = [rig.restore() for _ in range(10)]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert found == [everything(case)] * 10
    assert problems == []


def test_kv_goes_by_the_ladder_and_state_is_exact(attach: Attach, home: Path) -> None:
    import torch
    from sglang_rig import _same_state, _starts

    config = (home / "lifeboat.yaml").read_text()
    (home / "lifeboat.yaml").write_text(config.replace("local: raw", "local: fp8"))
    case = Case(pages=20, mamba=True)
    rig = attach(case)
    rig.ready()
    values = torch.randn(rig.kv.kv_buffer.shape, generator=torch.Generator().manual_seed(1))
    rig.kv.kv_buffer.copy_(values.to(torch.bfloat16))
    kept = rig.kv.kv_buffer.clone()
    indices = rig.kv.alloc(20 * case.tokens)
    hashes = rig.hashes()
    assert all(rig.ours.batch_set_v1(hashes, indices))
    counters = rig.ours.store.counters()
    assert counters.bytes_stored == 20 * rig.ours._pools["kv"].pages.page_bytes
    stored = sum(path.stat().st_blocks * 512 for path in (home / "kv").rglob("*.segment"))
    assert stored < 0.7 * counters.bytes_stored
    rig.kv.kv_buffer.zero_()
    assert all(rig.ours.batch_get_v1(hashes, indices))
    pages = [start // case.tokens for start in _starts(indices, case.tokens)]
    back, was = rig.kv.kv_buffer[:, pages].float(), kept[:, pages].float()
    assert not torch.equal(back, was)
    assert float((back - was).norm() / was.norm()) < 0.05
    rig.kv.free(indices)
    # The state, which rides along as SGLang stores it.
    rig.store()
    assert rig.mamba is not None
    slot = rig.mamba.alloc(1)
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    done = rig.ours.batch_get_v2([PoolTransfer(PoolName.MAMBA, slot, keys=[hashes[-1]])])
    assert done == {PoolName.MAMBA: [True]}
    assert _same_state(rig.mamba, int(slot[0]), case)


def test_clear_deletes_what_is_stored(attach: Attach) -> None:
    rig = attach()
    assert rig.store() == rig.case.pages
    assert rig.controller.clear_storage_backend()
    assert rig.restore() == NOTHING
    assert rig.store() == rig.case.pages
    assert rig.restore() == everything(rig.case)


def test_calls_after_the_end_are_misses(attach: Attach) -> None:
    rig = attach(Case(pages=4))
    assert rig.store() == 4
    ours = rig.ours
    ours.close()
    hashes, indices = rig.hashes(), rig.kv.alloc(4 * rig.case.tokens)
    assert ours.batch_exists(hashes) == 0
    assert ours.batch_get_v1(hashes, indices) == [False] * 4
    assert ours.batch_set_v1(hashes, indices) == [False] * 4
    assert ours.batch_exists_v2(hashes).kv_hit_pages == 0
    assert not ours.batch_set(hashes, [])
    ours.close()


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Stores do not end recovering before the event is set."""
    go_on, recover = threading.Event(), Follower.recover

    def late(self: Follower) -> int:
        assert go_on.wait(60)
        return recover(self)

    monkeypatch.setattr(Follower, "recover", late)
    return go_on


class Asked(threading.Thread):
    """How many pages are there, asked by another thread than that which schedules."""

    def __init__(self, rig: Rig, hashes: list[str]) -> None:
        super().__init__(daemon=True)
        self.rig, self.hashes, self.pages = rig, hashes, -1
        self.start()

    def run(self) -> None:
        self.pages = self.rig.ours.batch_exists(self.hashes)


def test_a_lookup_waits_for_a_store_that_recovers(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()
    with attach(case) as before:
        assert before.store() == case.pages
    go_on = held_up(monkeypatch)
    monkeypatch.setattr(sglang_engine_store, "_LOOKUP_S", 60.0)
    rig = attach(case)
    hashes = rig.hashes()
    assert rig.ours.batch_exists(hashes) == 0  # the thread that schedules
    asked = Asked(rig, hashes)
    asked.join(0.2)
    assert asked.is_alive()
    go_on.set()
    asked.join(60)
    assert asked.pages == case.pages


def test_lookups_wait_no_more_once_a_store_has_taken_too_long(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = held_up(monkeypatch)
    monkeypatch.setattr(sglang_engine_store, "_LOOKUP_S", 60.0)
    monkeypatch.setattr(sglang_engine_store, "_RECOVERY_S", 0.0)
    rig = attach(Case())
    asked = Asked(rig, rig.hashes())
    asked.join(50)
    assert asked.pages == 0
    go_on.set()


def test_indices_that_are_no_pages_are_refused(attach: Attach) -> None:
    import torch

    rig = attach(Case(pages=4))
    ours = rig.ours
    rig.ready()
    hashes = rig.hashes()
    for wrong in (
        torch.arange(4 * 64 - 1),
        torch.arange(4 * 64) + 1,
        torch.arange(4 * 64) + 1_000_000,
        torch.arange(4 * 64) - 64,
    ):
        assert ours.batch_set_v1(hashes, wrong) == [False] * 4
        assert ours.batch_get_v1(hashes, wrong) == [False] * 4
    assert ours.batch_exists(hashes) == 0


def test_a_configuration_that_cannot_be_read_leaves_sglang_without_the_cache(
    attach: Attach, home: Path
) -> None:
    (home / "lifeboat.yaml").write_text("storage: [nonsense")
    rig = attach(Case(pages=3))
    assert "lifeboat.yaml" in rig.ours.reason
    assert rig.store() == 0
    assert rig.restore() == NOTHING


def test_statistics_say_what_was_moved(attach: Attach, home: Path) -> None:
    rig = attach(Case(pages=10))
    rig.store()
    rig.restore()
    found = rig.backend.get_stats()
    assert sum(found.backup_pgs) == 10
    assert sum(found.prefetch_pgs) == 10
    assert all(rate > 0 for rate in (*found.backup_bandwidth, *found.prefetch_bandwidth))
    again = rig.backend.get_stats()
    assert [*again.backup_pgs, *again.prefetch_pgs] == []
    facts = rig.ours._kept.published.facts()
    assert (facts["engine"], facts["served_tokens"]) == ("sglang", 10 * 64)


def test_the_status_shows_the_engine_and_what_it_was_given(attach: Attach, home: Path) -> None:
    rig = attach(Case(pages=10))
    rig.store()
    rig.restore()
    deadline = time.monotonic() + 30
    shown: list[str] = []
    while time.monotonic() < deadline:
        shown = [path.read_text() for path in (home / "run").glob("*.json")]
        for document in map(json.loads, shown):
            engine = document["document"].get("engine", {})
            if engine.get("name") == "sglang" and '"served_tokens": 640' in json.dumps(document):
                assert engine["model"] == "org/tiny"
                return
        time.sleep(0.2)
    raise AssertionError(shown)
