"""History survives restarts, has gaps where nobody looked, and never grows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from published import MadeUpHome, agent_facts, engine_facts

from lifeboat_cache.dashboard.facts import overview_facts
from lifeboat_cache.dashboard.history import FIELDS, LOAD_BUCKETS, SPANS, History, sample_of
from lifeboat_cache.dashboard.plots import PLOTS, _axis, _Columns, draw
from lifeboat_cache.dashboard.source import Source
from lifeboat_cache.latency import JOB_BOUNDS, quantile

HOUR, DAY, WEEKS = SPANS
START = 1_800_000_000.0


def filled(path: Path, seconds: int, step: int = 10) -> History:
    history = History(path)
    for at in range(0, seconds, step):
        history.add(START + at, {"lookups": at * 3.0, "lookup_hits": at * 2.0, "used_bytes": 7e9})
    return history


def test_samples_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "own" / "history"
    history = filled(path, 600)
    before = history.read(HOUR, START + 600)
    history.close()
    size = path.stat().st_size
    assert path.stat().st_mode & 0o077 == 0
    again = History(path)
    assert np.array_equal(again.read(HOUR, START + 600), before, equal_nan=True)
    assert len(before) == 60
    assert len(again.read(DAY, START + 600)) == 10
    again.close()
    assert path.stat().st_size == size < 1_200_000


def test_it_never_grows_and_forgets_the_oldest(tmp_path: Path) -> None:
    history = filled(tmp_path / "history", 3 * 86_400, 60)
    size = (tmp_path / "history").stat().st_size
    now = START + 3 * 86_400
    found = history.read(DAY, now)
    assert len(found) == DAY.count - 1
    assert np.all(np.diff(found[:, 0]) == 60)
    assert len(history.read(WEEKS, now)) == 3 * 96
    history.add(now, {})
    assert (tmp_path / "history").stat().st_size == size


def test_what_cannot_be_used_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "history"
    for content in (b"", b"x" * 100, b"\xff" * (1 << 20), json.dumps({"format": 9}).encode()):
        path.write_bytes(content)
        history = History(path)
        assert len(history.read(HOUR, START)) == 0
        history.add(START, {"lookups": 1.0})
        assert len(history.read(HOUR, START)) == 1
        history.close()
    blocked = History(path / "below")
    assert "correct its owner and mode" in blocked.problem
    blocked.add(START, {"lookups": 1.0})
    assert len(blocked.read(HOUR, START)) == 1


def test_plots_have_round_axes_and_gaps(tmp_path: Path) -> None:
    history = filled(tmp_path / "history", 600)
    for at in range(1200, 1800, 10):  # nobody looked for ten minutes
        history.add(START + at, {"lookups": at * 3.0, "lookup_hits": at * 2.0})
    now = START + 1800
    plots = {one.key: one for one in draw(history.read(HOUR, now), HOUR, now, 5e9)}
    assert len(plots) == len(PLOTS)
    hits = plots["hits"]
    assert hits.marks == ("100 %", "75 %", "50 %", "25 %", "0 %")
    (line,) = hits.lines
    assert line.last == "67 %"
    assert line.path.count("M") == 2, "a gap is not drawn over"
    assert "between 67 % and 67 %" in hits.summary
    assert plots["latency"].empty
    points = json.loads(hits.points)
    assert points[0][1] == [["found", "67 %"]]


def test_totals_that_start_again_are_no_negative_rate(tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    for at, tokens in enumerate((1000.0, 2000.0, 10.0, 20.0)):
        history.add(START + 10 * at, {"served_tokens": tokens})
    now = START + 40
    (tokens_plot,) = [
        one for one in draw(history.read(HOUR, now), HOUR, now, None) if one.key == "tokens"
    ]
    shown = [point[1][0][1] for point in json.loads(tokens_plot.points)]
    assert shown == ["100/s", "1/s"]


@given(st.floats(min_value=1e-9, max_value=1e18))
def test_an_axis_ends_just_above_what_it_shows(highest: float) -> None:
    top, step = _axis(highest)
    assert top >= highest * (1 - 1e-6)
    assert top <= highest * 2 + step
    assert 2 <= round(top / step) <= 5
    assert math.isclose(top / step, round(top / step))


def test_a_sample_is_what_the_page_says(home: Path, made: MadeUpHome, tmp_path: Path) -> None:
    made.publish(engine_facts())
    made.publish(agent_facts(), "agent")
    source = Source(home, None, History(tmp_path / "history"))
    view = source.view()
    sample = sample_of(view.document)
    assert set(sample) == set(FIELDS)
    assert sample["lookups"] == 20_000
    assert sample["codec_error"] == 0.0132
    assert sample["used_bytes"] == 311e9
    assert overview_facts(view, source.history, HOUR)["engines"] == sample["engines"] == 1
    source.close()


buckets = st.lists(
    st.lists(st.integers(0, 50), min_size=len(LOAD_BUCKETS), max_size=len(LOAD_BUCKETS)),
    min_size=1,
    max_size=4,
)


@given(buckets, st.sampled_from([0.5, 0.9, 0.99]))
def test_percentiles_over_time_are_those_of_each_moment(
    steps: list[list[int]], part: float
) -> None:
    samples = np.zeros((len(steps) + 1, 1 + len(FIELDS)))
    samples[:, 0] = START + 10.0 * np.arange(len(samples))
    first = 1 + FIELDS.index(LOAD_BUCKETS[0])
    samples[1:, first : first + len(LOAD_BUCKETS)] = np.cumsum(steps, axis=0)
    found = _Columns(samples, HOUR, None).load_quantile(part)
    ends = [name.rpartition("_")[2] for name in LOAD_BUCKETS]
    for counts, one in zip(steps, found.tolist(), strict=True):
        expected = quantile(dict(zip(ends, map(float, counts), strict=True)), part, JOB_BOUNDS)
        if expected is None:
            assert math.isnan(one)
        else:
            assert math.isclose(one, expected, rel_tol=1e-9)
