"""Stores and loads through SGLang's backend interface, without a model.

    python3 tools/dev.py bench sglang_backend

Ours beside HiCacheFile, SGLang's own file backend, on its real host pools under its real cache
controller, which gets backups and prefetches of all pages as a scheduler gives them (and calls a
backend with 128 pages at a time): pages of 64 tokens (8 MiB) and of one token (128 KiB). Beside
the medium itself (large reads and writes of the same bytes and the same memory by several
threads), the page cache and a copy in memory. Of each codec: how fast pages are set, got cold
and got hot, in bytes of KV, and what they take on disk.

With 512 MiB it needs about 4 GB of memory and 10 GB of the medium: .dev/bench unless
--root names another place.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_llama
from devkit.places import dev_home
from raw_here import RawHere
from raw_process import RawProcess
from sglang_rig import BACKEND, Case, Rig, prepare
from side_by_side import Samples, SideBySide, say

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    forget_pages,
    machine_use,
    ready_kernels,
    without_kernels,
)
from lifeboat_cache.integrations import sglang_identity

_PEER = "HiCacheFile"

_METRICS = (
    ("set", "GB/s"),
    ("get cold", "GB/s"),
    ("get hot", "GB/s"),
    ("exists, per page", "us"),
    ("stored", "bytes"),
)

#: Tokens of a page, by the name of its size: of 32 layers with 8 KV heads of 128 in bf16.
_SIZES = {"8MiB": 64, "128KiB": 1}
_TOKEN_BYTES = 128 << 10

#: For the controller's threads to answer.
_PATIENCE_S = 300.0

#: Threads of the raw limit, as ours has.
_DEPTH = 8


class _Party:
    """A backend in SGLang's controller.

    Parameters
    ----------
    case, place
        Its pool, and where its files go.
    codec
        Of our store; ``None`` for SGLang's own backend.
    first
        Another party, whose pool is used: where a pool lies in the machine's memory is luck.
    """

    def __init__(
        self, case: Case, place: Path, codec: str | None, first: _Party | None = None
    ) -> None:
        self.rig: Rig
        self.indices: Any
        self.codec = codec
        self.place = place
        place.mkdir(parents=True)
        if codec is None:
            self.rig = Rig(
                case,
                backend={"file_storage_path": str(place)},
                storage_backend="file",
                pools_of=None if first is None else first.rig,
            )
        else:
            config = place / "lifeboat.yaml"
            config.write_text(
                f"storage: {{fallback_local: {{path: {place / 'kv'}, min_free_gb: 1}}}}\n"
                f"compression: {{ladder: {{local: {codec}}}}}\n"
                "agent: {autostart: false}\n"
            )
            config.chmod(0o600)
            self.rig = Rig(
                case,
                backend={**BACKEND, "config": str(config)},
                pools_of=None if first is None else first.rig,
            )
        self.rig.ready()
        if first is not None:
            self.indices = first.indices
            return
        self.indices = self.rig.kv.alloc(case.pages * case.tokens)
        self._fill()

    def _fill(self) -> None:
        import torch

        pool = self.rig.kv.kv_buffer
        pool.view(-1).normal_() if pool.dtype == torch.float32 else pool.copy_(
            torch.randn(1 << 20)
            .to(pool.dtype)
            .repeat(-(-pool.numel() // (1 << 20)))[: pool.numel()]
            .view(pool.shape)
        )

    def memory(self) -> int:
        """Where the pool begins, on a page boundary."""
        return -(-int(self.rig.kv.kv_buffer.data_ptr()) // mmap.PAGESIZE) * mmap.PAGESIZE

    def hashes(self, turn: int) -> list[str]:
        return [f"{turn:032x}{page:032x}" for page in range(self.rig.case.pages)]

    def warm_up(self, turn: int) -> None:
        """Store a page of no prompt: a server begins to write once, not before each prompt."""
        self._set([f"{turn:032x}{self.rig.case.pages:032x}"])

    def set(self, turn: int) -> float:
        """Seconds to store all pages."""
        return self._set(self.hashes(turn))

    def _set(self, hashes: list[str]) -> float:
        controller, tokens = self.rig.controller, self.rig.case.tokens
        begin = time.perf_counter()
        controller.write_storage(self.indices[: len(hashes) * tokens], [], hashes)
        operation = controller.ack_backup_queue.get(timeout=_PATIENCE_S)
        seconds = time.perf_counter() - begin
        assert operation.completed_tokens == len(hashes) * tokens
        return seconds

    def get(self, turn: int, *, cold: bool) -> float:
        """Seconds to look all pages up and load them."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

        controller, tokens = self.rig.controller, self.rig.case.tokens
        if cold:
            forget_pages(self.place)
        operation = PrefetchOperation(CacheRequestHandle("bench", 0), [])
        operation.host_indices = self.indices
        begin = time.perf_counter()
        self.exists(turn)  # a prefetch begins with this
        operation.hash_value = self.hashes(turn)
        controller.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=_PATIENCE_S)
            loaded = max(loaded, ack.completed_tokens or 0)
            if ack.completed_req:
                break
        seconds = time.perf_counter() - begin
        assert loaded == len(operation.hash_value) * tokens
        return seconds

    def exists(self, turn: int) -> float:
        """Seconds to look all pages up."""
        hashes = self.hashes(turn)
        begin = time.perf_counter()
        assert self.rig.backend.batch_exists(hashes) == len(hashes)
        return time.perf_counter() - begin

    def stored(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.place.rglob("*") if path.is_file())

    def empty(self) -> None:
        """Give the medium its space back."""
        if self.codec is None:
            self.rig.backend.clear()
            return
        # What is deleted is reclaimed by an agent, and none runs here.
        self.rig.backend.clear()
        self.rig.close()
        shutil.rmtree(self.place / "kv", ignore_errors=True)
        config = {**BACKEND, "config": str(self.place / "lifeboat.yaml")}
        self.rig = Rig(self.rig.case, backend=config, pools_of=self.rig)
        self.rig.ready()

    def close(self) -> None:
        self.rig.close()


@contextmanager
def _parties(case: Case, place: Path, codecs: Sequence[str]) -> Iterator[dict[str, _Party]]:
    found: dict[str, _Party] = {}
    try:
        first: _Party | None = None
        for codec in codecs:
            found[codec] = _Party(case, place / f"ours-{codec}", codec, first)
            first = first or found[codec]
        found[_PEER] = _Party(case, place / "file", None, first)
        yield found
    finally:
        for party in found.values():
            party.close()


def measure(
    report: Report,
    root: Path,
    name: str,
    *,
    layout: str,
    codecs: Sequence[str],
    total: int,
    rounds: int,
) -> None:
    """Measure one size of a page and report it."""
    tokens = _SIZES[name]
    page = tokens * _TOKEN_BYTES
    case = Case(
        layout=layout, tokens=tokens, pages=max(2, total // page), layers=32, heads=8, dim=128
    )
    moved = case.pages * page
    place = Path(tempfile.mkdtemp(prefix="sglang_backend-", dir=root))
    try:
        with (
            _parties(case, place, codecs) as parties,
            RawProcess(
                place / "raw", size=moved, block=min(page, 1 << 20), depth=_DEPTH
            ) as process,
        ):
            raw = RawHere(
                process,
                place / "raw",
                next(iter(parties.values())).memory(),
                moved,
                block=min(page, 1 << 20),
                depth=_DEPTH,
            )

            def once(who: str, turn: int, found: Samples) -> None:
                party = parties[who]
                party.warm_up(turn)
                before = party.stored()
                found["set"].append(moved / party.set(turn) / 1e9)
                found["stored"].append(float(party.stored() - before))
                found["get cold"].append(moved / party.get(turn, cold=True) / 1e9)
                found["get hot"].append(moved / party.get(turn, cold=False) / 1e9)
                found["exists, per page"].append(party.exists(turn) / case.pages * 1e6)
                party.empty()

            both = SideBySide(raw, moved, write="set", cold="get cold", hot="get hot")
            both.run(list(parties), rounds, once)
            raw.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for codec in codecs:
        label = f"{name} pages, {layout}, {codec}{without_kernels()}"
        both.report(report, "sglang_backend", label, codec, [_PEER], _METRICS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench sglang_backend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=("page_first", "page_first_direct", "layer_first"),
        default=["page_first"],
    )
    parser.add_argument("--codecs", nargs="+", default=["raw", "fp8"], help="of our store")
    parser.add_argument("--mib", type=int, default=512, help="bytes moved per operation, in MiB")
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
    with tempfile.TemporaryDirectory(dir=root) as directory:
        model = Path(directory, "tiny")
        tiny_llama.write(model)
        # The model is made by this very process, which in a server would be refused.
        with mock.patch.object(sglang_identity, "process_start_time", time.time):
            _measure_all(arguments, report, root, model)
    report.close()


def _measure_all(arguments: argparse.Namespace, report: Report, root: Path, model: Path) -> None:
    prepare(model)
    machine_use("before")
    for name in arguments.sizes:
        for layout in arguments.layouts:
            measure(
                report,
                root,
                name,
                layout=layout,
                codecs=arguments.codecs,
                total=arguments.mib << 20,
                rounds=arguments.rounds,
            )
    machine_use("after")


if __name__ == "__main__":
    main()
