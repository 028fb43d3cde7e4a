"""The copies between device and host pools, in torch instead of a compiled kernel.

All take token indices. Pages of ``page_size`` tokens begin at every ``page_size``-th.
"""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer_direct_pf_lf",
]


def transfer_kv_direct(
    src_layers: Sequence[Any],
    dst_layers: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy tokens between tensors of one layout, ``(tokens, ...)`` each."""
    source, target = src_indices.long(), dst_indices.long()
    for old, new in zip(src_layers, dst_layers, strict=True):
        new[target] = old[source]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy ``(tokens, ...)`` per layer into ``(pages, layers, page, ...)``, one per group."""
    layers = len(src_ptrs) // len(dst_ptrs)
    tokens, first = _tokens(src_indices, page_size), _pages(dst_indices, page_size)
    for group, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[group * layers + layer]
            target[first, layer] = source[tokens].reshape(len(first), *target.shape[2:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of ``(pages, layers, page, ...)`` back into ``(tokens, ...)``."""
    first, tokens = _pages(src_indices, page_size), _tokens(dst_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[tokens] = source[first, layer_id].reshape(len(tokens), *target.shape[1:])


def _pages(indices: Any, page_size: int) -> Any:
    """Return the numbers of the pages that begin at every ``page_size``-th index."""
    return indices[::page_size].long() // page_size


def _tokens(indices: Any, page_size: int) -> Any:
    """Return all token indices of those pages."""
    starts = indices[::page_size].long()
    return (starts[:, None] + torch.arange(page_size)).reshape(-1)
