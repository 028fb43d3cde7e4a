"""Which of mlx-lm's caches can be cut at any token, and how.

A cache that keeps the keys and values of every token is stored in blocks, which prompts with
a common prefix share. One that keeps a window or a state is what a prompt of exactly one
length left there; it is stored whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as caches

from lifeboat_cache.mlx.arrays import dtype_name

__all__ = [
    "Layer",
    "Plane",
    "Planes",
    "can_be_cut",
    "describe",
    "find_class",
    "leaves_of",
    "planes_of",
    "rebuild",
    "regroup",
    "room",
]

#: Caches grow by so many tokens at a time; restored ones have room as if they had grown.
_STEP = 256

_GROWING = (caches.KVCache, caches.ConcatenateKVCache, caches.QuantizedKVCache)


@dataclass(frozen=True)
class Plane:
    """One array of a cache with a row for every token.

    Attributes
    ----------
    heads, dim
        Shape: ``(1, heads, tokens, dim)``.
    dtype
        Its name, see :mod:`lifeboat_cache.mlx.arrays`.
    row_bytes
        Bytes of a token's row of one head.
    """

    heads: int
    dim: int
    dtype: str
    row_bytes: int


@dataclass(frozen=True)
class Layer:
    """A cache that can be cut.

    Attributes
    ----------
    number
        Its place among the leaves of the prompt cache (:func:`leaves_of`).
    name
        Its class.
    settings
        What its class has to be told: group size and bits, or what a window keeps and its
        size.
    planes
        Its arrays, keys before values.
    """

    number: int
    name: str
    settings: tuple[int, ...]
    planes: tuple[Plane, ...]

    def to_json(self) -> list[Any]:
        """Plain values, for :meth:`from_json`."""
        return [
            self.number,
            self.name,
            list(self.settings),
            [[plane.heads, plane.dim, plane.dtype, plane.row_bytes] for plane in self.planes],
        ]

    @classmethod
    def from_json(cls, values: Any) -> Layer:
        """Read back what :meth:`to_json` gave."""
        number, name, settings, planes = values
        return cls(
            int(number),
            str(name),
            tuple(int(value) for value in settings),
            tuple(Plane(int(h), int(d), str(t), int(b)) for h, d, t, b in planes),
        )


@dataclass(frozen=True)
class Planes:
    """The arrays of a cache that can be cut, as they are now."""

    layer: Layer
    arrays: tuple[mx.array, ...]
    tokens: int


def can_be_cut(cache: Any, tokens: int) -> bool:
    """Whether a cache of ``tokens`` tokens has a row for each of them.

    A window has, until it is full.
    """
    if type(cache) in _GROWING:
        return True
    # By its class alone: a subclass may keep more.
    return type(cache) is caches.RotatingKVCache and tokens <= cache.max_size


def planes_of(number: int, cache: Any) -> Planes | None:
    """The arrays of a cache with a row for every token, or ``None`` if it has none such.

    Caches of several sequences are not stored.
    """
    keys, values = cache.keys, cache.values
    if keys is None:
        return None
    quantized = type(cache) is caches.QuantizedKVCache
    arrays = (*keys, *values) if quantized else (keys, values)
    if any(array.ndim != 4 or array.shape[0] != 1 for array in arrays):
        return None
    tokens = int(cache.offset)
    if any(array.shape[2] < tokens for array in arrays):
        return None
    settings: tuple[int, ...] = ()
    if quantized:
        settings = (int(cache.group_size), int(cache.bits))
    elif type(cache) is caches.RotatingKVCache:
        if cache._idx != tokens:
            return None  # it has wrapped around
        settings = (int(cache.keep), int(cache.max_size))
    planes = tuple(
        Plane(
            int(array.shape[1]),
            int(array.shape[3]),
            dtype_name(array.dtype),
            int(array.shape[3]) * int(array.dtype.size),
        )
        for array in arrays
    )
    return Planes(Layer(number, type(cache).__name__, settings, planes), arrays, tokens)


def room(layer: Layer, tokens: int) -> int:
    """Tokens that the arrays of a restored cache have room for.

    One step more than a cache that has grown: the tokens that follow would have it copied as a
    whole otherwise. Nobody looks at what lies behind the tokens that a cache holds.
    """
    if layer.name in ("KVCache", "QuantizedKVCache"):
        return (tokens // _STEP + 2) * _STEP
    return tokens


def rebuild(layer: Layer, arrays: Sequence[mx.array], tokens: int) -> Any:
    """A cache of ``tokens`` tokens over filled arrays."""
    cls = find_class(layer.name)
    half = len(arrays) // 2
    if layer.name == "QuantizedKVCache":
        group_size, bits = layer.settings
        state: Any = (tuple(arrays[:half]), tuple(arrays[half:]), tokens, group_size, bits)
    elif layer.name == "RotatingKVCache":
        keep, max_size = layer.settings
        state = (arrays[0], arrays[1], tokens, keep, max_size, tokens)
    elif layer.name == "KVCache":
        state = (arrays[0], arrays[1], tokens)
    else:
        state = (arrays[0], arrays[1])
    return cls.from_state(state)


def find_class(name: str) -> Any:
    """A class of caches of mlx-lm by its name.

    Raises
    ------
    ValueError
        If mlx-lm has no such class.
    """
    found = getattr(caches, name, None)
    if not isinstance(found, type) or not hasattr(found, "from_state"):
        raise ValueError(f"mlx-lm has no cache named {name!r}")
    return found


def describe(layers: Sequence[Layer]) -> bytes:
    """The one spelling of what layers are."""
    return json.dumps([layer.to_json() for layer in layers], separators=(",", ":")).encode()


def leaves_of(cache: Sequence[Any]) -> list[Any]:
    """The caches of all layers; hybrid layers have several, in a list of their own."""
    leaves: list[Any] = []
    for one in cache:
        leaves += leaves_of(one.caches) if type(one) is caches.CacheList else [one]
    return leaves


def regroup(like: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Leaves as a prompt cache of the shape of another one."""
    return _regroup(like, iter(leaves))


def _regroup(like: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    return [
        caches.CacheList(*_regroup(one.caches, leaves))
        if type(one) is caches.CacheList
        else next(leaves)
        for one in like
    ]
