"""Which targets an agent looks after, and with which limits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from lifeboat_cache.config import Config
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.nfs_mount import NfsProtocol

__all__ = ["WantedTarget", "merged", "of_config", "of_document"]

_DirectIO = Literal["auto", "on", "off"]
_Eviction = Literal["lru", "none"]

#: A mount that does not say within so many seconds where a path leads counts as dead.
_ANSWER_S = 1.0

_resolving: dict[str, _Resolution] = {}
_guard = threading.Lock()


class _Resolution(threading.Thread):
    """Finds out where a path leads, which takes for ever on a dead mount."""

    def __init__(self, path: str) -> None:
        super().__init__(name="lifeboat-resolve", daemon=True)
        self.path = path
        self.real: str | None = None
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            self.real = os.path.realpath(self.path)
        except Exception as problem:  # raised where it is waited for
            self.problem = problem


def _resolved(path: str) -> Path:
    """A path with its links resolved, or as it is while its mount does not answer."""
    with _guard:
        resolution = _resolving.get(path)
        wait_s = 0.0
        if resolution is None:
            resolution = _resolving[path] = _Resolution(path)
            wait_s = _ANSWER_S
            resolution.start()
    resolution.join(wait_s)
    if resolution.is_alive():
        return Path(os.path.normpath(path))
    with _guard:
        _resolving.pop(path, None)
    if resolution.real is None:
        raise resolution.problem or OSError("the path could not be resolved")
    return Path(resolution.real)


@dataclass(frozen=True)
class WantedTarget:
    """A directory and its limits.

    Attributes
    ----------
    path
        The directory, links resolved.
    name
        For people.
    capacity
        Bytes that all writers together may allocate; ``None`` = no limit.
    reserve
        Bytes that the filesystem must keep free.
    direct_io
        See :class:`FilesystemTarget`.
    eviction
        See :class:`~lifeboat_cache.janitor.JanitorPolicy`.
    integrity_key
        The key's file, without which records that it protects cannot be copied.
    max_age_s
        See :class:`~lifeboat_cache.janitor.JanitorPolicy`.
    kind, mount, protocol, file_mode, group
        See :class:`FilesystemTarget`.
    """

    path: Path
    name: str
    capacity: int | None
    reserve: int
    direct_io: _DirectIO
    eviction: _Eviction = "lru"
    integrity_key: Path | None = None
    max_age_s: float = 0.0
    kind: Literal["filesystem", "nfs", "ontap"] = "filesystem"
    mount: Path | None = None
    protocol: NfsProtocol | None = None
    file_mode: int = 0o600
    group: str | None = None

    @property
    def special(self) -> bool:
        """Whether it is not a directory like any other."""
        usual = ("filesystem", None, 0o600, None)
        return (self.kind, self.mount, self.file_mode, self.group) != usual

    def open(self) -> FilesystemTarget:
        """The target; nothing is read or made."""
        return FilesystemTarget(
            self.path,
            name=self.name,
            capacity=self.capacity,
            reserve=self.reserve,
            direct_io=self.direct_io,
            kind=self.kind,
            mount=self.mount,
            protocol=self.protocol,
            file_mode=self.file_mode,
            group=self.group,
        )


def of_config(config: Config, tiers: Sequence[Tier] | None = None) -> list[WantedTarget]:
    """The enabled targets of a configuration, or those of some tiers, looked after as it says.

    Buckets are looked after by others.
    """
    return [
        WantedTarget(
            _resolved(str(tier.path)),
            tier.name,
            tier.capacity_bytes,
            tier.min_free_bytes,
            tier.direct_io,
            config.eviction.policy,
            config.security.integrity_key,
            config.eviction.max_age,
            tier.type,
            tier.mount,
            tier.protocol,
            tier.file_mode_bits,
            tier.group,
        )
        for tier in (config.storage.places if tiers is None else tiers)
        if tier.type != "s3"
    ]


def of_document(
    document: Mapping[str, Any], elsewhere: Callable[[str], bool] = lambda _: False
) -> list[WantedTarget]:
    """The targets that a store has published and uses.

    Those of which it has not said all that must be known are left out, and those that are
    looked after elsewhere, given their location: their paths are not even resolved.
    """
    # Stores of older releases have one target, and no list.
    listed = document.get("targets")
    facts = listed if isinstance(listed, list) else [document.get("target")]
    unused = ("opening", "disabled", "closed")
    found = [
        _of_facts(one)
        for one in facts
        if isinstance(one, dict)
        and one.get("state") not in unused
        and not elsewhere(str(one.get("location")))
    ]
    return [target for target in found if target is not None]


def _of_facts(facts: Mapping[str, Any]) -> WantedTarget | None:
    path, name, direct_io = facts.get("location"), facts.get("name"), facts.get("direct_io")
    capacity, reserve = facts.get("capacity_bytes", -1), facts.get("reserve_bytes")
    if (
        not isinstance(path, str)
        or not os.path.isabs(path)
        or "\0" in path
        or not isinstance(name, str)
        or not (capacity is None or _size(capacity))
        or not _size(reserve)
        or direct_io not in ("auto", "on", "off")
    ):
        return None
    try:
        real = _resolved(path)
    except (OSError, ValueError):  # no path of this system
        return None
    return WantedTarget(
        real,
        name,
        cast("int | None", capacity),
        cast("int", reserve),
        cast("_DirectIO", direct_io),
        **_special(facts),
    )


def _special(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a store says of a directory that is not like any other."""
    out: dict[str, Any] = {}
    if facts.get("type") in ("nfs", "ontap"):
        out["kind"] = facts["type"]
    if facts.get("protocol") in get_args(NfsProtocol):
        out["protocol"] = facts["protocol"]
    mount, mode, group = (facts.get(name) for name in ("mount", "file_mode", "group"))
    if isinstance(mount, str) and os.path.isabs(mount) and "\0" not in mount:
        out["mount"] = Path(mount)
    if mode in (0o640, 0o660):
        out["file_mode"] = mode
    if isinstance(group, str) and group:
        out["group"] = group
    return out


def _size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def merged(targets: Iterable[WantedTarget]) -> tuple[dict[Path, WantedTarget], list[str]]:
    """One target for each directory.

    Where processes disagree, the smallest capacity and the largest reserve count: each
    was told to everybody as the most that all engines together take, and a writer with a
    smaller limit than the janitor's could never store again. O_DIRECT is off if anybody
    says so.

    Returns
    -------
    dict
        By directory.
    list of str
        What they disagree on, for people.
    """
    chosen: dict[Path, WantedTarget] = {}
    disagreements: dict[Path, str] = {}
    for target in targets:
        known = chosen.setdefault(target.path, target)
        limits = [c for c in (known.capacity, target.capacity) if c is not None]
        capacity = min(limits, default=None)
        reserve = max(known.reserve, target.reserve)
        modes = {known.direct_io, target.direct_io}
        direct_io: _DirectIO = "off" if "off" in modes else "on" if "on" in modes else "auto"
        # What engines publish of a target says nothing of these two.
        eviction: _Eviction = "none" if "none" in (known.eviction, target.eviction) else "lru"
        # The configuration comes first, and of a store's own it is known only what it says.
        special = known if known.special else target
        chosen[target.path] = WantedTarget(
            target.path,
            known.name,
            capacity,
            reserve,
            direct_io,
            eviction,
            known.integrity_key or target.integrity_key,
            known.max_age_s or target.max_age_s,
            special.kind,
            special.mount,
            special.protocol,
            special.file_mode,
            special.group,
        )
        if (known.capacity, known.reserve) != (target.capacity, target.reserve):
            disagreements[target.path] = (
                f"{target.path}: engines and configuration disagree on its limits; the smallest "
                f"capacity ({'none' if capacity is None else f'{capacity:,} bytes'}) and the "
                f"largest reserve ({reserve:,} bytes) count: give all of them one configuration"
            )
    return chosen, list(disagreements.values())
