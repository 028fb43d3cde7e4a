"""What a store says about storing, and does not say again for a while."""

from __future__ import annotations

import logging
import threading
import time

from lifeboat_cache.job import Job
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import Target

__all__ = ["Notices"]

_log = logging.getLogger("lifeboat_cache")

#: What repeats is said again after so many seconds.
_SAY_AGAIN_S = 600.0


class Notices:
    """Says what users can do something about. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}

    def news(self, what: str) -> bool:
        """Whether something has not been said for a while."""
        now = time.monotonic()
        with self._lock:
            known = now - self._said.get(what, -_SAY_AGAIN_S) < _SAY_AGAIN_S
            if not known:
                self._said[what] = now
        return not known

    def full(self, job: Job, target: Target | None) -> None:
        """Say that a target has no space for more, if that is why blocks were not kept."""
        where = target.location if target else "?"
        outcomes = job.outcomes.tobytes()  # unlike an array's, its methods keep the interpreter
        if Outcome.FULL in outcomes and self.news("full"):
            _log.warning(
                "LifeboatCache: %s has reached its capacity, new blocks are not kept: raise "
                "capacity_gb, or run `lifeboat-cache gc` or `lifeboat-cache purge --older-than 7d`",
                where,
            )
        if Outcome.RESERVE in outcomes and self.news("reserve"):
            _log.warning(
                "LifeboatCache: the disk of %s has less free than min_free_gb, new blocks are not "
                "kept: free space, or run `lifeboat-cache gc` or "
                "`lifeboat-cache purge --older-than 7d`",
                where,
            )

    def large(self, size: int) -> None:
        """Say that blocks of a size are too large."""
        if self.news("large"):
            _log.warning(
                "LifeboatCache: blocks of %d bytes are not kept, a record has less than 4 GiB: "
                "configure smaller blocks in the engine",
                size,
            )

    def no_memory_to_encode(self) -> None:
        """Say that the system has no memory for what is encoded."""
        if self.news("staging"):
            _log.warning(
                "LifeboatCache: blocks are not kept, the system has no memory to encode them: "
                "free memory, or raise the limit of this process"
            )
