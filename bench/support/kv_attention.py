"""What restored KV does to the attention that a real model pays, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["block_errors", "recorded_queries"]


@contextmanager
def recorded_queries(network: Any) -> Iterator[list[torch.Tensor]]:
    """Have a model of Hugging Face note its queries; it computes the same as ever.

    Yields
    ------
    list of Tensor
        One of shape ``(heads, tokens, dim)`` for each layer that was asked, as its keys are
        asked with it: after what depends on the position.
    """
    found: list[torch.Tensor] = []
    # Under the name that it has, by which the model also chooses its masks.
    name = network.config._attn_implementation
    before = ALL_ATTENTION_FUNCTIONS[name]

    def attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(query[0].detach().clone())
        return before(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield found
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = before


def block_errors(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    restored_keys: torch.Tensor,
    restored_values: torch.Tensor,
    block: slice,
) -> tuple[float, float]:
    """What one layer's restored keys, and values, of one block change for real queries.

    Parameters
    ----------
    queries
        ``(query heads, queries, dim)``; the first heads share the first head of the keys.
    keys, values, restored_keys, restored_values
        ``(heads, tokens, dim)`` of the whole prefix.
    block
        Tokens of which keys and values are the restored ones; all others stay as they are.

    Returns
    -------
    float, float
        The part of the attention paid to the block that goes elsewhere with its restored
        keys; and the relative error of what attention makes of its restored values.
    """
    shared = queries.shape[0] // keys.shape[0]
    keys, restored_keys = (one.repeat_interleave(shared, 0) for one in (keys, restored_keys))
    values, restored_values = (
        one.repeat_interleave(shared, 0) for one in (values, restored_values)
    )
    scale = queries.shape[-1] ** -0.5
    logits = queries @ keys.transpose(1, 2) * scale
    weights = torch.softmax(logits, -1)
    logits[:, :, block] = queries @ restored_keys[:, block].transpose(1, 2) * scale
    moved = (torch.softmax(logits, -1) - weights).abs().sum(-1).mean() / 2
    inside = weights[:, :, block]
    wanted = inside @ values[:, block]
    got = inside @ restored_values[:, block]
    return float(moved / inside.sum(-1).mean()), float((got - wanted).norm() / wanted.norm())
