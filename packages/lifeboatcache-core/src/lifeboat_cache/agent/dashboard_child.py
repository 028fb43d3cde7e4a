"""The dashboard as a child of the agent: started, watched, and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lifeboat_cache.config.paths import ENV_HOME

if TYPE_CHECKING:
    from lifeboat_cache.config.schema import Dashboard

__all__ = ["CANNOT_LISTEN", "REFUSED", "DashboardChild"]

_log = logging.getLogger("lifeboat_cache")

#: Exit codes of the child: its address is taken; its configuration does not allow to serve.
CANNOT_LISTEN, REFUSED = 11, 12

#: An address that is taken is tried again after so many seconds.
_RETRY_S = 30.0

#: One that fails is started again after so many seconds, twice as many each time.
_FIRST_S, _LAST_S = 5.0, 600.0

#: One that ran for so long was fine.
_FINE_S = 60.0

#: Seconds that it has to end in order; it has nothing to lose.
_END_S = 0.5

_MODULE = "lifeboat_cache.dashboard"


class DashboardChild:
    """Keeps the dashboard running. No method raises or waits for it.

    Parameters
    ----------
    home
        The home directory.
    config_path
        The configuration file; ``None`` = found as engines find it.

    Attributes
    ----------
    problem
        Why it is not served; empty if it is, or is not wanted.
    url
        Where it is served; empty if it is not.
    """

    def __init__(self, home: Path, config_path: Path | None) -> None:
        self._home = home
        self._config_path = config_path
        self._child: subprocess.Popen[bytes] | None = None
        self._settings: Dashboard | None = None
        self._said = b""
        self._began = 0.0
        self._next = 0.0
        self._pause = _FIRST_S
        self._logged = ""
        self.problem = ""
        self.url = ""

    def look(self, settings: Dashboard) -> None:
        """Start it, see what became of it, or end it; called every few seconds.

        Parameters
        ----------
        settings
            What the configuration says now.
        """
        try:
            self._look(settings)
        except Exception as error:  # whatever goes wrong, the agent goes on
            self._fail(f"internal error: {type(error).__name__}: {error}; please report this")
            self._next = time.monotonic() + _LAST_S

    def stop(self) -> None:
        """End it. Idempotent."""
        child, self._child = self._child, None
        self.url = ""
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(OSError):
            child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                child.kill()
            child.wait()

    def _look(self, settings: Dashboard) -> None:
        # Whether it may edit is read by the child itself, as often as it is asked.
        same = self._settings is not None and settings == self._settings.model_copy(
            update={"allow_config_edit": settings.allow_config_edit}
        )
        if not same:
            self.stop()
            self._settings = settings
            self._next, self._pause, self.problem = 0.0, _FIRST_S, ""
        if not settings.enabled:
            self.problem = ""
            return
        if self._child is not None:
            self._listen(self._child)
        elif time.monotonic() >= self._next:
            self._start()

    def _start(self) -> None:
        main = _main_file()
        if main is None:
            self._fail(
                "lifeboatcache-dashboard is not installed: install it into "
                f"{sys.prefix} to see this node at http://127.0.0.1:9400, or set "
                "dashboard.enabled to false"
            )
            self._next = time.monotonic() + _LAST_S
            return
        # Where core is, for a Python that does not find it by itself.
        command = [sys.executable, "-P", str(main), str(Path(__file__).parents[2])]
        if self._config_path is not None:
            command += ["--config", str(self._config_path)]
        self._said, self._began = b"", time.monotonic()
        try:
            self._child = subprocess.Popen(
                command,
                # It ends when this pipe closes, with the agent.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env={**os.environ, ENV_HOME: str(self._home)},
            )
        except OSError as error:
            self._fail(f"{sys.executable}: {error.strerror}")
            self._back_off()

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        """Read what it has said, and see whether it has ended."""
        assert child.stdout is not None
        while select.select([child.stdout], [], [], 0)[0]:
            data = os.read(child.stdout.fileno(), 4096)
            if not data:
                break
            self._said = (self._said + data)[-4096:]
        settings = self._settings
        if not self.url and self._said.startswith(b"listening") and settings is not None:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            self.url = f"http://{host}:{settings.port}"
            self.problem = self._logged = ""
            _log.info("the dashboard is served at %s", self.url)
        code = child.poll()
        if code is None:
            if time.monotonic() - self._began > _FINE_S:
                self._pause = _FIRST_S
            return
        self.stop()
        said = self._said.decode(errors="replace").strip().replace("\n", " ")
        if code == CANNOT_LISTEN:
            self._fail(said)
            self._next = time.monotonic() + _RETRY_S
        elif code == REFUSED:
            self._fail(said)
            self._next = time.monotonic() + _LAST_S  # another configuration tries at once
        else:
            self._fail(f"it ended with {code}, see the lines above in agent.log")
            self._back_off()

    def _back_off(self) -> None:
        self._next = time.monotonic() + self._pause
        self._pause = min(_LAST_S, 2 * self._pause)

    def _fail(self, why: str) -> None:
        self.url = ""
        self.problem = f"the dashboard is not served: {why}"
        if self.problem != self._logged:
            self._logged = self.problem
            _log.warning("%s", self.problem)


def _main_file() -> Path | None:
    """The file to start; ``None`` if the distribution is not installed."""
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(_MODULE)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("__main__.py")
