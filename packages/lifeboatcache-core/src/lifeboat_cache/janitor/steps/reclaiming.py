"""A step of the janitor: the space of dead records is given back."""

from __future__ import annotations

import numpy as np

from lifeboat_cache.errors import NewerFormatError
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.janitor.catalogue import Segment
from lifeboat_cache.janitor.estate import DeadBits, Estate
from lifeboat_cache.janitor.reclaim import Hole, dead_runs, erase, punch, remove_segment
from lifeboat_cache.janitor.rows import Bools
from lifeboat_cache.targets.direct import ALIGNMENT

__all__ = ["Reclaimer"]

#: The shortest run that is punched where records cannot be copied.
_SHORTEST_HOLE = 64 << 10


class Reclaimer:
    """Gives back the space of records whose grace is over."""

    def __init__(self, estate: Estate) -> None:
        self._estate = estate

    def run(self) -> None:
        """Give back the space of records whose grace is over."""
        self._estate.step("reclaim")
        for namespace in self._estate.namespaces.values():
            for writer in list(namespace.catalogue.writers.values()):
                if writer.untouchable:
                    continue
                for segment in list(writer.segments.values()):
                    if segment.untouchable:
                        continue
                    try:
                        namespace.catalogue.allocated -= self._reclaim_segment(segment)
                    except FileNotFoundError:  # another janitor, or a purge, was faster
                        continue
                    except OSError as error:
                        self._estate.report.problem(segment.path.name, error)

    def pending(self) -> int:
        """Bytes that will be given back when the graces are over."""
        total = 0
        for segment in self._estate.segments():
            rows = segment.rows.array
            dead = rows["marked"] > 0
            if not dead.any():
                continue
            waste = max(0, segment.allocated - segment.rows.live_bytes())
            settled = not segment.writer.alive or segment.sealed_at > 0
            if settled and (bool(dead.all()) or self._estate.sparse(segment)):
                total += waste
            elif not self._estate.no_holes:
                runs = dead_runs(segment, dead & ~rows["done"], self._least_hole(segment))
                total += min(waste, sum(hole.end - hole.start for hole in runs))
        return total

    def _reclaim_segment(self, segment: Segment) -> int:
        """Give back what can be given back of a segment; the bytes. Raises ``OSError``."""
        writer = segment.writer
        ripe = self._ripe(segment)
        settled = segment.settled(self._estate.now, self._estate.policy.grace_s)
        # Cut off by a janitor or a purge that did not get to unlinking it.
        cut = segment.size < HEADER_BYTES
        dead = bool(ripe.all()) and (writer.complete or len(segment.rows) > 0)
        if dead and writer.journal is not None and writer.journal.waiting:
            dead = False  # more of its records may become known
        if settled and (cut or dead):
            if not cut and len(segment.rows) and not self._confirmed(segment, ripe):
                return 0
            self._estate.step("remove")
            remove_segment(segment)
            self._estate.step("removed")
            self._estate.report.segments_removed += 1
            self._estate.report.removed_bytes += segment.allocated
            del writer.segments[segment.number]
            return segment.allocated
        if not ripe.any():
            return 0
        ripe &= ~segment.rows.array["done"]
        least = self._least_hole(segment)
        holes = [] if self._estate.no_holes else dead_runs(segment, ripe, least)
        if segment.allocated < segment.rows.live_bytes() + least:
            holes = []  # an earlier janitor has done it
        doomed = dead_runs(segment, ripe & segment.rows.array["erase"], ALIGNMENT)
        if not (holes or doomed) or not self._confirmed(segment, ripe):
            return 0
        self._estate.step("punch")
        return self._punch(segment, holes, doomed)

    def _ripe(self, segment: Segment) -> Bools:
        """Rows that have been dead for as long as readers may need."""
        rows = segment.rows.array
        ripe: Bools = (rows["marked"] > 0) & (
            self._estate.now - rows["marked"] >= self._estate.policy.grace_s
        )
        return ripe

    def _punch(self, segment: Segment, holes: list[Hole], doomed: list[Hole]) -> int:
        """Punch runs out of a segment; what has to go is overwritten where that is not possible."""
        freed = 0
        for runs in (holes, doomed):
            if runs and not self._estate.no_holes:
                punched = punch(segment, runs)
                self._estate.no_holes = punched is None
                freed += punched or 0
        if doomed and self._estate.no_holes:
            self._estate.report.erased_bytes += erase(segment, doomed)
        self._estate.report.punched_bytes += freed
        freed = min(freed, segment.allocated)
        segment.allocated -= freed
        return freed

    def _confirmed(self, segment: Segment, ripe: Bools) -> bool:
        """Whether the bits of ripe rows are set on disk; sets them again if they are not.

        Another janitor, on a filesystem without locks, may have written over them.
        """
        rows = segment.rows.array
        try:
            dead = segment.bitmap.read()
        except NewerFormatError:
            return False
        slots = rows["slot"].astype(np.int64)
        there = (
            dead[np.minimum(slots, dead.shape[0] - 1)] & (slots < dead.shape[0])
            if dead.shape[0]
            else np.zeros(slots.shape[0], dtype=np.bool_)
        )
        lost = ripe & ~there
        if not lost.any():
            return True
        rows["marked"][lost] = 0
        self._estate.mark(DeadBits([(segment, slots[lost])]))
        return False

    def _least_hole(self, segment: Segment) -> int:
        """The shortest run that is punched out of a segment."""
        if self._estate.verifiable(segment):
            return self._estate.policy.punch_bytes
        # Nothing else gives the space of these back.
        return min(self._estate.policy.punch_bytes, _SHORTEST_HOLE)
