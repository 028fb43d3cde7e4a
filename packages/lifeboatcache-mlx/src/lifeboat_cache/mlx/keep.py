"""Storing what was computed."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from lifeboat_cache.interface import BlockBatch, BlockBuffers, Job, Outcome, Store, tag
from lifeboat_cache.mlx import chain, kinds
from lifeboat_cache.mlx.blocks import block_buffers, block_layout
from lifeboat_cache.mlx.kinds import Layer, Planes
from lifeboat_cache.mlx.spaces import Quantization, Space
from lifeboat_cache.mlx.state import write_state

__all__ = ["Keeper"]

_log = logging.getLogger("lifeboat_cache")


class Keeper:
    """Stores prompt caches in the background.

    Parameters
    ----------
    store
        Where.
    block
        Tokens of a block.
    """

    def __init__(self, store: Store, block: int) -> None:
        self._store = store
        self._block = block

    def keep(
        self,
        tokens: npt.NDArray[np.int64],
        cache: Sequence[Any],
        quantization: Quantization | None,
    ) -> tuple[Space, tuple[Layer, ...]] | None:
        """Store what of a prompt cache is not stored yet. Does not wait for storage.

        The memory of the arrays is read later; they may be used and updated meanwhile.

        Parameters
        ----------
        tokens
            What the cache holds.
        cache
            One cache of each layer, of one sequence.
        quantization
            In force while the tokens were computed.

        Returns
        -------
        Space and layers that were stored to, or ``None`` if nothing can be stored of it.
        """
        cut: list[Planes] = []
        rest: list[int] = []
        for number, one in enumerate(cache):
            planes = None
            if kinds.can_be_cut(one, int(getattr(one, "offset", 0))):
                planes = kinds.planes_of(number, one)
                if planes is None and type(one).__name__ != "RotatingKVCache":
                    return None  # empty, or of several sequences
            if planes is None:
                rest.append(number)
            else:
                cut.append(planes)
        if rest:
            # A window that is not full yet goes with the states.
            windows = [p for p in cut if p.layer.name == "RotatingKVCache"]
            rest = sorted(rest + [p.layer.number for p in windows])
            cut = [p for p in cut if p.layer.name != "RotatingKVCache"]
            if any(int(getattr(one, "offset", len(tokens))) != len(tokens) for one in cache):
                return None  # which tokens the states are of is not known
        length = min([len(tokens), *(planes.tokens for planes in cut)])
        space = Space(
            tuple(type(one).__name__ for one in cache),
            tuple(planes.layer.number for planes in cut),
            quantization,
        )
        layers = tuple(planes.layer for planes in cut)
        arrays = [array for planes in cut for array in planes.arrays]
        mx.eval(arrays)
        digests = chain.prefix_digests(tokens[:length], self._block)
        keys = space.block_keys(layers, digests[1:]) if layers else []
        self._keep_layers(space, layers)
        self._keep_blocks(keys, digests, layers, arrays)
        if rest:
            self._keep_state(space, layers, tokens, digests[-1], arrays, cache, rest)
        self._store.touch([space.kind_key(), *keys])
        return space, layers

    def _keep_layers(self, space: Space, layers: Sequence[Layer]) -> None:
        data = json.dumps([layer.to_json() for layer in layers], separators=(",", ":")).encode()
        self._submit(BlockBatch([space.kind_key()], BlockBuffers.from_buffers([data])))

    def _keep_blocks(
        self,
        keys: Sequence[bytes],
        digests: Sequence[bytes],
        layers: tuple[Layer, ...],
        arrays: Sequence[mx.array],
    ) -> None:
        missing = np.flatnonzero(self._store.sizes(keys) < 0) if keys else np.empty(0, np.int64)
        if not missing.shape[0]:
            return
        families = [tag(digest) for digest in digests]
        self._submit(
            BlockBatch(
                [keys[number] for number in missing.tolist()],
                block_buffers(arrays, missing, self._block, writable=False),
                layout=self._store.describe(block_layout(layers, self._block)),
                positions=((missing + 1) * self._block).tolist(),
                families=[families[number + 1] for number in missing.tolist()],
                parents=[families[number] if number else 0 for number in missing.tolist()],
            )
        )

    def _keep_state(
        self,
        space: Space,
        layers: Sequence[Layer],
        tokens: npt.NDArray[np.int64],
        digest: bytes,
        arrays: Sequence[mx.array],
        cache: Sequence[Any],
        rest: Sequence[int],
    ) -> None:
        begin = len(tokens) - len(tokens) % self._block
        tail = tokens[begin:]
        (name,) = chain.lengths_within(digest, tail, len(tail), len(tail))
        (key,) = space.state_keys(layers, [name])
        if int(self._store.sizes([key])[0]) >= 0:
            self._store.touch([key])
            return
        try:
            written = write_state(
                (
                    [
                        (number, type(cache[number]).__name__, cache[number].state)
                        for number in rest
                    ],
                    [array[:, :, begin : len(tokens), :] for array in arrays],
                )
            )
        except ValueError as exc:
            _log.warning("LifeboatCache: a prompt cache is not kept: %s", exc)
            return
        self._submit(
            BlockBatch(
                [key],
                BlockBuffers.from_buffers([written.pieces]),
                positions=[len(tokens)],
                families=[tag(name)],
                parents=[tag(digest) if begin else 0],
            ),
            written,
        )

    def _submit(self, batch: BlockBatch, owner: Any = None) -> None:
        def done(job: Job) -> None:
            nonlocal owner
            owner = None  # the memory may go
            bad = {Outcome(int(o)).name for o in job.outcomes if not Outcome(int(o)).good}
            if bad:
                _log.debug("LifeboatCache: not kept: %s", ", ".join(sorted(bad)))

        self._store.store(batch, done)
