"""From a tier of the configuration to its target."""

from __future__ import annotations

from lifeboat_cache.config.schema import Tier
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["target_of"]


def target_of(tier: Tier) -> Target:
    """The target of a tier; nothing is read or made, and no path is looked at."""
    if tier.type == "s3":
        from lifeboat_cache.s3.target import S3Target

        return S3Target.from_tier(tier)
    return FilesystemTarget.from_tier(tier)
