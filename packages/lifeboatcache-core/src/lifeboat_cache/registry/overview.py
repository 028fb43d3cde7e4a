"""Everything about a home directory that ``lifeboat-cache status`` shows, as one document."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifeboat_cache.codecs.names import CODEC_NAMES
from lifeboat_cache.latency import BOUNDS, quantile
from lifeboat_cache.registry.counts import Counts
from lifeboat_cache.registry.document import NOT_DROPPED, TOKEN_COUNTS
from lifeboat_cache.registry.health import agent_of, problems
from lifeboat_cache.registry.processes import ProcessEntry
from lifeboat_cache.registry.totals import Snapshot
from lifeboat_cache.version import __version__

__all__ = ["AgentFacts", "latency_of", "overview"]

_SUMS = (
    "lookups",
    "lookup_hits",
    *TOKEN_COUNTS,
    "loaded_blocks",
    "loaded_bytes",
    "load_seconds",
    "stored_blocks",
    "stored_bytes",
    "store_seconds",
    "bad_journal_entries",
)
_CODEC_SUMS = (
    "encoded_blocks",
    "encoded_raw_bytes",
    "encoded_bytes",
    "decoded_blocks",
    "decoded_raw_bytes",
    "decoded_bytes",
)
_TARGET_SUMS = ("evicted_blocks", "evicted_bytes", "reclaimed_bytes", "corrupt_blocks")


@dataclass(frozen=True)
class AgentFacts:
    """What is known of the agent apart from its entry.

    Attributes
    ----------
    expected
        Whether there should be one while engines run.
    reason
        Why there is none; empty if unknown.
    """

    expected: bool = True
    reason: str = ""


def overview(
    home: Path,
    found: Snapshot,
    targets: Sequence[Mapping[str, Any]],
    agent: AgentFacts,
    config_problem: str = "",
) -> dict[str, Any]:
    """Return the document.

    Parameters
    ----------
    home
        The home directory.
    found
        All processes and counts.
    targets
        Targets as in an agent's document; those of the living agent by default.
    agent
        What else is known of the agent.
    config_problem
        Why the configuration that was found here cannot be used.
    """
    now = time.time()
    living = [entry for entry in found.entries if entry.alive]
    wrong = problems(
        living, targets, now=now, agent_expected=agent.expected, agent_reason=agent.reason
    )
    # Whoever runs with it has said so already.
    if config_problem and not any(config_problem in text for text in wrong):
        wrong.insert(0, f"the configuration cannot be used: {config_problem}")
    return {
        "healthy": not wrong,
        "problems": wrong,
        "time": now,
        "home": str(home),
        "core": __version__,
        "agent": _agent(agent_of(living), now),
        "processes": [_store(entry, now) for entry in living if entry.role != "agent"],
        "targets": [_target(target, found.counts) for target in targets],
        "totals": _totals(found),
    }


def _process(entry: ProcessEntry, now: float) -> dict[str, Any]:
    return {
        "pid": entry.pid,
        "host": entry.host,
        "role": entry.role,
        "core": entry.core,
        "started": entry.started,
        "up_s": max(0.0, now - entry.started) if entry.started else None,
        "heartbeat_s": entry.age if entry.document else None,
        "state": str(entry.document.get("state") or "unknown"),
        "reason": str(entry.document.get("reason") or ""),
    }


def _agent(entry: ProcessEntry | None, now: float) -> dict[str, Any] | None:
    if entry is None:
        return None
    own = _mapping(entry.document.get("agent"))
    return {**_process(entry, now), "dashboard": _mapping(own.get("dashboard"))}


def _store(entry: ProcessEntry, now: float) -> dict[str, Any]:
    parts = (
        "engine",
        "namespace",
        "target",
        "index",
        "queue",
        "recovery",
        "recent",
        "codecs",
        "config",
    )
    return {
        **_process(entry, now),
        **{name: _mapping(entry.document.get(name)) for name in parts},
        "targets": _items(entry.document.get("targets")),
        "counts": _sums(entry.counts),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _sums(counts: Counts) -> dict[str, Any]:
    sums: dict[str, Any] = {name: counts.total(name) for name in _SUMS}
    sums["hit_rate"] = _rate(sums["lookup_hits"], sums["lookups"])
    sums["token_hit_rate"] = _rate(sums["served_tokens"], sums["prompt_tokens"])
    for name, kind in (("store_dropped", "store_outcome"), ("load_failed", "load_outcome")):
        outcomes = counts.parts(kind)
        sums[name] = {
            reason: count
            for reason, count in sorted(outcomes.items())
            if count and reason not in NOT_DROPPED
        }
    sums["codecs"] = _codecs(counts)
    sums["latency"] = latency_of(counts)
    return sums


def latency_of(counts: Counts) -> dict[str, dict[str, Any]]:
    """By what is timed: how many there were, and their percentiles; over tiers and codecs."""
    out: dict[str, dict[str, Any]] = {}
    for kind, name in (("load", "tier_load"), ("store", "tier_store"), ("lookup", "lookup")):
        buckets: dict[str, float] = {}
        for tail, count in counts.parts(f"{name}_bucket").items():
            end = tail.rpartition(":")[2]
            buckets[end] = buckets.get(end, 0) + count
        if buckets:
            out[kind] = {
                "count": sum(buckets.values()),
                "p50_s": quantile(buckets, 0.5, BOUNDS[kind]),
                "p99_s": quantile(buckets, 0.99, BOUNDS[kind]),
                "buckets": buckets,
            }
    return out


def _codecs(counts: Counts) -> dict[str, dict[str, float]]:
    """By codec: what has gone through it; ``ratio`` is bytes of KV per stored byte."""
    found = {name: counts.parts(name) for name in _CODEC_SUMS}
    used = [name for name in CODEC_NAMES if any(name in values for values in found.values())]
    out: dict[str, dict[str, float]] = {}
    for codec in used:
        sums = {name: values.get(codec, 0) for name, values in found.items()}
        stored = sums["encoded_bytes"] or sums["decoded_bytes"]
        raw = sums["encoded_raw_bytes"] if sums["encoded_bytes"] else sums["decoded_raw_bytes"]
        out[codec] = {**sums, "ratio": raw / stored if stored else 1.0}
    return out


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _totals(found: Snapshot) -> dict[str, Any]:
    everything = Counts()
    for part in (found.counts, found.retired):
        everything.merge(part)
    return {
        **_sums(everything),
        **{name: everything.total(name) for name in _TARGET_SUMS},
    }


def _target(target: Mapping[str, Any], counts: Counts) -> dict[str, Any]:
    own, timed = Counts(), Counts()
    for labels, values in counts.groups():
        if dict(labels) == {"target": target.get("name")}:
            own.add(dict(labels), values)
        elif dict(labels) == {"tier": target.get("name")}:
            timed.add(dict(labels), values)
    return {
        **target,
        **{name: own.total(name) for name in _TARGET_SUMS},
        "latency": latency_of(timed),
    }
