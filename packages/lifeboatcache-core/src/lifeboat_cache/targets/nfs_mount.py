"""How an NFS mount is, against how it should be: what the kernel says of it, judged.

Nothing here asks a server, so that a mount that hangs can be looked at too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lifeboat_cache.errors import TargetError
from lifeboat_cache.targets.mounts import Mount, mounts, unescape

__all__ = [
    "MountFinding",
    "NfsProtocol",
    "NfsStats",
    "examine",
    "find_mount",
    "nfs_stats",
    "require_mounted",
]

NfsProtocol = Literal["nfs", "pnfs", "pnfs_rdma"]

#: Smaller transfers than this cost more round trips than need be.
_LEAST_TRANSFER = 256 << 10

_NFS = {"nfs", "nfs4"}


@dataclass(frozen=True)
class MountFinding:
    """Something about a mount that somebody should know.

    Attributes
    ----------
    level
        ``fail``: it cannot be used. ``warn``: it is not what was asked for, or slower than
        need be. ``note``: it is as it is.
    text, remedy
        What it is, and what to do about it.
    """

    level: Literal["fail", "warn", "note"]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class NfsStats:
    """What ``/proc/self/mountstats`` says of a mount.

    Attributes
    ----------
    layout
        The pNFS layout driver, empty if there is none, ``None`` if it is not said.
    server
        What the server calls itself (NFS 4.1 and later), empty if it does not.
    transports
        Of each connection: ``tcp``, ``rdma``, …
    """

    layout: str | None = None
    server: str = ""
    transports: tuple[str, ...] = field(default=())


def find_mount(point: Path, mountinfo: str | None = None) -> Mount | None:
    """What is mounted at a mount point, ``None`` if nothing is.

    By the name only, so that a mount that hangs is not touched. ``autofs`` itself counts as
    nothing: it is what mounts the rest when somebody looks.
    """
    found = [m for m in mounts(mountinfo) if m.point == point and m.type != "autofs"]
    return found[-1] if found else None


def require_mounted(point: Path) -> None:
    """See that something is mounted at a mount point.

    Raises
    ------
    TargetError
        If not: what is written there now would hide beneath the mount to come.
    """
    if find_mount(point) is not None:
        return
    # Its name may lead there by links, or an automounter may only be waiting for somebody.
    with contextlib.suppress(OSError):
        os.listdir(point)
    if find_mount(point) is None and find_mount(Path(os.path.realpath(point))) is None:
        raise TargetError(
            errno.ENODEV,
            f"nothing is mounted at {point}: run: mount {point} (and see that it is in /etc/fstab)",
        )


def nfs_stats(point: Path, mountstats: str | None = None) -> NfsStats:
    """Statistics of the NFS mount at a mount point; all unknown if there are none.

    Parameters
    ----------
    point
        The mount point.
    mountstats
        The text of ``/proc/self/mountstats``, by default read from there.
    """
    if mountstats is None:
        try:
            mountstats = Path("/proc/self/mountstats").read_text(errors="surrogateescape")
        except OSError:
            return NfsStats()
    mine: list[str] = []
    inside = False
    for line in mountstats.splitlines():
        if line.startswith("device "):
            inside = f" mounted on {point} with fstype nfs" in unescape(line)
            mine = [] if inside else mine  # the last one covers the others
        elif inside:
            mine.append(line.strip())
    layout = None
    server = ""
    transports = []
    for line in mine:
        name, _, value = line.partition(":")
        if name == "nfsv4":
            said = re.search(r"(?:^|,)pnfs=([^,]*)", value.strip())
            layout = None if said is None else said[1].replace("not configured", "")
        elif name == "impl_id":
            server = " ".join(re.findall(r"(?:name|domain)='([^']*)'", value)).strip()
        elif name == "xprt":
            transports.append(value.split()[0] if value.split() else "")
    return NfsStats(layout, server, tuple(transports))


def examine(
    kind: str, protocol: NfsProtocol | None, mount: Mount, stats: NfsStats
) -> list[MountFinding]:
    """Judge a mount.

    Parameters
    ----------
    kind
        ``nfs`` or ``ontap``, as in ``storage.tiers[].type``.
    protocol
        What is asked for, if anything.
    mount, stats
        What there is.
    """
    at = str(mount.point)
    if mount.type not in _NFS:
        return [
            MountFinding(
                "warn",
                f"{at} is a mount of {mount.type}, not of NFS",
                "Mount the NFS export there, or set the tier's type to filesystem.",
            )
        ]
    options = mount.options
    out = []
    if "ro" in options:
        out.append(
            MountFinding(
                "fail", f"{at} is mounted read-only", f"Mount it writable: mount -o remount,rw {at}"
            )
        )
    out += _protocol(kind, protocol or "nfs", mount, stats)
    if "noac" in options or options.get("actimeo") == "0":
        out.append(
            MountFinding(
                "warn",
                f"{at} is mounted with noac: every look at a file asks the server",
                "Mount it without noac and actimeo=0; LifeboatCache asks where it has to.",
            )
        )
    if "sync" in options:
        out.append(
            MountFinding(
                "warn",
                f"{at} is mounted with sync: every write waits for the server's disk",
                "Mount it without sync; LifeboatCache flushes once per batch.",
            )
        )
    small = {n: options[n] for n in ("rsize", "wsize") if _number(options.get(n)) < _LEAST_TRANSFER}
    if small:
        shown = ", ".join(f"{name}={value}" for name, value in small.items())
        out.append(
            MountFinding(
                "warn",
                f"{at} moves little at a time ({shown})",
                "Mount it with rsize=1048576,wsize=1048576; on ONTAP raise it first: "
                "vserver nfs modify -tcp-max-xfer-size 1048576"
                if kind == "ontap"
                else "Mount it with rsize=1048576,wsize=1048576, if the server allows that.",
            )
        )
    if "soft" in options or "softerr" in options:
        out.append(
            MountFinding(
                "note",
                f"{at} is a soft mount: while the server is away, blocks fail after "
                f"timeo={options.get('timeo', '?')} and retrans={options.get('retrans', '?')}",
            )
        )
    else:
        out.append(
            MountFinding(
                "note", f"{at} is a hard mount: what is under way waits until the server is back"
            )
        )
    return out


def _protocol(kind: str, wanted: NfsProtocol, mount: Mount, stats: NfsStats) -> list[MountFinding]:
    at, options = str(mount.point), mount.options
    version = options.get("vers") or options.get("nfsvers") or ""
    transport = options.get("proto", "").removesuffix("6")
    have = f"{at} is mounted with vers={version or '?'},proto={transport or '?'}"
    out = []
    if wanted in ("pnfs", "pnfs_rdma"):
        if _version(version) < (4, 1):
            out.append(
                MountFinding(
                    "warn",
                    f"{have}; {wanted} was asked for, which needs NFS 4.1 or later",
                    f"Unmount {at} and mount it with -o vers=4.1 (or 4.2)"
                    + (
                        "; on ONTAP: vserver nfs modify -v4.1 enabled -v4.1-pnfs enabled."
                        if kind == "ontap"
                        else "."
                    ),
                )
            )
        elif not stats.layout:
            said = (
                "the server offers no layouts"
                if stats.layout == ""
                else "the kernel does not say whether there are layouts"
            )
            out.append(
                MountFinding(
                    "warn" if stats.layout == "" else "note",
                    f"{have}, but not as pNFS: {said}",
                    (
                        "On ONTAP: vserver nfs modify -v4.1-pnfs enabled, and see that each node "
                        "has a data LIF that this host reaches; then mount again."
                        if kind == "ontap"
                        else "Switch pNFS on at the server, then mount again."
                    ),
                )
            )
    if wanted == "pnfs_rdma" and transport != "rdma" and "rdma" not in stats.transports:
        out.append(
            MountFinding(
                "warn",
                f"{have}; {wanted} was asked for",
                "Mount it with -o proto=rdma,port=20049, over a network card with RDMA (module "
                "rpcrdma)"
                + ("; on ONTAP: vserver nfs modify -rdma enabled." if kind == "ontap" else "."),
            )
        )
    if 0 < _version(version)[0] < 3:
        out.append(
            MountFinding("fail", f"{have}: NFS 2 is too old", f"Mount {at} with -o vers=4.1.")
        )
    if transport == "udp":
        out.append(MountFinding("warn", f"{have}: over UDP", f"Mount {at} with -o proto=tcp."))
    if transport == "tcp" and _number(options.get("nconnect", "1")) < 2:
        out.append(
            MountFinding(
                "note",
                f"{at} uses one connection: one stream limits what it moves",
                f"Mount {at} with -o nconnect=8 where the network is faster than 10 Gbit/s.",
            )
        )
    if kind == "ontap" and stats.server and "netapp" not in stats.server.lower():
        out.append(
            MountFinding(
                "note",
                f"the server of {at} calls itself {stats.server!r}, not NetApp",
                "Set the tier's type to nfs if it is another one.",
            )
        )
    return out


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (0, 0) if found is None else (int(found[1]), int(found[2] or 0))


def _number(text: str | None) -> int:
    """A number; what is not one is large enough."""
    return int(text) if text is not None and text.isdigit() else 1 << 62
