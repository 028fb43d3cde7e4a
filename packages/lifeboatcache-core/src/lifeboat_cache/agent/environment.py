"""The environment of a process that an engine starts and that outlives it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lifeboat_cache.config.paths import ENV_CONFIG, ENV_HOME

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
    kept = {
        name: value
        for name, value in environ.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
    kept[ENV_HOME] = str(home)
    if config is not None:
        kept[ENV_CONFIG] = str(config)
    return kept
