"""Which versions of SGLang the adapter was tested with."""

from __future__ import annotations

import re

__all__ = ["TESTED", "describe_tested", "is_tested"]

#: The tested releases, oldest first. SGLang's patch releases change interfaces.
TESTED: tuple[str, ...] = ("0.5.23",)

_RELEASE = re.compile(r"v?(\d+\.\d+\.\d+)(?=$|[.+]post|\+)")


def is_tested(version: str) -> bool:
    """Whether the adapter was tested with the release of ``version``."""
    match = _RELEASE.match(version.strip())
    return match is not None and match[1] in TESTED


def describe_tested() -> str:
    """Return the tested releases for people."""
    return ", ".join(TESTED)
