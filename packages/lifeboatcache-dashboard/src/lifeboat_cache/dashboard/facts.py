"""What each page says, as plain values: templates show it, and it is the page's JSON twin."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lifeboat_cache.dashboard.history import (
    FIELDS,
    LEVELS,
    LOAD_BUCKETS,
    History,
    Samples,
    Span,
    sample_of,
)
from lifeboat_cache.dashboard.inventory import Contents
from lifeboat_cache.dashboard.source import View
from lifeboat_cache.latency import JOB_BOUNDS, quantile
from lifeboat_cache.registry import Counts
from lifeboat_cache.registry.health import remedy_of
from lifeboat_cache.registry.overview import latency_of
from lifeboat_cache.version import __version__ as core_version

__all__ = [
    "contents_facts",
    "history_facts",
    "medium_limit",
    "overview_facts",
    "processes_facts",
    "recovery_facts",
    "targets_facts",
]

#: What only whoever measures a target knows.
_MEASURED = (
    "used_bytes",
    "capacity_bytes",
    "free_bytes",
    "reserve_bytes",
    "blocks",
    "read_bytes_per_second",
    "evicted_bytes",
    "evicted_blocks",
    "reclaimed_bytes",
    "corrupt_blocks",
    "codecs",
)

_STORE_SUMS = (
    "lookups",
    "lookup_hits",
    "loaded_blocks",
    "loaded_bytes",
    "load_seconds",
    "stored_blocks",
    "stored_bytes",
    "store_seconds",
)


def _base(view: View) -> dict[str, Any]:
    document = view.document
    problems = [_problem(text) for text in document["problems"]]
    if view.problem:
        problems.insert(0, _problem(view.problem))
    return {
        "healthy": not problems,
        "problems": problems,
        "time": view.looked,
        "home": document["home"],
        "core": document["core"],
    }


def _problem(text: str) -> dict[str, str]:
    """A problem and, where it can be told apart, what to do about it."""
    what, colon, remedy = text.rpartition(": ")
    return {"text": text, "what": what if colon else text, "remedy": remedy if colon else ""}


def overview_facts(view: View, history: History, span: Span) -> dict[str, Any]:
    """What the first page says."""
    document = view.document
    totals = document["totals"]
    limit = medium_limit(document["targets"])
    processes = document["processes"]
    return {
        **_base(view),
        "engines": sum(item["role"] == "engine" for item in processes),
        "agent": document["agent"],
        "range": {"name": span.name, "title": span.title, "seconds": span.seconds},
        "in_range": _figures(_grown(history.read(span, time.time()))),
        "since_ever": _figures(sample_of(document)),
        "medium_bytes_per_second": limit,
        "codecs": _codecs(document),
        "not_stored": [
            {"reason": reason, "blocks": blocks, "remedy": remedy_of("store_dropped", reason)}
            for reason, blocks in totals["store_dropped"].items()
        ],
        "not_loaded": [
            {"reason": reason, "blocks": blocks, "remedy": remedy_of("load_failed", reason)}
            for reason, blocks in totals["load_failed"].items()
        ],
        "choices": _choices(processes),
        "space": {
            "used_bytes": _sum(document["targets"], "used_bytes"),
            "capacity_bytes": _sum(document["targets"], "capacity_bytes"),
        },
    }


def _choices(processes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which codec each engine uses and why; layouts that are treated alike are one."""
    found = {
        (item["pid"], str(one.get("codec")), str(one.get("reason"))): None
        for item in processes
        for one in _mappings(item["codecs"].get("choices"))
    }
    return [{"pid": pid, "codec": codec, "reason": reason} for pid, codec, reason in found]


def _figures(sums: Mapping[str, Any]) -> dict[str, float | None]:
    """What was gained, from sums over some time."""

    def value(name: str) -> float:
        found = sums.get(name, 0.0)
        return float(found) if isinstance(found, (int, float)) and math.isfinite(found) else 0.0

    raw, kept = value("encoded_raw_bytes"), value("encoded_bytes")
    asked, served = value("prompt_tokens"), value("served_tokens")
    loads = {name.rpartition("_")[2]: value(name) for name in LOAD_BUCKETS}
    return {
        "lookups": value("lookups"),
        "hit_rate": _ratio(value("lookup_hits"), value("lookups")),
        "prompt_tokens": asked,
        "served_tokens": served,
        "token_hit_rate": _ratio(min(served, asked), asked),
        # The rest of what was not computed the engine had in its own memory.
        "engine_hit_rate": _ratio(min(asked, max(0.0, value("cached_tokens") - served)), asked),
        "saved_seconds": value("saved_seconds") or None,
        "prefill_tokens_per_second": _ratio(value("prefill_tokens"), value("prefill_seconds")),
        "loads": sum(loads.values()),
        "load_p50_s": quantile(loads, 0.5, JOB_BOUNDS),
        "load_p99_s": quantile(loads, 0.99, JOB_BOUNDS),
        "loaded_bytes": value("loaded_bytes"),
        "loaded_blocks": value("loaded_blocks"),
        "stored_bytes": value("stored_bytes"),
        "block_seconds": _ratio(value("load_seconds"), value("loaded_blocks")),
        "restore_bytes_per_second": _ratio(value("loaded_bytes"), value("load_seconds")),
        "saved_bytes": max(0.0, raw - kept),
        "compression_ratio": _ratio(raw, kept),
    }


def _grown(samples: Samples) -> dict[str, float]:
    """What the sums have grown by; totals that were lost in between started again at 0."""
    if len(samples) < 2:
        return {}
    steps = np.diff(samples[:, 1:], axis=0)
    fallen = steps < 0
    steps = np.where(fallen, samples[1:, 1:], steps)
    grown = np.nansum(steps, axis=0)
    return {
        name: float(value)
        for name, value in zip(FIELDS, grown.tolist(), strict=True)
        if name not in LEVELS
    }


def medium_limit(targets: Sequence[Mapping[str, Any]]) -> float | None:
    """Bytes per second of the fastest target, as far as that was measured."""
    found = [target.get("read_bytes_per_second") for target in targets]
    known = [float(value) for value in found if isinstance(value, (int, float)) and value > 0]
    return max(known, default=None)


def _codecs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    errors: dict[str, dict[str, Any]] = {}
    for item in document["processes"]:
        for one in _mappings(item["codecs"].get("guard")):
            if not one.get("samples"):
                continue
            known = errors.setdefault(str(one.get("codec")), {"samples": 0, "ruled_out": False})
            known["samples"] += one["samples"] if isinstance(one["samples"], int) else 0
            known["ruled_out"] = known["ruled_out"] or bool(one.get("ruled_out"))
            for name in ("error", "attention", "output"):
                value = one.get(name)
                if isinstance(value, (int, float)):
                    known[name] = max(value, known.get(name, 0.0))
    found = []
    for codec, sums in document["totals"]["codecs"].items():
        guard = errors.get(codec, {})
        found.append(
            {
                "codec": codec,
                **sums,
                "samples": guard.get("samples", 0),
                "error": guard.get("error"),
                "attention_error": guard.get("attention"),
                "output_error": guard.get("output"),
                "ruled_out": guard.get("ruled_out", False),
            }
        )
    return found


def targets_facts(view: View) -> dict[str, Any]:
    """What the page of targets says."""
    document = view.document
    known = list(document["targets"])
    names = {target.get("name") for target in known}
    tiers = () if view.config is None else view.config.storage.tiers
    seen = _seen_by_engines(view)
    known += [
        {"name": name, "location": str(users[0]["location"]), **dict.fromkeys(_MEASURED)}
        for name, users in seen.items()
        if name not in names
    ]
    names |= set(seen)
    rows = [_target(target, view, seen.get(str(target.get("name")), [])) for target in known]
    rows += [
        {"name": tier.name, "location": tier.location, "state": "disabled", "reason": ""}
        for tier in tiers
        if not tier.enabled and tier.name not in names
    ]
    return {**_base(view), "targets": rows}


def _seen_by_engines(view: View) -> dict[str, list[dict[str, Any]]]:
    """By name of a target: what each engine that uses it says of it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in view.found.entries:
        if not entry.alive or entry.role == "agent":
            continue
        for one in _mappings(entry.document.get("targets")):
            queue = one.get("queue")
            queue = queue if isinstance(queue, Mapping) else {}
            found.setdefault(str(one.get("name")), []).append(
                {
                    "pid": entry.pid,
                    "location": str(one.get("location") or ""),
                    "type": str(one.get("type") or ""),
                    "rung": str(one.get("rung") or ""),
                    "state": str(one.get("state") or "unknown"),
                    "reason": str(one.get("reason") or ""),
                    "writing": bool(one.get("writing")),
                    "blocks": one.get("blocks"),
                    "queue_jobs": _int(queue.get("jobs")),
                    "queue_bytes": _int(queue.get("pending_bytes")),
                    "queue_limit_bytes": _int(queue.get("limit_bytes")),
                    # Of targets that can hang, which are kept by a mover.
                    "breaker": str(one.get("breaker") or ""),
                    "retry_s": one.get("retry_s"),
                    "timeout_s": one.get("timeout_s"),
                    "load_s": _pair(one.get("load_s")),
                    "store_s": _pair(one.get("store_s")),
                    "abandoned_bytes": one.get("abandoned_bytes"),
                }
            )
    return found


def _pair(value: Any) -> list[float] | None:
    fine = isinstance(value, list) and len(value) == 2
    return value if fine and all(isinstance(one, (int, float)) for one in value) else None


def _target(
    target: Mapping[str, Any], view: View, seen: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    name = str(target.get("name"))
    own, timed = Counts(), Counts()
    for labels, values in view.found.counts.groups():
        pairs = dict(labels)
        if pairs.get("target") == name and "namespace" in pairs:
            own.add({}, values)
        elif pairs == {"tier": name}:
            timed.add({}, values)
    sums = {key: own.total(key) for key in _STORE_SUMS}
    users = [item for item in view.document["processes"] if item["target"].get("name") == name]
    pids = sorted({item["pid"] for item in users} | {item["pid"] for item in seen})
    # Engines of older releases say what waits for all of their targets together.
    waiting = seen or [
        {
            "queue_jobs": _int(item["queue"].get("jobs")),
            "queue_bytes": _int(item["queue"].get("pending_bytes")),
            "queue_limit_bytes": _int(item["queue"].get("limit_bytes")),
        }
        for item in users
    ]
    used, capacity = target.get("used_bytes"), target.get("capacity_bytes")
    state = "ready"
    reason = str(target.get("problem") or "")
    refused = next((item["reason"] for item in seen if item["reason"]), "")
    if reason or refused:
        state, reason = "failing", reason or refused
    elif used is None:
        state, reason = "unknown", "it has not been measured yet"
    return {
        **target,
        "state": state,
        "reason": reason,
        "used_part": _ratio(used, capacity),
        "type": next((item["type"] for item in seen if item["type"]), ""),
        "rung": next((item["rung"] for item in seen if item["rung"]), ""),
        "engines": pids,
        "seen_by": list(seen),
        **{
            name: sum(item[name] for item in waiting)
            for name in ("queue_jobs", "queue_bytes", "queue_limit_bytes")
        },
        **sums,
        "latency": latency_of(timed),
        "hit_rate": _ratio(sums["lookup_hits"], sums["lookups"]),
        "load_block_seconds": _ratio(sums["load_seconds"], sums["loaded_blocks"]),
        "store_block_seconds": _ratio(sums["store_seconds"], sums["stored_blocks"]),
        "restore_bytes_per_second": _ratio(sums["loaded_bytes"], sums["load_seconds"]),
        "store_bytes_per_second": _ratio(sums["stored_bytes"], sums["store_seconds"]),
        "store_outcomes": own.parts("store_outcome"),
        "load_outcomes": own.parts("load_outcome"),
    }


def contents_facts(view: View, contents: Contents) -> dict[str, Any]:
    """What the page of contents says."""
    targets = [
        {
            "name": held.name,
            "location": held.location,
            "enabled": held.enabled,
            "there": held.there,
            "problem": held.problem,
            "bytes": sum(space["bytes"] for space in held.namespaces),
            "blocks": sum(space["blocks"] for space in held.namespaces),
            "namespaces": list(held.namespaces),
        }
        for held in contents.targets
    ]
    return {**_base(view), "looked": contents.looked, "targets": targets}


def recovery_facts(view: View) -> dict[str, Any]:
    """What the page of recovery says."""
    blocks = {target.get("name"): target.get("blocks") for target in view.document["targets"]}
    rows = []
    for item in view.document["processes"]:
        recovery = item["recovery"]
        if not recovery:
            continue
        target = item["target"].get("name")
        expected = blocks.get(target)
        found = recovery.get("blocks")
        rows.append(
            {
                **_who(item),
                "target": target,
                "namespace": item["namespace"].get("name"),
                "model": item["namespace"].get("model"),
                "done": bool(recovery.get("done")),
                "blocks": found,
                "expected_blocks": expected,
                "part": _ratio(found, expected),
                "seconds": recovery.get("seconds"),
                "bad_entries": recovery.get("bad_entries"),
                "indexed_blocks": item["index"].get("blocks"),
            }
        )
    return {**_base(view), "processes": rows}


def processes_facts(view: View) -> dict[str, Any]:
    """What the page of processes says."""
    document = view.document
    agent = document["agent"]
    rows = [
        {
            **_who(item),
            "namespace": item["namespace"].get("name"),
            "model": item["namespace"].get("model"),
            "target": item["target"].get("name"),
            "blocks": item["index"].get("blocks"),
            "hit_rate": item["counts"]["hit_rate"],
            "served_tokens": item["counts"]["served_tokens"],
            "loaded_bytes": item["counts"]["loaded_bytes"],
            "stored_bytes": item["counts"]["stored_bytes"],
            "queue_bytes": item["queue"].get("pending_bytes"),
            "codecs": [
                {"codec": one.get("codec"), "reason": one.get("reason")}
                for one in _mappings(item["codecs"].get("choices"))
            ],
            "restart": [str(key) for key in item["config"].get("restart") or ()],
            "config_problem": item["config"].get("problem") or "",
        }
        for item in document["processes"]
    ]
    return {
        **_base(view),
        "agent": None if agent is None else _who(agent),
        "processes": rows,
        "distributions": _distributions(),
    }


def _who(item: Mapping[str, Any]) -> dict[str, Any]:
    engine = item.get("engine") or {}
    core = str(item["core"])
    return {
        "pid": item["pid"],
        "host": item["host"],
        "role": item["role"],
        "engine": engine.get("name") or "",
        "engine_version": engine.get("version") or "",
        "core": core,
        "fits": _fits(core),
        "started": item["started"],
        "up_s": item["up_s"],
        "heartbeat_s": item["heartbeat_s"],
        "state": item["state"],
        "reason": item["reason"],
    }


def _fits(core: str) -> bool:
    """Whether a process's core reads what this one writes, and the other way round."""
    return core.split(".")[:2] == core_version.split(".")[:2]


def _distributions() -> list[dict[str, Any]]:
    """The distributions installed beside the dashboard."""
    return _installed(int(time.monotonic() // 60))


@functools.lru_cache(maxsize=1)
def _installed(_minute: int) -> list[dict[str, Any]]:
    # An engine's environment has hundreds of distributions: looking takes a tenth of a second.
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith("lifeboatcache"):
            found.setdefault(name, distribution.version)
    found.setdefault("lifeboatcache-core", core_version)
    return [
        {"name": name, "version": version, "fits": _fits(version)}
        for name, version in sorted(found.items())
    ]


def history_facts(history: History, span: Span) -> dict[str, Any]:
    """Samples of a span; what is not known is null."""
    samples = history.read(span, time.time())
    rows = [[value if math.isfinite(value) else None for value in row] for row in samples.tolist()]
    return {
        "range": span.name,
        "step_seconds": span.step_s,
        "fields": ["time", *FIELDS],
        "samples": rows,
    }


def _ratio(part: Any, whole: Any) -> float | None:
    if isinstance(part, (int, float)) and isinstance(whole, (int, float)) and whole > 0:
        return float(part) / float(whole)
    return None


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _sum(items: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A sum, if it is known of all."""
    values = [item.get(name) for item in items]
    known = [float(value) for value in values if isinstance(value, (int, float))]
    return sum(known) if known and len(known) == len(values) else None


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
