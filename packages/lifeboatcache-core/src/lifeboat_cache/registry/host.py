"""Which machine, container and process this is, so that others can tell."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from typing import Any

from lifeboat_cache import darwin
from lifeboat_cache.system import DARWIN

__all__ = ["ProcessIdentity", "boot_id", "pid_namespace", "process_start", "this_process"]


@cache
def boot_id() -> str:
    """A random name of this boot of this kernel; empty if it cannot be known."""
    if DARWIN:
        return darwin.boot_session()
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def pid_namespace() -> str:
    """Which processes a pid of ours is counted among; empty if it cannot be known."""
    if DARWIN:  # there is one space of them
        return "darwin"
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """When a process started, in units of this system; 0 if it is not there.

    Tells a process from a later one with the same pid.
    """
    if DARWIN:
        return max(0, darwin.process_start(pid) or 0)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
        # The name, in parentheses, may hold anything.
        return int(text[text.rindex(b")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True)
class ProcessIdentity:
    """A process among those of all machines that share a home directory.

    Attributes
    ----------
    host, boot, namespace
        Host name, boot id and pid namespace; the last two may be empty.
    pid, born
        The pid there, and its start, see :func:`process_start` (0 = unknown).
    """

    host: str
    boot: str
    namespace: str
    pid: int
    born: int

    @classmethod
    def from_json(cls, value: Any) -> ProcessIdentity:
        """Read it back; what is missing or of another kind is empty."""
        if not isinstance(value, dict):
            value = {}

        def text(name: str) -> str:
            return item if isinstance(item := value.get(name), str) else ""

        def number(name: str) -> int:
            item = value.get(name)
            return item if isinstance(item, int) and not isinstance(item, bool) else 0

        return cls(text("host"), text("boot"), text("namespace"), number("pid"), number("born"))

    @property
    def here(self) -> bool:
        """Whether its pid means something to this process."""
        return bool(
            self.boot
            and self.namespace
            and self.boot == boot_id()
            and self.namespace == pid_namespace()
        )

    def running(self) -> bool | None:
        """Whether the process runs; ``None`` if that cannot be seen from here."""
        if not self.here or self.pid <= 0 or not self.born:
            return None
        return process_start(self.pid) == self.born


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    pid = os.getpid()
    return ProcessIdentity(
        socket.gethostname(), boot_id(), pid_namespace(), pid, process_start(pid)
    )
