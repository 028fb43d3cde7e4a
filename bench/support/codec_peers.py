"""Codecs as one would write them in PyTorch, for ``bench/codecs.py``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import KVLayout

__all__ = ["PEERS", "Peer"]

Bytes = npt.NDArray[np.uint8]

_HAS_TORCH = importlib.util.find_spec("torch") is not None


class Peer(Protocol):
    """Stores and restores one block with one core."""

    name: str

    def encode(self) -> None:
        """Store the block in memory of its own."""

    def decode(self) -> None:
        """Restore it to where it was told."""


class TorchFp8:
    """A cast to ``float8_e4m3fn`` with a scale for every vector."""

    name = "torch"

    def __init__(self, layout: KVLayout, source: Bytes, target: Bytes) -> None:
        import torch

        torch.set_num_threads(1)  # every thread of the benchmark stands for a core
        tensor = layout.tensors[0]
        dtype = getattr(torch, tensor.dtype)
        per_layer = layout.nbytes // len(layout.tensors)
        self._sources = _cut(source, per_layer, dtype, tensor.dim)
        self._targets = _cut(target, per_layer, dtype, tensor.dim)
        self._stored = [_fp8_encode(one) for one in self._sources]

    def encode(self) -> None:
        """See :class:`Peer`."""
        self._stored = [_fp8_encode(one) for one in self._sources]

    def decode(self) -> None:
        """See :class:`Peer`."""
        import torch

        for (codes, scales), target in zip(self._stored, self._targets, strict=True):
            target.copy_(codes.to(torch.float32) * scales)


def _cut(block: Bytes, nbytes: int, dtype: Any, dim: int) -> list[Any]:
    import torch

    return [
        torch.from_numpy(block[at : at + nbytes]).view(dtype).view(-1, dim)
        for at in range(0, block.shape[0], nbytes)
    ]


def _fp8_encode(vectors: Any) -> tuple[Any, Any]:
    import torch

    scales = vectors.abs().amax(dim=1, keepdim=True).to(torch.float32) / 448.0
    return (vectors / scales).to(torch.float8_e4m3fn), scales


#: By the name of the codec.
PEERS: dict[str, Callable[[KVLayout, Bytes, Bytes], Peer]] = {"fp8": TorchFp8} if _HAS_TORCH else {}
