"""How long things take, counted in buckets: cheap to count, and right when it is added up.

A mean hides the slow ones, and percentiles of several processes cannot be added. Counts of
buckets can; percentiles are read off the sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

__all__ = ["BOUNDS", "JOB_BOUNDS", "LOOKUP_BOUNDS", "Latency", "bucket_of", "quantile"]

#: Where the buckets of jobs end, in seconds: from one block on a fast disk to a long prompt
#: on a slow link.
JOB_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

#: Where those of lookups end: these are answered from memory.
LOOKUP_BOUNDS = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1,
)  # fmt: skip

#: By what is counted.
BOUNDS = {"store": JOB_BOUNDS, "load": JOB_BOUNDS, "lookup": LOOKUP_BOUNDS}

#: What the last bucket is called, which has no end.
_REST = "inf"


class Latency:
    """Counts how often something took how long. Not thread-safe.

    Parameters
    ----------
    bounds
        Where buckets end, in seconds.
    """

    __slots__ = ("_bounds", "_buckets", "_seconds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        self._buckets[bisect_left(self._bounds, seconds)] += 1
        self._seconds += seconds

    def values(self, name: str, part: str = "") -> dict[str, float]:
        """The counts by name, such as ``load_seconds:fp8`` and ``load_bucket:fp8:0.005``.

        Parameters
        ----------
        name, part
            What is counted, and what it is counted apart by, if anything.
        """
        tail = f":{part}" if part else ""
        ends = [*(f"{bound:g}" for bound in self._bounds), _REST]
        found = {
            f"{name}_bucket{tail}:{end}": float(count)
            for end, count in zip(ends, self._buckets, strict=True)
            if count
        }
        return {**found, f"{name}_seconds{tail}": self._seconds} if found else {}


def bucket_of(end: str, bounds: tuple[float, ...]) -> int:
    """Which of our buckets holds the counts of one that ends there, in whatever release."""
    try:
        return bisect_left(bounds, float(end))
    except ValueError:
        return len(bounds)


def quantile(counts: Mapping[str, float], part: float, bounds: tuple[float, ...]) -> float | None:
    """So many seconds a part of all took at most; ``None`` if nothing was counted.

    Parameters
    ----------
    counts
        How many there are in each bucket, by its end.
    part
        0.5 for the median.
    bounds
        Where the buckets of this release end. Within a bucket the values are taken to be
        spread evenly; of the last one only its begin is known.
    """
    buckets = [0.0] * (len(bounds) + 1)
    for end, count in counts.items():
        buckets[bucket_of(end, bounds)] += count
    rank = part * sum(buckets)
    if not rank:
        return None
    before = 0.0
    for number, count in enumerate(buckets):
        if count and before + count >= rank:
            if number == len(bounds):
                break
            low = bounds[number - 1] if number else 0.0
            return low + (bounds[number] - low) * (rank - before) / count
        before += count
    return bounds[-1]
