"""Turning validation errors into sentences that say what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lifeboat_cache.config.describe import entries, key_of, section_at
from lifeboat_cache.config.nearest import nearest
from lifeboat_cache.config.schema import SettingError
from lifeboat_cache.config.yamlfile import Location, key_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic_core import ErrorDetails

__all__ = ["locate_problems"]


def locate_problems(
    errors: Iterable[ErrorDetails], where: Callable[[Location], str]
) -> dict[str, Location]:
    """Describe validation errors, one sentence or two each.

    Parameters
    ----------
    errors
        What validating a :class:`~lifeboat_cache.config.schema.Config` reported.
    where
        Names the file and line that a location comes from.

    Returns
    -------
    dict
        The sentences, and which key each is about.
    """
    listed = list(errors)
    # The other keys of a tier of an unknown type are judged by the wrong schema.
    unknown_types = {e["loc"][:-1] for e in listed if e["loc"][-1:] == ("type",)}
    texts: dict[str, Location] = {}
    for error in listed:
        location: Location = tuple(error["loc"])
        if location[-1:] != ("type",) and location[:-1] in unknown_types:
            continue
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            location = (*location, *cause.path)
        texts[f"{where(location)}: {_describe(error, location, cause)}"] = location
    return texts


def _describe(error: ErrorDetails, location: Location, cause: object) -> str:
    name = key_path(location)
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown key. {_suggest(location)}"
    if isinstance(cause, SettingError):
        return f"{name}: {cause}."
    above = section_at(location[:-1])
    field = above.model_fields.get(str(location[-1])) if above is not None and location else None
    key = key_of(field) if field is not None else None
    if key is None:
        # A section, or an item of a list of them, that is not a mapping.
        section = section_at(location)
        fields = section.model_fields if section is not None else {}
        keys = ", ".join(fields)
        # What stands in the place of a section can be the secret that belongs below it.
        secret = any(below.secret for below in map(key_of, fields.values()) if below is not None)
        what = _shown(error["input"], secret=secret)
        return f"{name}: {what} instead of a mapping. Write keys below it: {keys}."
    if error["type"] == "missing":
        return f"{name}: missing. Add it, for example {location[-1]}: {key.example}."
    if isinstance(cause, ValueError) and not key.secret:
        said = str(cause)
    else:
        said = f"{_shown(error['input'], secret=key.secret)} is not allowed"
    end = "" if said.endswith("?") else "."
    example = f"{location[-1]}: {key.example}"
    return f"{name}: {said}{end} Allowed: {key.allowed}. Write for example {example}."


def _suggest(location: Location) -> str:
    name = str(location[-1])
    section = section_at(location[:-1])
    known = tuple(section.model_fields) if section is not None else ()
    if len(location) == 1:
        known = ("extends", *known)
    near = nearest(name, known)
    if near is not None:
        return f"Did you mean '{near}'?"
    homes = [
        ".".join(path) or "the top level"
        for path, _, own in entries()
        if any(entry.path[-1] == name for entry in own)
    ]
    if homes:
        return f"It belongs in {' or '.join(homes)}: move it there."
    return f"Remove it; known here are: {', '.join(known)}."


def _shown(value: Any, *, secret: bool) -> str:
    if secret:
        return f"a value of type {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
