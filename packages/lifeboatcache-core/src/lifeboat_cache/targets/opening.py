"""From a tier of the configuration to its target."""

from __future__ import annotations

from lifeboat_cache.config.schema import Tier
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["target_of"]


def target_of(tier: Tier) -> Target:
    """The target of a tier; nothing is read or made, and no path is looked at."""
    return FilesystemTarget.from_tier(tier)
