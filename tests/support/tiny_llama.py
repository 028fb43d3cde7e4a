"""Writes a tiny random Llama: configuration, safetensors weights and a byte tokenizer.

Needs numpy only, takes milliseconds, and loads in vLLM, transformers and SGLang.
Four attention heads and two KV heads of 32, so it also runs with two tensor-parallel
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors_file import Tensor, bfloat16, write_file, write_sharded

__all__ = ["HEADS", "HEAD_SIZE", "KV_HEADS", "VOCABULARY", "config", "tensors", "write"]

HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 32
VOCABULARY = 512
_HIDDEN = HEADS * HEAD_SIZE
_INTERMEDIATE = 256


def config(layers: int = 2, **changes: Any) -> dict[str, Any]:
    """``config.json``; keywords replace or add keys."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        **changes,
    }


def tensors(layers: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """The weights, random by ``seed``, in bf16."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return bfloat16(random.normal(0.0, 0.02, shape))

    def ones(size: int) -> Tensor:
        return bfloat16(np.ones(size))

    found = {"model.embed_tokens.weight": normal(VOCABULARY, _HIDDEN)}
    for number in range(layers):
        layer = f"model.layers.{number}"
        found |= {
            f"{layer}.input_layernorm.weight": ones(_HIDDEN),
            f"{layer}.self_attn.q_proj.weight": normal(_HIDDEN, _HIDDEN),
            f"{layer}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_SIZE, _HIDDEN),
            f"{layer}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_SIZE, _HIDDEN),
            f"{layer}.self_attn.o_proj.weight": normal(_HIDDEN, _HIDDEN),
            f"{layer}.post_attention_layernorm.weight": ones(_HIDDEN),
            f"{layer}.mlp.gate_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.up_proj.weight": normal(_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.down_proj.weight": normal(_HIDDEN, _INTERMEDIATE),
        }
    found["model.norm.weight"] = ones(_HIDDEN)
    found["lm_head.weight"] = normal(VOCABULARY, _HIDDEN)
    return found


def _byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level tokenizers write bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    vocabulary = {character: number for number, character in enumerate(_byte_alphabet())}
    special = {"<bos>": 256, "<eos>": 257}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, number in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary | special,
            "merges": [],
        },
    }


def write(
    directory: Path,
    *,
    layers: int = 2,
    seed: int = 0,
    shards: int = 1,
    weights: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write the model to ``directory``, which is made, and return it.

    Parameters
    ----------
    layers, seed
        Size and random weights.
    shards
        Files the weights are cut into.
    weights
        Other weights than :func:`tensors` makes.
    changes
        Keys of ``config.json`` to replace or add.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = dict(weights if weights is not None else tensors(layers, seed))
    if shards == 1:
        write_file(directory / "model.safetensors", found, {"format": "pt"})
    else:
        names = list(found)
        write_sharded(
            directory,
            [{name: found[name] for name in names[part::shards]} for part in range(shards)],
        )
    files = {
        "config.json": config(layers, **changes),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "model_max_length": 2048,
        },
        "generation_config.json": {"bos_token_id": 256, "eos_token_id": 257},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2))
    return directory
