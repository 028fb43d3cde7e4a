"""Rounds in which several parties and the raw limits are measured, and what comes of them."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest

from raw_here import RawHere
from raw_process import RawProcess

from lifeboat_cache.bench import Report, compare, rotated

__all__ = ["Metric", "Samples", "SideBySide", "say"]

_MEDIUM, _CACHED, _MEMORY = "the medium", "preadv from the page cache", "memcpy"

#: What was measured of a party in each round, by the name of the metric.
Samples = dict[str, list[float]]

#: Name of a metric, and its unit.
Metric = tuple[str, str]


def say(text: str) -> None:
    """Tell whoever runs the benchmark what is going on."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


class SideBySide:
    """Measures parties one after the other, in another order each round.

    Parameters
    ----------
    raw
        Does what the medium, the page cache and the memory do by themselves.
    moved
        Bytes that every party, and ``raw``, moves at a time.
    write, cold, hot
        Metrics whose limits are writing to the medium, reading from it, and reading from the
        page cache and copying.
    """

    def __init__(
        self, raw: RawProcess | RawHere, moved: int, *, write: str, cold: str, hot: str
    ) -> None:
        self._raw = raw
        self._moved = moved
        self._limits = (
            (write, "write", _MEDIUM),
            (cold, "read", _MEDIUM),
            (hot, "read_cached", _CACHED),
            (hot, "copy", _MEMORY),
        )
        self._samples: dict[str, Samples] = {}

    def run(
        self, parties: Sequence[str], rounds: int, measure: Callable[[str, int, Samples], None]
    ) -> None:
        """Measure all of them; a first round is thrown away.

        Parameters
        ----------
        measure
            Measures a party, in a round with this number, and adds to its samples.
        """
        for turn in range(-1, rounds):
            if turn <= 0:
                self._samples = defaultdict(lambda: defaultdict(list))
            for who in rotated([*parties, _MEDIUM], turn):
                if who == _MEDIUM:
                    self._measure_limits()
                else:
                    measure(who, turn, self._samples[who])

    def _measure_limits(self) -> None:
        for metric, operation, limit in self._limits:
            seconds = self._raw.run(operation, lambda: time.sleep(0.001))
            self._samples[limit][metric].append(self._moved / seconds / 1e9)

    def report(
        self,
        report: Report,
        bench: str,
        case: str,
        ours: str,
        peers: Sequence[str],
        metrics: Sequence[Metric],
    ) -> None:
        """Compare a party of ours with its peers and with the limits; a row for each of them."""
        medium = f"pread and pwrite{', O_DIRECT' if self._raw.direct else ', buffered'}"
        samples = self._samples
        beside: Sequence[str | None] = peers or [None]
        for metric, unit in metrics:
            limits = [who for who in (_MEDIUM, _CACHED, _MEMORY) if metric in samples[who]]
            for peer, limit in zip_longest(beside, limits):
                shown = medium if limit == _MEDIUM else limit
                report.add(
                    compare(
                        bench,
                        case,
                        metric,
                        unit,
                        samples[ours][metric],
                        peer=None if peer is None else (peer, samples[peer][metric]),
                        limit=None if limit is None else (str(shown), samples[limit][metric]),
                    )
                )
