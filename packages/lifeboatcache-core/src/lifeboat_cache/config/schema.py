"""The configuration schema.

Each key carries its unit, what it allows, an example and its description. Error
messages, ``lifeboat-cache init`` and ``docs/configuration.md`` are made from them.
Values keep the unit their name ends in; properties give bytes.
"""

from __future__ import annotations

from lifeboat_cache.config.sections.agent import Agent
from lifeboat_cache.config.sections.base import Key, Section, SettingError
from lifeboat_cache.config.sections.compression import Compression, Rungs
from lifeboat_cache.config.sections.dashboard import Dashboard
from lifeboat_cache.config.sections.engine import Engine
from lifeboat_cache.config.sections.eviction import Eviction
from lifeboat_cache.config.sections.security import Security
from lifeboat_cache.config.sections.storage import FallbackLocal, Storage
from lifeboat_cache.config.sections.telemetry import Prometheus, Telemetry
from lifeboat_cache.config.sections.tiers import FALLBACK_NAME, Tier

__all__ = [
    "FALLBACK_NAME",
    "Agent",
    "Compression",
    "Config",
    "Dashboard",
    "Engine",
    "Eviction",
    "FallbackLocal",
    "Key",
    "Prometheus",
    "Rungs",
    "Section",
    "Security",
    "SettingError",
    "Storage",
    "Telemetry",
    "Tier",
]


class Config(Section):
    """The whole configuration."""

    storage: Storage
    compression: Compression
    eviction: Eviction
    engine: Engine
    agent: Agent
    security: Security
    telemetry: Telemetry
    dashboard: Dashboard
