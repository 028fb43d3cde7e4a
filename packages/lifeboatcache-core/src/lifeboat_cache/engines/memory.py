"""How much memory this process could still use, as the kernel and containers limit it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CGROUP", "RAM", "available_ram"]

#: What limits memory, as :func:`available_ram` calls it.
RAM = "available memory"
CGROUP = "memory left in this cgroup"


def available_ram(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> dict[str, int]:
    """Bytes that could be used, by what limits them. Unknown limits are left out."""
    limits: dict[str, int] = {}
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits[RAM] = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    left = _cgroup_left(proc, cgroups)
    if left is not None:
        limits[CGROUP] = left
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
