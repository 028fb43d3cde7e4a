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

from lifeboat_cache.errors import LifeboatError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["ELSEWHERE", "GROUP", "add_missing_commands", "add_plugin_commands"]

#: The entry-point group of other distributions' subcommands.
GROUP = "lifeboat_cache.cli"

#: Commands that our other distributions add.
ELSEWHERE = {
    "dashboard": "lifeboatcache-dashboard",
    "mlx-server": "lifeboatcache-mlx",
    "server": "lifeboatcache-lmcache",
}


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


def add_missing_commands(subparsers: Subparsers) -> None:
    """Let commands of distributions that are not installed say which one is needed."""
    for name, distribution in ELSEWHERE.items():
        try:
            importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            # Without a prefix for options every argument is taken. Not listed by `--help`.
            parser = subparsers.add_parser(name, add_help=False, prefix_chars="\0")
            parser.add_argument("arguments", nargs="*")
            parser.set_defaults(func=_is_missing, missing=(name, distribution))


def _is_missing(args: argparse.Namespace) -> int:
    name, distribution = args.missing
    raise LifeboatError(
        f"`{name}` is a command of {distribution}, which is not installed for {sys.executable}: "
        "install it there, from the tree or the wheels that lifeboatcache-core came from"
    )
