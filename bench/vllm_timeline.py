"""When what happens while a prompt is loaded: where the time goes that a device does not need.

    python3 tools/dev.py bench vllm_timeline

One prompt of 256 MiB is loaded cold through vLLM's real tiering manager, and every step is noted
in microseconds since its first lookup: the last lookup is answered and the load handed to the
store; a thread of the store begins to plan it; the first and the last reads are handed to the I/O
threads; the reads are done, verified and accounted for; the scheduler knows. In turn with reading
the same bytes by vectored reads alone, in a process of its own, which is the limit of the whole.

It needs about 2 GB of memory and 2 GB of disk in .dev/bench unless --root names another place.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driven_tier import MainThread
from raw_process import RawProcess
from tiers import bench_directory, io_depth, our_tier, say
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
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.store.job_runner import JobRunner
from lifeboat_cache.store.native_pool import NativePool

_SIZES = {"64KiB": 64 << 10, "256KiB": 256 << 10, "2MiB": 2 << 20}

#: Before each operation: see ``vllm_tier``.
_PAUSE_S = 0.5

_STEPS = ("load handed over", "planning", "first reads", "last reads", "reads done")
_WHOLE = "scheduler knows"
_LIMIT = "preadv"


@contextmanager
def noted() -> Iterator[dict[str, float]]:
    """When each step was last reached; of `first reads` and `planning` the first time."""
    marks: dict[str, float] = {}
    undo: list[Callable[[], None]] = []

    def watch(owner: Any, name: str, before: str = "", after: Sequence[str] = ()) -> None:
        inner = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if before:
                marks.setdefault(before, time.perf_counter())
            result = inner(*arguments, **options)
            for step in after:
                if not (step.startswith("first") and step in marks):
                    marks[step] = time.perf_counter()
            return result

        setattr(owner, name, call)
        undo.append(lambda: setattr(owner, name, inner))

    watch(BlockStore, "load", before="load handed over")
    watch(JobRunner, "start", before="planning")
    watch(NativePool, "submit", after=("first reads", "last reads"))
    watch(JobRunner, "_finish_tasks", after=("reads done",))
    try:
        yield marks
    finally:
        for restore in undo:
            restore()


def measure(
    report: Report, root: Path | None, name: str, *, total: int, busy: bool, rounds: int
) -> None:
    """Measure one case and report it."""
    size = _SIZES[name]
    chunks = total // size
    main = MainThread(busy=busy)
    samples: defaultdict[str, list[float]] = defaultdict(list)
    with (
        noted() as marks,
        bench_directory("vllm_timeline", "disk", root) as place,
        RawProcess(place / "raw", size=total, block=size, depth=io_depth(place / "ours")) as raw,
    ):
        tier = our_tier(place / "ours", 2 * chunks + 8, size, main)

        def ours(turn: int) -> None:
            keys = offload_keys(chunks, seed=1000 + turn)
            tier.store([keys])
            tier.forget()
            time.sleep(_PAUSE_S)
            marks.clear()
            whole = tier.load([keys])
            if turn >= 0:
                for step in _STEPS:
                    samples[step].append((marks[step] - tier.began) * 1e6)
                samples[_WHOLE].append(whole * 1e6)
            tier.empty()

        def limit(turn: int) -> None:
            raw.run("write", main.rest)
            time.sleep(_PAUSE_S)
            seconds = raw.run("read", main.rest)
            if turn >= 0:
                samples[_LIMIT].append(seconds * 1e6)

        try:
            for turn in range(-1, rounds):
                for part in rotated([ours, limit], turn):
                    part(turn)
        finally:
            tier.shutdown()
    case = f"{name}, main {'busy' if busy else 'idle'}{without_kernels()}"
    for metric in (*_STEPS, _WHOLE):
        beside = (_LIMIT, samples[_LIMIT]) if metric == _WHOLE else None
        report.add(compare("vllm_timeline", case, metric, "us", samples[metric], limit=beside))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--main", nargs="+", choices=("idle", "busy"), default=("idle", "busy"))
    parser.add_argument("--root", type=Path, help="where to put the files on disk")
    parser.add_argument("--mib", type=int, default=256, help="bytes of the prompt, in MiB")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile kernels that are not there"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    ready_kernels(say, compiling=not arguments.no_compile)
    report = Report(arguments.json)
    machine_use("before")
    for name in arguments.sizes:
        for mode in arguments.main:
            measure(
                report,
                arguments.root,
                name,
                total=arguments.mib << 20,
                busy=mode == "busy",
                rounds=arguments.rounds,
            )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
