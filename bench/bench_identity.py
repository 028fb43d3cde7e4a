"""How long the fingerprint of a model's weights takes, and what it costs its neighbour.

    python3 bench/bench_identity.py MODEL_DIRECTORY

Prints seconds with the files out of the page cache, in it, and out of it beside a
Python thread that never lets go of the GIL by itself (the worst an engine can do),
with the share of its speed that this thread keeps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from pathlib import Path

from lifeboat_cache.identity import WeightsIdentity, weights_identity


def drop(directory: Path) -> None:
    """Throw the directory's files out of the page cache."""
    for path in directory.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


class Neighbour:
    """A thread that counts."""

    def __init__(self) -> None:
        self.count = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self.count += 1

    def rate(self, seconds: float) -> float:
        """Counts per second while the caller sleeps."""
        before = self.count
        time.sleep(seconds)
        return (self.count - before) / seconds

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()


def measure(directory: Path, runs: int) -> None:
    found: WeightsIdentity | None = None
    cold, warm, beside, kept = [], [], [], []
    for _ in range(runs):
        drop(directory)
        cold.append(weights_identity(directory).seconds)
        found = weights_identity(directory)
        warm.append(found.seconds)
    neighbour = Neighbour()
    alone = neighbour.rate(1.0)
    for _ in range(runs):
        drop(directory)
        before = neighbour.count
        seconds = weights_identity(directory).seconds
        beside.append(seconds)
        kept.append((neighbour.count - before) / seconds / alone)
    neighbour.stop()
    assert found is not None
    print(
        f"{found.tensors} tensors, {found.bytes_total / 1e6:.0f} MB, "
        f"{found.bytes_sampled / 1e6:.1f} MB sampled, median of {runs} runs (least - most)"
    )
    for name, values in (("cold", cold), ("warm", warm), ("cold beside a busy thread", beside)):
        print(
            f"{name:28} {statistics.median(values):7.3f} s ({min(values):.3f} - {max(values):.3f})"
        )
    print(f"{'the busy thread keeps':28} {statistics.median(kept):7.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    measure(arguments.directory, arguments.runs)


if __name__ == "__main__":
    main()
