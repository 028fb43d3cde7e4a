"""Only the same model finds what was stored."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as caches

from lifeboat_cache.mlx import PersistentPromptCache, identity
from lifeboat_cache.mlx.chain import as_tokens, lengths_within, prefix_digests


def _digest(model: Any, draft: Any = None, salt: str = "") -> str:
    return identity.find_namespace(model, draft, salt, 64, "a name").hex


def test_the_same_model_is_the_same_in_every_process() -> None:
    assert _digest(mlx_models.make("llama")) == _digest(mlx_models.make("llama"))


@pytest.mark.parametrize(
    "change", [{"rope_theta": 20000.0}, {"rms_norm_eps": 1e-6}, {"seed": 8}], ids=str
)
def test_what_decides_the_bytes_is_in_the_identity(change: dict[str, Any]) -> None:
    assert _digest(mlx_models.make("llama", **change)) != _digest(mlx_models.make("llama"))


def test_a_draft_model_and_a_salt_are_in_it() -> None:
    model, draft = mlx_models.make("llama"), mlx_models.make("llama", seed=9)
    digests = {_digest(model), _digest(model, draft), _digest(model, salt="x"), _digest(draft)}
    assert len(digests) == 4


def test_one_changed_weight_of_a_small_tensor_changes_it() -> None:
    model = mlx_models.make("llama")
    before = _digest(model)
    name, array = tree_flatten(model.parameters())[0]
    flat = array.reshape(-1)
    flat[0] = flat[0] + 1
    model.load_weights([(name, flat.reshape(array.shape))], strict=False)
    assert _digest(model) != before


def test_a_changed_rope_of_a_loaded_model_changes_it() -> None:
    model = mlx_models.make("llama")
    before = _digest(model)
    model.layers[0].self_attn.rope.base = 5000.0
    assert _digest(model) != before


def test_quantized_weights_are_others() -> None:
    import mlx.nn as nn

    model = mlx_models.make("llama")
    before = _digest(model)
    nn.quantize(model, group_size=32, bits=8)
    assert _digest(model) != before


def test_another_model_finds_nothing(home: Any) -> None:
    tokens = list(range(130))
    model, other = mlx_models.make("llama"), mlx_models.make("llama", seed=8)
    cache = caches.make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=cache)
    with PersistentPromptCache(model) as first:
        first.store(tokens, cache)
        assert first.flush(60)
        assert first.fetch([*tokens, 1])[1] == 128
    with PersistentPromptCache(other) as second:
        assert second.fetch([*tokens, 1])[1] == 0


def test_a_model_without_settings_is_left_alone(home: Any) -> None:
    model = mlx_models.make("llama")
    model.args = None
    with PersistentPromptCache(model) as cache:
        assert "settings are not known" in cache.reason
        assert cache.fetch([1, 2, 3])[1] == 0
        cache.store([1, 2, 3], cache.fetch([1, 2, 3])[0])


def test_images_are_no_tokens() -> None:
    assert as_tokens([1, 2, -5]) is None
    assert as_tokens([1, 1 << 70]) is None
    assert as_tokens(["a"]) is None  # type: ignore[list-item]
    known = as_tokens([3, 4])
    assert known is not None
    assert known.tolist() == [3, 4]


def test_every_length_has_a_name_of_its_own() -> None:
    tokens = as_tokens(list(range(200)))
    assert tokens is not None
    digests = prefix_digests(tokens, 64)
    names = list(digests)
    for number, digest in enumerate(digests):
        tail = tokens[64 * number : 64 * number + 64]
        names += lengths_within(digest, tail, 0, min(len(tail), 63))
    assert len(set(names)) == len(names) == 4 + 3 * 64 + 9
    changed = tokens.copy()
    changed[10] += 1
    assert not set(prefix_digests(changed, 64)[1:]) & set(digests)
