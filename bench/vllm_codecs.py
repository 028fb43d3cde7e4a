"""Stores and loads through vLLM's real tiering manager, in codecs.

    python3 tools/dev.py bench vllm_codecs

One of our tiers for each codec, on the same disk, beside the disk itself (vectored reads
and writes of whole chunks, uncompressed, by as many threads as ours has, in a process of
their own) and a copy in memory. Chunks of 256 tokens in bfloat16 that look like a model's
KV. Throughput is of KV: bytes of the engine's, whatever goes to the disk.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from driven_tier import DrivenTier, MainThread
from kv_blocks import layout_of, real_looking
from raw_process import RawProcess
from tiers import bench_directory, io_depth, our_tier, say
from vllm_tiering import offload_keys

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    compare,
    machine_use,
    ready_kernels,
    without_kernels,
)
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.names import CODEC_NAMES

_MEDIUM = "the disk"
_MEMORY = "memcpy"

#: Layers, KV heads and head size of chunks: 2 MiB, as of a small model or a rank of a large one.
_LAYERS, _HEADS, _DIM = 8, 2, 128


def tier_with(
    codec: str, layout: KVLayout, directory: Path, rows: int, main: MainThread
) -> DrivenTier:
    """A tier of ours that keeps chunks in a codec, and chunks that look like KV."""
    tier = our_tier(directory, rows, layout.nbytes, main, codec)
    # What a real engine's plugin hands over: there is no engine here.
    tier.engine.tier._layouts = [layout]
    tier.engine.tier.store.describe(layout)
    rng = np.random.default_rng(3)
    some = [real_looking(layout, rng) for _ in range(4)]
    table = tier.engine.table()
    for row in range(rows):
        table[row, : layout.nbytes] = some[row % len(some)]
    del table
    return tier


def measure(
    report: Report, root: Path | None, codecs: Sequence[str], *, total: int, busy: bool, rounds: int
) -> None:
    """Measure all codecs against the disk in one run."""
    layout = layout_of(_LAYERS, _DIM, "bfloat16", _HEADS)
    chunks = total // layout.nbytes
    moved = chunks * layout.nbytes
    main = MainThread(busy=busy)
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (
        bench_directory("vllm_codecs", "disk", root) as place,
        RawProcess(
            place / "raw", size=moved, block=layout.nbytes, depth=io_depth(place / "raw_config")
        ) as raw,
    ):
        rows = 2 * chunks + 8
        tiers = {codec: tier_with(codec, layout, place / codec, rows, main) for codec in codecs}

        def note(who: str, what: str, seconds: float) -> None:
            samples[who][f"{what}, KV"].append(moved / seconds / 1e9)

        def tier_round(codec: str, seed: int) -> None:
            tier = tiers[codec]
            keys = offload_keys(chunks, seed=seed)
            before = tier.engine.tier.store.counters()
            note(codec, "store", tier.store([keys]))
            written = tier.engine.tier.store.counters().bytes_written - before.bytes_written
            samples[codec]["stored, per chunk"].append(written / chunks)
            tier.forget()
            note(codec, "cold load", tier.load([keys]))
            tier.empty()

        def raw_round(_who: str, _seed: int) -> None:
            note(_MEDIUM, "store", raw.run("write", main.rest))
            note(_MEDIUM, "cold load", raw.run("read", main.rest))
            note(_MEMORY, "cold load", raw.run("copy", main.rest))

        steps: list[tuple[str, Callable[[str, int], None]]] = [
            *((codec, tier_round) for codec in codecs),
            (_MEDIUM, raw_round),
        ]
        order = np.random.default_rng(5)
        try:
            for turn in range(-1, rounds):  # the first round is thrown away
                if turn == 0:
                    samples.clear()
                # A disk remembers what it has just done: nobody always follows the same one.
                for at in order.permutation(len(steps)).tolist():
                    who, step = steps[at]
                    step(who, 1000 + turn)
        finally:
            for tier in tiers.values():
                tier.shutdown()
    mode = "busy" if busy else "idle"
    add = partial(_add, report, samples, without_kernels())
    for codec in codecs:
        for metric in samples[codec]:
            add(codec, metric, f"1 x {moved >> 20} MiB, {layout.nbytes >> 20} MiB, main {mode}")


def _add(
    report: Report,
    samples: dict[str, dict[str, list[float]]],
    kernels: str,
    codec: str,
    metric: str,
    case: str,
) -> None:
    limits: list[str | None] = [who for who in (_MEDIUM, _MEMORY) if metric in samples[who]]
    peer = samples["raw"].get(metric) if codec != "raw" else None
    for limit in limits or [None]:
        report.add(
            compare(
                "vllm_codecs",
                f"{codec}, {case}{kernels}",
                metric,
                "GB/s" if metric.endswith("KV") else "bytes",
                samples[codec][metric],
                peer=None if peer is None else ("our raw", peer),
                limit=None if limit is None else (limit, samples[limit][metric]),
            )
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--codecs", nargs="+", choices=CODEC_NAMES, default=list(CODEC_NAMES))
    parser.add_argument("--mib", type=int, default=256, help="KV moved per operation, in MiB")
    parser.add_argument("--main", nargs="+", choices=("idle", "busy"), default=("idle",))
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
    for mode in arguments.main:
        measure(
            report,
            arguments.root,
            arguments.codecs,
            total=arguments.mib << 20,
            busy=mode == "busy",
            rounds=arguments.rounds,
        )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
