"""The time as files hold it."""

from __future__ import annotations

import time

__all__ = ["coarse_time"]

_LATEST = (1 << 32) - 1


def coarse_time() -> int:
    """Seconds since 1970 that fit into 32 bits, however wrong the clock is."""
    return min(max(int(time.time()), 0), _LATEST)
