"""Stores and loads through vLLM's real tiering manager, without an engine.

    python3 tools/dev.py bench vllm_tier

Ours beside vLLM's own fs tier, beside the medium itself (vectored reads and writes of
the same pieces by as many threads as ours has, in a process of their own), the page
cache and a copy in memory. For each size of a chunk, 256 MiB as one prompt and as eight;
the scheduler's thread asleep between steps, and counting in Python; on disk, and in
/dev/shm. Throughput, how soon lookups are answered, and what a tier costs the
scheduler's thread.

With 256 MiB it needs about 2 GB of memory and 4 GB of the medium: .dev/bench unless
--root names another place, or /dev/shm.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from driven_tier import MainThread
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

_SIZES = {"64KiB": 64 << 10, "256KiB": 256 << 10, "2MiB": 2 << 20, "6MiB": 6 << 20}
_MEDIUM = "the medium"
_CACHED = "preadv from the page cache"
_MEMORY = "memcpy"

#: Before each operation, in seconds: disks of virtual machines let what has just written much
#: read less, so that who stores fast would seem to load slowly.
_PAUSE_S = 0.5

#: Chunks of the new prompt that is asked for: 128 Ki tokens at 256 tokens a chunk.
_NEW_CHUNKS = 512

Samples = dict[str, dict[str, list[float]]]


def measure(
    report: Report,
    root: Path | None,
    name: str,
    *,
    medium: str,
    total: int,
    prompts: int,
    busy: bool,
    rounds: int,
) -> None:
    """Measure one case and report it."""
    size = _SIZES[name]
    per_prompt = max(1, total // size // prompts)
    chunks = per_prompt * prompts
    moved = chunks * size
    main = MainThread(busy=busy)
    samples: Samples = defaultdict(lambda: defaultdict(list))

    with (
        bench_directory("vllm_tier", medium, root) as place,
        RawProcess(place / "raw", size=moved, block=size, depth=io_depth(place / "ours")) as raw,
    ):
        # Our tier drops stores beyond half of the CPU tier's bytes: they would pin it.
        rows = 2 * chunks + 8
        tiers = {
            OURS: our_tier(place / "ours", rows, size, main),
            PEER: peer_tier(place / "fs", rows, size, main),
        }
        alone = 0.0

        def keep(found: dict[str, list[float]], what: str, seconds: float) -> None:
            found[f"{what}, throughput"].append(moved / seconds / 1e9)
            if busy and found is not samples[_MEMORY]:
                found[f"{what}, main thread keeps"].append(main.take_rate() / alone)

        def tier_round(who: str, seed: int) -> None:
            nonlocal alone
            tier = tiers[who]
            keys = offload_keys(chunks, seed=seed)
            batch = [keys[at : at + per_prompt] for at in range(0, chunks, per_prompt)]
            found = samples[who]
            alone = main.rate_alone()

            def note(what: str, seconds: float) -> None:
                spent = tier.take_spent()
                keep(found, what, seconds)
                kind = "store" if what == "store" else "load"
                submit = spent[f"submit_{kind}"] / chunks
                found[f"{what}, submit per chunk"].append(submit * 1e6)
                found[f"{what}, scheduler per chunk"].append(sum(spent.values()) / chunks * 1e6)
                if kind == "load":
                    found[_once_asked(what)].append(moved / (seconds - tier.asking_s) / 1e9)
                    found[f"{what}, lookup per key"].append(spent["lookup"] / chunks * 1e6)
                    found[f"{what}, answered at the first call"].append(tier.take_first_answers())
                    found[f"{what}, answered after"].append(tier.answered_s)

            tier.take_spent()
            time.sleep(_PAUSE_S)
            note("store", tier.store(batch))
            for what in ("cold load", "hot load"):
                if what == "cold load":
                    tier.forget()
                else:
                    tier.empty()
                time.sleep(_PAUSE_S)
                tier.take_spent()
                tier.take_first_answers()
                main.take_rate()
                note(what, tier.load(batch))
            tier.empty()
            for path in tier.directory.rglob("*.bin"):
                path.unlink()

        def raw_round(_who: str, _seed: int) -> None:
            nonlocal alone
            alone = main.rate_alone()
            for what, operation, who in (
                ("store", "write", _MEDIUM),
                ("cold load", "read", _MEDIUM),
                ("hot load", "read_cached", _CACHED),
                ("hot load", "copy", _MEMORY),
            ):
                time.sleep(_PAUSE_S)
                seconds = raw.run(operation, main.rest)
                keep(samples[who], what, seconds)
                if what != "store":  # a limit asks nobody
                    samples[who][_once_asked(what)].append(moved / seconds / 1e9)

        steps: list[tuple[str, Callable[[str, int], None]]] = [
            (OURS, tier_round),
            (PEER, tier_round),
            (_MEDIUM, raw_round),
        ]
        try:
            for turn in range(-1, rounds):  # the first round is thrown away
                if turn == 0:
                    samples.clear()
                for who, step in rotated(steps, turn):
                    step(who, 1000 + turn)
        finally:
            for tier in tiers.values():
                tier.shutdown()
        way = "" if medium == "shm" else ", O_DIRECT" if raw.direct else ", buffered"
        names = {_MEDIUM: f"preadv and pwritev{way}"}

    whole = f"{prompts} x {moved // prompts / (1 << 20):g} MiB"
    case = f"{medium}, {name}, {whole}, main {'busy' if busy else 'idle'}"
    case += without_kernels()
    for metric in samples[OURS]:
        limits: list[str | None] = [
            who for who in (_MEDIUM, _CACHED, _MEMORY) if metric in samples[who]
        ]
        for limit in limits or [None]:
            report.add(
                compare(
                    "vllm_tier",
                    case,
                    metric,
                    _unit(metric),
                    samples[OURS][metric],
                    peer=(PEER, samples[PEER][metric]),
                    limit=None
                    if limit is None
                    else (names.get(limit, limit), samples[limit][metric]),
                )
            )


def _once_asked(what: str) -> str:
    return f"{what} once asked, throughput"


def _unit(metric: str) -> str:
    if metric.endswith("throughput"):
        return "GB/s"
    if metric.endswith(("keeps", "first call")):
        return "share"
    return "s" if metric.endswith("after") else "us"


def measure_new_prompts(report: Report, root: Path | None, *, rounds: int) -> None:
    """What a prompt costs of which nothing is stored, beside a store that holds much."""
    size = _SIZES["64KiB"]
    main = MainThread(busy=False)
    samples: dict[str, list[float]] = {OURS: [], PEER: []}
    with bench_directory("vllm_tier", "disk", root) as place:
        tiers = {
            OURS: our_tier(place / "ours", 1024 + 8, size, main),
            PEER: peer_tier(place / "fs", 1024 + 8, size, main),
        }
        try:
            for tier in tiers.values():
                tier.store([offload_keys(1024, seed=1)])
            for turn in range(-1, rounds):
                for who in rotated(list(tiers), turn):
                    seconds = tiers[who].ask_for_nothing(offload_keys(_NEW_CHUNKS, seed=10 + turn))
                    if turn >= 0:
                        samples[who].append(seconds)
        finally:
            for tier in tiers.values():
                tier.shutdown()
    report.add(
        compare(
            "vllm_tier",
            f"new prompt of {_NEW_CHUNKS} chunks{without_kernels()}",
            "scheduler per prompt",
            "us",
            [value * 1e6 for value in samples[OURS]],
            peer=(PEER, [value * 1e6 for value in samples[PEER]]),
        )
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_tier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=["64KiB", "256KiB", "2MiB"])
    parser.add_argument("--mib", type=int, default=256, help="bytes moved per operation, in MiB")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 8], help="that share them")
    parser.add_argument("--main", nargs="+", choices=("idle", "busy"), default=("idle", "busy"))
    parser.add_argument("--media", nargs="+", choices=MEDIA, default=MEDIA)
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
            for prompts in arguments.prompts:
                for mode in arguments.main:
                    measure(
                        report,
                        arguments.root,
                        name,
                        medium=medium,
                        total=arguments.mib << 20,
                        prompts=prompts,
                        busy=mode == "busy",
                        rounds=arguments.rounds,
                    )
    measure_new_prompts(report, arguments.root, rounds=arguments.rounds)
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
