"""Where the files of movers are, and who wants one.

::

    $LIFEBOAT_CACHE_HOME/run/mover-<node>-<target>.lock         locked by the mover
    $LIFEBOAT_CACHE_HOME/run/mover-<node>-<target>.json         what it published last
    $LIFEBOAT_CACHE_HOME/run/mover-<node>-<target>.sock         where engines reach it
    $LIFEBOAT_CACHE_HOME/run/mover-<node>-<target>.want-<pid>   a process that wants it, and how
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.agent.places import node_key
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.registry.files import read_json, replace_json, run_directory

__all__ = ["WANTED_S", "MoverPlaces", "forget_old", "target_key", "wants"]

#: Who still wants a mover says so again well within so many seconds.
WANTED_S = 60.0

#: Files of another boot or container are left behind after so many seconds.
_LEFT_BEHIND_S = 7 * 86400.0

_NAME = re.compile(
    r"mover-(?P<node>[0-9a-f]{16})-(?P<target>[0-9a-f]{16})"
    r"\.(?:lock|json|sock|want-(?P<pid>[0-9]+))"
)


def target_key(tier: Tier) -> str:
    """A name for the target of a tier (16 hexadecimal digits); touches nothing."""
    where = tier.model_dump(
        mode="json",
        include={"type", "path", "bucket", "endpoint_url", "prefix", "region"},
    )
    # As a bucket's place is compared; see ``S3Settings.place``.
    where["prefix"] = where["prefix"].strip("/")
    where["endpoint_url"] = (where["endpoint_url"] or "").rstrip("/") or None
    text = "\0".join(f"{name}={where[name]}" for name in sorted(where))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class MoverPlaces:
    """Paths of the mover of one target, home and node."""

    home: Path
    node: str
    target: str

    @classmethod
    def of(cls, home: Path, target: str) -> MoverPlaces:
        """The places of this node below a home directory."""
        return cls(Path(home), node_key(), target)

    def _file(self, ending: str) -> Path:
        return run_directory(self.home) / f"mover-{self.node}-{self.target}.{ending}"

    @property
    def lock(self) -> Path:
        """Held by the mover."""
        return self._file("lock")

    @property
    def document(self) -> Path:
        """What it says about itself."""
        return self._file("json")

    @property
    def socket(self) -> Path:
        """Where engines reach it."""
        return self._file("sock")

    @property
    def log(self) -> Path:
        """The log of all movers of the home."""
        return self.home / "mover.log"

    def at_socket(self, call: Callable[[str], object]) -> None:
        """Call something with the socket's path, however long that is. Raises ``OSError``."""
        flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC | os.O_DIRECTORY
        directory = os.open(run_directory(self.home), flags)
        try:
            # The path of a Unix socket has at most 107 bytes.
            call(f"/proc/self/fd/{directory}/{self.socket.name}")
        finally:
            os.close(directory)

    def want(self, tier: Tier) -> None:
        """Say that this process wants the mover, now and for a while. Raises ``OSError``."""
        run_directory(self.home, create=True)
        path = self._file(f"want-{os.getpid()}")
        value = {"tier": tier.model_dump(mode="json")}
        found = read_json(path)
        if found is not None and found[0] == value:
            os.utime(path)
        else:
            replace_json(path, value)

    def withdraw(self) -> None:
        """Say that this process wants it no more."""
        with contextlib.suppress(OSError):
            os.unlink(self._file(f"want-{os.getpid()}"))

    def wanted(self) -> list[Tier]:
        """The tier as processes want it now."""
        return wants(self.home).get(self.target, [])


def wants(home: Path) -> dict[str, list[Tier]]:
    """The movers that processes of this node want now, by target. Never raises."""
    node = node_key()
    found: dict[str, list[Tier]] = {}
    with contextlib.suppress(OSError), os.scandir(run_directory(home)) as listing:
        for entry in listing:
            match = _NAME.fullmatch(entry.name)
            if match is None or match["node"] != node or match["pid"] is None:
                continue
            document = read_json(Path(entry.path))
            if document is None or time.time() - document[1] > WANTED_S:
                continue
            # Another release's tier may not be one here.
            with contextlib.suppress(ValueError):
                tier = Tier.model_validate(document[0].get("tier"))
                found.setdefault(match["target"], []).append(tier)
    return found


def forget_old(home: Path) -> None:
    """Remove what processes wanted that are gone, and files of nodes long gone."""
    node = node_key()
    with contextlib.suppress(OSError), os.scandir(run_directory(home)) as listing:
        for entry in listing:
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
            stale = match["pid"] is not None and age > 10 * WANTED_S
            if stale or (match["node"] != node and age > _LEFT_BEHIND_S):
                os.unlink(entry.path)
