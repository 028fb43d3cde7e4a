"""Subcommands of other distributions.

An entry point of the group ``lifeboat_cache.cli`` loads to a function
``add(subparsers) -> None``. It calls ``subparsers.add_parser(...)`` and sets the default
``func`` of its parser to a function that takes the parsed arguments and returns an
exit code; ``args.config`` is the value of ``--config``. The module is loaded at every call
of the command: it must import quickly.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["GROUP", "add_plugin_commands"]

#: The entry-point group of other distributions' subcommands.
GROUP = "lifeboat_cache.cli"


def add_plugin_commands(subparsers: Subparsers) -> None:
    """Add the subcommands of other distributions; say on stderr which are broken."""
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        distribution = entry.dist.name if entry.dist is not None else entry.value
        try:
            entry.load()(subparsers)
        # SystemExit too: nothing that one distribution does may end the others.
        except (Exception, SystemExit) as error:
            print(
                f"lifeboat-cache: warning: the commands of {distribution} ({entry.name}) are "
                f"missing: {type(error).__name__}: {error}. Reinstall {distribution} in the "
                "version that fits this lifeboatcache-core, or uninstall it.",
                file=sys.stderr,
            )
