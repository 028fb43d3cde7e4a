"""Small random models of mlx-lm, one for each of its kinds of caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v3, falcon_h1, gemma3_text, llama, mamba, qwen3_next

__all__ = ["MODELS", "VOCABULARY", "make", "state_bytes"]

VOCABULARY = 256


def _llama(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
    }
    return llama.Model(llama.ModelArgs(**{**settings, **changes}))


def _gemma3(**changes: Any) -> Any:
    """Windows of 96 tokens in five layers of six."""
    settings: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "sliding_window": 96,
        "query_pre_attn_scalar": 32,
    }
    return gemma3_text.Model(gemma3_text.ModelArgs(**{**settings, **changes}))


def _mamba(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model_type": "mamba",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    }
    return mamba.Model(mamba.ModelArgs(**{**settings, **changes}))


def _falcon_h1(**changes: Any) -> Any:
    """A state and keys and values in every layer."""
    settings: dict[str, Any] = {
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
    }
    return falcon_h1.Model(falcon_h1.ModelArgs(**{**settings, **changes}))


def _qwen3_next(**changes: Any) -> Any:
    """A state in every other layer, keys and values in the others."""
    settings: dict[str, Any] = {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 1,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 2048,
        "head_dim": 32,
        "full_attention_interval": 2,
    }
    return qwen3_next.Model(qwen3_next.ModelArgs(**{**settings, **changes}))


def _deepseek(**changes: Any) -> Any:
    """Latent attention."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
    }
    return deepseek_v3.Model(deepseek_v3.ModelArgs(**{**settings, **changes}))


MODELS: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "mamba": _mamba,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
    "deepseek": _deepseek,
}


def make(kind: str, *, seed: int = 7, **changes: Any) -> Any:
    """A model with weights that are the same in every process."""
    model = MODELS[kind](**changes)
    mx.random.seed(seed)
    weights = [
        (name, mx.random.normal(array.shape, dtype=mx.float32).astype(array.dtype) * 0.1)
        for name, array in sorted(tree_flatten(model.parameters()))
    ]
    model.load_weights(weights, strict=False)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    model.eval()
    return model


def state_bytes(cache: Any, tokens: int) -> list[Any]:
    """All that a cache is: scalars, shapes, and bytes of what holds a token."""
    from mlx_lm.models import cache as caches

    found: list[Any] = []
    for one in cache:
        if isinstance(one, caches.CacheList):
            found += state_bytes(one.caches, tokens)
            continue
        found.append(type(one).__name__)
        growing = isinstance(one, (caches.KVCache, caches.QuantizedKVCache))
        for _, value in tree_flatten(one.state):
            if not isinstance(value, mx.array):
                found.append(value)
                continue
            kept = value[:, :, :tokens, :] if growing else value
            view = mx.contiguous(kept).view(mx.uint8)
            found.append((kept.shape, str(kept.dtype), bytes(memoryview(view))))
    return found
