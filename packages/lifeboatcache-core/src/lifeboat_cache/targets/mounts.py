"""Which file system a path is on, and how it is mounted."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lifeboat_cache import darwin
from lifeboat_cache.system import DARWIN

__all__ = [
    "FileSystemKind",
    "Mount",
    "kind_of",
    "mount_of",
    "mounts",
    "split_options",
    "topmost",
    "unescape",
]

#: ``container``: gone with the container. ``memory``: gone at the next boot.
#: ``network``: can hang. ``fuse``: a program that is not known here.
FileSystemKind = Literal["local", "container", "memory", "network", "fuse"]

_CONTAINER = {"overlay", "aufs", "fuse.fuse-overlayfs", "fuse-overlayfs"}
_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK = {
    "9p",
    "afpfs",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.ceph",
    "fuse.gcsfuse",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.s3fs",
    "fuse.sshfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
    "smbfs",
    "webdav",
}
_FUSE = {"macfuse", "osxfuse"}
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Attributes
    ----------
    point, type, source
        Where, what and from where.
    options
        Of the mount and of the file system; those without a value have an empty one.
    """

    point: Path
    type: str
    source: str
    options: Mapping[str, str] = field(default_factory=dict)


def mounts(mountinfo: str | None = None) -> list[Mount]:
    """All mounts, later ones covering earlier ones at the same point; none if unknown.

    Parameters
    ----------
    mountinfo
        The text of ``/proc/self/mountinfo``, by default read from there.
    """
    if mountinfo is None:
        if DARWIN:
            return [_of_darwin(mount) for mount in darwin.mounted()]
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return []
    out = []
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        tail = fields[fields.index("-", 6) + 1 :]
        if len(tail) < 2:
            continue
        options = split_options(",".join((fields[5], *tail[2:3])))
        out.append(Mount(Path(unescape(fields[4])), tail[0], unescape(tail[1]), options))
    return out


def _of_darwin(mount: darwin.Mounted) -> Mount:
    # What is not on this machine can hang, whatever it is called.
    kind = mount.type if mount.local or kind_of(mount.type) != "local" else "nfs"
    options = {"rw" if mount.writable else "ro": ""}
    return Mount(Path(mount.point), kind, mount.source, options)


def split_options(text: str) -> dict[str, str]:
    """Mount options by name."""
    pairs = (option.partition("=") for option in text.split(",") if option)
    return {name: value for name, _, value in pairs}


def mount_of(path: Path, mountinfo: str | None = None) -> Mount | None:
    """Return the mount that ``path`` is on, None if it cannot be told.

    Parameters
    ----------
    path
        An existing path.
    mountinfo
        The text of ``/proc/self/mountinfo``, by default read from there.
    """
    return topmost(Path(os.path.realpath(path)), mounts(mountinfo))


def topmost(path: Path, table: list[Mount]) -> Mount | None:
    """The mount that a path without links is on."""
    best: Mount | None = None
    for mount in table:
        # Later lines cover earlier ones at the same point.
        covers = best is None or len(mount.point.parts) >= len(best.point.parts)
        if covers and path.is_relative_to(mount.point):
            best = mount
    return best


def kind_of(file_system: str) -> FileSystemKind:
    """Say what the type of a file system means for data kept on it."""
    if file_system in _CONTAINER:
        return "container"
    if file_system in _MEMORY:
        return "memory"
    if file_system in _NETWORK:
        return "network"
    if file_system in _FUSE:
        return "fuse"
    return "fuse" if file_system.startswith("fuse") and file_system != "fuseblk" else "local"


def unescape(text: str) -> str:
    """Undo how the kernel writes blanks in names."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
