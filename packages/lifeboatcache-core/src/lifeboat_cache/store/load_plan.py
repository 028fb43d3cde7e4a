"""From keys to reads: where the blocks of a load lie, and in which parts they are read."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch
from lifeboat_cache.checksum import Binding
from lifeboat_cache.codecs.names import RAW
from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.index import Index
from lifeboat_cache.index_answers import Gathered
from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.kernels.syscalls import PREADV2
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.coding import Codings
from lifeboat_cache.store.io_task import IoTask, Together, cut, gather_pieces, slices
from lifeboat_cache.targets.base import OpenFile, TargetReader
from lifeboat_cache.targets.direct import ALIGNMENT

__all__ = ["LoadPlan", "Places", "chunk_bytes", "same_shape", "ways"]

#: What a vanished file looks like. ESTALE: deleted by another NFS client.
_GONE = frozenset({errno.ENOENT, errno.ESTALE})

#: What this process lacks for a moment; it says nothing about the file.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE})

#: In place of a file's number: there is none any more, or none just now.
_UNUSABLE, _LATER = -1, -2


#: A task reads so many bytes, if there are as many.
_LEAST_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Places:
    """Which records a load task reads, one row per block of the task."""

    keys: npt.NDArray[np.uint8]
    writers: npt.NDArray[Any]
    segments: npt.NDArray[Any]
    slots: npt.NDArray[Any]

    def __getitem__(self, rows: Any) -> Places:
        return Places(self.keys[rows], self.writers[rows], self.segments[rows], self.slots[rows])

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Writer, segment and slot of each."""
        return zip(self.writers.tolist(), self.segments.tolist(), self.slots.tolist(), strict=True)


class LoadPlan:
    """What becomes of each block of a load.

    Parameters
    ----------
    batch, keys
        What is to be loaded; the keys as uint8 ``(n, 32)``.
    index, reader, binding
        Where it may be.
    opened
        Files that the job has opened before, by writer and segment; more are added.
    codings
        The layouts that are known.
    cached
        Whether what is read may be in the page cache: then it is taken from there.

    Attributes
    ----------
    outcomes
        uint8 ``(n,)``: final for what is not read, ``PENDING`` for the rest.
    lost
        int64: blocks whose file cannot be used; :attr:`lost_places` says which they are.
    """

    def __init__(
        self,
        batch: BlockBatch,
        keys: npt.NDArray[np.uint8],
        index: Index,
        reader: TargetReader,
        binding: Binding,
        opened: dict[tuple[bytes, int], OpenFile],
        codings: Codings,
        *,
        cached: bool = False,
    ) -> None:
        self._batch, self._keys, self._binding = batch, keys, binding
        self._cached = cached
        self._codings = codings
        self._found = found = index.gather(keys)
        sizes = batch.buffers.sizes()
        fits = found.found & same_shape(found, sizes, batch.tags(), codings)
        self.outcomes = np.full(len(batch), Outcome.PENDING, dtype=np.uint8)
        self.outcomes[~found.found] = Outcome.MISSING
        self.outcomes[found.found & ~fits] = Outcome.MISMATCH
        wanted = np.flatnonzero(fits)
        order = np.lexsort((found.offset[wanted], found.segment[wanted], found.writer[wanted]))
        wanted = wanted[order]
        self._files, which = _open_files(found, wanted, index, reader, self.outcomes, opened)
        usable = which >= 0
        self.lost = wanted[which == _UNUSABLE]
        self.lost_places = _places(keys, found, self.lost)
        self._wanted, self._which = wanted[usable], which[usable]

    def tasks(self, part_bytes: int) -> Iterator[list[IoTask]]:
        """Reads, some at a time; ``task.detail`` holds the :class:`Places` of its blocks.

        ``part_bytes``: of the caller's memory that a task fills, about.
        """
        lengths = self._found.stored_length[self._wanted].astype(np.int64)
        size = int(self._found.raw_length[self._wanted].sum(dtype=np.int64))
        # What a codec has made small is cut finer, or some threads would have nothing to do.
        share = int(lengths.sum()) / size if size else 1.0
        part_bytes = min(part_bytes, max(int(part_bytes * share), _LEAST_READ_BYTES))
        for first, last in slices(lengths):
            wanted, which = self._wanted[first:last], self._which[first:last]
            algorithms, codecs = self._found.algorithm[wanted], self._found.codec[wanted]
            # Only what goes through coders has to be of one layout.
            tags = np.where(codecs == RAW, np.uint64(0), self._found.layout[wanted])
            tasks: list[IoTask] = []
            kinds = set(zip(algorithms.tolist(), codecs.tolist(), tags.tolist(), strict=True))
            for algorithm, codec, tag in sorted(kinds):
                mine = (algorithms == algorithm) & (codecs == codec) & (tags == np.uint64(tag))
                tasks += _reads(
                    self._batch,
                    self._keys,
                    self._found,
                    wanted[mine],
                    self._files,
                    which[mine],
                    self._binding,
                    algorithm,
                    codec,
                    tag,
                    self._codings,
                    part_bytes,
                    cached=self._cached,
                )
            yield tasks


def same_shape(
    found: Gathered,
    sizes: npt.NDArray[np.int64],
    tags: npt.NDArray[np.uint64],
    codings: Codings,
) -> npt.NDArray[np.bool_]:
    """Which records can be loaded into blocks of these sizes and this layout."""
    same: npt.NDArray[np.bool_] = (
        (found.raw_length == sizes)
        & ((found.stored_length == sizes) | (found.codec != RAW))
        & (found.layout == tags)
        & codings.known(found.codec, tags, sizes)
    )
    return same


def _places(keys: npt.NDArray[np.uint8], found: Gathered, rows: npt.NDArray[np.int64]) -> Places:
    return Places(keys[rows], found.writer[rows], found.segment[rows], found.slot[rows])


def _open_files(
    found: Gathered,
    wanted: npt.NDArray[np.int64],
    index: Index,
    reader: TargetReader,
    outcomes: npt.NDArray[np.uint8],
    opened: dict[tuple[bytes, int], OpenFile],
) -> tuple[list[OpenFile], npt.NDArray[np.int64]]:
    """Open files, and for each wanted block its file's number, ``_UNUSABLE`` or ``_LATER``."""
    files: list[OpenFile] = []
    which = np.full(wanted.shape[0], _UNUSABLE, dtype=np.int64)
    if not wanted.shape[0]:
        return files, which
    writers, segments = found.writer[wanted], found.segment[wanted]
    changes = (writers[1:] != writers[:-1]) | (segments[1:] != segments[:-1])
    starts = np.flatnonzero(np.concatenate(([True], changes))).tolist()
    for first, last in zip(starts, [*starts[1:], wanted.shape[0]], strict=True):
        place = index.writer_id(int(writers[first])), int(segments[first])
        try:
            # Each look at a file lets go of the interpreter.
            file = opened[place] if place in opened else reader.open_segment(*place)
        except NewerFormatError:  # not ours to judge
            outcomes[wanted[first:last]] = Outcome.MISSING
        except FormatError:
            outcomes[wanted[first:last]] = Outcome.CORRUPT
        except OSError as exc:
            gone = exc.errno in _GONE
            outcomes[wanted[first:last]] = Outcome.MISSING if gone else Outcome.FAILED
            if exc.errno in _SHORTAGES:
                which[first:last] = _LATER
        else:
            opened[place] = file
            which[first:last] = len(files)
            files.append(file)
    return files, which


def _reads(
    batch: BlockBatch,
    keys: npt.NDArray[np.uint8],
    found: Gathered,
    blocks: npt.NDArray[np.int64],
    files: list[OpenFile],
    which: npt.NDArray[np.int64],
    binding: Binding,
    algorithm: int,
    codec: int,
    tag: int,
    codings: Codings,
    part_bytes: int,
    *,
    cached: bool,
) -> list[IoTask]:
    """Tasks that read blocks in the order of their places."""
    iov, starts = gather_pieces(batch.buffers, blocks)
    coding = codings.coding(tag, codec, iov, starts)
    aligned = coding is None and batch.buffers.aligned(ALIGNMENT)
    descriptors, mode = ways(files, aligned)
    warm = np.full(len(files), -1, dtype=np.int64)
    if cached and PREADV2:
        warm[:] = [file.fd if file.direct_fd >= 0 else -1 for file in files]
    descriptors, mode, warm = descriptors[which], mode[which], warm[which]
    if coding is not None:  # as they are stored, blocks never go straight to the caller
        mode = np.full_like(mode, layout.BOUNCE)
    offsets = found.offset[blocks].astype(np.int64)
    lengths = found.stored_length[blocks].astype(np.int64)
    bindings = binding.pack_batch(
        keys[blocks],
        found.layout[blocks],
        found.raw_length[blocks],
        found.stored_length[blocks],
        found.codec[blocks],
        algorithm,
    )
    checksums = np.ascontiguousarray(found.payload_checksum[blocks])
    places = _places(keys, found, blocks)
    ends = offsets + lengths
    ends = np.where(mode == layout.BOUNCE, -(-ends // ALIGNMENT) * ALIGNMENT, ends)
    breaks = np.ones(blocks.shape[0], dtype=bool)
    breaks[1:] = (
        (descriptors[1:] != descriptors[:-1]) | (mode[1:] != mode[:-1]) | (offsets[1:] != ends[:-1])
    )
    bounds = cut(lengths, part_bytes)
    together = Together(
        kind="load",
        blocks=blocks,
        offsets=offsets,
        lengths=lengths,
        iov=iov,
        starts=starts,
        bindings=bindings,
        checksums=checksums,
        algorithm=algorithm,
        codec=codec,
        coding=coding,
    )
    chunks = [chunk_bytes(files[which[first]]) for first, _ in bounds]
    tasks = together.tasks(bounds, chunks, descriptors, mode, breaks, warm)
    for task, (first, last) in zip(tasks, bounds, strict=True):
        read = files
        if len(files) > 1:
            read = [files[number] for number in set(which[first:last].tolist())]
        task.holds = (read, batch.buffers.owner)
        task.detail = places[first:last]
    return tasks


def ways(
    files: Sequence[OpenFile], aligned: bool, *, cached: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Descriptor and mode to use for each file, given how the caller's memory lies.

    With ``cached`` everything goes through the page cache.
    """
    direct = np.array([file.direct_fd >= 0 and not cached for file in files], dtype=bool)
    descriptors = np.array(
        [
            file.direct_fd if straight else file.fd
            for file, straight in zip(files, direct.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    modes = np.where(direct & (not aligned), layout.BOUNCE, layout.SCATTER)
    return descriptors, modes


def chunk_bytes(file: OpenFile, *, cached: bool = False) -> int:
    """How much one system call on a file moves, about."""
    direct = file.direct_fd >= 0 and not cached
    return layout.DIRECT_CHUNK_BYTES if direct else layout.CACHED_CHUNK_BYTES
