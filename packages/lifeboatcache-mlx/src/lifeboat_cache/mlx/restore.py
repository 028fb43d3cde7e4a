"""Finding and loading the longest stored prefix of a prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from lifeboat_cache.interface import BlockBatch, BlockBuffers, Lookup, Outcome, Store
from lifeboat_cache.mlx import chain, kinds
from lifeboat_cache.mlx.blank import blank_arrays
from lifeboat_cache.mlx.blocks import block_buffers, block_layout
from lifeboat_cache.mlx.kinds import Layer
from lifeboat_cache.mlx.spaces import Space
from lifeboat_cache.mlx.state import read_state

__all__ = ["Restored", "Restorer"]

_log = logging.getLogger("lifeboat_cache")

#: A record of layers is small; what is larger is none of ours.
_KIND_BYTES = 1 << 20


@dataclass(frozen=True)
class Restored:
    """A prompt cache, and how many tokens it holds."""

    cache: list[Any]
    tokens: int


@dataclass(frozen=True)
class _Found:
    space: Space
    layers: tuple[Layer, ...]
    tokens: int
    blocks: list[bytes]
    state: bytes | None


class Restorer:
    """Looks for prefixes in a store.

    Parameters
    ----------
    store
        Where.
    block
        Tokens of a block.
    patience_s
        How long a load may take, in seconds; then the prompt is computed.
    """

    def __init__(self, store: Store, block: int, patience_s: float) -> None:
        self._store = store
        self._block = block
        self._patience_s = patience_s
        self._layers: dict[Space, tuple[Layer, ...]] = {}

    def restore(
        self,
        tokens: npt.NDArray[np.int64],
        spaces: Sequence[Space],
        fresh: Sequence[Any],
        *,
        beyond: int = 0,
    ) -> Restored | None:
        """The longest prefix of ``tokens`` that is there, in any of some spaces.

        Parameters
        ----------
        tokens
            All but the last token of a prompt, which has to be computed in any case.
        spaces
            See :func:`lifeboat_cache.mlx.spaces.expected`.
        fresh
            New caches of the model.
        beyond
            Only prefixes of more tokens are worth it.
        """
        digests = chain.prefix_digests(tokens, self._block)
        found = [self._find(space, tokens, digests) for space in spaces]
        longer = [one for one in found if one is not None and one.tokens > beyond]
        for one in sorted(longer, key=lambda one: -one.tokens):
            self._store.touch([one.space.kind_key(), *one.blocks, *filter(None, [one.state])])
            restored = self._load(one, fresh)
            if restored is not None and restored.tokens > beyond:
                return restored
        return None

    # Finding ----------------------------------------------------------------

    def layers(self, space: Space) -> tuple[Layer, ...] | None:
        """What the layers of a space are, if anything has been stored there."""
        known = self._layers.get(space)
        if known is None:
            known = self._read_layers(space)
            if known is not None:
                self.remember(space, known)
        return known

    def remember(self, space: Space, layers: tuple[Layer, ...]) -> None:
        """Note what the layers of a space are."""
        self._layers[space] = layers

    def _read_layers(self, space: Space) -> tuple[Layer, ...] | None:
        data = self._read(space.kind_key(), _KIND_BYTES)
        if data is None:
            return None
        try:
            return tuple(Layer.from_json(item) for item in json.loads(data.tobytes()))
        except (ValueError, TypeError) as exc:
            _log.warning("LifeboatCache: a stored prompt cache is not understood: %s", exc)
            return None

    def _find(
        self, space: Space, tokens: npt.NDArray[np.int64], digests: Sequence[bytes]
    ) -> _Found | None:
        layers = self.layers(space)
        if layers is None:
            return None
        keys: list[bytes] = []
        if layers:
            keys = space.block_keys(layers, digests[1:])
            there = self._store.lookup(keys) == Lookup.HIT
            run = int(there.argmin()) if not there.all() else len(keys)
            keys = keys[:run]
        if space.complete:
            return _Found(space, layers, len(keys) * self._block, keys, None) if keys else None
        reach = len(keys) if layers else len(digests) - 1
        for number in range(reach, -1, -1):
            begin = number * self._block
            tail = tokens[begin : begin + self._block]
            # A whole block behind the last one that is there would be a block itself.
            last = min(tail.shape[0], self._block - 1)
            first = 0 if number else 1
            if last < first:
                continue
            lengths = list(chain.lengths_within(digests[number], tail, first, last))
            states = space.state_keys(layers, lengths)
            sizes = self._store.sizes(states)
            hits = np.flatnonzero(sizes >= 0)
            if hits.shape[0]:
                at = int(hits[-1])
                return _Found(space, layers, begin + first + at, keys[:number], states[at])
        return None

    # Loading ----------------------------------------------------------------

    def _load(self, found: _Found, fresh: Sequence[Any]) -> Restored | None:
        tokens, block = found.tokens, self._block
        flat = blank_arrays(
            [
                ((1, plane.heads, kinds.room(layer, tokens), plane.dim), plane.dtype)
                for layer in found.layers
                for plane in layer.planes
            ]
        )
        left = iter(flat)
        planes = [[next(left) for _ in layer.planes] for layer in found.layers]
        if found.blocks:
            good = self._load_blocks(found, flat)
            if good < len(found.blocks):
                if found.state is not None or not good:
                    return None
                shorter = _Found(found.space, found.layers, good * block, found.blocks[:good], None)
                return self._load(shorter, fresh)
        cache = list(fresh)
        if found.state is not None:
            data = self._read(found.state, None)
            if data is None:
                return None
            try:
                rest, tails = read_state(data)
                for number, name, state in rest:
                    cls = type(fresh[number])
                    cls = cls if cls.__name__ == name else kinds.find_class(name)
                    cache[number] = cls.from_state(state)
                begin = len(found.blocks) * block
                for array, tail in zip(flat, tails, strict=True):
                    array[:, :, begin:tokens, :] = tail
            except (ValueError, TypeError, KeyError, IndexError) as exc:
                _log.warning("LifeboatCache: a stored prompt cache is not understood: %s", exc)
                return None
        for layer, arrays in zip(found.layers, planes, strict=True):
            cache[layer.number] = kinds.rebuild(layer, arrays, tokens)
        mx.eval([one.state for one in cache])
        return Restored(cache, tokens)

    def _load_blocks(self, found: _Found, arrays: Sequence[mx.array]) -> int:
        """How many of the first blocks are in the arrays now."""
        layout = self._store.describe(block_layout(found.layers, self._block))
        numbers = np.arange(len(found.blocks), dtype=np.int64)
        buffers = block_buffers(arrays, numbers, self._block, writable=True)
        job = self._store.load(BlockBatch(found.blocks, buffers, layout=layout), _ignore)
        if not job.wait(self._patience_s):
            _log.warning(
                "LifeboatCache: storage has not answered within %.0f s: the prompt is computed",
                self._patience_s,
            )
            return 0
        good = job.outcomes == Outcome.OK
        return int(good.argmin()) if not good.all() else len(found.blocks)

    def _read(self, key: bytes, most: int | None) -> npt.NDArray[np.uint8] | None:
        """One record whose length is not known before."""
        size = int(self._store.sizes([key])[0])
        if size < 0 or (most is not None and size > most):
            return None
        data = np.empty(size, dtype=np.uint8)
        job = self._store.load(BlockBatch([key], BlockBuffers.from_buffers([data])), _ignore)
        if not job.wait(self._patience_s) or job.outcomes[0] != Outcome.OK:
            return None
        return data


def _ignore(job: Any) -> None:
    """The job is waited for."""
