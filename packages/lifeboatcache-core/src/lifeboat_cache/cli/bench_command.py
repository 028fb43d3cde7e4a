"""``lifeboat-cache bench``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from lifeboat_cache.bench import LEAST_PAIRS, BenchPlan, Report, run_bench
from lifeboat_cache.bench.place import interruptible
from lifeboat_cache.cli.output import RefusedError, clean
from lifeboat_cache.config import Config, Tier, load_config
from lifeboat_cache.config.units import parse_size
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.targets.direct import ALIGNMENT
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import DIRECTORY_MODE

__all__ = ["bench"]

_ROUNDS = 9
_QUICK_ROUNDS = 3


def bench(args: argparse.Namespace) -> int:
    """Measure a target beside its device and the memory."""
    loaded = load_config(args.config)
    config = loaded.config
    size = _size("--size", args.size)
    blocks = tuple(_size("--block-size", part) for part in args.block_size.split(","))
    for block in blocks:
        if block % ALIGNMENT or block > size:
            raise RefusedError(
                f"--block-size {args.block_size}: a block is a multiple of {ALIGNMENT} bytes and "
                "not larger than --size"
            )
    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
    if rounds < LEAST_PAIRS and not args.quick:
        raise RefusedError(
            f"--rounds {rounds}: an interval needs at least {LEAST_PAIRS} rounds; with --quick "
            "there is none"
        )
    if args.jobs < 1:
        raise RefusedError(f"--jobs {args.jobs}: at least one job is needed")

    # First, and by itself: as a parent of what is made below, it would not be private.
    with contextlib.suppress(OSError):  # without it there are no kernels, which is said
        loaded.home.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    with interruptible():
        tier = _tier(config, args)
        plan = BenchPlan(
            root=tier.path,
            direct_io=tier.direct_io,
            capacity=tier.capacity_bytes,
            reserve=tier.min_free_bytes,
            io_workers=config.engine.io_workers,
            size=size,
            block_sizes=blocks,
            jobs=args.jobs,
            rounds=rounds,
            compiling=not args.no_compile,
        )
        report = Report(args.json, progress=False)

        def say(text: str) -> None:
            if not args.json or sys.stderr.isatty():
                print(f"lifeboat-cache: {clean(text)}", file=sys.stderr, flush=True)

        say(f"target {tier.name}, {plan.io_workers} I/O threads")
        run_bench(plan, report, say)
        report.close()
    return 0


def _size(option: str, text: str) -> int:
    try:
        size = parse_size(text.strip())
    except ValueError as error:
        raise RefusedError(f"{option}: {error}. Write for example 256MiB or 64KiB.") from None
    if size <= 0:
        raise RefusedError(f"{option} {text}: a size is above 0")
    return size


def _tier(config: Config, args: argparse.Namespace) -> Tier:
    """The target to measure: one by its name, a directory, or the first that is usable."""
    if args.path is not None:
        return _directory(config, Path(os.path.abspath(args.path)))
    places = config.storage.places
    if args.target is not None:
        places = tuple(tier for tier in places if tier.name == args.target)
        if not places:
            names = ", ".join(tier.name for tier in config.storage.places)
            raise RefusedError(f"no enabled target is called {args.target!r}; there are: {names}")
    problems = []
    for tier in places:
        try:
            FilesystemTarget.from_tier(tier).probe()
        except (OSError, LifeboatError) as error:
            problems.append(f"{tier.name}: {error}")
            continue
        return tier
    raise RefusedError(
        f"no target can be measured ({'; '.join(problems)}). Run `lifeboat-cache doctor`, or name "
        "a directory with --path."
    )


def _directory(config: Config, path: Path) -> Tier:
    """A directory as a target without limits of its own, or the target that it is."""
    for tier in (*config.storage.tiers, config.storage.fallback_local.as_tier()):
        if tier.path == path:
            return tier
    if not path.is_dir():
        raise RefusedError(f"--path {path} is not a directory: make it first, or name another one")
    return Tier(name="path", type="filesystem", path=path, min_free_gb=0.0, direct_io="auto")
