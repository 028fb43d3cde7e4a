"""A step of the janitor: what tombstones name is dead."""

from __future__ import annotations

import numpy as np

from lifeboat_cache.errors import NewerFormatError
from lifeboat_cache.janitor.catalogue import Segment, Writer
from lifeboat_cache.janitor.estate import DeadBits, Estate

__all__ = ["Burier"]


class Burier:
    """Sets the dead bits of what tombstones name."""

    def __init__(self, estate: Estate) -> None:
        self._estate = estate

    def run(self) -> None:
        """Set the dead bits of what tombstones name, and of copies that were made of it."""
        estate = self._estate
        estate.step("bury")
        estate.copies.forget(estate.now)
        plan = DeadBits()
        for namespace in estate.namespaces.values():
            writers = namespace.catalogue.writers
            for writer in writers.values():
                if writer.untouchable:
                    continue
                for place, slots in list(writer.tombstones.items()):
                    every = {**estate.copies.of(place, slots), place: slots}
                    done = [self._bury(plan, writers, *one) for one in every.items()]
                    if all(done):
                        del writer.tombstones[place]
        estate.report.buried_blocks += estate.mark(plan)

    def _bury(
        self,
        plan: DeadBits,
        writers: dict[str, Writer],
        place: tuple[str, int],
        slots: set[int],
    ) -> bool:
        """Have the dead bits of slots set; whether there is nothing to do any more."""
        segment = self._named(writers, *place)
        if segment is None:
            return self._gone(writers, *place)
        wanted = np.array(sorted(slots), dtype=np.int64)
        try:
            dead = segment.bitmap.read()
        except NewerFormatError:
            return False
        there = (wanted < dead.shape[0]) & (
            dead[np.minimum(wanted, dead.shape[0] - 1)] if dead.shape[0] else False
        )
        if there.all():
            return True
        plan.slots.append((segment, wanted[~there]))
        return False

    @staticmethod
    def _named(writers: dict[str, Writer], owner: str, number: int) -> Segment | None:
        writer = writers.get(owner)
        if writer is None or writer.untouchable:
            return None
        segment = writer.segments.get(number)
        return None if segment is None or segment.untouchable else segment

    @staticmethod
    def _gone(writers: dict[str, Writer], owner: str, number: int) -> bool:
        """Whether a tombstone's record does not exist any more."""
        writer = writers.get(owner)
        # Of one that cannot be looked at now it is not known what there is.
        return writer is None or not (writer.untouchable or number in writer.segments)
