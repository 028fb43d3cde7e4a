"""Which versions of LMCache the adapter was tested with."""

from __future__ import annotations

import importlib.metadata
import re

from lifeboat_cache.errors import InterfaceError

__all__ = ["TESTED", "describe_tested", "is_tested", "lmcache_version", "parse_release", "refuse"]

#: The tested releases: the minor release, and the first and last of its patches.
TESTED: tuple[tuple[tuple[int, int], int, int], ...] = (((0, 5), 6, 6),)

_RELEASE = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?=[.+]|a\d|b\d|rc\d|$)")


def parse_release(version: str) -> tuple[int, int, int] | None:
    """Return the release of a version: ``0.5.6.post1`` is ``(0, 5, 6)``.

    None if ``version`` is not of that form.
    """
    match = _RELEASE.match(version.strip())
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def is_tested(version: str) -> bool:
    """Whether the adapter was tested with ``version``."""
    release = parse_release(version)
    return release is not None and any(
        release[:2] == minor and first <= release[2] <= last for minor, first, last in TESTED
    )


def describe_tested() -> str:
    """Return the tested releases for people: ``0.5.6``."""
    texts = []
    for (major, minor), first, last in TESTED:
        text = f"{major}.{minor}.{first}"
        texts.append(text if first == last else f"{text} to {major}.{minor}.{last}")
    return ", ".join(texts)


def lmcache_version() -> str:
    """Return the installed version of LMCache, empty if there is none."""
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return ""


def refuse() -> None:
    """Make sure that the installed LMCache is one that the adapter was tested with.

    Its interface changes between patch releases, and what is not known to fit could
    serve wrong KV.

    Raises
    ------
    InterfaceError
        If it is not, or if there is none.
    """
    version = lmcache_version()
    if is_tested(version):
        return
    found = f"this is LMCache {version}" if version else "LMCache is not installed"
    raise InterfaceError(
        f"lifeboatcache-lmcache was tested with LMCache {describe_tested()}, and {found}: "
        f'pip install "lmcache=={describe_tested().rpartition(" ")[2]}", or a '
        "lifeboatcache-lmcache that was tested with yours"
    )
