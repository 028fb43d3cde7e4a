"""What is stored: read from time to time by a thread of its own, and purged on request."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lifeboat_cache.agent.priority import step_back
from lifeboat_cache.config import Config, Tier
from lifeboat_cache.dashboard.errors import RefusedError
from lifeboat_cache.dashboard.prefixes import Prefix, shared_prefixes
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.targets.base import NamespaceInfo, PurgeReport
from lifeboat_cache.targets.opening import target_of

__all__ = ["Contents", "Held", "Inventory"]

_log = logging.getLogger("lifeboat_cache")

#: Read again after so many seconds at the earliest, and after so many times as it took.
_PAUSE_S, _TIMES = 10.0, 20

#: The same for prefixes, for which every journal is read.
_PREFIX_PAUSE_S, _PREFIX_TIMES = 120.0, 50

#: Nobody has asked for so long: nothing is read.
_INTEREST_S = 60.0

#: A page waits at most so long for the first answer.
_PATIENCE_S = 1.5

_DIGEST = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True)
class Held:
    """What one target holds."""

    name: str
    location: str
    enabled: bool
    there: bool
    namespaces: tuple[dict[str, Any], ...]
    problem: str = ""


@dataclass(frozen=True)
class Contents:
    """What all targets hold.

    Attributes
    ----------
    looked
        When that was read, in seconds since 1970; 0.0 = not yet.
    targets
        Each target.
    """

    looked: float = 0.0
    targets: tuple[Held, ...] = ()


@dataclass
class _Prefixes:
    read: float = float("-inf")
    pause: float = 0.0
    found: list[Prefix] = field(default_factory=list)


class Inventory:
    """Knows what is stored. Pages never wait for storage, but for the first answer."""

    def __init__(self) -> None:
        self._contents = Contents()
        self._config: Config | None = None
        self._prefixes: dict[str, _Prefixes] = {}
        self._asked = float("-inf")
        self._changed = threading.Condition()
        self._stop = False
        self._stale = True
        self._thread: threading.Thread | None = None

    def contents(self, config: Config | None) -> Contents:
        """What is known now."""
        with self._changed:
            if config is not None and config != self._config:
                self._config = config
                self._stale = True
            self._asked = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="contents", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._stale or self._stop or config is None, timeout=_PATIENCE_S
            )
            return self._contents

    def close(self) -> None:
        """End the thread, as far as it can be ended. Idempotent."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    def purge(self, config: Config, digest: str, target: str, *, dry_run: bool) -> PurgeReport:
        """Remove what ended processes have stored for a namespace on a target.

        Raises
        ------
        RefusedError
            If there is no such target or namespace, or the target cannot be read.
        """
        tier = next((tier for tier in _tiers(config) if tier.name == target), None)
        if tier is None:
            raise RefusedError(404, f"there is no target {target!r}: reload the page")
        if not _DIGEST.fullmatch(digest):
            raise RefusedError(404, "there is no such namespace: reload the page")
        try:
            place = target_of(tier)
            if not any(info.digest == digest for info in place.namespaces()):
                raise RefusedError(404, "there is no such namespace any more: reload the page")
            report = place.purge(digest, dry_run=dry_run)
        except LifeboatError as error:
            raise RefusedError(503, str(error)) from error
        except OSError as error:
            raise RefusedError(
                503,
                f"{tier.location} cannot be read ({error.strerror}): check the disk or the mount",
            ) from error
        if not dry_run:
            _log.info(
                "dashboard: purged namespace %s on %s: %d files, %d bytes",
                digest[:12],
                target,
                report.files,
                report.bytes,
            )
            with self._changed:
                self._stale = True
                self._changed.notify_all()
        return report

    def _work(self) -> None:
        step_back()
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or self._stale, timeout=pause)
                self._changed.wait_for(lambda: self._stop or self._wanted())
                if self._stop:
                    return
                config = self._config
                assert config is not None
            began = time.monotonic()
            try:
                contents = Contents(time.time(), tuple(self._held(tier) for tier in _tiers(config)))
            except Exception:  # a fault of ours: what was known stays
                _log.exception("dashboard: contents could not be read; please report this")
                contents = self._contents
            with self._changed:
                self._contents = contents
                self._stale = self._config is not config
                self._changed.notify_all()
            pause = max(_PAUSE_S, _TIMES * (time.monotonic() - began))
            self._read_prefixes(contents)

    def _wanted(self) -> bool:
        return self._config is not None and time.monotonic() - self._asked < _INTEREST_S

    def _held(self, tier: Tier) -> Held:
        location = tier.location
        try:
            found = target_of(tier).namespaces()
            there = tier.type == "s3" or tier.path.is_dir()
        except (LifeboatError, OSError) as error:
            return Held(tier.name, location, tier.enabled, False, (), str(error))
        described = tuple(self._described(tier.path, info) for info in found)
        return Held(tier.name, location, tier.enabled, there, described)

    def _described(self, root: Path, info: NamespaceInfo) -> dict[str, Any]:
        known = self._prefixes.get(str(root / info.digest[:32]))
        return {
            "digest": info.digest,
            **{name: _fact(info, name) for name in ("model", "dtype", "engine", "adapter")},
            "display": info.display,
            "identity": info.identity,
            "blocks": info.blocks,
            "bytes": info.bytes,
            "created": info.created,
            "last_used": info.last_used,
            "writers_alive": sum(writer.alive for writer in info.writers),
            "writers_ended": sum(not writer.alive for writer in info.writers),
            "prefixes": None if known is None else [asdict(prefix) for prefix in known.found],
            "problems": list(info.problems),
        }

    def _read_prefixes(self, contents: Contents) -> None:
        known: dict[str, _Prefixes] = {}
        for held in contents.targets:
            for space in held.namespaces:
                directory = Path(held.location) / space["digest"][:32]
                one = self._prefixes.get(str(directory)) or _Prefixes()
                known[str(directory)] = one
                now = time.monotonic()
                if self._stop or now - one.read < one.pause:
                    continue
                try:
                    one.found = shared_prefixes(directory)
                except OSError:  # purged in the meantime
                    one.found = []
                one.read = time.monotonic()
                one.pause = max(_PREFIX_PAUSE_S, _PREFIX_TIMES * (one.read - now))
                with self._changed:  # so that the next page has it
                    self._prefixes[str(directory)] = one
                    space["prefixes"] = [asdict(prefix) for prefix in one.found]
        self._prefixes = known


def _tiers(config: Config) -> list[Tier]:
    """Every configured target: one that was disabled still holds its data."""
    found: dict[str, Tier] = {}
    for tier in (*config.storage.tiers, config.storage.fallback_local.as_tier()):
        found.setdefault(tier.location, tier)
    return list(found.values())


def _fact(info: NamespaceInfo, name: str) -> str:
    """What a namespace says about itself in a few words."""
    places: tuple[Mapping[str, Any], ...] = (info.display, info.identity)
    for place in places:
        value = place.get(name)
        if isinstance(value, Mapping):
            parts = (value.get(part) for part in ("name", "version", "format"))
            value = " ".join(str(part) for part in parts if isinstance(part, (str, int)))
        if isinstance(value, (str, int)) and value != "":
            return str(value)
    return ""
