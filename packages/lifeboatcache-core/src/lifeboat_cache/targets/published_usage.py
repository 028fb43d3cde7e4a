"""``usage.json``: what a janitor has measured, so that writers need not look at every file.

The janitor says how much everything that does not grow any more holds. Segments
that still grow are few; a writer looks at those itself, so that what all
writers of a directory use together is known to each of them at any moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.targets.files import read_document
from lifeboat_cache.targets.layout import USAGE_FILE, parse_name, write_atomically

__all__ = ["PublishedUsage", "publish_usage", "read_usage", "used_now"]

#: A measurement that is older than so many seconds is not used: the janitor may be gone.
_FRESH_S = 30.0

#: So many digits tell the writers of a namespace apart.
_SHORT = 12


@dataclass(frozen=True)
class PublishedUsage:
    """What a janitor has measured.

    Attributes
    ----------
    time
        When, in seconds since 1970.
    used
        Bytes allocated by everything in the namespaces' directories, for people.
    settled
        Bytes of that in files that do not grow any more.
    known
        Per namespace directory, and writer in it (the first 12 digits): the highest
        segment that is counted in ``settled``.
    """

    time: float
    used: int
    settled: int
    known: Mapping[str, Mapping[str, int]]


def publish_usage(
    root: Path, *, time: float, used: int, settled: int, known: Mapping[str, Mapping[str, int]]
) -> None:
    """Replace ``usage.json``. Raises ``OSError``.

    Parameters
    ----------
    root
        The target's directory.
    time, used, settled
        See :class:`PublishedUsage`.
    known
        The same with whole writer names.
    """
    short = {
        directory: {writer[:_SHORT]: number for writer, number in writers.items()}
        for directory, writers in known.items()
    }
    document = {"format": 1, "time": time, "used": used, "settled": settled, "known": short}
    write_atomically(root / USAGE_FILE, json.dumps(document).encode() + b"\n", durable=False)


def read_usage(root: Path, now: float, *, by_file: bool = False) -> PublishedUsage | None:
    """The measurement in ``usage.json``, or ``None`` if there is none that is fresh.

    Parameters
    ----------
    root
        The target's directory.
    now
        Seconds since 1970.
    by_file
        Whether the file's own time says when it was written: the janitor's clock may be another
        host's.
    """
    try:
        document = json.loads(read_document(root / USAGE_FILE))
        if document["format"] != 1:
            return None
        usage = PublishedUsage(
            os.stat(root / USAGE_FILE).st_mtime if by_file else float(document["time"]),
            int(document["used"]),
            int(document["settled"]),
            {
                str(directory): {str(writer): int(number) for writer, number in writers.items()}
                for directory, writers in document["known"].items()
            },
        )
    except (
        OSError,
        ValueError,
        OverflowError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return None
    # One from the future says that a clock was wrong, not that it is fresh.
    return usage if -1.0 <= now - usage.time <= _FRESH_S else None


def used_now(root: Path, usage: PublishedUsage, directories: list[str]) -> tuple[int, int]:
    """Bytes used by all writers now, and how many of them may still grow.

    Parameters
    ----------
    root
        The target's directory.
    usage
        What a janitor has measured.
    directories
        Names of the namespaces' directories there are now.
    """
    used = usage.settled
    growing = set()
    for directory in directories:
        known = usage.known.get(directory, {})
        try:
            names = os.listdir(root / directory)
        except OSError:
            continue
        for name in names:
            if not name.endswith(".segment"):
                continue
            parsed = parse_name(name)
            if parsed is None or parsed.segment <= known.get(parsed.writer[:_SHORT], -1):
                continue
            try:
                used += os.stat(root / directory / name).st_blocks * 512
            except OSError:
                continue
            growing.add(parsed.writer)
    return used, len(growing)
