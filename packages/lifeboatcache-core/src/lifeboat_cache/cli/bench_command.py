"""``lifeboat-cache bench``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lifeboat_cache.bench import LEAST_PAIRS, BenchPlan, Report, Row, run_bench
from lifeboat_cache.bench.place import interruptible
from lifeboat_cache.cli.output import RefusedError, clean
from lifeboat_cache.config import Config, Tier, load_config
from lifeboat_cache.config.units import parse_size
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.mover.apart import Apart, Say
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

        def hear(said: Any) -> None:
            if isinstance(said, str):
                say(said)
            else:
                report.add(Row(**said))

        say(f"target {tier.name}, {plan.io_workers} I/O threads")
        with Apart(tier, lambda _, told: run_bench(plan, _Passed(told), told)) as apart:
            try:
                apart.ask(None, hear)
            except KeyboardInterrupt:
                apart.interrupt()
                raise
        report.close()
    return 0


class _Passed(Report):
    """Passes rows on to whoever prints them."""

    def __init__(self, tell: Say) -> None:
        super().__init__(progress=False)
        self._tell = tell

    def add(self, row: Row) -> None:
        self._tell(asdict(row))


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
            with Apart(tier, partial(_probe, tier)) as apart:
                apart.ask(None)
        except (OSError, LifeboatError) as error:
            problems.append(f"{tier.name}: {error}")
            continue
        return tier
    raise RefusedError(
        f"no target can be measured ({'; '.join(problems)}). Run `lifeboat-cache doctor`, or name "
        "a directory with --path."
    )


def _probe(tier: Tier, _request: Any, _say: Say) -> None:
    FilesystemTarget.from_tier(tier).probe()


def _directory(config: Config, path: Path) -> Tier:
    """A directory as a target without limits of its own, or the target that it is."""
    for tier in (*config.storage.tiers, config.storage.fallback_local.as_tier()):
        if tier.path == path:
            return tier
    tier = Tier(name="path", type="filesystem", path=path, min_free_gb=0.0, direct_io="auto")
    with Apart(tier, lambda _, __: path.is_dir()) as apart:
        if not apart.ask(None):
            raise RefusedError(
                f"--path {path} is not a directory: make it first, or name another one"
            )
    return tier
