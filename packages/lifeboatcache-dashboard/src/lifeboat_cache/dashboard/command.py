"""``lifeboat-cache dashboard``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lifeboat_cache.cli.plugins import Subparsers

__all__ = ["add"]

_SUMMARY = "serve the dashboard of this home directory until interrupted"


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "dashboard",
        help=_SUMMARY,
        description="Serves the dashboard of this home directory, in the foreground. The agent "
        "does that by itself while engines run: this is for looking without an agent.",
    )
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    import os
    import sys
    from pathlib import Path

    from lifeboat_cache.agent.logfile import log_to_stderr
    from lifeboat_cache.config import load_config
    from lifeboat_cache.dashboard.serving import listen, serve

    loaded = load_config(args.config)
    where = loaded.config.dashboard
    listener = listen(where)
    log_to_stderr()
    config = args.config and Path(os.path.abspath(loaded.files[0]))
    serve(listener, loaded.home, config, where)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may be stuck in system calls for ever: nobody waits for them.
    os._exit(0)
