"""From blocks to writes: which records a store adds, and in which parts they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.checksum import Binding
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.io_task import IoTask, gather_pieces, slices
from lifeboat_cache.store.load_plan import chunk_bytes, runs_of, ways
from lifeboat_cache.store.records import record_entries
from lifeboat_cache.targets.base import OpenFile, TargetWriter
from lifeboat_cache.targets.direct import ALIGNMENT

__all__ = ["Written", "plan_store"]


@dataclass(frozen=True)
class Written:
    """What a store task becomes when it is done: entries of one writer's journal."""

    writer: TargetWriter
    file: OpenFile
    entries: Entries


def plan_store(
    batch: BlockBatch,
    keys: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.int64],
    writer: TargetWriter,
    binding: Binding,
    algorithm: int,
    part_bytes: int,
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], list[IoTask]]]:
    """Give blocks of a batch room and plan how they get there, some at a time.

    Yields
    ------
    blocks
        Which blocks.
    outcomes
        uint8, one per block: ``PENDING``, or why a block got no room.
    tasks
        Writes; ``task.detail`` is :class:`Written`.
    """
    for first, last in slices(batch.buffers.sizes()[blocks]):
        some = blocks[first:last]
        yield some, *_writes(batch, keys, some, writer, binding, algorithm, part_bytes)


def _writes(
    batch: BlockBatch,
    keys: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.int64],
    writer: TargetWriter,
    binding: Binding,
    algorithm: int,
    part_bytes: int,
) -> tuple[npt.NDArray[np.uint8], list[IoTask]]:
    entries = record_entries(batch, keys, blocks, algorithm)
    outcomes = np.full(blocks.shape[0], Outcome.PENDING, dtype=np.uint8)
    bindings = binding.pack_batch(
        keys[blocks],
        entries["layout"],
        entries["raw_length"],
        entries["stored_length"],
        entries["codec"],
        algorithm,
    )
    iov, starts = gather_pieces(batch.buffers, blocks)
    lengths = entries["stored_length"].astype(np.int64)
    aligned = batch.buffers.aligned(ALIGNMENT)
    tasks = []
    for room in writer.reserve(entries, part_bytes):
        part = slice(room.first, room.last)
        if room.file is None:
            outcomes[part] = room.refusal
            continue
        (descriptor,), (mode,) = ways([room.file], aligned)
        offsets = entries["offset"][part].astype(np.int64)
        count = room.last - room.first
        ends = offsets + lengths[part]
        breaks = np.ones(count, dtype=bool)
        breaks[1:] = (offsets[1:] != ends[:-1]) & (mode != layout.BOUNCE)
        tasks.append(
            IoTask(
                kind="store",
                blocks=blocks[part],
                runs=runs_of(np.full(count, descriptor), np.full(count, mode), breaks),
                offsets=offsets,
                lengths=lengths[part],
                iov=iov[int(starts[room.first]) : int(starts[room.last])],
                starts=starts[room.first : room.last + 1] - starts[room.first],
                bindings=bindings[part],
                checksums=np.zeros((count, 16), dtype=np.uint8),
                algorithms=np.full(count, algorithm, dtype=np.uint8),
                chunk_bytes=chunk_bytes(room.file),
                outcomes=np.full(count, Outcome.PENDING, dtype=np.uint8),
                holds=(batch.buffers.owner,),
                detail=Written(writer, room.file, entries[part]),
            )
        )
    return outcomes, tasks
