"""What processes publish.

A store's document::

    kind        "store"
    state       where it is in its life ("ready", …), and ``reason``, why it stands down
    engine      {name, version, model}, as far as an adapter says so
    namespace   {name, model}: the first 12 digits of its digest
    target      {name, location, capacity_bytes, reserve_bytes, direct_io}: where new blocks
                go first, once known
    targets     [{name, location, capacity_bytes, reserve_bytes, direct_io, type, rung, state,
                  reason, writing, blocks, queue, stored_blocks, stored_bytes, written_bytes,
                  loaded_blocks, loaded_bytes, read_bytes, store_mean_s, load_mean_s,
                  store_dropped, load_failed, …}, …]: written and read: what blocks take there;
                all of them, in order. Those of a ladder also say when each is asked for a
                block (read_order, from 1), how often it was given up (left), deletions it has
                missed (owed_deletions), what was copied to it (copied_blocks, copied_bytes),
                and copies from it that wait (copies_queued) or were not made (copies_dropped,
                by reason). If they are not as usual, also mount, protocol, file_mode, group
    index       {blocks}
    queue       {jobs, pending_bytes, limit_bytes}
    recovery    {done, blocks, seconds, bad_entries}
    recent      {seconds, store_dropped: {reason: blocks}, load_failed: {reason: blocks}}
    codecs      {mode, rung, choices: [{layout, codec, reason}], guard: [{layout, codec,
                 samples, error, attention, output, ruled_out}]}
    config      {problem, restart: [keys]}: what of the configuration files is not in effect
    counters    see :class:`Counts`; labels ``namespace``, ``engine``, ``target``; what begins
                with ``tier_`` has the label ``tier``, and how long lookups took ``engine``

The agent's document::

    kind        "agent"
    state       what it does ("active", …), and ``reason``, what it cannot do and why
    targets     [{name, location, used_bytes, capacity_bytes, free_bytes, reserve_bytes,
                  blocks, read_bytes_per_second, staged_bytes, problem, codecs: {codec: {blocks,
                  raw_bytes, bytes}}}, …]; what has not been measured is null
    recent      {}
    counters    label ``target``

An engine that runs without the cache publishes once ``{kind: "notice", state: "disabled",
reason, engine}``. Documents of newer releases may say more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.registry.counts import Counts
from lifeboat_cache.store.counters import CounterSnapshot
from lifeboat_cache.store.protocol import State, TargetStatus

__all__ = [
    "NAMESPACE_DIGITS",
    "NOT_DROPPED",
    "TOKEN_COUNTS",
    "PublishedCodecs",
    "PublishedStore",
    "TargetFacts",
    "agent_document",
    "dropped",
    "lookup_values",
    "store_document",
    "store_labels",
    "store_values",
    "tier_labels",
    "tier_values",
]

#: Digits of a namespace's digest that stand for it.
NAMESPACE_DIGITS = 12

#: Outcomes that lose nothing: done, there already, or the engine is ending.
NOT_DROPPED = frozenset({"ok", "present", "cancelled"})

#: What adapters count of prompts, see :class:`~lifeboat_cache.engines.prompts.PromptCounts`.
TOKEN_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "served_tokens",
    "prefill_tokens",
    "prefill_seconds",
    "saved_seconds",
)

_TEXT = 200
_LABEL = re.compile(r"[^A-Za-z0-9_.:-]")


class PublishedStore(Protocol):
    """What of a store is published."""

    @property
    def state(self) -> State:
        """Where it is in its life."""

    @property
    def reason(self) -> str:
        """Why it stands down."""

    @property
    def namespace(self) -> Namespace | None:
        """Its namespace, once known."""

    def targets(self) -> list[TargetStatus]:
        """Its targets."""

    def __len__(self) -> int:
        """Blocks known to be there."""

    def counters(self) -> CounterSnapshot:
        """Totals since it was opened."""


class PublishedCodecs(Protocol):
    """What of a store's codecs is published."""

    def look(self) -> None:
        """Take in what has changed on files. May wait for them."""

    def values(self) -> Mapping[str, int]:
        """What has gone through which codec, by name of the count."""

    def facts(self) -> Mapping[str, Any]:
        """Which codecs are chosen, and why."""

    def config_facts(self) -> Mapping[str, Any]:
        """What of the configuration files is not in effect."""


@dataclass(frozen=True)
class TargetFacts:
    """A target as the agent sees it.

    Attributes
    ----------
    name, location
        From the configuration, and where it is.
    used_bytes, capacity_bytes
        What all writers have allocated, and what they may (``None`` = no limit).
    free_bytes, reserve_bytes
        What the filesystem has left, and must keep.
    blocks
        Blocks that are stored; ``None`` = nothing has been measured yet.
    problem
        Why it cannot be looked after; empty if it can.
    read
        Bytes per second that it delivers; ``None`` = not measured.
    codecs
        Blocks by codec: how many, bytes of KV in them, bytes that are stored.
    staged_bytes
        Bytes that wait to be uploaded; ``None`` where nothing is.
    counters
        What only grows: ``evicted_blocks``, ``evicted_bytes``, ``corrupt_blocks``,
        ``reclaimed_bytes``, ``removed_segments``, ``compacted_segments``,
        ``compacted_bytes``, ``janitor_passes``, ``janitor_seconds``; of buckets
        ``janitor_requests:`` and ``s3_requests:`` with a verb, ``s3_errors:`` and a kind,
        ``s3_received_bytes``, ``s3_sent_bytes``, ``s3_uploaded_segments``.
    """

    name: str
    location: str
    used_bytes: int = 0
    capacity_bytes: int | None = None
    free_bytes: int = 0
    reserve_bytes: int = 0
    blocks: int | None = None
    problem: str = ""
    read: float | None = None
    codecs: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    staged_bytes: int | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


def agent_document(
    targets: Sequence[TargetFacts], *, state: str = "active", reason: str = ""
) -> dict[str, Any]:
    """Return the document of the agent."""
    counts = Counts()
    for target in targets:
        counts.add({"target": _label(target.name)}, target.counters)
    return {
        "kind": "agent",
        "state": state,
        "reason": reason[:_TEXT],
        "targets": [
            {
                "name": target.name,
                "location": target.location,
                "used_bytes": None if target.blocks is None else target.used_bytes,
                "capacity_bytes": target.capacity_bytes,
                "free_bytes": None if target.blocks is None else target.free_bytes,
                "reserve_bytes": target.reserve_bytes,
                "blocks": target.blocks,
                "read_bytes_per_second": target.read,
                "staged_bytes": target.staged_bytes,
                "codecs": {
                    codec: {"blocks": sums[0], "raw_bytes": sums[1], "bytes": sums[2]}
                    for codec, sums in target.codecs.items()
                },
                "problem": target.problem[:_TEXT],
            }
            for target in targets
        ],
        "counters": counts.to_json(),
    }


def store_document(
    store: PublishedStore,
    *,
    facts: Mapping[str, Any],
    queue: Mapping[str, Any],
    recent: Mapping[str, Any],
    counters: Counts,
    codecs: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the document of a store.

    Parameters
    ----------
    store
        The store; asked for what it knows without waiting.
    facts
        What an adapter adds, see :func:`attach`.
    queue
        Numbers ``jobs``, ``pending_bytes`` and ``limit_bytes``, as far as known.
    recent
        What was lost of late.
    counters
        What the store has counted, under the labels of the time.
    codecs, config
        See the document.
    """
    now = store.counters()
    state = str(store.state.value)
    targets = store.targets()
    target = _written(targets)
    namespace = _namespace(store.namespace, facts)
    return {
        "kind": "store",
        "state": state,
        "reason": store.reason[: 4 * _TEXT],
        "engine": {
            "name": _engine(store.namespace, facts),
            "version": _text(facts.get("version")),
            "model": namespace["model"],
        },
        "namespace": namespace,
        "target": {} if target is None else _limits(target),
        "targets": [_target(target) for target in targets],
        "index": {"blocks": len(store)},
        "queue": {name: value for name, value in queue.items() if isinstance(value, int)},
        "recovery": {
            "done": state not in ("opening", "recovering"),
            "blocks": now.recovered_blocks or len(store),
            "seconds": now.recovery_seconds,
            "bad_entries": now.bad_entries,
        },
        "recent": dict(recent),
        "codecs": dict(codecs),
        "config": dict(config),
        "counters": counters.to_json(),
    }


def store_labels(store: PublishedStore, facts: Mapping[str, Any]) -> dict[str, str]:
    """Labels of what the store counts now; they become known as it opens."""
    target = _written(store.targets())
    return {
        "namespace": _namespace(store.namespace, facts)["name"] or "unknown",
        "engine": _label(_engine(store.namespace, facts) or "unknown"),
        "target": _label(target.name) if target is not None else "none",
    }


def dropped(outcomes: Mapping[str, int]) -> dict[str, int]:
    """What of a job's outcomes was lost, by reason."""
    return {name: n for name, n in outcomes.items() if n and name not in NOT_DROPPED}


def _written(targets: Sequence[TargetStatus]) -> TargetStatus | None:
    """The target that new blocks go to first."""
    return next((target for target in targets if target.writing), None)


def _limits(target: TargetStatus) -> dict[str, Any]:
    """What an agent must know to look after it."""
    return {
        "name": target.name,
        "location": target.location,
        "capacity_bytes": target.capacity_bytes,
        "reserve_bytes": target.reserve_bytes,
        "direct_io": target.direct_io,
    }


def _target(target: TargetStatus) -> dict[str, Any]:
    counters = target.counters
    return {
        **_limits(target),
        "type": target.type,
        "rung": target.rung,
        "state": str(target.state.value),
        "reason": target.reason[:_TEXT],
        "writing": target.writing,
        "blocks": target.blocks,
        "queue": dict(target.queue),
        "stored_blocks": counters.blocks_stored,
        "stored_bytes": counters.bytes_stored,
        "written_bytes": counters.bytes_written,
        "loaded_blocks": counters.blocks_loaded,
        "loaded_bytes": counters.bytes_loaded,
        "read_bytes": counters.bytes_read,
        "store_mean_s": _mean(counters.store_seconds, counters.store_jobs),
        "load_mean_s": _mean(counters.load_seconds, counters.load_jobs),
        "store_dropped": dropped(counters.store_outcomes),
        "load_failed": dropped(counters.load_outcomes),
        **target.facts,
    }


def _mean(seconds: float, jobs: int) -> float | None:
    return seconds / jobs if jobs else None


def tier_values(target: TargetStatus) -> dict[str, float]:
    """What has been counted of one target of a store, by name."""
    counters, facts = target.counters, target.facts
    values: dict[str, float] = {
        "tier_stored_blocks": counters.blocks_stored,
        "tier_stored_bytes": counters.bytes_stored,
        "tier_written_bytes": counters.bytes_written,
        "tier_loaded_blocks": counters.blocks_loaded,
        "tier_loaded_bytes": counters.bytes_loaded,
        "tier_read_bytes": counters.bytes_read,
        **{
            f"tier_{name}": value
            for name, value in counters.latencies.items()
            if not name.startswith("lookup_")
        },
    }
    for name, fact in (
        ("tier_copied_blocks", "copied_blocks"),
        ("tier_copied_bytes", "copied_bytes"),
        ("tier_left", "left"),
    ):
        value = facts.get(fact)
        if isinstance(value, (int, float)):
            values[name] = value
    for kind, reasons in (
        ("tier_store_outcome", counters.store_outcomes),
        ("tier_load_outcome", counters.load_outcomes),
        ("tier_copies_dropped", facts.get("copies_dropped")),
    ):
        if isinstance(reasons, Mapping):
            values.update({f"{kind}:{name}": count for name, count in reasons.items()})
    return values


def lookup_values(counters: CounterSnapshot) -> dict[str, float]:
    """How long lookups took, by name."""
    found = counters.latencies.items()
    return {name: value for name, value in found if name.startswith("lookup_")}


def tier_labels(target: TargetStatus) -> dict[str, str]:
    """Labels of what is counted of a target of a store."""
    return {"tier": _label(target.name)}


def _engine(namespace: Namespace | None, facts: Mapping[str, Any]) -> str:
    name = facts.get("engine")
    if not name and namespace is not None:
        name = namespace.identity.get("engine")
        if isinstance(name, Mapping):
            name = name.get("name")
    return _text(name)


def _namespace(namespace: Namespace | None, facts: Mapping[str, Any]) -> dict[str, str]:
    if namespace is None:
        return {"name": "", "model": _text(facts.get("model"))}
    # Each change of weights makes a namespace that ends with its process: one name for
    # all of them, or metrics would get a new series each time.
    temporary = bool(namespace.display.get("temporary"))
    return {
        "name": "temporary" if temporary else namespace.hex[:NAMESPACE_DIGITS],
        "model": _text(facts.get("model") or namespace.display.get("model")),
    }


def store_values(counters: CounterSnapshot, facts: Mapping[str, Any]) -> dict[str, float]:
    """What a store has counted since it was opened, by name."""
    values: dict[str, float] = {
        "lookups": counters.lookups,
        "lookup_hits": counters.lookup_hits,
        "stored_blocks": counters.blocks_stored,
        "stored_bytes": counters.bytes_stored,
        "store_seconds": counters.store_seconds,
        "loaded_blocks": counters.blocks_loaded,
        "loaded_bytes": counters.bytes_loaded,
        "load_seconds": counters.load_seconds,
        "recovered_blocks": counters.recovered_blocks,
        "recovery_seconds": counters.recovery_seconds,
        "bad_journal_entries": counters.bad_entries,
    }
    for kind, outcomes in (
        ("store_outcome", counters.store_outcomes),
        ("load_outcome", counters.load_outcomes),
    ):
        values.update({f"{kind}:{name}": count for name, count in outcomes.items()})
    for name in TOKEN_COUNTS:
        tokens = facts.get(name)
        if isinstance(tokens, (int, float)):
            values[name] = tokens
    return values


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:_TEXT]


def _label(value: Any) -> str:
    return _LABEL.sub("_", str(value))[:64] or "unknown"
