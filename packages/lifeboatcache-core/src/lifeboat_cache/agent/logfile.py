"""A log file that stays small."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from lifeboat_cache.targets.files import close_file, open_file

__all__ = ["MAX_BYTES", "log_to_file", "log_to_stderr"]

#: A log longer than this becomes ``agent.log.1``, and that one goes.
MAX_BYTES = 1 << 20

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(message)s"


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class _BoundedHandler(logging.Handler):
    """Appends to a file, which standard output and error of the process are too."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._open()

    def _open(self) -> None:
        fd = open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        # What libraries and a crash of the interpreter print goes there as well.
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        close_file(fd)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
            if os.fstat(1).st_size + len(line) > MAX_BYTES:
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
                self._open()
            os.write(1, line)
        except OSError:
            pass  # a full disk must not end the agent, which is there to make room


def log_to_file(path: Path) -> None:
    """Send everything that is logged to a file of at most :data:`MAX_BYTES`.

    Raises
    ------
    OSError
        If the file cannot be opened.
    """
    _use(_BoundedHandler(path))


def log_to_stderr() -> None:
    """Send everything that is logged to standard error, as systemd likes it."""
    _use(logging.StreamHandler())


def _use(handler: logging.Handler) -> None:
    handler.setFormatter(_Formatter(_FORMAT))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
