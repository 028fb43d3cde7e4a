"""What benchmarks print: ratios within rounds, and how sure they are."""

import json
import random
import statistics

import pytest

from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, interval_ranks, median_ratio


@pytest.mark.parametrize(
    ("count", "ranks"), [(7, (0, 6)), (8, (0, 7)), (9, (1, 7)), (12, (2, 9)), (18, (4, 13))]
)
def test_ranks_are_those_of_the_sign_test(count: int, ranks: tuple[int, int]) -> None:
    assert interval_ranks(count) == ranks


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="measure at least 7"):
        median_ratio([1.0] * (LEAST_PAIRS - 1), [1.0] * (LEAST_PAIRS - 1))


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    caught = 0
    for _ in range(2000):
        low, high = interval_ranks(9)
        values = sorted(draw.lognormvariate(0, 1) for _ in range(9))
        caught += values[low] <= 1 <= values[high]
    assert 0.95 <= caught / 2000 < 0.98


def test_what_all_rounds_share_cancels_out() -> None:
    noise = [1.0, 5.0, 0.2, 30.0, 2.0, 9.0, 0.7]
    ours = [2 * value for value in noise]
    assert median_ratio(ours, noise) == (2, 2, 2)


def test_the_ratio_of_medians_is_not_the_median_of_ratios() -> None:
    ours, others = [1.0, 1, 1, 100, 100, 100, 100], [1.0, 1, 1, 50, 200, 400, 800]
    assert statistics.median(ours) / statistics.median(others) == 2
    assert median_ratio(ours, others) == (1, 0.125, 2)


def test_unequal_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        median_ratio([1.0] * 8, [1.0] * 7)


def test_json_lines_have_one_shape(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=True)
    ours = [1.0, 2, 3, 4, 5, 6, 7]
    report.add(compare("b", "c", "m", "s", ours, peer=("p", ours), limit=("l", [0.5] * 7)))
    report.add(compare("b", "c", "n", "us", ours, peer=("p", ours)))
    report.close()
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "bench": "b", "case": "c", "metric": "m", "unit": "s",
        "ours": 4, "peer": 4, "peer_name": "p", "limit": 0.5, "limit_name": "l",
        "ratio_peer": 1, "ratio_limit": 8,
        "interval": {"ratio_peer": [1, 1], "ratio_limit": [2, 14]},
    }  # fmt: skip
    assert second.keys() == first.keys()
    assert second["limit"] is second["ratio_limit"] is None
    assert second["interval"] == {"ratio_peer": [1, 1]}


def test_the_table_shows_ratios_with_their_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.add(compare("b", "some case", "m", "s", [2.0] * 7, peer=("them", [1.0] * 7)))
    report.close()
    shown = capsys.readouterr().out
    assert "2 [2, 2]" in shown
    assert "some case" in shown
    assert "them" in shown
