"""Which files a namespace directory holds, and what changed since one looked last."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lifeboat_cache.targets.files import refresh_attributes
from lifeboat_cache.targets.layout import FileName, parse_name
from lifeboat_cache.targets.traits import traits_of

__all__ = ["DirectoryListing"]

#: A directory that was changed is listed once more so many seconds later: it may have been
#: changed again without another time of change, which has the resolution of a tick (of two
#: seconds, on some servers).
_SETTLING_S = 3.0


class DirectoryListing:
    """The files of one namespace directory, listed only when the directory has changed.

    Parameters
    ----------
    directory
        May not exist yet.

    Attributes
    ----------
    journals, access
        Their writers, in hexadecimal.
    segments, dead
        Writer and number of each segment and dead bitmap.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._names: set[str] = set()
        self._stamp: tuple[int, int, int] | None = None
        self._stamp_seen = 0.0
        self._settled = False
        self.journals: set[str] = set()
        self.access: set[str] = set()
        self.segments: set[tuple[str, int]] = set()
        self.dead: set[tuple[str, int]] = set()
        self._gone: list[FileName] = []

    def refresh(self) -> bool:
        """Look again.

        Returns
        -------
        bool
            Whether the directory could be read. One that does not exist is empty.
        """
        if traits_of(self._directory).shared:
            refresh_attributes(self._directory)
        try:
            stat = os.stat(self._directory)
            # Before it is listed: what changes meanwhile changes it once more.
            stamp = (stat.st_dev, stat.st_ino, stat.st_mtime_ns)
            now = time.monotonic()
            if stamp != self._stamp:
                self._settled = False
                self._stamp_seen = now
            elif self._settled:
                return True
            names = set(os.listdir(self._directory))
        except (FileNotFoundError, NotADirectoryError):
            names, stamp, now = set(), None, 0.0
        except OSError:
            return False
        self._stamp = stamp
        self._settled = stamp is not None and now - self._stamp_seen > _SETTLING_S
        self._took(self._names - names, gone=True)
        self._took(names - self._names, gone=False)
        self._names = names
        return True

    def take_gone(self) -> list[FileName]:
        """Files that have vanished since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def _took(self, names: Iterable[str], *, gone: bool) -> None:
        for name in names:
            parsed = parse_name(name)
            if parsed is None:
                continue
            place = (parsed.writer, parsed.segment)
            if parsed.kind == "journal":
                _change(self.journals, parsed.writer, gone)
            elif parsed.kind == "access":
                _change(self.access, parsed.writer, gone)
            elif parsed.kind == "segment":
                _change(self.segments, place, gone)
            elif parsed.kind == "dead":
                _change(self.dead, place, gone)
            if gone:
                self._gone.append(parsed)


def _change(members: set[Any], member: object, gone: bool) -> None:
    if gone:
        members.discard(member)
    else:
        members.add(member)
