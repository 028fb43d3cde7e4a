"""Names of a filesystem target's files, and who is alive behind them.

::

    <root>/lifeboat-cache.json                  marks the directory as ours
    <root>/usage.json                           what all writers use together
    <root>/.janitor.lock                        held while a janitor works
    <root>/<namespace>/namespace.json           the identity, readable
    <root>/<namespace>/<writer>.lock            held while the writer lives
    <root>/<namespace>/<writer>.journal
    <root>/<namespace>/<writer>.<n>.segment     n from 0, eight digits
    <root>/<namespace>/<writer>.<n>.dead        written by the janitor only
    <root>/<namespace>/<writer>.access
    <root>/<namespace>/dead.generation          replaced when dead bits were set
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifeboat_cache.errors import ForeignDataError, NewerFormatError, TargetError
from lifeboat_cache.format.header import FORMAT_VERSION
from lifeboat_cache.targets.files import (
    NotAFileError,
    close_file,
    is_gone,
    open_file,
    read_document,
)
from lifeboat_cache.version import __version__

__all__ = [
    "DEAD_GENERATION",
    "DIRECTORY_MODE",
    "FILE_MODE",
    "JANITOR_LOCK",
    "ROOT_MARKER",
    "SUMMARY_WRITER",
    "USAGE_FILE",
    "FileName",
    "WriterLock",
    "check_root",
    "lock_owner",
    "new_writer_id",
    "parse_name",
    "segment_name",
    "write_atomically",
    "writer_alive",
]

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
ROOT_MARKER = "lifeboat-cache.json"
USAGE_FILE = "usage.json"
JANITOR_LOCK = ".janitor.lock"
DEAD_GENERATION = "dead.generation"

#: In whose name the janitor keeps the access log that sums up the others. No process
#: has this identity.
SUMMARY_WRITER = bytes(16)

_NAME = re.compile(
    r"(?P<writer>[0-9a-f]{32})\.(?:(?P<segment>[0-9]{8})\.)?"
    r"(?P<kind>segment|dead|journal|access|lock)"
)

# Writers of this very process and who they are. Opening and closing a lock file that
# this process holds would drop the lock (POSIX locks belong to the process), so it is
# asked here.
_own: dict[str, str] = {}
_own_guard = threading.Lock()


def _forget_own() -> None:
    """In a forked child: the locks stayed with the parent."""
    global _own_guard
    _own_guard = threading.Lock()
    _own.clear()


os.register_at_fork(after_in_child=_forget_own)


@dataclass(frozen=True, slots=True)
class FileName:
    """A parsed file name; ``segment`` is -1 where the kind has none."""

    writer: str
    segment: int
    kind: str


def parse_name(name: str) -> FileName | None:
    """Parse a file name of a namespace directory; ``None`` if it is not one of ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    segment, kind = match["segment"], match["kind"]
    if (segment is not None) != (kind in ("segment", "dead")):
        return None
    return FileName(match["writer"], -1 if segment is None else int(segment), kind)


def segment_name(writer: str, segment: int, kind: str = "segment") -> str:
    """Name of a segment or of its dead bitmap."""
    return f"{writer}.{segment:08d}.{kind}"


def new_writer_id() -> bytes:
    """16 random bytes; random, because two hosts may share a directory and a clock."""
    return secrets.token_bytes(16)


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a small file so that readers see all of it or nothing.

    Parameters
    ----------
    path, data
        The file and its content.
    durable
        Whether it has to be there after a power loss, too.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(
        temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
    )
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:  # after power loss it must not be found empty
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def check_root(root: Path, *, create: bool) -> bool:
    """Make sure that ``root`` is a directory of ours in a format we know.

    Parameters
    ----------
    root
        The target's directory.
    create
        Create and mark it if it is missing or empty.

    Returns
    -------
    bool
        Whether it is there.

    Raises
    ------
    ForeignDataError
        If it holds something else.
    NewerFormatError
        If a newer release owns it.
    TargetError
        If it cannot be read or created.
    """
    marker = root / ROOT_MARKER
    try:
        text = read_document(marker)
    except FileNotFoundError:
        text = None
    except NotAFileError as exc:
        raise ForeignDataError(
            f"{marker} is not a file: choose an empty directory, or remove what has its name "
            "if the directory holds nothing but KV of LifeboatCache"
        ) from exc
    except OSError as exc:
        raise TargetError(
            exc.errno,
            f"{root} cannot be read ({exc.strerror}): check the mount and its permissions",
        ) from exc
    if text is not None:
        try:
            version = int(json.loads(text)["format"])
        except (ValueError, OverflowError, KeyError, TypeError, RecursionError) as exc:
            raise ForeignDataError(
                f"{marker} is damaged: delete that one file if the directory holds nothing "
                "but KV of LifeboatCache, or choose another path"
            ) from exc
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{root} is in format {version}, this release knows up to {FORMAT_VERSION}: "
                "upgrade lifeboatcache-core, or choose another path"
            )
        return True
    try:
        names = None if is_gone(root) else os.listdir(root)
        # What a filesystem or a concurrent first start puts there does not count.
        ours = ("lost+found", USAGE_FILE)
        strangers = [n for n in names or () if n not in ours and not n.startswith(".")]
        if strangers and is_gone(marker):
            raise ForeignDataError(
                f"{root} holds other files ({strangers[0]!r}, …): choose an empty directory"
            )
        if names is None and not create:
            return False
        if create:
            root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            write_atomically(marker, json.dumps({"format": FORMAT_VERSION}).encode() + b"\n")
    except OSError as exc:
        if isinstance(exc, TargetError):
            raise
        raise TargetError(
            exc.errno,
            f"{root} cannot be created or written ({exc.strerror}): choose a writable path, "
            "or correct its owner and mode",
        ) from exc
    return create


class WriterLock:
    """A file that is locked as long as its writer lives.

    ``fcntl`` locks, because forked children do not inherit them: a worker that
    outlives its parent does not keep the parent's lock.
    """

    def __init__(self, directory: Path, writer: bytes) -> None:
        self._hex = writer.hex()
        self._path = directory / f"{self._hex}.lock"
        temporary = directory / f".{self._hex}.lock.tmp"
        self._fd = os.open(
            temporary,
            os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW,
            FILE_MODE,
        )
        try:
            # On a filesystem without locks probing fails too, which counts as alive.
            with contextlib.suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "core": __version__,
                "started": int(time.time()),
            }
            os.write(self._fd, json.dumps(owner).encode() + b"\n")
            with _own_guard:
                _own[self._hex] = _owner_text(owner)
            # Locked before it has its name, so that nobody can find it unlocked.
            os.rename(temporary, self._path)
        except BaseException:
            self.release()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def release(self) -> None:
        """Let go. The file stays: it says who the dead writer was."""
        if self._fd >= 0:
            with _own_guard:
                _own.pop(self._hex, None)
            close_file(self._fd)
            self._fd = -1


def writer_alive(directory: Path, writer: str) -> bool:
    """Whether the process behind ``writer`` still runs.

    When it cannot be known (a lock that cannot be probed), the answer is yes:
    nothing of a writer that may live is ever removed.
    """
    with _own_guard:
        if writer in _own:
            return True
    try:
        fd = open_file(directory / f"{writer}.lock")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        close_file(fd)
    return False


def lock_owner(directory: Path, writer: str) -> str:
    """Who a writer is or was, for people (``pid 12 on host``); empty if unknown."""
    with _own_guard:
        if writer in _own:
            return _own[writer]
    try:
        return _owner_text(json.loads(read_document(directory / f"{writer}.lock")))
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError):
        return ""


def _owner_text(owner: dict[str, Any]) -> str:
    return f"pid {int(owner['pid'])} on {owner['host']}"
