"""Whose janitor looks after a directory that several hosts use.

A lock keeps two janitors of one host apart. Between hosts it proves nothing, so a host's janitor
keeps a file that it touches while it works, and others leave the work to it as long as it does.
Should two work at once all the same, no harm is done; it is only twice the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

from lifeboat_cache.system import boot_seconds
from lifeboat_cache.targets.files import close_file, open_file
from lifeboat_cache.targets.hosts import Process, this_process
from lifeboat_cache.targets.layout import JANITOR_LEASE, write_atomically
from lifeboat_cache.targets.writer_lock import lease_expired, read_owner

__all__ = ["JANITOR_LEASE_S", "JanitorLease"]

#: A janitor that has not shown itself for so long is followed by another host's.
JANITOR_LEASE_S = 120.0

#: It shows itself at most this often.
_BEAT_S = 5.0


class JanitorLease:
    """The claim of this host to look after a directory.

    Parameters
    ----------
    root
        The target's directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / JANITOR_LEASE
        self._beaten = -1.0
        self._name = ""

    def take(self) -> str:
        """Take the lease, or keep it.

        Returns
        -------
        str
            Who has it instead, for people; empty if this host has it. Faults count as having
            it: without a janitor a store fills up.
        """
        owner = read_owner(self._path)
        if owner is not None and not self._mine(owner) and not self._over(owner):
            return f"pid {owner['pid']} on {owner['host']}"
        if owner is None or not self._mine(owner) or owner.get("claim") != self._name:
            self._name = secrets.token_hex(8)
            document = {**this_process().to_json(), "claim": self._name}
            with contextlib.suppress(OSError):
                write_atomically(self._path, json.dumps(document).encode() + b"\n")
            self._beaten = boot_seconds()
        else:
            self.beat()
        return ""

    @staticmethod
    def _mine(owner: dict[str, object]) -> bool:
        """Whether a janitor of this host has it; the lock keeps those apart."""
        try:
            host = Process.from_json(owner).host
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        me = this_process().host
        return host == me and me.certain

    def _over(self, owner: dict[str, object]) -> bool:
        try:
            touched = os.stat(self._path).st_mtime
        except OSError:
            return True
        if owner.get("ended") is True:
            return True
        return lease_expired(self._path, touched, JANITOR_LEASE_S)

    def beat(self) -> None:
        """Show that the janitor works. To be called again and again; faults are swallowed."""
        now = boot_seconds()
        if self._name and now - self._beaten >= _BEAT_S:
            self._beaten = now
            with contextlib.suppress(OSError):
                fd = open_file(self._path, os.O_WRONLY)
                try:
                    os.utime(fd)
                finally:
                    close_file(fd)

    def release(self) -> None:
        """Let another host begin at once. Idempotent; faults are swallowed."""
        name, self._name = self._name, ""
        owner = read_owner(self._path) if name else None
        if owner is not None and owner.get("claim") == name:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
