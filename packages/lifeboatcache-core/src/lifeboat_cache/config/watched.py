"""The configuration of a home, read again when its files change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lifeboat_cache.config.loader import load_config
from lifeboat_cache.config.paths import CONFIG_FILE_NAME, ENV_CONFIG, ENV_HOME, Places
from lifeboat_cache.config.schema import Config
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
    speaker
        Begins the lines that it logs.
    """

    def __init__(self, home: Path, path: Path | None, *, speaker: str = "") -> None:
        self._environ = {**os.environ, ENV_HOME: str(home)}
        self._speaker = speaker
        self._path = path
        self._files = [self._named()]
        self._stamp: _Stamp | None = None
        self.config: Config | None = None
        self.source = ""
        self.problem = ""

    def _named(self) -> Path:
        """The file that decides: others may come and go with what it extends."""
        named = self._path or self._environ.get(ENV_CONFIG)
        try:
            places = Places.current(self._environ)
            return Path(os.path.abspath(places.expand(str(named)))) if named else self._default()
        except (ValueError, OSError):  # reading it says what is wrong with its name
            return self._default()

    def _default(self) -> Path:
        return Path(self._environ[ENV_HOME]) / CONFIG_FILE_NAME

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
            problem = f"the configuration cannot be used: {error}"
            if self.config is not None:
                problem += " Until then the values from before stay in effect."
            if problem != self.problem:
                _log.warning("%s%s", self._speaker, problem)
            self.problem = problem
            return False
        self._files = list(dict.fromkeys([*self._files[:1], *loaded.files]))
        self._stamp = self._stamps()
        self.problem = ""
        self.source = loaded.source
        changed = loaded.config != self.config
        if changed and self.config is not None:
            _log.info("%sthe configuration has changed: %s", self._speaker, loaded.source)
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
