"""What an engine waits in its calls while a target is well, slow, and while it hangs.

    python3 tools/dev.py bench mover_stall

A thread does what a scheduler does, about every millisecond: it looks up 256 blocks, takes
finished jobs, and every few steps hands in a load and a store of 16 blocks of 64 KiB. Each call is
timed. The target is a FUSE file system of the tests' own behind a mover: first it is well (the
peer), then each of its answers takes 50 ms, then it answers nothing for --seconds. The limit is
a call that does nothing. It also says how long the longest job took, and how long it took
until the target was in use again.

As root, for FUSE.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from faultkit.disks import FaultyDisk, faulty_disk
from tiers import bench_directory, say

from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.starter import spawn
from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, machine_use, ready_kernels
from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.config.schema import Config, Tier
from lifeboat_cache.interface import BlockBatch, BlockBuffers, Job, Namespace
from lifeboat_cache.mover.places import target_key
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.testing import aligned_memory, sample_keys

_SIZE = 64 << 10
_BLOCKS = 16
_KEYS = 256
_PEER = "while the target is well"
_LIMIT = "a call that does nothing"
_OPERATIONS = ("read", "write", "open", "create", "lookup", "getattr", "opendir", "fsync", "unlink")
_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "most": 100.0}

#: Sets of memory for jobs; a step without a free one hands in nothing.
_SETS = 24

#: Less cannot be told from the clock's own noise, in microseconds.
_LEAST_US = 0.1

Times = dict[str, list[float]]


class Scheduler:
    """Makes an engine's calls and times them."""

    def __init__(self, store: RemoteStore, blocks: int) -> None:
        self._store = store
        self._known = sample_keys(range(blocks))
        self._next = blocks
        self._free = [
            (memory := aligned_memory(_BLOCKS * _SIZE), _buffers(memory)) for _ in range(_SETS)
        ]
        self._used: dict[Job, Any] = {}
        self.slowest = 0.0
        self.outcomes: dict[str, int] = defaultdict(int)

    def fill(self) -> None:
        """Store the blocks that are looked up and loaded."""
        for first in range(0, len(self._known), _BLOCKS):
            buffers = self._free[0][1]
            job = self._store.store(BlockBatch(self._known[first : first + _BLOCKS], buffers))
            job.wait(60)
            self._store.poll()

    def run(self, seconds: float) -> Times:
        """Work for so long; seconds of each call, by its name."""
        times: Times = {"lookup": [], "poll": [], "submit": [], "nothing": []}
        choice = np.random.default_rng(self._next)
        end, step = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            step += 1
            first = int(choice.integers(0, len(self._known) - _KEYS))
            keys = self._known[first : first + _KEYS]
            _timed(times["lookup"], partial(self._store.lookup, keys))
            _timed(times["nothing"], lambda: None)
            if step % 4 == 0 and len(self._free) >= 2:
                wanted = self._known[first : first + _BLOCKS]
                self._submit(times["submit"], self._store.load, wanted)
                new = sample_keys(range(self._next, self._next + _BLOCKS))
                self._next += _BLOCKS
                self._submit(times["submit"], self._store.store, new)
            self._take(_timed(times["poll"], self._store.poll))
            time.sleep(0.001)
        return times

    def _submit(self, times: list[float], call: Callable[..., Job], keys: list[bytes]) -> None:
        memory = self._free.pop()
        batch = BlockBatch(keys, memory[1])
        self._used[_timed(times, partial(call, batch))] = memory

    def _take(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._free.append(self._used.pop(job))
            self.slowest = max(self.slowest, job.seconds)
            for outcome in job.outcomes.tolist():
                self.outcomes[f"{job.kind} {outcome}"] += 1


def _buffers(memory: Any) -> BlockBuffers:
    return BlockBuffers.from_rows(memory.ctypes.data, _SIZE, range(_BLOCKS), _SIZE, memory)


def _timed(times: list[float], call: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    answer = call()
    times.append(time.perf_counter() - begin)
    return answer


def _percentiles(rounds: list[Times], name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for label, rank in _PERCENTILES.items():
        found[label] = [
            max(_LEAST_US, float(np.percentile(one[name] or [0.0], rank, method="higher")) * 1e6)
            for one in rounds
        ]
    return found


def measure(report: Report, disk: FaultyDisk, *, seconds: float, rounds: int, blocks: int) -> None:
    """Measure and report."""
    home = home_directory(os.environ)
    tier = Tier.model_validate(
        {"name": "share", "type": "filesystem", "path": str(disk.root), "min_free_gb": 0.0}
    )
    namespace = Namespace.from_identity({"engine": "bench", "of": "mover_stall"})
    store = RemoteStore(namespace, tier, home=home, config=Config.model_validate({}))
    try:
        time.sleep(0.2)
        problem = spawn(AgentPlaces.of(home), ["--mover", target_key(tier)], None)
        if problem or not store.wait_recovered(60):
            raise SystemExit(f"the mover cannot be used: {problem or store.reason}")
        scheduler = Scheduler(store, blocks)
        scheduler.fill()
        part = seconds / rounds
        scheduler.run(min(part, 1.0))
        well = [scheduler.run(min(part, 4.0)) for _ in range(rounds)]
        slow_rules = [
            {"op": op, "match": "kv", "do": "delay", "seconds": 0.05} for op in _OPERATIONS
        ]
        disk.rules(*slow_rules)
        slow = [scheduler.run(min(part, 4.0)) for _ in range(rounds)]
        disk.rules(*({"op": op, "match": "kv", "do": "hang"} for op in _OPERATIONS))
        scheduler.slowest = 0.0
        hanging = [scheduler.run(part) for _ in range(rounds)]
        say(f"longest job while it hung: {scheduler.slowest:.2f} s; {store.facts()}")
        disk.rules()
        disk.release()
        begin = time.monotonic()
        while not store.usable and time.monotonic() - begin < 60:
            time.sleep(0.01)
        say(f"in use again after {time.monotonic() - begin:.2f} s")
        scheduler.run(min(part, 1.0))
        say(f"outcomes of blocks: {dict(scheduler.outcomes)}")
        for case, ours in (("the target is slow", slow), ("the target hangs", hanging)):
            for name in ("lookup", "poll", "submit"):
                peers, limits = _percentiles(well, name), _percentiles(ours, "nothing")
                for label, values in _percentiles(ours, name).items():
                    row = compare(
                        "mover_stall",
                        case,
                        f"{name}, {label}",
                        "us",
                        values,
                        peer=(_PEER, peers[label]),
                        limit=(_LIMIT, limits[label]),
                    )
                    report.add(row)
    finally:
        store.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench mover_stall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=LEAST_PAIRS)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the target hangs")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks that are there")
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
    with (
        bench_directory("mover_stall", "disk", arguments.root) as place,
        faulty_disk(place) as disk,
    ):
        measure(
            report,
            disk,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            blocks=arguments.blocks,
        )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
