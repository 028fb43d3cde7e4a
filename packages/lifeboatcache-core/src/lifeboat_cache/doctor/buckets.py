"""Checks of a tier that is a bucket."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

from lifeboat_cache.config import Tier
from lifeboat_cache.config.units import format_size
from lifeboat_cache.doctor.check import Check
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.targets.mounts import kind_of, mount_of

__all__ = ["check_bucket"]

#: Signatures are refused when clocks differ by a quarter of an hour.
_SKEW_S = 300.0


def check_bucket(name: str, tier: Tier) -> list[Check]:
    """Check one: it is asked for an object that is put before and deleted after."""
    return [_bucket(f"{name}: bucket", tier), *_clock(f"{name}: clock", tier), *_local(name, tier)]


def _bucket(name: str, tier: Tier) -> Check:
    from lifeboat_cache.s3.archive import archive_of
    from lifeboat_cache.s3.settings import S3Settings

    archive = archive_of(S3Settings.from_tier(tier))
    key = archive.names.probe(secrets.token_hex(8))
    content = secrets.token_bytes(4096)
    try:
        client = archive.client
        client.check_bucket()
        client.put(key, content)
        try:
            found = client.get(key)
        finally:
            client.delete([key])
    except LifeboatError as error:
        return Check(name, "fail", str(error), "See above; then run the doctor again.")
    if found != content:
        return Check(
            name,
            "fail",
            f"{tier.location} does not return what was put",
            "Check the server: it damages objects, or is no S3 server.",
        )
    return Check(name, "ok", f"{tier.location} takes objects, returns them and deletes them")


def _clock(name: str, tier: Tier) -> Iterator[Check]:
    """How far this host's clock is from the server's, once it has answered."""
    from lifeboat_cache.s3.archive import archive_of
    from lifeboat_cache.s3.settings import S3Settings

    try:
        skew = archive_of(S3Settings.from_tier(tier)).client.skew_s
    except LifeboatError:  # said above
        return
    if abs(skew) < _SKEW_S:
        yield Check(name, "ok", f"this host's clock differs from the server's by {abs(skew):.0f} s")
        return
    yield Check(
        name,
        "warn",
        f"this host's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the "
        "server's: at 900 s it refuses everything",
        "Set the clock, best by NTP.",
    )


def _local(name: str, tier: Tier) -> Iterator[Check]:
    """The directory in which blocks wait."""
    name = f"{name}: waiting room"
    directory = next(one for one in (tier.path, *tier.path.parents) if one.exists())
    mount = mount_of(directory)
    if not os.access(directory, os.W_OK):
        yield Check(
            name,
            "fail",
            f"{tier.path} cannot be written",
            "Choose another path for the tier, or correct its owner and permissions.",
        )
        return
    found = os.statvfs(directory)
    room = found.f_bavail * found.f_frsize - tier.min_free_bytes
    if mount is not None and kind_of(mount.type) in ("memory", "container"):
        yield Check(
            name,
            "warn",
            f"{tier.path} is on {mount.type}: what waits there to be uploaded is lost with it",
            "Choose a path on a disk that outlives the process.",
        )
    elif room < tier.staging_bytes:
        yield Check(
            name,
            "warn",
            f"{format_size(max(0, room))} can wait at {tier.path}, less than staging_gb "
            f"({format_size(tier.staging_bytes)})",
            "Free space, lower staging_gb, or choose another path.",
        )
    else:
        size = format_size(tier.staging_bytes)
        yield Check(name, "ok", f"{size} can wait at {tier.path} to be uploaded")
