"""A step of the janitor: what is too old, or was purged, is dead."""

from __future__ import annotations

import numpy as np

from lifeboat_cache.janitor.catalogue import Segment
from lifeboat_cache.janitor.estate import DeadBits, Estate
from lifeboat_cache.janitor.reclaim import note_holes
from lifeboat_cache.janitor.rows import Bools
from lifeboat_cache.janitor.selection import Selection
from lifeboat_cache.targets.server_clock import file_time

__all__ = ["Expirer"]


class Expirer:
    """Marks dead what is selected by age, or by who purges."""

    def __init__(self, estate: Estate) -> None:
        self._estate = estate

    def run(self) -> None:
        """Mark dead what was stored too long ago."""
        if not self._estate.policy.max_age_s:
            return
        self._estate.step("expire")
        chosen = self.choose(Selection(older_than_s=self._estate.policy.max_age_s))
        self._estate.report.expired_blocks += self.doom(chosen)

    def choose(
        self, selection: Selection, *, only_left: bool = False
    ) -> list[tuple[Segment, Bools]]:
        """Records that are selected and hold bytes, by segment.

        ``only_left``: leave out what goes with the files that it lies in.
        """
        now = self._there()
        out = []
        for name, namespace in self._estate.namespaces.items():
            if not selection.concerns(name):
                continue
            for segment in namespace.catalogue.segments():
                rows = segment.rows.array
                chosen = selection.chosen(rows, now)
                if (chosen & ~segment.rows.live()).any():
                    note_holes(segment)
                chosen &= ~rows["done"]
                if only_left and not segment.writer.alive and bool(chosen.all()):
                    continue
                if chosen.any():
                    out.append((segment, chosen))
        return out

    def doom(self, doomed: list[tuple[Segment, Bools]]) -> int:
        """Mark records dead and have their bytes erased; how many were alive."""
        plan = DeadBits()
        for segment, chosen in doomed:
            rows = segment.rows.array
            rows["erase"] |= chosen
            live = chosen & segment.rows.live()
            plan.slots.append((segment, rows["slot"][live].astype(np.int64)))
        return self._estate.mark(plan)

    def _there(self) -> float:
        """The time as the files have it."""
        now = (
            file_time(self._estate.root)
            if self._estate.target.shared
            else self._estate.clock.time()
        )
        return 0.0 if now is None else now
