"""Where records were copied to lately, for who declares them dead where they were."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Copies"]

#: Who knows a record only where it was is told within seconds that it is dead there. It is long
#: enough for an engine that was stopped meanwhile, too.
_KEPT_S = 3600.0

#: A writer, by its 32 digits, and the number of a segment.
_Segment = tuple[str, int]


class Copies:
    """Remembers the copies that a janitor has made.

    A record may be deleted while it is copied, or by an engine that does not know of the copy yet:
    the tombstone names the old place, and the copy would bring it back.
    """

    def __init__(self) -> None:
        self._to: dict[_Segment, dict[int, tuple[_Segment, int]]] = {}
        self._made: list[tuple[float, _Segment]] = []

    def add(
        self, origin: _Segment, moves: Iterable[tuple[int, int]], to: _Segment, now: float
    ) -> None:
        """Note that records of a segment were copied to another one: from slot to slot."""
        self._made.append((now, origin))
        mine = self._to.setdefault(origin, {})
        for slot, there in moves:
            mine[slot] = to, there

    def of(self, origin: _Segment, slots: Iterable[int]) -> dict[_Segment, set[int]]:
        """Slots that hold copies of records, and copies of these, by segment."""
        found: dict[_Segment, set[int]] = {}
        left = [(origin, slot) for slot in slots] if origin in self._to else []
        while left:
            place, slot = left.pop()
            copy = self._to.get(place, {}).get(slot)
            if copy is not None and copy[1] not in found.setdefault(copy[0], set()):
                found[copy[0]].add(copy[1])
                left.append(copy)
        return found

    def drop(self, origin: _Segment, slot: int) -> None:
        """Forget where a record was copied to."""
        self._to.get(origin, {}).pop(slot, None)

    def forget(self, now: float) -> None:
        """Forget what was copied long ago."""
        kept = [(made, origin) for made, origin in self._made if now - made < _KEPT_S]
        if len(kept) < len(self._made):
            self._made = kept
            still = {origin for _, origin in kept}
            self._to = {origin: to for origin, to in self._to.items() if origin in still}
