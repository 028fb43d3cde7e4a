"""Keeps a filesystem target within its capacity and tidy, for all its writers together."""

from __future__ import annotations

from lifeboat_cache.janitor.janitor import Janitor
from lifeboat_cache.janitor.policy import JanitorClock, JanitorPolicy
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.janitor.selection import Purged, Selection

__all__ = ["Janitor", "JanitorClock", "JanitorPolicy", "JanitorReport", "Purged", "Selection"]
