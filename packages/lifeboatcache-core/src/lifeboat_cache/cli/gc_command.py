"""``lifeboat-cache gc``: one round of the janitor."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from lifeboat_cache.cli.store_commands import opened
from lifeboat_cache.config import Tier, load_config
from lifeboat_cache.config.units import format_size
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrity import IntegrityKey, configured_integrity_key
from lifeboat_cache.janitor import Janitor, JanitorPolicy, JanitorReport
from lifeboat_cache.mover.apart import Apart, Say
from lifeboat_cache.targets.filesystem import FilesystemTarget

if TYPE_CHECKING:
    from lifeboat_cache.s3.janitor import BucketJanitor

__all__ = ["gc", "run_to_the_end"]

#: Evicting, reclaiming and rewriting need a run each, with a grace between them.
_MOST_RUNS = 4

#: Numbers of a report that add up over several runs.
_SUMS = tuple(
    one.name
    for one in fields(JanitorReport)
    if one.name.endswith(("_blocks", "_bytes", "_removed", "_segments", "_folded", "seconds"))
)


def run_to_the_end(
    janitor: Janitor | BucketJanitor, grace_s: float, sleep: Callable[[float], None]
) -> JanitorReport:
    """Run until there is nothing more to reclaim; what all runs did together.

    Parameters
    ----------
    janitor
        The janitor.
    grace_s, sleep
        How long readers get, and how to wait for so many seconds.
    """
    total = janitor.run_once()
    for _ in range(_MOST_RUNS - 1):
        if total.busy or not total.pending:
            break
        sleep(grace_s + 1.0)
        report = janitor.run_once()
        for name in _SUMS:
            setattr(report, name, getattr(report, name) + getattr(total, name))
        report.used_before = total.used_before
        report.problems = [*dict.fromkeys((*total.problems, *report.problems))]
        total = report
    return total


def gc(args: argparse.Namespace) -> int:
    """Make room and tidy up."""
    config = load_config(args.config).config
    key = configured_integrity_key(config)
    policy = JanitorPolicy(eviction=config.eviction.policy, max_age_s=config.eviction.max_age)
    documents: list[dict[str, Any]] = []
    failed = False
    for tier in config.storage.places:
        problem = ""
        done: dict[str, Any] = {"report": None, "text": "", "problems": []}
        with Apart(tier, partial(_work, tier, policy, key)) as apart:
            try:
                done = apart.ask(args.dry_run)
            except LifeboatError as error:
                problem = str(error)
        failed = failed or bool(problem or done["problems"])
        documents.append(
            {
                "name": tier.name,
                "location": tier.location,
                "problem": problem or None,
                "report": done["report"],
            }
        )
        if not args.json and not problem:
            print(f"{tier.name}: {done['text']}", flush=True)
        for line in (problem, *done["problems"]):
            if line:
                print(f"lifeboat-cache: error: {tier.name}: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps({"dry_run": args.dry_run, "targets": documents}, indent=2))
    return 2 if failed else 0


def _work(
    tier: Tier, policy: JanitorPolicy, key: IntegrityKey | None, dry_run: bool, _: Say
) -> dict[str, Any]:
    """One target's part; see :class:`Apart`."""
    target = opened(tier)
    janitor: Janitor | BucketJanitor
    if isinstance(target, FilesystemTarget):
        policy = policy.for_shared() if target.shared else policy
        janitor = Janitor(target, policy=policy, key=key)
    else:
        from lifeboat_cache.s3.janitor import BucketJanitor

        janitor = BucketJanitor(target.archive, policy=policy, key=key)
    with contextlib.closing(janitor):
        if dry_run:
            report = janitor.run_once(dry_run=True)
        else:
            report = run_to_the_end(janitor, policy.grace_s, _sleep)
    return {
        "report": report.to_json(),
        "text": _text(report, dry_run) + _why_full(report, policy),
        "problems": report.problems,
    }


def _sleep(seconds: float) -> None:
    """Sleep, and be seen to do so: who does nothing for long is taken to hang."""
    whole = int(seconds)
    for _ in range(whole):
        time.sleep(1.0)
    time.sleep(seconds - whole)


def _why_full(report: JanitorReport, policy: JanitorPolicy) -> str:
    """Why nothing is evicted where more is used than the capacity allows."""
    used = report.used_after or report.used_before  # a dry run does not measure again
    if report.capacity is None or used <= report.capacity or report.evicted_blocks:
        return ""
    if policy.eviction == "none":
        return " (eviction.policy is none)"
    return f" (blocks stored in the last {policy.young_s:.0f} s stay: run it again)"


def _text(report: JanitorReport, dry_run: bool) -> str:
    if report.holder:
        return f"the janitor of {report.holder} looks after it: run this there; nothing was done"
    if report.busy:
        return "another janitor is at work; nothing was done"
    limit = "" if report.capacity is None else f" of {format_size(report.capacity)}"
    evicted = f"{report.evicted_blocks} blocks ({format_size(report.evicted_bytes)})"
    if dry_run:
        return f"would evict {evicted}; {format_size(report.used_before)}{limit} used"
    back = report.punched_bytes + report.removed_bytes + report.trimmed_bytes
    return (
        f"evicted {evicted}, gave back {format_size(back)}, "
        f"rewrote {report.compacted_segments + report.merged_segments} segments, "
        f"removed {report.writers_removed} ended writers; "
        f"{format_size(report.used_after)}{limit} used"
    )
