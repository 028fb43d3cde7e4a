"""A stored prefix on its way back to SGLang's MLX pool.

It is read in parts, into arrays of its own. What has arrived and was found right is handed
out in order; only then is it given slots. Whoever is not interested any more drops the
object: what is still being read then goes to memory that nobody uses.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lifeboat_cache.integrations.sglang_mlx_chunks import (
    CHUNK_TOKENS,
    PoolShape,
    buffers_of,
    new_array,
)
from lifeboat_cache.interface import BlockBatch, Job, Lookup, Outcome, Store

__all__ = ["BUDGET_BYTES", "PATIENCE_S", "Budget", "Part", "Read"]

#: Bytes of a part.
_PART_BYTES = 64 << 20

#: Parts that are read at the same time.
_PARTS = 3

#: Bytes that all reads of a scheduler may have in memory together.
BUDGET_BYTES = 1 << 30

#: How long a read may go on without anything having come, in seconds: then it is given up, and
#: the prompt is computed.
PATIENCE_S = 5.0


class Budget:
    """Bytes that reads may have in memory together.

    Parameters
    ----------
    limit
        How many. One part is always granted where nothing else is in memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def take(self, count: int) -> bool:
        """Ask for memory; whether it is granted."""
        if self._used and self._used + count > self._limit:
            return False
        self._used += count
        return True

    def give(self, count: int) -> None:
        """Give memory back."""
        self._used -= count


@dataclass(frozen=True)
class Part:
    """Some chunks of a prefix.

    Attributes
    ----------
    begin, end
        Tokens of the prefix.
    keys, values
        ``(layers, at least end - begin, heads, dim)`` each.
    """

    begin: int
    end: int
    keys: mx.array
    values: mx.array


class Read:
    """Reads as much of a prefix as is stored.

    Parameters
    ----------
    store
        Where.
    shape
        Of the pool.
    keys
        Of all chunks of the prefix.
    held
        Tokens that SGLang holds already.
    wait_s
        How long the store may take to say what is there, in seconds.
    budget
        Memory is asked for there, and given back with each part that is handed out.
    """

    def __init__(
        self,
        store: Store,
        shape: PoolShape,
        keys: Sequence[bytes],
        held: int,
        wait_s: float,
        budget: Budget,
    ) -> None:
        self._store = store
        self._budget = budget
        self._shape = shape
        self._keys = list(keys)
        self._next = held // CHUNK_TOKENS
        self._last = self._next if self._next < len(self._keys) else 0
        self._flying: deque[tuple[Part, Job]] = deque()
        self._layout = 0
        self._asked_until = time.monotonic() + wait_s
        self._moved = time.monotonic()
        self._asking = self._next < len(self._keys)
        if self._asking:
            self._ask()

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self._asking and not self._flying and self._next >= self._last

    def stop(self) -> None:
        """Read nothing more; what is under way goes to memory that nobody looks at. Idempotent."""
        self._asking = False
        self._next = self._last
        while self._flying:
            self._budget.give(self._bytes(self._flying.popleft()[0]))

    def _bytes(self, part: Part) -> int:
        return (part.end - part.begin) // CHUNK_TOKENS * self._shape.chunk_bytes

    def take(self) -> Part | None:
        """The next part, if it is there. Never waits."""
        if self._asking:
            self._ask()
        now = time.monotonic()
        if not self._flying:
            self._moved = now
            self._launch()  # there may be memory now
            return None
        part, job = self._flying[0]
        if not job.done():
            if now - self._moved > PATIENCE_S:
                self.stop()
            return None
        self._flying.popleft()
        self._budget.give(self._bytes(part))
        self._moved = now
        good = 0
        for outcome in job.outcomes:
            if outcome != Outcome.OK:
                break
            good += 1
        end = part.begin + good * CHUNK_TOKENS
        if end < part.end:
            self.stop()
        else:
            self._launch()
        return Part(part.begin, end, part.keys, part.values) if good else None

    def _ask(self) -> None:
        """Find out how much is there, from memory."""
        hits = self._store.lookup(self._keys[self._next :])
        run = 0
        for hit in hits:
            if hit != Lookup.HIT:
                break
            run += 1
        undecided = run < len(hits) and hits[run] == Lookup.RETRY
        if undecided and time.monotonic() < self._asked_until:
            return
        self._asking = False
        self._last = self._next + run
        self._moved = time.monotonic()
        if run:
            self._layout = self._store.describe(self._shape.layout())
            self._store.touch(self._keys[: self._last])
            for _ in range(_PARTS):
                self._launch()

    def _launch(self) -> None:
        """Begin to read the next part."""
        chunks = min(self._last - self._next, max(1, _PART_BYTES // self._shape.chunk_bytes))
        if chunks < 1 or not self._budget.take(chunks * self._shape.chunk_bytes):
            return
        tokens = chunks * CHUNK_TOKENS
        k, v = new_array(self._shape, tokens), new_array(self._shape, tokens)
        begin = self._next * CHUNK_TOKENS
        batch = BlockBatch(
            self._keys[self._next : self._next + chunks],
            buffers_of(self._shape, k, v, writable=True),
            layout=self._layout,
        )
        self._next += chunks
        job = self._store.load(batch, _ignore)
        self._flying.append((Part(begin, begin + tokens, k, v), job))


def _ignore(job: Any) -> None:
    """The job is looked at when SGLang asks."""
