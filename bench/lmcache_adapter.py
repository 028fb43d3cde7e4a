"""Stores and loads through LMCache's adapter interface, without a model.

    python3 tools/dev.py bench lmcache_adapter

Ours beside LMCache's own adapters `fs` and `fs_native` (with O_DIRECT and through the page
cache) and its fp8 serde on `fs_native`, with LMCache's own keys, objects and descriptors,
called as its controllers do: tasks of an eighth of the objects, so many of them under way at
the same time as --in-flight says. Beside the medium itself (large reads and writes of the
same bytes and the same memory by several threads; as many at a time as the tasks under way
have, where that is one), the page cache and a copy in memory. Speeds are in bytes of KV.

With 64 objects of 16 MiB it needs about 5 GB of memory and 6 GB of the medium: .dev/bench
unless --root names another place.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devkit.places import dev_home
from lmcache_rig import PLUGIN, Driver, Memory, desc, keys
from raw_here import RawHere
from raw_process import RawProcess
from side_by_side import Samples, SideBySide, say

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    forget_pages,
    machine_use,
    ready_kernels,
    without_kernels,
)

#: Objects and their shape, by the name of their size; all of 256 tokens in bf16.
_SIZES = {"16MiB": (64, (2, 16, 256, 1024)), "1MiB": (256, (2, 4, 64, 1024))}

_TASKS = 8

#: Threads of the raw limit, as ours has.
_DEPTH = 8

#: LMCache's adapters; the names of ours are those of codecs.
_PEERS: dict[str, dict[str, Any]] = {
    "fs": {"type": "fs", "use_odirect": True},
    "fs_native": {"type": "fs_native", "use_odirect": True},
    "fs buffered": {"type": "fs"},
    "fs_native buffered": {"type": "fs_native"},
    "fs_native fp8": {"type": "fs_native", "use_odirect": True, "serde": {"type": "fp8"}},
}

_CODECS = ("raw", "lossless", "fp8", "lbq4", "auto")

#: Ours, by their codecs, with O_DIRECT and through the page cache.
_OURS = (*_CODECS, *(f"{codec} buffered" for codec in _CODECS))

_METRICS = (("store", "GB/s"), ("load cold", "GB/s"), ("load hot", "GB/s"), ("stored", "bytes"))


class _Party:
    """An adapter with a directory of its own."""

    def __init__(self, name: str, place: Path, memory: Memory) -> None:
        self.place = place
        self.name = name
        self.memory = memory
        place.mkdir(parents=True)
        self.driver = self._open()

    def _open(self) -> Driver:
        from lmcache.v1.distributed.l2_adapters.config import (
            get_l2_adapter_config_class as config_class,
        )
        from lmcache.v1.distributed.l2_adapters.factory import (
            create_l2_adapter_from_registry,
            load_all_adapters,
        )

        load_all_adapters()
        described = _PEERS.get(self.name)
        if described is None:
            config = self.place / "lifeboat.yaml"
            codec, _, buffered = self.name.partition(" ")
            config.write_text(
                "storage:\n"
                f"  tiers: [{{name: bench, type: filesystem, path: {self.place / 'kv'},"
                f" min_free_gb: 1, direct_io: {'off' if buffered else 'auto'}}}]\n"
                "  fallback_local: {enabled: false}\n"
                f"compression: {{ladder: {{local: {codec}}}}}\n"
                "agent: {autostart: false}\n"
            )
            config.chmod(0o600)
            described = {**PLUGIN, "adapter_params": {"config": str(config)}}
        else:
            described = {**described, "base_path": str(self.place / "files")}
        parsed = config_class(described["type"]).from_dict(described)
        adapter = create_l2_adapter_from_registry(parsed, self.memory.manager.get_l1_memory_desc())
        if "serde" in described:
            from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
            from lmcache.v1.distributed.serde import create_serde_processor
            from lmcache.v1.distributed.serde.base import SerdeConfig

            adapter = SerdeL2AdapterWrapper(
                inner=adapter,
                serde=create_serde_processor(SerdeConfig(**described["serde"])),
                l1_manager=self.memory.manager,
            )
        return Driver(adapter, timeout=300)

    def run(self, what: str, objects: Sequence[Any], names: Sequence[Any], flight: int) -> float:
        """Seconds to store or load all objects, some tasks at a time."""
        adapter = self.driver.adapter
        store = what == "store"
        submit = adapter.submit_store_task if store else adapter.submit_load_task
        step = len(objects) // _TASKS
        waiting = deque(range(0, len(objects), step))
        under_way: set[int] = set()
        begin = time.perf_counter()
        while waiting or under_way:
            while waiting and len(under_way) < flight:
                at = waiting.popleft()
                under_way.add(submit(list(names[at : at + step]), list(objects[at : at + step])))
            under_way -= self._stored(under_way) if store else self._loaded(under_way, step)
        return time.perf_counter() - begin

    def _stored(self, tasks: set[int]) -> set[int]:
        """Wait until some tasks have ended."""
        adapter = self.driver.adapter
        ended = self.driver.wait(
            adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks() or None
        )
        assert set(ended) <= tasks
        assert all(result.is_successful() for result in ended.values())
        return set(ended)

    def _loaded(self, tasks: set[int], count: int) -> set[int]:
        adapter = self.driver.adapter

        def ask() -> dict[int, Any] | None:
            answers = {task: adapter.query_load_result(task) for task in tasks}
            return {task: got for task, got in answers.items() if got is not None} or None

        ended = self.driver.wait(adapter.get_load_event_fd(), ask)
        assert all(got.popcount() == count for got in ended.values())
        return set(ended)

    def ready(self, names: Sequence[Any], layout: Any) -> None:
        """Wait until the adapter knows what is there."""
        assert len(self.driver.lookup(list(names), {0: layout})) == len(names)

    def stored(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.place.rglob("*") if path.is_file())

    def reopen(self) -> None:
        """End the adapter and begin anew, as a restart of the server does."""
        self.driver.adapter.close()
        self.driver = self._open()

    def empty(self) -> None:
        """Give the medium its space back."""
        self.driver.adapter.close()
        for name in ("kv", "files"):
            shutil.rmtree(self.place / name, ignore_errors=True)
        self.driver = self._open()

    def close(self) -> None:
        self.driver.adapter.close()


def _begin(objects: Sequence[Any], size: int) -> int:
    """Where objects of LMCache's begin that lie one after the other."""
    places = sorted(int(one.data_ptr) for one in objects)
    assert all(after - before == size for before, after in itertools.pairwise(places))
    return places[0]


def measure(
    report: Report, root: Path, name: str, flight: int, parties: Sequence[str], rounds: int
) -> None:
    """Measure one size of objects and report it."""
    count, shape = _SIZES[name]
    layout = desc(shape)
    size = 2
    for length in shape:
        size *= length
    moved = count * size
    memory = Memory(2 * moved + (1 << 30))
    names = keys(count)
    sources = memory.filled(names, layout)
    targets = memory.objects(names, layout)
    place = Path(tempfile.mkdtemp(prefix="lmcache_adapter-", dir=root))
    made: dict[str, _Party] = {}

    def once(who: str, _turn: int, found: Samples) -> None:
        one = made[who]
        # As LMCache does before it stores; it also opens the store.
        assert not one.driver.lookup(list(names), {0: layout})
        # A server begins to write once, not before each prompt.
        assert one.driver.store(keys(1, seed="first"), sources[:1]).is_successful()
        before = one.stored()
        seconds = one.run("store", sources, names, flight)
        found["store"].append(moved / seconds / 1e9)
        found["stored"].append(float(one.stored() - before))
        one.reopen()
        one.ready(names, layout)
        forget_pages(one.place)
        for what in ("load cold", "load hot"):
            seconds = one.run("load", targets, names, flight)
            found[what].append(moved / seconds / 1e9)
        one.empty()

    try:
        for number, party in enumerate(parties):
            made[party] = _Party(party, place / f"party-{number}", memory)
        block = min(size, 1 << 20)
        # With one task under way nobody can know what the next one asks for: the medium has
        # nothing to do from the end of one to the begin of the next, whoever reads.
        wave = moved // _TASKS if flight == 1 else None
        with RawProcess(place / "raw", size=moved, block=block, depth=_DEPTH, wave=wave) as process:
            raw = RawHere(
                process,
                place / "raw",
                _begin(targets, size),
                moved,
                block=block,
                depth=_DEPTH,
                wave=wave,
            )
            both = SideBySide(raw, moved, write="store", cold="load cold", hot="load hot")
            both.run(parties, rounds, once)
            raw.close()
    finally:
        for one in made.values():
            one.close()
        memory.free()
        memory.close()
        shutil.rmtree(place, ignore_errors=True)
    peers = [party for party in parties if party in _PEERS]
    for ours in (party for party in parties if party in _OURS):
        case = f"{count} x {name}, {flight} in flight, {ours}{without_kernels()}"
        both.report(report, "lmcache_adapter", case, ours, peers, _METRICS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench lmcache_adapter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 4])
    parser.add_argument(
        "--parties",
        nargs="+",
        choices=(*_OURS, *_PEERS),
        default=["raw", "fp8", *_PEERS],
        help="codecs of our store, and LMCache's adapters",
    )
    parser.add_argument("--root", type=Path, help="where to put the files")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile kernels that are not there"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
    logging.getLogger("lifeboat_cache").setLevel(logging.ERROR)  # of a model that is none
    ready_kernels(say, compiling=not arguments.no_compile)
    root = arguments.root or dev_home() / "bench"
    root.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.json)
    machine_use("before")
    for name in arguments.sizes:
        for flight in arguments.in_flight:
            measure(report, root, name, flight, arguments.parties, arguments.rounds)
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
