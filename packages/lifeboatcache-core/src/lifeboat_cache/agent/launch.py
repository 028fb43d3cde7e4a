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
from lifeboat_cache.agent.logfile import log_to_file, log_to_stderr
from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.priority import use_all_cpus

__all__ = ["launch"]

_log = logging.getLogger("lifeboat_cache")

#: Told by an agent that has gone before it knew what would become of it.
_NO_ANSWER = 9


def launch(argv: Sequence[str]) -> int:
    """Run what an engine has started.

    Parameters
    ----------
    argv
        The arguments; made by :mod:`lifeboat_cache.agent.starter` and for nobody else.
    """
    parser = argparse.ArgumentParser(prog="lifeboat_cache.agent")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--lease", type=float, default=60.0)
    parser.add_argument("--take-over", action="store_true")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args(argv)
    os.umask(0o077)
    # Signals that the engine's thread had blocked, and the CPUs that it was bound to.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    use_all_cpus()
    if args.compile:
        from lifeboat_cache.agent.kernel_build import compile_here

        log_to_stderr()
        return compile_here(args.home)
    places = AgentPlaces.of(args.home)
    tell = _detach() if args.detach else None
    try:
        # What `ps` and `top` call it.
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text("lifeboat-agent", encoding="ascii")
        lock = places.claim(replace=args.take_over)
        code = Exit.OK if lock is not None else Exit.ANOTHER
        log_to_file(places.log)
    except OSError as error:
        print(f"lifeboat-cache agent: {error.filename}: {error.strerror}", file=sys.stderr)
        lock, code = None, Exit.UNUSABLE
    if tell is not None:
        os.write(tell, bytes((code,)))
        os.close(tell)
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


def _detach() -> int:
    """Go on as nobody's child; return where to tell what became of the lock.

    The process that the engine has started waits for that and ends.
    """
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        answer = os.read(read, 1)
        os._exit(answer[0] if answer else _NO_ANSWER)
    os.close(read)
    return write
