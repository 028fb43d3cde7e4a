"""Engines come first: the agent's threads step back, on CPUs and disks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform

__all__ = ["step_back", "use_all_cpus"]

# ioprio_set(IOPRIO_WHO_PROCESS, calling thread, class << 13 | level)
_CALLS = {"x86_64": 251, "aarch64": 30}
_CLASS_BEST_EFFORT, _CLASS_IDLE = 2, 3

_NICE = 10


def step_back(*, urgent: bool = False) -> None:
    """Lower the priority of the calling thread, where the system allows that.

    Parameters
    ----------
    urgent
        On disks after everybody else, but not only when they are idle: below a
        disk that is never idle an idle-class janitor would never make room.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    number = _CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is not None:
        value = _CLASS_BEST_EFFORT << 13 | 7 if urgent else _CLASS_IDLE << 13
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, value)


def use_all_cpus() -> None:
    """Undo the CPU binding of the engine's thread that started this process."""
    bind = getattr(os, "sched_setaffinity", None)
    with contextlib.suppress(OSError):
        if bind is not None:
            bind(0, range(os.cpu_count() or 1))
