"""How numbers, sizes and times are written on pages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from lifeboat_cache.config.units import format_duration, format_size

__all__ = ["FILTERS", "ago", "count", "duration", "number", "percent", "rate", "size"]

NONE = "–"


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def size(value: Any) -> str:
    """Bytes in the decimal unit that fits."""
    return format_size(int(value)) if _finite(value) else NONE


def rate(value: Any) -> str:
    """Bytes per second."""
    return f"{format_size(int(value))}/s" if _finite(value) else NONE


def number(value: Any) -> str:
    """A number in short: ``12.3k``."""
    if not _finite(value):
        return NONE
    value = float(value)
    if value and abs(value) < 10 and value != int(value):
        return f"{value:.2g}"
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.0f}{unit}" if not unit or abs(value) >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def count(value: Any) -> str:
    """A whole number with its thousands set apart."""
    return f"{int(value):,}" if _finite(value) else NONE


def percent(value: Any) -> str:
    """A part of 1 in percent."""
    if not _finite(value):
        return NONE
    shown = 100 * float(value)
    return f"{shown:.1f} %" if 0 < shown < 10 else f"{shown:.0f} %"


def duration(value: Any) -> str:
    """Seconds in the unit that fits."""
    if not _finite(value):
        return NONE
    value = float(value)
    if 0 < value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if 0 < value < 0.1:
        return f"{value * 1000:.1f} ms"
    written = format_duration(value)
    # Beside numbers in millions an "m" is taken for one.
    return f"{written}in" if written.endswith(" m") else written


def ago(seconds: Any) -> str:
    """How long ago something was."""
    if not _finite(seconds):
        return "never"
    return "now" if seconds < 3 else f"{duration(seconds)} ago"


def moment(seconds: Any) -> str:
    """A point in time, in this machine's time."""
    if not _finite(seconds) or seconds <= 0:
        return NONE
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


#: For templates.
FILTERS: dict[str, Callable[[Any], str]] = {
    "ago": ago,
    "count": count,
    "duration": duration,
    "moment": moment,
    "number": number,
    "percent": percent,
    "rate": rate,
    "size": size,
}
