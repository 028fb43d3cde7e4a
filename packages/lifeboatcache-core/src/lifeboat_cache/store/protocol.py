"""What adapters use of a store, whatever is behind it.

A :class:`~lifeboat_cache.store.block_store.BlockStore` keeps blocks on one target; others
answer for a target in another process, or for several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.counters import CounterSnapshot

__all__ = ["State", "Store", "TargetStatus"]


class State(Enum):
    """Where a store is in its life."""

    #: The namespace or the target is not known yet.
    OPENING = "opening"
    #: Journals are being read; what was found so far is served.
    RECOVERING = "recovering"
    #: Everything that was there is known.
    READY = "ready"
    #: It stands down: nothing is served or stored.
    DISABLED = "disabled"
    CLOSED = "closed"


@dataclass(frozen=True)
class TargetStatus:
    """A target as a store sees it.

    Attributes
    ----------
    name, type, rung, location
        From the configuration, what it is, and where.
    state, reason
        The state of what the store keeps there, and why that is not usable.
    writing
        Whether new blocks go there first.
    blocks
        Blocks known to be there.
    capacity_bytes, reserve_bytes, direct_io
        What whoever looks after the target must know.
    queue
        Numbers ``jobs``, ``pending_bytes`` and ``limit_bytes``, see :meth:`Store.queue`.
    counters
        What went to and came from there.
    facts
        What else is known, for people: JSON values by name.
    """

    name: str
    type: str
    rung: str
    location: str
    state: State
    reason: str = ""
    writing: bool = True
    blocks: int = 0
    capacity_bytes: int | None = None
    reserve_bytes: int = 0
    direct_io: str = "auto"
    queue: Mapping[str, int] = field(default_factory=dict)
    counters: CounterSnapshot = field(default_factory=CounterSnapshot)
    facts: Mapping[str, object] = field(default_factory=dict)


class Store(Protocol):
    """Blocks of one namespace.

    Every method may be called from any thread. No method but :meth:`wait_recovered`,
    :meth:`drain`, :meth:`close` and :meth:`purge` waits for storage.
    """

    # State ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where the store is in its life."""

    @property
    def usable(self) -> bool:
        """Whether jobs given to it now have a chance."""

    @property
    def reason(self) -> str:
        """Why the store stands down, or which targets it has to do without and why."""

    @property
    def namespace(self) -> Namespace | None:
        """The namespace, once known."""

    def __len__(self) -> int:
        """Blocks known to be there."""

    def targets(self) -> list[TargetStatus]:
        """The targets in order; none as long as nothing is known of them."""

    def wait_recovered(self, timeout: float | None = None) -> bool:
        """Wait until journals have been read (or the store stands down)."""

    def counters(self) -> CounterSnapshot:
        """Totals since the store was opened."""

    def queue(self) -> dict[str, int]:
        """Jobs under way, bytes waiting to be written, and the bound of these bytes."""

    def busy(self) -> bool:
        """Whether jobs are under way."""

    def describe(self, layout: KVLayout) -> int:
        """Say what the bytes of blocks are; returns the tag for :attr:`BlockBatch.layout`."""

    # Lookups ----------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], *, pin: bool = False) -> npt.NDArray[np.uint8]:
        """uint8 ``(n,)`` of :class:`Lookup`: which blocks are there; from memory."""

    def sizes(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """int64 ``(n,)``: payload bytes of each block, -1 if it is not there."""

    def layouts(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
        """uint64 ``(n,)``: layout tag of each block, 0 if unknown or not there."""

    def records(self, keys: Sequence[bytes]) -> Entries:
        """``ENTRY`` array ``(n,)``: what is known of each block.

        ``kind`` is 0 for a block that is not there; places and checksums mean nothing.
        """

    def keys(self, *, group: int | None = None) -> list[bytes]:
        """Keys of all blocks known to be there, or of those stored with one group number."""

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo one pin of each key. Never fails."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that a request used these blocks. Tell it *all* blocks of the request."""

    def delete(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Delete blocks; bool ``(n,)``, false for keys that are pinned or not there."""

    def undone_deletions(self) -> list[bytes]:
        """Keys that were deleted, and may be found again by the next who opens the target."""

    # Jobs -------------------------------------------------------------------

    def store(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Store blocks. Their memory must not change until the job is done.

        Parameters
        ----------
        batch
            The blocks.
        on_done
            Called once when the job is done: on an I/O thread, or before this
            returns if the job is refused. It must not wait for the store. Without
            it the job is handed out by :meth:`poll`.

        Raises
        ------
        StoreClosedError
            If the store is closed, or belongs to the process that forked this one.
        """

    def load(self, batch: BlockBatch, on_done: Callable[[Job], None] | None = None) -> Job:
        """Load blocks into the caller's memory; verified before reported.

        The memory of a block that is not ``OK`` holds anything. See :meth:`store`
        for ``on_done`` and errors.
        """

    def poll(self) -> list[Job]:
        """Jobs without ``on_done`` that are done since the last call."""

    # End --------------------------------------------------------------------

    def drain(self, timeout: float | None = None, *, cancel: bool = False) -> bool:
        """Wait until no job is under way and what was deleted is gone from storage.

        Parameters
        ----------
        timeout
            Seconds; ``None`` = as long as it takes.
        cancel
            Parts that have not started yet end as ``CANCELLED``.

        Returns
        -------
        bool
            Whether all jobs are done. If false, I/O may still touch their memory.
        """

    def close(self, timeout: float = 30.0) -> bool:
        """Finish queued jobs and let go of everything. Idempotent.

        Returns
        -------
        bool
            Whether no I/O touches the callers' memory any more.
        """

    def purge(self) -> None:
        """Remove the namespace from storage, once the store is closed.

        For namespaces that nobody can serve any more. Faults are swallowed.
        """
