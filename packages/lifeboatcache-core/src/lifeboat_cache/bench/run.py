"""Measuring a target of this machine beside its device and its memory."""

from __future__ import annotations

import mmap
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.bench.compiled import ready_kernels, without_kernels
from lifeboat_cache.bench.page_cache import forget_pages
from lifeboat_cache.bench.pairs import rotated
from lifeboat_cache.bench.place import bench_place, undisturbed
from lifeboat_cache.bench.raw import RawFile
from lifeboat_cache.bench.report import Report, compare
from lifeboat_cache.config.units import format_size
from lifeboat_cache.errors import LifeboatError, TargetError
from lifeboat_cache.job import Job
from lifeboat_cache.keys import KEY_BYTES
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.targets.direct import ALIGNMENT, supports_direct
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["BenchPlan", "run_bench"]

_BENCH = "lifeboat-cache bench"

#: Storage that has not answered for so long does not answer.
_PATIENCE_S = 300.0

#: A lookup of fewer keys is repeated until so many have been asked for.
_LOOKUP_KEYS = 4096

#: Of the memory that is left, the share that a benchmark may take.
_MEMORY_SHARE = 0.8

#: Free space beyond what is written: journals, and what others write meanwhile.
_SPARE_BYTES = 64 << 20

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes
    ----------
    root
        The directory of the target.
    direct_io
        As in the configuration of a tier.
    capacity, reserve
        Of the target, in bytes; see :class:`~lifeboat_cache.targets.filesystem.FilesystemTarget`.
    io_workers
        Threads of the store, and calls that the limits keep under way.
    size
        Bytes moved per operation.
    block_sizes
        Bytes of a block; each is a case of its own.
    jobs
        Jobs that share the blocks of an operation.
    rounds
        How often everything is measured; one more round comes first and is thrown away.
    compiling
        Whether kernels are compiled first if they are not there.
    """

    root: Path
    direct_io: Literal["auto", "on", "off"]
    capacity: int | None
    reserve: int
    io_workers: int
    size: int
    block_sizes: tuple[int, ...]
    jobs: int
    rounds: int
    compiling: bool = True

    @property
    def bytes_on_target(self) -> int:
        """What is on the target at the same time: a store's blocks, and a file of the same size."""
        return 2 * self.size + _SPARE_BYTES

    @property
    def bytes_of_memory(self) -> int:
        """Memory that is used: what is written, and what is read to."""
        return 2 * self.size


def run_bench(plan: BenchPlan, report: Report, say: Callable[[str], None]) -> None:
    """Measure a target and report each case as it is done.

    Everything is written to a directory of its own inside the target, which is
    removed in the end, also after an interruption.

    Parameters
    ----------
    plan
        What to measure.
    report
        Takes the rows.
    say
        Told what is going on.

    Raises
    ------
    TargetError
        If the target cannot be used or lacks the space, or the store on it did not
        store and restore everything.
    """
    _check_memory(plan)
    _check_space(plan)
    ready_kernels(say, compiling=plan.compiling)
    with bench_place(plan.root) as place:
        direct = supports_direct(place, plan.direct_io)
        say(f"{plan.root}: {'O_DIRECT' if direct else 'through the page cache'}")
        source, target = _memory(plan.size), _memory(plan.size)
        noise = np.random.default_rng(11)
        # Filled piece by piece: random numbers of the whole size would need as much again.
        for at in range(0, plan.size, 1 << 20):
            end = min(plan.size, at + (1 << 20))
            source[at:end] = noise.integers(0, 256, end - at, dtype=np.uint8)
        for block in plan.block_sizes:
            say(f"{_binary(block)} blocks, {plan.rounds} rounds")
            _measure(plan, place, block, direct, source, target, report)


def _memory(size: int) -> npt.NDArray[np.uint8]:
    """uint8 ``(size,)``, page-aligned, every page touched."""
    pages = mmap.mmap(-1, size)
    array = np.frombuffer(pages, dtype=np.uint8)
    array[:: mmap.PAGESIZE] = 1
    return array


def _check_memory(plan: BenchPlan) -> None:
    left = _available_memory()
    if left is not None and plan.bytes_of_memory > left * _MEMORY_SHARE:
        raise TargetError(
            f"the benchmark needs {format_size(plan.bytes_of_memory)} of memory and "
            f"{format_size(left)} are left: choose a smaller --size"
        )


def _available_memory() -> int | None:
    """Bytes that can be used without swapping; ``None`` if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))
    except (OSError, ValueError, StopIteration):
        return None


def _check_space(plan: BenchPlan) -> None:
    needed = plan.bytes_on_target
    target = FilesystemTarget(plan.root, capacity=plan.capacity, reserve=plan.reserve)
    refusal = target.usage().refusal(needed)
    if refusal is not None:
        why = {
            Outcome.FULL: "its capacity leaves less",
            Outcome.RESERVE: "less is left above the reserve of the file system",
        }[refusal]
        raise TargetError(
            f"{plan.root}: the benchmark writes {format_size(needed)} and {why}: choose a "
            "smaller --size, make room with `lifeboat-cache purge`, or name another directory "
            "with --path"
        )


def _binary(size: int) -> str:
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % bytes_ == 0:
            return f"{size // bytes_} {unit}"
    return f"{size} B"


@contextmanager
def _store_in(plan: BenchPlan, directory: Path, block: int) -> Iterator[BlockStore]:
    """A new store whose writer has started, as that of an engine that has run for a while."""
    namespace = Namespace.from_identity({"engine": "bench", "block_bytes": block})
    target = FilesystemTarget(directory, reserve=plan.reserve, direct_io=plan.direct_io)
    store: BlockStore | None = None
    try:
        with undisturbed():  # or its threads would go on
            store = BlockStore(
                namespace, [target], io_workers=plan.io_workers, pending_bytes=plan.size + block
            )
        if not store.wait_recovered(_PATIENCE_S) or store.state is not State.READY:
            raise TargetError(
                f"{plan.root}: no store opens here: {store.reason or 'storage does not answer'}"
            )
        first = _memory(-(-block // ALIGNMENT) * ALIGNMENT)[:block]
        batch = BlockBatch([bytes(KEY_BYTES)], BlockBuffers.from_buffers([first]))
        _finished([store.store(batch, on_done=_ignore)], "store")
        yield store
    finally:
        with undisturbed():  # its threads may still make files
            if store is not None:
                store.close()
            shutil.rmtree(directory, ignore_errors=True)


def _ignore(_: Job) -> None:
    """Somebody waits for the job itself."""


def _finished(jobs: Sequence[Job], kind: str) -> None:
    """Wait for jobs; every block of theirs must be good."""
    for job in jobs:
        if not job.wait(_PATIENCE_S):
            raise TargetError("storage does not answer: check the disk and its mount")
    for job in jobs:
        if not job.ok:
            bad = {Outcome(value).name.lower() for value in job.outcomes.tolist()}
            raise TargetError(
                f"not every block could be {kind}d ({', '.join(sorted(bad - {'ok', 'present'}))}): "
                "run `lifeboat-cache doctor`"
            )


def _batches(
    memory: npt.NDArray[np.uint8], keys: Sequence[bytes], block: int, jobs: int
) -> list[BlockBatch]:
    """The blocks of an operation, cut into jobs of consecutive blocks."""
    base = int(memory.ctypes.data)
    parts = np.array_split(np.arange(len(keys)), min(jobs, len(keys)))
    return [
        BlockBatch(
            keys[int(part[0]) : int(part[-1]) + 1],
            BlockBuffers.from_rows(base, block, part, block, memory),
        )
        for part in parts
    ]


def _measure(
    plan: BenchPlan,
    place: Path,
    block: int,
    direct: bool,
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    report: Report,
) -> None:
    count = max(1, plan.size // block)
    moved = count * block
    source, target = source[:moved], target[:moved]
    keys = [np.random.default_rng([block, n]).bytes(KEY_BYTES) for n in range(count)]
    ours: Samples = defaultdict(list)
    limit: Samples = defaultdict(list)
    raw = RawFile(place / "raw", source, target, block=block, depth=plan.io_workers, direct=direct)

    def note(samples: Samples, what: str, seconds: float) -> None:
        samples[what].append(moved / seconds / 1e9)

    def our_round() -> None:
        with _store_in(plan, place / "kv", block) as store:
            # Made up before the clock starts, as an engine has its keys.
            stores = _batches(source, keys, block, plan.jobs)
            loads = _batches(target, keys, block, plan.jobs)
            seconds, submit = _timed(store.store, stores, "store")
            note(ours, "store", seconds)
            ours["submit to store"].append(submit / count * 1e6)
            forget_pages(place / "kv")
            target[:: mmap.PAGESIZE] = 0
            seconds, submit = _timed(store.load, loads, "load")
            note(ours, "cold load", seconds)
            if not np.array_equal(source, target):
                raise TargetError(
                    "what was loaded is not what was stored, and the checksums did not notice: "
                    "please report this, and do not use the target"
                )
            ours["submit to load"].append(submit / count * 1e6)
            note(ours, "hot load", _timed(store.load, loads, "load")[0])
            ours["lookup"].append(_per_key(lambda: _all_found(store, keys), count))

    def raw_round() -> None:
        known = dict.fromkeys(keys)
        note(limit, "store", raw.write())
        note(limit, "cold load", raw.read())
        note(limit, "page cache", raw.read_cached())
        note(limit, "memory", raw.copy())
        limit["lookup"].append(_per_key(lambda: all(key in known for key in keys), count))
        raw.close()

    try:
        for turn in range(-1, plan.rounds):  # the first round is thrown away
            if turn == 0:
                ours.clear()
                limit.clear()
            for step in rotated([our_round, raw_round], turn):
                step()
    finally:
        raw.close()

    many = "1 job" if plan.jobs == 1 else f"{plan.jobs} jobs"
    case = f"{_binary(block)} blocks, {_binary(moved)} in {many}{without_kernels()}"
    way = "O_DIRECT" if direct else "buffered"
    rows: list[tuple[str, str, tuple[str, str] | None]] = [
        ("store", "GB/s", (f"pwritev, {way}", "store")),
        ("cold load", "GB/s", (f"preadv, {way}", "cold load")),
        ("hot load", "GB/s", ("preadv from the page cache", "page cache")),
        ("hot load", "GB/s", ("memcpy", "memory")),
        ("lookup", "us", ("a Python dict", "lookup")),
        ("submit to store", "us", None),
        ("submit to load", "us", None),
    ]
    for metric, unit, beside in rows:
        name = f"{metric}, per block" if unit == "us" else f"{metric}, throughput"
        other = None if beside is None else (beside[0], limit[beside[1]])
        report.add(compare(_BENCH, case, name, unit, ours[metric], limit=other))


def _timed(
    start: Callable[..., Job], batches: Sequence[BlockBatch], kind: str
) -> tuple[float, float]:
    """Seconds until all jobs are done, and those of them until they were accepted."""
    begin = time.perf_counter()
    jobs = [start(batch, on_done=_ignore) for batch in batches]
    submitted = time.perf_counter() - begin
    for job in jobs:
        if not job.wait(_PATIENCE_S):
            break
    seconds = time.perf_counter() - begin
    _finished(jobs, kind)
    return seconds, submitted


def _per_key(ask: Callable[[], bool], count: int) -> float:
    """Microseconds per key of a question about ``count`` keys, which must be answered yes."""
    times = []
    for _ in range(max(3, _LOOKUP_KEYS // count)):
        begin = time.perf_counter()
        found = ask()
        times.append(time.perf_counter() - begin)
        if not found:
            raise LifeboatError("a stored block was not found again: please report this")
    return statistics.median(times) / count * 1e6


def _all_found(store: BlockStore, keys: Sequence[bytes]) -> bool:
    return bool((store.lookup(keys) == Lookup.HIT).all())
