"""Which host a process runs on, and whether one of this host still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifeboat_cache import darwin
from lifeboat_cache.system import DARWIN

__all__ = ["Host", "Process", "this_host", "this_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Host:
    """A running system, as far as process numbers and their times mean the same in it.

    Attributes
    ----------
    name
        Its host name; containers have their own.
    boot
        Random at each boot; empty = unknown.
    space
        The namespaces of process numbers and of clocks; empty = unknown.
    """

    name: str
    boot: str
    space: str

    @property
    def certain(self) -> bool:
        """Whether two hosts that are equal are one."""
        return bool(self.boot and self.space)


@dataclass(frozen=True, slots=True)
class Process:
    """A process's life on a host: its number, and when it started in units of that host."""

    host: Host
    pid: int
    start: int

    def to_json(self) -> dict[str, Any]:
        """As a lock file holds it."""
        host = self.host
        return {
            "pid": self.pid,
            "start": self.start,
            "host": host.name,
            "boot": host.boot,
            "space": host.space,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Process:
        """Undo :meth:`to_json`. Raises ``KeyError``, ``TypeError``, ``ValueError``."""
        host = Host(str(document["host"]), str(document["boot"]), str(document["space"]))
        return cls(host, int(document["pid"]), int(document["start"]))

    def ended(self) -> bool:
        """Whether it is certain that it does not run any more."""
        if self.host != this_host() or not self.host.certain or self.start < 0:
            return False
        found = _start_of(self.pid)
        return found is not None and found != self.start


def this_host() -> Host:
    """The host that the process which asks runs on. Its name may change while it runs."""
    if DARWIN:  # all its processes see each other
        return Host(socket.gethostname(), darwin.boot_session(), "darwin")
    boot = space = ""
    try:
        boot = _BOOT_ID.read_text().strip()
        # An inode number is used again when the last process of a namespace has ended: then
        # all processes of the one before have, and their start times are other ones.
        inside = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "time"))
        space = "-".join(map(str, inside))
    except OSError:
        pass
    return Host(socket.gethostname(), boot, space)


def this_process() -> Process:
    """The process that asks."""
    start = _start_of(os.getpid())
    return Process(this_host(), os.getpid(), -1 if start is None else start)


def _start_of(pid: int) -> int | None:
    """When a process started, -1 if there is none, ``None`` if that cannot be known.

    A process that has ended and was not waited for yet may still have threads.
    """
    if DARWIN:
        return darwin.process_start(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        # It may only be hidden (hidepid).
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return -1
        except (OSError, OverflowError):
            pass
        return None
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[19])
