"""Key spaces: what kinds of caches a block or a state is of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models import cache as caches

from lifeboat_cache.interface import block_keys
from lifeboat_cache.mlx.kinds import Layer, can_be_cut, describe

__all__ = ["Quantization", "Space", "expected"]


@dataclass(frozen=True)
class Quantization:
    """How generation makes a cache smaller, as ``mlx_lm.generate`` is told.

    Attributes
    ----------
    bits
        ``kv_bits``.
    group_size
        ``kv_group_size``.
    start
        ``quantized_kv_start``: from this length on.
    """

    bits: int
    group_size: int
    start: int


@dataclass(frozen=True)
class Space:
    """The classes of a prompt cache, and which of its layers are stored in blocks.

    Attributes
    ----------
    names
        Class of each layer's cache.
    cut
        Layers that are stored in blocks; the others' states are stored whole.
    quantization
        In force while the tokens were computed: those behind the first quantized one saw
        inexact keys.
    """

    names: tuple[str, ...]
    cut: tuple[int, ...]
    quantization: Quantization | None

    @property
    def complete(self) -> bool:
        """Whether blocks are all that is stored."""
        return len(self.cut) == len(self.names)

    def _text(self) -> bytes:
        how = self.quantization
        facts = [
            list(self.names),
            list(self.cut),
            None if how is None else [how.bits, how.group_size, how.start],
        ]
        return json.dumps(facts, separators=(",", ":")).encode()

    def kind_key(self) -> bytes:
        """Key of the record that says what the layers are."""
        return block_keys([self._text()], space=b"mlx layers 1")[0]

    def block_keys(self, layers: Sequence[Layer], digests: Sequence[bytes]) -> list[bytes]:
        """Keys of blocks, by the digests of the prefixes that they end."""
        return block_keys(digests, space=b"mlx block 1" + self._text() + describe(layers))

    def state_keys(self, layers: Sequence[Layer], digests: Sequence[bytes]) -> list[bytes]:
        """Keys of whole states, by the digests of their prefixes."""
        return block_keys(digests, space=b"mlx state 1" + self._text() + describe(layers))


def expected(fresh: Sequence[Any], quantization: Quantization | None) -> list[Space]:
    """The spaces in which a prefix for new caches may lie, the smaller records first."""
    found: list[Space] = []
    plain = [type(one).__name__ for one in fresh]
    variants = [(plain, list(fresh))]
    if quantization is not None:
        quantized = [
            one.to_quantized(group_size=quantization.group_size, bits=quantization.bits)
            if type(one) is caches.KVCache
            else one
            for one in fresh
        ]
        variants.insert(0, ([type(one).__name__ for one in quantized], quantized))
    for names, layers in variants:
        growing = [
            number
            for number, one in enumerate(layers)
            if not isinstance(one, caches.RotatingKVCache) and can_be_cut(one, 0)
        ]
        windows = [
            number
            for number, one in enumerate(layers)
            if isinstance(one, caches.RotatingKVCache) and can_be_cut(one, 0)
        ]
        whole = sorted(growing + windows)
        if len(whole) == len(layers):
            found.append(Space(tuple(names), tuple(whole), quantization))
        if len(growing) < len(layers):
            found.append(Space(tuple(names), tuple(growing), quantization))
    return found
