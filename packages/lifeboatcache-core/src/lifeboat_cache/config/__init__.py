"""Configuration: the schema, and loading it from YAML files.

Needs neither an engine nor torch, and reads YAML only if there is a file.
"""

from lifeboat_cache.config.loader import LoadedConfig, load_config, preset_names, preset_path
from lifeboat_cache.config.schema import (
    FALLBACK_NAME,
    Config,
    Engine,
    FallbackLocal,
    Security,
    Storage,
    Tier,
)

__all__ = [
    "FALLBACK_NAME",
    "Config",
    "Engine",
    "FallbackLocal",
    "LoadedConfig",
    "Security",
    "Storage",
    "Tier",
    "load_config",
    "preset_names",
    "preset_path",
]
