"""The directory that a benchmark works in, inside the target that it measures."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lifeboat_cache.errors import TargetError
from lifeboat_cache.targets.layout import DIRECTORY_MODE, FILE_MODE

__all__ = ["PREFIX", "bench_place", "interruptible", "undisturbed"]

#: Start of the name. Hidden: neither the store nor ``lifeboat-cache check`` looks at it.
PREFIX = ".bench-"

_LOCK = "in-use"

#: A directory younger than this may belong to a process that is about to lock it.
_YOUNG_S = 60.0


@contextmanager
def bench_place(root: Path) -> Iterator[Path]:
    """Make a directory below ``root``, and remove it with all it holds in the end.

    What processes that were killed have left there is removed too.

    Raises
    ------
    TargetError
        If it cannot be made.
    """
    _remove_left(root)
    place = root / f"{PREFIX}{secrets.token_hex(4)}"
    try:
        place.mkdir(mode=DIRECTORY_MODE)
        lock = os.open(place / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise TargetError(
            error.errno,
            f"{root} cannot be written ({error.strerror}): choose a writable directory, or "
            "correct its owner and mode",
        ) from error
    try:
        with contextlib.suppress(OSError):  # without locks it only looks left-over for longer
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield place
    finally:
        with undisturbed():
            shutil.rmtree(place, ignore_errors=True)
            os.close(lock)


def _remove_left(root: Path) -> None:
    for place in root.glob(f"{PREFIX}*"):
        try:
            if time.time() - place.lstat().st_mtime < _YOUNG_S or place.is_symlink():
                continue
            fd = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(fd)
        except OSError:  # in use, or somebody else's
            continue


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into :class:`KeyboardInterrupt`, so that all is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let nobody end the process half-way through something; who wants to is heard afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        wanted.append(number)

    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, *_ENDING)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if wanted:
        raise KeyboardInterrupt
