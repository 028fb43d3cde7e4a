"""Jobs: batches under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.outcome import Outcome

__all__ = ["MIXED", "Job"]

#: Stands for several codecs.
MIXED = "mixed"

_GOOD = frozenset({int(Outcome.OK), int(Outcome.PRESENT)})


class Job:
    """A batch under way in a block store.

    Attributes
    ----------
    kind
        ``"store"`` or ``"load"``.
    outcomes
        uint8 ``(n,)`` of :class:`Outcome`, final once :meth:`done` is true.
    bytes_moved
        Payload bytes written or read and verified so far.
    seconds
        Time from submission to completion, 0.0 before.
    codec
        Name of the codec in which the blocks are stored, ``mixed`` if there are several; empty
        as long as none is known.
    coded
        By number of a codec: blocks, payload bytes, and bytes of them on storage, so far.
    """

    __slots__ = (
        "_batch",
        "_event",
        "_lock",
        "_on_done",
        "_parts",
        "bytes_moved",
        "codec",
        "coded",
        "kind",
        "outcomes",
        "seconds",
        "submitted",
    )

    def __init__(
        self,
        kind: Literal["store", "load"],
        batch: BlockBatch,
        on_done: Callable[[Job], None] | None = None,
    ) -> None:
        self.kind = kind
        self._batch: BlockBatch | None = batch
        self.outcomes: npt.NDArray[np.uint8] = np.zeros(len(batch), dtype=np.uint8)
        self.bytes_moved = 0
        self.codec = ""
        self.submitted = time.monotonic()
        self.seconds = 0.0
        self.coded: dict[int, tuple[int, int, int]] = {}
        self._parts = 1
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._on_done = on_done

    @property
    def batch(self) -> BlockBatch:
        """The job's blocks; released when the job is done."""
        if self._batch is None:
            raise RuntimeError("the job is done and has let go of the caller's memory")
        return self._batch

    def done(self) -> bool:
        """Whether every key has its final outcome and no I/O touches the memory."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (``None``: for ever) until done."""
        return self._event.wait(timeout)

    @property
    def ok(self) -> bool:
        """Whether the job is done and every block is where it should be."""
        return self.done() and set(self.outcomes.tobytes()) <= _GOOD

    def add_parts(self, parts: int) -> None:
        """Announce more parts, each of which reports with :meth:`finish_part`.

        A job begins with one: whoever cuts it into parts.
        """
        with self._lock:
            self._parts += parts

    def in_codec(self, name: str) -> None:
        """Say in which codec some of the blocks are stored; empty says nothing."""
        if name and name != self.codec:
            self.codec = MIXED if self.codec else name

    def note_coded(self, codec: int, blocks: int, raw: int, kept: int) -> None:
        """Account for blocks of a part, and for what they take on storage."""
        with self._lock:
            before = self.coded.get(codec, (0, 0, 0))
            self.coded[codec] = (before[0] + blocks, before[1] + raw, before[2] + kept)

    def finish_part(self, moved: int = 0) -> bool:
        """Report one part; true if it was the last one and the job is now done."""
        with self._lock:
            self.bytes_moved += moved
            self._parts -= 1
            if self._parts:
                return False
        self.seconds = time.monotonic() - self.submitted
        self._batch = None
        return True

    @property
    def polled(self) -> bool:
        """Whether the job has no ``on_done`` and is handed out by ``poll``."""
        return self._on_done is None

    def publish(self) -> None:
        """Wake the waiters and call ``on_done`` (once, by the store)."""
        self._event.set()
        if self._on_done is not None:
            self._on_done(self)
