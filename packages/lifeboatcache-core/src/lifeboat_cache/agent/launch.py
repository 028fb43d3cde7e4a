"""From a command line to a running agent: detaching, the lock, the log."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lifeboat_cache.agent.exits import Exit
from lifeboat_cache.agent.kernel_build import compile_here
from lifeboat_cache.agent.logfile import log_to_file, log_to_stderr
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.priority import use_all_cpus
from lifeboat_cache.system import name_process

__all__ = ["launch"]

_log = logging.getLogger("lifeboat_cache")


def launch(argv: Sequence[str], tell: int = -1) -> int:
    """Run what an engine has started.

    Parameters
    ----------
    argv
        The arguments; made by :mod:`lifeboat_cache.agent.starter` and for nobody else.
    tell
        A descriptor to which one byte is written, an exit code, as soon as it is known
        what becomes of the agent; negative if nobody waits for that.
    """
    parser = argparse.ArgumentParser(prog="lifeboat_cache.agent")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--lease", type=float, default=60.0)
    parser.add_argument("--take-over", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--mover", metavar="TARGET")
    args = parser.parse_args(argv)
    os.umask(0o077)
    # Signals that the engine's thread had blocked, and the CPUs that it was bound to.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    use_all_cpus()
    places = AgentPlaces.of(args.home)
    if args.compile:
        return _compile(places, tell)
    if args.mover:
        from lifeboat_cache.mover.process import run_mover

        return run_mover(
            args.home, args.mover, args.config, args.lease, lambda code: _answer(tell, code)
        )
    try:
        # What `ps` and `top` call it.
        name_process("lifeboat-agent")
        lock = places.claim(replace=args.take_over)
        code = Exit.OK if lock is not None else Exit.ANOTHER
        log_to_file(places.log)
    except OSError as error:
        print(f"lifeboat-cache agent: {error.filename}: {error.strerror}", file=sys.stderr)
        lock, code = None, Exit.UNUSABLE
    _answer(tell, code)
    if lock is None:
        return code
    faulthandler.enable()
    try:
        # After the answer: the engine does not wait for all that this imports.
        from lifeboat_cache.agent.process import Agent

        return Agent(places, lock, args.config, args.lease).run()
    except Exception:
        _log.exception("the agent failed; please report this")
        return Exit.FAILED


def _compile(places: AgentPlaces, tell: int) -> Exit:
    _answer(tell, Exit.OK)
    # Standard error is the log already; only an agent gives that another name.
    log_to_stderr()
    return compile_here(places.home)


def _answer(tell: int, code: int) -> None:
    if tell >= 0:
        with contextlib.suppress(OSError):  # whoever has waited for it is gone
            os.write(tell, bytes((code,)))
        os.close(tell)
