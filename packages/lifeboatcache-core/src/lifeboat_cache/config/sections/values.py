"""Kinds of values that several sections take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo

from lifeboat_cache.config.paths import Places
from lifeboat_cache.config.sections.base import Key
from lifeboat_cache.config.units import SIZE_EXAMPLES, parse_duration, parse_size

__all__ = [
    "MAX_WAIT_S",
    "SIZE_ALLOWED",
    "AbsolutePath",
    "Capacity",
    "LiveSwitch",
    "Reserve",
    "Switch",
    "to_gigabytes",
    "to_path",
    "to_seconds",
    "to_switch",
]

_MAX_GB = 1_000_000

#: The longest time that anything can be told to wait.
MAX_WAIT_S = 600


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def to_gigabytes(value: object) -> object:
    """Sizes, a plain number in GB (10^9 bytes)."""
    if isinstance(value, str):
        gigabytes = parse_size(value, plain=10**9) / 1e9
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        gigabytes = _float(value)
    else:
        raise ValueError(f"{value!r} is not a size")
    if gigabytes > _MAX_GB:
        raise ValueError(f"{value!r} is more than {_MAX_GB:,} GB; a plain number is in GB")
    return gigabytes


def to_seconds(value: object) -> object:
    """Durations, a plain number in seconds."""
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _float(value)
    raise ValueError(f"{value!r} is not a duration")


def to_switch(value: object) -> object:
    """A word, if it may be `on` or `off`."""
    # YAML reads a bare on or off as a truth value.
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def to_path(value: object, info: ValidationInfo) -> object:
    """Absolute paths, once `~` and variables are expanded."""
    if not isinstance(value, (str, Path)):
        raise ValueError(f"{value!r} is not a path")
    places = info.context if isinstance(info.context, Places) else Places.current()
    path = places.expand(str(value))
    if not path.is_absolute():
        raise ValueError(f"{str(value)!r} is relative, and engines start in different directories")
    return path


#: What is said of sizes.
SIZE_ALLOWED = f"up to {_MAX_GB:,} GB, a number of GB (10^9 bytes) or with a unit: {SIZE_EXAMPLES}"

Capacity = Annotated[
    float,
    BeforeValidator(to_gigabytes),
    Field(gt=0, allow_inf_nan=False),
    Key(allowed=f"above 0, {SIZE_ALLOWED}", example="200G", unit="GB"),
]
Reserve = Annotated[
    float,
    BeforeValidator(to_gigabytes),
    Field(ge=0, allow_inf_nan=False),
    Key(allowed=f"0 or more, {SIZE_ALLOWED}", example="10G", unit="GB"),
]
Switch = Annotated[bool, Key(allowed="true or false", example="true")]
LiveSwitch = Annotated[bool, Key(allowed="true or false", example="true", restart=False)]
AbsolutePath = Annotated[
    Path,
    BeforeValidator(to_path),
    Key(
        allowed="an absolute path; ~, $NAME and ${NAME} are expanded",
        example="/mnt/nvme/lifeboat",
    ),
]
