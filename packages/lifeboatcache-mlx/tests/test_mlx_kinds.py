"""Prompt caches of all kinds come back: the same bytes, the same tokens."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import mlx_models
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as caches

from lifeboat_cache.mlx import PersistentPromptCache
from lifeboat_cache.mlx.prompt_cache import BLOCK_TOKENS
from lifeboat_cache.mlx.state import read_state, write_state


def _tokens(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 17 * n * n + 5 * n) % mlx_models.VOCABULARY for n in range(length)]


def _prefill(model: Any, tokens: list[int], cache: list[Any], **options: Any) -> None:
    """Leave the cache with the KV of ``tokens``, as generation does."""
    steps = generate_step(
        mx.array([*tokens, 0]), model, prompt_cache=cache, max_tokens=0, **options
    )
    for _ in steps:
        pass
    del steps


def _exact(model: Any, tokens: list[int], **options: Any) -> list[Any]:
    """A cache of exactly these tokens, computed in one piece."""
    cache: list[Any] = caches.make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([one.state for one in cache])
    return cache


def _answer(model: Any, rest: list[int], cache: list[Any], **options: Any) -> list[int]:
    steps = generate_step(mx.array(rest), model, prompt_cache=cache, max_tokens=12, **options)
    return [int(token) for token, _ in itertools.islice(steps, 12)]


def _reopen(model: Any, *before: PersistentPromptCache) -> PersistentPromptCache:
    for one in before:
        assert one.flush(60)
        one.close()
    return PersistentPromptCache(model)


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_a_growing_cache_is_restored_up_to_the_last_whole_block(kind: str, home: Any) -> None:
    model, tokens = mlx_models.make(kind), _tokens(200)
    computed = _exact(model, tokens)
    first = PersistentPromptCache(model)
    first.store(tokens, computed)
    second = _reopen(model, first)
    cache, held = second.fetch([*tokens, 9, 9])
    assert held == 192
    expected = list(computed)
    for one in expected:
        one.offset = held
    assert mlx_models.state_bytes(cache, held) == mlx_models.state_bytes(expected, held)
    assert _answer(model, [*tokens[held:], 9, 9], cache) == _answer(
        model, [9, 9], _exact(model, tokens)
    )
    second.close()


def test_the_last_token_is_always_left_to_be_computed(home: Any) -> None:
    model, tokens = mlx_models.make("llama"), _tokens(2 * BLOCK_TOKENS)
    first = PersistentPromptCache(model)
    first.store(tokens, _exact(model, tokens))
    second = _reopen(model, first)
    assert second.fetch(tokens)[1] == BLOCK_TOKENS
    assert second.fetch([*tokens, 1])[1] == 2 * BLOCK_TOKENS
    assert second.fetch(tokens[:1])[1] == 0
    second.close()


def test_prompts_with_a_common_prefix_store_it_once(home: Any) -> None:
    model, common = mlx_models.make("llama"), _tokens(2 * BLOCK_TOKENS)
    cache = PersistentPromptCache(model)
    for seed in (2, 3):
        tokens = common + _tokens(BLOCK_TOKENS, seed)
        cache.store(tokens, _exact(model, tokens))
        assert cache.flush(60)
    store = cache._store
    assert store is not None
    blocks = 2 + 2 * 1
    layers = 1
    assert store.counters().blocks_stored == blocks + layers
    other = common + _tokens(BLOCK_TOKENS, 4) + [1]
    assert cache.fetch(other)[1] == 2 * BLOCK_TOKENS
    cache.close()


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("length", [40, 64, 90, 200])
def test_what_cannot_be_cut_is_restored_at_its_exact_length(
    kind: str, length: int, home: Any
) -> None:
    model, tokens = mlx_models.make(kind), _tokens(length)
    first = PersistentPromptCache(model)
    computed = _exact(model, tokens)
    first.store(tokens, computed)
    second = _reopen(model, first)
    cache, held = second.fetch([*tokens, 9, 9])
    window_not_full = kind == "gemma3" and length <= 96
    assert held == (length // BLOCK_TOKENS * BLOCK_TOKENS if window_not_full else length)
    if not window_not_full:
        assert mlx_models.state_bytes(cache, held) == mlx_models.state_bytes(computed, held)
    expected = _exact(model, tokens[:held]) if held else caches.make_prompt_cache(model)
    rest = [*tokens[held:], 9, 9]
    assert _answer(model, rest, cache) == _answer(model, rest, expected)
    second.close()


def test_keys_and_values_beside_states_are_shared_by_longer_prompts(home: Any) -> None:
    model, tokens = mlx_models.make("falcon_h1"), _tokens(200)
    cache = PersistentPromptCache(model)
    cache.store(tokens[:150], _exact(model, tokens[:150]))
    assert cache.flush(60)
    store = cache._store
    assert store is not None
    before = store.counters().blocks_stored
    assert before == 2 + 1 + 1  # blocks, state, layers
    cache.store(tokens, _exact(model, tokens))
    assert cache.flush(60)
    assert store.counters().blocks_stored == before + 1 + 1
    assert cache.fetch([*tokens, 1])[1] == 200
    assert cache.fetch([*tokens[:170], 1])[1] == 150
    cache.close()


@pytest.mark.parametrize("start", [0, 80])
def test_a_quantized_cache_comes_back_quantized(start: int, home: Any) -> None:
    model, tokens = mlx_models.make("llama"), _tokens(150)
    how = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    computed = caches.make_prompt_cache(model)
    _prefill(model, tokens, computed, prefill_step_size=50, **how)
    assert type(computed[0]) is caches.QuantizedKVCache
    first = PersistentPromptCache(model)
    first.store(tokens, computed, **how)
    second = _reopen(model, first)
    assert second.fetch([*tokens, 1])[1] == 0  # as computed, it is another's
    cache, held = second.fetch([*tokens, 1], **how)
    assert held == 128
    for one in computed:
        one.offset = held
    assert mlx_models.state_bytes(cache, held) == mlx_models.state_bytes(computed, held)
    assert len(_answer(model, [*tokens[held:], 1], cache, **how)) == 12
    second.close()


def test_a_window_of_generation_is_kept(home: Any) -> None:
    model, tokens = mlx_models.make("deepseek"), _tokens(150)
    small = caches.make_prompt_cache(model, max_kv_size=100)
    model(mx.array(tokens)[None], cache=small)
    mx.eval([one.state for one in small])
    first = PersistentPromptCache(model)
    first.store(tokens, small)
    second = _reopen(model, first)
    assert second.fetch([*tokens, 1])[1] == 0
    cache, held = second.fetch([*tokens, 1], max_kv_size=100)
    assert held == 150
    assert mlx_models.state_bytes(cache, held) == mlx_models.state_bytes(small, held)
    second.close()


def test_chunked_caches_are_kept_whole() -> None:
    one = caches.ChunkedKVCache(32)
    for _ in range(3):
        one.update_and_fetch(mx.ones((1, 2, 20, 8)), mx.zeros((1, 2, 20, 8)))
        one.maybe_trim_front()
    data = b"".join(bytes(piece) for piece in write_state(one.state).pieces)
    import numpy as np

    back = caches.ChunkedKVCache.from_state(read_state(np.frombuffer(data, dtype=np.uint8)))
    assert mlx_models.state_bytes([back], 0) == mlx_models.state_bytes([one], 0)


def test_a_cache_may_be_used_while_it_is_stored(home: Any) -> None:
    """What is stored is what was there when `store` was called."""
    model, tokens = mlx_models.make("llama"), _tokens(150)
    first = PersistentPromptCache(model)
    cache = _exact(model, tokens)
    first.store(tokens, cache)
    for one in cache:  # in place, unless somebody holds it
        one.keys[:] = mx.zeros_like(one.keys)
        one.values[:] = mx.zeros_like(one.values)
    mx.eval([one.state for one in cache])
    second = _reopen(model, first)
    back, held = second.fetch([*tokens, 1])
    assert held == 128
    assert _answer(model, [*tokens[held:], 1], back) == _answer(model, [1], _exact(model, tokens))
    second.close()


def test_caches_of_several_sequences_are_left_alone(home: Any) -> None:
    model, tokens = mlx_models.make("llama"), _tokens(70)
    cache: list[Any] = caches.make_prompt_cache(model)
    model(mx.array([tokens, tokens]), cache=cache)
    first = PersistentPromptCache(model)
    first.store(tokens, cache)
    assert first.flush(60)
    store = first._store
    assert store is not None
    assert store.counters().blocks_stored == 0
    first.close()


def test_a_state_of_unknown_tokens_is_not_kept(home: Any) -> None:
    model, tokens = mlx_models.make("falcon_h1"), _tokens(100)
    cache = _exact(model, tokens)
    first = PersistentPromptCache(model)
    first.store([*tokens, 1], cache)  # one more than it holds
    assert first.flush(60)
    assert first.fetch([*tokens, 1, 1])[1] == 0
    first.close()
