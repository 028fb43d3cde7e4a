"""Starting movers, and starting them again when they have died."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lifeboat_cache.agent.lock import Holding, probe
from lifeboat_cache.agent.status import HUNG_AFTER_S, clock
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.mover.places import MoverPlaces, forget_old, target_key, wants
from lifeboat_cache.registry import TargetFacts
from lifeboat_cache.registry.files import read_json
from lifeboat_cache.registry.host import process_start

__all__ = ["Movers"]

_log = logging.getLogger("lifeboat_cache")

#: A mover that has died is started again after so many seconds, twice as many each time.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.5, 60.0

#: One that lived for so many seconds was well.
_WELL_S = 60.0

_FACTS = frozenset(item.name for item in fields(TargetFacts))


@dataclass
class _Mover:
    places: MoverPlaces
    tiers: list[Tier] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    starter: threading.Thread | None = None
    started: float = 0.0
    pause_s: float = _LEAST_PAUSE_S
    problem: str = ""
    ended: int = 0


class Movers:
    """The movers that processes of this node want.

    Parameters
    ----------
    home
        The home directory.
    start
        Starts the mover of a target; says why that failed, or nothing. It may take long.
    """

    def __init__(self, home: Path, start: Callable[[str], str]) -> None:
        self._home = home
        self._start = start
        self._movers: dict[str, _Mover] = {}
        self._mine: set[str] = set()

    def look(self, tiers: Sequence[Tier]) -> None:
        """Start what is wanted and not there; to be called every few seconds.

        Parameters
        ----------
        tiers
            What this process itself wants movers for, engines or not.
        """
        mine = {target_key(tier): tier for tier in tiers}
        for key in self._mine - set(mine):
            MoverPlaces.of(self._home, key).withdraw()
        self._mine = set(mine)
        with contextlib.suppress(OSError):
            for key, tier in mine.items():
                MoverPlaces.of(self._home, key).want(tier)
        wanted = wants(self._home)
        for key in set(self._movers) - set(wanted):
            del self._movers[key]
        for key, theirs in wanted.items():
            mover = self._movers.setdefault(key, _Mover(MoverPlaces.of(self._home, key)))
            mover.tiers = theirs
            try:
                self._see_to(key, mover)
            except OSError as error:
                mover.problem = f"its mover cannot be started: {error}"

    def _see_to(self, key: str, mover: _Mover) -> None:
        places = mover.places
        # The lock first: what one that dies in between has published is read afterwards.
        held = probe(places.lock) is Holding.HELD
        found = read_json(places.document)
        mover.document = found[0] if found is not None and held else {}
        now = clock()
        if held:
            then = mover.document.get("clock")
            mover.problem = ""
            if isinstance(then, (int, float)) and now - then > HUNG_AFTER_S:
                self._end(mover)
            elif now - mover.started > _WELL_S:
                mover.pause_s = _LEAST_PAUSE_S
            return
        if mover.starter is not None and mover.starter.is_alive():
            return
        if now - mover.started < mover.pause_s:
            return
        if mover.started:
            mover.pause_s = min(2 * mover.pause_s, _MOST_PAUSE_S)
        mover.started = now
        _log.info("starts the mover of target %s", mover.tiers[0].name)

        def start() -> None:
            mover.problem = self._start(key)
            if mover.problem:
                _log.warning("the mover of %s: %s", mover.tiers[0].name, mover.problem)

        mover.starter = threading.Thread(target=start, name="start mover", daemon=True)
        mover.starter.start()

    def _end(self, mover: _Mover) -> None:
        """End one that has stopped saying anything. Its target hanging is no reason for that."""
        pid, born = mover.document.get("pid"), mover.document.get("born")
        if not isinstance(pid, int) or pid <= 0 or not born or process_start(pid) != born:
            return
        # Whoever waits in the kernel ends when the target answers, and not before.
        mover.problem = (
            f"its mover (pid {pid}) says nothing any more and cannot be ended: repair or unmount "
            "the target"
        )
        if mover.ended != pid:
            mover.ended = pid
            _log.warning(
                "the mover of target %s (pid %d) says nothing any more and is ended",
                mover.tiers[0].name,
                pid,
            )
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def has(self, path: str) -> bool:
        """Whether a mover looks after a directory; it is not touched."""
        return any(
            os.path.normpath(tier.path) == os.path.normpath(path)
            for mover in self._movers.values()
            for tier in mover.tiers
        )

    def facts(self) -> list[TargetFacts]:
        """Their targets, for the registry."""
        return [self._facts(mover) for mover in list(self._movers.values())]

    def _facts(self, mover: _Mover) -> TargetFacts:
        said = mover.document.get("facts")
        if isinstance(said, dict) and said.get("name"):
            known = {name: value for name, value in said.items() if name in _FACTS}
            return TargetFacts(**{**known, "problem": mover.problem or known.get("problem", "")})
        tier = mover.tiers[0]
        return TargetFacts(
            name=tier.name,
            location=tier.location,
            capacity_bytes=tier.capacity_bytes,
            reserve_bytes=tier.min_free_bytes,
            problem=mover.problem,
        )

    def describe(self) -> list[dict[str, Any]]:
        """Their targets, for the agent's own document."""
        out = []
        for mover in list(self._movers.values()):
            said = mover.document.get("target")
            out.append(
                {
                    **(said if isinstance(said, dict) else {"path": mover.tiers[0].location}),
                    "mover": mover.document.get("pid", 0),
                    "engines": mover.document.get("engines", 0),
                }
            )
        return out

    def problems(self) -> list[str]:
        """What is wrong with them."""
        found = []
        for mover in list(self._movers.values()):
            problem = mover.document.get("problem") or mover.problem
            if problem:
                found.append(f"target {mover.tiers[0].name}: {problem}")
        return found

    def stop(self) -> None:
        """Want none any more. They go on as long as engines do."""
        for key in self._mine:
            MoverPlaces.of(self._home, key).withdraw()
        forget_old(self._home)
