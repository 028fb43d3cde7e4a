"""The environment of a process that an engine starts and that outlives it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from lifeboat_cache.config import load_config
from lifeboat_cache.config.paths import ENV_CONFIG, ENV_HOME
from lifeboat_cache.errors import ConfigError

__all__ = ["child_environment"]

#: What finds Python, our distributions and the files that the configuration names.
_KEPT = frozenset(
    {
        "CONDA_PREFIX",
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONHOME",
        "PYTHONNOUSERSITE",
        "PYTHONPATH",
        "PYTHONPYCACHEPREFIX",
        "PYTHONUSERBASE",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)

#: ``NUMBA_``: kernels fit who loads them only if they were compiled with the same settings.
_KEPT_PREFIXES = ("LIFEBOAT_CACHE", "LC_", "NUMBA_")


#: With a bucket among the tiers: what credentials and the way to it are found with.
_FOR_BUCKETS = frozenset(
    {
        "ALL_PROXY",
        "BOTO_CONFIG",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "NO_PROXY",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
    }
)
_FOR_BUCKETS_PREFIX = "AWS_"

_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


def child_environment(
    environ: Mapping[str, str], home: Path, config: Path | None
) -> dict[str, str]:
    """What an agent inherits of an engine's environment.

    Parameters
    ----------
    environ
        The engine's.
    home
        The home directory, for ``LIFEBOAT_CACHE_HOME``.
    config
        The configuration file, for ``LIFEBOAT_CACHE_CONFIG``; ``None`` leaves that as it is.
    """
    used, buckets = _used_by(config, environ)
    names = _KEPT | used
    kept = {
        name: value
        for name, value in environ.items()
        if name in names or name.startswith(_KEPT_PREFIXES) or (buckets and _for_buckets(name))
    }
    kept[ENV_HOME] = str(home)
    named = str(config) if config is not None else kept.get(ENV_CONFIG, "")
    if named:
        # The agent is in another directory.
        kept[ENV_CONFIG] = named if named.startswith(("~", "$")) else os.path.abspath(named)
    return kept


def _for_buckets(name: str) -> bool:
    # Those of proxies are written both ways.
    return name.upper() in _FOR_BUCKETS or name.startswith(_FOR_BUCKETS_PREFIX)


def _used_by(config: Path | None, environ: Mapping[str, str]) -> tuple[set[str], bool]:
    """Variables that the configuration refers to, and whether it has tiers that are buckets."""
    try:
        loaded = load_config(config, environ)
        names = {name for file in loaded.files for name in _VARIABLE.findall(file.read_text())}
        return names, any(tier.type == "s3" for tier in loaded.config.storage.tiers)
    except (ConfigError, OSError, ValueError):
        return set(), False  # the agent says what is wrong with it
