"""The tier under vLLM's real tiering manager, without an engine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ladders import only_store
from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_tiering import Engine, offload_keys, random_chunks

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.integrations import vllm_epoch, vllm_namespace, vllm_tier
from lifeboat_cache.integrations.vllm_published import Published
from lifeboat_cache.interface import Outcome, State
from lifeboat_cache.registry.extra import facts_of

ROW = 64 << 10
COUNT = 12

OpenEngine = Callable[..., Engine]


@pytest.fixture
def stored(engine: OpenEngine) -> tuple[list[bytes], np.ndarray]:
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine()
    first.store(keys, chunks)
    first.shutdown()
    return keys, chunks


def same(found: dict[bytes, Any], keys: list[bytes], chunks: Any) -> bool:
    return list(found) == keys and all(
        np.array_equal(found[key], chunk) for key, chunk in zip(keys, chunks, strict=True)
    )


def counters(engine: Engine) -> dict[str, int]:
    return dict(engine.tier.store.counters().load_outcomes)


def segments(home: Path) -> list[Path]:
    return sorted((home / "kv").rglob("*.segment"))


def test_another_engine_restores_what_one_stored(engine: OpenEngine, stored: Any) -> None:
    keys, chunks = stored
    second = engine()
    assert same(second.restore(keys), keys, chunks)
    assert counters(second) == {"ok": COUNT}


def test_another_process_restores_what_one_stored(
    home: Path, engine: OpenEngine, tmp_path: Path
) -> None:
    home.mkdir()
    (home / "lifeboat.yaml").write_text("agent: {autostart: false}\n")
    script = (
        "import os\n"
        "from vllm_tiering import Engine, offload_keys, random_chunks\n"
        "tier = {'type': 'LifeboatTier',"
        " 'module_path': 'lifeboat_cache.integrations.vllm_tier'}\n"
        f"engine = Engine(tier, row_bytes={ROW})\n"
        f"engine.store(offload_keys({COUNT}), random_chunks({COUNT}, {ROW}))\n"
        "engine.shared_memory.unlink()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    support = Path(sys.modules["vllm_tiering"].__file__ or "").parent
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(support)!r})\n{script}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -9, ended.stderr
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    assert same(engine().restore(keys), keys, chunks)


def test_an_engine_finds_what_another_process_stores_while_both_run(
    home: Path, engine: OpenEngine, tmp_path: Path
) -> None:
    # As data-parallel ranks do: storage.shared_lookup.
    home.mkdir()
    (home / "lifeboat.yaml").write_text("agent: {autostart: false}\n")
    first = engine()
    assert first.tier.store.wait_recovered(30)
    assert first.restore(offload_keys(COUNT)) == {}
    script = (
        "import sys\n"
        "from vllm_tiering import Engine, offload_keys, random_chunks\n"
        "tier = {'type': 'LifeboatTier',"
        " 'module_path': 'lifeboat_cache.integrations.vllm_tier'}\n"
        f"with Engine(tier, row_bytes={ROW}) as engine:\n"
        f"    engine.store(offload_keys({COUNT}), random_chunks({COUNT}, {ROW}))\n"
        "    print('stored', flush=True)\n"
        "    sys.stdin.read()\n"  # it lives on, and holds its files open
    )
    support = Path(sys.modules["vllm_tiering"].__file__ or "").parent
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(support)!r})\n{script}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert "stored" in (line.strip() for line in other.stdout)
        keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
        end = time.monotonic() + 60
        while not (found := first.restore(keys)):
            assert time.monotonic() < end, "it was never found"
            time.sleep(0.05)
        assert same(found, keys, chunks)
        assert other.poll() is None
        other.communicate("")


def test_a_prefix_is_served_up_to_the_first_missing_chunk(engine: OpenEngine, stored: Any) -> None:
    keys, chunks = stored
    longer = [*keys, *offload_keys(3, seed=9)]
    assert same(engine().restore(longer), keys, chunks)


@pytest.mark.parametrize(
    "difference",
    [
        {"dtype": "float16"},
        {"tokens_per_block": 64},
        {"model": "another"},
        {"tp_size": 2},
        {"row_bytes": 2 * ROW},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_another_engine_of_other_make_finds_nothing(
    engine: OpenEngine, stored: Any, difference: dict[str, Any]
) -> None:
    keys, _ = stored
    assert engine(**difference).restore(keys) == {}


def test_another_salt_finds_nothing(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored
    monkeypatch.setenv("LIFEBOAT_CACHE_NAMESPACE_SALT", "other")
    assert engine().restore(keys) == {}


def test_a_flipped_byte_is_a_miss_and_heals(home: Path, engine: OpenEngine, stored: Any) -> None:
    keys, chunks = stored
    with segments(home)[0].open("r+b") as file:
        file.seek(HEADER_BYTES + 5 * ROW + 1000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    second = engine()
    assert same(second.restore(keys), keys[:5], chunks[:5])
    assert counters(second)["corrupt"] == 1
    second.store(keys, chunks)
    third = engine()
    third.tier.store.wait_recovered(10)  # before, the bad record may be the first one found
    assert same(third.restore(keys), keys, chunks)


def test_a_cut_file_is_a_miss(home: Path, engine: OpenEngine, stored: Any) -> None:
    keys, chunks = stored
    second = engine()
    second.tier.store.wait_recovered(10)
    with segments(home)[0].open("r+b") as file:
        file.truncate(HEADER_BYTES + 7 * ROW + 100)
    assert same(second.restore(keys), keys[:7], chunks[:7])
    assert counters(second)["missing"] == COUNT - 7
    assert same(engine().restore(keys), keys[:7], chunks[:7])


def test_a_torn_journal_costs_only_its_last_chunk(
    home: Path, engine: OpenEngine, stored: Any
) -> None:
    keys, chunks = stored
    journal = next((home / "kv").rglob("*.journal"))
    with journal.open("r+b") as file:
        file.truncate(journal.stat().st_size - 60)
    second = engine()
    assert same(second.restore(keys), keys[:-1], chunks[:-1])
    assert second.tier.store.counters().bad_entries == 1


def test_a_full_store_drops_chunks_and_says_so(home: Path, engine: OpenEngine) -> None:
    home.mkdir()
    (home / "lifeboat.yaml").write_text("storage: {fallback_local: {capacity_gb: 0.0000001}}\n")
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine()
    first.store(keys, chunks)
    assert first.tier.store.counters().store_outcomes == {"full": COUNT}
    stats = first.manager.get_stats().data["data"]
    assert stats["lifeboat_store_blocks_dropped"] == {("full",): COUNT}
    assert engine().restore(keys) == {}


def test_a_chunk_that_failed_to_load_is_a_miss_for_the_rest_of_the_request(
    home: Path, engine: OpenEngine, stored: Any
) -> None:
    # vLLM asks again after a failed load; the answer HIT would loop for ever.
    keys, _ = stored
    second = engine()
    second.tier.store.wait_recovered(10)
    for path in segments(home):
        path.unlink()
    context = second.request(keys)
    seen = set()
    for _ in range(200):
        seen.add(second.manager.lookup(keys[0], context))
        second.step()
        time.sleep(0.002)
        if LookupResult.MISS in seen:
            break
    assert LookupResult.MISS in seen
    assert second.manager.lookup(keys[0], context) is LookupResult.MISS
    second.manager.on_request_finished(context)


def test_a_broken_configuration_stands_down(home: Path, engine: OpenEngine) -> None:
    home.mkdir()
    (home / "lifeboat.yaml").write_text("storge: {}\n")
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine()
    assert first.tier.state is State.DISABLED
    first.store(keys, chunks)
    assert first.restore(offload_keys(1, seed=3)) == {}


def test_a_directory_that_cannot_be_used_stands_down(home: Path, engine: OpenEngine) -> None:
    home.mkdir()
    (home / "kv").write_text("in the way")
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine()
    first.store(keys, chunks)
    assert first.tier.state is State.DISABLED
    assert "kv" in first.tier.store.reason
    assert first.tier.store.counters().store_outcomes == {"disabled": COUNT}


def test_settings_of_the_tier_name_a_configuration(
    home: Path, engine: OpenEngine, tmp_path: Path
) -> None:
    path = tmp_path / "own.yaml"
    place = tmp_path / "elsewhere"
    path.write_text(
        f"storage: {{tiers: [{{name: own, type: filesystem, path: {place}, min_free_gb: 0}}]}}\n"
    )
    first = engine(tier={"config": str(path), "a_setting_of_the_future": 1})
    first.store(offload_keys(COUNT), random_chunks(COUNT, ROW))
    assert list(place.rglob("*.segment"))
    assert not (home / "kv").exists()


def _slow_identity(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    original = vllm_namespace.find_namespace

    def find(*args: Any) -> Any:
        release.wait(30)
        return original(*args)

    monkeypatch.setattr(vllm_tier, "find_namespace", find)


def test_lookups_wait_for_the_identity_and_then_hit(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, chunks = stored
    release = threading.Event()
    _slow_identity(release, monkeypatch)
    second = engine()
    context = second.request(keys)
    assert second.manager.lookup(keys[0], context) is LookupResult.RETRY
    second.manager.on_request_finished(context)
    threading.Timer(0.2, release.set).start()
    assert same(second.restore(keys), keys, chunks)


def test_lookups_do_not_wait_for_ever(
    home: Path, engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored
    (home / "lifeboat.yaml").write_text("engine: {native_promotion_wait_s: 0.05}\n")
    release = threading.Event()
    _slow_identity(release, monkeypatch)
    second = engine()
    assert second.restore(keys) == {}
    release.set()


def test_chunks_stored_before_the_identity_is_known_are_kept(
    engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    release = threading.Event()
    _slow_identity(release, monkeypatch)
    first = engine()
    threading.Timer(0.2, release.set).start()
    first.store(keys, chunks)
    first.shutdown()
    assert same(engine().restore(keys), keys, chunks)


def test_a_model_that_cannot_be_identified_is_neither_stored_nor_served(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored

    def fail(*_: Any) -> Any:
        raise IdentityError("no weights here: give a local directory")

    monkeypatch.setattr(vllm_tier, "find_namespace", fail)
    second = engine()
    assert second.restore(keys) == {}
    second.store(offload_keys(2, seed=5), random_chunks(2, ROW))
    assert second.tier.store.reason == "no weights here: give a local directory"
    assert second.tier.store.counters().store_outcomes == {"disabled": 2}


def test_a_change_of_weights_leaves_everything_behind(
    home: Path, engine: OpenEngine, stored: Any
) -> None:
    keys, chunks = stored
    second = engine()
    second.tier.store.wait_recovered(10)
    vllm_epoch.changed("a test")
    second.tier.store.wait_recovered(10)
    assert second.restore(keys) == {}
    other = random_chunks(COUNT, ROW, seed=77)
    fresh = offload_keys(COUNT, seed=78)
    second.store(fresh, other)
    # The CPU tier holds them; what counts is that nobody else finds them on storage.
    second.shutdown()
    third = engine()
    assert third.restore(fresh) == {}
    assert same(third.restore(keys), keys, chunks)
    left = [path for path in (home / "kv").iterdir() if path.is_dir()]
    assert len(left) == 1, "the namespace of the unknown weights is removed"


def test_a_set_of_keys_keeps_keys_and_rows_together(engine: OpenEngine) -> None:
    # vLLM passes a set whose iteration order the rows follow.
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine()
    context = first.request(keys)
    order = set(keys)
    table = first.table()
    rows = np.arange(COUNT, dtype=np.int32)
    by_key = dict(zip(keys, chunks, strict=True))
    for row, key in zip(rows, order, strict=True):
        table[row] = by_key[key]
    first.tier.submit_store(
        TransferJob(job_id=7, keys=order, chunk_ids=rows, is_promotion=False, req_context=context)
    )
    first.tier.store.drain()
    (result,) = first.tier.get_finished_jobs()
    assert (result.job_id, result.success) == (7, True)
    del table
    first.manager.on_request_finished(context)
    assert same(engine().restore(keys), keys, chunks)


def test_every_chunk_of_a_finished_request_counts_as_used(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored
    second = engine()
    second.tier.store.wait_recovered(10)
    touched: list[bytes] = []
    monkeypatch.setattr(second.tier.store, "touch", touched.extend)
    context = second.request(keys)  # as if everything was found in GPU memory
    second.manager.on_request_finished(context)
    assert len(set(touched)) == COUNT
    assert second.tier.store.lookup(touched).tolist() == [1] * COUNT


def test_positions_groups_and_parents_are_recorded(engine: OpenEngine, stored: Any) -> None:
    keys, _ = stored
    second = engine()
    second.tier.store.wait_recovered(10)
    request = second.request(keys)
    names = second.tier._keys_of(request).store_keys(keys)
    entries = [item[1] for item in behind(second)._index.get(names)]
    second.manager.on_request_finished(request)
    assert [int(entry["position"]) for entry in entries] == [128 * (n + 1) for n in range(COUNT)]
    assert int(entries[0]["parent"]) == 0
    families = [int(entry["family"]) for entry in entries]
    assert [int(entry["parent"]) for entry in entries[1:]] == families[:-1]


def test_drain_leaves_no_job_and_reports_all(engine: OpenEngine) -> None:
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine()
    context = first.request(keys)
    out = first.manager.prepare_store(keys, context)
    table = first.table()
    table[np.asarray(out.store_spec.chunk_ids)] = chunks
    del table
    first.manager.complete_store(out.keys_to_store, context)
    first.manager.on_request_finished(context)
    first.manager.reset_cache()
    assert not first.manager.has_pending_work()
    assert first.tier.store.counters().store_outcomes == {"ok": COUNT}


def test_events_name_what_reached_storage(engine: OpenEngine) -> None:
    keys, chunks = offload_keys(COUNT), random_chunks(COUNT, ROW)
    first = engine(events=True)
    first.store(keys, chunks)
    events = [event for event in first.manager.take_events() if event.medium is Medium.STORAGE]
    assert sorted(key for event in events for key in event.keys) == sorted(keys)


def test_metrics_count_what_happened(engine: OpenEngine, stored: Any) -> None:
    keys, _ = stored
    second = engine()
    second.restore(keys)
    stats = second.manager.get_stats().data["data"]
    assert stats["lifeboat_blocks_loaded"] == {(): COUNT}
    assert stats["lifeboat_bytes_loaded"] == {(): COUNT * ROW}
    assert stats["lifeboat_blocks_indexed"] == {(): COUNT}
    later = second.manager.get_stats()
    assert "lifeboat_blocks_loaded" not in later.data["data"], "counters are handed over once"
    defined = vllm_tier.LifeboatTier.build_metric_definitions({})
    assert {name for name in stats if name.startswith("lifeboat")} <= set(defined)


def test_restored_tokens_are_published(engine: OpenEngine, stored: Any) -> None:
    keys, _ = stored
    second = engine()
    spec = second.tier._offloading_spec
    tokens = spec.tokens_per_block[0] * spec.blocks_per_chunk
    assert facts_of(second.tier.store)["served_tokens"] == 0
    second.restore(keys)
    facts = facts_of(second.tier.store)
    assert facts["engine"] == "vllm"
    assert facts["version"]
    assert facts["served_tokens"] == COUNT * tokens
    first = second.tier._published
    second.tier._weights_changed("a test")
    # The new store has counted nothing, and what the old one had is not counted again.
    assert facts_of(second.tier.store)["served_tokens"] == 0
    assert first.facts()["served_tokens"] == COUNT * tokens


def test_tokens_of_several_groups_count_once() -> None:
    spec = SimpleNamespace(tokens_per_block=(16, 32), blocks_per_chunk=4)
    published = Published(spec)
    outcomes = np.array([Outcome.OK, Outcome.OK, Outcome.CORRUPT, Outcome.OK], dtype=np.uint8)
    keys = [bytes(32) + group.to_bytes(4, "big") for group in (0, 0, 0, 1)]
    published.loaded(keys, outcomes)
    assert published.facts()["served_tokens"] == 128
    # A release that says it otherwise: nothing is made up.
    unknown = Published(SimpleNamespace())
    unknown.loaded(keys, outcomes)
    assert unknown.facts()["served_tokens"] == 0


def test_two_tiers_of_an_engine_show_the_sum_of_their_chunks(
    home: Path, engine: OpenEngine, tmp_path: Path
) -> None:
    # vLLM keeps the last value of a gauge: each tier showed its own number.
    tiers = []
    for number in range(2):
        path = tmp_path / f"{number}.yaml"
        path.write_text(
            f"storage: {{fallback_local: {{path: {tmp_path / str(number)}, min_free_gb: 0}}}}\n"
        )
        tiers.append(
            {
                "type": "LifeboatTier",
                "module_path": "lifeboat_cache.integrations.vllm_tier",
                "config": str(path),
            }
        )
    first = engine(tiers=tiers)
    other = engine()
    first.store(offload_keys(COUNT), random_chunks(COUNT, ROW))
    other.store(offload_keys(3), random_chunks(3, ROW))
    assert indexed(first) == 2 * COUNT
    assert indexed(other) == 3
    more = offload_keys(2, seed=8)
    first.store(more, random_chunks(2, ROW))
    second = first.manager.secondary_tiers[1]
    context = first.request(more)
    second.store.delete(second._keys_of(context).store_keys(more))
    first.manager.on_request_finished(context)
    assert indexed(first) == 2 * COUNT + 2


def indexed(engine: Engine) -> float:
    """What vLLM shows, as its loggers do: the last value it was given."""
    stats = engine.manager.get_stats().data["data"]
    (value,) = stats["lifeboat_blocks_indexed"].values()
    return float(value)


def behind(engine: Engine) -> Any:
    """The store of the tier's only target."""
    return only_store(engine.tier.store)


def test_a_load_never_lands_after_its_job_was_reported(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, chunks = stored
    second = engine()
    store = second.tier.store
    store.wait_recovered(10)
    release, reader = threading.Event(), behind(second)._storage.reader
    original = reader.open_segment

    def slow(*args: Any) -> Any:
        release.wait(30)
        return original(*args)

    monkeypatch.setattr(reader, "open_segment", slow)
    context = second.request(keys)
    for key in keys:
        second.manager.lookup(key, context)
    second.step()
    time.sleep(0.1)
    assert list(second.tier.get_finished_jobs()) == []
    assert second.tier.has_pending_work()
    release.set()
    second.manager.on_request_finished(context)
    second.settle()
    assert same(second.restore(keys), keys, chunks)


def test_shutdown_says_when_storage_does_not_answer(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored
    second = engine()
    store = second.tier.store
    store.wait_recovered(10)
    release, reader = threading.Event(), behind(second)._storage.reader
    original = reader.open_segment

    def hang(*args: Any) -> Any:
        release.wait(60)
        return original(*args)

    monkeypatch.setattr(reader, "open_segment", hang)
    context = second.request(keys)
    second.manager.lookup(keys[0], context)
    second.step()
    close = store.close
    monkeypatch.setattr(store, "close", lambda: close(0.1))
    with pytest.raises(RuntimeError, match="may still touch"):
        second.tier.shutdown()
    release.set()
    assert store.drain(30)


def test_a_recovered_store_answers_a_whole_prompt_in_the_first_step_by_one_lookup(
    engine: OpenEngine, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = stored
    second = engine()
    store = second.tier.store
    assert store.wait_recovered(30)
    asked: list[int] = []
    lookup = store.lookup

    def counting(names: list[bytes], **options: Any) -> Any:
        asked.append(len(names))
        return lookup(names, **options)

    monkeypatch.setattr(store, "lookup", counting)
    prompt = [*keys, *offload_keys(3, seed=9)]
    context = second.request(prompt)
    answers = [second.tier.lookup(key, context) for key in prompt]
    assert answers == [LookupResult.HIT] * COUNT + [LookupResult.MISS] * 3
    assert asked == [len(prompt)]
    second.manager.on_request_finished(context)
