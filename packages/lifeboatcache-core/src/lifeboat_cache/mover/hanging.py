"""Which targets can hang, found out without touching one of them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from lifeboat_cache.config.schema import Tier
from lifeboat_cache.errors import TargetError
from lifeboat_cache.targets.mounts import Mount, mounts, topmost

__all__ = [
    "can_hang",
    "hosts_movers",
    "needs_mover",
    "require_movers",
    "resolved",
    "resolved_mount",
]

#: File systems of this machine: what is on them answers, or fails.
_LOCAL = frozenset(
    {
        "apfs", "aufs", "bcachefs", "btrfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4",
        "f2fs", "fuseblk", "hfs", "iso9660", "jfs", "msdos", "nilfs2", "ntfs3", "overlay", "ramfs",
        "reiserfs", "rootfs", "squashfs", "tmpfs", "ubifs", "udf", "vfat", "xfs", "zfs",
    }
)  # fmt: skip

#: Types of tiers that can hang wherever they are.
_REMOTE_TYPES = frozenset({"nfs", "ontap", "s3"})

#: More links than that in one path lead nowhere.
_MOST_LINKS = 40


def needs_mover(tier: Tier) -> bool:
    """Whether a tier's target lives in a mover: it can hang, or its bandwidth is limited."""
    return getattr(tier, "bandwidth_limit_gbps", None) is not None or can_hang(tier)


def hosts_movers() -> bool:
    """Whether this system offers what a mover is made of."""
    return hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


def require_movers(tier: Tier) -> None:
    """Make sure that a tier's target can have a mover.

    Raises
    ------
    TargetError
        If this system has no movers.
    """
    if not hosts_movers():
        raise TargetError(
            errno.ENOTSUP,
            f"{tier.name}: targets that can hang (nfs, ontap, s3, and file systems that are not "
            "known to be local) and bandwidth limits need Linux: use a directory on a disk of "
            "this machine",
        )


def can_hang(tier: Tier) -> bool:
    """Whether a call on the tier may never return.

    That is a matter of its type, and of where its path leads: only file systems that are
    known to be local cannot. That of ``/`` counts as local, whatever it is, for it
    holds this program too.
    """
    if tier.type in _REMOTE_TYPES:
        return True
    mount = resolved_mount(tier.path)
    return mount is None or not _is_local(mount)


def _is_local(mount: Mount) -> bool:
    return mount.type in _LOCAL or mount.point == Path("/")


def resolved_mount(path: Path, table: list[Mount] | None = None) -> Mount | None:
    """The mount that a path leads to, or the first on the way there that can hang.

    ``None`` if the mounts cannot be known.
    """
    return resolved(path, table)[1]


def resolved(path: Path, table: list[Mount] | None = None) -> tuple[Path, Mount | None]:
    """Where a path leads, and :func:`resolved_mount`.

    Links are followed on local file systems only: nothing else is ever looked at.
    """
    table = mounts() if table is None else table
    if not table:
        return Path(os.path.abspath(path)), None
    todo = list(Path(os.path.abspath(path)).parts[1:])
    here = Path("/")
    links = 0
    mount = topmost(here, table)
    while todo:
        name = todo.pop(0)
        if name == "..":
            here = here.parent
        else:
            here /= name
        mount = topmost(here, table)
        if mount is None or not _is_local(mount):
            return Path(os.path.normpath(here.joinpath(*todo))), mount
        try:
            found = os.lstat(here)
            if not stat.S_ISLNK(found.st_mode):
                continue
            target = os.readlink(here)
        except OSError:
            continue  # nothing there yet: it will be made on this mount
        links += 1
        if links > _MOST_LINKS:
            return here, None
        parts = [part for part in Path(target).parts if part != "."]
        if target.startswith("/"):
            here, parts = Path("/"), parts[1:]
        else:
            here = here.parent
        todo = [*parts, *todo]
        mount = topmost(here, table)
    return here, mount
