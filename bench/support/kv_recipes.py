"""Lossy ways to store KV as one would write them in PyTorch, for ``bench/accuracy.py``.

Everything takes float32 ``(layers, heads, tokens, dim)`` and gives back what would be
restored with its bits per element, scales and means included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch

__all__ = ["RECIPES", "Recipe", "Restored"]

BLOCK_TOKENS = 256

_EPS = 1e-30


@dataclass(frozen=True)
class Restored:
    """What comes back.

    Attributes
    ----------
    keys, values
        float32 ``(layers, heads, tokens, dim)``.
    bits
        Per element of both.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bits: float


Recipe = Callable[[torch.Tensor, torch.Tensor], Restored]


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def _cast(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _fp8(x: torch.Tensor) -> torch.Tensor:
    scale = _bf16(x.abs().amax(-1, keepdim=True).clamp_min(_EPS) / 448)
    return _cast(x / scale) * scale


def _int4(x: torch.Tensor) -> torch.Tensor:
    low = _bf16(x.amin(-1, keepdim=True))
    step = _bf16((x.amax(-1, keepdim=True) - low).clamp_min(_EPS) / 15)
    return ((x - low) / step).round().clamp(0, 15) * step + low


@cache
def _hadamard(size: int) -> torch.Tensor:
    """Hadamard matrix times random signs; of the largest power of two that divides ``size``."""
    matrix = torch.ones(1, 1)
    while size % (2 * matrix.shape[0]) == 0:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    whole = torch.block_diag(*[matrix / matrix.shape[0] ** 0.5] * (size // matrix.shape[0]))
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size)) * 2 - 1
    return signs[:, None] * whole


@cache
def _levels(bits: int) -> torch.Tensor:
    """The best levels for a unit Gaussian (Lloyd, Max)."""
    normal = NormalDist()
    count = 1 << bits
    levels = [normal.inv_cdf((number + 0.5) / count) for number in range(count)]
    for _ in range(1000):
        edges = [(a + b) / 2 for a, b in pairwise(levels)]
        density = [0.0, *map(normal.pdf, edges), 0.0]
        below = [0.0, *map(normal.cdf, edges), 1.0]
        levels = [(density[n] - density[n + 1]) / (below[n + 1] - below[n]) for n in range(count)]
    return torch.tensor(levels)


def _codebook(x: torch.Tensor, bits: int, *, centred: bool, rotated: bool) -> torch.Tensor:
    """Each vector by its own scale and a codebook; ``x`` is ``(..., tokens, dim)`` of a block."""
    mean = _bf16(x.mean(-2, keepdim=True)) if centred else torch.zeros(1)
    y = x - mean
    if rotated:
        y = y @ _hadamard(x.shape[-1])
    scale = _bf16(y.square().mean(-1, keepdim=True).sqrt().clamp_min(_EPS))
    levels = _levels(bits)
    y = levels[torch.bucketize(y / scale, (levels[1:] + levels[:-1]) / 2)] * scale
    if rotated:
        y = y @ _hadamard(x.shape[-1]).T
    return y + mean


def _plain(store: Callable[[torch.Tensor], torch.Tensor], bits: float, per_vector: int) -> Recipe:
    def recipe(keys: torch.Tensor, values: torch.Tensor) -> Restored:
        return Restored(store(keys), store(values), bits + per_vector / keys.shape[-1])

    return recipe


def _family(
    key_bits: int,
    value_bits: int,
    *,
    centred: bool = True,
    rotated: bool = True,
    edges: bool = True,
    first: bool = True,
) -> Recipe:
    """Rotation and codebook, with edge layers and the first block at 8 bits."""

    def recipe(keys: torch.Tensor, values: torch.Tensor) -> Restored:
        layers, heads, tokens, dim = keys.shape
        shape = (layers, heads, tokens // BLOCK_TOKENS, BLOCK_TOKENS, dim)
        k, v = keys.view(shape), values.view(shape)
        k2 = _codebook(k, key_bits, centred=centred, rotated=rotated)
        v2 = _codebook(v, value_bits, centred=False, rotated=rotated)
        mean = 8 / BLOCK_TOKENS if centred else 0.0
        bits = torch.full(shape[:3], (key_bits + value_bits) / 2 + 16 / dim + mean)
        exact = torch.zeros(shape[:3], dtype=torch.bool)
        if edges:
            exact[:2] = exact[-2:] = True
        if first:
            exact[:, :, 0] = True
        bits[exact] = 8 + 16 / dim
        k2[exact], v2[exact] = _fp8(k[exact]), _fp8(v[exact])
        return Restored(k2.view_as(keys), v2.view_as(values), float(bits.mean()))

    return recipe


def _bare(*, centred: bool, rotated: bool) -> Recipe:
    return _family(4, 4, centred=centred, rotated=rotated, edges=False, first=False)


RECIPES: dict[str, Recipe] = {
    "e4m3 cast without scales": _plain(_cast, 8, 0),
    "e4m3, scale per vector": _plain(_fp8, 8, 16),
    "int4, min/max per vector": _plain(_int4, 4, 32),
    "4-bit codebook alone": _bare(centred=False, rotated=False),
    "4-bit codebook, centred keys": _bare(centred=True, rotated=False),
    "4-bit codebook, rotated": _bare(centred=False, rotated=True),
    "4-bit codebook, both": _bare(centred=True, rotated=True),
    "… and edge layers at fp8": _family(4, 4, first=False),
    "… and first block at fp8": _family(4, 4, edges=False),
    "4/4 bits in full": _family(4, 4),
    "4/2 bits in full": _family(4, 2),
    "3/3 bits in full": _family(3, 3),
    "2/2 bits in full": _family(2, 2),
}
