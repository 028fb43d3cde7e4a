"""``lifeboat-cache agent``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.starter import start_lock
from lifeboat_cache.agent.status import HUNG_AFTER_S, AgentState, AgentStatus, status_at
from lifeboat_cache.agent.stopping import stop_agent
from lifeboat_cache.cli.output import RefusedError
from lifeboat_cache.config import load_config
from lifeboat_cache.config.paths import ENV_HOME

__all__ = ["agent"]

#: How long an agent may take to end.
_STOP_S = 15.0


def agent(args: argparse.Namespace) -> int:
    """Run the agent of this node in the foreground, or end the one that runs."""
    loaded = load_config(args.config)
    places = AgentPlaces.of(loaded.home)
    if args.stop:
        return _stop(places)
    try:
        places.make()
    except OSError as error:
        raise RefusedError(
            f"{loaded.home} cannot be used ({error.strerror}): correct its owner and mode, or set "
            f"{ENV_HOME} to a directory that this user can write"
        ) from error
    config = args.config and Path(os.path.abspath(loaded.files[0]))
    return _serve(places, config)


def _stop(places: AgentPlaces) -> int:
    status = status_at(places, HUNG_AFTER_S)
    if status.state in (AgentState.ABSENT, AgentState.DIED):
        print("No agent runs for this node and home.")
        return 0
    if not stop_agent(places, status, _STOP_S):
        raise RefusedError(
            f"the agent {_called(status)} has not ended: end that process yourself, in its own "
            "container and as its user"
        )
    print(f"The agent {_called(status)} has ended. An engine that needs one starts another.")
    return 0


def _called(status: AgentStatus) -> str:
    host = status.document.get("host")
    return f"(pid {status.pid} on {host})" if status.pid else "that has not said its pid"


def _serve(places: AgentPlaces, config: Path | None) -> int:
    # No engine starts another meanwhile; one that does just now is waited for.
    with start_lock(places) as mine:
        if not mine:
            raise RefusedError("an engine is starting an agent just now. Try again in a second.")
        status = status_at(places, HUNG_AFTER_S)
        if status.alive and status.operated:
            raise RefusedError(
                f"an agent {_called(status)} runs already, and an operator started it. End it with "
                "`lifeboat-cache agent --stop`, or leave it."
            )
        hung = status.state is AgentState.HUNG
        if status.alive:
            hung = not stop_agent(places, status, _STOP_S)
        lock = places.claim(replace=hung)
    if lock is None:
        raise RefusedError("another agent was started just now. Try again in a second.")
    from lifeboat_cache.agent.logfile import log_to_stderr
    from lifeboat_cache.agent.process import Agent

    log_to_stderr()
    code = Agent(places, lock, config, None).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may be stuck in system calls for ever: nobody waits for them.
    os._exit(code)
