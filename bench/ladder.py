"""What a ladder costs that has one target, beside a store on that target alone.

    python3 tools/dev.py bench ladder

Adapters always get a ladder. With one target it should cost nothing: each call is made on
both in turn, for keys that are there and keys that are not, and jobs of small blocks, whose
storage costs least. Calls are timed by the thread's CPU time, jobs by the clock until they
are done. A second target, which has none of the blocks, shows what a union costs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from devkit.places import dev_home

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    compare,
    machine_use,
    ready_kernels,
    without_kernels,
)
from lifeboat_cache.interface import BlockBatch, BlockBuffers, Job, Namespace, Store, block_keys
from lifeboat_cache.store.block_store import DEFAULT_PENDING_BYTES, BlockStore
from lifeboat_cache.store.member import MemberSpec
from lifeboat_cache.store.tiered_store import TieredStore, Tiering
from lifeboat_cache.targets.filesystem import FilesystemTarget

_BENCH = "ladder"
_ALONE = "the target alone"
_PATIENCE_S = 60.0

Samples = dict[tuple[str, str], list[float]]


def _spec(root: Path) -> MemberSpec:
    def opened(namespace: Namespace) -> Store:
        return BlockStore(namespace, [FilesystemTarget(root)])

    return MemberSpec(root.name, "filesystem", "local", str(root), opened)


def _ladder(namespace: Namespace, roots: Sequence[Path]) -> TieredStore:
    tiering = Tiering.fixed([_spec(root) for root in roots])
    return TieredStore(namespace, tiering, pending_bytes=DEFAULT_PENDING_BYTES)


def _calls(stores: dict[str, Store], blocks: int, size: int, rounds: int) -> Samples:
    """Microseconds per block of each call, by its name and whose it is."""
    samples: Samples = defaultdict(list)
    memory = np.zeros((blocks, size), dtype=np.uint8)
    buffers = BlockBuffers.from_rows(
        memory.ctypes.data, size, np.arange(blocks, dtype=np.int64), size, memory
    )

    def timed(metric: str, who: str, call: Callable[[], Any], clock: Callable[[], float]) -> None:
        start = clock()
        call()
        samples[metric, who].append((clock() - start) / blocks * 1e6)

    def done(run: Callable[..., Job], batch: BlockBatch) -> None:
        job = run(batch, lambda _: None)
        if not (job.wait(_PATIENCE_S) and job.ok):
            raise RuntimeError("a job failed")

    for number in range(rounds):
        names = list(stores)
        for who in names if number % 2 else reversed(names):  # nobody is always first
            store = stores[who]
            keys = block_keys([b"%s %d %d" % (who.encode(), number, n) for n in range(blocks)])
            batch = BlockBatch(keys, buffers)
            cpu, wall = time.thread_time, time.perf_counter
            timed("lookup of new blocks", who, lambda: store.lookup(keys), cpu)  # noqa: B023
            timed("store, until done", who, lambda: done(store.store, batch), wall)  # noqa: B023
            timed("lookup of stored blocks", who, lambda: store.lookup(keys), cpu)  # noqa: B023
            timed("touch", who, lambda: store.touch(keys), cpu)  # noqa: B023
            timed("load, until done", who, lambda: done(store.load, batch), wall)  # noqa: B023
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a call")
    parser.add_argument("--size", type=int, default=65_536, help="bytes of a block")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--root", type=Path, default=dev_home() / "bench" / "ladder")
    parser.add_argument("--no-compile", action="store_true", help="go without compiled kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    ready_kernels(lambda text: print(text, file=sys.stderr), compiling=not args.no_compile)
    shutil.rmtree(args.root, ignore_errors=True)
    args.root.mkdir(parents=True)
    report = Report(args.json)
    namespace = Namespace.from_identity({"engine": "bench", "model": "ladder"})
    stores: dict[str, Store] = {
        _ALONE: BlockStore(namespace, [FilesystemTarget(args.root / "alone")]),
        "one target": _ladder(namespace, [args.root / "one"]),
        "two targets": _ladder(namespace, [args.root / "first", args.root / "second"]),
    }
    try:
        for store in stores.values():
            if not store.wait_recovered(_PATIENCE_S):
                raise RuntimeError("a store was not opened in time")
        machine_use("before")
        rounds = max(args.rounds, LEAST_PAIRS)
        samples = _calls(stores, args.blocks, args.size, rounds)
        for who in ("one target", "two targets"):
            for metric, of in samples:
                if of == who:
                    limit = (_ALONE, samples[metric, _ALONE])
                    case = f"{who}, {args.blocks} blocks{without_kernels()}"
                    report.add(
                        compare(_BENCH, case, metric, "us", samples[metric, who], limit=limit)
                    )
    finally:
        for store in stores.values():
            store.close()
        shutil.rmtree(args.root, ignore_errors=True)
    report.close()
    machine_use("after")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
