"""What a benchmark prints: a table for people, or one JSON object a line."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lifeboat_cache.bench.pairs import LEAST_PAIRS, median_ratio

__all__ = ["Report", "Row", "compare", "machine_use"]


@dataclass(frozen=True)
class Row:
    """One line of a benchmark; the fields are the keys of ``--json``.

    Attributes
    ----------
    bench, case, metric
        What was measured.
    unit
        Of ``ours``, ``peer`` and ``limit``. In ``s``, ``us``, ``bytes``, ``nats`` and
        ``requests`` less is better, in ``GB/s`` and ``share`` more is.
    ours, peer, limit
        Medians; for orientation only.
    peer_name, limit_name
        Who the peer is, and what nothing of this kind can beat.
    ratio_peer, ratio_limit
        Medians of ours / peer and ours / limit within the rounds; ``None`` where there is
        nothing to compare with, or a zero.
    interval
        95% interval of each of these medians, by its name; empty if there were fewer
        rounds than :data:`~lifeboat_cache.bench.pairs.LEAST_PAIRS`.
    """

    bench: str
    case: str
    metric: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str | None
    limit: float | None
    limit_name: str | None
    ratio_peer: float | None
    ratio_limit: float | None
    interval: dict[str, tuple[float, float]]


def compare(
    bench: str,
    case: str,
    metric: str,
    unit: str,
    ours: Sequence[float],
    *,
    peer: tuple[str, Sequence[float]] | None = None,
    limit: tuple[str, Sequence[float]] | None = None,
) -> Row:
    """Make a row of measurements that were taken in the same rounds.

    Parameters
    ----------
    bench, case, metric, unit
        See :class:`Row`.
    ours
        Our measurement of each round.
    peer, limit
        Name and measurements of whom to compare with.
    """
    ratios: dict[str, float | None] = {"ratio_peer": None, "ratio_limit": None}
    interval = {}
    for name, others in (("ratio_peer", peer), ("ratio_limit", limit)):
        if others is None or not all(others[1]):
            continue
        if len(ours) < LEAST_PAIRS:
            ratios[name] = _round(
                statistics.median(a / b for a, b in zip(ours, others[1], strict=True))
            )
            continue
        middle, low, high = median_ratio(ours, others[1])
        ratios[name] = _round(middle)
        interval[name] = (_round(low), _round(high))
    return Row(
        bench=bench,
        case=case,
        metric=metric,
        unit=unit,
        ours=_round(statistics.median(ours)),
        peer=None if peer is None else _round(statistics.median(peer[1])),
        peer_name=None if peer is None else peer[0],
        limit=None if limit is None else _round(statistics.median(limit[1])),
        limit_name=None if limit is None else limit[0],
        ratio_peer=ratios["ratio_peer"],
        ratio_limit=ratios["ratio_limit"],
        interval=interval,
    )


def _round(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass
class Report:
    """Prints rows as they come: a table, or JSON lines.

    Parameters
    ----------
    as_json
        Print one JSON object a line instead.
    progress
        Say each row on stderr as it comes, ahead of the table.
    """

    as_json: bool = False
    progress: bool = True
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Take a row; JSON lines are printed at once."""
        self.rows.append(row)
        if self.as_json:
            print(json.dumps(asdict(row)), flush=True)
        elif self.progress:
            print(f"[bench] {row.case}: {row.metric}: {_shown(row)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Print the table."""
        if self.as_json or not self.rows:
            return
        peers = any(row.peer_name is not None for row in self.rows)
        table = [_line(None, peers=peers), *(_line(row, peers=peers) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
            print("  ".join(padded).rstrip())
        intervals = any(row.interval for row in self.rows)
        print(
            "\nRatios are medians over the rounds"
            + (", in brackets their 95% intervals." if intervals else "."),
            flush=True,
        )


def _line(row: Row | None, *, peers: bool) -> tuple[str, ...]:
    """Cells of a row, or of the head."""
    if row is None:
        cells = ["case", "metric", "ours", "ours / peer", "peer", "ours / limit", "limit"]
    else:
        cells = [
            row.case,
            row.metric,
            f"{row.ours:g} {row.unit}",
            _ratio(row, "ratio_peer"),
            _other(row, row.peer, row.peer_name),
            _ratio(row, "ratio_limit"),
            _other(row, row.limit, row.limit_name),
        ]
    return tuple(cells if peers else cells[:3] + cells[5:])


def _other(row: Row, value: float | None, name: str | None) -> str:
    return "" if value is None else f"{name}: {value:g} {row.unit}"


def _ratio(row: Row, name: str) -> str:
    value = row.ratio_peer if name == "ratio_peer" else row.ratio_limit
    if value is None:
        return ""
    if name not in row.interval:
        return f"{value:.3g}"
    low, high = row.interval[name]
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def _shown(row: Row) -> str:
    parts = [f"{row.ours:g} {row.unit}"]
    if row.ratio_peer is not None:
        parts.append(f"{_ratio(row, 'ratio_peer')} of {row.peer_name}")
    if row.ratio_limit is not None:
        parts.append(f"{_ratio(row, 'ratio_limit')} of {row.limit_name}")
    return ", ".join(parts)


def _cpu_times() -> tuple[float, float] | None:
    """Busy and all CPU time of the machine since it started, in ticks; ``None`` if unknown."""
    try:
        line = Path("/proc/stat").read_text().split("\n")[0]
    except OSError:
        return None
    numbers = [int(part) for part in line.split()[1:9]]
    idle = numbers[3] + numbers[4]
    return float(sum(numbers) - idle), float(sum(numbers))


def machine_use(when: str, seconds: float = 2.0) -> float:
    """Say on stderr how busy the machine is while the benchmark itself rests.

    Returns
    -------
    float
        Share of the machine's cores, 0 to 1, that others use; where the system does not say
        so, as its load tells.
    """
    before = _cpu_times()
    time.sleep(seconds)
    then = _cpu_times()
    load = os.getloadavg()[0]
    if before is None or then is None:
        share = min(1.0, load / (os.cpu_count() or 1))
    else:
        share = (then[0] - before[0]) / max(1.0, then[1] - before[1])
    print(
        f"[bench] {when}: others use {share:.0%} of {os.cpu_count()} cores, load {load:.1f}"
        + (" (not quiet: measure again before you rely on this)" if share > 0.1 else ""),
        file=sys.stderr,
        flush=True,
    )
    return share
