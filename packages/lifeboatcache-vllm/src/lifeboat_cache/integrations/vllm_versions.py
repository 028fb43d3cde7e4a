"""Which versions of vLLM the adapter was tested with."""

from __future__ import annotations

import re

__all__ = ["TESTED", "describe_tested", "is_tested", "parse_minor"]

#: The tested minor releases, oldest first.
TESTED: tuple[tuple[int, int], ...] = ((0, 32), (0, 33))

_MINOR = re.compile(r"v?(\d+)\.(\d+)(?=[.+]|a\d|b\d|rc\d|$)")


def parse_minor(version: str) -> tuple[int, int] | None:
    """Return the minor release of a version.

    Parameters
    ----------
    version
        As the distribution writes it: ``0.32.0``, ``0.33.1rc2+cpu``.

    Returns
    -------
    tuple of int or None
        ``(0, 33)``, or None if ``version`` is not of that form.
    """
    match = _MINOR.match(version.strip())
    return None if match is None else (int(match[1]), int(match[2]))


def is_tested(version: str) -> bool:
    """Whether the adapter was tested with the minor release of ``version``."""
    return parse_minor(version) in TESTED


def describe_tested() -> str:
    """Return the tested minor releases for people: ``0.32 to 0.33``."""
    first, last = (f"{major}.{minor}" for major, minor in (TESTED[0], TESTED[-1]))
    return first if first == last else f"{first} to {last}"
