"""What one run of a janitor did."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["JanitorReport"]

#: Problems beyond so many are only counted.
_MOST_PROBLEMS = 20


@dataclass
class JanitorReport:
    """What was done to one target; sizes in bytes.

    Attributes
    ----------
    used_before, used_after
        Allocated by all writers together.
    capacity
        What they may allocate; ``None`` = no limit.
    free, reserve
        Left on the filesystem afterwards, and what must be left.
    pending
        Marked dead and still to be reclaimed, when the grace is over.
    namespaces, writers, alive, records
        What there is: namespaces, writers, living writers, live records.
    by_namespace
        Allocated per namespace directory.
    by_codec
        Live records by codec: how many, bytes of their payloads, bytes that are stored.
    evicted_blocks, evicted_bytes
        Marked dead to make room.
    buried_blocks
        Marked dead because a tombstone says so.
    expired_blocks
        Marked dead because they were older than ``eviction.max_age``.
    erased_bytes
        Overwritten because they had to go and the filesystem has no holes.
    corrupt_blocks
        Found corrupt when they were to be copied, and marked dead.
    punched_bytes
        Punched out of segments that stay.
    segments_removed, removed_bytes
        Whole segments removed, and what they had allocated.
    trimmed_bytes
        Given back behind the last record of ended writers.
    compacted_segments, merged_segments
        Rewritten because little of them was live, or because they were small.
    copied_blocks, copied_bytes
        Live records copied by that.
    writers_removed
        Ended writers of whom nothing is left.
    logs_folded
        Access logs summed up and removed (or, of living processes, punched out).
    skipped_writers
        Writers left alone because a newer release wrote with their files.
    busy
        Nothing was done, because another janitor is at work.
    holder
        Whose janitor looks after the target instead, if it is another host's.
    requests
        Requests that it took, by verb, where requests cost money.
    seconds
        How long it took.
    problems
        What could not be done and why, for people.
    """

    used_before: int = 0
    used_after: int = 0
    capacity: int | None = None
    free: int = 0
    reserve: int = 0
    pending: int = 0
    namespaces: int = 0
    writers: int = 0
    alive: int = 0
    records: int = 0
    by_namespace: dict[str, int] = field(default_factory=dict)
    by_codec: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    buried_blocks: int = 0
    expired_blocks: int = 0
    erased_bytes: int = 0
    corrupt_blocks: int = 0
    punched_bytes: int = 0
    segments_removed: int = 0
    removed_bytes: int = 0
    trimmed_bytes: int = 0
    compacted_segments: int = 0
    merged_segments: int = 0
    copied_blocks: int = 0
    copied_bytes: int = 0
    writers_removed: int = 0
    logs_folded: int = 0
    skipped_writers: int = 0
    busy: bool = False
    holder: str = ""
    requests: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def problem(self, what: str, error: Exception) -> None:
        """Note a fault that was stepped over."""
        text = getattr(error, "strerror", None) or str(error)
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"{what}: {text}")

    def add_to(self, totals: Counter[str]) -> Counter[str]:
        """Totals of all runs, by the names of the registry's counters, with this one."""
        after = totals.copy()
        after.update(
            janitor_passes=1,
            evicted_blocks=self.evicted_blocks,
            evicted_bytes=self.evicted_bytes,
            expired_blocks=self.expired_blocks,
            corrupt_blocks=self.corrupt_blocks,
            reclaimed_bytes=self.punched_bytes + self.removed_bytes + self.trimmed_bytes,
            removed_segments=self.segments_removed,
            compacted_segments=self.compacted_segments + self.merged_segments,
            compacted_bytes=self.copied_bytes,
        )
        # Seconds are no whole number, which a Counter takes all the same.
        after["janitor_seconds"] += self.seconds  # type: ignore[assignment]
        for verb, count in self.requests.items():
            after[f"janitor_requests:{verb}"] += count
        return after

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping."""
        return asdict(self)
