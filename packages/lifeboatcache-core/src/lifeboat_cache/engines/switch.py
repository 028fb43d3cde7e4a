"""The switch: ``LIFEBOAT_CACHE``. Imports nothing, since every process of an engine asks."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["is_enabled", "is_misspelled"]


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``LIFEBOAT_CACHE`` asks for activation."""
    return _value(environ) in ("1", "true", "yes", "on")


def is_misspelled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``LIFEBOAT_CACHE`` is neither on nor off; then it counts as off."""
    return not is_enabled(environ) and _value(environ) not in ("", "0", "false", "no", "off")


def _value(environ: Mapping[str, str]) -> str:
    return environ.get("LIFEBOAT_CACHE", "").strip().lower()
