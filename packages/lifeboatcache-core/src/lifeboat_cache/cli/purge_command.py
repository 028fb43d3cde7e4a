"""``lifeboat-cache purge``: stored KV is prompt content, and may have to go."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lifeboat_cache.cli.output import RefusedError, clean, confirm
from lifeboat_cache.cli.store_commands import (
    SHORT,
    Held,
    TargetWork,
    held,
    matching,
    say_problems,
)
from lifeboat_cache.config import Tier, load_config
from lifeboat_cache.config.units import format_size, parse_duration
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.janitor import Janitor, JanitorPolicy, Purged, Selection
from lifeboat_cache.keys import salt_tag
from lifeboat_cache.targets.base import NamespaceInfo, PurgeReport
from lifeboat_cache.targets.filesystem import FilesystemTarget

if TYPE_CHECKING:
    from lifeboat_cache.s3.janitor import BucketJanitor

__all__ = ["purge"]

#: What comes back is removed again so many times.
_MOST_ROUNDS = 3


class _PurgeWork(TargetWork):
    """Finding and removing at one target."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self._janitor: Janitor | BucketJanitor | None = None
        self._digests: list[str] = []
        self._older_than_s: float | None = None
        self._salt: int | None = None

    def _selection(self, **more: Any) -> Selection:
        return Selection(frozenset(digest[:32] for digest in self._digests), **more)

    def _files(self, *, dry_run: bool) -> list[dict[str, Any]]:
        """What goes file by file; what is stored with one salt lies among other blocks."""
        if self._salt is not None or not isinstance(self.target, FilesystemTarget):
            return []
        purge_ = self.target.purge
        return [
            asdict(purge_(digest, older_than_s=self._older_than_s, dry_run=dry_run))
            for digest in self._digests
        ]

    def find(
        self, digests: list[str], older_than_s: float | None, salt: int | None
    ) -> dict[str, Any]:
        """Find out what is to go."""
        self._digests, self._older_than_s, self._salt = digests, older_than_s, salt
        policy = JanitorPolicy(eviction="none")
        janitor: Janitor | BucketJanitor
        if isinstance(self.target, FilesystemTarget):
            policy = policy.for_shared() if self.target.shared else policy
            janitor = Janitor(self.target, policy=policy)
        else:
            from lifeboat_cache.s3.janitor import BucketJanitor

            janitor = BucketJanitor(self.target.archive, policy=policy)
        self._janitor = janitor
        selection = self._selection(older_than_s=older_than_s, salt=salt)
        keys = janitor.find(selection).keys
        files = self._files(dry_run=True)
        records = janitor.find(selection, only_left=salt is None)
        found = {"grace_s": policy.grace_s, "keys": sorted(keys), "files": files}
        return found | {"records": _to_json(records)}

    def remove(self) -> dict[str, Any]:
        """Remove files, and mark the other records."""
        files = self._files(dry_run=False)
        selection = self._selection(older_than_s=self._older_than_s, salt=self._salt)
        return {"files": files, "records": _to_json(self._its_janitor.doom(selection))}

    def erase(self) -> int:
        """Erase what was marked a grace ago; how many records are left."""
        return self._its_janitor.erase_doomed()

    def mark(self, keys: list[int]) -> dict[str, Any]:
        """Mark records by their keys: those that have come back."""
        return _to_json(self._its_janitor.doom(self._selection(keys=frozenset(keys))))

    @property
    def _its_janitor(self) -> Janitor | BucketJanitor:
        assert self._janitor is not None, "nothing has been found yet"
        return self._janitor


def _to_json(records: Purged) -> dict[str, Any]:
    # Keys are told once, by themselves.
    return asdict(replace(records, keys=set())) | {"keys": []}


def _records(found: dict[str, Any]) -> Purged:
    return Purged(**(found | {"keys": set()}))


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
    grace_s
        How long readers have.
    keys
        The keys of all of it, as far as records say them.
    problem
        Why it could not be done.
    """

    item: Held
    chosen: list[NamespaceInfo]
    files: list[PurgeReport] = field(default_factory=list)
    records: Purged = field(default_factory=Purged)
    grace_s: float = 0.0
    keys: frozenset[int] = frozenset()
    problem: str = ""

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have something done there; ``None`` if that fails now or has failed before."""
        if self.problem:
            return None
        try:
            return self.item.apart.ask({"do": do, **arguments})
        except LifeboatError as error:
            self.problem = str(error)
            return None


def purge(args: argparse.Namespace) -> int:
    """Remove stored KV by namespace, age or cache salt."""
    older_than_s = None if args.older_than is None else _age(args.older_than)
    salt = None if args.salt is None else salt_tag(args.salt)
    if salt == 0:
        raise RefusedError("--salt: an empty salt marks nothing. Use --namespace or --all.")
    with contextlib.ExitStack() as stack:
        targets = []
        for item in held(load_config(args.config).config, _PurgeWork):
            stack.callback(item.apart.close)
            targets.append(item)
        return _purge(args, targets, older_than_s, salt)


def _purge(
    args: argparse.Namespace, targets: list[Held], older_than_s: float | None, salt: int | None
) -> int:
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
    _do(parts)
    _report(parts, "removed")
    return _say(parts, targets)


def _part(item: Held, wanted: set[str], older_than_s: float | None, salt: int | None) -> _Part:
    """Find out what is to go of a target."""
    part = _Part(item, [info for info in item.namespaces if info.digest[:32] in wanted])
    if part.chosen:
        digests = [info.digest for info in part.chosen]
        found = part.ask("find", digests=digests, older_than_s=older_than_s, salt=salt)
        if found is not None:
            part.grace_s, part.keys = found["grace_s"], frozenset(found["keys"])
            _note(part, found)
    return part


def _note(part: _Part, found: dict[str, Any]) -> None:
    part.files = [
        PurgeReport(**(file | {"kept": [(writer, why) for writer, why in file["kept"]]}))
        for file in found["files"]
    ]
    part.records = _records(found["records"])


def _do(parts: list[_Part]) -> None:
    """Remove it from all targets at once, so that none fills up again from another."""
    keys = sorted(frozenset[int]().union(*(part.keys for part in parts)))
    for part in parts:
        done = part.ask("remove")
        if done is not None:
            _note(part, done)
    again = [part for part in parts if part.records.blocks and not part.problem]
    for _ in range(_MOST_ROUNDS):
        if not again:
            return
        _wait(max(part.grace_s for part in again) + 1.0)
        for part in again:
            left = part.ask("erase")
            part.records.left = part.records.blocks if left is None else left
        # An engine may have been copying one of these blocks from target to target.
        again = [part for part in parts if _came_back(part, keys)]


def _came_back(part: _Part, keys: list[int]) -> bool:
    """Mark blocks that were copied here while they were removed; whether there are any."""
    done = part.ask("mark", keys=keys)
    if done is None:
        return False
    found = _records(done)
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
        name = part.item.name
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
                print(f"lifeboat-cache: error: {part.item.name}: {problem}", file=sys.stderr)
                code = 2
        if part.records.left:
            code = 2
    return code
