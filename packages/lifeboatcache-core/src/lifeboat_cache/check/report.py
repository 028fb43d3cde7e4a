"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = [
    "RUN_REPAIR",
    "CheckReport",
    "Finding",
    "Level",
    "NamespaceReport",
    "Records",
    "TargetReport",
]

#: ``fault``: something is wrong. ``leftover``: what a killed process left, harmless.
#: ``skipped``: a newer release's, not judged.
Level = Literal["fault", "leftover", "skipped"]

#: The remedy of everything that can be repaired.
RUN_REPAIR = "run: lifeboat-cache check --repair"


@dataclass
class Finding:
    """One thing that was found, in one file.

    Attributes
    ----------
    kind
        What it is, one word with hyphens; for programs.
    level
        How bad it is.
    path
        The file, from the target's directory.
    detail
        The condition, for people.
    remedy
        What to do about it; empty once it is repaired.
    count
        How many records, entries or files of this file it is about.
    repaired
        Whether it has been repaired.
    fix
        Repairs it, or raises ``OSError``; ``None`` if that cannot be done.
    """

    kind: str
    level: Level
    path: str
    detail: str
    remedy: str = RUN_REPAIR
    count: int = 1
    repaired: bool = False
    fix: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def apply(self) -> None:
        """Repair it if that is possible; a failure is added to the detail."""
        if self.fix is None or self.repaired:
            return
        try:
            self.fix()
        except OSError as error:
            self.failed(error.strerror or str(error))
            return
        self.repaired = True
        self.remedy = ""

    def failed(self, why: str) -> None:
        """Say that a repair was tried in vain."""
        self.detail += f"; the repair failed ({why})"
        self.remedy = "check the disk, its free space and the permissions, then run it again"

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Finding:
        """From what :meth:`to_json` returns; without its ``fix``."""
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping."""
        names = ("kind", "level", "path", "count", "detail", "remedy", "repaired")
        return {name: getattr(self, name) for name in names}


@dataclass
class Records:
    """How many records of a namespace are what.

    Attributes
    ----------
    verified
        Their payload matches its checksum.
    bad
        It does not match, or does not lie inside its segment.
    unreadable
        The system reported an error.
    dead
        Declared dead, by a tombstone or a dead bitmap: not read.
    gone
        Their segment was removed.
    unknown
        Of a codec, checksum or kind that this release does not know.
    newer
        In segments of a newer format.
    keyed
        Their checksum needs an integrity key that the check does not have: not read.
    """

    verified: int = 0
    bad: int = 0
    unreadable: int = 0
    dead: int = 0
    gone: int = 0
    unknown: int = 0
    newer: int = 0
    keyed: int = 0


@dataclass
class NamespaceReport:
    """What was found in one namespace; ``digest`` is ``None`` if it cannot be known."""

    directory: str
    digest: str | None = None
    writers: int = 0
    alive: int = 0
    verified_bytes: int = 0
    records: Records = field(default_factory=Records)
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> NamespaceReport:
        """From what :meth:`to_json` returns."""
        findings = [Finding.from_json(finding) for finding in found["findings"]]
        return cls(**(found | {"records": Records(**found["records"]), "findings": findings}))

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping."""
        return {
            "directory": self.directory,
            "digest": self.digest,
            "writers": self.writers,
            "alive": self.alive,
            "verified_bytes": self.verified_bytes,
            "records": asdict(self.records),
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass
class TargetReport:
    """What was found in one target; ``problem`` says why it could not be checked."""

    name: str
    location: str
    problem: str = ""
    findings: list[Finding] = field(default_factory=list)
    namespaces: list[NamespaceReport] = field(default_factory=list)

    def all_findings(self) -> Iterator[Finding]:
        """Its own and those of its namespaces."""
        yield from self.findings
        for namespace in self.namespaces:
            yield from namespace.findings

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> TargetReport:
        """From what :meth:`to_json` returns."""
        return cls(
            found["name"],
            found["location"],
            found["problem"] or "",
            [Finding.from_json(finding) for finding in found["findings"]],
            [NamespaceReport.from_json(namespace) for namespace in found["namespaces"]],
        )

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping."""
        return {
            "name": self.name,
            "location": self.location,
            "problem": self.problem or None,
            "findings": [finding.to_json() for finding in self.findings],
            "namespaces": [namespace.to_json() for namespace in self.namespaces],
        }


@dataclass
class CheckReport:
    """What a check of all targets found."""

    repair: bool
    interrupted: bool = False
    targets: list[TargetReport] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """Everything that is or was wrong."""
        return [f for target in self.targets for f in target.all_findings() if f.level == "fault"]

    @property
    def status(self) -> Literal["ok", "repaired", "faulty"]:
        """Whether anything is wrong, was wrong, or is not."""
        faults = self.faults
        if not faults:
            return "ok"
        return "repaired" if all(fault.repaired for fault in faults) else "faulty"

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping; ``docs/troubleshooting.md`` describes it."""
        return {
            "status": self.status,
            "repair": self.repair,
            "interrupted": self.interrupted,
            "targets": [target.to_json() for target in self.targets],
        }
