"""docs/vllm.md and docs/metrics.md say what the adapter does."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from agents import agent_home
from long_prompt import long_prompt
from messages import engine_messages, found_in
from vllm_server import StartServer

from lifeboat_cache.agent import agent_status
from lifeboat_cache.integrations.vllm_memory import size_cpu_tier
from lifeboat_cache.integrations.vllm_metrics import TierMetrics
from lifeboat_cache.integrations.vllm_versions import TESTED
from lifeboat_cache.interface import Outcome
from lifeboat_cache.registry import metrics as node_metrics

DOCS = Path(__file__).parents[1] / "docs"
VLLM = (DOCS / "vllm.md").read_text()
METRICS = (DOCS / "metrics.md").read_text()


def rows(page: str, header: str) -> list[list[str]]:
    """Cells of the table that begins with a header line."""
    lines = page[page.index(header) :].splitlines()
    table = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    assert table
    return table


def explicit() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(VLLM.split("```json")[1].split("```")[0])
    return found


def test_every_metric_is_in_the_table_as_it_is_defined() -> None:
    shown = {
        name.strip("`"): (kind, [label.strip("`") for label in labels.split() if label], text)
        for name, kind, labels, text in rows(METRICS, "| metric | type | labels |")
    }
    defined = {}
    for name, one in TierMetrics.definitions().items():
        kind = next(
            kind for kind in ("counter", "gauge", "histogram") if kind in type(one).__name__.lower()
        )
        defined[f"{name}_total" if kind == "counter" else name] = (
            kind,
            list(one.labelnames or ()),
            one.documentation,
        )
    assert shown == defined


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_no_page_names_a_metric_that_is_not_there(page: Path) -> None:
    known = {
        *TierMetrics.definitions(),
        *(info.name.removesuffix("_total") for info in node_metrics.METRICS),
    }
    for name in re.findall(r"\blifeboat_(?!cache|entry|vllm|test)\w+", page.read_text()):
        # A histogram is three series.
        plain = re.sub(r"_(total|bucket|sum|count)$", "", name)
        assert plain in known or name in ("lifeboat_", "lifeboat_node_"), name


def test_every_outcome_is_explained() -> None:
    shown = {cells[0].strip("`") for cells in rows(METRICS, "| `reason` | of a store |")}
    told = {outcome.name.lower() for outcome in Outcome if not outcome.good}
    assert shown == told - {"pending"}


@pytest.mark.parametrize("cells", rows(VLLM, "| free in /dev/shm | CPU tier |"), ids=str)
def test_the_memory_table_is_what_the_rule_gives(cells: list[str]) -> None:
    number, unit = cells[0].split()[:2]
    free = int(number) * {"MiB": 1 << 20, "GiB": 1 << 30}[unit]
    limits = {"free space in /dev/shm": free, "available memory": 1 << 40}
    given = size_cpu_tier(20_000_000_000, 1, limits).bytes
    assert cells[1] == (f"{given / 1e9:.1f} GB" if given else "none: stands down")


def test_the_lines_at_the_start_are_what_is_logged() -> None:
    blocks = "".join(VLLM.split("```")[1::2])
    lines = re.findall(r"^LifeboatCache.*$", blocks, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        assert any(found_in(message, line) for message in engine_messages()), line


def test_the_tested_versions_are_those_of_the_code() -> None:
    shown = [cells[0] for cells in rows(VLLM, "| vLLM | what was run |")]
    assert [tuple(map(int, version.split(".")[:2])) for version in shown] == list(TESTED)


def test_the_explicit_configuration_names_the_tier_by_its_public_path() -> None:
    (tier,) = explicit()["kv_connector_extra_config"]["secondary_tiers"]
    assert tier == {
        "type": "LifeboatTier",
        "module_path": "lifeboat_cache.integrations.vllm_tier",
    }


@pytest.mark.engine
@pytest.mark.full
def test_the_explicit_configuration_works_as_written(
    start_server: StartServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel_home: Path,
) -> None:
    transfer = explicit()
    # This machine may have less memory than a server's.
    transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = 500_000_000
    prompt = long_prompt(14)
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        options = {
            "env": {"LIFEBOAT_CACHE_HOME": str(home)},
            "args": ["--kv-transfer-config", json.dumps(transfer), "--shutdown-timeout", "20"],
        }
        first = start_server(**options)
        assert first.complete(prompt).cached_tokens == 0
        first.stop(signal.SIGTERM)
        second = start_server(**options)
        assert second.complete(prompt).cached_tokens == 1024
        assert second.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") == 1024
        assert agent_status(home).alive
        second.stop(signal.SIGTERM)
