"""How fast targets have been read from lately."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque

__all__ = ["Speedometer"]

#: Loads are compared with those of the same size only: up to so many bytes, or larger ones.
_CLASSES = (1 << 20, 16 << 20)

#: So many loads of a size count, the last ones; fewer than the other number say nothing.
_MOST, _LEAST = 8, 4

#: What is older than so many seconds does not count: a target that nothing is read from any
#: more, because it was slow, is tried again.
_RECENT_S = 60.0

#: A target is taken for faster if it is by this factor.
_MUCH = 2.0


class Speedometer:
    """Measures loads from one target. Thread-safe."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, deque[tuple[float, float]]] = defaultdict(
            lambda: deque(maxlen=_MOST)
        )

    def note(self, nbytes: int, seconds: float) -> None:
        """A load of so many bytes has taken so many seconds, from when it was asked for."""
        if nbytes and seconds > 0:
            size = sum(nbytes > limit for limit in _CLASSES)
            self._loads[size].append((time.monotonic(), nbytes / seconds))

    def rates(self) -> dict[int, float]:
        """Bytes per second by class of size, as far as they are known."""
        since = time.monotonic() - _RECENT_S
        found = {}
        for size, loads in list(self._loads.items()):
            recent = [rate for when, rate in list(loads) if when >= since]
            if len(recent) >= _LEAST:
                found[size] = statistics.median(recent)
        return found

    def beats(self, other: Speedometer) -> bool:
        """Whether its target is much faster than another one, for loads of every size."""
        mine, theirs = self.rates(), other.rates()
        common = mine.keys() & theirs.keys()
        return bool(common) and all(mine[size] > _MUCH * theirs[size] for size in common)
