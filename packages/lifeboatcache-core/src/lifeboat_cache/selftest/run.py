"""Finding an engine's self-test among the installed distributions, and running it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys

from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.selftest.report import Report, Step

__all__ = ["GROUP", "run_selftest"]

#: The entry-point group of the adapters' self-tests.
GROUP = "lifeboat_cache.selftest"


def run_selftest(name: str | None, args: argparse.Namespace) -> Report:
    """Run the self-test of one engine. Nothing that an adapter does wrong is raised.

    Parameters
    ----------
    name
        The entry point's name; ``None`` for the only one there is.
    args
        The command's arguments.
    """
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    there = ", ".join(sorted(entries))
    if name is None and len(entries) > 1:
        return Report("", unable=f"several adapters are installed: name one of {there}")
    entry = entries.get(there if name is None else name)
    if entry is None:
        named = "" if name is None else f" named {name!r}"
        found = f"there are: {there}" if there else "no adapter with a self-test is installed"
        return Report(
            name or "",
            unable=f"there is no self-test{named} for {sys.executable}; {found}: install the "
            "adapter (lifeboatcache-<engine>) in the engine's environment, and run the "
            "lifeboat-cache that is there",
        )
    name = entry.name
    distribution = entry.dist.name if entry.dist is not None else entry.value
    # Engines print while they are imported, and stdout is for the report alone.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            run = entry.load()
        except Exception as error:
            return Report(
                name,
                unable=f"the self-test of {distribution} is broken: {type(error).__name__}: "
                f"{error}. Reinstall {distribution} in the version that fits this "
                "lifeboatcache-core",
            )
        try:
            report = run(args)
            if not isinstance(report, Report):
                raise TypeError(f"{type(report).__name__} instead of a Report")
        except LifeboatError as error:
            return Report(name, unable=str(error))
        except Exception as error:
            summary = f"ended with {type(error).__name__}: {error}"
            remedy = f"Please report this to {distribution}, with the engine's version."
            return Report(name, (Step("self-test", "failed", summary, remedy),))
        return report
