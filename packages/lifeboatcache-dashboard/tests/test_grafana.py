"""The Grafana dashboard asks for names, labels and label values that are really exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from published import MadeUpHome, agent_facts, engine_facts

import lifeboat_cache.dashboard
from lifeboat_cache.registry.metrics import METRICS, families
from lifeboat_cache.registry.totals import snapshot

FILE = Path(lifeboat_cache.dashboard.__file__).parent / "grafana/lifeboatcache.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())

KNOWN = {f"{info.name}_bucket" if info.kind == "histogram" else info.name: info for info in METRICS}


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


#: A metric, what is in braces behind it, and the range.
SELECTOR = re.compile(r"(lifeboat_\w+)(?:\{([^}]*)\})?(\[[^\]]*\])?")
AGGREGATION = re.compile(r"by \(([^)]*)\) \((?:rate\()?(lifeboat_\w+)")


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_every_query_asks_for_what_is_exported(query: str, made: MadeUpHome, home: Path) -> None:
    counts = {"store_outcome:busy": 3, "load_outcome:corrupt": 1}
    made.publish(engine_facts(counts=counts))
    made.publish(agent_facts(), "agent")
    found = snapshot(home)
    assert found is not None
    known = found

    class Exported:
        def collect(self) -> Any:
            return families(known)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exported())
    samples = [
        sample
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    assert query.count("(") == query.count(")")
    selectors = SELECTOR.findall(query)
    assert selectors
    for name, braces, span in selectors:
        assert name in KNOWN, name
        # Rates are of what only grows, and that is only asked for as a rate.
        assert (KNOWN[name].kind != "gauge") == (span == "[$__rate_interval]"), name
        matchers = re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', braces)
        assert {label for label, _, _ in matchers} <= set(KNOWN[name].labels), name
        assert any(
            sample.name == name and all(fits(sample.labels[label], how, value)
                                        for label, how, value in matchers)
            for sample in samples
        ), f"nothing is exported for {name}{{{braces}}}"  # fmt: skip
    for labels, name in AGGREGATION.findall(query):
        info = KNOWN[name]
        known_labels = {*info.labels, *(["le"] if info.kind == "histogram" else [])}
        assert set(labels.split(", ")) <= known_labels, query
    if "_bucket" in query:
        assert query.startswith("histogram_quantile(")
        assert "sum by (le" in query


def fits(value: str, how: str, wanted: str) -> bool:
    if wanted.startswith("$"):
        return True
    same = bool(re.fullmatch(wanted, value))
    return same if how in ("=", "=~") else not same


def test_it_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["title"]
        assert panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panels, DASHBOARD["templating"]])))
    assert used - {"__rate_interval", "__all"} <= names
    for one in DASHBOARD["templating"]["list"][1:]:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["query"]["query"])
        assert match is not None
        assert match[2] in KNOWN[match[1]].labels


def test_it_shows_every_histogram_and_count_of_tokens() -> None:
    asked = " ".join(queries())
    for name, info in KNOWN.items():
        if info.kind == "histogram" or "_tokens_" in name or "saved_seconds" in name:
            assert name in asked or "prefill" in name, name
