"""How large the CPU tier of vLLM's native offloading may be on this host.

vLLM touches every page of the tier at start, so what is asked for is what is
used: a pod whose limit is lower is killed, however free ``/dev/shm`` looks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.engines.memory import available_ram

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
    limits.update(available_ram(proc=proc, cgroups=cgroups))
    return limits


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
