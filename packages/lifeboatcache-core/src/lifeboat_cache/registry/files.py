"""Files of the registry: their names, and reading and replacing them.

::

    $LIFEBOAT_CACHE_HOME/run/<id>.lock      locked as long as its process lives
    $LIFEBOAT_CACHE_HOME/run/<id>.json      what it published last
    $LIFEBOAT_CACHE_HOME/run/totals.json    the counts of processes that have ended
    $LIFEBOAT_CACHE_HOME/run/totals.lock    held by who changes or adds up the counts
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from lifeboat_cache.targets.files import close_file

__all__ = [
    "MAX_BYTES",
    "entry_ids",
    "read_json",
    "replace_json",
    "run_directory",
]

#: Longer documents are not ours.
MAX_BYTES = 4 << 20

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
_NAME = re.compile(r"(?P<id>[0-9a-f]{32})\.(?:json|lock)")


def run_directory(home: Path, *, create: bool = False) -> Path:
    """The directory of the registry.

    Raises
    ------
    OSError
        If it is to be made and cannot be.
    """
    path = home / "run"
    if create:
        # One by one: only the last of several that are made at once gets the mode.
        home.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        path.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
    return path


def entry_ids(directory: Path) -> list[str]:
    """Ids of all entries, sorted; none if the directory is not there.

    Raises
    ------
    OSError
        If the directory cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted({match["id"] for name in names if (match := _NAME.fullmatch(name))})


def read_json(path: Path) -> tuple[dict[str, Any], float] | None:
    """A document and when its file was written; ``None`` if there is none to be read.

    Whatever lies there, reading neither waits nor raises.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    with os.fdopen(fd, "rb") as file:
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return None
            value = json.loads(file.read(MAX_BYTES + 1))
        except (OSError, ValueError, RecursionError):
            return None
    return (value, status.st_mtime) if isinstance(value, dict) else None


def replace_json(path: Path, value: object, *, safe: bool = False) -> None:
    """Write a document so that readers see all of it or the one before.

    Parameters
    ----------
    path
        The file. One thread writes it at a time.
    value
        The document; what is not JSON is written as text.
    safe
        It is there after a power failure too, before this returns.

    Raises
    ------
    OSError
        If it cannot be written; the document before is left.
    """
    data = json.dumps(value, separators=(",", ":"), default=str).encode()
    temporary = path.with_name(f".{path.name}.tmp")
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, _FILE_MODE)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if safe:
                file.flush()
                os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if safe:
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            close_file(directory)
