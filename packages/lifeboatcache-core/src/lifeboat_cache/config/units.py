"""Sizes and durations as people write them.

A size takes a decimal unit (``200G`` is 200e9 bytes) or a binary one (``1Gi`` is
2**30 bytes); a duration takes ``ms``, ``s``, ``m``, ``h`` or ``d``. A plain
number counts in the unit that the reader of the value names.
"""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = [
    "AGE_EXAMPLES",
    "DURATION_EXAMPLES",
    "SIZE_EXAMPLES",
    "format_duration",
    "format_size",
    "parse_duration",
    "parse_size",
]

#: What to show somebody who wrote a size that does not parse.
SIZE_EXAMPLES = "200G, 1.5T, 500 MB or 1Gi"
#: What to show somebody who wrote a duration that does not parse.
DURATION_EXAMPLES = "5s, 250ms or 2m"
#: The same for one that counts in days rather than seconds.
AGE_EXAMPLES = "30d, 12h or 90m"

_SIZE_UNITS = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "p": 10**15,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
    "pi": 2**50,
}
_DURATION_UNITS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_SPELLED = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<unit>[A-Za-z]*)")


def _split(text: str, what: str) -> tuple[Decimal, str]:
    match = _SPELLED.fullmatch(text.strip())
    # Longer than any real value: int() and Decimal would otherwise take their time.
    if match is None or len(text) > 64:
        raise ValueError(f"{text[:64]!r} is not a {what}")
    return Decimal(match["number"]), match["unit"]


def parse_size(text: str, *, plain: int = 1) -> int:
    """Read a size.

    Parameters
    ----------
    text
        A non-negative number, optionally followed by a unit: ``k M G T P`` (powers
        of 1,000) or ``Ki Mi Gi Ti Pi`` (powers of 1,024), with or without a ``B``,
        in either case.
    plain
        Bytes that one stands for when there is no unit.

    Returns
    -------
    int
        Bytes, rounded to the nearest.

    Raises
    ------
    ValueError
        If ``text`` is not a size.
    """
    number, unit = _split(text, "size")
    if not unit:
        return round(number * plain)
    lower = unit.lower()
    factor = 1 if lower == "b" else _SIZE_UNITS.get(lower.removesuffix("b"))
    if factor is None:
        raise ValueError(f"{text!r} is not a size: there is no unit {unit!r}")
    return round(number * factor)


def parse_duration(text: str, *, plain: float = 1.0) -> float:
    """Read a duration.

    Parameters
    ----------
    text
        A non-negative number, optionally followed by ``ms``, ``s``, ``m``, ``h`` or
        ``d``.
    plain
        Seconds that one stands for when there is no unit.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    ValueError
        If ``text`` is not a duration.
    """
    number, unit = _split(text, "duration")
    if not unit:
        return float(number) * plain
    if unit.lower() not in _DURATION_UNITS:
        raise ValueError(f"{text!r} is not a duration: there is no unit {unit!r}")
    return float(number * _DURATION_UNITS[unit.lower()])


def format_size(size: int) -> str:
    """Show ``size`` bytes in the decimal unit that fits, as ``df -H`` would."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.95 or unit == "TB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """Show a duration in its largest fitting unit, for example ``3.5 h``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
