"""Who is there: reading the entries of all processes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lifeboat_cache.registry.counts import Counts
from lifeboat_cache.registry.files import entry_ids, read_json, run_directory
from lifeboat_cache.registry.host import ProcessIdentity, boot_id
from lifeboat_cache.registry.own import is_own
from lifeboat_cache.system import boot_seconds
from lifeboat_cache.targets.files import close_file, open_file

__all__ = ["ProcessEntry", "processes", "read_entries"]

#: Where liveness cannot be seen, whoever has not been heard of for so long is dead.
SILENT_S = 60.0


@dataclass(frozen=True)
class ProcessEntry:
    """A process, or one store of it, as it published itself.

    Attributes
    ----------
    id
        Name of the entry.
    alive
        Whether the process still runs and has not closed the entry.
    identity
        Which process; empty if it was killed before it could say.
    role
        ``engine``, ``agent`` or ``cli``; empty if unknown.
    core
        Its version of ``lifeboatcache-core``.
    started, published
        Seconds since 1970 by its clock; 0.0 if unknown.
    age
        Seconds since it published last, whatever clocks say where that can be told;
        infinite if it never did.
    document
        What it published; empty if nothing, or nothing that can be read.
    """

    id: str
    alive: bool
    identity: ProcessIdentity
    role: str
    core: str
    started: float
    published: float
    age: float
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Its process id, on its host and in its container; 0 if unknown."""
        return self.identity.pid

    @property
    def host(self) -> str:
        """Its host name; empty if unknown."""
        return self.identity.host

    @property
    def counts(self) -> Counts:
        """What it has counted since it started."""
        return Counts.from_json(self.document.get("counters"))


def processes(home: Path) -> list[ProcessEntry]:
    """All entries, the oldest first; those of dead processes until they are folded.

    Never raises: where nothing can be read, there is nothing.
    """
    try:
        return read_entries(home)
    except OSError:
        return []


def read_entries(home: Path) -> list[ProcessEntry]:
    """Like :func:`processes`.

    Raises
    ------
    OSError
        If the directory is there and cannot be read.
    """
    directory = run_directory(home)
    found = [_entry(directory, name) for name in entry_ids(directory)]
    return sorted(
        (entry for entry in found if entry is not None), key=lambda entry: (entry.started, entry.id)
    )


def _entry(directory: Path, name: str) -> ProcessEntry | None:
    # Liveness first: a process that dies in between has published all it ever will
    # when its document is read afterwards.
    held = _lock_held(directory, name)
    published = read_json(directory / f"{name}.json")
    # To open and close one's own lock would drop it, and the document says the same.
    locked = None if is_own(name) else read_json(directory / f"{name}.lock")
    if held is False and published is None and locked is None and not _exists(directory, name):
        return None  # removed in the meantime
    document, modified = published or ({}, 0.0)
    facts = document.get("process")
    if not isinstance(facts, dict):
        facts = locked[0] if locked else {}
    identity = ProcessIdentity.from_json(facts)
    age = _age(identity, document, modified)
    body = document.get("document")
    role, core = facts.get("role"), facts.get("core")
    return ProcessEntry(
        id=name,
        alive=_alive(held, identity, (modified, locked[1] if locked else 0.0), facts.get("locked")),
        identity=identity,
        role=role if isinstance(role, str) else "",
        core=core if isinstance(core, str) else "",
        started=_number(facts.get("started")),
        published=_number(document.get("published")),
        age=age,
        document=body if isinstance(body, dict) else {},
    )


def _exists(directory: Path, name: str) -> bool:
    return any(os.path.lexists(directory / f"{name}.{kind}") for kind in ("lock", "json"))


def _number(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number else 0.0


def _lock_held(directory: Path, name: str) -> bool | None:
    """Whether the entry's lock is held; ``None`` if that cannot be found out."""
    if is_own(name):
        return True
    try:
        fd = open_file(directory / f"{name}.lock")
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the system likes
        return True
    except OSError:
        return None
    finally:
        close_file(fd)
    return False


def _age(identity: ProcessIdentity, document: Mapping[str, Any], modified: float) -> float:
    if not modified:
        return float("inf")
    clock = _number(document.get("clock"))
    if clock and identity.boot and identity.boot == boot_id():
        # A clock that nobody can set; containers may have moved it ahead of ours.
        age = boot_seconds() - clock
        if age >= 0:
            return age
    return max(0.0, time.time() - modified)


def _alive(
    held: bool | None, identity: ProcessIdentity, written: tuple[float, float], locked: object
) -> bool:
    if held:
        return True
    if held is False and locked is not False:
        if not identity.boot or identity.boot == boot_id():
            return False
        # Some network filesystems keep locks to one host. Whoever is on another one
        # (or was here before a reboot) is only dead when it is silent as well.
        return _heard(written)
    running = identity.running()
    return _heard(written) if running is None else running


def _heard(written: tuple[float, float]) -> bool:
    # One from the future says that a clock was wrong, not that somebody lives.
    return any(abs(time.time() - when) < SILENT_S for when in written)
