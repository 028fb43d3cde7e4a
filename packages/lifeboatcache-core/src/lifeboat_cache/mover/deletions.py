"""What an engine has deleted on a target, until a mover has said that it is gone from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["DELETION", "Deletions"]

#: Numbers of deletions begin here, those of parts of jobs below.
DELETION = 1 << 63

#: So many deletions that could not be written are remembered.
_MOST_FAILED = 4096


class Deletions:
    """Deletions under way. The caller's lock guards all of this.

    A deletion is over when its tombstones are on storage: until then a mover that dies takes it
    along, and the next one finds the blocks again.
    """

    def __init__(self) -> None:
        self._number = DELETION
        self._told: dict[int, Sequence[bytes]] = {}
        self._failed: dict[int, Sequence[bytes]] = {}  # the mover tries again by itself
        self._untold: set[bytes] = set()

    @property
    def under_way(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._told)

    @property
    def untold(self) -> bool:
        """Whether there are some that no mover knows of, as the one that was told has gone."""
        return bool(self._untold)

    def tell(self, keys: Sequence[bytes]) -> int:
        """Note a deletion that a mover is told now; its number."""
        self._number += 1
        self._told[self._number] = keys
        return self._number

    def not_told(self, number: int) -> None:
        """It could not be told after all."""
        del self._told[number]

    def answered(self, number: int, *, done: bool) -> None:
        """The mover has written its tombstones, or could not, and goes on trying."""
        keys = self._told.pop(number, None) or self._failed.pop(number, None)
        if keys and not done:
            self._failed[number] = keys
            while len(self._failed) > _MOST_FAILED:
                del self._failed[next(iter(self._failed))]

    def lost(self) -> None:
        """No answer comes any more: the next mover is to be told."""
        for deletions in (self._told, self._failed):
            for keys in deletions.values():
                self._untold.update(keys)
            deletions.clear()

    def stored(self, keys: Iterable[bytes]) -> None:
        """Blocks are stored again: these are not to be deleted."""
        self._untold.difference_update(keys)
        if self._told or self._failed:
            again = set(keys)
            for deletions in (self._told, self._failed):
                for number, deleted in deletions.items():
                    deletions[number] = [key for key in deleted if key not in again]

    def take_untold(self) -> list[bytes]:
        """Keys that a mover is to be told now."""
        untold, self._untold = self._untold, set()
        return list(untold)

    def give_back(self, keys: Iterable[bytes]) -> None:
        """There is no mover that could be told."""
        self._untold.update(keys)

    def forget(self) -> None:
        """Nobody waits for answers any more."""
        self._told.clear()

    def keys(self) -> list[bytes]:
        """Keys that may still be found on storage."""
        under_way = (*self._told.values(), *self._failed.values())
        return [*self._untold, *(key for keys in under_way for key in keys)]

    def hidden(self) -> list[bytes]:
        """Keys that a mover may tell of although they are deleted."""
        return list(self._untold)
