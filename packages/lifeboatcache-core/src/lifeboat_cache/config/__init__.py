"""Configuration: the schema, and loading it from YAML files.

Needs neither an engine nor torch, and reads YAML only if there is a file.
"""

from lifeboat_cache.config.loader import LoadedConfig, load_config, preset_names, preset_path
from lifeboat_cache.config.schema import (
    FALLBACK_NAME,
    Agent,
    Compression,
    Config,
    Dashboard,
    Engine,
    Eviction,
    FallbackLocal,
    Prometheus,
    Rungs,
    Security,
    Storage,
    Telemetry,
    Tier,
)

__all__ = [
    "FALLBACK_NAME",
    "Agent",
    "Compression",
    "Config",
    "Dashboard",
    "Engine",
    "Eviction",
    "FallbackLocal",
    "LoadedConfig",
    "Prometheus",
    "Rungs",
    "Security",
    "Storage",
    "Telemetry",
    "Tier",
    "load_config",
    "preset_names",
    "preset_path",
]
