"""The dashboard as the agent's child: it ends with the agent."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from lifeboat_cache.agent.dashboard_child import CANNOT_LISTEN, REFUSED
from lifeboat_cache.agent.logfile import log_to_stderr
from lifeboat_cache.agent.priority import step_back
from lifeboat_cache.config import load_config
from lifeboat_cache.dashboard.serving import (
    CannotListenError,
    RefusedToServeError,
    end_with,
    listen,
    serve,
)
from lifeboat_cache.errors import ConfigError

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Serve; the environment names the home and, where it was named, the configuration.

    What stands in the way is printed as one line on standard output.
    """
    parser = argparse.ArgumentParser(prog="lifeboat_cache.dashboard")
    parser.add_argument("--config", type=Path)
    args = parser.parse_args(argv)
    # Standard error is the agent's log already.
    log_to_stderr()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("lifeboat-dash", encoding="ascii")
    end_with(sys.stdin.fileno())
    try:
        loaded = load_config(args.config)
        listener = listen(loaded.config.dashboard)
    except (ConfigError, RefusedToServeError) as error:
        print(error, flush=True)
        return REFUSED
    except CannotListenError as error:
        print(error, flush=True)
        return CANNOT_LISTEN
    print("listening", flush=True)
    step_back(urgent=True)
    serve(listener, loaded.home, args.config, loaded.config.dashboard)
    return 0
