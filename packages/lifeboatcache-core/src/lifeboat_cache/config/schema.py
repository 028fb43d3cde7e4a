"""The configuration schema.

Each key carries its unit, what it allows, an example and its description. Error
messages, ``lifeboat-cache init`` and ``docs/configuration.md`` are made from them.
Values keep the unit their name ends in; properties give bytes.
"""

from __future__ import annotations

from pydantic import model_validator

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


#: Hosts that stand for all addresses, and names of others.
_ANY_HOST = ("0.0.0.0", "::")
_NAMES_OF_HOSTS = {"localhost": "127.0.0.1"}


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

    @model_validator(mode="after")
    def _check(self) -> Config:
        metrics, pages = self.telemetry.prometheus, self.dashboard
        hosts = {_NAMES_OF_HOSTS.get(one.host, one.host) for one in (metrics, pages)}
        meet = len(hosts) == 1 or not hosts.isdisjoint(_ANY_HOST)
        if pages.enabled and pages.port == metrics.port and meet:
            raise SettingError(
                ("dashboard", "port"),
                f"{pages.port} is telemetry.prometheus.port too: give each a port of its own",
            )
        return self
