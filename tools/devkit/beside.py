"""The second lane of ``dev.py test``: tests across packages run beside those of the packages."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from devkit.places import ROOT, dev_home
from devkit.shell import note

__all__ = ["WHOLE_TESTS", "Beside", "beside"]

#: Tests that start engines' servers. Servers wait more than they compute, and those of two
#: lanes would compete for memory: all of them are in this one.
WHOLE_TESTS = ROOT / "tests"

#: Seconds that it has to stop its servers when it is told to end.
_END_S = 100.0


class Beside:
    """A run of ``dev.py test tests`` whose output is shown when it has ended.

    Parameters
    ----------
    process
        The run.
    log
        What it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def finish(self) -> bool:
        """Wait, and show what it printed; whether it passed."""
        if self._process.poll() is None:
            note(f"waiting for {WHOLE_TESTS.name}/, whose output is in {self._log}")
        code = self._process.wait()
        sys.stdout.flush()
        sys.stdout.buffer.write(self._log.read_bytes())
        sys.stdout.flush()
        return code == 0


@contextlib.contextmanager
def beside(*, full: bool) -> Iterator[Beside]:
    """Start the second lane; it is ended if it still runs when the block is left."""
    log = dev_home() / "beside.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "tools" / "dev.py"), "test", str(WHOLE_TESTS)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, *(["--full"] if full else [])],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield Beside(process, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
