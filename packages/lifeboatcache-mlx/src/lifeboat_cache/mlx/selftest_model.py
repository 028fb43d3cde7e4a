"""A tiny random model: what the self-test stores prompt caches of. Run in two processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from lifeboat_cache.mlx import PersistentPromptCache
from lifeboat_cache.mlx.arrays import bytes_of

__all__ = ["PROMPT", "bytes_of_cache", "main", "make_model", "prefill"]

#: Tokens of the prompt; three blocks and a rest.
PROMPT = [(7 * number * number + 3) % 250 for number in range(200)]


def make_model(theta: float = 10000.0) -> Any:
    """A model that is the same in every process."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=3,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=256,
        rope_theta=theta,
    )
    model = llama.Model(args)
    mx.random.seed(2026)
    weights = [
        (name, mx.random.normal(array.shape, dtype=mx.float32).astype(mx.bfloat16) * 0.1)
        for name, array in sorted(tree_flatten(model.parameters()))
    ]
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def prefill(model: Any, cache: list[Any], tokens: list[int]) -> None:
    """Compute the KV of some tokens."""
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([one.state for one in cache])


def bytes_of_cache(cache: list[Any], tokens: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Keys and values of the first tokens of every layer, one after the other."""
    parts = [
        bytes_of(array[:, :, :tokens, :])[0] for one in cache for array in (one.keys, one.values)
    ]
    return np.concatenate(parts)


def main() -> int:
    """Restore in a process of its own: ``DIRECTORY``."""
    scratch = Path(sys.argv[1])
    import mlx_lm

    with PersistentPromptCache(make_model(), config=scratch / "lifeboat.yaml") as stored:
        cache, held = stored.fetch([*PROMPT, 1])
        if held:
            np.save(scratch / "restored.npy", bytes_of_cache(cache, held), allow_pickle=False)
        facts = {"held": held, "reason": stored.reason, "version": str(mlx_lm.__version__)}
    (scratch / "restored.json").write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
