"""Walking the schema: what its keys are, and what people are told about them."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from lifeboat_cache.config.schema import Config, Key, Section

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

    from lifeboat_cache.config.yamlfile import Location

__all__ = [
    "Entry",
    "entries",
    "key_of",
    "section_at",
    "section_of",
    "yaml_default",
    "yaml_scalar",
]


@dataclass(frozen=True)
class Entry:
    """One key of the schema.

    Attributes
    ----------
    path
        The keys that lead to it; ``tiers[]`` stands for every item of the list.
    field
        Its field.
    key
        What it takes.
    """

    path: tuple[str, ...]
    field: FieldInfo
    key: Key

    @property
    def required(self) -> bool:
        """Whether the key must be given."""
        return self.field.is_required()

    @property
    def default(self) -> str:
        """The default as written in YAML, or empty if there is none."""
        return yaml_default(self.field)


def yaml_scalar(value: object) -> str:
    """Write a value of the configuration as YAML on one line; a secret is masked."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, SecretStr):
        return '"********"' if value.get_secret_value() else '""'
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, str) and value in ("on", "off"):
        return f'"{value}"'
    if isinstance(value, (str, Path, int)):
        return str(value)
    raise TypeError(f"no YAML for {type(value).__name__}")


def yaml_default(field: FieldInfo) -> str:
    """Return a field's default as written in YAML, or empty if there is none."""
    if field.is_required() or field.default is None:
        return ""
    return "[]" if isinstance(field.default, tuple) else yaml_scalar(field.default)


def section_of(field: FieldInfo) -> tuple[type[Section] | None, bool]:
    """Return the section type that a field holds, and whether it holds a list of them."""
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        if isinstance(item, type) and issubclass(item, Section):
            return item, True
    return None, False


def key_of(field: FieldInfo) -> Key | None:
    """Return what a field takes, or None if it is a section."""
    for item in field.metadata:
        if isinstance(item, Key):
            return item
    # `Annotated[...] | None` keeps the annotation inside the union.
    for option in typing.get_args(field.annotation):
        for item in getattr(option, "__metadata__", ()):
            if isinstance(item, Key):
                return item
    return None


def entries(
    section: type[Section] = Config, above: tuple[str, ...] = (), *, live: bool = False
) -> Iterator[tuple[tuple[str, ...], type[Section], tuple[Entry, ...]]]:
    """Yield every section with its path and keys, in the order of the schema.

    What is in a list is applied live if the list is (``live``).
    """
    own: list[Entry] = []
    inner: list[tuple[tuple[str, ...], type[Section], bool]] = []
    for name, field in section.model_fields.items():
        below, many = section_of(field)
        key = key_of(field)
        if below is not None:
            listed = many and key is not None and not key.restart
            inner.append(((*above, f"{name}[]" if many else name), below, listed))
        if key is not None and live:
            key = replace(key, restart=False)
        if key is not None:
            own.append(Entry((*above, name), field, key))
    if own:
        yield above, section, tuple(own)
    for path, below, listed in inner:
        yield from entries(below, path, live=live or listed)


def section_at(location: Location) -> type[Section] | None:
    """Return the section type at a location, None if there is no section."""
    section: type[Section] = Config
    many = False
    for part in location:
        if many:
            if not isinstance(part, int):
                return None
            many = False
            continue
        field = section.model_fields.get(str(part))
        below, many = section_of(field) if field is not None else (None, False)
        if below is None:
            return None
        section = below
    return None if many else section
