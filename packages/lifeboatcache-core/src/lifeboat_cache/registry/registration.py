"""An entry of this process in the registry."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from lifeboat_cache.registry.counts import Counts
from lifeboat_cache.registry.files import read_json, replace_json, run_directory
from lifeboat_cache.registry.host import ProcessIdentity, this_process
from lifeboat_cache.registry.own import forget, remember
from lifeboat_cache.system import boot_seconds
from lifeboat_cache.targets.files import close_file
from lifeboat_cache.version import __version__

__all__ = ["Registration", "Role"]

Role = Literal["engine", "agent", "cli"]

_FORMAT = 1


class Registration:
    """Says that this process is there, and what it does, until it is closed or dies.

    No method raises: where nothing can be written, nothing is published,
    :attr:`reason` says why, and the next :meth:`publish` tries again.

    Parameters
    ----------
    home
        The home directory, ``$LIFEBOAT_CACHE_HOME``.
    role
        What the process is.
    describe
        What to publish when :meth:`publish` is called without a document. Its
        item ``counters``, if there is one, is what :class:`Counts` reads. A number that
        falls, or goes, is taken as one that has started again at 0.
    """

    def __init__(
        self, home: Path, role: Role = "engine", *, describe: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._home = home
        self._role = role
        self._describe = describe
        self._guard = threading.Lock()
        self._process = os.getpid()
        self._started = time.time()
        self._id = ""
        self._fd = -1
        self._locked = False
        self._identity = this_process()
        self._reason = ""
        self._closed = False
        self._raw = Counts()  # given last
        self._ended = Counts()  # what had been counted before counts started again
        self._last = Counts()  # published last, all of it
        self._base = Counts()  # what was added to the totals under an earlier id
        self.publish()

    @property
    def id(self) -> str:
        """Name of the entry, 32 hexadecimal digits; empty while there is none."""
        return self._id

    @property
    def reason(self) -> str:
        """Why nothing is published; empty if it is."""
        return self._reason

    def publish(self, document: Mapping[str, Any] | None = None) -> bool:
        """Replace the published document; costs about as much as creating a file.

        Returns
        -------
        bool
            Whether it is published.
        """
        with self._guard:
            if self._closed or self._process != os.getpid():
                return False
            try:
                self._publish(dict(self._describe() if document is None else document))
            except OSError as exc:
                self._reason = (
                    f"{run_directory(self._home)} cannot be written ({exc.strerror or exc}): "
                    "correct its owner and mode, or free space"
                )
            except Exception as exc:  # a fault of ours: statistics never stop an engine
                self._reason = f"internal error: {type(exc).__name__}: {exc}"
            else:
                self._reason = ""
            return not self._reason

    def close(self, document: Mapping[str, Any] | None = None) -> None:
        """Publish for the last time and let go. Idempotent.

        The entry stays until its counts are added to the totals.
        """
        self.publish(document)
        with self._guard:
            if self._process == os.getpid():
                self._closed = True
                self._release()

    def _publish(self, document: dict[str, Any]) -> None:
        if self._fd >= 0 and not self._there():
            self._release()
        directory = run_directory(self._home, create=self._fd < 0)
        if self._fd < 0:
            self._enter(directory)
        raw = Counts.from_json(document.get("counters"))
        self._ended.merge(self._raw.fallen(raw))
        self._raw = raw
        counts = Counts()
        for part in (raw, self._ended):
            counts.merge(part)
        document["counters"] = counts.without(self._base).to_json()
        replace_json(
            directory / f"{self._id}.json",
            {
                "format": _FORMAT,
                "process": self._facts(),
                "published": time.time(),
                "clock": boot_seconds(),
                "document": document,
            },
        )
        self._last = counts

    def _facts(self) -> dict[str, Any]:
        identity: ProcessIdentity = self._identity
        return {
            "pid": identity.pid,
            "born": identity.born,
            "host": identity.host,
            "boot": identity.boot,
            "namespace": identity.namespace,
            "role": self._role,
            "core": __version__,
            "started": self._started,
            "locked": self._locked,
        }

    def _there(self) -> bool:
        """Whether the lock file is still what others find under its name."""
        try:
            found = os.stat(self._path("lock"), follow_symlinks=False)
            return os.path.samestat(found, os.fstat(self._fd))
        except OSError:
            return False

    def _path(self, kind: str) -> Path:
        return run_directory(self._home) / f"{self._id}.{kind}"

    def _enter(self, directory: Path) -> None:
        if self._id:
            # Somebody took this process for dead, or the directory was removed. What
            # the totals have of it must not be counted again.
            found = read_json(directory / "totals.json")
            folded = found[0].get("folded") if found else None
            if isinstance(folded, dict) and self._id in folded:
                self._base = self._last
        name = secrets.token_hex(16)
        temporary = directory / f".{name}.lock.tmp"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600)
        try:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locked = True
            except OSError:
                self._locked = False  # a filesystem without locks
            os.write(fd, json.dumps(self._facts(), separators=(",", ":")).encode())
            remember(name)
            # Locked before it has its name, so that nobody can find it unlocked.
            os.rename(temporary, directory / f"{name}.lock")
        except BaseException:
            forget(name)
            close_file(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._id, self._fd = name, fd

    def _release(self) -> None:
        if self._fd >= 0:
            forget(self._id)
            with contextlib.suppress(OSError):
                close_file(self._fd)
            self._fd = -1
