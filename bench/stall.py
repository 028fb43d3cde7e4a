"""What storage at full speed takes from a Python thread of the same process.

    python3 tools/dev.py bench stall

The scheduler's thread counts in Python, in pieces of about 50 microseconds, each of them
timed, while a tier under vLLM's real tiering manager loads one prompt, stores another
and is stepped every millisecond, as by a scheduler. What a piece takes longer than when
nothing goes on is lost: to threads that hold the interpreter's lock, and to the cores
and memory that storage uses. Ours beside vLLM's own fs tier with the same bytes, in turn
with each other; the limit is the same bytes moved by a process of its own, which
needs no lock of ours.

With 256 MiB in each direction it needs about 3 GB of memory, and 4 GB of disk in
.dev/bench unless --root names another place.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from raw_process import RawProcess
from tiers import MEDIA, OURS, PEER, bench_directory, io_depth, our_tier, peer_tier, say
from vllm_tiering import offload_keys

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    compare,
    machine_use,
    ready_kernels,
    rotated,
    without_kernels,
)

_SIZES = {"64KiB": 64 << 10, "256KiB": 256 << 10, "2MiB": 2 << 20}
_LIMIT = "the same bytes moved by another process"

#: Less cannot be told from the clock's own noise, in microseconds.
_LEAST_US = 0.1

_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "most": 100.0}

Samples = dict[str, dict[str, list[float]]]


class CountingThread:
    """Counts in Python between steps of the engine, and times each piece of it."""

    #: About 50 microseconds of counting.
    _COUNT = 1_000

    #: Pieces between two steps of the engine.
    _PIECES = 20

    def __init__(self) -> None:
        self._seconds = array("d")

    def rest(self) -> None:
        """Count for about a millisecond."""
        note, clock, count = self._seconds.append, time.perf_counter, self._COUNT
        for _ in range(self._PIECES):
            begin = clock()
            number = 0
            while number < count:
                number += 1
            note(clock() - begin)

    def take(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """float64 ``(n,)``: seconds of each piece since the last call."""
        if not self._seconds:  # all was over before it began to count
            self.rest()
        seconds, self._seconds = self._seconds, array("d")
        return np.array(seconds)

    def piece_alone(self) -> float:
        """Seconds of a piece while nothing else goes on."""
        self.take()
        for _ in range(20):
            self.rest()
        return statistics.median(self.take())


def measure(
    report: Report, root: Path | None, name: str, *, medium: str, total: int, rounds: int
) -> None:
    """Measure one size of chunks and report it."""
    size = _SIZES[name]
    chunks = max(1, total // size)
    moved = 2 * chunks * size
    main = CountingThread()
    samples: Samples = defaultdict(lambda: defaultdict(list))

    with (
        bench_directory("stall", medium, root) as place,
        RawProcess(
            place / "raw", size=moved // 2, block=size, depth=io_depth(place / "ours")
        ) as raw,
    ):
        # Our tier drops stores beyond half of the CPU tier's bytes: they would pin it.
        rows = 3 * chunks + 8
        tiers = {
            OURS: our_tier(place / "ours", rows, size, main),
            PEER: peer_tier(place / "fs", rows, size, main),
        }
        stored = offload_keys(chunks, seed=1)

        def note(who: str, seconds: float, alone: float) -> None:
            taken = main.take()
            lost = np.maximum(taken - alone, 0.0) * 1e6
            found = samples[who]
            for percentile, rank in _PERCENTILES.items():
                value = float(np.percentile(lost, rank, method="higher"))
                found[f"lost per piece, {percentile}"].append(max(_LEAST_US, value))
            found["lost per GB moved"].append(max(_LEAST_US, float(lost.sum()) / (moved / 1e9)))
            found["kept of its speed"].append(alone * len(taken) / float(taken.sum()))
            found["both directions, throughput"].append(moved / seconds / 1e9)

        def tier_round(who: str, turn: int) -> None:
            tier = tiers[who]
            tier.forget()
            before = set(tier.directory.rglob("*.bin"))
            alone = main.piece_alone()
            note(who, tier.both([stored], [offload_keys(chunks, seed=1000 + turn)]), alone)
            tier.empty()
            for path in set(tier.directory.rglob("*.bin")) - before:
                path.unlink()

        def raw_round(who: str, _turn: int) -> None:
            alone = main.piece_alone()
            note(who, raw.run("both", main.rest), alone)

        steps: list[tuple[str, Callable[[str, int], None]]] = [
            (OURS, tier_round),
            (PEER, tier_round),
            (_LIMIT, raw_round),
        ]
        try:
            for tier in tiers.values():
                tier.store([stored])
            for turn in range(-1, rounds):  # the first round is thrown away
                if turn == 0:
                    samples.clear()
                for who, step in rotated(steps, turn):
                    step(who, turn)
        finally:
            for tier in tiers.values():
                tier.shutdown()

    case = f"{medium}, {name}, {moved / 2 / (1 << 20):g} MiB loaded and stored{without_kernels()}"
    for metric in samples[OURS]:
        unit = {"both": "GB/s", "kept": "share"}.get(metric.split()[0], "us")
        report.add(
            compare(
                "stall",
                case,
                metric,
                unit,
                samples[OURS][metric],
                peer=(PEER, samples[PEER][metric]),
                limit=(_LIMIT, samples[_LIMIT][metric]),
            )
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench stall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--mib", type=int, default=256, help="bytes moved each way, in MiB")
    parser.add_argument("--media", nargs="+", choices=MEDIA, default=["disk"])
    parser.add_argument("--root", type=Path, help="where to put the files on disk")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile kernels that are not there"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    ready_kernels(say, compiling=not arguments.no_compile)
    report = Report(arguments.json)
    machine_use("before")
    for medium in arguments.media:
        for name in arguments.sizes:
            measure(
                report,
                arguments.root,
                name,
                medium=medium,
                total=arguments.mib << 20,
                rounds=arguments.rounds,
            )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
