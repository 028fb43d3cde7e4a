"""Ratios of paired measurements, and how sure they are.

An absolute time says as much about the machine and its neighbours as about the
program. So a benchmark measures ours, a peer and a limit one after the other,
many times over, and what counts is the median of the ratios within the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb
from typing import TypeVar

__all__ = ["LEAST_PAIRS", "interval_ranks", "median_ratio", "rotated"]

#: Fewer pairs give an interval that says nothing.
LEAST_PAIRS = 7

_CONFIDENCE = 0.95

T = TypeVar("T")


def interval_ranks(count: int) -> tuple[int, int]:
    """Ranks, from 0, of the values that bound the median with 95% confidence.

    From order statistics: of ``count`` independent values, as many lie below the
    true median as heads fall among ``count`` coins. Nothing is assumed about how
    the values are distributed.

    Raises
    ------
    ValueError
        With fewer than :data:`LEAST_PAIRS` values.
    """
    if count < LEAST_PAIRS:
        raise ValueError(f"{count} pairs are too few: measure at least {LEAST_PAIRS}")
    outside, rank = 0.0, 0
    while True:
        outside += 2 * comb(count, rank) / 2**count
        if outside > 1 - _CONFIDENCE:
            break
        rank += 1
    return rank - 1, count - rank


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Median of the pairs' ratios, and its 95% interval.

    Parameters
    ----------
    ours, others
        Measurements of the same rounds, in the same order.
    """
    ratios = sorted(one / other for one, other in zip(ours, others, strict=True))
    low, high = interval_ranks(len(ratios))
    return statistics.median(ratios), ratios[low], ratios[high]


def rotated(things: Sequence[T], turn: int) -> list[T]:
    """The order of a round: everybody is first, last and in between equally often."""
    at = turn % len(things)
    order = [*things[at:], *things[:at]]
    return order if (turn // len(things)) % 2 == 0 else order[::-1]
