"""Latencies in buckets: right when they are added up over processes, tiers and codecs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lifeboat_cache.job import Job
from lifeboat_cache.latency import BOUNDS, JOB_BOUNDS, Latency, quantile
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.registry import Registration, StorePublisher, snapshot
from lifeboat_cache.registry.metrics import METRICS, families
from lifeboat_cache.registry.overview import AgentFacts, overview
from lifeboat_cache.store.counters import Counters, CounterSnapshot
from lifeboat_cache.testing import StoreDriver

seconds = st.lists(st.floats(0, 60, allow_subnormal=False), min_size=1, max_size=60)


def buckets(values: dict[str, float]) -> dict[str, float]:
    return {name.rpartition(":")[2]: value for name, value in values.items() if "_bucket:" in name}


@given(seconds, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(taken: list[float], part: float) -> None:
    latency = Latency(JOB_BOUNDS)
    for one in taken:
        latency.add(one)
    found = quantile(buckets(latency.values("load", "raw")), part, JOB_BOUNDS)
    if part == 0.0:
        assert found is None
        return
    assert found is not None
    true = sorted(taken)[int(np.ceil(part * len(taken))) - 1]
    ends = [0.0, *JOB_BOUNDS, float("inf")]
    number = next(n for n in range(len(ends) - 1) if true <= ends[n + 1])
    assert ends[number] <= found <= min(ends[number + 1], JOB_BOUNDS[-1])


@given(seconds, seconds)
def test_two_processes_add_up_to_one(first: list[float], second: list[float]) -> None:
    counters = [Counters(), Counters(), Counters()]
    for one in first:
        counters[0].looked_up(1, 1, one)
        counters[2].looked_up(1, 1, one)
    for one in second:
        counters[1].looked_up(1, 0, one)
        counters[2].looked_up(1, 0, one)
    both = counters[0].snapshot() + counters[1].snapshot()
    alone = counters[2].snapshot()
    assert both.latencies.keys() == alone.latencies.keys()
    assert buckets(both.latencies) == buckets(alone.latencies)
    assert both.latencies["lookup_seconds"] == pytest.approx(alone.latencies["lookup_seconds"])
    assert sum(buckets(both.latencies).values()) == len(first) + len(second)


def test_nothing_has_no_percentile() -> None:
    assert quantile({}, 0.5, JOB_BOUNDS) is None
    assert Latency(JOB_BOUNDS).values("load") == {}


def test_buckets_of_another_release_count_in_the_next_longer_one() -> None:
    assert quantile({"0.3": 4.0}, 1.0, JOB_BOUNDS) == 0.5
    assert quantile({"999": 4.0, "nonsense": 1.0}, 0.5, JOB_BOUNDS) == JOB_BOUNDS[-1]


def finished(kind: Any, outcomes: list[Outcome], moved: int, taken: float, codec: str = "") -> Job:
    class Batch:
        def __len__(self) -> int:
            return len(outcomes)

    job = Job(kind, Batch())  # type: ignore[arg-type]
    job.outcomes[:] = outcomes
    job.in_codec(codec)
    job.finish_part(moved)
    job.seconds = taken
    return job


@pytest.mark.parametrize(
    ("outcome", "moved", "timed"),
    [
        (Outcome.OK, 9, True),
        (Outcome.TIMEOUT, 0, True),
        (Outcome.FAILED, 0, True),
        (Outcome.PRESENT, 0, False),
        (Outcome.MISSING, 0, False),
        (Outcome.BUSY, 0, False),
        (Outcome.CANCELLED, 0, False),
    ],
)
def test_what_took_no_time_does_not_make_storage_look_fast(
    outcome: Outcome, moved: int, timed: bool
) -> None:
    counters = Counters()
    counters.job(finished("load", [outcome], moved, 0.2))
    assert bool(counters.snapshot().latencies) == timed


def test_a_job_of_several_codecs_is_mixed() -> None:
    job = finished("load", [Outcome.OK], 1, 0.1, "fp8")
    for name, shown in (("", "fp8"), ("fp8", "fp8"), ("raw", "mixed"), ("fp8", "mixed")):
        job.in_codec(name)
        assert job.codec == shown


def exported(home: Path) -> dict[str, Any]:
    found = snapshot(home)
    assert found is not None
    known = found

    class Exported:
        def collect(self) -> Any:
            return families(known)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exported())
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_store_times_its_jobs_and_lookups(
    tmp_path: Path, open_driver: Callable[..., StoreDriver]
) -> None:
    home = tmp_path / "home"
    driver = open_driver()
    publisher = StorePublisher(driver.block_store, home)
    driver.store(range(5))
    driver.store(range(5))  # there already
    driver.load(range(7))
    driver.lookup(range(3))
    driver.lookup(range(3))
    publisher.publish()
    for ended in (False, True):
        if ended:
            publisher.close()
        found = exported(home)
        for name, count in (
            ("lifeboat_node_tier_load_seconds", 1),
            ("lifeboat_node_tier_store_seconds", 1),
            ("lifeboat_node_lookup_seconds", 2),
        ):
            family = found[name]
            assert family.type == "histogram"
            by_end = {
                float(one.labels["le"]): one.value
                for one in family.samples
                if one.name == f"{name}_bucket"
            }
            values = [by_end[end] for end in sorted(by_end)]
            assert len(values) == len(BOUNDS[name.split("_")[-2]]) + 1
            assert values == sorted(values), "cumulative"
            assert values[-1] == count
            sums = {
                one.name: one for one in family.samples if one.name.endswith(("_sum", "_count"))
            }
            assert sums[f"{name}_count"].value == count
            assert sums[f"{name}_sum"].value > 0
        labels = found["lifeboat_node_tier_load_seconds"].samples[0].labels
        assert labels["tier"] == "local"
        assert labels["codec"] == "raw"
    again = snapshot(home)
    assert again is not None
    latency = overview(home, again, (), AgentFacts())["totals"]["latency"]
    assert latency["load"]["count"] == 1
    assert 0 < latency["lookup"]["p50_s"] <= latency["lookup"]["p99_s"]


def test_codecs_of_other_releases_are_one_series(tmp_path: Path) -> None:
    values = {
        "tier_load_bucket:fp8:0.005": 2,
        "tier_load_bucket:strange:0.005": 1,
        "tier_load_bucket:stranger:0.01": 3,
        "tier_load_seconds:strange": 0.5,
        "tier_load_bucket": 7,
    }
    entry = Registration(
        tmp_path,
        describe=lambda: {
            "kind": "store",
            "counters": [{"labels": {"tier": "nvme"}, "values": values}],
        },
    )
    samples = exported(tmp_path)["lifeboat_node_tier_load_seconds"].samples
    counts = {one.labels["codec"]: one.value for one in samples if one.name.endswith("_count")}
    assert counts == {"fp8": 2, "other": 11}
    entry.close()


def test_every_latency_is_a_metric() -> None:
    kinds = {info.counted.removeprefix("tier_") for info in METRICS if info.kind == "histogram"}
    assert kinds == set(BOUNDS)
    assert CounterSnapshot().latencies == {}
