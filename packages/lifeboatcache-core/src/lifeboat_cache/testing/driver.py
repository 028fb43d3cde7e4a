"""Drives a block store with blocks whose content follows from their key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.store.protocol import Store
from lifeboat_cache.testing.blocks import cut_at, empty_like, payload_of, sample_keys

__all__ = ["StoreDriver"]

#: No test of ours takes so long; a job that does is a hang.
_PATIENCE_S = 120.0


class StoreDriver:
    """Numbered blocks of one store; checks every byte that the store calls good.

    Parameters
    ----------
    store
        The store.
    size
        Bytes of a block.
    cuts
        Where its memory is cut into pieces (see :func:`~lifeboat_cache.testing.cut_at`).
    layout
        Layout tag of the batches.
    space
        Key space of the numbers.

    Attributes
    ----------
    driven
        The store.
    """

    def __init__(
        self,
        store: Store,
        *,
        size: int = 8192,
        cuts: Sequence[int] = (),
        layout: int = 0,
        space: bytes = b"",
    ) -> None:
        self.driven = store
        self.size = size
        self.cuts = cuts
        self.layout = layout
        self.space = space

    @property
    def block_store(self) -> BlockStore:
        """The store, if it is one with a target of its own."""
        if not isinstance(self.driven, BlockStore):
            raise TypeError(f"{type(self.driven).__name__} is not a BlockStore: use `driven`")
        return self.driven

    def keys(self, numbers: Iterable[int]) -> list[bytes]:
        """Keys of numbered blocks."""
        return sample_keys(numbers, space=self.space)

    def store(self, numbers: Iterable[int]) -> list[Outcome]:
        """Store blocks, wait, and return the outcome of each."""
        keys = self.keys(numbers)
        memory = [cut_at(payload_of(key, self.size), self.cuts) for key in keys]
        batch = BlockBatch(keys, BlockBuffers.from_buffers(memory), layout=self.layout)
        job = self.driven.store(batch, on_done=lambda _: None)
        if not job.wait(_PATIENCE_S):
            raise AssertionError("a store job did not end")
        return [Outcome(value) for value in job.outcomes.tolist()]

    def load(self, numbers: Iterable[int]) -> list[Outcome]:
        """Load blocks, wait, check the content of the good ones, return the outcomes."""
        keys = self.keys(numbers)
        expected = [payload_of(key, self.size) for key in keys]
        memory = empty_like([cut_at(payload, self.cuts) for payload in expected])
        batch = BlockBatch(keys, BlockBuffers.from_buffers(memory), layout=self.layout)
        job = self.driven.load(batch, on_done=lambda _: None)
        if not job.wait(_PATIENCE_S):
            raise AssertionError("a load job did not end")
        outcomes = [Outcome(value) for value in job.outcomes.tolist()]
        for outcome, pieces, payload in zip(outcomes, memory, expected, strict=True):
            if outcome is Outcome.OK and b"".join(p.tobytes() for p in pieces) != payload:
                raise AssertionError("a block was reported good and holds wrong bytes")
        return outcomes

    def lookup(self, numbers: Iterable[int]) -> list[Lookup]:
        """Look blocks up."""
        return [Lookup(value) for value in self.driven.lookup(self.keys(numbers)).tolist()]

    def delete(self, numbers: Iterable[int]) -> list[bool]:
        """Delete blocks; which of them were."""
        return [bool(done) for done in self.driven.delete(self.keys(numbers))]
