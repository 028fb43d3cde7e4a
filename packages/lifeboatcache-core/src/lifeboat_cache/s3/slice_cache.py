"""Slices of a bucket's feeds on the local disk, so that a restart fetches new ones only.

There is nothing in it that the bucket does not have: what is not kept is fetched again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from lifeboat_cache.s3.names import FeedName, parse_feed
from lifeboat_cache.targets.layout import write_atomically

__all__ = ["SliceCache", "forget_unused"]

#: A namespace whose slices nobody has looked at for so many seconds is forgotten.
_UNUSED_S = 14 * 86400.0

#: What a process that was killed has begun to write is removed after so many seconds.
_BEGUN_S = 3600.0


class SliceCache:
    """The slices of one namespace.

    Parameters
    ----------
    directory
        Where they are; made when there is one to keep.
    room
        Bytes that may be written there now.
    """

    def __init__(self, directory: Path, room: Callable[[], int]) -> None:
        self._directory = directory
        self._room = room

    def names(self) -> list[FeedName]:
        """Those that are kept, the oldest first. It counts as a use."""
        try:
            found = sorted(os.listdir(self._directory))
            os.utime(self._directory)
        except OSError:
            return []
        names = map(parse_feed, found)
        return [name for name in names if name is not None and name.kind != "gone"]

    def get(self, name: FeedName) -> bytes | None:
        """A slice, as it was kept."""
        try:
            return self._path(name).read_bytes()
        except OSError:
            return None

    def put(self, name: FeedName, data: bytes) -> None:
        """Keep a slice, if there is room for it."""
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len(data) <= self._room():
                write_atomically(self._path(name), data, durable=False)

    def drop(self, name: FeedName) -> None:
        """Keep a slice no more."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))

    def trim(self, wanted: Collection[str], before: float) -> None:
        """Drop slices that are older (by their names) and not wanted. It counts as a use."""
        for name in self.names():
            if name.time < before and str(name) not in wanted:
                self.drop(name)
        with contextlib.suppress(OSError), os.scandir(self._directory) as listing:
            for entry in listing:
                begun = entry.name.startswith(".")
                if begun and time.time() - entry.stat().st_mtime > _BEGUN_S:
                    os.unlink(entry.path)

    def _path(self, name: FeedName) -> Path:
        return self._directory / str(name)


def forget_unused(root: Path, used: Collection[str], *, short: bool) -> None:
    """Remove the slices of namespaces that nobody has looked at for two weeks.

    Parameters
    ----------
    root
        Where the directories of namespaces are.
    used
        Those that this process uses.
    short
        Whether room is short: then those that this process does not use go at once.
    """
    with contextlib.suppress(OSError), os.scandir(root) as listing:
        for entry in listing:
            if entry.name in used:
                continue
            if short or time.time() - entry.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(entry.path, ignore_errors=True)
