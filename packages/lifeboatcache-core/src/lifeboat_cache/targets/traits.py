"""What is special about a storage directory, for whoever handles files below it.

A target says it of its root once; everything that makes or reads files there asks by path, so
that a janitor, a repair and a writer all make files with the same owner and mode.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PRIVATE", "Traits", "declare", "make_directory", "owned", "traits_of"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What is special about a directory.

    Attributes
    ----------
    shared
        Whether other hosts may write here too: locks prove nothing, attributes may be stale,
        and what one host has written another one sees only after it was flushed.
    file_mode
        Of files that are made.
    group
        Their group; ``None`` = that of the process.
    """

    shared: bool = False
    file_mode: int = 0o600
    group: int | None = None

    @property
    def directory_mode(self) -> int:
        """Of directories: whoever may read a file may enter. New files inherit a group."""
        read = self.file_mode & 0o444
        mode = self.file_mode | read >> 2
        return mode | (0o2000 if self.group is not None else 0)

    @property
    def usual(self) -> bool:
        """Whether owner and mode are those that a new file has anyway."""
        return self.group is None and self.file_mode == 0o600


PRIVATE = Traits()

_known: dict[str, Traits] = {}
_guard = threading.Lock()


def declare(root: Path, traits: Traits) -> None:
    """Say what is special about a root directory. The last word counts."""
    with _guard:
        _known[os.path.normpath(root)] = traits


def traits_of(path: str | Path) -> Traits:
    """What was said of the root that a file or directory lies in."""
    if not _known:
        return PRIVATE
    at = os.path.normpath(path)
    # A root, a namespace's directory, a file in it.
    for _ in range(3):
        found = _known.get(at)
        if found is not None:
            return found
        at = os.path.dirname(at)
    return PRIVATE


def owned(fd: int, traits: Traits) -> None:
    """Give a new file, or directory, its mode and group. Raises ``OSError``.

    Not by the mode of the call that makes it, of which the umask takes its part.
    """
    if traits.usual:
        return
    if traits.group is not None and os.fstat(fd).st_gid != traits.group:
        os.fchown(fd, -1, traits.group)
    os.fchmod(fd, traits.file_mode)


def make_directory(path: Path, *, parents: bool = False) -> None:
    """Make a directory with the mode and group of its root, unless it is there."""
    traits = traits_of(path)
    if not parents or path.parent.is_dir():
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not path.is_dir():
                raise
            return
    else:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if traits.usual:
        return
    if traits.group is not None and os.stat(path).st_gid != traits.group:
        os.chown(path, -1, traits.group)
    os.chmod(path, traits.directory_mode)
