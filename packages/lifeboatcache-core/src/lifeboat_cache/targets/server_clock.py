"""What time it is where files get their times: on a network mount, at the server.

Hosts whose clocks disagree agree on that. A new file says it; in between, a clock of this
host that never jumps goes on from there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path

from lifeboat_cache.system import boot_seconds
from lifeboat_cache.targets.files import close_file
from lifeboat_cache.targets.traits import traits_of

__all__ = ["file_time"]

#: After so many seconds the server is asked again: its clock may have been set.
_ASK_AGAIN_S = 30.0

_guard = threading.Lock()
#: By root: this host's clock when the server was asked, and what it said.
_answers: dict[str, tuple[float, float | None]] = {}


def file_time(root: Path) -> float | None:
    """The time that a file which changes now in a directory would get.

    Parameters
    ----------
    root
        The directory; a file is made in it and removed again, seldom.

    Returns
    -------
    float or None
        Seconds since 1970; ``None`` if it cannot be known, because nothing may be written
        there.
    """
    if not traits_of(root).shared:
        return time.time()
    name = os.path.normpath(root)
    now = boot_seconds()
    with _guard:
        known = _answers.get(name)
    if known is None or not 0 <= now - known[0] < _ASK_AGAIN_S:
        answer = _ask(root)
        # From when it had answered: rather too early than too late.
        now = boot_seconds()
        known = now, answer
        with _guard:
            _answers[name] = known
    asked, answer = known
    return None if answer is None else answer + (now - asked)


def _ask(root: Path) -> float | None:
    path = root / f".clock.{secrets.token_hex(8)}.tmp"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:
        return None
    try:
        # The time of creation is the server's; so is that of a change "now".
        os.utime(fd)
        os.fsync(fd)
        return os.fstat(fd).st_mtime
    except OSError:
        return None
    finally:
        close_file(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
