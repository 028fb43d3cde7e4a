"""Running all checks, those of other distributions included."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from functools import partial

from lifeboat_cache.doctor.check import Check, DoctorContext
from lifeboat_cache.doctor.installation import (
    check_adapters,
    check_config,
    check_home,
    check_kernels,
    check_versions,
)
from lifeboat_cache.doctor.ports import check_ports
from lifeboat_cache.doctor.shared_memory import check_shared_memory
from lifeboat_cache.doctor.targets import check_targets

__all__ = ["GROUP", "run_checks"]

#: The entry-point group of other distributions' checks: each loads to a function
#: ``checks(context: DoctorContext) -> Iterable[Check]``.
GROUP = "lifeboat_cache.doctor"


def run_checks(context: DoctorContext) -> list[Check]:
    """Run every check. One that raises becomes a failed check and stops no other."""
    results: list[Check] = []
    entries = importlib.metadata.entry_points(group=GROUP)
    own: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
        ("versions", lambda: (check_versions(),)),
        ("adapters", lambda: check_adapters(entry.name for entry in entries)),
        ("configuration", lambda: check_config(context)),
        ("home directory", lambda: (check_home(context),)),
        ("kernels", lambda: (check_kernels(context),)),
        ("targets", lambda: check_targets(context)),
        ("ports", lambda: (check_ports(context),)),
        ("shared memory", lambda: (check_shared_memory(),)),
    )
    for name, run in own:
        results += _collected(name, run, "Please report this with the details.")
    for entry in sorted(entries, key=lambda entry: entry.name):
        distribution = entry.dist.name if entry.dist is not None else entry.value
        results += _collected(
            f"checks of {distribution}",
            partial(_run_entry, entry, context),
            f"Reinstall {distribution} in the version that fits this lifeboatcache-core.",
        )
    return results


def _run_entry(entry: importlib.metadata.EntryPoint, context: DoctorContext) -> Iterable[Check]:
    checks: Callable[[DoctorContext], Iterable[Check]] = entry.load()
    return checks(context)


def _collected(name: str, run: Callable[[], Iterable[Check]], remedy: str) -> list[Check]:
    results: list[Check] = []
    try:
        for check in run():
            if not isinstance(check, Check):
                raise TypeError(f"{type(check).__name__} instead of a Check")
            results.append(check)
    except Exception as error:
        summary = f"could not be run: {type(error).__name__}: {error}"
        results.append(Check(name, "fail", summary, remedy))
    return results
