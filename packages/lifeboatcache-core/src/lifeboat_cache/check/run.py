"""Checking targets: their directories, then each namespace."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from lifeboat_cache.check.payloads import Progress, Verifier
from lifeboat_cache.check.records import RecordCheck
from lifeboat_cache.check.report import (
    CheckReport,
    Finding,
    NamespaceReport,
    TargetReport,
)
from lifeboat_cache.check.survey import intact_document, survey_namespace
from lifeboat_cache.config import Tier
from lifeboat_cache.errors import ForeignDataError, LifeboatError, NewerFormatError
from lifeboat_cache.format.header import FORMAT_VERSION
from lifeboat_cache.integrity import IDENTITY_FIELD, IntegrityKey
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.system import usable_cpus
from lifeboat_cache.targets.layout import (
    NAMESPACE_NAME,
    ROOT_MARKER,
    USAGE_FILE,
    check_root,
    write_atomically,
)

__all__ = ["CheckedTarget", "check_targets", "namespace_directories"]

#: More threads than this hardly read a disk any faster.
_MOST_THREADS = 8


class CheckedTarget(Protocol):
    """The part of a tier's configuration that a check needs."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def direct_io(self) -> Literal["auto", "on", "off"]: ...


def namespace_directories(root: Path) -> list[str]:
    """Names of the namespace directories in a target's directory; none if it is not there."""
    try:
        with os.scandir(root) as listing:
            return sorted(
                entry.name
                for entry in listing
                if NAMESPACE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def check_targets(
    targets: Sequence[CheckedTarget],
    *,
    only: Collection[str] | None = None,
    repair: bool = False,
    threads: int | None = None,
    stop: threading.Event | None = None,
    show: Callable[[int, int], None] | None = None,
    key: IntegrityKey | None = None,
    known: Callable[[str], Namespace | None] = lambda _: None,
) -> CheckReport:
    """Verify what targets hold, beside engines that use them.

    Parameters
    ----------
    targets
        Which ones.
    only
        Names of the namespace directories to check; by default all.
    repair
        Whether to repair what can be repaired.
    threads
        Threads that read and hash; by default two per CPU, so that some hash
        while others wait for the disk, up to 8.
    stop
        Set it to end early; the report holds what was found so far.
    show
        Called with bytes verified and to verify a few times a second, on any thread.
    key
        The integrity key. Records whose checksum needs another one are counted and left.
    known
        Gives the document of a namespace, by its directory's name, if other targets have it.

    Returns
    -------
    CheckReport
        A target that cannot be checked has a ``problem`` there.
    """
    stop = stop or threading.Event()
    progress = Progress(show)
    report = CheckReport(repair)
    run = _Run(targets, only, repair, stop, progress, key, known)
    run.verifier = Verifier(
        threads or min(_MOST_THREADS, 2 * usable_cpus()),
        stop,
        progress,
        key.secret if key is not None else None,
    )
    try:
        run.estimate()
        for target in targets:
            found = TargetReport(target.name, _location(target))
            report.targets.append(found)
            if stop.is_set():
                break
            try:
                run.check(target, found)
            except LifeboatError as error:
                found.problem = str(error)
            except OSError as error:
                found.problem = (
                    f"{error.filename or target.path}: {error.strerror or error}: "
                    "check the disk, its mount and the permissions"
                )
    finally:
        run.verifier.close()
    report.interrupted = stop.is_set()
    return report


def _location(target: CheckedTarget) -> str:
    """Where it is, for people: of a bucket its name."""
    return target.location if isinstance(target, Tier) else str(target.path)


class _Run:
    """One check of several targets."""

    verifier: Verifier

    def __init__(
        self,
        targets: Sequence[CheckedTarget],
        only: Collection[str] | None,
        repair: bool,
        stop: threading.Event,
        progress: Progress,
        key: IntegrityKey | None,
        known: Callable[[str], Namespace | None],
    ) -> None:
        self._key = key
        self._elsewhere = known
        self._targets = targets
        self._only = only
        self._repair = repair
        self._stop = stop
        self._progress = progress
        self._sizes: dict[Path, int] = {}

    def _directories(self, root: Path) -> list[Path]:
        return [
            root / name
            for name in namespace_directories(root)
            if self._only is None or name in self._only
        ]

    def estimate(self) -> None:
        """Take the sizes of segments for what there is to verify, until it is known."""
        for target in self._targets:
            if getattr(target, "type", "") == "s3":  # it says so itself
                continue
            for directory in self._directories(target.path):
                self._sizes[directory] = _segment_bytes(directory)
                self._progress.add(total=self._sizes[directory])

    def check(self, target: CheckedTarget, report: TargetReport) -> None:
        """Check one target."""
        if getattr(target, "type", "") == "s3":
            self._check_bucket(target, report)
            return
        root = target.path
        marker: Finding | None = None
        try:
            if not check_root(root, create=False):
                return
        except NewerFormatError as error:
            detail, _, remedy = str(error).partition(": ")
            report.findings.append(Finding("newer-format", "skipped", ROOT_MARKER, detail, remedy))
            return
        except ForeignDataError:
            if not namespace_directories(root):
                raise
            state = "damaged" if (root / ROOT_MARKER).exists() else "missing"
            effect = "no engine uses the directory"
        else:
            state = "" if (root / ROOT_MARKER).exists() else "missing"
            effect = "it is made again when something is stored"
        if state:
            detail = f"the file that marks the directory is {state}: {effect}"
            marker = Finding("root-marker", "fault", ROOT_MARKER, detail)
            report.findings.append(marker)
        strangers = _strangers(root)
        for name in strangers if self._only is None else ():
            report.findings.append(
                Finding(
                    "foreign-file",
                    "fault",
                    name,
                    "not a file of LifeboatCache",
                    "move it elsewhere",
                )
            )
        for directory in self._directories(root):
            if self._stop.is_set():
                return
            namespace = self._check_namespace(target, directory)
            if namespace is not None:
                report.namespaces.append(namespace)
        if marker is not None:
            self._mend_marker(root, report, marker, certain=not strangers)

    def _check_bucket(self, target: CheckedTarget, report: TargetReport) -> None:
        from lifeboat_cache.s3.archive import archive_of
        from lifeboat_cache.s3.checking import check_bucket
        from lifeboat_cache.s3.settings import S3Settings

        if not isinstance(target, Tier):
            raise TypeError(f"{type(target).__name__} says of no bucket which one it is")
        check_bucket(
            archive_of(S3Settings.from_tier(target)),
            report,
            only=self._only,
            repair=self._repair,
            stop=self._stop,
            progress=self._progress,
            key=self._key,
        )

    def _check_namespace(self, target: CheckedTarget, directory: Path) -> NamespaceReport | None:
        try:
            survey = survey_namespace(directory, self._known, self._stop)
        except FileNotFoundError:
            return None  # purged since it was listed
        report = survey.report
        self._progress.add(total=survey.payload_bytes - self._sizes.get(directory, 0))
        if survey.digest is not None and not self._stop.is_set():
            RecordCheck(
                survey,
                survey.digest,
                self.verifier,
                direct=target.direct_io != "off",
                repair=self._repair,
                stop=self._stop,
                keyed=self._has_key_of(directory),
            ).run()
        if self._repair and not self._stop.is_set():
            for finding in report.findings:
                finding.apply()
        return report

    def _has_key_of(self, directory: Path) -> bool:
        """Whether our key is that of a namespace: with another one, everything would look bad."""
        document = intact_document(directory) or self._known(directory.name)
        return (
            self._key is not None
            and document is not None
            and document.identity.get(IDENTITY_FIELD) == self._key.id
        )

    def _known(self, name: str) -> Namespace | None:
        """An intact document of a namespace in any of the targets."""
        for target in self._targets:
            found = intact_document(target.path / name)
            if found is not None:
                return found
        return self._elsewhere(name)

    def _mend_marker(
        self, root: Path, report: TargetReport, marker: Finding, *, certain: bool
    ) -> None:
        ours = any(namespace.digest for namespace in report.namespaces)
        newer = any(finding.level == "skipped" for finding in report.all_findings())
        if ours and certain and not newer:
            data = json.dumps({"format": FORMAT_VERSION}).encode() + b"\n"
            marker.fix = partial(write_atomically, root / ROOT_MARKER, data)
            if self._repair:
                marker.apply()
        else:
            marker.remedy = (
                f"make sure that {root} holds nothing but KV of LifeboatCache in format "
                f"{FORMAT_VERSION}, then write " + '{"format": 1} into that file'
            )


def _segment_bytes(directory: Path) -> int:
    size = 0
    with contextlib.suppress(OSError):
        for path in directory.glob("*.segment"):
            with contextlib.suppress(OSError):
                size += path.stat().st_size
    return size


def _strangers(root: Path) -> list[str]:
    """Files in a target's directory that do not belong there."""
    known = {ROOT_MARKER, USAGE_FILE, "lost+found", *namespace_directories(root)}
    return [n for n in sorted(os.listdir(root)) if n not in known and not n.startswith(".")]
