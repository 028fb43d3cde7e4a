"""The index: lookups, touches, insertion, recovery and memory.

    python3 tools/dev.py bench index_recovery

Journals of 100,000 and of 1,000,000 blocks are written once, in segments of 4,096; each
recovery reads them out of the page cache, checks every entry, holds it against its segment
and indexes it, as a store does when it opens. Its limit is reading the journals' bytes and
nothing else. The peer of everything is a dictionary from key to number, the least that an
index in plain Python does: its lookups are a list of `key in dictionary`, its insertion is
one `update`, its touches an assignment per key.

Memory is that of all arrays, room to grow included, against the 200 bytes a block that the
index may take.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lifeboat_cache import kernels
from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, machine_use
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, MAGIC_SEGMENT, FileHeader
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, Entries, seal_entries
from lifeboat_cache.index import Index
from lifeboat_cache.targets.journal_reader import JournalReader

_BENCH = "index_recovery"
_PEER = "dict"
_NAMESPACE = bytes(range(32))
_SEGMENT_BLOCKS = 4096
_BLOCK_BYTES = 64 << 10
_MOST_BYTES = 200.0


def records(rng: np.random.Generator, count: int, segment: int) -> Entries:
    """Entries of one segment of 64 KiB blocks."""
    entries = np.zeros(count, dtype=ENTRY)
    entries["key"] = np.frombuffer(rng.bytes(32 * count), dtype="V32")
    entries["payload_checksum"] = np.frombuffer(rng.bytes(16 * count), dtype="V16")
    entries["offset"] = HEADER_BYTES + _BLOCK_BYTES * np.arange(count)
    entries["stored_length"] = entries["raw_length"] = _BLOCK_BYTES
    entries["segment"], entries["slot"] = segment, np.arange(count)
    entries["kind"] = KIND_RECORD
    entries["algorithm"] = 1
    return entries


def write_journals(directory: Path, blocks: int) -> None:
    """One dead writer's journal and its segments, which are as long as they say, but empty."""
    directory.mkdir()
    rng = np.random.default_rng(blocks)
    writer = rng.bytes(16)
    with (directory / f"{writer.hex()}.journal").open("wb") as journal:
        journal.write(FileHeader(MAGIC_JOURNAL, _NAMESPACE, writer, 0, 1).pack())
        for first in range(0, blocks, _SEGMENT_BLOCKS):
            segment = first // _SEGMENT_BLOCKS
            entries = records(rng, min(_SEGMENT_BLOCKS, blocks - first), segment)
            journal.write(seal_entries(entries, writer, first, _NAMESPACE))
            path = directory / f"{writer.hex()}.{segment:08d}.segment"
            path.write_bytes(FileHeader(MAGIC_SEGMENT, _NAMESPACE, writer, segment, 1).pack())
            os.truncate(path, HEADER_BYTES + _BLOCK_BYTES * _SEGMENT_BLOCKS)


def recovered(directory: Path) -> Index:
    """An index of all journals of a directory."""
    index = Index()
    for page in JournalReader(directory, _NAMESPACE).poll():
        index.insert(page.writer, page.entries)
        time.sleep(0)
    return index


def read_only(directory: Path) -> None:
    """Read the journals and do nothing with them."""
    for path in directory.glob("*.journal"):
        with path.open("rb", buffering=0) as journal:
            while journal.read(1 << 20):
                pass


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def per_key(work: Callable[[int], object], times: int, keys: int) -> float:
    """Microseconds a key of ``times`` calls with ``keys`` keys each."""
    started = time.perf_counter()
    for number in range(times):
        work(number)
    return (time.perf_counter() - started) / times / keys * 1e6


def bench_recovery(report: Report, directory: Path, blocks: int, rounds: int) -> Index:
    index = recovered(directory)
    keys = index.keys()
    ours, peer, limit = [], [], []
    for _ in range(rounds):
        ours.append(seconds(lambda: recovered(directory)))
        limit.append(seconds(lambda: read_only(directory)))
        peer.append(seconds(lambda: dict.fromkeys(keys, 0)))
    case = f"{blocks:,} blocks"
    compared = {"peer": (_PEER, peer), "limit": ("reading the journals", limit)}
    report.add(compare(_BENCH, case, "recovery", "s", ours, **compared))
    if len(index) != blocks:
        raise RuntimeError(f"{len(index)} of {blocks} blocks were recovered")
    memory = [index.nbytes / blocks] * rounds
    allowed = ("allowed", [_MOST_BYTES] * rounds)
    report.add(compare(_BENCH, case, "memory of a block", "bytes", memory, limit=allowed))
    return index


def _look_up(index: Index, batches: list[list[bytes]], number: int) -> object:
    return index.find(batches[number % len(batches)])


def _look_up_dict(known: dict[bytes, int], batches: list[list[bytes]], number: int) -> object:
    return [key in known for key in batches[number % len(batches)]]


def _touch(index: Index, batches: list[list[bytes]], now: int, number: int) -> object:
    return index.touch_places(batches[number % len(batches)], now + number)


def _touch_dict(known: dict[bytes, int], batches: list[list[bytes]], now: int, number: int) -> None:
    for key in batches[number % len(batches)]:
        known[key] = now + number


def _insert(index: Index, parts: list[Entries], number: int) -> object:
    return index.insert(b"w" * 16, parts[number])


def _insert_dict(known: dict[bytes, int], names: list[list[bytes]], number: int) -> None:
    known.update(dict.fromkeys(names[number], 0))


def bench_calls(report: Report, index: Index, blocks: int, rounds: int) -> None:
    """Lookups and touches of an index of so many blocks."""
    keys = index.keys()
    known = dict.fromkeys(keys, 0)
    rng = np.random.default_rng(1)
    case = f"{blocks:,} blocks"
    for count, times in ((1, 2000), (64, 500), (8192, 8)):
        batches = [
            [keys[at] for at in rng.integers(0, blocks, count)] for _ in range(min(times, 64))
        ]
        ours: list[float] = []
        peer: list[float] = []
        touched: list[float] = []
        assigned: list[float] = []
        for turn in range(rounds):
            now = 2**20 + 2**12 * turn
            for measured, work in (
                (ours, partial(_look_up, index, batches)),
                (peer, partial(_look_up_dict, known, batches)),
                (touched, partial(_touch, index, batches, now)),
                (assigned, partial(_touch_dict, known, batches, now)),
            ):
                measured.append(per_key(work, times, count))
        each = f"of {count} keys, each"
        report.add(compare(_BENCH, case, f"lookup {each}", "us", ours, peer=(_PEER, peer)))
        report.add(compare(_BENCH, case, f"touch {each}", "us", touched, peer=(_PEER, assigned)))


def bench_insertion(report: Report, blocks: int, rounds: int) -> None:
    rng = np.random.default_rng(2)
    parts = [
        records(rng, _SEGMENT_BLOCKS, segment) for segment in range(-(-blocks // _SEGMENT_BLOCKS))
    ]
    names = [part["key"].tolist() for part in parts]
    ours, peer = [], []
    for _ in range(rounds):
        ours.append(per_key(partial(_insert, Index(), parts), len(parts), _SEGMENT_BLOCKS))
        peer.append(per_key(partial(_insert_dict, {}, names), len(parts), _SEGMENT_BLOCKS))
    row = compare(_BENCH, f"{blocks:,} blocks", "insertion, each", "us", ours, peer=(_PEER, peer))
    report.add(row)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench index_recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--plain", action="store_true", help="without kernels")
    arguments = parser.parse_args(argv)
    rounds = max(LEAST_PAIRS, arguments.rounds)
    report = Report(arguments.json)
    machine_use("before")
    with tempfile.TemporaryDirectory() as place:
        if not arguments.plain and not kernels.load() and not kernels.compile_all(Path(place)):
            parser.error(kernels.reason())
        for blocks in arguments.blocks:
            directory = Path(place) / f"journals-{blocks}"
            write_journals(directory, blocks)
            index = bench_recovery(report, directory, blocks, rounds)
            bench_calls(report, index, blocks, rounds)
            del index
            bench_insertion(report, blocks, rounds)
    report.close()
    machine_use("after")


if __name__ == "__main__":
    main()
