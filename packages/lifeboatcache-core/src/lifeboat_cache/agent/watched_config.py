"""The configuration, read again when its files change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lifeboat_cache.config import Config, load_config
from lifeboat_cache.config.paths import CONFIG_FILE_NAME, ENV_CONFIG, ENV_HOME
from lifeboat_cache.errors import ConfigError

__all__ = ["WatchedConfig"]

_log = logging.getLogger("lifeboat_cache")

_Stamp = tuple[tuple[str, tuple[int, ...]], ...]


class WatchedConfig:
    """The configuration of a home.

    Parameters
    ----------
    home
        The home directory.
    path
        The file; ``None`` = found as engines find it.
    """

    def __init__(self, home: Path, path: Path | None) -> None:
        self._environ = {**os.environ, ENV_HOME: str(home)}
        self._path = path
        named = path or self._environ.get(ENV_CONFIG) or home / CONFIG_FILE_NAME
        self._files = [Path(os.path.abspath(named))]
        self._stamp: _Stamp | None = None
        self.config: Config | None = None
        self.source = ""
        self.problem = ""

    def look(self) -> bool:
        """Read it if it is new; whether :attr:`config` has changed.

        A file that cannot be used leaves the configuration as it was.
        """
        stamp = self._stamps()
        if stamp == self._stamp:
            return False
        try:
            loaded = load_config(self._path, self._environ)
        except ConfigError as error:
            self._stamp = stamp
            self.problem = f"the configuration cannot be used: {error}"
            _log.warning("%s", self.problem)
            return False
        self._files = list(dict.fromkeys([*self._files[:1], *loaded.files]))
        self._stamp = self._stamps()
        self.problem = ""
        self.source = loaded.source
        changed = loaded.config != self.config
        if changed and self.config is not None:
            _log.info("the configuration has changed: %s", loaded.source)
        self.config = loaded.config
        return changed

    def _stamps(self) -> _Stamp:
        return tuple((str(file), _stamp(file)) for file in self._files)


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
