"""Compiling the kernels beside everything else, in a process that ends afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from lifeboat_cache import kernels
from lifeboat_cache.agent.exits import Exit
from lifeboat_cache.agent.priority import step_back
from lifeboat_cache.kernels import cache

__all__ = ["KernelBuild", "begin_build", "compile_here"]

_log = logging.getLogger("lifeboat_cache")

#: A compiler that takes longer is ended.
_MOST_S = 1800.0


class KernelBuild:
    """One attempt to have the kernels compiled.

    The compiler takes seconds of CPU time and a few hundred MB, which the process
    takes with it when it ends.

    Parameters
    ----------
    home
        The home directory.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._child: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        #: ``waiting``, ``compiling``, ``ready`` or ``failed``.
        self.state = "waiting"
        #: What went wrong; empty if nothing did.
        self.problem = ""

    def start(self) -> None:
        """Start it."""
        self._began = time.monotonic()
        command = [sys.executable, "-P", str(Path(__file__).with_name("__main__.py"))]
        command += ["--home", str(self._home), "--compile"]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd="/")
            self.state = "compiling"
        except OSError as error:
            self._failed(f"{sys.executable}: {error.strerror}")

    def look(self) -> None:
        """See whether it is done."""
        if self._child is None:
            return
        code = self._child.poll()
        took = time.monotonic() - self._began
        if code is None:
            if took > _MOST_S:
                self.stop()
                self._failed(f"no end after {took:.0f} s")
            return
        self._child = None
        if code == Exit.OK:
            self.state = "ready"
            _log.info("the kernels are ready after %.1f s", took)
        else:
            self._failed(f"the compiler ended with {code}, see the lines above in agent.log")

    def stop(self) -> None:
        """End it at once: what it has made so far is not used by anybody."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()
            child.wait()

    def _failed(self, why: str) -> None:
        self.state = "failed"
        self.problem = f"the kernels could not be compiled: {why}; engines go on without them"
        _log.warning("%s", self.problem)


def begin_build(home: Path) -> bool:
    """Whether this process is to start a compiler for its environment; one does.

    Raises
    ------
    OSError
        If the directory of the kernels cannot be written.
    """
    marker = _marker(home)
    marker.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if abs(time.time() - marker.stat().st_mtime) < _MOST_S:
            return False
        os.unlink(marker)  # of one that was killed
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _marker(home: Path) -> Path:
    return cache.directory(home).with_suffix(".building")


def compile_here(home: Path) -> Exit:
    """Compile in this process, and measure the codecs; log what happened."""
    from lifeboat_cache.codecs import speed

    step_back()
    try:
        with contextlib.suppress(cache.UnusableError):
            # Whole and for this machine: nothing needs to be loaded to know that.
            cache.verify(cache.directory(home))
            speed.ensure_codec_rates(home)
            return Exit.OK
        if kernels.compile_all(home):
            speed.ensure_codec_rates(home)
            return Exit.OK
        _log.warning("%s", kernels.reason())
        return Exit.FAILED
    finally:
        with contextlib.suppress(OSError, cache.UnusableError):
            os.unlink(_marker(home))
