"""``lifeboat-cache server``: an LMCache server backed by LifeboatCache."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lifeboat_cache.cli.plugins import Subparsers

__all__ = ["add"]


def add(subparsers: Subparsers) -> None:
    """Add the subcommand ``server``; imports nothing that takes time."""
    from pathlib import Path

    parser = subparsers.add_parser(
        "server",
        help="run an LMCache server backed by LifeboatCache",
        description="Runs LMCache's server for several vLLM instances, with LifeboatCache as its "
        "second tier, until it is told to end (SIGTERM or Ctrl-C); what is queued is written "
        "first. It listens on 127.0.0.1 and engine.lmcache_port; its HTTP interface has the next "
        "port, its metrics the one after. Arguments behind `--` go to LMCache, and win over those "
        "that are set here.",
        epilog="example: lifeboat-cache server -- --l1-size-gb 64 --chunk-size 256",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="the configuration file to use",
    )
    parser.add_argument(
        "--ready",
        type=float,
        nargs="?",
        const=0.0,
        metavar="SECONDS",
        help="start nothing; wait so long for the server of this node to answer, by default not "
        "at all, and exit with 0 if it does and 1 if not",
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="ARGUMENT", help="further arguments of `lmcache server`"
    )
    parser.set_defaults(func=_server)


def _server(args: argparse.Namespace) -> int:
    if args.ready is not None:
        return _ready(args)
    import logging

    from lifeboat_cache.integrations.lmcache_server import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return serve(args.arguments, config_file=args.config)


def _ready(args: argparse.Namespace) -> int:
    from lifeboat_cache.config import load_config
    from lifeboat_cache.config.paths import home_directory
    from lifeboat_cache.integrations.lmcache_arguments import port_of
    from lifeboat_cache.integrations.lmcache_leases import ServerPlaces

    config = load_config(args.config).config
    port = port_of(args.arguments, config.engine.lmcache_port)
    places = ServerPlaces(home_directory(os.environ), port)
    end = time.monotonic() + args.ready
    while True:
        if places.served() and places.document.exists():
            print(f"the LMCache server on port {port} answers")
            return 0
        if time.monotonic() >= end:
            print(f"no LMCache server of this home answers on port {port}", file=sys.stderr)
            return 1
        time.sleep(0.2)
