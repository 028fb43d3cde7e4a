"""Stores and loads through vLLM's real tiering manager, without an engine.

    python3 tools/dev.py bench vllm_tier

Ours beside vLLM's own fs tier, beside the disk itself (vectored O_DIRECT of the same
pieces, four threads) and a copy in memory. For each size of a chunk, 256 MiB as one
prompt and as eight; the scheduler's thread asleep between steps, and counting in
Python. Throughput, how soon lookups are answered, and what a tier costs the
scheduler's thread.

Needs about 2 GB of memory and 4 GB of disk, in .dev/bench unless --root
names another place.
"""

from __future__ import annotations

import argparse
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devkit.places import dev_home
from driven_tier import DrivenTier, MainThread
from page_cache import forget_pages
from paired import LEAST_PAIRS, Report, compare, machine_use
from raw_disk import RawDisk
from vllm_tiering import offload_keys

_SIZES = {"64KiB": 64 << 10, "256KiB": 256 << 10, "2MiB": 2 << 20, "6MiB": 6 << 20}
_PROMPTS = (1, 8)
_PEER = "vLLM's fs tier"
_DISK = "O_DIRECT"
_MEMORY = "memcpy"

#: Chunks of the new prompt that is asked for: 128 Ki tokens at 256 tokens a chunk.
_NEW_CHUNKS = 512

Samples = dict[str, dict[str, list[float]]]


def ours(directory: Path, rows: int, row_bytes: int, main: MainThread) -> DrivenTier:
    """Our tier, with a store of its own."""
    directory.mkdir(parents=True)
    config = directory / "lifeboat.yaml"
    config.write_text(
        f"storage: {{fallback_local: {{path: {directory / 'kv'}, min_free_gb: 1}}}}\n"
    )
    config.chmod(0o600)
    tier = {
        "type": "LifeboatTier",
        "module_path": "lifeboat_cache.integrations.vllm_tier",
        "config": str(config),
    }
    driven = DrivenTier(tier, directory, rows=rows, row_bytes=row_bytes, main=main)
    store = driven.engine.tier.store
    if store is None or not store.wait_recovered(30):
        raise RuntimeError("our store did not open: see the log above")
    return driven


def peer(directory: Path, rows: int, row_bytes: int, main: MainThread) -> DrivenTier:
    """VLLM's own filesystem tier, as it comes."""
    tier = {"type": "fs", "root_dir": str(directory)}
    return DrivenTier(tier, directory, rows=rows, row_bytes=row_bytes, main=main)


def _rotated(things: list[Any], turn: int) -> list[Any]:
    """The order of a round: everybody is first, last and in between equally often."""
    at = turn % len(things)
    order = things[at:] + things[:at]
    return order if (turn // len(things)) % 2 == 0 else order[::-1]


@contextmanager
def _clean(directory: Path) -> Iterator[Path]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(
    report: Report, root: Path, name: str, *, total: int, prompts: int, busy: bool, rounds: int
) -> None:
    """Measure one case and report it."""
    size = _SIZES[name]
    per_prompt = max(1, total // size // prompts)
    chunks = per_prompt * prompts
    moved = chunks * size
    main = MainThread(busy=busy)
    samples: Samples = defaultdict(lambda: defaultdict(list))

    with _clean(root) as place:
        # Our tier drops stores beyond half of the CPU tier's bytes: they would pin it.
        rows = 2 * chunks + 8
        tiers = {
            "ours": ours(place / "ours", rows, size, main),
            _PEER: peer(place / "fs", rows, size, main),
        }
        raw = RawDisk(place / "raw", size=moved, piece=size)

        def tier_round(who: str, seed: int) -> None:
            tier = tiers[who]
            keys = offload_keys(chunks, seed=seed)
            batch = [keys[at : at + per_prompt] for at in range(0, chunks, per_prompt)]
            found = samples[who]
            alone = main.rate_alone()

            def note(what: str, seconds: float) -> None:
                spent = tier.take_spent()
                found[f"{what}, throughput"].append(moved / seconds / 1e9)
                if busy:
                    found[f"{what}, main thread keeps"].append(main.take_rate() / alone)
                kind = "store" if what == "store" else "load"
                submit = spent[f"submit_{kind}"] / chunks
                found[f"{what}, submit per chunk"].append(submit * 1e6)
                found[f"{what}, scheduler per chunk"].append(sum(spent.values()) / chunks * 1e6)
                if kind == "load":
                    found[f"{what}, lookup per key"].append(spent["lookup"] / chunks * 1e6)
                    found[f"{what}, answered after"].append(tier.answered_s)

            tier.take_spent()
            note("store", tier.store(batch))
            for what in ("load cold", "load again"):
                if what == "load cold":
                    tier.forget()
                else:
                    tier.empty()
                tier.take_spent()
                main.take_rate()
                note(what, tier.load(batch))
            tier.empty()
            for path in tier.directory.rglob("*.bin"):
                path.unlink()

        def raw_round(who: str, _seed: int) -> None:
            found = samples[who]
            found["store, throughput"].append(moved / raw.write() / 1e9)
            forget_pages(place / "raw")
            found["load cold, throughput"].append(moved / raw.read() / 1e9)
            found["load again, throughput"].append(moved / raw.read() / 1e9)

        def copy_round(who: str, _seed: int) -> None:
            rate = moved / raw.copy() / 1e9
            for what in ("store", "load cold", "load again"):
                samples[who][f"{what}, throughput"].append(rate)

        steps: list[tuple[str, Callable[[str, int], None]]] = [
            ("ours", tier_round),
            (_PEER, tier_round),
            (_DISK, raw_round),
            (_MEMORY, copy_round),
        ]
        try:
            for turn in range(-1, rounds):  # the first round is thrown away
                if turn == 0:
                    samples.clear()
                for who, step in _rotated(steps, turn):
                    step(who, 1000 + turn)
        finally:
            for tier in tiers.values():
                tier.shutdown()
            raw.close()

    case = f"{name}, {prompts} x {moved // prompts >> 20} MiB, main {'busy' if busy else 'idle'}"
    for metric in samples["ours"]:
        unit = _unit(metric)
        limits: list[str | None] = [who for who in (_DISK, _MEMORY) if metric in samples[who]]
        for limit in limits or [None]:
            report.add(
                compare(
                    "vllm_tier",
                    case,
                    metric,
                    unit,
                    samples["ours"][metric],
                    peer=(_PEER, samples[_PEER][metric]),
                    limit=None if limit is None else (limit, samples[limit][metric]),
                )
            )


def _unit(metric: str) -> str:
    if metric.endswith("throughput"):
        return "GB/s"
    if metric.endswith("keeps"):
        return "share"
    return "s" if metric.endswith("after") else "us"


def measure_new_prompts(report: Report, root: Path, *, rounds: int) -> None:
    """What a prompt costs of which nothing is stored, beside a store that holds much."""
    size = _SIZES["64KiB"]
    main = MainThread(busy=False)
    samples: dict[str, list[float]] = {"ours": [], _PEER: []}
    with _clean(root) as place:
        tiers = {
            "ours": ours(place / "ours", 1024 + 8, size, main),
            _PEER: peer(place / "fs", 1024 + 8, size, main),
        }
        try:
            for tier in tiers.values():
                tier.store([offload_keys(1024, seed=1)])
            for turn in range(-1, rounds):
                for who in _rotated(list(tiers), turn):
                    seconds = tiers[who].ask_for_nothing(offload_keys(_NEW_CHUNKS, seed=10 + turn))
                    if turn >= 0:
                        samples[who].append(seconds)
        finally:
            for tier in tiers.values():
                tier.shutdown()
    report.add(
        compare(
            "vllm_tier",
            f"new prompt of {_NEW_CHUNKS} chunks",
            "scheduler per prompt",
            "us",
            [value * 1e6 for value in samples["ours"]],
            peer=(_PEER, [value * 1e6 for value in samples[_PEER]]),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_tier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--mib", type=int, default=256, help="bytes moved per operation, in MiB")
    parser.add_argument("--main", nargs="+", choices=("idle", "busy"), default=("idle", "busy"))
    parser.add_argument("--root", type=Path, default=dev_home() / "bench" / "vllm_tier")
    arguments = parser.parse_args()
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    report = Report(arguments.json)
    machine_use("before")
    for name in arguments.sizes:
        for prompts in _PROMPTS:
            for mode in arguments.main:
                measure(
                    report,
                    arguments.root,
                    name,
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
