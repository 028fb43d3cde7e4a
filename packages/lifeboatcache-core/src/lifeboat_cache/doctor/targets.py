"""Checks of the configured storage targets."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lifeboat_cache.codecs.ladder import SPEED, rung_of
from lifeboat_cache.config import FALLBACK_NAME, Storage, Tier
from lifeboat_cache.config.units import format_size
from lifeboat_cache.doctor.buckets import check_bucket
from lifeboat_cache.doctor.check import Check, DoctorContext
from lifeboat_cache.errors import LifeboatError, TargetError
from lifeboat_cache.mover.apart import Apart, Say
from lifeboat_cache.system import DARWIN
from lifeboat_cache.targets.direct import supports_direct
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import check_root
from lifeboat_cache.targets.mounts import kind_of, mount_of

__all__ = ["check_targets"]

#: From this part of its capacity on a store counts as full.
_FULL = 0.95


def check_targets(context: DoctorContext) -> Iterator[Check]:
    """Check every enabled target; one that hangs is reported, not waited for."""
    if context.loaded is None:
        yield Check("targets", "skip", "the configuration is not valid")
        return
    storage = context.loaded.config.storage
    usable: list[Tier] = []
    for tier in storage.places:
        checks = _patiently(tier)
        yield from checks
        if checks and checks[0].status != "fail":
            usable.append(tier)
    if len(storage.places) > 1:
        yield _order(storage, usable)


def _order(storage: Storage, usable: Sequence[Tier]) -> Check:
    """Where new blocks go, as things are."""
    name = "write order"
    if not usable:
        return Check(name, "fail", "no target is usable: nothing is stored", "See above.")
    tiers = [tier for tier in usable if tier.name != FALLBACK_NAME]
    mode = f"write_mode is {storage.write_mode}"
    if not tiers and any(tier.enabled for tier in storage.tiers):
        return Check(
            name,
            "warn",
            f"no tier is usable: new blocks go to {FALLBACK_NAME} until one is",
            "See above.",
        )
    if storage.write_mode == "all" and tiers:
        names = ", ".join(tier.name for tier in tiers)
        return Check(name, "ok", f"new blocks go to {names} ({mode})")
    first = (tiers or usable)[0]
    if storage.write_mode == "local_first":
        first = min(tiers or usable, key=lambda tier: SPEED[tier.rung or rung_of(tier.type)])
    return Check(name, "ok", f"new blocks go to {first.name} ({mode})")


def _patiently(
    tier: Tier,
    run: Callable[[str, Tier], list[Check]] | None = None,
    patience_s: float | None = None,
) -> list[Check]:
    name = f"target {tier.name}"
    run = run or _check_tier

    def work(_request: None, _say: Say) -> list[dict[str, Any]]:
        return [check.to_json() for check in run(name, tier)]

    # In any case in a process that can be left behind: a disk may hang too.
    try:
        with Apart(tier, work, always=True, patience_s=patience_s) as apart:
            return [Check.from_json(found) for found in apart.ask(None)]
    except LifeboatError as error:
        return [
            Check(name, "fail", str(error), "Check the disk, its mount, and the server behind it.")
        ]
    except RuntimeError as error:
        summary = f"{tier.path} could not be checked"
        return [Check(name, "fail", summary, "Please report this.", (str(error),))]


@dataclass(frozen=True)
class _Place:
    """Where a tier is, or the directory in which its directory would be made."""

    directory: Path
    exists: bool


def _check_tier(name: str, tier: Tier) -> list[Check]:
    if tier.type == "s3":
        return check_bucket(name, tier)
    mount = list(_mount(name, tier))
    if any(check.status == "fail" for check in mount):
        return mount  # what is beneath is of no interest
    place, first = _writable(name, tier)
    if place is None:
        return [*mount, first]
    return [
        *mount,
        first,
        _space(name, tier, place),
        _direct(name, tier, place),
        _durable(name, tier, place),
    ]


def _mount(name: str, tier: Tier) -> Iterator[Check]:
    """What is mounted where the tier is, against what it should be."""
    name = f"{name}: mount"
    target = FilesystemTarget.from_tier(tier)
    try:
        target.prepare()
    except TargetError as error:
        yield Check(name, "fail", str(error), "See above; then run the doctor again.")
        return
    findings = target.mount_findings()
    notes = tuple(finding.text for finding in findings if finding.level == "note")
    wrong = [finding for finding in findings if finding.level != "note"]
    for finding in wrong:
        status: Literal["fail", "warn"] = "fail" if finding.level == "fail" else "warn"
        yield Check(name, status, finding.text, finding.remedy, notes)
    if findings and not wrong:
        asked = tier.protocol or "nfs"
        yield Check(name, "ok", f"{tier.path} is mounted as {asked} should be", details=notes)


def _place(path: Path) -> _Place:
    for directory in (path, *path.parents):
        if directory.exists():
            return _Place(directory, directory == path)
    return _Place(Path("/"), False)


def _writable(name: str, tier: Tier) -> tuple[_Place | None, Check]:
    name = f"{name}: writable"
    remedy = "Choose another path, free space, or correct its owner and permissions."
    try:
        # Looks only: foreign files, and stores of a newer format.
        check_root(tier.path, create=False)
        place = _place(tier.path)
        _write_and_read(place.directory)
    except LifeboatError as error:
        return None, Check(name, "fail", str(error), "See above; then run the doctor again.")
    except OSError as error:
        return None, Check(name, "fail", f"{tier.path} cannot be used ({error.strerror})", remedy)
    if place.exists:
        return place, Check(name, "ok", f"{tier.path} takes writes and returns them")
    return place, Check(
        name, "ok", f"{tier.path} is not there yet; it can be made in {place.directory}"
    )


def _write_and_read(directory: Path) -> None:
    path = directory / f".lifeboat-doctor.{secrets.token_hex(8)}.tmp"
    payload = secrets.token_bytes(4096)
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        written = os.pwrite(fd, payload, 0)
        os.fsync(fd)
        if written != len(payload) or os.pread(fd, len(payload), 0) != payload:
            raise OSError(0, "it does not return what was written")
    finally:
        os.close(fd)
        os.unlink(path)


def _space(name: str, tier: Tier, place: _Place) -> Check:
    name = f"{name}: free space"
    found = os.statvfs(place.directory)
    free = found.f_bavail * found.f_frsize
    used = FilesystemTarget.from_tier(tier).usage().used if place.exists else 0
    room = free - tier.min_free_bytes
    capacity = tier.capacity_bytes
    details = (
        f"used: {format_size(used)}",
        (
            f"free on the file system: {format_size(free)}, "
            f"of which {format_size(tier.min_free_bytes)} stay free (min_free_gb)"
        ),
        "capacity: " + ("no limit of its own" if capacity is None else format_size(capacity)),
    )
    if room <= 0:
        return Check(
            name,
            "fail",
            f"{format_size(free)} free, and min_free_gb keeps {format_size(tier.min_free_bytes)}: "
            "nothing more is stored",
            "Free space, run lifeboat-cache purge, lower min_free_gb, or choose another disk.",
            details,
        )
    if capacity is not None and used >= _FULL * capacity:
        return Check(
            name,
            "warn",
            f"{format_size(used)} of {format_size(capacity)} are used: "
            "new blocks are dropped when it is full",
            "Run lifeboat-cache purge --older-than 7d, or raise capacity_gb.",
            details,
        )
    if capacity is not None and used + room < capacity:
        return Check(
            name,
            "warn",
            f"it can only grow to {format_size(used + room)}, "
            f"its capacity is {format_size(capacity)}",
            "Free space, or lower capacity_gb to what the disk has.",
            details,
        )
    left = room if capacity is None else capacity - used
    return Check(name, "ok", f"{format_size(left)} more can be stored", details=details)


def _direct(name: str, tier: Tier, place: _Place) -> Check:
    name = f"{name}: direct I/O"
    if tier.direct_io == "off":
        return Check(name, "skip", "direct_io is off")
    if DARWIN and tier.direct_io == "auto":
        return Check(name, "skip", "macOS: the page cache is used, see docs/mlx.md")
    mount = mount_of(place.directory)
    if tier.direct_io == "auto" and mount is not None and kind_of(mount.type) == "memory":
        return Check(name, "skip", f"{mount.type} is memory: there is no page cache to bypass")
    try:
        if supports_direct(place.directory, tier.direct_io):
            return Check(name, "ok", "O_DIRECT works")
    except TargetError:
        return Check(
            name,
            "fail",
            "direct_io is on, but O_DIRECT does not work here: the tier cannot be used",
            "Set direct_io to auto, or choose a path on ext4 or xfs.",
        )
    return Check(
        name,
        "warn",
        "O_DIRECT does not work here: reads and writes go through the page cache, and are slower",
        "Choose a path on ext4 or xfs, or set direct_io to off to accept it.",
    )


def _durable(name: str, tier: Tier, place: _Place) -> Check:
    name = f"{name}: file system"
    mount = mount_of(place.directory)
    if mount is None:
        return Check(name, "skip", "/proc/self/mountinfo does not tell")
    where = f"{mount.type} mounted at {mount.point}"
    kind = kind_of(mount.type)
    if kind == "container":
        return Check(
            name,
            "warn",
            f"{where}: a container's own layer, its data is lost with the container",
            "Mount a volume or a host directory into the container, and name it as the path.",
        )
    if kind == "memory":
        return Check(
            name,
            "warn",
            f"{where}: memory, its data is lost at the next boot and takes memory from the engine",
            "Choose a path on a disk.",
        )
    if kind in ("network", "fuse") and tier.type == "filesystem":
        what = "a network file system" if kind == "network" else "a user-space file system"
        return Check(
            name,
            "warn",
            f"{where}: {what}; if it hangs, engine threads that use it hang too",
            "Choose a path on a local disk, or set the type to nfs if it is one.",
        )
    return Check(name, "ok", where)
