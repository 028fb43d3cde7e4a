"""The adapter interface used the way the engines' contracts ask for.

One section an engine. No engine runs here: these tests play its part with numpy, and use
nothing but :mod:`lifeboat_cache.interface` (and a directory to store in). What each section
shows is told in ``docs/interface.md``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from breakable_tiers import Tier
from stored import journal_entries

from lifeboat_cache.format.journal import KIND_RECORD
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Job,
    Lookup,
    Namespace,
    Outcome,
    State,
    Store,
    block_keys,
    tag,
)
from lifeboat_cache.store.tiered_store import TieredStore, Tiering
from lifeboat_cache.targets.filesystem import FilesystemTarget

OpenStore = Callable[..., Store]

IDENTITY = {"engine": "contract", "model": "hybrid", "tp_rank": 0}

OK, PRESENT, MISSING, MISMATCH = (
    Outcome.OK,
    Outcome.PRESENT,
    Outcome.MISSING,
    Outcome.MISMATCH,
)


@pytest.fixture(params=["one target", "ladder"])
def open_store(root: Path, request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Opens the store as a new process would; closes what is left at the end.

    Adapters get a ladder of targets, which promises the same as a store on one.
    """
    opened: list[Store] = []

    def make(identity: dict[str, Any] = IDENTITY) -> Store:
        namespace = Namespace.from_identity(identity)
        if request.param == "ladder":
            tiers = [Tier(root), Tier(root.with_name("slower"), "shared")]
            tiering = Tiering.fixed([tier.spec() for tier in tiers], "local_first")
            opened.append(TieredStore(namespace, tiering, pending_bytes=2 << 30))
        else:
            opened.append(BlockStore(namespace, [FilesystemTarget(root)], io_workers=2))
        assert opened[-1].wait_recovered(60)
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def blocks_stored(root: Path) -> int:
    """How many records the journals of a target hold."""
    return sum(
        int((journal_entries(journal)["kind"] == KIND_RECORD).sum())
        for journal in root.glob("*/*.journal")
    )


def outcomes(job: Job) -> list[int]:
    """Block until a job is done, as SGLang's threads do."""
    assert job.wait(60)
    values: list[int] = job.outcomes.tolist()
    return values


def good(job: Job) -> list[bool]:
    return [Outcome(value).good for value in outcomes(job)]


# SGLang: blocking batches of pages that lie in many pieces ---------------------------

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 3, 2, 8, 12


class HostPool:
    """A pool of KV pages in host memory, in one of SGLang's layouts."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        tokens = PAGES * PAGE
        shape = {
            "layer_first": (2, LAYERS, tokens, HEADS, DIM),
            "page_first": (2, tokens, LAYERS, HEADS, DIM),
        }[layout]
        self.memory = np.zeros(shape, dtype=np.float16)

    def fill(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.memory[:] = generator.integers(0, 1000, self.memory.shape)

    def page(self, number: int) -> npt.NDArray[np.float16]:
        """Copy of a page with the axes in the order of ``layer_first``."""
        tokens = slice(number * PAGE, (number + 1) * PAGE)
        if self.layout == "layer_first":
            return self.memory[:, :, tokens].copy()
        return self.memory[:, tokens].transpose(0, 2, 1, 3, 4).copy()

    def get_page_buffer_meta(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Addresses and sizes of all pieces, as SGLang's pools answer."""
        pointers, sizes = [], []
        for number in pages:
            tokens = slice(number * PAGE, (number + 1) * PAGE)
            if self.layout == "layer_first":
                pieces = [
                    self.memory[kv, layer, tokens] for kv in (0, 1) for layer in range(LAYERS)
                ]
            else:
                pieces = [self.memory[kv, tokens] for kv in (0, 1)]
            for piece in pieces:
                assert piece.flags["C_CONTIGUOUS"]
                pointers.append(piece.ctypes.data)
                sizes.append(piece.nbytes)
        return pointers, sizes


@dataclass
class PageBackend:
    """What a HiCache storage backend does with a store: blocking calls on its threads."""

    store: Store
    pool: HostPool
    space: bytes = b"kv"

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        return block_keys(map(str.encode, hashes), space=self.space)

    def batch(self, hashes: Sequence[str], pages: Sequence[int]) -> BlockBatch:
        pointers, sizes = self.pool.get_page_buffer_meta(pages)
        starts = np.linspace(0, len(pointers), len(pages) + 1, dtype=np.int64)
        buffers = BlockBuffers(
            np.array(pointers, dtype=np.uint64), np.array(sizes, dtype=np.uint64), starts, self.pool
        )
        return BlockBatch(self.keys(hashes), buffers, layout=tag(self.pool.layout.encode()))

    def batch_set_v1(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        return good(self.store.store(self.batch(hashes, pages)))

    def batch_get_v1(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        return good(self.store.load(self.batch(hashes, pages)))

    def batch_exists(self, hashes: Sequence[str]) -> int:
        """Consecutive hits from the first page on."""
        hits = self.store.lookup(self.keys(hashes)) == Lookup.HIT
        return int(np.argmin(np.append(hits, False)))


def hashes(count: int, first: int = 0) -> list[str]:
    return [f"{number:064x}" for number in range(first, first + count)]


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_sglang_pages_come_back_in_another_process(open_store: OpenStore, layout: str) -> None:
    pool = HostPool(layout)
    pool.fill(1)
    backend = PageBackend(open_store(), pool)
    assert backend.batch_exists(hashes(6)) == 0
    assert backend.batch_set_v1(hashes(6), [3, 1, 4, 0, 5, 9]) == [True] * 6
    # A page that is there already is an answer of True: False would drop the rest of the node.
    assert backend.batch_set_v1(hashes(8), [3, 1, 4, 0, 5, 9, 2, 6]) == [True] * 8
    assert backend.store.close()

    restored = PageBackend(open_store(), HostPool(layout))
    assert restored.batch_exists(hashes(12)) == 8
    assert restored.batch_get_v1(hashes(9), range(9)) == [True] * 8 + [False]
    for at, number in enumerate([3, 1, 4, 0, 5, 9, 2, 6]):
        assert np.array_equal(restored.pool.page(at), pool.page(number))


def test_sglang_prefix_ends_at_the_first_page_that_is_missing(open_store: OpenStore) -> None:
    pool = HostPool("page_first")
    backend = PageBackend(open_store(), pool)
    assert backend.batch_set_v1(hashes(8), range(8)) == [True] * 8
    backend.store.delete(backend.keys(hashes(1, first=3)))
    assert backend.batch_exists(hashes(8)) == 3
    assert backend.batch_get_v1(hashes(8), range(8)) == [True] * 3 + [False] + [True] * 4


def test_sglang_layouts_of_equal_size_are_never_mixed_up(open_store: OpenStore) -> None:
    pool = HostPool("page_first")
    pool.fill(1)
    first = PageBackend(open_store(), pool)
    assert first.batch_set_v1(hashes(4), range(4)) == [True] * 4
    other = PageBackend(first.store, HostPool("layer_first"))
    assert other.batch_get_v1(hashes(4), range(4)) == [False] * 4
    assert not other.pool.memory.any()
    # It does not stay unusable for the new layout: storing replaces it.
    other.pool.fill(2)
    assert other.batch_set_v1(hashes(4), range(4)) == [True] * 4
    assert other.batch_get_v1(hashes(4), [4, 5, 6, 7]) == [True] * 4
    assert np.array_equal(other.pool.page(5), other.pool.page(1))


def test_sglang_threads_block_on_their_own_batches(open_store: OpenStore) -> None:
    pool = HostPool("layer_first")
    pool.fill(3)
    backend = PageBackend(open_store(), pool)
    faults: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for round_ in range(20):
                own = hashes(4, first=1000 * thread + 10 * round_)
                assert backend.batch_set_v1(own, range(4)) == [True] * 4
                assert backend.batch_exists(own) == 4
                target = PageBackend(backend.store, HostPool("layer_first"))
                assert target.batch_get_v1(own, range(4)) == [True] * 4
                assert np.array_equal(target.pool.page(2), pool.page(2))
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    # Nothing of it has to be polled: the callers waited.
    assert not backend.store.busy()


def test_sglang_families_of_pools(open_store: OpenStore) -> None:
    """KV pages and the Mamba state of the same prefix: other sizes, same hashes."""
    pool = HostPool("page_first")
    pool.fill(4)
    backend = PageBackend(open_store(), pool)
    store = backend.store
    temporal = np.arange(999, dtype=np.float32)
    convolution = np.arange(77, dtype=np.float16)

    def state(memory: Sequence[npt.NDArray[Any]], number: int) -> BlockBatch:
        name = hashes(1, first=number)[0].encode()
        return BlockBatch(
            block_keys([name], space=b"mamba"),
            BlockBuffers.from_buffers([list(memory)]),
            groups=[1],
            families=[tag(name)],
        )

    # Sidecars first, then KV: whoever finds the KV finds its sidecar.
    assert good(store.store(state([temporal, convolution], 5))) == [True]
    assert backend.batch_set_v1(hashes(6), range(6)) == [True] * 6
    assert store.close()

    again = PageBackend(open_store(), HostPool("page_first"))
    kv_hits = again.batch_exists(hashes(6))
    names = [name.encode() for name in hashes(6)]
    states = again.store.lookup(block_keys(names, space=b"mamba")) == Lookup.HIT
    # Trailing pages: a prefix can be restored where its last page has a state.
    assert kv_hits == 6
    assert np.flatnonzero(states).tolist() == [5]
    memory: list[npt.NDArray[Any]] = [np.zeros_like(temporal), np.zeros_like(convolution)]
    assert good(again.store.load(state(memory, 5))) == [True]
    assert np.array_equal(memory[0], temporal)
    assert np.array_equal(memory[1], convolution)
    assert again.store.keys(group=1) == block_keys([names[5]], space=b"mamba")


def test_sglang_clear_and_stop_without_close(open_store: OpenStore) -> None:
    backend = PageBackend(open_store(), HostPool("page_first"))
    assert backend.batch_set_v1(hashes(8), range(8)) == [True] * 8
    # SIGTERM does not call close(): what was answered True is safe all the same.
    assert PageBackend(open_store(), HostPool("page_first")).batch_exists(hashes(8)) == 8
    assert backend.store.delete(backend.store.keys()).all()
    assert backend.batch_exists(hashes(8)) == 0
    assert backend.store.drain(60)
    assert PageBackend(open_store(), HostPool("page_first")).batch_exists(hashes(8)) == 0


# LMCache: locks, synchronous deletes, events, mixed sizes ----------------------------


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    def encode(self) -> bytes:
        """Every field, with lengths, so that no two keys have the same bytes."""
        parts = [
            self.chunk_hash,
            self.model_name.encode(),
            b"%d" % self.kv_rank,
            b"%d" % self.object_group_id,
            self.cache_salt.encode(),
        ]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class MemoryObject:
    """Host memory that is handed over as ``byte_array``, of ctypes' format ``<B``."""

    def __init__(self, content: bytes) -> None:
        self.raw = (ctypes.c_ubyte * len(content)).from_buffer_copy(content)

    @property
    def byte_array(self) -> memoryview:
        view = memoryview(self.raw)
        assert view.format == "<B"
        return view


#: Group number of the blocks that name the objects of a store task.
CATALOG = 65_535


class L2Adapter:
    """What an LMCache L2 adapter does with a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.results: dict[int, list[bool]] = {}
        self.events, self.notifier = os.pipe()
        self.tasks = 0

    def stop(self) -> None:
        os.close(self.events)
        os.close(self.notifier)

    @staticmethod
    def keys(keys: Sequence[ObjectKey]) -> list[bytes]:
        return block_keys((key.encode() for key in keys), space=b"lmcache")

    def report(self, task: int) -> Callable[[Job], None]:
        def on_done(job: Job) -> None:
            # The result first, then the event: the controller polls what was signalled.
            self.results[task] = [Outcome(value).good for value in job.outcomes.tolist()]
            os.write(self.notifier, b"x")

        return on_done

    def submit(
        self,
        call: Callable[[BlockBatch, Callable[[Job], None]], Job],
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObject],
        catalogued: bool = False,
    ) -> int:
        self.tasks += 1
        store_keys = self.keys(keys)
        memory: list[Any] = [item.byte_array for item in objects]
        groups = [key.object_group_id for key in keys]
        if catalogued:
            text = json.dumps([[k.chunk_hash.hex(), *astuple(k)[1:]] for k in keys]).encode()
            store_keys = [*store_keys, *block_keys([text], space=b"lmcache catalog")]
            memory.append(text)
            groups.append(CATALOG)
        batch = BlockBatch(store_keys, BlockBuffers.from_buffers(memory), groups=groups)
        call(batch, self.report(self.tasks))
        return self.tasks

    def submit_store_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObject]) -> int:
        return self.submit(self.store.store, keys, objects, catalogued=True)

    def submit_load_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObject]) -> int:
        return self.submit(self.store.load, keys, objects)

    def finished(self, task: int) -> list[bool]:
        assert os.read(self.events, 1) == b"x"
        return self.results.pop(task)

    def lookup_and_lock(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [bool(hit) for hit in self.store.lookup(self.keys(keys), pin=True)]

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        self.store.unpin(self.keys(keys))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [bool(done) for done in self.store.delete(self.keys(keys))]

    def list_keys(self) -> list[ObjectKey]:
        """Every object that is there, by name: read from the catalog blocks."""
        catalog = self.store.keys(group=CATALOG)
        texts = [bytearray(size) for size in self.store.sizes(catalog).tolist()]
        job = self.store.load(BlockBatch(catalog, BlockBuffers.from_buffers(texts)))
        named = []
        for text, fine in zip(texts, good(job), strict=True):
            if fine:
                named += [ObjectKey(bytes.fromhex(h), *rest) for h, *rest in json.loads(text)]
        found = self.store.lookup(self.keys(named))
        return [key for key, hit in zip(named, found, strict=True) if hit == Lookup.HIT]


@pytest.fixture
def adapter(open_store: OpenStore) -> Iterator[L2Adapter]:
    made = L2Adapter(open_store())
    yield made
    made.store.close()
    made.stop()


def objects_of(count: int) -> tuple[list[ObjectKey], list[bytes]]:
    """Objects of two groups with different sizes, as one store task has them."""
    keys = [
        ObjectKey(bytes([number]) * 32, "org/model", 1 << 24, number % 2) for number in range(count)
    ]
    contents = [bytes([number + 1]) * (8192 if number % 2 else 5000) for number in range(count)]
    return keys, contents


def empty(contents: Sequence[bytes]) -> list[MemoryObject]:
    return [MemoryObject(bytes(len(content))) for content in contents]


def test_lmcache_task_of_mixed_sizes(adapter: L2Adapter) -> None:
    keys, contents = objects_of(7)
    task = adapter.submit_store_task(keys, [MemoryObject(content) for content in contents])
    assert all(adapter.finished(task))
    memory = empty(contents)
    task = adapter.submit_load_task(keys, memory)
    assert adapter.finished(task) == [True] * 7
    assert [bytes(item.raw) for item in memory] == contents
    assert adapter.store.sizes(adapter.keys(keys)).tolist() == [len(c) for c in contents]
    assert adapter.store.poll() == [], "with a callback there is nothing to poll"


def test_lmcache_keys_differ_in_every_field(adapter: L2Adapter) -> None:
    keys = [
        ObjectKey(bytes(32), "a/b", 1),
        ObjectKey(bytes(32), "a/b", 2),
        ObjectKey(bytes(32), "a/b", 1, 1),
        ObjectKey(bytes(32), "a/b", 1, 0, "salt"),
        ObjectKey(bytes(32), "a", 1),
        ObjectKey(bytes(31) + b"x", "a/b", 1),
    ]
    assert len(set(adapter.keys(keys))) == len(keys)


def test_lmcache_locks_have_counts_and_hold_off_deletes(adapter: L2Adapter) -> None:
    keys, contents = objects_of(3)
    adapter.finished(adapter.submit_store_task(keys, [MemoryObject(c) for c in contents]))
    assert adapter.lookup_and_lock([*keys, ObjectKey(bytes(32), "no", 0)]) == [True] * 3 + [False]
    assert adapter.lookup_and_lock(keys[:1]) == [True]
    # The eviction thread does not look at locks: locked keys are skipped here.
    assert adapter.delete(keys) == [False] * 3
    adapter.unlock(keys)
    assert adapter.delete(keys) == [False, True, True]
    adapter.unlock(keys[:1])
    adapter.unlock(keys)  # once too often: never fails
    assert adapter.delete(keys) == [True, False, False]
    # Gone at once, not only after the write.
    assert adapter.lookup_and_lock(keys) == [False] * 3


def test_lmcache_layout_is_checked_at_lookup(adapter: L2Adapter) -> None:
    """The key holds no dtype: a bf16 object must not be found for an fp8 request."""
    keys, contents = objects_of(4)
    store = adapter.store
    bf16, fp8 = tag(b"bf16 [2,3,256,64]"), tag(b"uint8 [2,3,256,64]")
    batch = BlockBatch(adapter.keys(keys), BlockBuffers.from_buffers(contents), layout=bf16)
    assert good(store.store(batch)) == [True] * 4

    def lookup(expected_layout: int, expected_sizes: Sequence[int]) -> list[bool]:
        found = store.lookup(batch.keys) == Lookup.HIT
        fits = store.layouts(batch.keys) == np.uint64(expected_layout)
        same = store.sizes(batch.keys) == np.array(expected_sizes)
        return [bool(hit) for hit in found & fits & same]

    sizes = [len(content) for content in contents]
    assert lookup(bf16, sizes) == [True] * 4
    assert lookup(fp8, sizes) == [False] * 4
    assert lookup(bf16, [size // 2 for size in sizes]) == [False] * 4


def test_lmcache_close_flushes_what_is_queued(open_store: OpenStore) -> None:
    adapter = L2Adapter(open_store())
    tasks = []
    for number in range(40):
        key = ObjectKey(number.to_bytes(32, "big"), "org/model", 0)
        tasks.append(adapter.submit_store_task([key], [MemoryObject(bytes(1 << 16))]))
    assert adapter.store.close()
    assert all(all(adapter.finished(task)) for task in tasks[:1])
    assert len(open_store().keys(group=0)) == 40
    adapter.stop()


def test_lmcache_accounts_for_what_was_there_before(
    adapter: L2Adapter, open_store: OpenStore, root: Path
) -> None:
    keys, contents = objects_of(6)
    for first in (0, 3):
        part = slice(first, first + 3)
        objects = [MemoryObject(content) for content in contents[part]]
        adapter.finished(adapter.submit_store_task(keys[part], objects))
    adapter.delete(keys[:1])
    assert adapter.store.close()
    again = L2Adapter(open_store())
    named = again.list_keys()
    assert sorted(named, key=repr) == sorted(keys[1:], key=repr)
    sizes = again.store.sizes(again.keys(named)).tolist()
    assert sum(sizes) == sum(len(content) for content in contents[1:])
    assert FilesystemTarget(root).usage().used >= sum(sizes)
    again.stop()


def test_lmcache_refusal_comes_through_the_callback_too(root: Path) -> None:
    """A store may be refused before ``store`` returns: the callback must expect it."""
    root.write_text("not a directory")
    store = BlockStore(Namespace.from_identity(IDENTITY), [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    assert store.state is State.DISABLED
    calls: list[tuple[Job, int]] = []
    job = store.store(
        BlockBatch(block_keys([b"k"]), BlockBuffers.from_buffers([b"content"])),
        lambda done: calls.append((done, threading.get_ident())),
    )
    assert calls == [(job, threading.get_ident())]
    assert outcomes(job) == [Outcome.DISABLED]
    assert store.close()


# MLX: records of exact length --------------------------------------------------------


def packed(caches: Sequence[npt.NDArray[Any]], offset: int) -> list[Any]:
    """A prompt cache as pieces: a description that can be read alone, then the arrays."""
    shapes = [[str(cache.dtype), list(cache.shape)] for cache in caches]
    description = json.dumps({"offset": offset, "arrays": shapes}).encode()
    return [len(description).to_bytes(4, "little") + description, *caches]


def unpacked(record: bytearray) -> tuple[list[npt.NDArray[Any]], int]:
    length = 4 + int.from_bytes(record[:4], "little")
    described = json.loads(bytes(record[4:length]))
    arrays: list[npt.NDArray[Any]] = []
    for dtype, shape in described["arrays"]:
        count = int(np.prod(shape))
        array = np.frombuffer(record, dtype=dtype, count=count, offset=length).reshape(shape)
        length += array.nbytes
        arrays.append(array)
    assert length == len(record)
    return arrays, described["offset"]


def test_mlx_records_of_exact_length(open_store: OpenStore) -> None:
    """The reader does not know how long a record is, or what is in it, before it asks."""
    store = open_store()
    generator = np.random.default_rng(5)
    caches: dict[bytes, list[npt.NDArray[Any]]] = {
        b"prompt %d" % tokens: [
            # bfloat16 has no numpy type: MLX arrays are viewed as uint16.
            generator.integers(0, 2**16, (1, 2, tokens, 8), dtype=np.uint16),
            generator.random((1, 3, 5)).astype(np.float32),  # a state of fixed size
        ]
        for tokens in (1, 64, 65, 500)
    }
    keys = block_keys(caches)
    records = [packed(arrays, offset) for offset, arrays in enumerate(caches.values())]
    assert good(store.store(BlockBatch(keys, BlockBuffers.from_buffers(records)))) == [True] * 4
    assert store.close()

    again = open_store()
    sizes = again.sizes(keys).tolist()
    assert len(set(sizes)) == 4
    memory = [bytearray(size) for size in sizes]
    assert good(again.load(BlockBatch(keys, BlockBuffers.from_buffers(memory)))) == [True] * 4
    for number, (record, arrays) in enumerate(zip(memory, caches.values(), strict=True)):
        restored, offset = unpacked(record)
        assert offset == number
        for one, other in zip(restored, arrays, strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
    # A record that is not there has no length, and one of another length is not loaded.
    assert again.sizes(block_keys([b"never stored"])).tolist() == [-1]
    wrong = BlockBatch(keys[:1], BlockBuffers.from_buffers([bytearray(sizes[0] + 1)]))
    assert outcomes(again.load(wrong)) == [MISMATCH]
    assert good(again.load(BlockBatch(keys[:1], BlockBuffers.from_buffers(memory[:1])))) == [True]


def test_mlx_longest_stored_prefix(open_store: OpenStore) -> None:
    """Chunks of 64 tokens, each key chained to the one before."""

    def chain(tokens: Sequence[int]) -> list[bytes]:
        before = b""
        names = []
        for first in range(0, len(tokens) - 63, 64):
            chunk = np.array(tokens[first : first + 64], dtype="<u4").tobytes()
            (before,) = block_keys([before + chunk])
            names.append(before)
        return names

    store = open_store()
    prompt = list(range(300))
    keys = chain(prompt)
    memory = [bytes([number]) * 700 for number in range(len(keys))]
    batch = BlockBatch(
        keys,
        BlockBuffers.from_buffers(memory),
        positions=[64 * (number + 1) for number in range(len(keys))],
        parents=[0, *[tag(key) for key in keys[:-1]]],
    )
    assert good(store.store(batch)) == [True] * 4
    other = [*prompt[:150], *[9] * 100]
    hits = store.lookup(chain(other))
    assert hits.tolist() == [Lookup.HIT] * 2 + [Lookup.MISS]


# vLLM: rows of a shared table, polled jobs, keys of all groups touched ---------------

ROWS, ROW = 16, 8192


@pytest.fixture
def table() -> tuple[memoryview, mmap.mmap]:
    region = mmap.mmap(-1, ROWS * ROW)
    return memoryview(region).cast("b", (ROWS, ROW)), region


def rows(view: memoryview, numbers: Sequence[int]) -> BlockBuffers:
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return BlockBuffers.from_rows(base, ROW, numbers, ROW, view)


def offload_keys(count: int, groups: int = 1) -> list[bytes]:
    """Block hash and group index, as vLLM makes them."""
    return [
        block.to_bytes(32, "little") + group.to_bytes(4, "big")
        for block in range(count)
        for group in range(groups)
    ]


def test_vllm_rows_are_stored_and_loaded_by_polled_jobs(
    open_store: OpenStore, table: tuple[memoryview, mmap.mmap]
) -> None:
    view, region = table
    content = np.frombuffer(view, dtype=np.uint8).reshape(ROWS, ROW)
    content[:8] = np.random.default_rng(1).integers(0, 256, (8, ROW), dtype=np.uint8)
    expected = content[:8].copy()
    store = open_store()
    engine_keys = offload_keys(4, groups=2)
    keys = block_keys(engine_keys)
    submitted = {
        id(
            store.store(
                BlockBatch(
                    keys,
                    rows(view, range(8)),
                    positions=[128 * (1 + number // 2) for number in range(8)],
                    groups=[int.from_bytes(key[32:], "big") for key in engine_keys],
                    families=[tag(key[:32]) for key in engine_keys],
                    parents=[0, 0, *[tag(key[:32]) for key in engine_keys[:-2]]],
                    salt=tag(b"tenant"),
                )
            )
        ): "job 1"
    }
    finished: list[tuple[str, bool]] = []
    while not finished:
        finished = [(submitted.pop(id(job)), job.ok) for job in store.poll()]
    assert finished == [("job 1", True)]
    assert store.lookup(keys).tolist() == [Lookup.HIT] * 8
    assert sorted(store.keys(group=1)) == sorted(keys[1::2])

    job = store.load(BlockBatch(keys, rows(view, range(8, 16))))
    assert store.drain(60)
    assert store.poll() == [job]
    assert (content[8:] == expected).all()
    assert job.bytes_moved == 8 * ROW
    store.touch(keys)
    assert store.close()

    # Every view is given back: the region can be unmapped.
    del content, expected
    view.release()
    region.close()


def test_vllm_failed_load_is_a_miss_afterwards(
    open_store: OpenStore, root: Path, table: tuple[memoryview, mmap.mmap]
) -> None:
    view, _ = table
    store = open_store()
    keys = block_keys(offload_keys(4))
    assert good(store.store(BlockBatch(keys, rows(view, range(4))))) == [True] * 4
    # A ladder would load them from the other target: the copy is awaited, and cut short, too.
    places = [root, root.with_name("slower")] if isinstance(store, TieredStore) else [root]
    deadline = time.monotonic() + 60
    while any(blocks_stored(place) < len(keys) for place in places):
        assert time.monotonic() < deadline, "the blocks are not copied"
        time.sleep(0.01)
    for segment in root.parent.glob("*/*/*.segment"):
        os.truncate(segment, 4096 + 2 * ROW)
    assert store.lookup(keys).tolist() == [Lookup.HIT] * 4
    job = store.load(BlockBatch(keys, rows(view, range(4))))
    # The keys that did arrive are reported one by one.
    assert good(job) == [True, True, False, False]
    assert not job.ok
    assert store.lookup(keys).tolist() == [Lookup.HIT] * 2 + [Lookup.MISS] * 2


def test_vllm_asks_again_until_the_model_is_identified(
    root: Path, table: tuple[memoryview, mmap.mmap]
) -> None:
    view, _ = table
    known = threading.Event()

    def fingerprint() -> Namespace:
        assert known.wait(60)
        return Namespace.from_identity(IDENTITY)

    store = BlockStore(fingerprint, [FilesystemTarget(root)], io_workers=1)
    keys = block_keys(offload_keys(2))
    assert store.lookup(keys).tolist() == [Lookup.RETRY] * 2
    # A store may come before the answer; it is kept and done when it is known.
    job = store.store(BlockBatch(keys, rows(view, [0, 1])))
    known.set()
    assert good(job) == [True] * 2
    assert store.wait_recovered(60)
    assert store.lookup([*keys, *block_keys([b"other"])]).tolist() == [
        Lookup.HIT,
        Lookup.HIT,
        Lookup.MISS,
    ]
    assert store.close()


def test_vllm_reset_drains_and_reports_every_job(
    open_store: OpenStore, table: tuple[memoryview, mmap.mmap]
) -> None:
    view, _ = table
    store = open_store()
    jobs = [
        store.store(BlockBatch(block_keys([b"%d" % number]), rows(view, [number % ROWS])))
        for number in range(64)
    ]
    assert store.drain(60, cancel=True)
    assert all(job.done() for job in jobs)
    assert {int(job.outcomes[0]) for job in jobs} <= {OK, Outcome.CANCELLED}
    assert sorted(map(id, store.poll())) == sorted(map(id, jobs))
    job = store.store(BlockBatch(block_keys([b"after"]), rows(view, [0])))
    assert good(job) == [True]


def test_vllm_identities_do_not_share(
    open_store: OpenStore, table: tuple[memoryview, mmap.mmap]
) -> None:
    view, _ = table
    keys = block_keys(offload_keys(3))
    store = open_store()
    assert good(store.store(BlockBatch(keys, rows(view, range(3))))) == [True] * 3
    assert store.close()
    for change in ({"tp_rank": 1}, {"model": "other"}, {"rope": {"factor": 2.0}}):
        assert open_store({**IDENTITY, **change}).lookup(keys).tolist() == [Lookup.MISS] * 3
    assert open_store().lookup(keys).tolist() == [Lookup.HIT] * 3
