"""What a check of ``lifeboat-cache doctor`` is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lifeboat_cache.config import LoadedConfig

__all__ = ["Check", "DoctorContext", "Fix", "Status"]

#: ``fail``: something does not work. ``warn``: it works, but not as meant.
#: ``skip``: could not or need not be checked.
Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Fix:
    """Something that ``lifeboat-cache doctor --fix`` can do about a check.

    Attributes
    ----------
    question
        What is going to be done, as a question to the user.
    apply
        Does it and returns what it did, a line each.
    """

    question: str
    apply: Callable[[], tuple[str, ...]]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes
    ----------
    name
        Short and stable: what was looked at.
    status
        See :data:`Status`.
    summary
        What was found, in one sentence.
    remedy
        What to do about it; empty only if there is nothing to do.
    details
        More about it, a line each.
    fix
        What ``--fix`` offers, if anything.
    """

    name: str
    status: Status
    summary: str
    remedy: str = ""
    details: tuple[str, ...] = ()
    fix: Fix | None = None

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Check:
        """Return the check that :meth:`to_json` was called on, without its fix."""
        rest = {name: value for name, value in found.items() if name != "fixable"}
        return cls(**(rest | {"details": tuple(found["details"])}))

    def to_json(self) -> dict[str, Any]:
        """Return the check as a JSON-able mapping."""
        return {
            "name": self.name,
            "status": self.status,
            "summary": self.summary,
            "remedy": self.remedy,
            "details": list(self.details),
            "fixable": self.fix is not None,
        }


@dataclass(frozen=True)
class DoctorContext:
    """What checks are told.

    Attributes
    ----------
    environ
        The environment variables.
    loaded
        The configuration, None if it is not valid.
    problem
        Why it is not valid, otherwise empty.
    """

    environ: Mapping[str, str]
    loaded: LoadedConfig | None = None
    problem: str = ""
