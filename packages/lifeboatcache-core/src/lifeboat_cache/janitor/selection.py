"""Which records are to go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.janitor.rows import Bools

__all__ = ["Purged", "Selection"]


@dataclass(frozen=True)
class Selection:
    """Records that have everything in common that is said here.

    Attributes
    ----------
    directories
        Names of the directories of their namespaces; ``None`` = any.
    older_than_s
        They were stored longer ago; ``None`` = at any time.
    salt
        Tag of the cache salt that they were stored with; ``None`` = any or none.
    keys
        The first 8 bytes of their keys as numbers; ``None`` = any.
    """

    directories: frozenset[str] | None = None
    older_than_s: float | None = None
    salt: int | None = None
    keys: frozenset[int] | None = None

    @property
    def whole(self) -> bool:
        """Whether these are all records of their namespaces."""
        return self.older_than_s is None and self.salt is None and self.keys is None

    def concerns(self, directory: str) -> bool:
        """Whether records of a namespace may be among them."""
        return self.directories is None or directory in self.directories

    def chosen(self, rows: npt.NDArray[Any], now: float) -> Bools:
        """Which rows of a ``ROW`` array ``(n,)`` are, as bool ``(n,)``.

        ``now``: in seconds since 1970.
        """
        chosen: Bools = np.ones(rows.shape[0], dtype=np.bool_)
        if self.older_than_s is not None:
            chosen &= rows["born"].astype(np.int64) < now - self.older_than_s
        if self.salt is not None:
            chosen &= rows["salt"] == np.uint64(self.salt)
        if self.keys is not None:
            chosen &= np.isin(rows["key"], np.array(sorted(self.keys), dtype="<u8"))
        return chosen


@dataclass
class Purged:
    """What became of selected records.

    Attributes
    ----------
    blocks, bytes
        That were selected and still held bytes.
    keys
        The first 8 bytes of their keys as numbers.
    left
        Of these, records whose bytes are still there.
    problems
        What could not be done and why, for people.
    """

    blocks: int = 0
    bytes: int = 0
    keys: set[int] = field(default_factory=set)
    left: int = 0
    problems: list[str] = field(default_factory=list)
