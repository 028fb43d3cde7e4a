"""The janitor: how fast it reclaims, and what readers notice of it.

    python3 tools/dev.py bench janitor

An ended engine's segments of 256 KiB blocks are marked dead in part, and a janitor in a
process of its own gives their space back, without a grace: runs of 1 MiB and of 8 MiB
punched out, whole segments removed, and sparse segments (every fourth block is live)
rewritten. Meanwhile this process loads blocks of the same segments that stay (when whole
segments go: of another one), 2 MiB a job, one after the other. The limit of its latency is
the same without a janitor, of its rate the rate of writing the segments.

What a janitor's pass costs when there is nothing to do is measured with journals of
100,000 blocks: the first pass reads them, those after it look at the files.

It needs 2 GB of disk in .dev/bench unless --root names another place.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, machine_use
from lifeboat_cache.checksum import Binding, payload_checksum
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, MAGIC_SEGMENT, FileHeader
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, Entries, seal_entries
from lifeboat_cache.janitor import Janitor, JanitorPolicy, JanitorReport
from lifeboat_cache.janitor.bitmaps import Bitmap
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import aligned_memory

_BENCH = "janitor"
_BLOCK = 256 << 10
_JOB_BLOCKS = 8
_NAMESPACE = Namespace.from_identity({"engine": "bench", "model": "janitor"})
_POLICY = JanitorPolicy(eviction="none", grace_s=0.0, young_s=0.0)


@dataclass(frozen=True)
class Case:
    """Which blocks are dead: ``dead`` of every ``period``, and what becomes of them."""

    name: str
    dead: int
    period: int

    def is_dead(self, number: int) -> bool:
        return number % self.period < self.dead


CASES = (
    Case("punch runs of 1 MiB", 4, 8),
    Case("punch runs of 8 MiB", 32, 64),
    Case("remove segments", 1, 1),
    Case("rewrite sparse segments", 3, 4),
)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def fill(root: Path, first: int, count: int) -> float:
    """Store blocks as an engine that ends then; the seconds it took to write them."""
    target = FilesystemTarget(root)
    target.probe()
    writer = target.writer(_NAMESPACE)
    binding = Binding(_NAMESPACE.digest)
    memory = aligned_memory(64 * _BLOCK)
    memory[:] = np.random.default_rng(first).integers(0, 255, memory.shape[0], dtype=np.uint8)
    pieces = [memory[at * _BLOCK : (at + 1) * _BLOCK] for at in range(64)]
    spent = 0.0
    for start in range(first, first + count, 64):
        part = min(64, first + count - start)
        entries = np.zeros(part, dtype=ENTRY)
        entries["kind"], entries["algorithm"] = KIND_RECORD, 1
        entries["stored_length"] = entries["raw_length"] = _BLOCK
        for at in range(part):
            key = key_of(start + at)
            bound = binding.pack(key, 0, _BLOCK, _BLOCK, 0)
            entries["key"][at] = np.void(key)
            checksum = payload_checksum(bound, [pieces[at].data])
            entries["payload_checksum"][at] = np.void(checksum)
        began = time.perf_counter()
        buffers = BlockBuffers.from_buffers(pieces[:part])
        outcomes = writer.append(entries, buffers, range(part))
        spent += time.perf_counter() - began
        if any(outcome != Outcome.OK for outcome in outcomes):
            raise SystemExit("the target refused blocks: is there enough space?")
    writer.close()
    return spent


def mark(root: Path, case: Case, first: int, count: int) -> None:
    """Set the dead bits of a case in the segments of blocks ``first`` to ``first + count``."""
    for path in sorted(root.glob("*/*.segment")):
        writer = bytes.fromhex(path.name[:32])
        data = (path.parent / f"{writer.hex()}.journal").read_bytes()[HEADER_BYTES:]
        entries = np.frombuffer(data, dtype=ENTRY)
        number = int(path.name[33:41])
        slots = [
            int(entry["slot"])
            for entry in entries[entries["segment"] == number]
            if 0 <= (at := int.from_bytes(entry["key"].tobytes(), "little") - first) < count
            and case.is_dead(at)
        ]
        if slots:
            bitmap = Bitmap(path.parent, _NAMESPACE.digest, writer, number)
            bitmap.mark(np.array(slots, dtype=np.int64), 0)


class Reader:
    """Loads blocks one job after the other, and times each."""

    def __init__(self, root: Path, numbers: Sequence[int]) -> None:
        self._store = BlockStore(_NAMESPACE, [FilesystemTarget(root)], io_workers=2)
        self._store.wait_recovered()
        self._numbers = list(numbers)
        self._rng = np.random.default_rng(0)
        memory = aligned_memory(_JOB_BLOCKS * _BLOCK)
        self._pieces = [memory[at * _BLOCK : (at + 1) * _BLOCK] for at in range(_JOB_BLOCKS)]

    def read(self, until: Callable[[int], bool]) -> list[float]:
        """Microseconds of each job until ``until`` says so, given how many there were."""
        times: list[float] = []
        while not until(len(times)):
            start = int(self._rng.integers(0, max(1, len(self._numbers) - _JOB_BLOCKS)))
            keys = [key_of(n) for n in self._numbers[start : start + _JOB_BLOCKS]]
            batch = BlockBatch(keys, BlockBuffers.from_buffers(self._pieces[: len(keys)]))
            began = time.perf_counter()
            job = self._store.load(batch, on_done=lambda _: None)
            job.wait()
            times.append((time.perf_counter() - began) * 1e6)
            if not (job.outcomes != Outcome.CORRUPT).all():
                raise SystemExit("a block that stays was corrupt: please report this")
        return times

    def close(self) -> None:
        self._store.close()


def run_janitor(root: Path) -> None:
    """One pass, in this process, when it is told to on stdin; the report goes to stdout."""
    janitor = Janitor(FilesystemTarget(root), policy=_POLICY)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(janitor.run_once().to_json()), flush=True)


def beside_a_janitor(root: Path, reader: Reader) -> tuple[JanitorReport, list[float]]:
    """One pass of a janitor of another process, and the latencies of loads meanwhile."""
    with subprocess.Popen(
        [sys.executable, __file__, "--run", str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the janitor's process has no pipes")
        process.stdout.readline()
        process.stdin.write("go\n")
        process.stdin.flush()
        stdout = process.stdout
        times = reader.read(lambda n: n > 0 and bool(select.select([stdout], [], [], 0)[0]))
        report = JanitorReport(**json.loads(stdout.readline()))
    return report, times


def bench_reclaim(report: Report, root: Path, size: int, rounds: int) -> None:
    count = size // _BLOCK
    for case in CASES:
        rates: list[float] = []
        written: list[float] = []
        beside: dict[str, list[float]] = {"p50": [], "p99": []}
        alone: dict[str, list[float]] = {"p50": [], "p99": []}
        for _ in range(rounds):
            shutil.rmtree(root, ignore_errors=True)
            seconds = fill(root, 0, count)
            stays = [n for n in range(count) if not case.is_dead(n)]
            if not stays:
                fill(root, count, 256)
                stays = list(range(count, count + 256))
            reader = Reader(root, stays)
            quiet = reader.read(lambda n: n >= 200)
            mark(root, case, 0, count)
            done, times = beside_a_janitor(root, reader)
            reader.close()
            if case.name.startswith("rewrite"):
                moved = done.copied_bytes
            else:
                moved = done.punched_bytes + done.removed_bytes
            if not moved:
                raise SystemExit(f"{case.name}: nothing was done: {done.problems}")
            rates.append(moved / done.seconds / 1e9)
            written.append(count * _BLOCK / seconds / 1e9)
            for name, share in (("p50", 50.0), ("p99", 99.0)):
                beside[name].append(float(np.percentile(times, share)))
                alone[name].append(float(np.percentile(quiet, share)))
        what = "copied" if case.name.startswith("rewrite") else "given back"
        limit = ("writing them", written)
        report.add(compare(_BENCH, case.name, what, "GB/s", rates, limit=limit))
        for name, times in beside.items():
            quiet_limit = ("no janitor", alone[name])
            metric = f"load of 2 MiB, {name}"
            report.add(compare(_BENCH, case.name, metric, "us", times, limit=quiet_limit))
    shutil.rmtree(root, ignore_errors=True)


def write_journals(root: Path, blocks: int) -> None:
    """An ended writer's journal and segments, which are as long as they say, but empty."""
    FilesystemTarget(root).probe()
    directory = root / _NAMESPACE.directory
    directory.mkdir()
    (directory / "namespace.json").write_text(_NAMESPACE.to_json())
    rng = np.random.default_rng(blocks)
    writer = rng.bytes(16)
    each = 4096
    with (directory / f"{writer.hex()}.journal").open("wb") as journal:
        journal.write(FileHeader(MAGIC_JOURNAL, _NAMESPACE.digest, writer, 0, 1).pack())
        for first in range(0, blocks, each):
            segment, part = first // each, min(each, blocks - first)
            entries: Entries = np.zeros(part, dtype=ENTRY)
            entries["key"] = np.frombuffer(rng.bytes(32 * part), dtype="V32")
            entries["offset"] = HEADER_BYTES + (64 << 10) * np.arange(part)
            entries["stored_length"] = entries["raw_length"] = 64 << 10
            entries["segment"], entries["slot"] = segment, np.arange(part)
            entries["kind"], entries["algorithm"] = KIND_RECORD, 1
            journal.write(seal_entries(entries, writer, first, _NAMESPACE.digest))
            path = directory / f"{writer.hex()}.{segment:08d}.segment"
            header = FileHeader(MAGIC_SEGMENT, _NAMESPACE.digest, writer, segment, 1)
            path.write_bytes(header.pack())
            os.truncate(path, HEADER_BYTES + (64 << 10) * part)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def bench_passes(report: Report, root: Path, blocks: int, rounds: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    write_journals(root, blocks)
    first, idle, memory = [], [], []
    for _ in range(rounds):
        before = _resident()
        janitor = Janitor(FilesystemTarget(root), policy=JanitorPolicy(copy_bytes=0))
        first.append(janitor.run_once().seconds)
        idle.append(janitor.run_once().seconds)
        memory.append(max(1.0, (_resident() - before) / blocks))
        janitor.close()
    case = f"{blocks:,} blocks"
    report.add(compare(_BENCH, case, "first pass", "s", first))
    report.add(compare(_BENCH, case, "pass with nothing to do", "s", idle))
    # Later rounds use memory that the first one left behind.
    report.add(compare(_BENCH, case, "memory of a block", "bytes", [max(memory)] * rounds))
    shutil.rmtree(root, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench janitor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=LEAST_PAIRS)
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of a target")
    parser.add_argument("--blocks", type=int, default=100_000, help="of the passes' journals")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1] / ".dev" / "bench", metavar="DIR"
    )
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.run is not None:
        run_janitor(arguments.run)
        return
    root = arguments.root / f"janitor.{os.getpid()}"
    root.parent.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.json)
    machine_use("before")
    try:
        bench_passes(report, root, arguments.blocks, arguments.rounds)
        bench_reclaim(report, root, arguments.size, arguments.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    machine_use("afterwards")
    report.close()


if __name__ == "__main__":
    main()
