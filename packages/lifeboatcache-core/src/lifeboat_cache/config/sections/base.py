"""What all sections of the configuration have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

__all__ = ["Key", "Section", "SettingError"]


@dataclass(frozen=True)
class Key:
    """What a key takes, for people.

    Attributes
    ----------
    allowed
        The values it accepts.
    example
        One of them, as written in YAML.
    unit
        The unit of a plain number, or empty.
    restart
        Whether a change is only seen by engines started afterwards.
    secret
        Whether the value must never be shown.
    """

    allowed: str
    example: str
    unit: str = ""
    restart: bool = True
    secret: bool = False


class SettingError(ValueError):
    """A problem that a section finds in one of its keys.

    Attributes
    ----------
    path
        The key, from the section that raises.
    """

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


class Section(BaseModel):
    """A mapping in the configuration file: unknown keys are refused, values are fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        """Take a known key without a value as absent, and an absent section as empty.

        The sections are made here instead of by a default factory, so that their
        own defaults are validated with the context of this validation.
        """
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        kept: dict[Any, Any] = {k: v for k, v in data.items() if v is not None or k not in known}
        for name, field in known.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                kept.setdefault(name, {})
        return kept
