"""Giving back the space of dead records."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.janitor.catalogue import Segment
from lifeboat_cache.janitor.rows import Bools, padded
from lifeboat_cache.targets.direct import write_from
from lifeboat_cache.targets.files import close_file, cut_file, open_file
from lifeboat_cache.targets.holes import data_start, punch_hole
from lifeboat_cache.targets.layout import segment_name

__all__ = ["Hole", "dead_runs", "erase", "note_holes", "punch", "remove_segment", "trim"]

#: One call punches at most this much: others who use the file wait for it.
_PUNCH_BYTES = 8 << 20

#: So many bytes are overwritten in one go.
_ZEROS = 1 << 20

#: One call cuts off at most this much.
_CUT_BYTES = 16 << 20


@dataclass(frozen=True)
class Hole:
    """A run of dead records: its place in bytes, and its rows."""

    start: int
    end: int
    rows: npt.NDArray[np.int64]


def dead_runs(segment: Segment, ripe: Bools, least: int) -> list[Hole]:
    """Runs of dead records, with nothing live between them.

    Parameters
    ----------
    segment
        The segment.
    ripe
        bool ``(n,)``: rows whose space nobody reads any more.
    least
        Shorter runs are left out, in bytes.
    """
    rows = segment.rows.array
    if not ripe.any():
        return []
    order = np.argsort(rows["offset"], kind="stable")
    starts = rows["offset"][order].astype(np.int64)
    ends = starts + padded(rows["stored"][order])
    dead = ripe[order]
    # A run ends where a record stays; what no record covers between two dead ones is
    # unused space only if nobody writes there any more, so it ends a run as well.
    breaks = np.ones(order.shape[0], dtype=np.bool_)
    breaks[1:] = (dead[1:] != dead[:-1]) | (starts[1:] != ends[:-1])
    bounds = [*np.flatnonzero(breaks).tolist(), order.shape[0]]
    holes = []
    for first, last in itertools.pairwise(bounds):
        if not dead[first]:
            continue
        start, end = int(starts[first]), int(ends[last - 1])
        if start < HEADER_BYTES or end - start < least:
            continue
        holes.append(Hole(start, end, order[first:last]))
    return holes


def punch(segment: Segment, holes: list[Hole]) -> int | None:
    """Punch runs out of a segment; the bytes. ``None`` if the filesystem has no holes.

    Raises ``OSError``.
    """
    total = 0
    done = segment.rows.array["done"]
    fd = open_file(segment.path, os.O_WRONLY)
    try:
        for hole in holes:
            at = hole.start
            while at < hole.end:
                length = min(_PUNCH_BYTES, hole.end - at)
                if not punch_hole(fd, at, length):
                    return None
                at += length
            done[hole.rows] = True
            total += hole.end - hole.start
    finally:
        close_file(fd)
    return total


def erase(segment: Segment, runs: list[Hole]) -> int:
    """Overwrite runs with zeros, where a filesystem has no holes; the bytes.

    Raises ``OSError``.
    """
    total = 0
    zeros = memoryview(bytes(_ZEROS))
    fd = open_file(segment.path, os.O_WRONLY)
    try:
        for run in runs:
            for at in range(run.start, run.end, _ZEROS):
                write_from(fd, [zeros[: min(_ZEROS, run.end - at)]], at)
            segment.rows.array["done"][run.rows] = True
            total += run.end - run.start
        os.fsync(fd)
    finally:
        close_file(fd)
    return total


def note_holes(segment: Segment) -> None:
    """Note of which dead records an earlier janitor has given the space back."""
    rows = segment.rows.array
    dead = np.flatnonzero((rows["marked"] > 0) & ~rows["done"])
    if not dead.shape[0]:
        return
    try:
        fd = open_file(segment.path)
    except OSError:
        return  # whoever goes on finds out why
    try:
        ends = rows["offset"][dead].astype(np.int64) + padded(rows["stored"][dead])
        for row, end in zip(dead.tolist(), ends.tolist(), strict=True):
            rows["done"][row] = data_start(fd, int(rows["offset"][row])) >= end
    except OSError:
        return
    finally:
        close_file(fd)


def remove_segment(segment: Segment) -> None:
    """Remove a segment of which nothing is live, then its bitmap. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError):
        # A process that still has it open would keep its space otherwise. Step by step:
        # others who use the filesystem wait for each of them.
        for size in range(segment.size - _CUT_BYTES, 0, -_CUT_BYTES):
            cut_file(segment.path, size)
        cut_file(segment.path, 0)
        os.unlink(segment.path)
    # Readers take a segment that has gone for missing; the bitmap served until then.
    with contextlib.suppress(FileNotFoundError):
        name = segment_name(segment.writer.name, segment.number, "dead")
        os.unlink(segment.writer.directory / name)


def trim(segment: Segment) -> int:
    """Cut an ended writer's segment behind its last record; the bytes given back.

    Raises ``OSError``.
    """
    end = max(HEADER_BYTES, segment.rows.end())
    if segment.size < end:
        return 0
    before = os.stat(segment.path).st_blocks * 512
    # To the same length, too: that frees what was preallocated behind the end.
    cut_file(segment.path, end)
    freed = max(0, before - os.stat(segment.path).st_blocks * 512)
    segment.allocated = max(0, segment.allocated - freed)
    return freed
