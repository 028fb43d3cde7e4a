"""Writes a tiny random Qwen3-Next: recurrent state in one layer, attention in the next one.

As :mod:`tiny_llama`, of which it takes all but the architecture. Its experts are left out, and
its weights are named and laid out as mlx-lm keeps them: other engines do not load it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiny_llama
from safetensors_file import Tensor, bfloat16

__all__ = ["write"]

_LAYERS = 4
_INTERVAL = 2
_HIDDEN = tiny_llama.HEADS * tiny_llama.HEAD_SIZE
_INTERMEDIATE = 256
_STATE_KEYS, _STATE_VALUES, _STATE_DIM = 2, 4, 32
_KERNEL = 4


def _tensors(seed: int) -> dict[str, Tensor]:
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.08) -> Tensor:
        return bfloat16(random.normal(0.0, scale, shape))

    def ones(size: int) -> Tensor:
        return bfloat16(np.ones(size))

    heads, kv_heads, dim = tiny_llama.HEADS, tiny_llama.KV_HEADS, tiny_llama.HEAD_SIZE
    keys, values = _STATE_KEYS * _STATE_DIM, _STATE_VALUES * _STATE_DIM
    found = {"model.embed_tokens.weight": normal(tiny_llama.VOCABULARY, _HIDDEN, scale=1.0)}
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        found |= {
            f"{layer}.input_layernorm.weight": ones(_HIDDEN),
            f"{layer}.post_attention_layernorm.weight": ones(_HIDDEN),
            f"{layer}.mlp.gate_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.up_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.down_proj.weight": normal(_HIDDEN, _INTERMEDIATE),
        }
        if (number + 1) % _INTERVAL:
            mixer = f"{layer}.linear_attn"
            found |= {
                # Small: what was long ago still counts.
                f"{mixer}.A_log": bfloat16(np.full(_STATE_VALUES, -5.0)),
                f"{mixer}.dt_bias": ones(_STATE_VALUES),
                f"{mixer}.conv1d.weight": normal(2 * keys + values, _KERNEL, 1, scale=0.5),
                f"{mixer}.in_proj_qkvz.weight": normal(2 * keys + 2 * values, _HIDDEN),
                f"{mixer}.in_proj_ba.weight": normal(2 * _STATE_VALUES, _HIDDEN),
                f"{mixer}.norm.weight": ones(_STATE_DIM),
                f"{mixer}.out_proj.weight": normal(_HIDDEN, values),
            }
        else:
            attention = f"{layer}.self_attn"
            found |= {
                f"{attention}.q_proj.weight": normal(2 * heads * dim, _HIDDEN),  # and its gate
                f"{attention}.k_proj.weight": normal(kv_heads * dim, _HIDDEN),
                f"{attention}.v_proj.weight": normal(kv_heads * dim, _HIDDEN),
                f"{attention}.o_proj.weight": normal(_HIDDEN, heads * dim),
                f"{attention}.q_norm.weight": ones(dim),
                f"{attention}.k_norm.weight": ones(dim),
            }
    found["model.norm.weight"] = ones(_HIDDEN)
    found["lm_head.weight"] = normal(tiny_llama.VOCABULARY, _HIDDEN)
    return found


def write(directory: Path, *, seed: int = 0) -> Path:
    """Write the model to ``directory``, which is made, and return it."""
    return tiny_llama.write(
        directory,
        layers=_LAYERS,
        weights=_tensors(seed),
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        decoder_sparse_step=1,
        full_attention_interval=_INTERVAL,
        intermediate_size=_INTERMEDIATE,
        linear_conv_kernel_dim=_KERNEL,
        linear_key_head_dim=_STATE_DIM,
        linear_num_key_heads=_STATE_KEYS,
        linear_num_value_heads=_STATE_VALUES,
        linear_value_head_dim=_STATE_DIM,
        mlp_only_layers=[],
        moe_intermediate_size=64,
        norm_topk_prob=True,
        num_experts=0,
        num_experts_per_tok=1,
        partial_rotary_factor=0.5,
        shared_expert_intermediate_size=64,
    )
