"""The configuration of a running process: what may change while it runs, does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from lifeboat_cache.config.describe import key_of, section_of
from lifeboat_cache.config.loader import LoadedConfig
from lifeboat_cache.config.schema import Config, Section
from lifeboat_cache.config.watched import WatchedConfig

__all__ = ["LiveConfig", "with_live_keys"]

_log = logging.getLogger("lifeboat_cache")


class LiveConfig:
    """The configuration that a process started with, and what has become of it since.

    Only :meth:`look` reads files: to be called every few seconds on a thread that may wait
    for them. Everybody else reads :attr:`config`, which is replaced as a whole.

    Parameters
    ----------
    loaded
        What the process started with.

    Attributes
    ----------
    config
        What is in effect: keys that are applied live as in the files now, all others as at
        the start.
    problem
        Why the files cannot be used now; the last values that could stay in effect.
    restart
        Keys that have another value in the files than in this process.
    """

    def __init__(self, loaded: LoadedConfig) -> None:
        self.config: Config = loaded.config
        self.problem = ""
        self.restart: tuple[str, ...] = ()
        self._started = loaded.config
        self._watched = WatchedConfig(loaded.home, loaded.named, speaker="LifeboatCache: ")
        self._looking = threading.Lock()

    def look(self) -> bool:
        """Read the files if they have changed; whether :attr:`config` has."""
        with self._looking:
            self._watched.look()
            self.problem = self._watched.problem
            found = self._watched.config
            if found is None:
                return False
            self._note(tuple(_restart_keys(self._started, found)))
            config = with_live_keys(self._started, found)
            if config == self.config:
                return False
            self.config = config
            return True

    def _note(self, keys: tuple[str, ...]) -> None:
        if keys and keys != self.restart:
            _log.warning(
                "LifeboatCache: the configuration has changed; restart the engine to apply %s",
                ", ".join(keys),
            )
        self.restart = keys


def with_live_keys(started: Config, found: Config) -> Config:
    """The values of ``started`` with those keys of ``found`` that are applied live."""
    live: Config = _mixed(started, found)
    return live


def _mixed(started: Any, found: Any) -> Any:
    changed: dict[str, Any] = {}
    for name, field in type(started).model_fields.items():
        key = key_of(field)
        if isinstance(getattr(started, name), Section):
            changed[name] = _mixed(getattr(started, name), getattr(found, name))
        elif key is not None and not key.restart:
            changed[name] = getattr(found, name)
    return started.model_copy(update=changed)


def _restart_keys(started: Section, found: Section, above: str = "") -> Iterator[str]:
    for name, field in type(started).model_fields.items():
        old, new = getattr(started, name), getattr(found, name)
        if old == new:
            continue
        below, many = section_of(field)
        if below is not None and not many:
            yield from _restart_keys(old, new, f"{above}{name}.")
            continue
        key = key_of(field)
        if key is None or key.restart:
            yield f"{above}{name}"
