"""How long the fingerprint of a model's weights takes, and what it costs its neighbour.

    python3 tools/dev.py bench bench_identity [MODEL_DIRECTORY]

Seconds with the files out of the page cache, in it, and out of it beside a Python
thread that never lets go of the GIL by itself (the worst an engine can do), with the
share of its speed that this thread keeps. The limit is reading as many bytes as are
sampled, in one piece each, from the same files: out of the page cache, or in it.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, forget_pages, machine_use
from lifeboat_cache.identity import weights_identity

_READ = "reading as many bytes"


def read_seconds(directory: Path, wanted: int) -> float:
    """Seconds to read ``wanted`` bytes from the weights, shared by their files."""
    files = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors")
    begin = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            left = wanted // len(files)
            while left > 0 and (data := file.read(min(left, 1 << 20))):
                left -= len(data)
    return time.perf_counter() - begin


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()


def measure(report: Report, directory: Path, rounds: int) -> None:
    """Measure the fingerprint of one model and report it."""
    ours: dict[str, list[float]] = defaultdict(list)
    limit: dict[str, list[float]] = defaultdict(list)
    found = weights_identity(directory)
    case = (
        f"{found.tensors} tensors, {found.bytes_total / 1e6:.4g} MB, "
        f"{found.bytes_sampled / 1e6:.3g} MB sampled"
    )
    for turn in range(rounds):
        for cold in (True, False):
            what = "cold" if cold else "warm"

            def fingerprint(what: str = what, cold: bool = cold) -> None:
                if cold:
                    forget_pages(directory)
                ours[what].append(weights_identity(directory).seconds)

            def read(what: str = what, cold: bool = cold) -> None:
                if cold:
                    forget_pages(directory)
                limit[what].append(read_seconds(directory, found.bytes_sampled))

            for step in (fingerprint, read) if turn % 2 else (read, fingerprint):
                step()
    with Neighbour() as neighbour:
        alone = neighbour.rate(1.0)
        for _ in range(rounds):
            forget_pages(directory)
            before = neighbour.count
            seconds = weights_identity(directory).seconds
            ours["cold beside a busy thread"].append(seconds)
            ours["kept"].append((neighbour.count - before) / seconds / alone)
    for what in ("cold", "warm", "cold beside a busy thread"):
        beside = (_READ, limit[what]) if what in limit else None
        report.add(compare("bench_identity", case, what, "s", ours[what], limit=beside))
    report.add(compare("bench_identity", case, "the busy thread keeps", "share", ours["kept"]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench bench_identity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=os.environ.get("LIFEBOAT_TEST_MODEL"),
        help="of the model, by default the small one of the tests",
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    if arguments.directory is None:
        parser.error("name the directory of a model")
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    report = Report(arguments.json)
    machine_use("before")
    measure(report, arguments.directory, arguments.rounds)
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
