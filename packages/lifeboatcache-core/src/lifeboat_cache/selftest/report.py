"""What a self-test found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Report", "Status", "Step"]

#: ``skipped``: could not be tried, because an earlier step failed.
Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Step:
    """One thing that was tried.

    Attributes
    ----------
    name
        Short and stable: what was tried.
    status
        See :data:`Status`.
    summary
        What happened, in one sentence.
    remedy
        What to do about it; empty if it is ok.
    details
        More about it, a line each.
    """

    name: str
    status: Status
    summary: str
    remedy: str = ""
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON-able mapping."""
        return {
            "name": self.name,
            "status": self.status,
            "summary": self.summary,
            "remedy": self.remedy,
            "details": list(self.details),
        }


@dataclass(frozen=True)
class Report:
    """The result of a self-test.

    Attributes
    ----------
    engine
        What was tested, with its version if it is known.
    steps
        In the order in which they were tried.
    unable
        Why the self-test could not run at all, ending in the remedy; otherwise empty.
    facts
        JSON-able things worth knowing: versions, places, speeds. Not judged.
    """

    engine: str
    steps: tuple[Step, ...] = ()
    unable: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: every step is ok; 1: one is not; 2: the self-test could not run."""
        if self.unable or not self.steps:
            return 2
        return int(any(step.status != "ok" for step in self.steps))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-able mapping."""
        return {
            "engine": self.engine,
            "status": ("ok", "failed", "unable")[self.exit_code],
            "unable": self.unable or None,
            "steps": [step.to_json() for step in self.steps],
            "facts": dict(self.facts),
        }
