"""Per-key answers of a block store."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["Lookup", "Outcome"]


class _Answer(IntEnum):
    """A number with a name, which numpy takes for a number without asking.

    At each comparison of an array with a number of another class numpy looks for this
    attribute of the class. In Python 3.11 the search ends in a method of the enumeration's
    class, and numpy drops what is raised there: also by the handler of a signal that tells
    an engine to end.
    """

    __array_ufunc__ = np.ndarray.__array_ufunc__


class Lookup(_Answer):
    """Answer to "is this block there?"."""

    #: Not there, as far as this process knows.
    MISS = 0
    #: There; a load may still find that it has gone.
    HIT = 1
    #: Not known yet: recovery is still reading journals. Ask again.
    RETRY = 2


class Outcome(_Answer):
    """What became of one key of a job.

    Storage faults are outcomes, not exceptions: an engine answers each of them
    by recomputing.
    """

    #: The job has not got to this key yet.
    PENDING = 0
    #: Stored and safe against a killed process, or loaded and verified.
    OK = 1
    #: Not stored again, because an equal block is there already.
    PRESENT = 2
    #: Not there, or reclaimed in the meantime.
    MISSING = 3
    #: The bytes read do not match the record's checksum. The record is dropped.
    CORRUPT = 4
    #: The record has another length or layout than the caller's memory.
    MISMATCH = 5
    #: Not stored: the target's capacity is used up.
    FULL = 6
    #: Not stored: the disk's free-space reserve would be touched.
    RESERVE = 7
    #: Not stored: too many bytes are waiting to be written.
    BUSY = 8
    #: Cancelled before it started, by a drain or a close.
    CANCELLED = 9
    #: The operating system reported an error.
    FAILED = 10
    #: The store stands down; :attr:`BlockStore.reason` says why.
    DISABLED = 11
    #: Given up: the target did not answer before the deadline.
    TIMEOUT = 12
    #: Not tried: the target does not answer now, or the mover that keeps it is not there.
    UNAVAILABLE = 13

    @property
    def good(self) -> bool:
        """Whether the block is where the caller wanted it."""
        return self in (Outcome.OK, Outcome.PRESENT)
