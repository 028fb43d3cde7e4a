"""What must neither stop the engine nor make a request wait for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ladders import only_store
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_tiering import Engine, offload_keys, random_chunks

from lifeboat_cache.integrations import vllm_epoch, vllm_lora, vllm_namespace, vllm_tier
from lifeboat_cache.interface import State

ROW = 64 << 10
COUNT = 40

OpenEngine = Callable[..., Engine]


@pytest.fixture
def stored(engine: OpenEngine) -> tuple[list[bytes], Any]:
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine()
    first.store(keys, chunks)
    first.shutdown()
    return keys, chunks


def ready(engine: Engine) -> Engine:
    assert engine.tier.store.wait_recovered(30)
    return engine


def ask(engine: Engine, keys: Sequence[bytes], context: Any) -> list[LookupResult]:
    """One look at a waiting request, as the scheduler does it."""
    answers: list[LookupResult] = []
    for key in keys:
        answers.append(engine.manager.lookup(key, context))
        if answers[-1] is LookupResult.MISS:
            break
    return answers


def slow_step(engine: Engine) -> None:
    """A step that takes longer than the loads that it started."""
    engine.step()
    end = time.monotonic() + 30
    while engine.tier._jobs:
        assert time.monotonic() < end
        time.sleep(0.001)


def start(engine: Engine, keys: Sequence[bytes], context: Any, steps: int = 40) -> list[bytes]:
    """Step until the request can start; the chunks that it starts with."""
    for _ in range(steps):
        answers = ask(engine, keys, context)
        slow_step(engine)
        if LookupResult.RETRY in answers:
            assert engine.tier.store.wait_recovered(30)
            time.sleep(0.03)  # an answer that is not final is asked for again after 20 ms
        elif LookupResult.HIT_PENDING not in answers:
            hits = [answer is LookupResult.HIT for answer in answers]
            return [key for key, hit in zip(keys, hits, strict=False) if hit]
    raise AssertionError(f"the request does not start within {steps} steps")


def test_a_prompt_larger_than_the_cpu_tier_starts_and_is_restored_as_far_as_it_fits(
    engine: OpenEngine, stored: Any
) -> None:
    keys, chunks = stored
    small = ready(engine(rows=16))
    context = small.request(keys)
    assert start(small, keys, context) == keys[:16]
    spec = small.manager.prepare_load(keys[:16], context)
    table = small.table()
    assert np.array_equal(table[np.asarray(spec.chunk_ids)], chunks[:16])
    del table
    small.manager.complete_load(keys[:16], context)
    small.manager.on_request_finished(context)


def test_prompts_larger_than_the_cpu_tier_together_all_start(
    engine: OpenEngine, stored: Any
) -> None:
    keys, _ = stored
    small = ready(engine(rows=16))
    parts = (keys[:12], keys[12:])
    waiting = {name: (part, small.request(part)) for name, part in enumerate(parts)}
    for _ in range(40):
        for name, (part, context) in list(waiting.items()):
            answers = ask(small, part, context)
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers):
                small.manager.on_request_finished(context)
                del waiting[name]
        slow_step(small)
    assert not waiting


def test_a_request_whose_chunks_are_evicted_before_their_use_starts(
    engine: OpenEngine, stored: Any
) -> None:
    # The request cannot be scheduled; others store, and evict what was loaded for it.
    keys, _ = stored
    small = ready(engine(rows=16))
    context = small.request(keys[:16])
    for number in range(60):
        answers = ask(small, keys[:16], context)
        if number and not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers):
            break
        slow_step(small)
        small.store(offload_keys(16, seed=100 + number), random_chunks(16, ROW, seed=number))
    else:
        raise AssertionError("loaded and evicted, round and round")
    small.manager.on_request_finished(context)


def test_a_request_that_waits_for_recovery_does_not_ask_at_every_step(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An idle engine steps thousands of times a second.
    keys, _ = stored
    release = threading.Event()
    original = vllm_namespace.find_namespace

    def find(*args: Any) -> Any:
        release.wait(30)
        return original(*args)

    monkeypatch.setattr(vllm_tier, "find_namespace", find)
    second = engine()
    asked: list[int] = []
    original_lookup = second.tier.store.lookup

    def lookup(names: Sequence[bytes]) -> Any:
        asked.append(len(names))
        return original_lookup(names)

    monkeypatch.setattr(second.tier.store, "lookup", lookup)
    context = second.request(keys)
    began = time.monotonic()
    for _ in range(500):
        assert ask(second, keys, context) == [LookupResult.RETRY] * COUNT
        second.step()
    assert len(asked) <= 1 + (time.monotonic() - began) / 0.02
    assert asked[0] == COUNT
    release.set()
    assert start(second, keys, context) == keys
    second.manager.on_request_finished(context)


def test_a_preempted_request_is_restored_again(engine: OpenEngine, stored: Any) -> None:
    keys, _ = stored
    small = ready(engine(rows=16))
    context = small.request(keys[:12])
    for round_ in range(8):
        assert start(small, keys[:12], context) == keys[:12]
        small.store(offload_keys(16, seed=round_ + 50), random_chunks(16, ROW, seed=round_))
        small.manager.on_schedule_end(ScheduleEndContext([], [context.req_id]))
    small.manager.on_request_finished(context)


def test_a_job_of_a_finished_request_leaves_nothing_behind(engine: OpenEngine, stored: Any) -> None:
    keys, _ = stored
    second = ready(engine())
    context = second.request(keys)
    ask(second, keys, context)
    second.manager.on_request_finished(context)  # aborted; its chunks are loaded all the same
    slow_step(second)
    second.settle()
    assert second.tier.store.counters().blocks_loaded == COUNT
    assert second.tier._requests == {}
    assert second.tier._live == set()


def test_a_load_that_cannot_be_started_is_a_miss_for_the_rest_of_the_request(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored
    second = ready(engine())

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(second.tier.store, "load", fail)
    context = second.request(keys)
    assert start(second, keys, context) == []
    assert not second.manager.has_pending_work()
    second.manager.on_request_finished(context)


@pytest.mark.parametrize("promotion", [True, False])
@pytest.mark.parametrize(
    ("count", "rows", "good"),
    [
        (0, np.zeros(0, dtype=np.int32), True),
        (2, np.array([3, 1], dtype=np.int64), True),
        (2, [3, 1], True),
        (2, (63, 0), True),
        (2, [0, 64], False),
        (2, [-1, 0], False),
        (2, [0], False),
    ],
    ids=["none", "int64", "list", "last", "beyond", "before", "too-few"],
)
def test_a_job_touches_rows_of_the_cpu_tier_only(
    engine: OpenEngine, stored: Any, count: int, rows: Any, good: bool, promotion: bool
) -> None:
    keys, _ = stored
    second = ready(engine(rows=64))
    context = second.request(keys)
    wanted = keys[:count] if promotion else offload_keys(count, seed=77)
    job = TransferJob(
        job_id=9, keys=wanted, chunk_ids=rows, is_promotion=promotion, req_context=context
    )
    (second.tier.submit_load if promotion else second.tier.submit_store)(job)
    second.tier.drain_jobs()
    assert [(r.job_id, r.success) for r in second.tier.get_finished_jobs()] == [(9, good)]
    assert not second.tier.has_pending_work()
    second.manager.on_request_finished(context)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_job_is_reported_once_however_late_an_adapter_is_confirmed(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    # After the report the rows are somebody else's: nothing may touch them.
    keys, _ = stored
    second = ready(engine())
    late: list[Callable[[bool], None]] = []

    def confirm(_context: Any, then: Callable[[bool], None]) -> None:
        late.append(then)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(vllm_lora, "lora_of", lambda _context: "an adapter")
    monkeypatch.setattr(second.tier._adapters, "confirm", confirm)
    context = second.request(keys)
    rows = np.arange(2, dtype=np.int32)
    fresh = offload_keys(2, seed=31)
    second.tier.submit_store(
        TransferJob(job_id=5, keys=fresh, chunk_ids=rows, is_promotion=False, req_context=context)
    )
    late[0](allowed)
    second.tier.drain_jobs()
    assert [(r.job_id, r.success) for r in second.tier.get_finished_jobs()] == [(5, False)]
    assert not second.tier.has_pending_work()
    assert second.tier.store.counters().store_outcomes == {}
    second.manager.on_request_finished(context)


@pytest.mark.parametrize("broken", ["lookup", "touch", "__len__"])
def test_a_fault_of_the_store_is_a_miss_and_not_the_end_of_the_engine(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    keys, _ = stored
    second = ready(engine())

    def fail(*_: Any, **__: Any) -> Any:
        raise OverflowError("Python integer 4294967296 out of bounds for uint32")

    monkeypatch.setattr(type(second.tier.store), broken, fail)
    found = second.restore(keys)
    assert (found == {}) == (broken == "lookup")
    second.manager.get_stats()
    assert second.tier._requests == {}


def test_a_tier_that_cannot_start_stands_down(
    engine: OpenEngine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(vllm_tier, "open_block_store", fail)
    first = engine()
    assert first.tier.state is State.DISABLED
    keys = offload_keys(3)
    first.store(keys, random_chunks(3, ROW))
    assert first.restore(offload_keys(3, seed=8)) == {}
    stats = first.manager.get_stats().data["data"]
    assert stats["lifeboat_store_blocks_dropped"] == {("disabled",): 3}


def hold(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let reads of the tier's store wait."""
    reader, release = only_store(engine.tier.store)._storage.reader, threading.Event()
    assert reader is not None
    original = reader.open_segment

    def open_segment(*args: Any) -> Any:
        release.wait(30)
        return original(*args)

    monkeypatch.setattr(reader, "open_segment", open_segment)
    return release


def test_kv_read_while_weights_changed_is_not_served(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored
    second = ready(engine())
    release = hold(second, monkeypatch)
    context = second.request(keys)
    ask(second, keys, context)
    second.step()
    vllm_epoch.changed("a test")
    release.set()
    assert start(second, keys, context) == []
    second.manager.on_request_finished(context)


def test_weights_that_change_a_hundred_times_leave_no_threads(
    engine: OpenEngine, stored: Any
) -> None:
    # A trainer updates them tensor by tensor, step after step.
    _, chunks = stored
    second = ready(engine())

    def threads() -> int:
        return sum(thread.name.startswith("lifeboat") for thread in threading.enumerate())

    before = threads()
    for round_ in range(10):
        for tensor in range(10):
            vllm_epoch.changed(f"tensor {tensor} of round {round_}")
        second.store(offload_keys(2, seed=200 + round_), chunks[:2])
    end = time.monotonic() + 30
    while threads() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() <= before


def test_no_slot_is_filled_while_a_worker_may_still_write_it(
    engine: OpenEngine, stored: Any
) -> None:
    # vLLM 0.32 empties its CPU tier without waiting for the workers' transfers.
    keys, _ = stored
    second = ready(engine())
    second.manager.reset_cache()
    context = second.request(keys)
    assert ask(second, keys, context) == [LookupResult.MISS]
    second.manager.on_request_finished(context)
    if hasattr(second.manager, "on_reset_flushed"):  # vLLM 0.33
        second.manager.on_reset_flushed()
    else:
        for _ in range(20):
            second.step()
    assert list(second.restore(keys)) == keys


def test_a_reset_does_not_wait_for_ever_for_the_models_identity(
    engine: OpenEngine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir()
    (home / "lifeboat.yaml").write_text("engine: {native_promotion_wait_s: 0.1}\n")
    release = threading.Event()
    original = vllm_namespace.find_namespace

    def find(*args: Any) -> Any:  # the weights lie on a disk that does not answer
        release.wait(60)
        return original(*args)

    monkeypatch.setattr(vllm_tier, "find_namespace", find)
    first = engine()
    keys = offload_keys(3)
    context = first.request(keys)
    out = first.manager.prepare_store(keys, context)
    first.manager.complete_store(out.keys_to_store, context)
    reset = threading.Thread(target=first.manager.reset_cache, daemon=True)
    reset.start()
    reset.join(30)
    hung = reset.is_alive()
    release.set()
    reset.join(30)
    assert not hung
    assert not first.manager.has_pending_work()
    first.manager.on_request_finished(context)


def test_engines_of_one_process_that_apply_adapters_otherwise_find_nothing_of_each_other(
    engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The settings were the process's, so that the engine created last decided for all.
    monkeypatch.setattr(vllm_lora, "_hook_problem", None)
    monkeypatch.setattr(vllm_lora, "_watch", vllm_lora.AdapterWatch())
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    weights = len(header).to_bytes(8, "little") + header + b"\x01"
    (directory / "adapter_model.safetensors").write_bytes(weights)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.utime(directory / name, (1, 1))
    request = SimpleNamespace(lora_name="a", lora_path=str(directory))

    def start(dtype: str) -> Engine:
        config = SimpleNamespace(lora_config=SimpleNamespace(lora_dtype=dtype))
        handed = SimpleNamespace(vllm_config=config, kv_cache_config=None)
        monkeypatch.setattr(vllm_tier, "engine_config", lambda _engine_id: handed)
        return ready(engine())

    def names(one: Engine) -> list[bytes]:
        context = one.request(keys)
        vllm_lora.watch().attach(context, request)
        limit = time.monotonic() + 60
        while (found := one.tier._keys_of(context)) is None:
            assert time.monotonic() < limit
            time.sleep(0.002)
        one.manager.on_request_finished(context)
        return list(found.store_keys(keys))

    keys = offload_keys(3)
    first, second, third = start("float16"), start("bfloat16"), start("float16")
    assert not set(names(first)) & set(names(second))
    assert names(first) == names(third)
