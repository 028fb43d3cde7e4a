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
    names = _KEPT | _used_by(config, environ)
    kept = {
        name: value
        for name, value in environ.items()
        if name in names or name.startswith(_KEPT_PREFIXES)
    }
    kept[ENV_HOME] = str(home)
    named = str(config) if config is not None else kept.get(ENV_CONFIG, "")
    if named:
        # The agent is in another directory.
        kept[ENV_CONFIG] = named if named.startswith(("~", "$")) else os.path.abspath(named)
    return kept


def _used_by(config: Path | None, environ: Mapping[str, str]) -> set[str]:
    """Variables that the configuration refers to."""
    try:
        files = load_config(config, environ).files
        return {name for file in files for name in _VARIABLE.findall(file.read_text())}
    except (ConfigError, OSError, ValueError):
        return set()  # the agent says what is wrong with it
