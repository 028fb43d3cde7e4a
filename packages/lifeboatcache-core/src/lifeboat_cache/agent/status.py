"""Is there an agent, and does it work: what engines and commands can see of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from lifeboat_cache.agent.lock import Holding, probe
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.registry.files import read_json

__all__ = [
    "HUNG_AFTER_S",
    "MOST_STARTS",
    "STARTS_S",
    "AgentState",
    "AgentStatus",
    "agent_status",
    "clock",
    "recent_starts",
    "status_at",
]

#: An agent that has not been heard of for so many seconds is replaced.
HUNG_AFTER_S = 60.0

#: After so many starts within this time, in seconds, nobody starts it again.
MOST_STARTS = 5
STARTS_S = 600.0


def clock() -> float:
    """Seconds that nobody can set, the same for all processes of a node.

    They stand still while the machine sleeps: an agent is not late when it wakes.
    """
    return time.monotonic()


class AgentState(Enum):
    """How it stands with the agent of a home and node."""

    RUNNING = "running"
    #: It was started just now, or is being started.
    STARTING = "starting"
    #: There is none: it has ended, or there never was one.
    ABSENT = "absent"
    #: It died: it let go without having said that it ends.
    DIED = "died"
    #: It is there and has not been heard of for too long.
    HUNG = "hung"
    #: It was started several times lately and died; nobody starts it for a while.
    BACKOFF = "backoff"
    #: It cannot be started.
    FAILED = "failed"


_ALIVE = (AgentState.RUNNING, AgentState.STARTING)


@dataclass(frozen=True)
class AgentStatus:
    """The agent of a home and node, as it looks from outside.

    Attributes
    ----------
    state
        How it stands.
    reason
        Why it is not running; for people, ending in what to do.
    pid
        Its process id in its own container; 0 if unknown.
    age
        Seconds since it was last heard of; infinite if never.
    document
        What it published last; empty if nothing.
    """

    state: AgentState
    reason: str = ""
    pid: int = 0
    age: float = math.inf
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether nobody needs to start one."""
        return self.state in _ALIVE

    @property
    def core(self) -> str:
        """The agent's version of ``lifeboatcache-core``; empty if unknown."""
        return _text(self.document.get("core"))

    @property
    def operated(self) -> bool:
        """Whether an operator started it, so that it does not end by itself."""
        return self.document.get("mode") == "operator"

    @property
    def stuck(self) -> list[str]:
        """Targets whose pass has not moved on for :data:`HUNG_AFTER_S`, as it said itself."""
        targets = self.document.get("targets")
        return [
            _text(item.get("path"))
            for item in (targets if isinstance(targets, list) else ())
            if isinstance(item, dict) and item.get("stuck") is True
        ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def agent_status(home: Path, *, hung_after_s: float = HUNG_AFTER_S) -> AgentStatus:
    """How it stands with the agent; starts nothing and waits for nobody.

    Parameters
    ----------
    home
        The home directory.
    hung_after_s
        Silence that means that it hangs.

    Raises
    ------
    OSError
        If its files are there and cannot be read.
    """
    return status_at(AgentPlaces.of(home), hung_after_s)


def status_at(places: AgentPlaces, hung_after_s: float) -> AgentStatus:
    """Like :func:`agent_status`."""
    # The lock first: what an agent that dies in between published is read afterwards.
    holding = probe(places.lock)
    found = read_json(places.document)
    document = found[0] if found else {}
    pid = document.get("pid")
    pid = pid if isinstance(pid, int) else 0
    age = _age(document)

    def status(state: AgentState, reason: str = "") -> AgentStatus:
        starts = [] if state in _ALIVE else recent_starts(places)
        if len(starts) >= MOST_STARTS:
            reason = (
                f"the agent has ended unexpectedly {len(starts)} times within "
                f"{STARTS_S / 60:.0f} minutes and is not started for as long: see {places.log}"
            )
            state = AgentState.BACKOFF
        return AgentStatus(state, reason, pid, age, document)

    ended = document.get("state") == "ended"
    if holding is Holding.FREE or (holding is Holding.UNKNOWN and (ended or not document)):
        if ended:
            return status(AgentState.ABSENT, _text(document.get("reason")))
        if not document:
            return status(AgentState.ABSENT, "no agent was started on this node")
        return status(AgentState.DIED, f"the agent (pid {pid}) has died; see {places.log}")
    # Whoever took the lock just now has not replaced the document of the one before.
    since = _file_age(places.lock)
    if (ended or not document or age > hung_after_s) and since <= hung_after_s:
        return status(AgentState.STARTING)
    if ended or not document:
        return status(AgentState.HUNG, f"the agent has said nothing for {since:.0f} s")
    if age > hung_after_s:
        return status(
            AgentState.HUNG, f"the agent (pid {pid}) has not been heard of for {age:.0f} s"
        )
    return status(AgentState.RUNNING)


def recent_starts(places: AgentPlaces) -> list[float]:
    """When agents were started lately that have not ended in order, by :func:`clock`."""
    found = read_json(places.history)
    starts = found[0].get("starts") if found else None
    now = clock()
    return [
        then
        for then in (starts if isinstance(starts, list) else [])
        if isinstance(then, (int, float)) and 0 <= now - then < STARTS_S
    ]


def _age(document: Mapping[str, Any]) -> float:
    then = document.get("clock")
    if not isinstance(then, (int, float)) or isinstance(then, bool):
        return math.inf
    return max(0.0, clock() - then)


def _file_age(path: Path) -> float:
    try:
        return abs(time.time() - path.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return 0.0
