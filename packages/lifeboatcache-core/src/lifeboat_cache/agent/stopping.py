"""Ending an agent that runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from lifeboat_cache.agent.lock import Holding, probe
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.status import AgentStatus
from lifeboat_cache.registry.host import process_start

__all__ = ["stop_agent"]


def stop_agent(places: AgentPlaces, status: AgentStatus, timeout: float) -> bool:
    """Tell an agent to end, and wait until it has let go.

    Parameters
    ----------
    places
        Its places.
    status
        How it stands with it.
    timeout
        Seconds.

    Returns
    -------
    bool
        Whether it has ended. Never if it cannot be seen from here.
    """
    born = status.document.get("born")
    # Not a later process of the same number, nor one of another container.
    if status.pid > 0 and born and process_start(status.pid) == born:
        with contextlib.suppress(OSError):
            os.kill(status.pid, signal.SIGTERM)
            until = time.monotonic() + timeout
            while process_start(status.pid) == born and time.monotonic() < until:
                if probe(places.lock) is Holding.FREE:
                    break
                time.sleep(0.02)
    return probe(places.lock) is Holding.FREE or not process_start(status.pid)
