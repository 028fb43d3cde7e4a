"""Which records lie inside their segments, and which of them are marked dead."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.bitmap import MOST_BYTES, dead_slots
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_DEAD, FileHeader
from lifeboat_cache.format.journal import KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.targets.direct import ALIGNMENT
from lifeboat_cache.targets.files import (
    GONE,
    close_file,
    open_file,
    read_range,
    refresh_attributes,
)
from lifeboat_cache.targets.layout import segment_name
from lifeboat_cache.targets.server_clock import file_time
from lifeboat_cache.targets.traits import traits_of

__all__ = ["SegmentExtents", "stamp_of"]

_Bools = npt.NDArray[np.bool_]

_NO_SLOTS: _Bools = np.zeros(0, dtype=np.bool_)

#: Segments whose extents are kept while a journal is read.
_KNOWN = 256

#: Size of a segment that cannot be looked at: reading shows what there is.
_UNKNOWN_BYTES = 1 << 62

#: A file that was changed less than so many nanoseconds ago may be changed again without
#: another time of change.
_SETTLING_NS = 2_000_000_000


def stamp_of(stat: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file does."""
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class SegmentExtents:
    """Sizes and dead bitmaps of segments.

    Parameters
    ----------
    directory, namespace
        The namespace's directory and its 32-byte digest.
    bitmaps
        Writer (hexadecimal) and number of the segments that have a dead bitmap, kept up
        to date by the owner.
    """

    def __init__(
        self, directory: Path, namespace: bytes, bitmaps: Collection[tuple[str, int]]
    ) -> None:
        self._directory = str(directory)
        self._namespace = namespace
        self._bitmaps = bitmaps
        self._writer = b""
        self._shared = traits_of(directory).shared
        self._whole = False
        self._met: set[int] = set()
        self._known: dict[int, tuple[int, _Bools]] = {}
        self._stamps: dict[tuple[str, int], tuple[int, int, int]] = {}

    def begin(self, writer: bytes, *, whole: bool) -> None:
        """Forget sizes and bitmaps: what follows is one pass over this writer's journal.

        Parameters
        ----------
        writer
            16 bytes.
        whole
            Whether the pass begins with the first entry.
        """
        self._writer = writer
        self._whole = whole
        self._known.clear()
        self._met.clear()

    def placed(self, entries: Entries) -> tuple[Entries, int]:
        """Leave out records that are dead, gone, or not inside their segment.

        Parameters
        ----------
        entries
            Intact ``ENTRY`` array of the writer given to :meth:`begin`.

        Returns
        -------
        kept
            The others, and tombstones.
        misplaced
            How many records that are not dead lie outside their segment, or at an offset
            that none has.
        """
        kinds = entries["kind"]
        records = kinds == KIND_RECORD
        whole = bool(records.all())
        some = entries if whole else entries[records]
        if not some.shape[0]:
            kept: Entries = entries[kinds == KIND_TOMBSTONE]
            return kept, 0
        good, misplaced = self._judged(some)
        count = int(misplaced.sum())
        if whole:
            return (entries, count) if good.all() else (entries[good], count)
        keep = kinds == KIND_TOMBSTONE
        keep[np.flatnonzero(records)[good]] = True
        kept = entries[keep]
        return kept, count

    def first_misplaced(self, entries: Entries) -> int:
        """The place of the first record that lies outside its segment; their number if none does.

        Parameters
        ----------
        entries
            As for :meth:`placed`.
        """
        records = np.flatnonzero(entries["kind"] == KIND_RECORD)
        if not records.shape[0]:
            return int(entries.shape[0])
        _, misplaced = self._judged(entries[records])
        wrong = records[misplaced]
        return int(wrong[0]) if wrong.shape[0] else int(entries.shape[0])

    def _judged(self, some: Entries) -> tuple[_Bools, _Bools]:
        """Which records are alive inside their segments, and which lie outside them."""
        numbers, which = np.unique(some["segment"], return_inverse=True)
        segments = numbers.tolist()
        extents = [self._extent(segment) for segment in segments]
        sizes = np.array([size for size, _ in extents], dtype=np.uint64)
        inside = _inside(some, sizes[which])
        outside = np.unique(which[~inside & (sizes[which] > 0)]).tolist()
        if outside:
            # A living writer's segment may have grown meanwhile.
            for number in outside:
                self._known.pop(segments[number], None)
                extents[number] = self._extent(segments[number])
                sizes[number] = extents[number][0]
            inside = _inside(some, sizes[which])
        there = sizes[which] > 0
        misplaced = there & ~inside
        good = there & inside
        if any(dead.shape[0] for _, dead in extents):
            # All bitmaps one behind the other, each with a slot that is alive at its end.
            lengths = np.array([dead.shape[0] for _, dead in extents], dtype=np.int64)
            starts = np.concatenate(([0], np.cumsum(lengths[:-1] + 1)))
            alive = np.zeros(1, dtype=np.bool_)
            marks = np.concatenate([part for _, dead in extents for part in (dead, alive)])
            slots = np.minimum(some["slot"].astype(np.int64), lengths[which])
            live = ~marks[starts[which] + slots]
            good &= live
            # A janitor cuts a segment of which everything is dead before it removes it.
            misplaced &= live
        return good, misplaced

    def _extent(self, segment: int) -> tuple[int, _Bools]:
        """A segment's size in bytes (0 if it has gone) and its dead slots."""
        known = self._known.get(segment)
        if known is None:
            writer = self._writer.hex()
            path = f"{self._directory}/{segment_name(writer, segment)}"
            if self._shared:
                refresh_attributes(path)
            try:
                size = os.stat(path).st_size
            except OSError as error:
                # Of what cannot be looked at it is not known that it has gone.
                size = 0 if error.errno in GONE else _UNKNOWN_BYTES
            dead = None
            if size and (writer, segment) in self._bitmaps:
                # Only if all records of the segment are held against the same bitmap may
                # `changed` compare with it.
                first = self._whole and segment not in self._met
                dead = self.dead(self._writer, segment, remember=first)
            self._met.add(segment)
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            known = self._known[segment] = (size, _NO_SLOTS if dead is None else dead)
        return known

    def dead(self, writer: bytes, segment: int, *, remember: bool | None = None) -> _Bools | None:
        """The dead slots of a segment, ``None`` if it has no bitmap that readers take.

        ``remember``: whether :meth:`changed` compares with what is read now (true), or
        says from now on that the bitmap has changed (false).
        """
        name = segment_name(writer.hex(), segment, "dead")
        try:
            fd = open_file(f"{self._directory}/{name}")
        except OSError:
            return None
        try:
            stat = os.fstat(fd)
            size = min(max(stat.st_size, HEADER_BYTES), HEADER_BYTES + MOST_BYTES)
            data = read_range(fd, size, 0)
            header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_DEAD, name)
        except (OSError, FormatError):
            return None
        finally:
            close_file(fd)
        if (header.namespace, header.writer, header.segment) != (self._namespace, writer, segment):
            return None
        place = (writer.hex(), segment)
        now = file_time(Path(self._directory).parent) if remember else None
        if now is not None and now * 1e9 - stat.st_mtime_ns > _SETTLING_NS:
            self._stamps[place] = stamp_of(stat)
        elif remember is not None:
            self._stamps.pop(place, None)
        return dead_slots(data[HEADER_BYTES:])

    def changed(self, writer: str, segment: int) -> bool:
        """Whether a bitmap may say something else than when it was read last."""
        path = f"{self._directory}/{segment_name(writer, segment, 'dead')}"
        if self._shared:
            refresh_attributes(path)
        try:
            stat = os.stat(path)
        except OSError:
            return False
        return stamp_of(stat) != self._stamps.get((writer, segment))

    def forget(self, writer: str, segment: int) -> None:
        """A segment's bitmap has gone."""
        self._stamps.pop((writer, segment), None)


def _inside(records: Entries, sizes: npt.NDArray[np.uint64]) -> _Bools:
    """Which records lie inside segments of so many bytes."""
    offsets = records["offset"]
    inside: _Bools = (
        (offsets >= HEADER_BYTES)
        & (offsets % ALIGNMENT == 0)
        & (records["stored_length"] <= sizes - np.minimum(offsets, sizes))
    )
    return inside
