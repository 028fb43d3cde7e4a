"""``lifeboat-cache selftest``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from lifeboat_cache.cli.output import clean
from lifeboat_cache.selftest import Report, run_selftest

__all__ = ["selftest"]


def selftest(args: argparse.Namespace) -> int:
    """Store and restore through an installed engine's interface."""
    report = run_selftest(args.engine, args)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    return report.exit_code


def _print(report: Report) -> None:
    width = max((len(step.name) for step in report.steps), default=0)
    for step in report.steps:
        print(f"{step.status:7}  {step.name:{width}}  {clean(step.summary)}")
        indent = " " * (width + 11)
        if step.status != "ok":
            for line in step.details:
                print(f"{indent}{clean(line)}")
        if step.remedy:
            print(f"{indent}-> {clean(step.remedy)}")
    if report.facts:
        print()
    for name, value in report.facts.items():
        print(f"{clean(name.replace('_', ' '))}: {clean(value)}")
    if report.unable:
        print(
            f"lifeboat-cache: error: the self-test could not run: {clean(report.unable)}",
            file=sys.stderr,
        )
        return
    count = Counter(step.status for step in report.steps)
    print(
        f"\n{clean(report.engine)}: {count['ok']} ok, {count['failed']} failed, "
        f"{count['skipped']} skipped"
    )
