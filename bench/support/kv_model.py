"""A real model that continues a text over keys and values that were stored and restored."""

from __future__ import annotations

import inspect
import pydoc_data.topics
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kv_attention import recorded_queries
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lifeboat_cache.codecs.layout import KVLayout, Role, TensorLayout

__all__ = ["KIND_TEXTS", "Prompt", "Score", "TextModel", "kv_layout", "tensors_of", "to_blocks"]

Bytes = npt.NDArray[np.uint8]

#: Texts that come with Python: its reference manual, and the source of a module.
KIND_TEXTS = {
    "prose": "".join(
        pydoc_data.topics.topics[name]
        for name in ("execmodel", "import", "calls", "customization", "compound", "types")
    ),
    "code": "".join(inspect.getsource(__import__(name)) for name in ("argparse", "tarfile")),
}


@dataclass(frozen=True)
class Prompt:
    """A text whose first tokens were read.

    Attributes
    ----------
    ids
        int64 ``(1, prefix + scored + 1)``.
    keys, values
        float32 ``(layers, heads, prefix, dim)``, rounded to bfloat16.
    queries
        float32 ``(layers, query heads, scored, dim)``: with which the tokens after the prefix
        ask its keys.
    logits
        float32 ``(scored, vocabulary)``: what follows, with keys and values as they are.
    """

    ids: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Score:
    """How a continuation differs: KL in nats, the others as usual."""

    kl: float
    top1: float
    perplexity: float


class TextModel:
    """A causal language model of Hugging Face, in float32.

    Parameters
    ----------
    path
        Directory or name of the model.
    prefix, scored
        Tokens that are read first, and tokens after them that are looked at.
    """

    def __init__(self, path: str, prefix: int, scored: int) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._prefix, self._scored = prefix, scored

    def read(self, text: str) -> Prompt:
        """Read the beginning of a text.

        Raises
        ------
        ValueError
            If the text is too short.
        """
        count = self._prefix + self._scored + 1
        ids = self._tokenizer(text, return_tensors="pt").input_ids[:, :count]
        if ids.shape[1] < count:
            raise ValueError(f"a text has {ids.shape[1]} tokens, not {count}: take a longer one")
        with torch.inference_mode():
            # A cache without a configuration keeps all tokens of layers with a window, too.
            cache: Any = self._network(
                ids[:, : self._prefix], past_key_values=DynamicCache(), logits_to_keep=1
            ).past_key_values
        keys = torch.stack([layer.keys[0] for layer in cache.layers]).bfloat16().float()
        values = torch.stack([layer.values[0] for layer in cache.layers]).bfloat16().float()
        with recorded_queries(self._network) as queries:
            logits = self._continued(ids, keys, values)
        return Prompt(ids, keys, values, torch.stack(queries), logits)

    def score(self, prompt: Prompt, keys: torch.Tensor, values: torch.Tensor) -> Score:
        """Continue a text over other keys and values, rounded to bfloat16 first."""
        logits = self._continued(prompt.ids, keys.bfloat16().float(), values.bfloat16().float())
        wanted = torch.log_softmax(prompt.logits, -1)
        got = torch.log_softmax(logits, -1)
        loss = torch.nn.functional.cross_entropy(logits, prompt.ids[0, self._prefix + 1 :])
        return Score(
            kl=float((wanted.exp() * (wanted - got)).sum(-1).mean()),
            top1=float((wanted.argmax(-1) == got.argmax(-1)).float().mean()),
            perplexity=float(loss.exp()),
        )

    def _continued(
        self, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        cache = DynamicCache()
        for layer in range(keys.shape[0]):
            cache.update(keys[layer][None], values[layer][None], layer)
        asked = ids[:, self._prefix : self._prefix + self._scored]
        with torch.inference_mode():
            logits: torch.Tensor = self._network(asked, past_key_values=cache).logits[0].float()
        return logits


def kv_layout(layers: int, heads: int, dim: int, tokens: int) -> KVLayout:
    """Blocks of keys and values in bfloat16: layer by layer, in pages of 16 tokens."""
    token = heads * dim * 2
    tensor = token * tokens
    roles: tuple[Role, ...] = ("key", "value")
    return KVLayout.of(
        tensor * 2 * layers,
        [
            TensorLayout(
                role,
                "bfloat16",
                layer,
                tokens // 16,
                16,
                heads,
                dim,
                token * 16,
                token,
                dim * 2,
                tensor * (2 * layer + number),
            )
            for layer in range(layers)
            for number, role in enumerate(roles)
        ],
    )


def to_blocks(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> Bytes:
    """uint8 ``(blocks, nbytes)``: payloads of :func:`kv_layout`."""
    layers, heads, length, dim = keys.shape
    both = torch.stack((keys, values), dim=1).bfloat16()  # layers, 2, heads, length, dim
    cut = both.view(layers, 2, heads, length // tokens, tokens, dim).permute(3, 0, 1, 4, 2, 5)
    made: Bytes = cut.reshape(length // tokens, -1).view(torch.uint8).numpy()
    return made


def tensors_of(payloads: Bytes, like: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    """Keys and values, float32 and of the shape of ``like``, from payloads."""
    layers, heads, length, dim = like.shape
    both = torch.from_numpy(payloads).view(torch.bfloat16)
    cut = both.view(length // tokens, layers, 2, tokens, heads, dim).permute(2, 1, 4, 0, 3, 5)
    whole = cut.reshape(2, layers, heads, length, dim).float()
    return whole[0], whole[1]
