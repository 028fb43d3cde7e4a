"""Codecs: how fast KV is stored and restored, and how small it is.

    python3 tools/dev.py bench codecs

Blocks of 256 tokens, 16 layers of 8 heads of 128 in bfloat16 (16 MiB), whose values are
normal with a scale and a mean for every channel, more of them than any cache holds. One
call of the kernels stores or restores a thread's whole share of them, in one thread and in
one for each core. GB/s are of the blocks' own bytes. The limit is a memcpy of the same
blocks, the peer the same kind of codec written in PyTorch, which gets a single block, as it
is slow.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from codec_peers import Peer, peer_of
from kv_blocks import layout_of, real_looking

from lifeboat_cache import kernels
from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    compare,
    machine_use,
    ready_kernels,
    rotated,
    without_kernels,
)
from lifeboat_cache.codecs.blocks import decode_block, encode_block, scratch
from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, KVLayout, TensorLayout
from lifeboat_cache.codecs.names import CODEC_NAMES, RAW, codec_name, is_exact
from lifeboat_cache.codecs.recipes import CodedLayout, coded_layout
from lifeboat_cache.kernels.codec_layout import CODER_COPY

_BENCH = "codecs"
_LIMIT = "memcpy"
_DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")

Bytes = npt.NDArray[np.uint8]


def memory(nbytes: int) -> Bytes:
    """Memory that begins at a page, as that of engines does, and is there already."""
    made = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=np.uint8)[:nbytes]
    made[:: mmap.PAGESIZE] = 1
    return made


@dataclass
class Share:
    """The blocks of one thread, and what the kernels want to know of them."""

    coded: CodedLayout
    source: Bytes
    target: Bytes
    stored: Bytes
    blocks: int
    _arrays: tuple[npt.NDArray[np.generic], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tensors = self.coded.layout.tensors
        nbytes = self.coded.layout.nbytes
        at = np.arange(self.blocks, dtype=np.int64) * nbytes
        self._arrays = (
            self.coded.rows,
            *(  # as struct iovec
                np.stack((at + memory.ctypes.data, np.full_like(at, nbytes)), axis=1)
                for memory in (self.source, self.target)
            ),
            np.arange(self.blocks + 1, dtype=np.int64),
            np.zeros(len(tensors), dtype=np.int64),
            np.array([tensor.offset for tensor in tensors], dtype=np.int64),
            np.arange(self.blocks + 1, dtype=np.int64) * self.coded.most_bytes,
            np.zeros(self.blocks, dtype=np.int64),
        )

    def copy(self) -> None:
        """Move the blocks, and nothing else."""
        np.copyto(self.target, self.source)

    def encode(self) -> None:
        """Store the blocks."""
        if kernels.ready():
            from lifeboat_cache.kernels.coders import encode_blocks

            self._call(encode_blocks, 1)
            return
        places, sizes = self._arrays[-2:]
        nbytes = self.coded.layout.nbytes
        for block in range(self.blocks):
            part = encode_block(self.coded, self.source[block * nbytes :][:nbytes])
            self.stored[places[block] :][: part.shape[0]] = part
            sizes[block] = part.shape[0]

    def decode(self) -> None:
        """Restore the blocks."""
        if kernels.ready():
            from lifeboat_cache.kernels.coders import decode_blocks

            self._call(decode_blocks, 2)
            return
        places, sizes = self._arrays[-2:]
        nbytes = self.coded.layout.nbytes
        for block in range(self.blocks):
            part = self.stored[places[block] :][: sizes[block]]
            decode_block(self.coded, part, self.target[block * nbytes :][:nbytes])

    def _call(self, kernel: Callable[..., int], pieces: int) -> None:
        at = [array.ctypes.data for array in self._arrays]
        rows, starts, which, within, places, sizes = at[0], *at[3:]
        done = kernel(
            rows,
            len(self.coded.layout.tensors),
            at[pieces],
            starts,
            which,
            within,
            self.blocks,
            self.stored.ctypes.data,
            places,
            sizes,
            scratch(),
        )
        if done != self.blocks:
            raise RuntimeError(f"{self.blocks - done} of {self.blocks} blocks were refused")

    @property
    def stored_bytes(self) -> int:
        """Bytes of the blocks that were stored."""
        return int(self._arrays[-1].sum())


def shares(codec: int, source: Bytes, target: Bytes, layout: KVLayout, threads: int) -> list[Share]:
    """The blocks, dealt out to threads."""
    coded = coded_layout(layout, codec)
    blocks = source.shape[0] // layout.nbytes
    cuts = [blocks * thread // threads for thread in range(threads + 1)]
    return [
        Share(
            coded,
            source[first * layout.nbytes : last * layout.nbytes],
            target[first * layout.nbytes : last * layout.nbytes],
            memory((last - first) * coded.most_bytes),
            last - first,
        )
        for first, last in pairwise(cuts)
        if last > first
    ]


def together(works: Sequence[Callable[[], None]]) -> float:
    """Seconds until all have been done, each in a thread of its own."""
    if len(works) == 1:
        begin = time.perf_counter()
        works[0]()
        return time.perf_counter() - begin
    gate = threading.Barrier(len(works))
    times: list[tuple[float, float]] = []
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        scratch()
        gate.wait()
        begin = time.perf_counter()
        try:
            work()
        except BaseException as error:
            errors.append(error)
        times.append((begin, time.perf_counter()))

    workers = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return max(end for _, end in times) - min(begin for begin, _ in times)


def check(codec: int, share: Share) -> None:
    """Make sure that what is measured is a codec."""
    nbytes = share.coded.layout.nbytes
    given, back = share.source[:nbytes], share.target[:nbytes]
    if is_exact(codec):
        good = bool((given == back).all())
    else:
        tensor = share.coded.layout.tensors[0]
        one, other = (_floats(tensor, payload) for payload in (given, back))
        good = float(((one - other) ** 2).mean()) < 0.3 * float((one**2).mean())
    if not good:
        raise RuntimeError(f"{codec_name(codec)} restores something else")


def _floats(tensor: TensorLayout, payload: Bytes) -> npt.NDArray[np.float32]:
    raw = tensor.gather(payload)
    if tensor.dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float16 if tensor.dtype == "float16" else np.float32).astype(np.float32)


def bench_codec(
    report: Report, codec: int, source: Bytes, target: Bytes, layout: KVLayout, rounds: int
) -> None:
    """Rows of one codec, in one thread and in one for each core."""
    dtype = layout.tensors[0].dtype
    peer = peer_of(codec_name(codec), dtype)
    cores = os.cpu_count() or 1
    for threads in sorted({1, cores}):
        dealt = shares(codec, source, target, layout, threads)
        total = sum(share.source.shape[0] for share in dealt)
        works = {
            "copy": (total, [share.copy for share in dealt]),
            "encode": (total, [share.encode for share in dealt]),
            "decode": (total, [share.decode for share in dealt]),
        }
        peers = _peers(peer, dealt)
        if peers:
            part = len(peers) * layout.nbytes
            works["peer encode"] = (part, [one.encode for one in peers])
            works["peer decode"] = (part, [one.decode for one in peers])
        for _, calls in works.values():  # once without the clock
            together(calls)
        check(codec, dealt[0])
        speeds: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(rounds):
            for name in rotated(list(works), turn):
                nbytes, calls = works[name]
                speeds[name].append(nbytes / together(calls) / 1e9)
        who = "one core" if threads == 1 else f"{len(dealt)} cores"
        case = f"{codec_name(codec)}, {dtype}, {who}{without_kernels()}"
        for what in ("decode", "encode"):
            compared = {"limit": (_LIMIT, speeds["copy"])}
            if peers:
                compared["peer"] = (peers[0].name, speeds[f"peer {what}"])
            report.add(compare(_BENCH, case, what, "GB/s", speeds[what], **compared))
        if threads == 1:
            values = total // ITEM_BYTES[dtype]
            stored = [dealt[0].stored_bytes / values] * rounds
            raw: list[float] = [ITEM_BYTES[dtype]] * rounds
            report.add(
                compare(_BENCH, case, "stored, per value", "bytes", stored, limit=("raw", raw))
            )


def _peers(make: Callable[[KVLayout, Bytes, Bytes], Peer] | None, dealt: list[Share]) -> list[Peer]:
    """A peer for each thread, with one block."""
    if make is None:
        return []
    nbytes = dealt[0].coded.layout.nbytes
    return [
        make(share.coded.layout, share.source[:nbytes], np.empty(nbytes, dtype=np.uint8))
        for share in dealt
    ]


def available(layout: KVLayout) -> list[int]:
    """Codecs that do something to such blocks."""
    return [
        codec
        for codec in range(len(CODEC_NAMES))
        if codec == RAW or any(c != CODER_COPY for c, _ in coded_layout(layout, codec).coders)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="of all blocks")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128, help="elements of a head")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=["bfloat16"])
    parser.add_argument("--codecs", nargs="+", choices=CODEC_NAMES)
    parser.add_argument("--no-compile", action="store_true", help="only load kernels")
    arguments = parser.parse_args(argv)
    rounds = max(LEAST_PAIRS, arguments.rounds)
    report = Report(arguments.json)
    ready_kernels(partial(print, flush=True, file=sys.stderr), compiling=not arguments.no_compile)
    machine_use("before")
    for dtype in arguments.dtypes:
        layout = layout_of(arguments.layers, arguments.dim, dtype)
        blocks = max(os.cpu_count() or 1, (arguments.mib << 20) // layout.nbytes)
        source, target = memory(blocks * layout.nbytes), memory(blocks * layout.nbytes)
        source.reshape(blocks, -1)[:] = real_looking(layout, np.random.default_rng(1))
        for codec in available(layout):
            if not arguments.codecs or codec_name(codec) in arguments.codecs:
                bench_codec(report, codec, source, target, layout, rounds)
    report.close()
    machine_use("after")


if __name__ == "__main__":
    main()
