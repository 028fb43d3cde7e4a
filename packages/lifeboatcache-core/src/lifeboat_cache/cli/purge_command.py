"""``lifeboat-cache purge``: stored KV is prompt content, and may have to go."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

from lifeboat_cache.cli.output import RefusedError, clean, confirm
from lifeboat_cache.cli.store_commands import SHORT, Held, held, matching, say_problems
from lifeboat_cache.config import load_config
from lifeboat_cache.config.units import format_size, parse_duration
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.janitor import Janitor, JanitorPolicy, Purged, Selection
from lifeboat_cache.keys import salt_tag
from lifeboat_cache.targets.base import NamespaceInfo, PurgeReport

__all__ = ["purge"]

#: What comes back is removed again so many times.
_MOST_ROUNDS = 3


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
    janitor, grace_s
        Who does that, and how long readers have.
    keys
        The keys of all of it, as far as records say them.
    problem
        Why it could not be done.
    """

    item: Held
    chosen: list[NamespaceInfo]
    files: list[PurgeReport]
    records: Purged
    janitor: Janitor | None = None
    grace_s: float = 0.0
    keys: set[int] = field(default_factory=set)
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
    _do(parts, older_than_s, salt)
    _report(parts, "removed")
    return _say(parts, targets)


def _part(item: Held, wanted: set[str], older_than_s: float | None, salt: int | None) -> _Part:
    """Find out what is to go of a target."""
    chosen = [info for info in item.namespaces if info.digest[:32] in wanted]
    part = _Part(item, chosen, [], Purged())
    if not chosen:
        return part
    try:
        policy = JanitorPolicy(eviction="none")
        if item.target.shared:
            policy = policy.for_shared()
        part.grace_s = policy.grace_s
        part.janitor = Janitor(item.target, policy=policy)
        selection = _selection(part, older_than_s, salt)
        part.keys = part.janitor.find(selection).keys
        part.files = _files(part, older_than_s, salt, dry_run=True)
        part.records = part.janitor.find(selection, only_left=salt is None)
    except LifeboatError as error:
        part.problem = str(error)
    return part


def _selection(part: _Part, older_than_s: float | None, salt: int | None) -> Selection:
    return Selection(_directories(part), older_than_s, salt)


def _directories(part: _Part) -> frozenset[str]:
    return frozenset(info.digest[:32] for info in part.chosen)


def _files(
    part: _Part, older_than_s: float | None, salt: int | None, *, dry_run: bool
) -> list[PurgeReport]:
    """What goes file by file; what is stored with one salt lies among other blocks."""
    if salt is not None:
        return []
    purge_ = part.item.target.purge
    return [purge_(info.digest, older_than_s=older_than_s, dry_run=dry_run) for info in part.chosen]


def _do(parts: list[_Part], older_than_s: float | None, salt: int | None) -> None:
    """Remove it from all targets at once, so that none fills up again from another."""
    keys = frozenset[int]().union(*(part.keys for part in parts))
    for part in parts:
        if part.janitor is None:
            continue
        try:
            part.files = _files(part, older_than_s, salt, dry_run=False)
            part.records = part.janitor.doom(_selection(part, older_than_s, salt))
        except LifeboatError as error:
            part.problem = str(error)
    again = [part for part in parts if part.records.blocks]
    for _ in range(_MOST_ROUNDS):
        if not again:
            return
        _wait(max(part.grace_s for part in again) + 1.0)
        for part in again:
            if part.janitor is not None:
                part.records.left = part.janitor.erase_doomed()
        # An engine may have been copying one of these blocks from target to target.
        again = [part for part in parts if _came_back(part, keys)]


def _came_back(part: _Part, keys: frozenset[int]) -> bool:
    """Mark blocks that were copied here while they were removed; whether there are any."""
    if part.janitor is None or part.problem:
        return False
    try:
        found = part.janitor.doom(Selection(_directories(part), keys=keys))
    except LifeboatError as error:
        part.problem = str(error)
        return False
    part.records.blocks += found.blocks
    part.records.bytes += found.bytes
    part.records.left += found.blocks
    return found.blocks > 0


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
