"""What a block store counts."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from lifeboat_cache.job import Job
from lifeboat_cache.latency import BOUNDS, Latency
from lifeboat_cache.outcome import Outcome

__all__ = ["CounterSnapshot", "Counters"]

#: What storage was waited for in vain.
_SLOW = frozenset({"failed", "timeout"})


@dataclass(frozen=True)
class CounterSnapshot:
    """Totals since the store was opened.

    Attributes
    ----------
    blocks_stored, bytes_stored, store_seconds
        Blocks written (``PRESENT`` excluded), their payload bytes, time of store jobs.
    blocks_loaded, bytes_loaded, load_seconds
        Blocks read and verified, their payload bytes, time of load jobs.
    bytes_written, bytes_read
        What went to and came from storage for these blocks: less, if they are in a codec.
    store_outcomes, load_outcomes
        Blocks by name of their :class:`Outcome`, in lower case.
    lookups, lookup_hits
        Keys asked for and found.
    recovered_blocks, recovery_seconds, bad_entries
        What recovery read, how long it took, journal entries it had to skip.
    store_jobs, load_jobs
        Jobs that are done.
    latencies
        How long jobs that moved blocks took, by their codec, and lookups: counts by name, as
        :meth:`Latency.values` gives them.
    """

    blocks_stored: int = 0
    bytes_stored: int = 0
    store_seconds: float = 0.0
    blocks_loaded: int = 0
    bytes_loaded: int = 0
    load_seconds: float = 0.0
    bytes_written: int = 0
    bytes_read: int = 0
    store_outcomes: dict[str, int] = field(default_factory=dict)
    load_outcomes: dict[str, int] = field(default_factory=dict)
    lookups: int = 0
    lookup_hits: int = 0
    recovered_blocks: int = 0
    recovery_seconds: float = 0.0
    bad_entries: int = 0
    store_jobs: int = 0
    load_jobs: int = 0
    latencies: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: CounterSnapshot) -> CounterSnapshot:
        """The totals of both."""
        sums: dict[str, Any] = {}
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, dict):
                names = dict.fromkeys([*mine, *theirs])
                sums[one.name] = {name: mine.get(name, 0) + theirs.get(name, 0) for name in names}
            else:
                sums[one.name] = mine + theirs
        return CounterSnapshot(**sums)


class Counters:
    """Mutable counterpart of :class:`CounterSnapshot`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"store": 0.0, "load": 0.0, "recovery": 0.0}
        self._outcomes: dict[str, Counter[str]] = {"store": Counter(), "load": Counter()}
        # By what is timed, and the codec.
        self._latencies: dict[tuple[str, str], Latency] = {}

    def add(self, **amounts: int) -> None:
        """Add to whole-number totals by name."""
        with self._lock:
            self._numbers.update(amounts)

    def add_seconds(self, kind: str, seconds: float) -> None:
        """Add to ``store``, ``load`` or ``recovery`` seconds."""
        with self._lock:
            self._seconds[kind] += seconds

    def moved(self, kind: str, stored: int) -> None:
        """Account for bytes that went to or came from storage."""
        with self._lock:
            self._numbers["bytes_written" if kind == "store" else "bytes_read"] += stored

    def looked_up(self, keys: int, hits: int, seconds: float) -> None:
        """Account for a lookup."""
        with self._lock:
            self._numbers["lookups"] += keys
            self._numbers["lookup_hits"] += hits
            self._time("lookup", "", seconds)

    def job(self, job: Job) -> None:
        """Account for a finished job."""
        kind, moved, seconds = job.kind, job.bytes_moved, job.seconds
        values = job.outcomes.tobytes()  # unlike an array's, its methods keep the interpreter
        names = {Outcome(value).name.lower(): values.count(value) for value in set(values)}
        done = names.get("ok", 0)
        verb = "stored" if kind == "store" else "loaded"
        with self._lock:
            self._outcomes[kind].update(names)
            self._seconds[kind] += seconds
            self._numbers[f"blocks_{verb}"] += done
            self._numbers[f"bytes_{verb}"] += moved
            self._numbers[f"{kind}_jobs"] += 1
            # What was refused, or there already, took no time that says anything.
            if moved or not _SLOW.isdisjoint(names):
                self._time(kind, job.codec or "unknown", seconds)

    def _time(self, what: str, codec: str, seconds: float) -> None:
        latency = self._latencies.get((what, codec))
        if latency is None:
            latency = self._latencies[what, codec] = Latency(BOUNDS[what])
        latency.add(seconds)

    def snapshot(self) -> CounterSnapshot:
        """The totals now."""
        with self._lock:
            return CounterSnapshot(
                store_seconds=self._seconds["store"],
                load_seconds=self._seconds["load"],
                recovery_seconds=self._seconds["recovery"],
                store_outcomes=dict(self._outcomes["store"]),
                load_outcomes=dict(self._outcomes["load"]),
                latencies={
                    name: value
                    for (what, codec), latency in self._latencies.items()
                    for name, value in latency.values(what, codec).items()
                },
                **self._numbers,
            )
