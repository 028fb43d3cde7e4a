"""Stores and loads prompt caches of mlx-lm, without computing them.

    python3 tools/dev.py bench mlx_prompt_cache

Ours beside ``save_prompt_cache`` and ``load_prompt_cache`` of mlx-lm, for the same tokens:
how long the caller of a store waits, how long until another process finds what was stored,
how long until it is on the medium (both synchronised), how long a load takes with the files
in the page cache and without, and what prompts with a common prefix take on disk. Theirs
loads when arrays are evaluated: both are timed until all of them are. The bytes are those
of a model with 32 layers of 8 KV heads of 128 in bf16 (128 KiB a token).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from devkit.places import dev_home
from mlx_lm.models import cache as caches

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    compare,
    forget_pages,
    machine_use,
    ready_kernels,
    rotated,
)
from lifeboat_cache.mlx import PersistentPromptCache

_PEER = "save_prompt_cache"
_CALLER = "store, until the caller goes on"
_KEPT = "store, until it is found again"
_SYNCED = "store, until it is on the medium"
_WARM, _COLD = "load, from the page cache", "load, from the medium"
_LAYERS, _HEADS, _DIM = 32, 8, 128
_TOKEN_BYTES = _LAYERS * 2 * _HEADS * _DIM * 2


def say(text: str) -> None:
    """Tell whoever runs the benchmark what is going on."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


class _Model:
    """As much of a model as a prompt cache needs."""

    model_type = "bench"
    args = SimpleNamespace(layers=_LAYERS, heads=_HEADS, dim=_DIM)

    def __init__(self) -> None:
        self.weight = mx.zeros((64,))

    def parameters(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def named_modules(self) -> list[tuple[str, Any]]:
        return []

    def make_cache(self) -> list[Any]:
        return [caches.KVCache() for _ in range(_LAYERS)]


def _filled(tokens: int, seed: int) -> list[Any]:
    """A prompt cache with random keys and values."""
    mx.random.seed(seed)
    made = [caches.KVCache() for _ in range(_LAYERS)]
    for one in made:
        shape = (1, _HEADS, tokens, _DIM)
        one.update_and_fetch(
            mx.random.normal(shape).astype(mx.bfloat16), mx.random.normal(shape).astype(mx.bfloat16)
        )
    mx.eval([one.state for one in made])
    return made


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _loaded(cache: Sequence[Any]) -> None:
    mx.eval([one.state for one in cache])


def _stored(place: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def measure(report: Report, root: Path, tokens: int, rounds: int) -> None:
    """Measure prompts of one length and report them."""
    place = Path(tempfile.mkdtemp(prefix="mlx_prompt_cache-", dir=root))
    config = place / "lifeboat.yaml"
    config.write_text(
        f"storage: {{fallback_local: {{path: {place / 'kv'}, min_free_gb: 1}}}}\n"
        "agent: {autostart: false}\n"
    )
    config.chmod(0o600)
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    moved = tokens * _TOKEN_BYTES
    cache = _filled(tokens, 1)
    try:
        for turn in range(-1, rounds):  # the first round is thrown away
            if turn == 0:
                samples.clear()
            for who in rotated(["ours", _PEER], turn):
                time.sleep(0.5)  # a disk that was just written to reads more slowly
                if who == "ours":
                    _ours(samples["ours"], config, place / "kv", cache, tokens, turn)
                else:
                    _theirs(samples[_PEER], place / "theirs.safetensors", cache)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    label = f"{tokens} tokens, {moved >> 20} MiB"
    for metric in (_CALLER, _KEPT, _SYNCED, _WARM, _COLD):
        rate = [moved / seconds / 1e9 for seconds in samples["ours"][metric]]
        beside = [moved / seconds / 1e9 for seconds in samples[_PEER][metric]]
        name = _PEER.replace("save", "load") if metric in (_WARM, _COLD) else _PEER
        report.add(compare("mlx_prompt_cache", label, metric, "GB/s", rate, peer=(name, beside)))


def _ours(
    samples: dict[str, list[float]],
    config: Path,
    kv: Path,
    cache: Sequence[Any],
    tokens: int,
    turn: int,
) -> None:
    prompt = [turn + 2] * tokens
    with PersistentPromptCache(_Model(), config=config, wait_s=60) as ours:
        ours.fetch([1, 2])  # it is open, as after the look-up that comes before every store
        begin = time.perf_counter()
        ours.store(prompt, cache)
        samples[_CALLER].append(time.perf_counter() - begin)
        assert ours.flush(120)
        samples[_KEPT].append(time.perf_counter() - begin)
        _sync(*(path for path in kv.rglob("*") if path.is_file()))
        samples[_SYNCED].append(time.perf_counter() - begin)
    with PersistentPromptCache(_Model(), config=config, wait_s=60) as ours:
        ours.fetch([1, 2])  # the journals are read

        def load() -> None:
            restored, held = ours.fetch([*prompt, 0])
            assert held == tokens // 64 * 64
            _loaded(restored)

        samples[_WARM].append(_timed(load))
        forget_pages(kv)
        samples[_COLD].append(_timed(load))
    shutil.rmtree(kv)


def _theirs(samples: dict[str, list[float]], path: Path, cache: Sequence[Any]) -> None:
    begin = time.perf_counter()
    caches.save_prompt_cache(str(path), list(cache))
    seconds = time.perf_counter() - begin
    samples[_CALLER].append(seconds)
    samples[_KEPT].append(seconds)
    _sync(path)
    samples[_SYNCED].append(time.perf_counter() - begin)

    def load() -> None:
        _loaded(caches.load_prompt_cache(str(path)))

    samples[_WARM].append(_timed(load))
    forget_pages(path.parent)
    samples[_COLD].append(_timed(load))
    path.unlink()


def measure_sharing(report: Report, root: Path, tokens: int) -> None:
    """Four prompts with a common first three quarters: what they take on disk."""
    place = Path(tempfile.mkdtemp(prefix="mlx_prompt_cache-", dir=root))
    config = place / "lifeboat.yaml"
    config.write_text(
        f"storage: {{fallback_local: {{path: {place / 'kv'}, min_free_gb: 1}}}}\n"
        "agent: {autostart: false}\n"
    )
    config.chmod(0o600)
    common, cache = tokens * 3 // 4 // 64 * 64, _filled(tokens, 2)
    try:
        with PersistentPromptCache(_Model(), config=config, wait_s=60) as ours:
            for number in range(4):
                ours.store([1] * common + [2 + number] * (tokens - common), cache)
                caches.save_prompt_cache(str(place / f"{number}.safetensors"), cache)
                assert ours.flush(120)
        mine = _stored(place / "kv")
        theirs = sum(path.stat().st_size for path in place.glob("*.safetensors"))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    report.add(
        compare(
            "mlx_prompt_cache",
            f"4 prompts of {tokens} tokens, {common} of them common",
            "stored",
            "bytes",
            [float(mine)] * LEAST_PAIRS,
            peer=(_PEER, [float(theirs)] * LEAST_PAIRS),
        )
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench mlx_prompt_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--root", type=Path, help="where to put the files")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile kernels that are not there"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    ready_kernels(say, compiling=not arguments.no_compile)
    root = arguments.root or dev_home() / "bench"
    root.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.json)
    machine_use("before")
    for tokens in arguments.tokens:
        measure(report, root, tokens, arguments.rounds)
    measure_sharing(report, root, arguments.tokens[0])
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
