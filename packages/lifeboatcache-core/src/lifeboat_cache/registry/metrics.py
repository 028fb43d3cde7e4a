"""Metrics of all processes of a home directory, as Prometheus takes them.

Names begin with ``lifeboat_node_``: engines show counts of their own, with names that
begin with ``lifeboat_``, on their own port.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lifeboat_cache.codecs.names import CODEC_NAMES
from lifeboat_cache.job import MIXED
from lifeboat_cache.latency import BOUNDS, bucket_of
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.registry.health import agent_of, living_stores, problems
from lifeboat_cache.registry.processes import ProcessEntry
from lifeboat_cache.registry.totals import OTHER, Snapshot
from lifeboat_cache.s3.errors import Fault
from lifeboat_cache.s3.traffic import VERBS

__all__ = ["METRICS", "MetricInfo", "families"]

_PREFIX = "lifeboat_node_"
_STORE = ("namespace", "engine", "target")
_TARGET = ("target",)
_TARGET_CODEC = ("target", "codec")
_ENGINE = ("engine",)
_TARGET_VERB = ("target", "verb")
_TARGET_KIND = ("target", "kind")
_TIER = ("tier",)
_TIER_CODEC = ("tier", "codec")
_TIER_OUTCOME = ("tier", "outcome")
_TIER_REASON = ("tier", "reason")
_OUTCOME = (*_STORE, "outcome")
_CODEC = (*_STORE, "codec")

#: What a count is shown by, beside its store: only these values.
_SPLITS = {
    "outcome": frozenset(outcome.name.lower() for outcome in Outcome),
    "codec": frozenset(CODEC_NAMES) | {MIXED, "unknown"},
    "reason": frozenset({"queue", "closed", "gone"}) | {one.name.lower() for one in Outcome},
    "verb": frozenset(VERBS),
    "kind": frozenset(fault.value for fault in Fault),
}

#: One sample: the values of its labels, and its own.
_Samples = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class MetricInfo:
    """One metric.

    Attributes
    ----------
    name
        As Prometheus shows it.
    kind, labels, meaning
        Its type, its labels and what it says.
    counted
        Which count it shows (see :class:`Counts`); empty for a gauge. One that ends in
        ``:`` is shown by its last label. Of a histogram how the names of its counts begin.
    bounds
        Of a histogram: where its buckets end.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    counted: str = ""
    bounds: tuple[float, ...] = ()


def _counter(counted: str, labels: tuple[str, ...], meaning: str) -> MetricInfo:
    name = counted.removesuffix(":")
    if labels and labels[-1] == "outcome":
        name += "s"
    return MetricInfo(f"{_PREFIX}{name}_total", "counter", labels, meaning, counted)


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> MetricInfo:
    return MetricInfo(f"{_PREFIX}{name}", "gauge", labels, meaning)


def _histogram(name: str, labels: tuple[str, ...], meaning: str) -> MetricInfo:
    bounds = BOUNDS[name.rpartition("_")[2]]
    return MetricInfo(f"{_PREFIX}{name}_seconds", "histogram", labels, meaning, name, bounds)


_COUNTERS = (
    _counter("lookups", _STORE, "Blocks asked for."),
    _counter("lookup_hits", _STORE, "Blocks asked for and found."),
    _counter("prompt_tokens", _STORE, "Tokens of the prompts that engines were asked."),
    _counter("cached_tokens", _STORE, "Of these, not computed, whoever kept their KV."),
    _counter("served_tokens", _STORE, "Prompt tokens whose KV was loaded and not computed."),
    _counter("saved_seconds", _STORE, "Seconds that engines would have computed these."),
    _counter("prefill_tokens", _STORE, "Tokens of the prefills from which that is known."),
    _counter("prefill_seconds", _STORE, "Seconds that these took."),
    _counter("loaded_blocks", _STORE, "Blocks read and verified."),
    _counter("loaded_bytes", _STORE, "Bytes read and verified."),
    _counter("load_seconds", _STORE, "Seconds from submission to completion, over load jobs."),
    _counter("stored_blocks", _STORE, "Blocks written."),
    _counter("stored_bytes", _STORE, "Bytes written."),
    _counter("store_seconds", _STORE, "Seconds from submission to completion, over store jobs."),
    _counter("load_outcome:", _OUTCOME, "Blocks to be loaded, by what became of them."),
    _counter("store_outcome:", _OUTCOME, "Blocks to be stored, by what became of them."),
    _counter("encoded_blocks:", _CODEC, "Blocks written, by codec."),
    _counter("encoded_raw_bytes:", _CODEC, "Bytes of KV in them."),
    _counter("encoded_bytes:", _CODEC, "Bytes that they take."),
    _counter("decoded_blocks:", _CODEC, "Blocks read, by codec."),
    _counter("decoded_raw_bytes:", _CODEC, "Bytes of KV in them."),
    _counter("decoded_bytes:", _CODEC, "Bytes that were read for them."),
    _counter("recovered_blocks", _STORE, "Blocks that stores found when they were opened."),
    _counter("recovery_seconds", _STORE, "Seconds that stores took to find them."),
    _counter("bad_journal_entries", _STORE, "Journal entries that were skipped as damaged."),
    _counter("tier_stored_blocks", _TIER, "Blocks that stores wrote to the tier."),
    _counter("tier_stored_bytes", _TIER, "Bytes of KV in them."),
    _counter("tier_written_bytes", _TIER, "Bytes that they take there, in their codecs."),
    _counter("tier_loaded_blocks", _TIER, "Blocks that stores read from the tier."),
    _counter("tier_loaded_bytes", _TIER, "Bytes of KV in them."),
    _counter("tier_read_bytes", _TIER, "Bytes that were read for them."),
    _counter("tier_store_outcome:", _TIER_OUTCOME, "Blocks offered to the tier, by outcome."),
    _counter("tier_load_outcome:", _TIER_OUTCOME, "Blocks asked of the tier, by outcome."),
    _counter("tier_copied_blocks", _TIER, "Blocks copied to the tier from others."),
    _counter("tier_copied_bytes", _TIER, "Bytes of KV in them."),
    _counter("tier_copies_dropped:", _TIER_REASON, "Copies from the tier that were not made."),
    _counter("tier_left", _TIER, "Times that stores have given the tier up."),
    _counter("evicted_blocks", _TARGET, "Blocks evicted to make room."),
    _counter("expired_blocks", _TARGET, "Blocks deleted because of eviction.max_age."),
    _counter("evicted_bytes", _TARGET, "Bytes of blocks evicted to make room."),
    _counter("corrupt_blocks", _TARGET, "Blocks that the agent found corrupt."),
    _counter("reclaimed_bytes", _TARGET, "Bytes given back to the file system."),
    _counter("removed_segments", _TARGET, "Segments removed."),
    _counter("compacted_segments", _TARGET, "Segments rewritten for the few blocks still in use."),
    _counter("compacted_bytes", _TARGET, "Bytes copied by that."),
    _counter("janitor_passes", _TARGET, "Times that the agent looked for space to reclaim."),
    _counter("janitor_seconds", _TARGET, "Seconds that took."),
    _counter("janitor_requests:", _TARGET_VERB, "Requests to a bucket meanwhile."),
    _counter("s3_requests:", _TARGET_VERB, "Requests sent to the object store, by verb."),
    _counter("s3_errors:", _TARGET_KIND, "Answers of it that were errors, or none, by kind."),
    _counter("s3_sent_bytes", _TARGET, "Bytes sent to it."),
    _counter("s3_received_bytes", _TARGET, "Bytes received from it."),
    _counter("s3_uploaded_segments", _TARGET, "Segments uploaded to it."),
)

_GAUGES = (
    _gauge("healthy", (), "1 if `lifeboat-cache status` finds nothing wrong, 0 otherwise."),
    _gauge("processes", ("role", "core"), "Open stores and agents, by role and version."),
    _gauge("stores", ("state",), "Open stores by state."),
    _gauge("silence_seconds", ("role",), "Longest time since one of them published, in seconds."),
    _gauge("index_blocks", _STORE, "Blocks known to be there, in the store that knows most."),
    _gauge("queue_jobs", _STORE, "Jobs under way."),
    _gauge("queue_bytes", _STORE, "Bytes that wait to be written."),
    _gauge("tier_usable", _TIER, "1 if every open store can use the tier, 0 otherwise."),
    _gauge("tier_writing", _TIER, "Open stores whose new blocks go to the tier."),
    _gauge("tier_blocks", _TIER, "Blocks known to be on it, in the store that knows most."),
    _gauge("tier_queue_jobs", _TIER, "Jobs of the tier under way."),
    _gauge("tier_queue_bytes", _TIER, "Bytes that wait to be written to it."),
    _gauge("tier_copies_queued", _TIER, "Blocks that wait to be copied from it."),
    _gauge("codec_error", _CODEC, "Mean relative error of the KV that codecs restore, sampled."),
    _gauge("codec_attention_error", _CODEC, "Mean part of attention that goes elsewhere, sampled."),
    _gauge("codec_output_error", _CODEC, "Mean relative error of what attention gives, sampled."),
    _gauge("codec_ruled_out", _CODEC, "Layouts for which the accuracy guard has stopped it."),
    _gauge("target_used_bytes", _TARGET, "Bytes that the target's files take."),
    _gauge("target_capacity_bytes", _TARGET, "Bytes that they may take, where there is a limit."),
    _gauge("target_free_bytes", _TARGET, "Bytes free on the target's file system."),
    _gauge("target_reserve_bytes", _TARGET, "Bytes that must stay free there."),
    _gauge("target_blocks", _TARGET, "Blocks stored on the target."),
    _gauge("target_codec_blocks", _TARGET_CODEC, "Blocks stored on the target, by codec."),
    _gauge("target_codec_raw_bytes", _TARGET_CODEC, "Bytes of KV in them."),
    _gauge("target_codec_bytes", _TARGET_CODEC, "Bytes that are stored for them."),
    _gauge("target_read_bytes_per_second", _TARGET, "What the target delivers, measured."),
    _gauge("target_staged_bytes", _TARGET, "Bytes that wait to be uploaded to the bucket."),
    _gauge("target_breaker_open", _TARGET, "Stores that do not use the target for now."),
    _gauge("target_abandoned_bytes", _TARGET, "Bytes of jobs given up that it may still touch."),
    _gauge("target_load_seconds", _TARGET, "Seconds that 99 of 100 transfers from it take."),
    _gauge("target_store_seconds", _TARGET, "Seconds that 99 of 100 transfers to it take."),
    _gauge("target_usable", _TARGET, "1 if the agent can look after the target, 0 otherwise."),
    _gauge("namespace_info", ("namespace", "engine", "model"), "1 for each namespace in use."),
)

_HISTOGRAMS = (
    _histogram("tier_load", _TIER_CODEC, "Load jobs of the tier, from submission to completion."),
    _histogram("tier_store", _TIER_CODEC, "Store jobs of the tier, from submission to completion."),
    _histogram("lookup", _ENGINE, "Lookups of the blocks of a request."),
)

#: Every metric, in the order in which they are shown.
METRICS = _GAUGES + _COUNTERS + _HISTOGRAMS


def families(snapshot: Snapshot) -> list[Metric]:
    """All metrics with their samples now; those without any are left out."""
    gauges = _gauges(snapshot.entries, _kept(snapshot))
    out: list[Metric] = []
    for info in METRICS:
        if info.kind == "histogram":
            out += _timed(info, snapshot)
            continue
        samples = gauges.get(info.name) if info.kind == "gauge" else _counts(info, snapshot)
        if not samples:
            continue
        # Prometheus adds the ending of a counter itself.
        family = (
            GaugeMetricFamily(info.name, info.meaning, labels=info.labels)
            if info.kind == "gauge"
            else CounterMetricFamily(
                info.name.removesuffix("_total"), info.meaning, labels=info.labels
            )
        )
        for labels, value in samples.items():
            family.add_metric(labels, value)
        out.append(family)
    return out


def _counts(info: MetricInfo, snapshot: Snapshot) -> _Samples:
    split = info.counted.endswith(":")
    names = sorted(info.labels[:-1] if split else info.labels)
    last = info.labels[-1] if info.labels else ""
    samples: dict[tuple[str, ...], float] = defaultdict(float)
    for pairs, values in snapshot.counts.groups():
        labels = dict(pairs)
        if sorted(labels) != names:
            continue
        for name, value in values.items():
            if not split:
                if name == info.counted:
                    samples[tuple(labels[label] for label in info.labels)] += value
            elif name.startswith(info.counted):
                value_of = name.removeprefix(info.counted)
                labels[last] = value_of if value_of in _SPLITS[last] else OTHER
                samples[tuple(labels[label] for label in info.labels)] += value
    return samples


def _timed(info: MetricInfo, snapshot: Snapshot) -> list[Metric]:
    """A histogram, if anything of it was counted."""
    split = info.labels[-1] in _SPLITS
    names = info.labels[:-1] if split else info.labels
    buckets: dict[tuple[str, ...], list[float]] = {}
    seconds: dict[tuple[str, ...], float] = defaultdict(float)
    for pairs, values in snapshot.counts.groups():
        labels = dict(pairs)
        if sorted(labels) != sorted(names):
            continue
        for name, value in values.items():
            kind, *parts = name.split(":")
            if kind not in (f"{info.counted}_bucket", f"{info.counted}_seconds"):
                continue
            if split:
                part = parts.pop(0) if parts else ""
                labels[info.labels[-1]] = part if part in _SPLITS[info.labels[-1]] else OTHER
            key = tuple(labels[label] for label in info.labels)
            if kind.endswith("_seconds"):
                seconds[key] += value
            else:
                row = buckets.setdefault(key, [0.0] * (len(info.bounds) + 1))
                row[bucket_of(parts[0] if parts else "", info.bounds)] += value
    if not buckets:
        return []
    family = HistogramMetricFamily(info.name, info.meaning, labels=info.labels)
    ends = [*(f"{bound:g}" for bound in info.bounds), "+Inf"]
    for key, row in buckets.items():
        sums = [sum(row[: number + 1]) for number in range(len(row))]
        family.add_metric(key, list(zip(ends, sums, strict=True)), seconds[key])
    return [family]


def _kept(snapshot: Snapshot) -> set[str]:
    """Namespaces that have labels of their own."""
    return {
        value
        for pairs, _ in snapshot.counts.groups()
        for name, value in pairs
        if name == "namespace"
    }


def _gauges(entries: Sequence[ProcessEntry], namespaces: set[str]) -> dict[str, _Samples]:
    living = [entry for entry in entries if entry.alive]
    stores = living_stores(entries)
    agent = agent_of(entries)
    targets = _list(agent.document.get("targets")) if agent is not None else []
    tally: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)

    def put(
        name: str,
        labels: tuple[str, ...],
        value: Any,
        join: Callable[[float, float], float] = lambda a, b: a + b,
    ) -> None:
        if isinstance(value, (int, float)):
            samples = tally[f"{_PREFIX}{name}"]
            samples[labels] = join(samples[labels], value) if labels in samples else value

    put("healthy", (), int(not problems(entries, targets, now=time.time())))
    for entry in living:
        put("processes", (entry.role or "unknown", entry.core or "unknown"), 1)
        if entry.document:
            put("silence_seconds", (entry.role or "unknown",), entry.age, max)
    for entry in stores:
        document = entry.document
        put("stores", (str(document.get("state") or "unknown"),), 1)
        labels = _labels(document, namespaces)
        put("index_blocks", labels, _dict(document.get("index")).get("blocks"), max)
        queue = _dict(document.get("queue"))
        put("queue_jobs", labels, queue.get("jobs"))
        put("queue_bytes", labels, queue.get("pending_bytes"))
        for tier in _list(document.get("targets")):
            _put_tier(put, tier)
        for codec, one in _guarded(document).items():
            more = (*labels, codec)
            put("codec_error", more, one.error, max)
            put("codec_attention_error", more, one.attention, max)
            put("codec_output_error", more, one.output, max)
            put("codec_ruled_out", more, one.ruled_out, max)
        for target in _list(document.get("targets")):
            if "breaker" not in target:
                continue  # it is not behind a mover
            labels_of = (str(target.get("name")),)
            put("target_breaker_open", labels_of, int(target["breaker"] != "closed"))
            put("target_abandoned_bytes", labels_of, target.get("abandoned_bytes"))
            for kind in ("load", "store"):
                times = target.get(f"{kind}_s")
                if isinstance(times, list) and len(times) == 2:
                    put(f"target_{kind}_seconds", labels_of, times[1], max)
        model = str(_dict(document.get("engine")).get("model") or "")
        if labels[0] not in (OTHER, "unknown"):
            put("namespace_info", (labels[0], labels[1], model), 1, max)
    for target in targets:
        labels = (str(target.get("name")),)
        for name in (
            "used_bytes",
            "capacity_bytes",
            "free_bytes",
            "reserve_bytes",
            "blocks",
            "read_bytes_per_second",
            "staged_bytes",
        ):
            put(f"target_{name}", labels, target.get(name))
        for codec, sums in _dict(target.get("codecs")).items():
            if codec in _SPLITS["codec"]:
                for name in ("blocks", "raw_bytes", "bytes"):
                    put(f"target_codec_{name}", (*labels, codec), _dict(sums).get(name))
        put("target_usable", labels, int(not target.get("problem")))
    return dict(tally)


def _put_tier(put: Callable[..., None], tier: Mapping[str, Any]) -> None:
    """The gauges of a target of a store; one that is not opened has none."""
    labels, state = (str(tier.get("name")),), tier.get("state")
    if state != "closed":
        put("tier_usable", labels, int(state in ("recovering", "ready")), min)
    put("tier_writing", labels, int(bool(tier.get("writing"))))
    put("tier_blocks", labels, tier.get("blocks"), max)
    put("tier_queue_jobs", labels, _dict(tier.get("queue")).get("jobs"))
    put("tier_queue_bytes", labels, _dict(tier.get("queue")).get("pending_bytes"))
    put("tier_copies_queued", labels, tier.get("copies_queued"))


@dataclass
class _Guarded:
    """A codec in one store, over its layouts."""

    error: float = 0.0
    attention: float = 0.0
    output: float = 0.0
    ruled_out: int = 0


def _guarded(document: Mapping[str, Any]) -> Mapping[str, _Guarded]:
    """What the accuracy guard of a store says, by codec; the worst layout counts."""
    out: dict[str, _Guarded] = {}
    for item in _list(_dict(document.get("codecs")).get("guard")):
        codec = str(item.get("codec"))
        if codec not in _SPLITS["codec"] or not item.get("samples"):
            continue
        one = out.setdefault(codec, _Guarded())
        for name in ("error", "attention", "output"):
            value = item.get(name)
            if isinstance(value, (int, float)):
                setattr(one, name, max(getattr(one, name), value))
        one.ruled_out += bool(item.get("ruled_out"))
    return out


def _labels(document: Mapping[str, Any], namespaces: set[str]) -> tuple[str, ...]:
    namespace = str(_dict(document.get("namespace")).get("name") or "unknown")
    engine = str(_dict(document.get("engine")).get("name") or "unknown")
    target = str(_dict(document.get("target")).get("name") or "none")
    if namespace not in namespaces:
        return (OTHER, OTHER, OTHER)
    return (namespace, engine, target)


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
