"""What an LMCache server adds to ``lifeboat-cache status``."""

from __future__ import annotations

import logging
import os

from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.registry import stands_down

__all__ = ["show_stand_down"]

_log = logging.getLogger("lifeboat_cache")


def show_stand_down(reason: str, version: str) -> None:
    """Have ``lifeboat-cache status`` show that this server runs without the cache."""
    try:
        stands_down(home_directory(os.environ), reason, engine="lmcache", version=version)
    except ValueError as exc:  # there is no home directory
        _log.debug("LifeboatCache: the status cannot show it: %s", exc)
