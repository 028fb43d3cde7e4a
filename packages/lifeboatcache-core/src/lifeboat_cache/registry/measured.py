"""What is known of the targets, also without an agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lifeboat_cache.config import Config
from lifeboat_cache.registry.health import agent_of
from lifeboat_cache.registry.totals import Snapshot
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["known_targets"]

#: A target that has not answered by then is on a dead mount.
_PATIENCE_S = 5.0


def known_targets(found: Snapshot, config: Config | None) -> list[Mapping[str, Any]]:
    """Facts of the targets as in the agent's document; what it does not say is measured here.

    Parameters
    ----------
    found
        All processes.
    config
        Names the targets where no agent does; ``None`` = unknown.
    """
    agent = agent_of(found.entries)
    facts = agent.document.get("targets") if agent is not None else None
    known: list[Mapping[str, Any]] = (
        [item for item in facts if isinstance(item, dict)] if isinstance(facts, list) else []
    )
    if known:
        return [_completed(item) for item in known]
    places = () if config is None else config.storage.places
    measured = (
        # Asking a bucket costs requests; whoever looks after it has done that.
        _facts(tier.name, tier.location, tier.capacity_bytes, tier.min_free_bytes)
        if tier.type == "s3"
        else _measured(FilesystemTarget.from_tier(tier))
        for tier in places
    )
    return [item for item in measured if item is not None]


def _completed(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """A target of the agent's; measured here if the agent has not done so yet."""
    location, reserve = facts.get("location"), facts.get("reserve_bytes")
    if facts.get("used_bytes") is not None or facts.get("problem"):
        return facts
    if not isinstance(location, str) or not isinstance(reserve, int):
        return facts
    if not os.path.isabs(location):  # a bucket
        return facts
    capacity = facts.get("capacity_bytes")
    target = FilesystemTarget(
        Path(location),
        name=str(facts.get("name")),
        capacity=capacity if isinstance(capacity, int) else None,
        reserve=reserve,
    )
    return _measured(target) or facts


def _facts(name: str, location: str, capacity: int | None, reserve: int) -> dict[str, Any]:
    """A target as in an agent's document, before anything is measured."""
    return {
        "name": name,
        "location": location,
        "used_bytes": None,
        "capacity_bytes": capacity,
        "free_bytes": None,
        "reserve_bytes": reserve,
        "blocks": None,
        "problem": "",
    }


def _measured(target: FilesystemTarget) -> dict[str, Any] | None:
    """A target as in an agent's document; ``None`` if it is not there."""
    found: list[dict[str, Any] | None] = []
    facts = _facts(target.name, target.location, target.capacity, target.reserve)

    def measure() -> None:
        try:
            if not Path(target.location).is_dir():
                found.append(None)
                return
            usage = target.usage()
            found.append(facts | {"used_bytes": usage.used, "free_bytes": usage.free})
        except Exception as error:
            found.append(facts | {"problem": f"{target.location} cannot be read: {error}"})

    # A system call on a dead mount cannot be given up, so it must not hold this thread.
    worker = threading.Thread(target=measure, name=f"measure {target.name}", daemon=True)
    worker.start()
    worker.join(_PATIENCE_S)
    if found:
        return found[0]
    return facts | {"problem": f"{target.location} has not answered for {_PATIENCE_S:g} s"}
