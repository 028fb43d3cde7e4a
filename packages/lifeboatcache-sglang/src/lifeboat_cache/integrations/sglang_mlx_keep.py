"""Storing what finished requests have left in SGLang's MLX pool.

The bytes are copied out of the pool on SGLang's thread, while the request still owns its
slots: nobody reads a slot later, when it may hold something else. The copies are written
in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from lifeboat_cache.integrations.sglang_mlx_chunks import (
    CHUNK_TOKENS,
    PoolShape,
    buffers_of,
    prefix_digests,
)
from lifeboat_cache.interface import BlockBatch, Job, Outcome, Store, salt_tag, tag

__all__ = ["Keeper"]

_log = logging.getLogger("lifeboat_cache")

#: Bytes that are copied out at once.
_PIECE_BYTES = 256 << 20


class Keeper:
    """Stores chunks of finished requests.

    Parameters
    ----------
    store
        Where.
    pool
        SGLang's ``MlxAttentionKVPool``.
    shape
        Of the pool.
    """

    def __init__(self, store: Store, pool: Any, shape: PoolShape) -> None:
        self._store = store
        self._pool = pool
        self._shape = shape
        self._layout = store.describe(shape.layout())

    def keep(
        self,
        tokens: npt.NDArray[np.int64],
        slots: Sequence[int],
        extra_key: str | None,
        cache_salt: str | None,
    ) -> int:
        """Store the whole chunks of a request that are not stored yet; how many they are.

        Waits for MLX, which copies them, and not for storage.

        Parameters
        ----------
        tokens
            What the slots hold.
        slots
            One for each token, owned by the request until this returns.
        extra_key, cache_salt
            Of the request.
        """
        digests = prefix_digests(tokens, extra_key, cache_salt)
        keys = self._shape.keys(digests[1:])
        if not keys:
            return 0
        missing = np.flatnonzero(self._store.sizes(keys) < 0)
        missing = missing[: self._room()]
        families = [tag(digest) for digest in digests]
        at_once = max(1, _PIECE_BYTES // self._shape.chunk_bytes)
        index = np.asarray(slots, dtype=np.int64)
        for first in range(0, missing.shape[0], at_once):
            chunks = missing[first : first + at_once]
            rows = (chunks[:, None] * CHUNK_TOKENS + np.arange(CHUNK_TOKENS)).reshape(-1)
            k, v = self._pool.get_kv_all_layers(mx.array(index[rows].astype(np.int32)))
            # At once: what waits to be computed keeps MLX from updating the pool in place.
            mx.eval(k, v)
            numbers = chunks.tolist()
            batch = BlockBatch(
                [keys[number] for number in numbers],
                buffers_of(self._shape, k, v, writable=False),
                layout=self._layout,
                positions=((chunks + 1) * CHUNK_TOKENS).tolist(),
                families=[families[number + 1] for number in numbers],
                parents=[families[number] if number else 0 for number in numbers],
                salt=salt_tag(cache_salt),
            )
            self._store.store(batch, _done)
        self._store.touch(keys)
        return int(missing.shape[0])

    def _room(self) -> int:
        """How many chunks may wait to be written: others would be copied for nothing."""
        queue = self._store.queue()
        return max(0, queue["limit_bytes"] - queue["pending_bytes"]) // self._shape.chunk_bytes


def _done(job: Job) -> None:
    bad = {Outcome(int(o)).name for o in job.outcomes if not Outcome(int(o)).good}
    if bad:
        _log.debug("LifeboatCache: not kept: %s", ", ".join(sorted(bad)))
