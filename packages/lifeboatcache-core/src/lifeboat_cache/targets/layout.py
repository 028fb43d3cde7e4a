"""Names of a filesystem target's files, and how small ones are written.

::

    <root>/lifeboat-cache.json                  marks the directory as ours
    <root>/usage.json                           what all writers use together
    <root>/.janitor.lock                        held while a janitor works
    <root>/.janitor.lease                       whose janitor looks after it, on shared mounts
    <root>/<namespace>/namespace.json           the identity, readable
    <root>/<namespace>/<writer>.lock            held, or touched, while the writer lives
    <root>/<namespace>/<writer>.journal
    <root>/<namespace>/<writer>.<n>.segment     n from 0, eight digits
    <root>/<namespace>/<writer>.<n>.dead        written by the janitor only
    <root>/<namespace>/<writer>.access
    <root>/<namespace>/dead.generation          replaced when dead bits were set
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.errors import ForeignDataError, NewerFormatError, TargetError
from lifeboat_cache.format.header import FORMAT_VERSION
from lifeboat_cache.targets.files import (
    NotAFileError,
    is_gone,
    read_document,
)
from lifeboat_cache.targets.traits import make_directory, owned, traits_of

__all__ = [
    "DEAD_GENERATION",
    "DIRECTORY_MODE",
    "FILE_MODE",
    "JANITOR_LEASE",
    "JANITOR_LOCK",
    "NAMESPACE_NAME",
    "ROOT_MARKER",
    "SILLY_RENAMES",
    "SUMMARY_WRITER",
    "USAGE_FILE",
    "FileName",
    "check_root",
    "new_writer_id",
    "parse_name",
    "segment_name",
    "write_atomically",
]

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
ROOT_MARKER = "lifeboat-cache.json"
USAGE_FILE = "usage.json"
JANITOR_LOCK = ".janitor.lock"
JANITOR_LEASE = ".janitor.lease"
DEAD_GENERATION = "dead.generation"

#: How an NFS client calls a file that was deleted while it had it open. It goes by itself.
SILLY_RENAMES = ".nfs"

#: In whose name the janitor keeps the access log that sums up the others. No process
#: has this identity.
SUMMARY_WRITER = bytes(16)

#: How the directory of a namespace is called: the first half of its digest.
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")

_NAME = re.compile(
    r"(?P<writer>[0-9a-f]{32})\.(?:(?P<segment>[0-9]{8})\.)?"
    r"(?P<kind>segment|dead|journal|access|lock)"
)


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
            owned(file.fileno(), traits_of(path))
            file.write(data)
            file.flush()
            if durable:  # after power loss it must not be found empty
                os.fsync(file.fileno())
        _replace(temporary, path, data)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _replace(temporary: Path, path: Path, data: bytes) -> None:
    """Rename. Raises ``OSError``.

    A network filesystem may do it, lose the answer, and say at the second attempt that the
    old name does not exist.
    """
    try:
        os.replace(temporary, path)
    except FileNotFoundError:
        if read_document(path) != data:
            raise


def _is_namespace(path: Path) -> bool:
    """Whether it is a namespace's directory, with nothing in it that is not ours."""
    if not NAMESPACE_NAME.fullmatch(path.name):
        return False
    try:
        if path.is_symlink() or not path.is_dir():
            return False
        names = os.listdir(path)
    except FileNotFoundError:
        return True  # removed just now: it is no stranger
    ours = ("namespace.json", DEAD_GENERATION)
    return all(n in ours or n.startswith(".") or parse_name(n) is not None for n in names)


def check_root(root: Path, *, create: bool) -> bool:
    """Make sure that ``root`` is a directory of ours in a format we know.

    Parameters
    ----------
    root
        The target's directory.
    create
        Create and mark it if it is missing or empty, or holds namespaces and nothing else: who
        empties a directory in use takes the marker, and a namespace is made at that moment.

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
        found = [n for n in names or () if n not in ours and not n.startswith(".")]
        strangers = [name for name in found if not _is_namespace(root / name)]
        if strangers and is_gone(marker):
            raise ForeignDataError(
                f"{root} holds other files ({strangers[0]!r}, …): choose an empty directory"
            )
        if not create:
            return bool(found)
        make_directory(root, parents=True)
        write_atomically(marker, json.dumps({"format": FORMAT_VERSION}).encode() + b"\n")
    except OSError as exc:
        if isinstance(exc, TargetError):
            raise
        raise TargetError(
            exc.errno,
            f"{root} cannot be created or written ({exc.strerror}): choose a writable path, "
            "or correct its owner and mode",
        ) from exc
    return True
