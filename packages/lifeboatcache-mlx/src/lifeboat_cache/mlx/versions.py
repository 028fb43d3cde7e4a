"""Which releases of mlx-lm the package was tested with."""

from __future__ import annotations

__all__ = ["TESTED", "describe_tested", "is_tested", "minor_of"]

#: The tested minor releases.
TESTED: tuple[str, ...] = ("0.32",)


def minor_of(version: str) -> str:
    """``major.minor`` of a version."""
    return ".".join(version.split(".")[:2])


def is_tested(version: str) -> bool:
    """Whether the package was tested with the minor release of ``version``."""
    return minor_of(version) in TESTED


def describe_tested() -> str:
    """Return the tested releases for people."""
    return ", ".join(TESTED)
