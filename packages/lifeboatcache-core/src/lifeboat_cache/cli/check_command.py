"""``lifeboat-cache check``."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lifeboat_cache import kernels
from lifeboat_cache.check import (
    CheckReport,
    Finding,
    NamespaceReport,
    TargetReport,
    check_targets,
    namespace_directories,
)
from lifeboat_cache.check.survey import intact_document
from lifeboat_cache.cli.output import RefusedError, clean
from lifeboat_cache.cli.store_commands import opened
from lifeboat_cache.config import Config, Tier, load_config
from lifeboat_cache.config.units import format_size
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrity import IntegrityKey, configured_integrity_key
from lifeboat_cache.mover.apart import Apart, Say
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["check"]

_SHORT = 12

_MARKS = {"fault": "fault", "leftover": "left", "skipped": "skip"}


def check(args: argparse.Namespace) -> int:
    """Verify what is stored, and repair it if that is wanted."""
    config = load_config(args.config).config
    tiers = _tiers(config)
    key = configured_integrity_key(config)
    kernels.load()
    line = _ProgressLine(shown=sys.stderr.isatty() and not args.quiet)
    report = CheckReport(args.repair)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_interruptible())
        parts = []
        for tier in tiers:
            work = _CheckWork(tier, args.repair, key, stop)
            parts.append(_Part(tier, stack.enter_context(Apart(tier, work))))
        for part in parts:
            part.survey()
        only = [_matching(parts, prefix) for prefix in args.namespace] or None
        documents = {name: text for part in parts for name, text in part.documents.items() if text}
        for part in parts:
            report.targets.append(part.check(only, documents, stop, line))
            if stop.is_set():
                break
        report.interrupted = stop.is_set()
    line.clear()
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print(report, quiet=args.quiet)
    if report.interrupted:
        return 130
    problems = [target for target in report.targets if target.problem]
    for target in problems:
        print(f"lifeboat-cache: error: {target.name}: {target.problem}", file=sys.stderr)
    return 2 if problems else int(report.status != "ok")


class _CheckWork:
    """What is done at one target; see :class:`Apart`."""

    def __init__(
        self, tier: Tier, repair: bool, key: IntegrityKey | None, stop: threading.Event
    ) -> None:
        self._tier = tier
        self._repair = repair
        self._key = key
        self._stop = stop

    def __call__(self, request: dict[str, Any], say: Say) -> Any:
        if request["do"] == "survey":
            return self._survey()
        return self._check(request["only"], request["documents"], say)

    def _survey(self) -> dict[str, str]:
        """Names of the namespaces' directories, and their documents, as far as they are intact."""
        if self._tier.type == "s3":
            infos = opened(self._tier).namespaces()
            return {info.digest[:32]: "" for info in infos}
        with contextlib.suppress(LifeboatError):  # what is wrong with it is found again
            FilesystemTarget.from_tier(self._tier).prepare()
        root = self._tier.path
        found = {name: intact_document(root / name) for name in namespace_directories(root)}
        return {name: "" if one is None else one.to_json() for name, one in found.items()}

    def _check(self, only: list[str] | None, documents: dict[str, str], say: Say) -> dict[str, Any]:
        def known(name: str) -> Namespace | None:
            text = documents.get(name)
            return None if text is None else Namespace.from_json(text)

        report = check_targets(
            [self._tier],
            only=only,
            repair=self._repair,
            stop=self._stop,
            show=lambda done, total: say([done, total]),
            key=self._key,
            known=known,
        )
        return report.targets[0].to_json()


class _Part:
    """One target's part of a check."""

    def __init__(self, tier: Tier, apart: Apart) -> None:
        self.documents: dict[str, str] = {}
        self._tier = tier
        self._apart = apart
        self._problem = ""

    def survey(self) -> None:
        """Find out what is there."""
        try:
            self.documents = self._apart.ask({"do": "survey"})
        except LifeboatError as error:
            self._problem = str(error)

    def check(
        self,
        only: list[str] | None,
        documents: dict[str, str],
        stop: threading.Event,
        line: _ProgressLine,
    ) -> TargetReport:
        """Check it."""
        report = TargetReport(self._tier.name, self._tier.location, self._problem)
        if report.problem:
            return report
        request = {"do": "check", "only": only, "documents": documents}
        line.name = self._tier.name
        try:
            return TargetReport.from_json(
                self._apart.ask(request, lambda said: line.show(*said), stop.is_set)
            )
        except LifeboatError as error:
            report.problem = str(error)
            return report


def _tiers(config: Config) -> list[Tier]:
    """Every configured target: one that was disabled still holds its data."""
    found: dict[object, Tier] = {}
    for tier in (*config.storage.tiers, config.storage.fallback_local.as_tier()):
        found.setdefault(tier.location, tier)
    return list(found.values())


def _matching(parts: Sequence[_Part], prefix: str) -> str:
    """The namespace directory that the start of a digest means."""
    wanted = prefix.lower()[:32]
    names = {name for part in parts for name in part.documents}
    found = sorted(name for name in names if name.startswith(wanted))
    if not wanted or not found:
        raise RefusedError(
            f"no namespace starts with {prefix!r}. The namespaces are listed by: lifeboat-cache ls"
        )
    if len(found) > 1:
        starts = ", ".join(name[: max(_SHORT, len(wanted) + 4)] for name in found)
        raise RefusedError(f"{prefix!r} is the start of {starts}. Write more of the one you mean.")
    return found[0]


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn the first interruption into a request to end; a second one is as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class _ProgressLine:
    """One line on the terminal that is written over."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown
        self.name = ""
        self._width = 0

    def show(self, done: int, total: int) -> None:
        """Write how far it is."""
        if not self.shown:
            return
        percent = 100 * done // total if total else 100
        text = f"{self.name}: verified {format_size(done)} of {format_size(total)} ({percent} %)"
        self._width = max(self._width, len(text))
        print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)


def _print(report: CheckReport, *, quiet: bool) -> None:
    for target in report.targets:
        if not quiet:
            print(f"{target.name}: {target.location}{_state(target)}")
        for finding in target.findings:
            _print_finding(finding, quiet=quiet)
        for namespace in target.namespaces:
            if not quiet:
                print(f"  {namespace.directory[:_SHORT]}: {_counts(namespace)}")
            for finding in namespace.findings:
                _print_finding(finding, quiet=quiet)
    if report.interrupted:
        print("Interrupted: this is what was found so far.")
    if not quiet:
        print(_verdict(report))


def _state(target: TargetReport) -> str:
    if target.problem:
        return "\n  cannot be checked, see below"
    return "" if target.namespaces or target.findings else "\n  nothing to check"


def _counts(report: NamespaceReport) -> str:
    records = report.records
    parts = [f"{records.verified} blocks verified, {format_size(report.verified_bytes)}"]
    for count, text in (
        (records.bad, "bad"),
        (records.unreadable, "unreadable"),
        (records.dead, "declared dead"),
        (records.gone, "removed with their segment"),
        (records.unknown, "of a kind that this release does not know"),
        (records.newer, "in segments of a newer format"),
        (records.keyed, "not verified: protected by another integrity key"),
    ):
        if count:
            parts.append(f"{count} {text}")
    return "; ".join(parts)


def _print_finding(finding: Finding, *, quiet: bool) -> None:
    if quiet and finding.level != "fault":
        return
    mark = "fixed" if finding.repaired else _MARKS[finding.level]
    many = f" ({finding.count})" if finding.count > 1 else ""
    print(f"    {mark:5}  {clean(finding.path)}: {finding.kind}{many}: {clean(finding.detail)}")
    if finding.remedy:
        print(f"           -> {clean(finding.remedy)}")


def _verdict(report: CheckReport) -> str:
    faults = report.faults
    repaired = sum(fault.repaired for fault in faults)
    if not faults:
        if any(target.problem for target in report.targets):
            return "\nNothing is wrong in what could be checked."
        return "\nNothing is wrong."
    left = len(faults) - repaired
    many = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    if not left:
        return f"\n{many}, repaired."
    if report.repair:
        return f"\n{many}: {repaired} repaired, {left} left."
    return f"\n{many}. Nothing was changed."
