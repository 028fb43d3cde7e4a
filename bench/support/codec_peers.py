"""Codecs as one would write them in PyTorch, for ``bench/codecs.py``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import KVLayout

__all__ = ["Peer", "peer_of"]

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


class TorchPacked:
    """Exponents of bfloat16 as 4-bit distances to their vector's largest, what does not fit apart.

    Without an entropy coder that is the way to store 16 bits exactly in about 12.
    """

    name = "torch"

    def __init__(self, layout: KVLayout, source: Bytes, target: Bytes) -> None:
        import torch

        torch.set_num_threads(1)
        per_layer = layout.nbytes // len(layout.tensors)
        dim = layout.tensors[0].dim
        self._sources = _cut(source, per_layer, torch.int16, dim)
        self._targets = _cut(target, per_layer, torch.int16, dim)
        self.encode()

    def encode(self) -> None:
        """See :class:`Peer`."""
        self._stored = [_packed(one) for one in self._sources]

    def decode(self) -> None:
        """See :class:`Peer`."""
        import torch

        for (rest, most, nibbles, places, odd), target in zip(
            self._stored, self._targets, strict=True
        ):
            below = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(1)
            exponents = most - below.to(torch.int16)
            low = rest.to(torch.int16)
            target.copy_(((low & 128) << 8) | (exponents << 7) | (low & 127))
            target.view(-1)[places] = odd


def _packed(bits: Any) -> tuple[Any, ...]:
    import torch

    exponents = (bits >> 7) & 255
    most = exponents.amax(dim=1, keepdim=True)
    below = most - exponents
    places = (below > 15).flatten().nonzero().flatten()
    few = below.clamp(max=15).to(torch.uint8)
    rest = ((bits & 127) | ((bits >> 8) & 128)).to(torch.uint8)
    return rest, most, few[:, ::2] | (few[:, 1::2] << 4), places, bits.flatten()[places]


#: Levels that lose least of a normal distribution, by bits; the positive half.
_LEVELS = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


class TorchRotated:
    """Vectors rotated by a Hadamard matrix, scaled, each value to the nearest of some levels."""

    name = "torch"

    def __init__(self, layout: KVLayout, source: Bytes, target: Bytes, bits: int) -> None:
        import torch

        torch.set_num_threads(1)
        tensor = layout.tensors[0]
        per_layer = layout.nbytes // len(layout.tensors)
        dtype = getattr(torch, tensor.dtype)
        self._sources = _cut(source, per_layer, dtype, tensor.dim)
        self._targets = _cut(target, per_layer, dtype, tensor.dim)
        rotation = torch.ones(1, 1)
        while rotation.shape[0] < tensor.dim & -tensor.dim:
            rotation = torch.cat(
                (torch.cat((rotation, rotation), 1), torch.cat((rotation, -rotation), 1))
            )
        self._rotation = rotation / rotation.shape[0] ** 0.5
        half = torch.tensor(_LEVELS[bits])
        self._levels = torch.cat((-half.flip(0), half))
        self._between = (self._levels[1:] + self._levels[:-1]) / 2
        self._each = 4 if bits == 2 else 2
        self.encode()

    def _turned(self, vectors: Any) -> Any:
        return (vectors.unflatten(1, (-1, self._rotation.shape[0])) @ self._rotation).flatten(1)

    def encode(self) -> None:
        """See :class:`Peer`."""
        self._stored = [self._encoded(one) for one in self._sources]

    def _encoded(self, vectors: Any) -> tuple[Any, Any]:
        import torch

        turned = self._turned(vectors.to(torch.float32))
        scales = turned.pow(2).mean(dim=1, keepdim=True).sqrt()
        codes = torch.bucketize(turned / scales, self._between, out_int32=True).to(torch.uint8)
        packed = torch.zeros_like(codes[:, :: self._each])
        for number in range(self._each):
            packed |= codes[:, number :: self._each] << (8 // self._each * number)
        return packed, scales

    def decode(self) -> None:
        """See :class:`Peer`."""
        import torch

        width = 8 // self._each
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        for (packed, scales), target in zip(self._stored, self._targets, strict=True):
            codes = (packed.unsqueeze(-1) >> shifts) & ((1 << width) - 1)
            levels = self._levels[codes.flatten(1).to(torch.int32)]
            target.copy_(self._turned(levels * scales))


def peer_of(codec: str, dtype: str) -> Callable[[KVLayout, Bytes, Bytes], Peer] | None:
    """What makes a peer of a codec for a layout, memory to read from and memory to restore to."""
    if not _HAS_TORCH or codec == "raw":
        return None
    if codec in ("lossless", "dense"):
        return TorchPacked if dtype == "bfloat16" else None
    return TorchFp8 if codec == "fp8" else partial(TorchRotated, bits=int(codec[-1]))
