"""Pages of one operation are moved ahead of the calls that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang_rig import Case, Rig

from lifeboat_cache.integrations import sglang_windows
from lifeboat_cache.interface import Outcome

Attach = Callable[..., Rig]

#: Three calls' worth.
CASE = Case(tokens=1, pages=300)


class Watched:
    """What a backend's store is told to move, and what had been told when each call ended."""

    def __init__(self, rig: Rig, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[Any] = []
        self.begun: list[int] = []
        backend, store = rig.ours, rig.ours.store
        name = "batch_get_v1" if kind == "load" else "batch_set_v1"
        move, call = getattr(store, kind), getattr(backend, name)

        def moved(*args: Any, **kwargs: Any) -> Any:
            self.jobs.append(move(*args, **kwargs))
            return self.jobs[-1]

        def called(*args: Any, **kwargs: Any) -> Any:
            answer = call(*args, **kwargs)
            self.begun.append(len(self.jobs))
            return answer

        monkeypatch.setattr(store, kind, moved)
        monkeypatch.setattr(backend, name, called)

    def pages(self) -> list[int]:
        return [len(job.outcomes) for job in self.jobs]


def test_later_pages_are_on_their_way_when_the_first_call_ends(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attach(CASE)
    with monkeypatch.context() as patch:
        stores = Watched(rig, "store", patch)
        assert rig.store() == CASE.pages
    with monkeypatch.context() as patch:
        loads = Watched(rig, "load", patch)
        found = rig.restore()
    assert (found.loaded_pages, found.same) == (CASE.pages, True)
    for watched in (stores, loads):
        assert watched.pages() == [128, 128, 44]
        assert watched.begun == [3, 3, 3]
        assert all(job.done() for job in watched.jobs)
    # Each page is counted once, by the call that asked for it.
    assert rig.ours.moves["load_pages"] == rig.ours.moves["store_pages"] == CASE.pages


def test_large_pages_are_not_all_on_their_way_at_once(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lifeboat_cache.integrations.sglang_ahead.WINDOW_BYTES", 1)
    rig = attach(CASE)
    assert rig.store() == CASE.pages
    watched = Watched(rig, "load", monkeypatch)
    assert rig.restore().same
    assert watched.pages() == [1] * CASE.pages
    assert watched.begun[0] <= 128 + sglang_windows._WINDOWS


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_nothing_is_on_its_way_when_an_operation_is_over(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """The memory behind what was loaded goes back to the pool then."""
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

    rig = attach(CASE)
    assert rig.store() == CASE.pages
    watched = Watched(rig, "load", monkeypatch)
    operation = PrefetchOperation(CacheRequestHandle("r", 0), [])
    operation.hash_value = rig.hashes()
    operation.host_indices = rig.kv.alloc(CASE.pages)
    inner = rig.controller._page_transfer_kv_batch
    calls: list[int] = []

    def transfer(*args: Any) -> Any:
        if len(calls) == stop:
            operation.mark_terminate()
        calls.append(1)
        return inner(*args)

    monkeypatch.setattr(rig.controller, "_page_transfer_kv_batch", transfer)
    rig.controller._page_transfer(operation)
    assert len(watched.begun) == stop + 1
    assert len(watched.jobs) == 3
    assert all(job.done() for job in watched.jobs)
    assert rig.ours._mover.wait_idle(0)


def test_a_missing_page_ends_the_operation_there(attach: Attach) -> None:
    rig = attach(CASE)
    assert rig.store(200) == 200
    # As if another process had deleted them after the lookup.
    operation = _prefetch(rig)
    loaded = 0
    while True:
        ack = rig.controller.ack_prefetch_queue.get(timeout=60)
        loaded = max(loaded, ack.completed_tokens or 0)
        if ack.completed_req:
            break
    assert loaded == 200
    assert rig.ours._mover.wait_idle(0)
    assert len(operation.hash_value) == CASE.pages


def test_calls_for_other_pages_are_answered_by_themselves(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attach(CASE)
    assert rig.store() == CASE.pages
    hashes, indices = rig.hashes(), rig.kv.alloc(CASE.pages)

    class Operation:
        hash_value = hashes
        host_indices = indices
        prefix_keys = None

    watched = Watched(rig, "load", monkeypatch)
    with rig.ours.lifeboat_operations.under_way(Operation()):
        assert all(rig.ours.batch_get_v1(hashes[:128], indices[:128]))
        assert watched.pages() == [128, 128, 44]
        # Not what comes next: nothing that is on its way may be taken for it.
        assert all(rig.ours.batch_get_v1(hashes[10:20], indices[10:20]))
        assert watched.pages()[3:] == [10]
        assert all(job.done() for job in watched.jobs)
        # Nor is the same page elsewhere.
        assert all(rig.ours.batch_get_v1(hashes[128:256], indices[:128]))
        assert watched.pages()[4:] == [128]
    assert rig.ours._mover.wait_idle(0)


def test_stores_that_fail_at_first_are_tried_again(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attach(CASE)
    store = rig.ours.store
    inner = store.store
    refused: list[Any] = []

    def move(batch: Any, *args: Any, **kwargs: Any) -> Any:
        job = inner(batch, *args, **kwargs)
        if not refused:
            job.wait()
            refused.append(job)
            job.outcomes[5] = Outcome.BUSY
        return job

    monkeypatch.setattr(store, "store", move)
    assert rig.store() == CASE.pages
    assert rig.restore().same


def test_an_end_in_the_middle_of_an_operation_leaves_no_memory_in_use(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = attach(CASE)
    assert rig.store() == CASE.pages
    watched = Watched(rig, "load", monkeypatch)
    hashes, indices = rig.hashes(), rig.kv.alloc(CASE.pages)

    class Operation:
        hash_value = hashes
        host_indices = indices
        prefix_keys = None

    with rig.ours.lifeboat_operations.under_way(Operation()):
        assert all(rig.ours.batch_get_v1(hashes[:128], indices[:128]))
        rig.ours.finish(0.0)
        assert not any(rig.ours.batch_get_v1(hashes[128:256], indices[128:256]))
    assert all(job.done() for job in watched.jobs)


def _prefetch(rig: Rig) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

    operation = PrefetchOperation(CacheRequestHandle("r", 0), [])
    operation.hash_value = rig.hashes()
    operation.host_indices = rig.kv.alloc(CASE.pages)
    rig.controller.prefetch_buffer.put(operation)
    return operation
