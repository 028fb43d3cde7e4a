"""What a tier costs vLLM's scheduler thread per chunk, call by call.

    python3 tools/dev.py bench vllm_submit

A prompt of many small chunks goes through the calls that vLLM's tiering manager makes
to a tier: a first look at all keys, a second one, `submit_store`, `submit_load`,
fetching results and the end of the request. Ours beside vLLM's fs tier, and lookups
beside a call that does nothing. Chunks are small, so that storage costs nothing; jobs
are waited for between the calls. Times are those of the thread (CPU), which others on the
machine do not change, and those of the clock, which hold what the tier's threads take.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from devkit.places import dev_home
from tiers import our_config, say
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_tiering import Engine, offload_keys

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    compare,
    machine_use,
    ready_kernels,
    without_kernels,
)

_PEER = "vLLM's fs tier"
_NOTHING = "a call that does nothing"
_ROW = 4096
_STEP_END = ScheduleEndContext([], [])
_PATIENCE_S = 60.0

Samples = dict[str, list[float]]


class Nothing:
    """The least that asking for a key can cost."""

    def lookup(self, key: bytes, context: Any) -> None:
        """Answer nothing."""


class Caller:
    """Calls a tier as vLLM's manager does, and times it.

    Parameters
    ----------
    tier
        Configuration of the secondary tier.
    chunks
        Chunks of a prompt.
    """

    def __init__(self, tier: dict[str, Any], chunks: int) -> None:
        self.engine = Engine(tier, rows=2 * chunks + 8, row_bytes=_ROW)
        self._chunks = chunks
        self._job = 10_000
        self.samples: Samples = defaultdict(list)
        self.profile: cProfile.Profile | None = None

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        if self.profile is not None:
            self.profile.enable()
        clock, cpu = time.perf_counter(), time.thread_time()
        try:
            return call()
        finally:
            cpu, clock = time.thread_time() - cpu, time.perf_counter() - clock
            if self.profile is not None:
                self.profile.disable()
            self.samples[f"{name}, CPU"].append(cpu / self._chunks * 1e6)
            self.samples[f"{name}, clock"].append(clock / self._chunks * 1e6)

    def _ask(self, keys: list[bytes], context: Any) -> None:
        lookup = self.engine.tier.lookup
        for key in keys:
            lookup(key, context)

    def _transfer(self, name: str, keys: list[bytes], context: Any) -> None:
        tier = self.engine.tier
        self._job += 1
        job = TransferJob(
            job_id=self._job,
            keys=keys,
            chunk_ids=np.arange(len(keys), dtype=np.int32),
            is_promotion=name == "submit_load",
            req_context=context,
        )
        self._timed(name, lambda: getattr(tier, name)(job))
        results: list[Any] = []
        end = time.monotonic() + _PATIENCE_S
        if hasattr(tier, "_jobs"):  # ours: fetch all results at once, to see what that costs
            while tier._jobs and time.monotonic() < end:
                time.sleep(0.0005)
            results += self._timed(f"results of {name}", lambda: list(tier.get_finished_jobs()))
        while not results:
            if time.monotonic() > end:
                raise TimeoutError("a job is still under way")
            time.sleep(0.0005)
            results += tier.get_finished_jobs()
        if not all(result.success for result in results):
            raise RuntimeError(f"{name} failed")

    def prompt(self, seed: int) -> None:
        """Store a new prompt, and load it as another request."""
        tier, keys = self.engine.tier, offload_keys(self._chunks, seed=seed)
        context = self.engine.request(keys)
        self._timed("first look, new prompt", lambda: self._ask(keys, context))
        tier.on_schedule_end(_STEP_END)
        self._transfer("submit_store", keys, context)
        self._timed("end of request", lambda: tier.on_request_finished(context))
        context = self.engine.request(keys)
        self._timed("first look, stored prompt", lambda: self._ask(keys, context))
        self._timed("second look", lambda: self._ask(keys, context))
        self._transfer("submit_load", keys, context)
        tier.on_schedule_end(_STEP_END)
        tier.on_request_finished(context)
        tier.on_schedule_end(_STEP_END)

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.shutdown()


def _nothing(chunks: int, seed: int) -> float:
    keys, tier, context = offload_keys(chunks, seed=seed), Nothing(), object()
    begin = time.thread_time()
    lookup = tier.lookup
    for key in keys:
        lookup(key, context)
    return (time.thread_time() - begin) / chunks * 1e6


def _ours(place: Path, chunks: int) -> Caller:
    caller = Caller(
        {
            "type": "LifeboatTier",
            "module_path": "lifeboat_cache.integrations.vllm_tier",
            "config": str(our_config(place)),
        },
        chunks,
    )
    store = caller.engine.tier.store
    if store is None or not store.wait_recovered(30):
        raise RuntimeError("our store did not open: see the log above")
    return caller


def measure(report: Report, root: Path, chunks: int, rounds: int, profile: bool) -> None:
    """Measure prompts of one length and report them."""
    place = root / str(chunks)
    shutil.rmtree(place, ignore_errors=True)
    try:
        ours = _ours(place / "ours", chunks)
        peer = Caller({"type": "fs", "root_dir": str(place / "fs")}, chunks)
        nothing: list[float] = []
        try:
            for turn in range(-1, rounds):
                if turn == 0:
                    ours.samples.clear()
                    peer.samples.clear()
                    if profile:
                        ours.profile = cProfile.Profile()
                callers = [ours] if profile else [ours, peer]
                for caller in callers if turn % 2 else callers[::-1]:
                    caller.prompt(1000 + turn)
                if turn >= 0:
                    nothing.append(_nothing(chunks, turn))
        finally:
            ours.shutdown()
            peer.shutdown()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if ours.profile is not None:
        pstats.Stats(ours.profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
        return
    for metric, values in ours.samples.items():
        theirs = peer.samples.get(metric)
        report.add(
            compare(
                "vllm_submit",
                f"prompt of {chunks} chunks{without_kernels()}",
                f"{metric} per chunk",
                "us",
                values,
                peer=None if theirs is None else (_PEER, theirs),
                limit=(_NOTHING, nothing) if "look" in metric and "CPU" in metric else None,
            )
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", nargs="+", type=int, default=[256, 2048])
    parser.add_argument("--profile", action="store_true", help="ours under cProfile instead")
    parser.add_argument("--root", type=Path, default=dev_home() / "bench" / "vllm_submit")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile kernels that are not there"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    ready_kernels(say, compiling=not arguments.no_compile)
    report = Report(arguments.json)
    machine_use("before")
    for chunks in arguments.chunks:
        measure(report, arguments.root, chunks, arguments.rounds, arguments.profile)
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
