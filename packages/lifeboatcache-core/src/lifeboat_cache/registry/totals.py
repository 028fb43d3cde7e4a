"""Counts of all processes that ever were: those that have ended are folded into one file.

Each document is added exactly once. Totals name the entries they hold and are
replaced in one step; only then are the entries' files removed. Whoever is killed
in between leaves files of entries that are named already, which the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lifeboat_cache.registry.counts import Counts, Labels
from lifeboat_cache.registry.files import MAX_BYTES, replace_json, run_directory
from lifeboat_cache.registry.processes import ProcessEntry, read_entries
from lifeboat_cache.targets.files import close_file, open_file

__all__ = ["MAX_SERIES", "OTHER", "Snapshot", "fold", "snapshot"]

#: Sets of labels that are kept apart.
MAX_SERIES = 128

#: Stands for every value of every label beyond these.
OTHER = "other"

_FORMAT = 1

#: Sets of labels that nobody has used for so long make room for others.
_FORGET_S = 86_400.0

#: Entries are named for so long after their files have gone: a process that was
#: taken for dead on another machine may write once more.
_NAMED_S = 300.0

_TMP_S = 3_600.0

_guard = threading.Lock()


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass
class _Series:
    values: dict[str, float]
    seen: float


@dataclass
class _Totals:
    """What ``totals.json`` holds."""

    folded: dict[str, float] = field(default_factory=dict)
    series: dict[Labels, _Series] = field(default_factory=dict)
    retired: Counts = field(default_factory=Counts)
    changed: bool = False

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> _Totals:
        out = cls()
        folded = value.get("folded")
        for name, when in folded.items() if isinstance(folded, dict) else ():
            out.folded[name] = float(when) if isinstance(when, (int, float)) else 0.0
        series = value.get("series")
        for item in series if isinstance(series, list) else ():
            counts = Counts.from_json([item])
            seen = item.get("seen") if isinstance(item, dict) else 0.0
            for labels, values in counts.groups():
                out.series[labels] = _Series(
                    values, float(seen) if isinstance(seen, (int, float)) else 0.0
                )
        out.retired = Counts.from_json(value.get("retired"))
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "folded": self.folded,
            "series": [
                {"labels": dict(labels), "values": one.values, "seen": one.seen}
                for labels, one in self.series.items()
            ],
            "retired": self.retired.to_json(),
        }

    def name(self, labels: Labels, now: float, live: set[Labels]) -> Labels:
        """The labels under which these counts are kept."""
        known = self.series.get(labels)
        if known is not None:
            if abs(now - known.seen) > _FORGET_S / 24:
                known.seen = now
                self.changed = True
            return labels
        if len(self.series) >= MAX_SERIES and not self._make_room(now, live):
            return tuple((name, OTHER) for name, _ in labels)
        self.series[labels] = _Series({}, now)
        self.changed = True
        return labels

    def _make_room(self, now: float, live: set[Labels]) -> bool:
        idle = [
            (one.seen, labels)
            for labels, one in self.series.items()
            if labels not in live and abs(now - one.seen) > _FORGET_S
        ]
        if not idle:
            return False
        _, labels = min(idle)
        # Only kept for the sum over everything: to show them under other labels would
        # look like work that was done just now.
        self.retired.add({}, self.series.pop(labels).values)
        return True

    def add(self, labels: Labels, values: dict[str, float], now: float, live: set[Labels]) -> None:
        name = self.name(labels, now, live)
        one = self.series.setdefault(name, _Series({}, now))
        for key, value in values.items():
            one.values[key] = one.values.get(key, 0) + value
        self.changed = True


@dataclass(frozen=True)
class Snapshot:
    """All processes and their counts at one moment.

    Attributes
    ----------
    entries
        What :func:`processes` gives, without those that have been folded.
    counts
        Counts of all processes, living and dead; none of them ever falls. Sets of
        labels are bounded by :data:`MAX_SERIES`.
    retired
        Counts whose labels have not been used for long; not part of ``counts``.
    """

    entries: Sequence[ProcessEntry]
    counts: Counts
    retired: Counts


def fold(home: Path, *, wait_s: float = 1.0) -> int:
    """Add the counts of dead processes to the totals and remove their files.

    Parameters
    ----------
    home
        The home directory.
    wait_s
        How long to wait for another process that does the same.

    Returns
    -------
    int
        Entries removed. Never raises: what cannot be done now is done by the next one.
    """
    directory = run_directory(home)
    try:
        with _held(directory, wait_s, fcntl.LOCK_EX) as held:
            return _fold(home, directory) if held else 0
    except OSError:
        return 0


def snapshot(home: Path, *, wait_s: float = 1.0) -> Snapshot | None:
    """All entries and the counts of all processes that ever were.

    Parameters
    ----------
    home
        The home directory. It is only read.
    wait_s
        How long to wait for a process that is folding.

    Returns
    -------
    Snapshot or None
        ``None`` if another process folds for longer.

    Raises
    ------
    OSError
        If the directory is there and cannot be read.
    """
    directory = run_directory(home)
    if not directory.exists():
        return Snapshot((), Counts(), Counts())
    with contextlib.ExitStack() as stack:
        try:
            if not stack.enter_context(_held(directory, wait_s, fcntl.LOCK_SH)):
                return None
        except OSError:
            pass  # nobody has folded yet, or it cannot be known: what can be seen is added up
        totals = _read(directory) or _Totals()
        entries = [entry for entry in read_entries(home) if entry.id not in totals.folded]
    now = time.time()
    live = _labels(entries)
    for entry in entries:
        for labels, values in entry.counts.groups():
            totals.add(labels, values, now, live)
    counts = Counts()
    for labels, one in totals.series.items():
        counts.add(dict(labels), one.values)
    return Snapshot(entries, counts, totals.retired)


def _labels(entries: Sequence[ProcessEntry]) -> set[Labels]:
    return {labels for entry in entries for labels, _ in entry.counts.groups()}


def _fold(home: Path, directory: Path) -> int:
    totals = _read(directory)
    if totals is None:
        return 0
    now = time.time()
    entries = read_entries(home)
    live = _labels([entry for entry in entries if entry.alive])
    dead = [entry for entry in entries if not entry.alive]
    fresh = [entry for entry in dead if entry.id not in totals.folded]
    # Who lives keeps the labels under which it is shown now.
    for labels in sorted(live):
        totals.name(labels, now, live)
    for entry in fresh:
        for labels, values in entry.counts.groups():
            totals.add(labels, values, now, live)
        totals.folded[entry.id] = now
        totals.changed = True
    there = {entry.id for entry in entries}
    for name, when in list(totals.folded.items()):
        if name not in there and abs(now - when) > _NAMED_S:
            del totals.folded[name]
            totals.changed = True
    if totals.changed:
        replace_json(directory / "totals.json", totals.to_json(), safe=bool(fresh))
    removed = 0
    for entry in dead:
        # The lock last: without it the document would be an entry of nobody.
        for kind in ("json", "lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / f"{entry.id}.{kind}")
        removed += 1
    _sweep(directory, now)
    return removed


def _sweep(directory: Path, now: float) -> None:
    """Remove what killed processes left half-written."""
    with os.scandir(directory) as found:
        for item in found:
            if item.name.startswith(".") and item.name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    if abs(now - item.stat(follow_symlinks=False).st_mtime) > _TMP_S:
                        os.unlink(item.path)


def _read(directory: Path) -> _Totals | None:
    """The totals; ``None`` if they must be left alone."""
    try:
        with open(directory / "totals.json", "rb") as file:
            value = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        return _Totals()
    except OSError:
        return None
    except (ValueError, RecursionError):
        return _Totals()  # damaged: counting starts again
    if not isinstance(value, dict):
        return _Totals()
    version = value.get("format")
    if isinstance(version, int) and version > _FORMAT:
        return None  # a newer release keeps them
    return _Totals.from_json(value)


@contextlib.contextmanager
def _held(directory: Path, wait_s: float, how: int) -> Iterator[bool]:
    """Hold the totals, among threads and processes; false if others hold them for too long.

    Who only reads makes no file, which might be one that their owner cannot open.
    """
    flags = os.O_CREAT | os.O_RDWR if how == fcntl.LOCK_EX else os.O_RDONLY
    until = time.monotonic() + wait_s
    if not _guard.acquire(timeout=max(0.0, wait_s)):
        yield False
        return
    try:
        fd = open_file(directory / "totals.lock", flags)
        try:
            yield _lock(fd, until, how)
        finally:
            close_file(fd)
    finally:
        _guard.release()


def _lock(fd: int, until: float, how: int) -> bool:
    while True:
        try:
            fcntl.lockf(fd, how | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        except OSError:
            return True  # a filesystem without locks: one machine, one agent
