"""How large the CPU tier of vLLM's native offloading may be on this host.

vLLM touches every page of the tier at start, so what is asked for is what is
used: a pod whose limit is lower is killed, however free ``/dev/shm`` looks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MINIMUM_BYTES", "CpuTier", "available_memory", "size_cpu_tier"]

#: Below this a CPU tier holds so few chunks that loads and stores wait for each other.
MINIMUM_BYTES = 256 << 20

_SHM = "free space in /dev/shm"

#: Of memory, so much is left to everybody else (page cache, engine, other jobs): a share
#: of what is available, but at least so many bytes.
_SHARE_LEFT = 0.4
_LEAST_LEFT_BYTES = 2 << 30

#: Of /dev/shm, which limits the size of files and is no memory by itself: what messages
#: between processes may need, within bounds.
_SHM_SHARE_LEFT = 0.25
_SHM_LEFT_BYTES = (128 << 20, 2 << 30)


@dataclass(frozen=True)
class CpuTier:
    """The decision about the CPU tier.

    Attributes
    ----------
    bytes
        Size for one engine (data-parallel rank); 0 = too little memory.
    reason
        What limited it, for the log.
    """

    bytes: int
    reason: str


def available_memory(
    *,
    shm: Path = Path("/dev/shm"),
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> dict[str, int]:
    """Bytes that could be used, by what limits them. Unknown limits are left out."""
    limits: dict[str, int] = {}
    try:
        stat = os.statvfs(shm)
        limits[_SHM] = stat.f_bavail * stat.f_frsize
    except OSError:
        limits[_SHM] = 0
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits["available memory"] = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    left = _cgroup_left(proc, cgroups)
    if left is not None:
        limits["memory left in this cgroup"] = left
    return limits


def _cgroup_left(proc: Path, root: Path) -> int | None:
    """Least memory left in this process's cgroup and its ancestors (v2 and v1)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    lefts = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        directory = base / path.lstrip("/")
        # Inside a container the own path may not exist, but the root then is the container's.
        while True:
            left = _left(directory, limit, usage)
            if left is not None:
                lefts.append(left)
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return min(lefts, default=None)


def _left(directory: Path, limit: str, usage: str) -> int | None:
    try:
        text = (directory / limit).read_text().strip()
        if text == "max" or int(text) >= 1 << 60:  # v1 spells "no limit" as a huge number
            return None
        used = int((directory / usage).read_text())
        for line in (directory / "memory.stat").read_text().splitlines():
            # Page cache counts as used, but is given back under pressure.
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                used -= int(line.split()[1])
                break
        return max(0, int(text) - used)
    except (OSError, ValueError, IndexError):
        return None


def size_cpu_tier(wanted: int, ranks: int, limits: dict[str, int], launches: int = 1) -> CpuTier:
    """Decide on the size.

    Parameters
    ----------
    wanted
        ``engine.native_cpu_gb`` in bytes, for all ranks of this host together.
    ranks
        Data-parallel ranks that run on this host.
    limits
        From :func:`available_memory`.
    launches
        Launches like this one that may take of the same memory at the same time.
    """
    total, reason = wanted, "engine.native_cpu_gb"
    for name, available in limits.items():
        usable = (available - _left_to_others(name, available)) // max(1, launches)
        if usable < total:
            total, reason = max(0, usable), f"{name}, {available / 1e9:.1f} GB"
    each = total // max(1, ranks)
    return CpuTier(each if each >= MINIMUM_BYTES else 0, reason)


def _left_to_others(name: str, available: int) -> int:
    if name == _SHM:
        least, most = _SHM_LEFT_BYTES
        return min(max(int(available * _SHM_SHARE_LEFT), least), most)
    return max(int(available * _SHARE_LEFT), _LEAST_LEFT_BYTES)
