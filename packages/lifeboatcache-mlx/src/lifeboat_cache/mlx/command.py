"""``lifeboat-cache mlx-server``. Loaded at every call of the command: imports little."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lifeboat_cache.errors import InterfaceError

if TYPE_CHECKING:
    from lifeboat_cache.cli.plugins import Subparsers

__all__ = ["add"]


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "mlx-server",
        help="run mlx-lm's server with a prompt cache that outlives it",
        description="Run mlx-lm's server with a prompt cache that outlives it. All arguments are "
        "those of mlx_lm.server.",
        # They are not looked at here: none of them is an option of this command.
        prefix_chars="\0",
        add_help=False,
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of mlx_lm.server")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        from lifeboat_cache.mlx.server import main
    except ImportError as exc:
        raise InterfaceError(
            f"mlx-lm cannot be imported ({exc}): install it, on Linux with "
            "`pip install mlx-lm mlx-cpu`"
        ) from exc
    config = getattr(args, "config", None)
    return main(args.arguments, Path(config) if config else None)
