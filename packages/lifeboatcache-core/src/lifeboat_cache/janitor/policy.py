"""What a janitor may do, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["JanitorClock", "JanitorPolicy"]


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
