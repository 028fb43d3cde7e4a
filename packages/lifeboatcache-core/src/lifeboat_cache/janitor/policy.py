"""What a janitor may do, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["MOST_INTERVAL_S", "SHARED_GRACE_S", "JanitorClock", "JanitorPolicy"]

#: The least grace on a directory that other hosts use too. They ask the server each time they
#: look, every 2 s; what they have begun to load may take its time on a slow network.
SHARED_GRACE_S = 90.0

#: Seconds; who runs less often than this is no reason for a larger headroom.
MOST_INTERVAL_S = 60.0


@dataclass(frozen=True)
class JanitorClock:
    """Where a janitor gets the time from.

    Attributes
    ----------
    monotonic
        Seconds that never jump; graces are measured with it.
    time
        Seconds since 1970; recency is measured with it.
    """

    monotonic: Callable[[], float] = time.monotonic
    time: Callable[[], float] = time.time


@dataclass(frozen=True)
class JanitorPolicy:
    """The janitor's settings.

    Attributes
    ----------
    eviction
        ``"lru"``: what was used least recently goes first, whole prefixes from their
        tail. ``"none"``: nothing is evicted, and a full target stays full.
    high, low
        Evict when more than this part of the capacity is used, down to that part.
    most_headroom
        At most this part of the capacity is kept free for stores that come faster
        than space can be reclaimed.
    margin_bytes
        Evict when less than this lies between the free space and the reserve, until
        it is twice that. ``None``: 1 % of the filesystem, at most 512 MiB.
    grace_s
        From the moment when a record is marked dead until its space is reclaimed:
        readers learn of it every 2 s, and loads that have begun must end.
    young_s
        What was stored so recently is not evicted.
    live_ratio
        Segments of which less than this part is live are rewritten.
    small_bytes
        Segments of ended writers with less than this are merged …
    merge_count
        … once there are so many of them in a namespace.
    punch_bytes
        Shorter runs of dead records are not punched out.
    copy_bytes
        The most that one run copies, for compaction and merging together.
    summary_s
        The summary of all access logs is written at most this often.
    max_age_s
        What was stored longer ago is marked dead, used or not; 0 = it stays.
    """

    eviction: Literal["lru", "none"] = "lru"
    high: float = 0.95
    low: float = 0.90
    most_headroom: float = 0.25
    margin_bytes: int | None = None
    grace_s: float = 30.0
    young_s: float = 30.0
    live_ratio: float = 0.5
    small_bytes: int = 64 << 20
    merge_count: int = 16
    punch_bytes: int = 1 << 20
    copy_bytes: int = 1 << 30
    summary_s: float = 60.0
    max_age_s: float = 0.0

    def for_shared(self) -> JanitorPolicy:
        """The same for a directory that other hosts use too: they learn of what is dead later."""
        return replace(self, grace_s=max(self.grace_s, SHARED_GRACE_S))
