"""What SGLang's MLX pool holds comes back into other slots, byte for byte."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored import stored_files

from lifeboat_cache.integrations import sglang_epoch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlx") is None or importlib.util.find_spec("sglang") is None,
    reason="needs SGLang and MLX: run `python3 tools/dev.py test sglang`",
)

OpenRig = Callable[..., Any]


@pytest.fixture
def rig(model: Path, home: Path) -> OpenRig:
    from sglang_mlx_rig import MlxRig

    return MlxRig


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50_000, length)]


def stored(rig: OpenRig, *prompts: list[int], salt: str | None = None) -> None:
    """Let a scheduler compute prompts and end."""
    with rig() as first:
        for tokens in prompts:
            first.serve(tokens, salt)
        first.settle()


def test_a_prefix_comes_back_after_a_restart(rig: OpenRig) -> None:
    tokens = prompt(1, 300)
    stored(rig, tokens)
    with rig() as second:
        assert second.serve(tokens) == (256, 256)
        assert second.keeping.published.facts()["served_tokens"] == 256
        assert second.balanced()


def test_prompts_with_a_common_beginning_store_it_once_and_share_it(rig: OpenRig) -> None:
    common = prompt(2, 200)
    one, other = common + prompt(3, 100), common + prompt(4, 100)
    with rig() as first:
        first.serve(one)
        first.serve(other)
        first.settle()
        assert len(first.store) == 4 + 1  # 300 tokens are 4 chunks, of which 3 are common
    with rig() as second:
        # The last chunk is not common.
        assert second.serve(one) == (256, 256)
        # What SGLang holds already is not read again, also in the middle of a chunk.
        assert second.serve(other) == (256, 64 - 200 % 64)
        assert second.balanced()


def test_a_prompt_that_ends_with_a_chunk_leaves_its_last_token_to_compute(rig: OpenRig) -> None:
    tokens = prompt(5, 256)
    stored(rig, tokens)
    with rig() as second:
        assert second.serve(tokens) == (192, 192)


def test_several_requests_at_once_each_get_their_own(rig: OpenRig) -> None:
    common = prompt(6, 130)
    prompts = [common + prompt(10 + number, 150) for number in range(4)]
    prompts += [prompt(20 + number, 200) for number in range(3)]
    stored(rig, *prompts)
    with rig() as second:
        waiting = [second.arrive(tokens) for tokens in prompts]
        random.Random(1).shuffle(waiting)
        while waiting:
            request = waiting.pop(0)
            if not second.poll(request):
                waiting.append(request)
                continue
            second.begin(request)
            second.finish(request)
        for tokens in prompts:
            assert second.check(tokens) == len(tokens)
        assert second.balanced()


def test_a_request_that_is_cancelled_while_it_is_read_leaves_nothing(rig: OpenRig) -> None:
    tokens, other = prompt(30, 400), prompt(31, 400)
    stored(rig, tokens, other)
    with rig(slots=512) as second:
        gone = second.arrive(tokens)
        second.cache.release_aborted_request(gone.cache_request_handle)
        assert second.poll(gone)
        assert gone.loaded == 0
        assert second.check(tokens) == 0
        assert not second.cache.has_pending_cache_operations()
        # Its slots serve another one, whatever may still be on its way from the disk.
        assert second.serve(other) == (384, 384)
        second.settle()
        assert second.check(other) == 400
        assert second.balanced()


def test_slots_that_are_evicted_before_the_writer_comes_are_stored_as_they_were(
    rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(40 + number, 200) for number in range(6)]
    with rig(slots=256) as first:
        held = []
        store = first.store.store
        # The writer comes when all slots have been used for something else several times.
        monkeypatch.setattr(first.store, "store", lambda *job: held.append(job))
        for tokens in prompts:
            first.serve(tokens)
        assert first.check(prompts[0]) == 0
        for job in held:
            store(*job)
        first.settle()
    with rig(slots=256) as second:
        for tokens in prompts:
            assert second.serve(tokens) == (192, 192)
        assert second.balanced()


def test_what_is_evicted_while_it_is_read_is_not_continued(rig: OpenRig) -> None:
    tokens = prompt(50, 300)
    stored(rig, tokens)
    with rig(slots=1024) as second:
        second.serve(tokens[:150])
        request = second.arrive(tokens)  # to be continued from the 150th token on
        second.cache.reset()
        second.allocator.clear()
        second.wait(request)
        assert second.begin(request) == 0
        second.finish(request)
        assert second.check(tokens) == 300


def test_a_pool_without_room_is_not_overfilled(rig: OpenRig) -> None:
    tokens, busy = prompt(60, 400), prompt(61, 300)
    stored(rig, tokens)
    with rig(slots=512) as second:
        running = second.wait(second.arrive(busy))
        second.begin(running)
        request = second.wait(second.arrive(tokens))
        assert request.loaded == 0
        assert second.balanced(in_use=300)
        second.finish(running)
        assert second.check(busy) == 300
        assert second.serve(tokens) == (384, 384)


def test_only_what_sglang_has_written_to_the_pool_is_stored(rig: OpenRig) -> None:
    tokens = prompt(70, 300)
    with rig() as first:
        request = first.wait(first.arrive(tokens))
        first.begin(request)
        # The rest is in the request's own cache, as after an answer that was cut short.
        first.runner._req_synced_offset[request.rid] = 130
        first.finish(request)
        first.settle()
        assert len(first.store) == 2


def test_requests_that_are_more_than_tokens_are_not_stored(rig: OpenRig) -> None:
    tokens = prompt(71, 200)
    with rig() as first:
        for name in ("lora_id", "multimodal_inputs", "positional_embed_overrides", "session"):
            request = first.wait(first.arrive(tokens))
            first.begin(request)
            setattr(request, name, "something")
            first.cache._keep(request, len(tokens))
            setattr(request, name, None)
        first.cache._vocabulary = max(tokens)  # one stands for an image
        first.cache._keep(request, len(tokens))
        first.settle()
        assert len(first.store) == 0


def test_salts_and_other_models_share_nothing(rig: OpenRig) -> None:
    tokens = prompt(80, 200)
    stored(rig, tokens, salt="one tenant")
    with rig() as second:
        assert second.serve(tokens) == (0, 0)
        assert second.serve(tokens, "another") == (0, 0)
        assert second.serve(tokens, "one tenant") == (192, 192)
    with rig(namespace="another model") as other:
        assert other.serve(tokens, "one tenant") == (0, 0)


def test_a_chunk_that_does_not_match_its_checksum_ends_the_prefix(rig: OpenRig, home: Path) -> None:
    from sglang_mlx_rig import content

    tokens = prompt(90, 400)
    stored(rig, tokens)
    sample = content(tokens)[0, 0, 130].tobytes()  # in the third chunk
    flipped = 0
    for path in stored_files(home, "segment"):
        data = path.read_bytes()
        place = data.find(sample)
        if place >= 0:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            flipped += 1
    assert flipped == 1
    with rig() as second:
        assert second.serve(tokens) == (128, 128)
        assert second.balanced()
        second.settle()
    with rig() as third:  # it was stored anew
        assert third.serve(tokens) == (384, 384)


def test_storage_that_does_not_answer_is_given_up(
    rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache.integrations import sglang_mlx_read
    from lifeboat_cache.job import Job

    tokens = prompt(91, 300)
    stored(rig, tokens)
    with rig() as second:
        monkeypatch.setattr(sglang_mlx_read, "PATIENCE_S", 3600.0)
        monkeypatch.setattr(second.store, "load", lambda batch, done: Job("load", batch, done))
        request = second.arrive(tokens)
        assert not second.poll(request)
        monkeypatch.setattr(sglang_mlx_read, "PATIENCE_S", -1.0)
        second.wait(request)
        assert request.loaded == 0
        assert second.begin(request) == 0
        second.finish(request)
        assert second.balanced()


def test_a_fault_of_ours_is_a_prompt_that_is_computed(
    rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(92, 300)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault")

    stored(rig, tokens)
    for name in ("lookup", "load", "describe", "touch"):
        with rig() as second:
            monkeypatch.setattr(second.store, name, fail)
            assert second.serve(tokens) == (0, 0), name
            assert second.balanced()
    with rig() as third:
        monkeypatch.setattr(third.pool, "set_kv_all_layers", fail)
        request = third.wait(third.arrive(tokens))
        assert request.loaded == 0
        assert third.check(tokens) == 0
        assert third.balanced()


def test_changed_weights_end_the_use_of_what_is_stored(rig: OpenRig) -> None:
    tokens, later = prompt(93, 300), prompt(94, 300)
    stored(rig, tokens)
    with rig() as second:
        request = second.arrive(tokens)
        sglang_epoch.changed("a test")
        second.wait(request)
        assert request.loaded == 0
        second.begin(request)
        second.finish(request)
        assert second.serve(later) == (0, 0)
        assert second.keeping.store is None
    with rig() as third:
        assert third.serve(tokens) == (256, 256)
        assert third.serve(later) == (0, 0)


def test_a_long_prefix_comes_in_parts(rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    from lifeboat_cache.integrations import sglang_mlx_keep, sglang_mlx_read

    monkeypatch.setattr(sglang_mlx_keep, "_PIECE_BYTES", 1)
    monkeypatch.setattr(sglang_mlx_read, "_PART_BYTES", 1)
    tokens = prompt(95, 1000)
    stored(rig, tokens)
    with rig() as second:
        assert second.serve(tokens) == (960, 960)
        assert second.balanced()


def test_reads_share_a_budget_of_memory(rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    from lifeboat_cache.integrations import sglang_mlx_cache, sglang_mlx_read

    prompts = [prompt(120 + number, 400) for number in range(4)]
    stored(rig, *prompts)
    monkeypatch.setattr(sglang_mlx_read, "_PART_BYTES", 1)
    monkeypatch.setattr(sglang_mlx_cache, "BUDGET_BYTES", 1)
    with rig() as second:
        waiting = [second.arrive(tokens) for tokens in prompts]
        budget = second.cache._budget
        for request in waiting[:3]:
            assert budget._used <= second.cache._shape.chunk_bytes
            second.wait(request)
            assert request.loaded == 384
        second.cache.release_aborted_request(waiting[3].cache_request_handle)
        assert budget._used == 0
        assert second.balanced()


def test_clear_deletes_what_is_stored(rig: OpenRig) -> None:
    tokens = prompt(96, 300)
    with rig() as first:
        first.serve(tokens)
        first.settle()
        assert first.cache.clear_storage_backend()
        deadline = time.monotonic() + 30
        while len(first.store):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with rig() as second:
        assert second.serve(tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_gives_right_slots(rig: OpenRig, seed: int) -> None:
    dice = random.Random(seed)
    common = [prompt(100 + number, 150) for number in range(3)]
    prompts = [
        dice.choice(common)[: dice.randrange(40, 151)]
        + prompt(200 + number, dice.randrange(20, 250))
        for number in range(12)
    ]
    for _ in range(2):
        with rig(slots=1024) as one:
            waiting: list[Any] = []
            running: list[Any] = []
            for _ in range(120):
                event = dice.random()
                if event < 0.4 and len(waiting) < 4:
                    waiting.append(one.arrive(dice.choice(prompts)))
                elif event < 0.5 and waiting:
                    gone = waiting.pop(dice.randrange(len(waiting)))
                    one.cache.release_aborted_request(gone.cache_request_handle)
                elif event < 0.8 and waiting and len(running) < 2:
                    request = waiting.pop(dice.randrange(len(waiting)))
                    if one.poll(request):
                        one.begin(request)
                        running.append(request)
                    else:
                        waiting.append(request)
                elif running:
                    one.finish(running.pop(dice.randrange(len(running))))
                elif event > 0.98:
                    time.sleep(0.05)
            for request in running:
                one.finish(request)
            for tokens in prompts:
                one.check(tokens)
            assert one.balanced()
            one.settle()
