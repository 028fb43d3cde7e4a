"""``lifeboat-cache purge``: stored KV is prompt content, and may have to go."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from lifeboat_cache.cli.output import RefusedError, clean, confirm
from lifeboat_cache.cli.store_commands import SHORT, Held, held, matching, say_problems
from lifeboat_cache.config import load_config
from lifeboat_cache.config.units import format_size, parse_duration
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.janitor import Janitor, JanitorPolicy, Purged, Selection
from lifeboat_cache.keys import salt_tag
from lifeboat_cache.targets.base import NamespaceInfo, PurgeReport

__all__ = ["purge"]


@dataclass
class _Part:
    """What is to go of one target.

    Attributes
    ----------
    item
        The target.
    chosen
        Namespaces.
    files
        For each of them: what goes file by file, because nobody uses these files any more.
    records
        What goes record by record.
    problem
        Why it could not be done.
    """

    item: Held
    chosen: list[NamespaceInfo]
    files: list[PurgeReport]
    records: Purged
    problem: str = ""


def purge(args: argparse.Namespace) -> int:
    """Remove stored KV by namespace, age or cache salt."""
    older_than_s = None if args.older_than is None else _age(args.older_than)
    salt = None if args.salt is None else salt_tag(args.salt)
    if salt == 0:
        raise RefusedError("--salt: an empty salt marks nothing. Use --namespace or --all.")
    targets = list(held(load_config(args.config).config))
    if args.namespace:
        wanted = {matching(targets, prefix)[:32] for prefix in args.namespace}
    else:
        wanted = {info.digest[:32] for item in targets for info in item.namespaces}
    parts = [_part(item, wanted, older_than_s, salt) for item in targets if not item.problem]
    parts = [part for part in parts if part.chosen]
    if args.dry_run:
        _report(parts, "would remove")
        return _say(parts, targets)
    # A namespace that holds nothing any more is only a directory: tidied up unasked.
    files = sum(report.files for part in parts for report in part.files)
    blocks = sum(part.records.blocks for part in parts)
    if files or blocks:
        _report(parts, "will remove")
        total = sum(report.bytes for part in parts for report in part.files)
        total += sum(part.records.bytes for part in parts)
        what = f"{files} files and {blocks} single blocks" if blocks else f"{files} files"
        if not confirm(f"Remove {what}, {format_size(total)}?", yes=args.yes):
            print("Nothing was removed.")
            return 1
    done = [_part(part.item, wanted, older_than_s, salt, doing=True) for part in parts]
    _report(done, "removed")
    return _say(done, targets)


def _part(
    item: Held,
    wanted: set[str],
    older_than_s: float | None,
    salt: int | None,
    *,
    doing: bool = False,
) -> _Part:
    """Find out what is to go of a target, or do it."""
    target = item.target
    chosen = [info for info in item.namespaces if info.digest[:32] in wanted]
    part = _Part(item, chosen, [], Purged())
    if not chosen:
        return part
    try:
        # What is stored with one salt lies among other blocks.
        if salt is None:
            part.files = [
                target.purge(info.digest, older_than_s=older_than_s, dry_run=not doing)
                for info in chosen
            ]
        policy = JanitorPolicy(eviction="none")
        if target.shared:
            policy = policy.for_shared()
        janitor = Janitor(target, policy=policy)
        selection = Selection(frozenset(info.digest[:32] for info in chosen), older_than_s, salt)
        part.records = janitor.purge(
            selection, only_left=salt is None and not doing, wait=_wait if doing else None
        )
    except LifeboatError as error:
        part.problem = str(error)
    return part


def _wait(seconds: float) -> None:
    print(f"waiting {seconds:.0f} s for engines to let go of these blocks ...", file=sys.stderr)
    time.sleep(seconds)


def _age(text: str) -> float:
    if text[-1:].isdigit():
        raise RefusedError(f"--older-than {text}: of what? Add a unit, for example 7d or 12h.")
    try:
        return parse_duration(text)
    except ValueError as error:
        raise RefusedError(f"--older-than: {error}. Write for example 7d or 12h.") from None


def _report(parts: list[_Part], verb: str) -> None:
    if not parts:
        print("Nothing is stored.")
    for part in parts:
        name = part.item.target.name
        for info, report in zip(part.chosen, part.files, strict=False):
            print(
                f"{name} {info.digest[:SHORT]}: {verb} {report.files} files, "
                f"{report.blocks} blocks, {format_size(report.bytes)}"
            )
            for writer, reason in report.kept:
                print(f"  left writer {writer[:SHORT]}: {clean(reason)}")
        records = part.records
        if records.blocks or not part.files:
            print(f"{name}: {verb} {records.blocks} single blocks, {format_size(records.bytes)}")
        if records.left:
            print(f"{name}: {records.left} of these blocks are still on storage")


def _say(parts: list[_Part], targets: list[Held]) -> int:
    code = say_problems(targets)
    for part in parts:
        for problem in (part.problem, *part.records.problems):
            if problem:
                print(f"lifeboat-cache: error: {part.item.target.name}: {problem}", file=sys.stderr)
                code = 2
        if part.records.left:
            code = 2
    return code
