"""Engines that run without LifeboatCache although it is installed and wanted."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from lifeboat_cache.registry.registration import Registration

__all__ = ["stands_down"]

_guard = threading.Lock()
_entries: dict[Path, Registration] = {}


def _after_fork() -> None:
    """In a forked child: the entries are its parent's."""
    global _guard
    _guard = threading.Lock()
    _entries.clear()


os.register_at_fork(after_in_child=_after_fork)


def stands_down(home: Path, reason: str, *, engine: str, version: str = "") -> threading.Thread:
    """Have ``lifeboat-cache status`` show that this process stands down, until it ends.

    Never raises and never waits: files are written on a thread, which is returned.

    Parameters
    ----------
    home
        The home directory.
    reason
        Why, ending in the remedy.
    engine, version
        What the engine is called, and its version.
    """
    document = {
        "kind": "notice",
        "state": "disabled",
        "reason": reason,
        "engine": {"name": engine, "version": version, "model": ""},
    }
    thread = threading.Thread(
        target=_publish, args=(home, document), name="lifeboat-notice", daemon=True
    )
    thread.start()
    return thread


def _publish(home: Path, document: dict[str, Any]) -> None:
    with _guard:
        entry = _entries.get(home)
        if entry is None:
            # Kept: it lives as long as its process.
            _entries[home] = Registration(home, "engine", describe=lambda: document)
        else:
            entry.publish(document)
