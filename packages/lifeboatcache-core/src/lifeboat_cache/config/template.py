"""The commented file that ``lifeboat-cache init`` writes."""

from __future__ import annotations

import textwrap
import typing
from typing import Any

from lifeboat_cache.config.describe import key_of, section_of, yaml_default, yaml_scalar
from lifeboat_cache.config.loader import preset_values
from lifeboat_cache.config.schema import Config, Section, Tier

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

__all__ = ["render_template"]

_HEAD = """\
## The configuration of LifeboatCache. Lines that start with '##' explain; a line that starts
## with '#' shows a key at its default or with an example: remove the '#' to set it.
## Check the result with: lifeboat-cache config validate
"""

#: The tier shown in comments where none is set.
_EXAMPLE_TIER = {"name": "nvme", "type": "filesystem", "path": "/mnt/nvme/lifeboat"}


def render_template(preset: str | None = None) -> str:
    """Return a configuration file with every key explained.

    Parameters
    ----------
    preset
        A preset whose values are set in the file; without one every key is a comment
        that shows the default.

    Raises
    ------
    ConfigError
        If there is no such preset.
    """
    values = {} if preset is None else preset_values(preset)
    head = _HEAD if preset is None else f"{_HEAD}## It started as the preset {preset}.\n"
    lines = _section(Config, values, 0)
    return head + "\n".join(line.rstrip() for line in lines) + "\n"


def _section(section: type[Section], values: Mapping[str, Any], indent: int) -> list[str]:
    lines: list[str] = []
    for name, field in section.model_fields.items():
        below, many = section_of(field)
        if below is None:
            lines += _explained(field, indent)
            lines.append(_pair(name, field, values, indent))
            continue
        lines.append("")
        if many:
            lines += _explained(field, indent)
            lines += _list(name, values.get(name) or [], indent)
        else:
            lines += _comment(_first_paragraph(below), indent)
            lines.append(f"{' ' * indent}{name}:")
            lines += _section(below, values.get(name) or {}, indent + 2)
    return lines


def _list(name: str, items: list[dict[str, Any]], indent: int) -> list[str]:
    mark = "" if items else "#"
    lines = [f"{mark}{' ' * indent}{name}:"]
    for item in items or [_EXAMPLE_TIER]:
        first = True
        for key, field in Tier.model_fields.items():
            if not first:
                lines += _explained(field, indent + 4)
            line = _pair(key, field, item, indent + 4).removeprefix("#")
            if first:
                line = f"{' ' * (indent + 2)}- {line.lstrip()}"
                first = False
            lines.append(f"{'' if items and key in item else '#'}{line}")
    return lines


def _pair(name: str, field: FieldInfo, values: Mapping[str, Any], indent: int) -> str:
    value = values.get(name)
    if value is not None:
        return f"{' ' * indent}{name}: {yaml_scalar(value)}"
    key = key_of(field)
    shown = yaml_default(field) or (key.example if key is not None else "")
    return f"#{' ' * indent}{name}: {shown}"


def _explained(field: FieldInfo, indent: int) -> list[str]:
    key = key_of(field)
    text = field.description or ""
    if key is not None:
        text += f" Allowed: {key.allowed}."
    return _comment(text, indent)


def _comment(text: str, indent: int) -> list[str]:
    prefix = f"{' ' * indent}## "
    return textwrap.wrap(
        text, width=100, initial_indent=prefix, subsequent_indent=prefix, break_long_words=False
    )


def _first_paragraph(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())
