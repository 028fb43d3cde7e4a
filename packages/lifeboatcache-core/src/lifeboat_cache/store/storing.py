"""Stores: what is there is left out, the rest gets room, and is journaled when written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.checksum import preferred_algorithm
from lifeboat_cache.codecs.names import EXACT
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.format.journal import ENTRY, Entries
from lifeboat_cache.index import Index
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.coding import Codings
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.store.load_plan import same_shape
from lifeboat_cache.store.notices import Notices
from lifeboat_cache.store.records import MOST_BYTES, Record, tombstones, void
from lifeboat_cache.store.storage import Storage
from lifeboat_cache.store.store_plan import StorePlan, Written

__all__ = ["Storing"]

#: To ask an enumeration for a member takes as long as to count the outcomes of a task.
_OK = int(Outcome.OK)


class Storing:
    """Plans the stores of a store, and journals what has been written.

    Parameters
    ----------
    storage, index, codings, policy, notices
        Those of the store.
    pins
        How many times blocks are pinned, by their keys; under the lock of ``storage``.
    integrity_key
        Checksums are keyed with it.
    page_cache
        Whether what is stored stays in the page cache.
    """

    def __init__(
        self,
        storage: Storage,
        index: Index,
        codings: Codings,
        policy: CodecPolicy,
        notices: Notices,
        pins: Mapping[bytes, int],
        *,
        integrity_key: bytes | None,
        page_cache: bool,
    ) -> None:
        self._storage = storage
        self._index = index
        self._codings = codings
        self._policy = policy
        self._notices = notices
        self._pins = pins
        self._integrity_key = integrity_key
        self._page_cache = page_cache

    def plan(
        self, batch: BlockBatch, outcomes: npt.NDArray[np.uint8], part_bytes: int
    ) -> Iterator[list[IoTask]]:
        """Leave out what is there, give the rest room and cut it into tasks."""
        keys = self._index.as_keys(batch.keys)
        found = self._index.gather(keys)
        sizes = batch.buffers.sizes()
        same = found.found & same_shape(found, sizes, batch.tags(), self._codings)
        outcomes[same] = Outcome.PRESENT
        large = sizes > MOST_BYTES
        if large.any():
            outcomes[large] = Outcome.FAILED
            self._notices.large(int(sizes.max()))
        # Nobody who uses this layout could ever load what is there: replace it.
        doomed: list[Record] = []
        for number in np.flatnonzero(found.found & ~same & ~large).tolist():
            key = batch.keys[number]
            with self._storage.lock:
                if self._pins.get(key, 0):
                    outcomes[number] = Outcome.MISMATCH
                else:
                    doomed += self._index.take(key)
        if doomed:
            self._storage.bury(tombstones(doomed))
        wanted = np.flatnonzero(outcomes == Outcome.PENDING)
        if not wanted.shape[0]:
            return
        writer = self._storage.start_writer()
        if writer is None:
            outcomes[wanted] = Outcome.FAILED
            return
        if self._storage.binding is None:
            raise RuntimeError("a store was planned before the namespace was known")
        plan = StorePlan(
            batch,
            keys,
            writer,
            self._storage.binding,
            preferred_algorithm(self._integrity_key),
            self._codings,
            part_bytes,
            cached=self._page_cache,
        )
        for blocks, answers, tasks in plan.tasks(wanted, self._choose(batch, wanted)):
            outcomes[blocks] = answers
            yield tasks

    def _choose(self, batch: BlockBatch, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """The codec of each of some blocks of a batch."""
        codecs = np.zeros(blocks.shape[0], dtype=np.uint16)
        tags, sizes = batch.tags()[blocks], batch.buffers.sizes()[blocks]
        for tag in set(tags.tolist()):
            layout = self._codings.layout(tag)
            if layout is None:
                continue
            mine = (tags == np.uint64(tag)) & (sizes == layout.nbytes)
            codecs[mine] = self._policy.choose(layout).codec
        if batch.codecs is not None:
            # What is lost is lost: it takes no more room than where it has been.
            been = np.asarray(batch.codecs, dtype=np.uint16)[blocks]
            known = np.isin(tags, [tag for tag in set(tags.tolist()) if self._codings.layout(tag)])
            lossy = known & ~np.isin(been, list(EXACT))
            codecs[lossy] = np.maximum(codecs, been)[lossy]
        return codecs

    def finish(self, tasks: list[IoTask]) -> None:
        """Journal what has been written, of all tasks of a writer together."""
        written: dict[int, list[IoTask]] = {}
        for task in tasks:
            detail: Written = task.detail
            end = task.outcomes.tobytes().rfind(_OK) + 1
            if end < task.outcomes.shape[0]:
                detail.writer.give_back(detail.entries[end:], detail.file)
            if end:
                detail.entries["payload_checksum"] = void(task.checksums)
                written.setdefault(id(detail.writer), []).append(task)
        for mine in written.values():
            writer = mine[0].detail.writer
            kept = [
                task.detail.entries[slice(None) if task.whole else task.outcomes == _OK]
                for task in mine
            ]
            # Not by numpy: to find their common dtype takes it longer than all else here.
            entries: Entries = np.frombuffer(bytearray().join(kept), dtype=ENTRY)
            outcome = writer.commit(entries, [task.detail.file for task in mine])
            if outcome == _OK:
                self._index.insert(writer.writer, entries)
            else:
                for task in mine:
                    task.outcomes[task.outcomes == _OK] = outcome
