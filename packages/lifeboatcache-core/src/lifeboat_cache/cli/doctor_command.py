"""``lifeboat-cache doctor``."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter

from lifeboat_cache.cli.output import RefusedError, clean, confirm
from lifeboat_cache.config import load_config
from lifeboat_cache.doctor import Check, DoctorContext, run_checks
from lifeboat_cache.errors import ConfigError

__all__ = ["doctor"]


def doctor(args: argparse.Namespace) -> int:
    """Check this installation and machine."""
    if args.json and args.fix and not args.yes:
        raise RefusedError("--json leaves no room for questions: add --yes, or leave out --fix.")
    checks = run_checks(_context(args))
    failed = any(check.status == "fail" for check in checks)
    fixable = [check for check in checks if check.fix is not None]
    if args.json:
        document = {
            "status": _worst(checks),
            "checks": [check.to_json() for check in checks],
            "fixed": [line for check in fixable for line in _fix(check)] if args.fix else [],
        }
        print(json.dumps(document, indent=2))
        return int(failed)
    width = max(len(check.name) for check in checks)
    for check in checks:
        _print(check, width)
    count = Counter(check.status for check in checks)
    print(
        f"\n{count['ok']} ok, {count['warn']} to look at, {count['fail']} failed, "
        f"{count['skip']} skipped"
    )
    if args.fix:
        _offer(fixable, yes=args.yes)
    return int(failed)


def _context(args: argparse.Namespace) -> DoctorContext:
    try:
        return DoctorContext(os.environ, load_config(args.config))
    except ConfigError as error:
        return DoctorContext(os.environ, None, str(error))


def _worst(checks: list[Check]) -> str:
    found = {check.status for check in checks}
    return next((status for status in ("fail", "warn") if status in found), "ok")


def _print(check: Check, width: int) -> None:
    # A summary with several lines, such as all problems of a configuration, stays readable.
    first, *rest = check.summary.splitlines() or [""]
    print(f"{check.status:4}  {check.name:{width}}  {clean(first)}")
    indent = " " * (width + 8)
    lines = [*rest, *check.details] if check.status in ("warn", "fail") else rest
    for line in lines:
        print(f"{indent}{clean(line.strip())}")
    if check.remedy:
        print(f"{indent}-> {clean(check.remedy)}")


def _fix(check: Check) -> tuple[str, ...]:
    return check.fix.apply() if check.fix is not None else ()


def _offer(fixable: list[Check], *, yes: bool) -> None:
    if not fixable:
        print("There is nothing that --fix could do.")
    for check in fixable:
        if check.fix is not None and confirm(check.fix.question, yes=yes):
            for line in check.fix.apply():
                print(clean(line))
