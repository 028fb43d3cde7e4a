"""Writes a tiny random LoRA adapter for the tiny Llama."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tiny_llama
from safetensors_file import bfloat16, write_file

__all__ = ["RANK", "write_adapter"]

RANK = 4


def write_adapter(directory: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """Write an adapter of the query and value projections to ``directory`` and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    width = tiny_llama.HEADS * tiny_llama.HEAD_SIZE
    outputs = {"q_proj": width, "v_proj": tiny_llama.KV_HEADS * tiny_llama.HEAD_SIZE}
    tensors = {}
    for number in range(layers):
        for module, output in outputs.items():
            name = f"base_model.model.model.layers.{number}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = bfloat16(random.normal(0, 0.1, (RANK, width)))
            tensors[f"{name}.lora_B.weight"] = bfloat16(random.normal(0, 0.1, (output, RANK)))
    write_file(directory / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(outputs),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
