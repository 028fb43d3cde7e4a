"""From blocks to writes: which records a store adds, and in which parts they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.checksum import Binding
from lifeboat_cache.codecs.names import RAW
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.coding import PAGE, Coding, Codings, whole_pages
from lifeboat_cache.store.io_task import IoTask, Together, cut, gather_pieces, slices
from lifeboat_cache.store.load_plan import chunk_bytes, ways
from lifeboat_cache.store.records import record_entries
from lifeboat_cache.store.staging import Staging
from lifeboat_cache.targets.base import OpenFile, TargetWriter
from lifeboat_cache.targets.direct import ALIGNMENT

__all__ = ["StorePlan", "Unsized", "Written"]


@dataclass(frozen=True)
class Written:
    """What a store task becomes when it is done: entries of one writer's journal."""

    writer: TargetWriter
    file: OpenFile
    entries: Entries
    #: The memory that its blocks lie in, if they were stored in memory before.
    staging: Staging | None = None


@dataclass(frozen=True)
class Unsized:
    """What an encode task becomes when it is done: blocks of known length, to be written."""

    plan: StorePlan
    codec: int
    #: Which blocks of the plan's batch they are.
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StorePlan:
    """How blocks of a batch get to storage.

    Attributes
    ----------
    batch, keys
        The blocks; the keys as uint8 ``(n, 32)``.
    writer, binding, algorithm
        Whose records they become, and how they are guarded.
    codings
        The layouts that are known.
    part_bytes
        Bytes of a task, about.
    cached
        Whether what is written stays in the page cache.
    """

    batch: BlockBatch
    keys: npt.NDArray[np.uint8]
    writer: TargetWriter
    binding: Binding
    algorithm: int
    codings: Codings
    part_bytes: int
    cached: bool = False

    def tasks(
        self, blocks: npt.NDArray[np.int64], codecs: npt.NDArray[np.uint16]
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], list[IoTask]]]:
        """Give blocks room and plan how they get there, some at a time.

        Parameters
        ----------
        blocks
            int64 ``(n,)``: which blocks.
        codecs
            uint16 ``(n,)``: in which codec each is stored.

        Yields
        ------
        blocks
            Some of them.
        outcomes
            uint8, one per block: ``PENDING``, or why a block got no room.
        tasks
            Writes, of which ``task.detail`` is :class:`Written`; or encode tasks, of which it
            is :class:`Unsized`: :meth:`sized` plans their writes when they are done.
        """
        # Only what goes through coders has to be of one layout.
        tags = np.where(codecs == RAW, np.uint64(0), self.batch.tags()[blocks])
        for codec, tag in sorted(set(zip(codecs.tolist(), tags.tolist(), strict=True))):
            mine = blocks[(codecs == codec) & (tags == np.uint64(tag))]
            for first, last in slices(self.batch.buffers.sizes()[mine]):
                some = mine[first:last]
                yield some, *self._some(some, codec, tag)

    def _some(
        self, blocks: npt.NDArray[np.int64], codec: int, tag: int
    ) -> tuple[npt.NDArray[np.uint8], list[IoTask]]:
        iov, starts = gather_pieces(self.batch.buffers, blocks)
        coding = self.codings.coding(tag, codec, iov, starts)
        if coding is None:
            return self._writes(blocks, RAW, self.batch.buffers.sizes()[blocks], iov, starts)
        size = coding.coded.fixed_bytes
        if size is None:
            pending = np.full(blocks.shape[0], Outcome.PENDING, dtype=np.uint8)
            return pending, self._encodings(blocks, coding, iov, starts)
        stored = np.full(blocks.shape[0], size, dtype=np.int64)
        return self._writes(blocks, codec, stored, iov, starts, coding)

    def _encodings(
        self,
        blocks: npt.NDArray[np.int64],
        coding: Coding,
        iov: npt.NDArray[np.uint64],
        starts: npt.NDArray[np.int64],
    ) -> list[IoTask]:
        room = -(-coding.coded.most_bytes // PAGE) * PAGE
        tasks = []
        for first, last in cut(np.full(blocks.shape[0], room, dtype=np.int64), self.part_bytes):
            count = last - first
            tasks.append(
                IoTask(
                    kind="encode",
                    blocks=blocks[first:last],
                    runs=np.array([[-1, layout.BOUNCE, 0, count, -1]], dtype=np.int64),
                    offsets=np.zeros(count, dtype=np.int64),
                    lengths=np.zeros(count, dtype=np.int64),
                    iov=iov[int(starts[first]) : int(starts[last])],
                    starts=starts[first : last + 1] - starts[first],
                    bindings=np.zeros((0, 96), dtype=np.uint8),
                    checksums=np.zeros((0, 16), dtype=np.uint8),
                    algorithms=np.zeros(0, dtype=np.uint8),
                    chunk_bytes=0,
                    outcomes=np.full(count, Outcome.PENDING, dtype=np.uint8),
                    holds=(self.batch.buffers.owner,),
                    coding=coding,
                    places=np.arange(count + 1, dtype=np.int64) * room,
                    detail=Unsized(self, coding.coded.codec, blocks[first:last].copy()),
                )
            )
        return tasks

    def sized(
        self, task: IoTask, staging: Staging
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], list[IoTask]]:
        """Plan the writes of what an encode task has stored in ``staging``; see :meth:`tasks`."""
        done = np.flatnonzero(task.outcomes == Outcome.OK)
        if task.places is None:
            raise ValueError("not an encode task")
        stored = task.lengths[done]
        iov = np.empty((done.shape[0], 2), dtype=np.uint64)
        iov[:, 0] = task.places[done] + staging.memory.ctypes.data
        iov[:, 1] = whole_pages(stored)
        starts = np.arange(done.shape[0] + 1, dtype=np.int64)
        detail: Unsized = task.detail
        blocks = detail.blocks[done]
        answers, tasks = self._writes(blocks, detail.codec, stored, iov, starts, staging=staging)
        return blocks, answers, tasks

    def _writes(
        self,
        blocks: npt.NDArray[np.int64],
        codec: int,
        stored: npt.NDArray[np.int64],
        iov: npt.NDArray[np.uint64],
        starts: npt.NDArray[np.int64],
        coding: Coding | None = None,
        staging: Staging | None = None,
    ) -> tuple[npt.NDArray[np.uint8], list[IoTask]]:
        """Writes of blocks whose stored lengths are known; see :meth:`tasks`."""
        writer, algorithm = self.writer, self.algorithm
        entries = record_entries(self.batch, self.keys, blocks, algorithm, codec, stored)
        outcomes = np.full(blocks.shape[0], Outcome.PENDING, dtype=np.uint8)
        bindings = self.binding.pack_batch(
            self.keys[blocks],
            entries["layout"],
            entries["raw_length"],
            entries["stored_length"],
            entries["codec"],
            algorithm,
        )
        aligned = staging is not None or (coding is None and self.batch.buffers.aligned(ALIGNMENT))
        padded = staging is not None or coding is not None
        rooms: list[tuple[int, int, OpenFile]] = []
        descriptors = np.full(blocks.shape[0], -1, dtype=np.int64)
        modes = np.full(blocks.shape[0], layout.BOUNCE, dtype=np.int64)
        for room in writer.reserve(entries, self.part_bytes):
            part = slice(room.first, room.last)
            if room.file is None:
                outcomes[part] = room.refusal
                continue
            if not rooms or room.file is not rooms[-1][2]:
                descriptor, mode = _way(room.file, aligned, cached=self.cached)
            rooms.append((room.first, room.last, room.file))
            descriptors[part] = descriptor
            if coding is None:
                modes[part] = mode
        offsets = entries["offset"].astype(np.int64)
        ends = offsets + (whole_pages(stored) if padded else stored)
        breaks = np.ones(blocks.shape[0], dtype=bool)
        # What goes through a buffer may leave gaps.
        breaks[1:] = (offsets[1:] != ends[:-1]) & (modes[1:] != layout.BOUNCE)
        together = Together(
            kind="store",
            blocks=blocks,
            offsets=offsets,
            lengths=stored,
            iov=iov,
            starts=starts,
            bindings=bindings,
            checksums=np.zeros((blocks.shape[0], 16), dtype=np.uint8),
            algorithm=algorithm,
            codec=codec,
            coding=coding,
        )
        bounds = [(first, last) for first, last, _ in rooms]
        chunks = [chunk_bytes(file, cached=self.cached) for _, _, file in rooms]
        tasks = together.tasks(bounds, chunks, descriptors, modes, breaks)
        for task, (first, last, file) in zip(tasks, rooms, strict=True):
            task.holds = (self.batch.buffers.owner,)
            task.detail = Written(writer, file, entries[first:last], staging)
        return outcomes, tasks


def _way(file: OpenFile, aligned: bool, *, cached: bool) -> tuple[int, int]:
    """Descriptor and mode to use for a file."""
    (descriptor,), (mode,) = ways([file], aligned, cached=cached)
    return int(descriptor), int(mode)
