"""The switch: ``LIFEBOAT_CACHE``. Imports nothing, since every process of an engine asks."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["is_enabled"]


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``LIFEBOAT_CACHE`` asks for activation."""
    return environ.get("LIFEBOAT_CACHE", "").strip().lower() in ("1", "true", "yes", "on")
