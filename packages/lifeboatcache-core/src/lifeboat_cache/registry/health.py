"""What is wrong, as far as processes say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lifeboat_cache.config.units import format_duration, format_size
from lifeboat_cache.registry.processes import ProcessEntry
from lifeboat_cache.registry.publisher import RECENT_S

__all__ = ["SILENT_S", "agent_of", "living_stores", "problems", "remedy_of"]

#: Processes publish every 2 s; one that has not for so long hangs.
SILENT_S = 30.0

#: An engine that started just now may still be starting the agent.
_STARTING_S = 30.0

_MAKE_ROOM = (
    "raise capacity_gb, see that an agent runs and that eviction.policy is not none, or run "
    "`lifeboat-cache gc`"
)

_DROP_REMEDIES = {
    "full": f"no room was made in time: {_MAKE_ROOM}",
    "reserve": "free space on the disk, or lower min_free_gb",
    "busy": "storage is slower than prompts come in: use a faster disk, or raise "
    "engine.native_cpu_gb",
    "disabled": "see why the engine stands down",
    "timeout": "the target answers too slowly: check its server and network, or raise timeout_s",
    "unavailable": "see which target does not answer",
    "mismatch": "report this",
}
_LOAD_REMEDIES = {
    "corrupt": "run `lifeboat-cache check`; if it recurs, check the disk",
    "mismatch": "report this",
    "timeout": _DROP_REMEDIES["timeout"],
    "unavailable": _DROP_REMEDIES["unavailable"],
}
#: Codecs in which there is no error that could be borne.
_EXACT = frozenset({"raw", "lossless", "dense"})

_SEE_LOG = "see the engine's log"

#: Reclaimed between lookup and load: computed again, and nothing is wrong.
_HARMLESS = frozenset({"missing", "disabled"})


def remedy_of(kind: Literal["store_dropped", "load_failed"], reason: str) -> str:
    """What to do about blocks that were lost; empty if nothing is wrong."""
    if kind == "store_dropped":
        return _DROP_REMEDIES.get(reason, _SEE_LOG)
    return "" if reason in _HARMLESS else _LOAD_REMEDIES.get(reason, _SEE_LOG)


def living_stores(entries: Sequence[ProcessEntry]) -> list[ProcessEntry]:
    """Entries of stores that are open."""
    return [entry for entry in entries if entry.alive and entry.role != "agent"]


def agent_of(entries: Sequence[ProcessEntry]) -> ProcessEntry | None:
    """The living agent, the one heard last if there are several."""
    agents = [entry for entry in entries if entry.alive and entry.role == "agent"]
    return min(agents, key=lambda entry: entry.age, default=None)


def problems(
    entries: Sequence[ProcessEntry],
    targets: Sequence[Mapping[str, Any]],
    *,
    now: float,
    agent_expected: bool = True,
    agent_reason: str = "",
) -> list[str]:
    """What is wrong, each with its remedy; nothing if all is well.

    Parameters
    ----------
    entries
        All processes.
    targets
        What is known of the targets, as in the agent's document.
    now
        Seconds since 1970.
    agent_expected
        Whether there should be an agent while engines run.
    agent_reason
        Why there is none, if that is known.
    """
    return [
        *_of_stores(entries),
        *_of_agent(entries, now, agent_expected, agent_reason),
        *_of_targets(targets),
        *_losses(entries),
    ]


def _who(entry: ProcessEntry) -> str:
    engine = entry.document.get("engine")
    name = engine.get("name") if isinstance(engine, Mapping) else ""
    return f"{name or entry.role or 'a process'} (pid {entry.pid or 'unknown'})"


def _of_stores(entries: Sequence[ProcessEntry]) -> list[str]:
    found = []
    for entry in living_stores(entries):
        if entry.document.get("state") == "disabled":
            reason = str(entry.document.get("reason") or "the log says why")
            found.append(f"{_who(entry)} stands down: {reason}")
        else:
            found += _skipped(entry)
        found += _of_movers(entry)
        config = entry.document.get("config")
        problem = config.get("problem") if isinstance(config, Mapping) else ""
        if problem:
            found.append(f"{_who(entry)}: {problem}")
        found += [
            f"{_who(entry)}: {codec} does not give back what was stored, it is not used any more: "
            "report this"
            for codec in _broken(entry)
        ]
        if entry.age > SILENT_S and entry.document and entry.document.get("kind") != "notice":
            found.append(
                f"{_who(entry)} has published nothing for {format_duration(entry.age)}: it hangs, "
                "its storage does, or the home directory is full"
            )
    return found


def _skipped(entry: ProcessEntry) -> list[str]:
    """Targets that a store has to do without."""
    targets = entry.document.get("targets")
    return [
        f"{_who(entry)} does without target {item.get('name')}: {item.get('reason')}"
        for item in (targets if isinstance(targets, list) else ())
        if isinstance(item, Mapping) and item.get("state") == "disabled"
    ]


def _broken(entry: ProcessEntry) -> list[str]:
    """Exact codecs that the accuracy guard of a store has stopped."""
    codecs = entry.document.get("codecs")
    guard = codecs.get("guard") if isinstance(codecs, Mapping) else None
    return [
        str(item.get("codec"))
        for item in (guard if isinstance(guard, list) else ())
        if isinstance(item, Mapping) and item.get("ruled_out") and item.get("codec") in _EXACT
    ]


def _of_movers(entry: ProcessEntry) -> list[str]:
    """Targets behind a mover that a store does not use now."""
    targets = entry.document.get("targets")
    return [
        f"{_who(entry)}: target {target.get('name')}: {target['reason']}"
        for target in (targets if isinstance(targets, list) else ())
        if isinstance(target, Mapping) and "breaker" in target and target.get("reason")
    ]


def _of_agent(entries: Sequence[ProcessEntry], now: float, expected: bool, why: str) -> list[str]:
    agents = [entry for entry in entries if entry.alive and entry.role == "agent"]
    # Each machine that shares the home directory has its own.
    machines = {entry.identity.boot for entry in agents}
    alone = any(
        entry.role == "engine"
        and entry.document.get("kind") != "notice"
        and entry.identity.boot not in machines
        and abs(now - entry.started) > _STARTING_S
        for entry in living_stores(entries)
    )
    found = []
    if alone and expected:
        text = "no agent runs beside the engines, so nothing is evicted or reclaimed"
        why = f" ({why})" if why else ""
        found.append(f"{text}{why}: start one with `lifeboat-cache agent`; its log says more")
    for agent in agents:
        found += _of_one_agent(agent)
    return found


def _of_one_agent(agent: ProcessEntry) -> list[str]:
    if agent.age > SILENT_S:
        silence = format_duration(agent.age)
        text = f"the agent (pid {agent.pid}) has published nothing for {silence}: it hangs; "
        return [text + "end it, and an engine starts another"]
    reason = agent.document.get("reason")
    return [f"the agent (pid {agent.pid}): {reason}"] if reason else []


def _of_targets(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for target in targets:
        name = target.get("name")
        if target.get("problem"):
            found.append(f"target {name}: {target['problem']}")
            continue
        used, capacity = target.get("used_bytes"), target.get("capacity_bytes")
        if isinstance(used, int) and isinstance(capacity, int) and used > _most(capacity):
            found.append(
                f"target {name} holds {format_size(used)}, more than its capacity of "
                f"{format_size(capacity)}: {_MAKE_ROOM}"
            )
        free, reserve = target.get("free_bytes"), target.get("reserve_bytes")
        if isinstance(free, int) and isinstance(reserve, int) and free <= reserve:
            found.append(
                f"target {name} has {format_size(free)} free, its reserve is "
                f"{format_size(reserve)}: {_DROP_REMEDIES['reserve']}"
            )
    return found


def _most(capacity: int) -> int:
    """What a target may hold before it is a fault.

    Writers stop at the capacity, each by itself, and what is being written comes on top.
    """
    return capacity + capacity // 100 + (64 << 20)


def _losses(entries: Sequence[ProcessEntry]) -> list[str]:
    lost: dict[str, Counter[str]] = {"store_dropped": Counter(), "load_failed": Counter()}
    for entry in living_stores(entries):
        recent = entry.document.get("recent")
        for kind, counter in lost.items():
            reasons = recent.get(kind) if isinstance(recent, Mapping) else None
            for reason, count in reasons.items() if isinstance(reasons, Mapping) else ():
                if isinstance(count, int):
                    counter[str(reason)] += count
    minutes = f"{RECENT_S / 60:.0f} minutes"
    found = [
        f"in the last {minutes} {_blocks(count)} not stored ({reason}): "
        f"{remedy_of('store_dropped', reason)}"
        for reason, count in sorted(lost["store_dropped"].items())
    ]
    found += [
        f"in the last {minutes} {_blocks(count)} not loaded ({reason}): "
        f"{remedy_of('load_failed', reason)}"
        for reason, count in sorted(lost["load_failed"].items())
        if reason not in _HARMLESS
    ]
    return found


def _blocks(count: int) -> str:
    return f"{count} block was" if count == 1 else f"{count} blocks were"
