"""Storing in a bucket and restoring from it, beside plain requests for as many bytes.

    python3 tools/dev.py bench s3

The server is the tests' own (SeaweedFS), on this machine; with `--cores apart` it has one half of
the cores, and who asks it the other one, as two machines have cores of their own. Restoring goes
through a mover, as for an engine: the blocks are looked up, read from the bucket, verified,
decoded and copied to the caller's memory. The limit is boto3 reading ranges of 8 MiB of the same
objects with 8 threads. Storing is measured from the first block until the last object is in the
bucket, in the process that uploads; the limit is boto3 putting as many bytes in objects of 32 MiB
with 4 threads. All take turns. GB/s are of KV; with fp8 fewer bytes move, and the limit still
moves all.

With `--cores shared` the server takes from both sides what it needs, which is most of two cores:
what is compared then is the cores that all of it takes together. Between machines it is the
network that is short as a rule. So restoring is measured over a link of --gbps as well, for both
sides: all they send and get passes through one process, which lets no more than that pass.

It also says how many requests storing, restoring and an eviction take. With 256 MiB it
needs about 3 GB of memory and 4 GB of disk in .dev/bench unless --root names another place.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kv_blocks import layout_of, real_looking
from s3_server import S3Server
from slow_link import slow_link
from tiers import bench_directory, say

from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.starter import spawn
from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, machine_use, ready_kernels, rotated
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.config.schema import Config, Tier
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.interface import BlockBatch, BlockBuffers, Namespace, Outcome
from lifeboat_cache.janitor import JanitorPolicy
from lifeboat_cache.mover.places import target_key
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.janitor import BucketJanitor
from lifeboat_cache.s3.settings import S3Settings
from lifeboat_cache.s3.target import S3Target
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.testing import aligned_memory, sample_keys

_BENCH = "s3"
_PLAIN_GETS = "boto3 reading ranges of 8 MiB with 8 threads"
_PLAIN_PUTS = "boto3 putting objects of 32 MiB with 4 threads"
_PER_BLOCK = "an object per block"
_RANGE, _GET_THREADS = 8 << 20, 8
_PART, _PUT_THREADS = 32 << 20, 4
_PATIENCE_S = 120.0

#: Blocks of about 256 KiB: 16 tokens fewer than a page of KV would do, but real KV all the same.
_LAYERS, _DIM, _HEADS = 1, 64, 4

#: Blocks in one job, as for a prompt of 8 to 16 thousand tokens.
_JOB = 64

Bytes = npt.NDArray[np.uint8]
Samples = dict[str, list[float]]

#: Neither side's client makes its own checksum of what TCP and the server check.
_PLAIN: dict[str, Any] = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "max_pool_connections": 32,
}


class Blocks:
    """The KV that is moved, and memory to restore it to."""

    def __init__(self, count: int) -> None:
        self.layout: KVLayout = layout_of(_LAYERS, _DIM, "bfloat16", heads=_HEADS)
        self.size = self.layout.nbytes
        self.count = count
        rng = np.random.default_rng(5)
        some = [real_looking(self.layout, rng) for _ in range(16)]
        self.memory = aligned_memory(count * self.size).reshape(count, self.size)
        for number in range(count):
            self.memory[number] = some[number % len(some)]
            # No two are alike, in the low bits of a few numbers.
            self.memory[number, : 8 * 16 : 16] ^= np.frombuffer(
                number.to_bytes(8, "little"), np.uint8
            ) & np.uint8(1)
        self.into = aligned_memory(count * self.size).reshape(count, self.size)
        self.into[:] = 1

    @property
    def nbytes(self) -> int:
        return self.count * self.size

    def batches(self, rows: Bytes, keys: Sequence[bytes]) -> Iterator[BlockBatch]:
        """Jobs for all of them."""
        for first in range(0, self.count, _JOB):
            some = rows[first : first + _JOB]
            buffers = BlockBuffers.from_rows(
                some.ctypes.data, self.size, range(len(some)), self.size, some
            )
            yield BlockBatch(keys[first : first + _JOB], buffers, layout=self.layout.tag)


class Bucket:
    """One bucket of the server, and plain requests to it."""

    def __init__(self, server: S3Server, place: Path) -> None:
        self.server = server
        self.name = server.new_bucket()
        self.place = place / self.name
        self.client = server.client(**_PLAIN)
        self.endpoint = server.endpoint

    def through(self, port: int) -> Bucket:
        """The same bucket as it is reached through another port."""
        other = copy.copy(self)
        other.endpoint = f"http://127.0.0.1:{port}"
        other.client = self.server.client(endpoint=other.endpoint, **_PLAIN)
        other.place = self.place / str(port)
        return other

    def settings(self, node: str, **options: Any) -> S3Settings:
        return S3Settings(
            "archive", self.place / node, self.name, endpoint_url=self.endpoint, **options
        )

    def segments(self) -> dict[str, int]:
        """Objects with payloads, and their sizes."""
        found = self.server.objects(self.name)
        return {key: size for key, size in found.items() if key.endswith(".segment")}

    def read_plainly(self, total: int) -> float:
        """Read so many bytes of the segments that hold raw blocks, as ranges; GB/s."""
        ranges = [
            (key, first, min(size, first + _RANGE))
            for key, size in self.segments().items()
            if key.startswith(_namespace("raw").directory)
            # The same bytes: what lies behind the header.
            for first in range(HEADER_BYTES, size, _RANGE)
        ]

        def read(one: tuple[str, int, int]) -> int:
            key, first, last = one
            wanted = f"bytes={first}-{last - 1}"
            body = self.client.get_object(Bucket=self.name, Key=key, Range=wanted)["Body"].read()
            return len(body)

        moved = 0
        begin = time.perf_counter()
        with ThreadPoolExecutor(_GET_THREADS) as pool:
            while moved < total:  # again, if what is there is smaller
                moved += sum(pool.map(read, ranges))
        return moved / (time.perf_counter() - begin) / 1e9

    def put_plainly(self, memory: Bytes) -> float:
        """Put as many bytes; GB/s."""
        data = memory.reshape(-1)
        firsts = range(0, data.nbytes, _PART)

        def put(first: int) -> None:
            body = data[first : first + _PART].tobytes()
            self.client.put_object(Bucket=self.name, Key=f"plain/{first}", Body=body)

        begin = time.perf_counter()
        with ThreadPoolExecutor(_PUT_THREADS) as pool:
            list(pool.map(put, firsts))
        return data.nbytes / (time.perf_counter() - begin) / 1e9

    def drop(self) -> None:
        """Give its space back."""
        keys = [{"Key": key} for key in self.server.objects(self.name)]
        for first in range(0, len(keys), 1000):
            self.client.delete_objects(
                Bucket=self.name, Delete={"Objects": keys[first : first + 1000]}
            )
        self.client.delete_bucket(Bucket=self.name)


@contextmanager
def uploading(bucket: Bucket, codec: str, blocks: Blocks) -> Iterator[tuple[BlockStore, Archive]]:
    """A store whose process uploads, as a mover is."""
    archive = Archive(bucket.settings(f"from-{codec}"))
    target = S3Target(archive.settings)
    target._archive = archive
    namespace = _namespace(codec)
    policy = CodecPolicy.fixed("fp8" if codec == "fp8" else "raw")
    store = BlockStore(namespace, [target], codecs=policy, pending_bytes=1 << 40)
    try:
        if not store.wait_recovered(_PATIENCE_S):
            raise RuntimeError(store.reason)
        store.describe(blocks.layout)
        yield store, archive
    finally:
        store.close()
        archive.close()


def _namespace(codec: str) -> Namespace:
    return Namespace.from_identity({"engine": "bench", "of": "s3", "codec": codec})


def upload(bucket: Bucket, codec: str, blocks: Blocks) -> tuple[float, dict[str, int]]:
    """Store all blocks and wait until they are in the bucket; GB/s, and requests."""
    keys = sample_keys(range(blocks.count))
    with uploading(bucket, codec, blocks) as (store, archive):
        before = archive.client.traffic.snapshot().requests
        begin = time.perf_counter()
        jobs = [store.store(batch) for batch in blocks.batches(blocks.memory, keys)]
        for job in jobs:
            if not job.wait(_PATIENCE_S) or not job.ok:
                raise RuntimeError("a store failed")
        if not archive.uploader.flush(_PATIENCE_S):
            raise RuntimeError(archive.uploader.problem or "the upload takes too long")
        seconds = time.perf_counter() - begin
        after = archive.client.traffic.snapshot().requests
    requests = {verb: count - before.get(verb, 0) for verb, count in after.items()}
    return blocks.nbytes / seconds / 1e9, requests


class Node:
    """A node that has not stored anything: its store, and the mover behind it."""

    def __init__(self, bucket: Bucket, codec: str, blocks: Blocks) -> None:
        self._blocks = blocks
        self._exact = codec != "fp8"
        home = home_directory(os.environ)
        tier = Tier.model_validate(
            {
                "name": "archive",
                "type": "s3",
                "bucket": bucket.name,
                "endpoint_url": bucket.endpoint,
                "path": str(bucket.place / f"to-{codec}"),
                "min_free_gb": 0.0,
                "timeout_s": 60.0,
            }
        )
        bucket.place.mkdir(parents=True, exist_ok=True)
        path = bucket.place / f"{codec}.yaml"
        # What of the environment a mover gets depends on whether there is a bucket.
        path.write_text(
            json.dumps({"storage": {"tiers": [tier.model_dump(mode="json", exclude_unset=True)]}})
        )
        ladder = {"compression": {"ladder": {"archive": "fp8" if codec == "fp8" else "raw"}}}
        self._store = RemoteStore(
            _namespace(codec), tier, home=home, config=Config.model_validate(ladder)
        )
        time.sleep(0.3)
        arguments = ["--mover", target_key(tier), "--lease", "5"]
        problem = spawn(AgentPlaces.of(home), arguments, path)
        if problem or not self._store.wait_recovered(_PATIENCE_S):
            raise RuntimeError(problem or self._store.reason)
        _stay_here("--mover", target_key(tier))
        self._store.describe(blocks.layout)
        self._keys = sample_keys(range(blocks.count))
        give_up = time.monotonic() + _PATIENCE_S
        while not (self._store.lookup(self._keys) == 1).all():
            if time.monotonic() > give_up:
                raise RuntimeError("the blocks are not found")
            time.sleep(0.1)

    def restore(self, *, check: bool = False) -> float:
        """Load all blocks; GB/s of KV."""
        blocks = self._blocks
        if check:
            blocks.into[:] = 0
        begin = time.perf_counter()
        jobs = [self._store.load(batch) for batch in blocks.batches(blocks.into, self._keys)]
        for job in jobs:
            if not job.wait(_PATIENCE_S):
                raise RuntimeError("a load takes too long")
        seconds = time.perf_counter() - begin
        outcomes = {Outcome(one).name for job in jobs for one in job.outcomes.tolist()}
        if outcomes != {"OK"}:
            raise RuntimeError(f"not everything was loaded: {outcomes}")
        if check and self._exact and not np.array_equal(blocks.into, blocks.memory):
            raise RuntimeError("what was restored is not what was stored")
        return blocks.nbytes / seconds / 1e9

    def close(self) -> None:
        self._store.close()


def _eviction(bucket: Bucket) -> dict[str, int]:
    """Evict half of what is there; requests."""
    archive = Archive(bucket.settings("janitor", capacity=sum(bucket.segments().values()) // 2))
    # What was stored just now would be spared.
    janitor = BucketJanitor(archive, policy=JanitorPolicy(young_s=-60.0))
    try:
        report = janitor.run_once()
        say(
            f"evicting {report.segments_removed} segments of {report.removed_bytes:,} bytes took "
            f"{report.requests}"
        )
        return report.requests
    finally:
        janitor.close()
        archive.close()


def measure(
    report: Report, server: S3Server, place: Path, *, total: int, rounds: int, gbps: float
) -> None:
    """Measure and report."""
    size = layout_of(_LAYERS, _DIM, "bfloat16", heads=_HEADS).nbytes
    blocks = Blocks(max(_JOB, total // size))
    case = f"{blocks.count} blocks of {size >> 10} KiB"
    samples: Samples = defaultdict(list)
    requests: dict[str, int] = {}

    def store(turn: int) -> None:
        bucket = Bucket(server, place)
        plans: list[tuple[str, Callable[[], float]]] = [
            ("plain", lambda: bucket.put_plainly(blocks.memory)),
            ("raw", lambda: _count(requests, upload(bucket, "raw", blocks))),
            ("fp8", lambda: upload(bucket, "fp8", blocks)[0]),
        ]
        for name, run in rotated(plans, turn):
            samples[name].append(run())
        bucket.drop()

    store(0)
    samples.clear()
    for turn in range(rounds):
        store(turn)
    for name in ("raw", "fp8"):
        limit = (_PLAIN_PUTS, samples["plain"])
        report.add(compare(_BENCH, f"{name}, {case}", "store", "GB/s", samples[name], limit=limit))
    _add_requests(report, f"raw, {case}", "PUTs to store", requests["put"], blocks.count, rounds)

    bucket = Bucket(server, place)
    for name in ("raw", "fp8"):
        upload(bucket, name, blocks)
    _restore(report, bucket, blocks, case, rounds)
    with slow_link(server.port, gbps * 1e9 / 8) as port:
        _restore(report, bucket.through(port), blocks, f"{case}, {gbps:g} Gbit/s", rounds)
    gets = _gets(bucket, blocks)
    _add_requests(report, f"raw, {case}", "GETs to restore", gets, blocks.count, rounds)
    bucket.drop()
    # Nobody looks after this one yet.
    bucket = Bucket(server, place)
    for name in ("raw", "fp8"):
        upload(bucket, name, blocks)
    evicted = _eviction(bucket)
    for verb in ("list", "delete"):
        values = [float(evicted.get(verb, 0))] * rounds
        report.add(compare(_BENCH, "eviction of half", f"{verb} requests", "requests", values))
    bucket.drop()


def _restore(report: Report, bucket: Bucket, blocks: Blocks, case: str, rounds: int) -> None:
    """Measure restoring what is in a bucket."""
    samples: Samples = defaultdict(list)
    with contextlib.ExitStack() as stack:
        nodes = {}
        for name in ("raw", "fp8"):
            nodes[name] = Node(bucket, name, blocks)
            stack.callback(nodes[name].close)
            nodes[name].restore(check=True)
        plans: list[tuple[str, Callable[[], float]]] = [
            ("plain", lambda: bucket.read_plainly(blocks.nbytes)),
            ("raw", nodes["raw"].restore),
            ("fp8", nodes["fp8"].restore),
        ]
        for turn in range(rounds):
            for name, run in rotated(plans, turn):
                samples[name].append(run())
    for name in ("raw", "fp8"):
        limit = (_PLAIN_GETS, samples["plain"])
        report.add(
            compare(_BENCH, f"{name}, {case}", "restore", "GB/s", samples[name], limit=limit)
        )


def _add_requests(
    report: Report, case: str, metric: str, count: int, blocks: int, rounds: int
) -> None:
    """Say how many requests something took, beside one for each block."""
    peer = (_PER_BLOCK, [float(blocks)] * rounds)
    values = [float(count)] * rounds
    report.add(compare(_BENCH, case, metric, "requests", values, peer=peer))


def _gets(bucket: Bucket, blocks: Blocks) -> int:
    """How many requests restoring all blocks takes, when what there is is known."""
    keys = sample_keys(range(blocks.count))
    with uploading(bucket, "raw", blocks) as (store, archive):
        before = archive.client.traffic.snapshot().requests["get"]
        for batch in blocks.batches(blocks.into, keys):
            job = store.load(batch)
            if not job.wait(_PATIENCE_S) or not job.ok:
                raise RuntimeError("a load failed")
        return archive.client.traffic.snapshot().requests["get"] - before


def _count(requests: dict[str, int], done: tuple[float, dict[str, int]]) -> float:
    requests.update(done[1])
    return done[0]


def _stay_here(*arguments: str) -> None:
    """Bind processes with these arguments to the cores of this one: a mover uses all there are."""
    wanted = b"\0".join(argument.encode() for argument in arguments)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (path / "cmdline").read_bytes():
                for thread in (path / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))


@contextmanager
def _started(place: Path, *, apart: bool) -> Iterator[S3Server]:
    """The server; if ``apart``, on half of the cores, and all that follows on the other half."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if apart and not half:
        raise SystemExit("there is one core only: say --cores shared")
    try:
        if apart:
            os.sched_setaffinity(0, cores[:half])  # its threads have what this one has
        with S3Server(place) as server:
            if apart:
                os.sched_setaffinity(0, cores[half:])
            yield server
    finally:
        os.sched_setaffinity(0, cores)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench s3",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=LEAST_PAIRS)
    parser.add_argument("--mib", type=int, default=256, help="MiB of KV that each round moves")
    parser.add_argument("--gbps", type=float, default=2.0, help="bandwidth of the link")
    parser.add_argument(
        "--cores",
        choices=("apart", "shared"),
        default="apart",
        help="whether the server has cores of its own",
    )
    parser.add_argument("--root", type=Path, help="where to put the files on disk")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile kernels that are not there"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    ready_kernels(say, compiling=not arguments.no_compile)
    report = Report(arguments.json)
    machine_use("before")
    with (
        bench_directory("s3", "disk", arguments.root) as place,
        _started(place / "server", apart=arguments.cores == "apart") as server,
    ):
        os.environ.update(server.environment())
        measure(
            report,
            server,
            place,
            total=arguments.mib << 20,
            rounds=arguments.rounds,
            gbps=arguments.gbps,
        )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
