"""Plots of history as inline SVG, with axes whose marks are round numbers.

Lines are drawn into a box of 100 × 100 that the browser stretches; the labels of the axes are
text beside it, so that they have the same size on a phone and on a wide screen.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.dashboard import shown
from lifeboat_cache.dashboard.history import FIELDS, LOAD_BUCKETS, Samples, Span
from lifeboat_cache.latency import JOB_BOUNDS

__all__ = ["PLOTS", "Line", "Plot", "Series", "draw"]

Values = npt.NDArray[np.float64]

#: Points of a line: more would not be seen.
_MAX_POINTS = 180

#: Marks on the axis of time, both ends included.
_MARKS = 5


@dataclass(frozen=True)
class Series:
    """Values over time, one for each time; NaN where nothing is known."""

    name: str
    values: Values
    style: str = "a"


@dataclass(frozen=True)
class Line:
    """One line of a plot, ready to be drawn."""

    name: str
    style: str
    path: str
    area: str
    last: str


@dataclass(frozen=True)
class Plot:
    """What a template draws.

    Attributes
    ----------
    key, title, unit
        Its name in addresses, and what it says.
    lines
        The lines.
    marks
        Labels of the vertical axis, the highest first.
    times
        Labels of the horizontal axis, the earliest first.
    summary
        The same in words, for who cannot see it.
    points
        Times and values as JSON, for who points at it.
    """

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    marks: tuple[str, ...]
    times: tuple[str, ...]
    summary: str
    points: str

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(line.path for line in self.lines)


@dataclass(frozen=True)
class _Recipe:
    key: str
    title: str
    unit: str
    show: Callable[[float], str]
    make: Callable[[_Columns], list[Series]]
    top: float | None = None  # the axis ends there, whatever is shown


class _Columns:
    """Samples by name, and what happened between two of them."""

    def __init__(self, samples: Samples, span: Span, limit: float | None) -> None:
        self.limit = limit
        self.times: Values = samples[:, 0]
        self._samples = samples
        gaps = np.diff(self.times)
        # Nobody looked for a while: what happened then has no time.
        self._known = (gaps > 0) & (gaps <= 3.5 * span.step_s)
        self.gaps: Values = np.where(self._known, gaps, np.nan)

    def level(self, name: str) -> Values:
        values: Values = self._samples[1:, 1 + FIELDS.index(name)]
        return np.where(self._known, values, np.nan)

    def more(self, name: str) -> Values:
        """By how much a sum has grown."""
        grown: Values = np.diff(self._samples[:, 1 + FIELDS.index(name)])
        # Totals that were lost start again at 0.
        return np.where(self._known & (grown >= 0), grown, np.nan)

    def per_second(self, name: str) -> Values:
        return self.more(name) / self.gaps

    def ratio(self, part: str, whole: str, scale: float = 1.0) -> Values:
        above, below = self.more(part), self.more(whole)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(below > 0, scale * above / below, np.nan)

    def engine_hits(self) -> Values:
        """The part of prompts that engines had in their own memory, in percent."""
        asked, own = self.more("prompt_tokens"), self.more("cached_tokens")
        own = np.clip(own - self.more("served_tokens"), 0.0, None)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(asked > 0, np.clip(100 * own / asked, 0.0, 100.0), np.nan)

    def load_quantile(self, part: float) -> Values:
        """So long a part of the loads took at most."""
        rows = np.nan_to_num(np.stack([self.more(name) for name in LOAD_BUCKETS], axis=-1))
        sums = np.cumsum(rows, axis=-1)
        rank = part * sums[:, -1:]
        bucket = np.argmax((sums >= rank) & (rows > 0), axis=-1)
        at = np.arange(len(rows))
        # As :func:`lifeboat_cache.latency.quantile` does it for one.
        lows, highs = np.array((0.0, *JOB_BOUNDS)), np.array((*JOB_BOUNDS, JOB_BOUNDS[-1]))
        low, count = lows[bucket], rows[at, bucket]
        before = sums[at, bucket] - count
        with np.errstate(divide="ignore", invalid="ignore"):
            found = low + (highs[bucket] - low) * (rank[:, 0] - before) / count
        return np.where(sums[:, -1] > 0, found, np.nan)

    def constant(self, value: float | None) -> Values:
        return np.full(len(self.gaps), math.nan if value is None else value)


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _tokens(value: float) -> str:
    return f"{shown.number(value)}/s"


PLOTS: tuple[_Recipe, ...] = (
    _Recipe(
        "hits",
        "Hit rate",
        "of blocks asked for",
        _percent,
        lambda c: [Series("found", c.ratio("lookup_hits", "lookups", 100.0))],
        top=100.0,
    ),
    _Recipe(
        "sources",
        "Where prompts came from",
        "of prompt tokens; the rest was computed",
        _percent,
        lambda c: [
            Series(
                "LifeboatCache", np.clip(c.ratio("served_tokens", "prompt_tokens", 100.0), 0, 100)
            ),
            Series("the engine's own memory", c.engine_hits(), "b"),
        ],
        top=100.0,
    ),
    _Recipe(
        "tokens",
        "Prompt tokens not recomputed",
        "tokens per second",
        _tokens,
        lambda c: [Series("tokens", c.per_second("served_tokens"))],
    ),
    _Recipe(
        "time",
        "Prefill time saved",
        "seconds in each second, estimated",
        lambda value: f"{value:.2g} s/s",
        lambda c: [Series("saved", c.per_second("saved_seconds"))],
    ),
    _Recipe(
        "moved",
        "KV restored and stored",
        "bytes per second",
        shown.rate,
        lambda c: [
            Series("restored", c.per_second("loaded_bytes")),
            Series("stored", c.per_second("stored_bytes"), "b"),
        ],
    ),
    _Recipe(
        "speed",
        "Restore speed against the medium",
        "KV bytes per second of a load",
        shown.rate,
        lambda c: [
            Series("restored", c.ratio("loaded_bytes", "load_seconds")),
            Series("the medium's limit", c.constant(c.limit), "limit"),
        ],
    ),
    _Recipe(
        "latency",
        "Time to restore",
        "of a load, from asking to having it",
        shown.duration,
        lambda c: [
            Series("half of them, at most", c.load_quantile(0.5)),
            Series("99 of 100", c.load_quantile(0.99), "b"),
        ],
    ),
    _Recipe(
        "saved",
        "Size of what is stored",
        "of the KV in it",
        _percent,
        lambda c: [Series("stored", c.ratio("encoded_bytes", "encoded_raw_bytes", 100.0), "b")],
        top=100.0,
    ),
    _Recipe(
        "error",
        "Error of restored KV",
        "mean relative, sampled, worst codec",
        lambda value: f"{value:.2g} %",
        lambda c: [Series("error", 100 * c.level("codec_error"))],
    ),
    _Recipe(
        "lost",
        "Blocks lost",
        "per second",
        _tokens,
        lambda c: [
            Series("not stored", c.per_second("not_stored_blocks"), "bad"),
            Series("not loaded", c.per_second("not_loaded_blocks"), "b"),
        ],
    ),
    _Recipe(
        "space",
        "Space used",
        "on all targets",
        shown.size,
        lambda c: [Series("used", c.level("used_bytes"))],
    ),
    _Recipe(
        "evicted",
        "Evicted",
        "bytes per second",
        shown.rate,
        lambda c: [Series("evicted", c.per_second("evicted_bytes"), "b")],
    ),
)


def draw(samples: Samples, span: Span, now: float, limit: float | None) -> list[Plot]:
    """All plots of a span that ends now.

    Parameters
    ----------
    samples
        From :meth:`History.read`.
    span, now
        What the axis of time covers.
    limit
        Bytes per second that the medium gives; ``None`` = not known.
    """
    columns = _Columns(samples, span, limit)
    return [_draw(recipe, columns, span, now) for recipe in PLOTS]


def _draw(recipe: _Recipe, columns: _Columns, span: Span, now: float) -> Plot:
    series = [] if len(columns.times) < 2 else recipe.make(columns)
    times = columns.times[1:]
    times, thinned = _thin(times, series)
    known = [one.values[np.isfinite(one.values)] for one in thinned]
    real = [
        float(values.max())
        for values, one in zip(known, thinned, strict=True)
        if len(values) and one.style != "limit"
    ]
    highest = max((float(values.max()) for values in known if len(values)), default=0.0)
    top, step = (recipe.top, recipe.top / 4) if recipe.top else _axis(highest)
    lines = [_line(one, times, span, now, top, recipe.show) for one in thinned if real]
    marks = tuple(recipe.show(top - step * index) for index in range(round(top / step) + 1))
    return Plot(
        recipe.key,
        recipe.title,
        recipe.unit,
        tuple(line for line in lines if line.path),
        marks,
        _times(span, now),
        _summary(recipe, span, thinned),
        _points(times, [one for one in thinned if real], recipe.show) if real else "[]",
    )


def _thin(times: Values, series: Sequence[Series]) -> tuple[Values, list[Series]]:
    """Means of neighbours, so that a line has no more points than can be seen."""
    step = -(-len(times) // _MAX_POINTS) if len(times) else 1
    if step <= 1:
        return times, list(series)
    kept = len(times) // step * step

    def mean(values: Values) -> Values:
        groups = values[-kept:].reshape(-1, step)
        known = np.isfinite(groups)
        sums = np.where(known, groups, 0.0).sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.where(known.any(axis=1), sums / known.sum(axis=1), np.nan)

    return mean(times), [Series(one.name, mean(one.values), one.style) for one in series]


def _axis(highest: float) -> tuple[float, float]:
    """Where an axis ends, and the step between its marks: 1, 2 or 5 times a power of ten."""
    if not highest > 0:
        return 1.0, 0.5
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return step * math.ceil(highest / step - 1e-9), step


def _line(
    one: Series, times: Values, span: Span, now: float, top: float, show: Callable[[float], str]
) -> Line:
    x = 100 * (1 - (now - times) / span.seconds)
    y = 100 * (1 - np.clip(one.values / top, 0.0, 1.0))
    path: list[str] = []
    area: list[str] = []
    known = np.isfinite(one.values) & (x >= 0)
    for start, end in _runs(known):
        points = [f"{px:.2f} {py:.2f}" for px, py in zip(x[start:end], y[start:end], strict=True)]
        if len(points) == 1:  # a dot, drawn as a line as long as the pen is wide
            points.append(f"{x[start] + 0.01:.2f} {y[start]:.2f}")
        path.append("M" + "L".join(points))
        area.append(f"M{x[start]:.2f} 100L{'L'.join(points)}L{x[end - 1]:.2f} 100Z")
    last = one.values[np.isfinite(one.values)]
    return Line(
        one.name,
        one.style,
        "".join(path),
        "".join(area) if one.style == "a" else "",
        show(float(last[-1])) if len(last) else shown.NONE,
    )


def _runs(known: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Begin and end of each stretch without a gap."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], known, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _times(span: Span, now: float) -> tuple[str, ...]:
    marks = [now - span.seconds * (1 - index / (_MARKS - 1)) for index in range(_MARKS)]
    form = "%H:%M" if span.seconds <= 86400 else "%d %b"
    return tuple(time.strftime(form, time.localtime(mark)) for mark in marks)


def _summary(recipe: _Recipe, span: Span, series: Sequence[Series]) -> str:
    said = []
    for one in series:
        values = one.values[np.isfinite(one.values)]
        if len(values):
            low, high, last = (
                recipe.show(float(v)) for v in (values.min(), values.max(), values[-1])
            )
            said.append(f"{one.name}: between {low} and {high}, {last} at the end")
    found = "; ".join(said) or "nothing has been measured yet"
    return f"{recipe.title}, {recipe.unit}, over {span.title}: {found}"


def _points(times: Values, series: Sequence[Series], show: Callable[[float], str]) -> str:
    rows = []
    for index, moment in enumerate(times.tolist()):
        values = [
            [one.name, show(float(one.values[index]))]
            for one in series
            if math.isfinite(one.values[index])
        ]
        if values:
            rows.append([round(moment), values])
    return json.dumps(rows, separators=(",", ":"))
