"""Entries of this very process.

Opening and closing a lock file that this process holds would drop the lock, for
POSIX locks belong to the process; so nobody here opens these.
"""

from __future__ import annotations

import os
import threading

__all__ = ["forget", "is_own", "remember"]

_own: set[str] = set()
_guard = threading.Lock()


def _after_fork() -> None:
    """In a forked child: the locks stayed with the parent."""
    global _guard
    _guard = threading.Lock()
    _own.clear()


os.register_at_fork(after_in_child=_after_fork)


def remember(name: str) -> None:
    """Note that this process has locked an entry."""
    with _guard:
        _own.add(name)


def forget(name: str) -> None:
    """Note that it is about to let go."""
    with _guard:
        _own.discard(name)


def is_own(name: str) -> bool:
    """Whether an entry is locked by this process."""
    with _guard:
        return name in _own
