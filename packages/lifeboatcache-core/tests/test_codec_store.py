"""Blocks through the store in every codec: what comes back, and when nothing does."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lifeboat_cache import kernels
from lifeboat_cache.codecs.blocks import decode_block, encode_block
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.names import (
    CODEC_NAMES,
    CODECS,
    FP8,
    LBQ2,
    LBQ4,
    LOSSLESS,
    RAW,
    codec_name,
    is_exact,
)
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.codecs.recipes import coded_layout
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Job,
    Lookup,
    Namespace,
    Outcome,
    block_keys,
)
from lifeboat_cache.store import keeper, staging
from lifeboat_cache.targets.filesystem import FilesystemTarget

_NAMESPACE = Namespace.from_identity({"test": "codecs"})

Payloads = npt.NDArray[np.uint8]


def _layout(
    *,
    layers: int = 3,
    pages: int = 2,
    tokens: int = 4,
    heads: int = 2,
    dim: int = 64,
    extra: int = 0,
) -> KVLayout:
    """Keys and values as vLLM keeps them: page by page, and some bytes that are neither."""
    width = dim * 2
    page = tokens * heads * width
    tensors = []
    for layer in range(layers):
        for at, role in enumerate(("key", "value")):
            tensors.append(
                TensorLayout(
                    role,  # type: ignore[arg-type]
                    "bfloat16",
                    layer,
                    pages,
                    tokens,
                    heads,
                    dim,
                    page,
                    heads * width,
                    width,
                    (2 * layer + at) * pages * page,
                )
            )
    return KVLayout.of(layers * 2 * pages * page + extra, tensors)


def _payloads(layout: KVLayout, count: int, seed: int = 1) -> Payloads:
    values = np.random.default_rng(seed).standard_normal((count, layout.nbytes // 2 + 1))
    halves = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(halves.view(np.uint8)[:, : layout.nbytes])


def _keys(count: int, name: str = "") -> list[bytes]:
    return block_keys([f"{name}{number}".encode() for number in range(count)])


def _run(start: Callable[..., Job], batch: BlockBatch) -> list[Outcome]:
    done = threading.Event()
    job = start(batch, lambda _: done.set())
    assert done.wait(60)
    return [Outcome(value) for value in job.outcomes]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., BlockStore]]:
    opened: list[BlockStore] = []

    def make(
        codec: int = RAW,
        *,
        layouts: Sequence[KVLayout] = (),
        key: bytes | None = None,
        policy: CodecPolicy | None = None,
        **settings: int,
    ) -> BlockStore:
        store = BlockStore(
            _NAMESPACE,
            [FilesystemTarget(tmp_path / "kv", **settings)],  # type: ignore[arg-type]
            io_workers=3,
            integrity_key=key,
            codecs=policy or CodecPolicy.fixed(CODEC_NAMES[codec]),
        )
        opened.append(store)
        for layout in layouts:
            store.describe(layout)
        assert store.wait_recovered(30)
        return store

    yield make
    for store in opened:
        store.close()


def _rows(payloads: Payloads) -> BlockBuffers:
    return BlockBuffers.from_buffers(list(payloads))


def _expected(layout: KVLayout, codec: int, payloads: Payloads) -> Payloads:
    """What the codec makes of blocks, outside any store."""
    coded = coded_layout(layout, codec)
    out = np.zeros_like(payloads)
    for payload, restored in zip(payloads, out, strict=True):
        decode_block(coded, encode_block(coded, payload), restored)
    return out


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("extra", [0, 100])
def test_blocks_come_back_after_a_restart(
    make_store: Callable[..., BlockStore], codec: int, extra: int
) -> None:
    layout = _layout(extra=extra)
    payloads = _payloads(layout, 9)
    store = make_store(codec, layouts=[layout])
    batch = BlockBatch(_keys(9), _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * 9
    assert _run(store.store, batch) == [Outcome.PRESENT] * 9
    counts = store.counters()
    assert counts.bytes_stored == payloads.nbytes
    coded = coded_layout(layout, codec)
    if codec == RAW:
        assert counts.bytes_written == payloads.nbytes
    elif coded.fixed_bytes is not None:
        assert counts.bytes_written == 9 * coded.fixed_bytes
    store.close()

    # The codec for what is new says nothing about what is there.
    again = make_store(RAW, layouts=[layout])
    out = np.full_like(payloads, 0xAA)
    assert _run(again.load, BlockBatch(_keys(9), _rows(out), layout.tag)) == [Outcome.OK] * 9
    assert np.array_equal(out, _expected(layout, codec, payloads))
    if is_exact(codec):
        assert np.array_equal(out, payloads)
    assert again.counters().bytes_loaded == payloads.nbytes


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_pieces_may_cut_the_block_anywhere(
    make_store: Callable[..., BlockStore], codec: int
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 6)
    half = layout.nbytes // 2
    ways = {
        "whole": [list(payloads)],
        "between tensors": [[[row[:half], row[half:]] for row in payloads]],
        "inside a vector": [[[row[:100], row[100:4001], row[4001:]] for row in payloads]],
        "each otherwise": [[[row[: 64 * n], row[64 * n :]] for n, row in enumerate(payloads)]],
    }
    store = make_store(codec, layouts=[layout])
    wanted = _expected(layout, codec, payloads)
    for name, (blocks,) in ways.items():
        keys = _keys(6, name)
        batch = BlockBatch(keys, BlockBuffers.from_buffers(blocks), layout.tag)
        assert _run(store.store, batch) == [Outcome.OK] * 6, name
        out = np.zeros_like(payloads)
        assert _run(store.load, BlockBatch(keys, _rows(out), layout.tag)) == [Outcome.OK] * 6
        assert np.array_equal(out, wanted), name
        out[:] = 0
        cut = [[row[:777], row[777:]] for row in out]
        batch = BlockBatch(keys, BlockBuffers.from_buffers(cut), layout.tag)
        assert _run(store.load, batch) == [Outcome.OK] * 6
        assert np.array_equal(out, wanted), name


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("codec", sorted(set(CODECS) - {RAW}))
def test_a_flipped_bit_is_a_miss_and_never_reaches_the_caller(
    make_store: Callable[..., BlockStore], codec: int, tmp_path: Path
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 4)
    store = make_store(codec, layouts=[layout])
    batch = BlockBatch(_keys(4), _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * 4
    store.close()
    (segment,) = (tmp_path / "kv").rglob("*.seg*")
    data = bytearray(segment.read_bytes())
    data[4096 + 50] ^= 1  # the first payload follows the header's page
    segment.write_bytes(data)
    again = make_store(codec, layouts=[layout])
    out = np.full_like(payloads, 0xAA)
    outcomes = _run(again.load, BlockBatch(_keys(4), _rows(out), layout.tag))
    assert outcomes == [Outcome.CORRUPT] + [Outcome.OK] * 3
    # Verified before it is decoded: the caller's memory is as it was.
    assert (out[0] == 0xAA).all()
    assert not again.lookup(_keys(4))[0]


@pytest.mark.usefixtures("both_kernels")
def test_blocks_of_a_layout_that_nobody_described_are_not_restored(
    make_store: Callable[..., BlockStore],
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 2)
    store = make_store(FP8, layouts=[layout])
    batch = BlockBatch(_keys(2), _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * 2
    store.close()
    stranger = make_store(RAW)
    out = np.full_like(payloads, 0xAA)
    outcomes = _run(stranger.load, BlockBatch(_keys(2), _rows(out), layout.tag))
    assert outcomes == [Outcome.MISMATCH] * 2
    assert (out == 0xAA).all()


@pytest.mark.usefixtures("both_kernels")
def test_layouts_and_codecs_mix_in_one_job(make_store: Callable[..., BlockStore]) -> None:
    one, other = _layout(), _layout(heads=1, tokens=8)
    assert one.nbytes == other.nbytes
    assert one.tag != other.tag
    payloads = _payloads(one, 12)
    tags = [(one if number % 3 else other).tag for number in range(12)]
    tags[5] = 0  # of which nothing is known
    keys = _keys(12)
    store = make_store(LBQ2, layouts=[one, other])
    batch = BlockBatch(keys, _rows(payloads), tags)
    assert _run(store.store, batch) == [Outcome.OK] * 12
    out = np.zeros_like(payloads)
    assert _run(store.load, BlockBatch(keys, _rows(out), tags)) == [Outcome.OK] * 12
    for number in range(12):
        row = payloads[number : number + 1]
        if number == 5:
            wanted = row
        else:
            wanted = _expected(one if number % 3 else other, LBQ2, row)
        assert np.array_equal(out[number : number + 1], wanted), number
    wrong = [one.tag] * 12
    outcomes = _run(store.load, BlockBatch(keys, _rows(out), wrong))
    assert [outcome == Outcome.OK for outcome in outcomes] == [tag == one.tag for tag in tags]


def test_what_was_lost_before_takes_no_more_room(make_store: Callable[..., BlockStore]) -> None:
    """A copy of a block is kept in the codec that it was in, or in a smaller one."""
    layout = _layout()
    store = make_store(FP8, layouts=[layout])
    been = [RAW, LOSSLESS, FP8, LBQ4, LBQ2]
    rows = _rows(_payloads(layout, len(been)))
    batch = BlockBatch(_keys(len(been)), rows, layout.tag, codecs=been)
    assert _run(store.store, batch) == [Outcome.OK] * len(been)
    assert store.records(_keys(len(been)))["codec"].tolist() == [FP8, FP8, FP8, LBQ4, LBQ2]

    exact = make_store(RAW, layouts=[layout])
    batch = BlockBatch(_keys(len(been), "again"), rows, layout.tag, codecs=been)
    assert _run(exact.store, batch) == [Outcome.OK] * len(been)
    assert exact.records(_keys(len(been), "again"))["codec"].tolist() == [RAW, RAW, FP8, LBQ4, LBQ2]


def test_a_second_coding_in_fp8_changes_nothing(make_store: Callable[..., BlockStore]) -> None:
    """So that a copy is as good as what it was made of."""
    layout = _layout()
    once = _expected(layout, FP8, _payloads(layout, 9))
    store = make_store(RAW, layouts=[layout])
    batch = BlockBatch(_keys(9), _rows(once), layout.tag, codecs=[FP8] * 9)
    assert _run(store.store, batch) == [Outcome.OK] * 9
    out = np.zeros_like(once)
    assert _run(store.load, BlockBatch(_keys(9), _rows(out), layout.tag)) == [Outcome.OK] * 9
    assert np.array_equal(out, once)


def test_what_is_known_of_blocks(make_store: Callable[..., BlockStore]) -> None:
    layout = _layout()
    store = make_store(RAW, layouts=[layout])
    batch = BlockBatch(
        _keys(2), _rows(_payloads(layout, 2)), layout.tag, positions=[16, 32], groups=[1, 2]
    )
    assert _run(store.store, batch) == [Outcome.OK] * 2
    found = store.records([*_keys(2), *_keys(1, "other")])
    assert found["kind"].tolist() == [1, 1, 0]
    assert found["position"].tolist() == [16, 32, 0]
    assert found["group"].tolist() == [1, 2, 0]
    assert found["raw_length"].tolist() == [layout.nbytes, layout.nbytes, 0]


@pytest.mark.usefixtures("both_kernels")
def test_with_an_integrity_key(make_store: Callable[..., BlockStore]) -> None:
    layout = _layout()
    payloads = _payloads(layout, 5)
    secret = bytes(range(32))
    for codec in sorted(CODECS):
        store = make_store(codec, layouts=[layout], key=secret)
        keys = _keys(5, codec_name(codec))
        batch = BlockBatch(keys, _rows(payloads), layout.tag)
        assert _run(store.store, batch) == [Outcome.OK] * 5
        out = np.zeros_like(payloads)
        assert _run(store.load, BlockBatch(keys, _rows(out), layout.tag)) == [Outcome.OK] * 5
        assert np.array_equal(out, _expected(layout, codec, payloads))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_many_blocks_of_every_size_at_once(
    make_store: Callable[..., BlockStore], both_kernels: bool, codec: int
) -> None:
    """More than a window, more than a part, more than the memory for blocks of unknown length."""
    layout = _layout(layers=8, pages=4, tokens=16, heads=4, dim=64)
    count = 96 if both_kernels else 6  # numpy takes its time
    payloads = _payloads(layout, 8)[np.arange(count) % 8]
    payloads[:, :8] = np.arange(count, dtype=np.uint64)[:, None].view(np.uint8) & 0x3F
    store = make_store(codec, layouts=[layout])
    batch = BlockBatch(_keys(count), _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * count
    out = np.zeros_like(payloads)
    assert (
        _run(store.load, BlockBatch(_keys(count), _rows(out), layout.tag)) == [Outcome.OK] * count
    )
    some = np.arange(0, count, 13)
    assert np.array_equal(out[some], _expected(layout, codec, payloads[some]))


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("codec", [RAW, LOSSLESS, FP8])
def test_a_store_that_is_full_keeps_what_it_has(
    make_store: Callable[..., BlockStore], codec: int
) -> None:
    layout = _layout(layers=8, pages=4, tokens=16, heads=4, dim=64)
    payloads = _payloads(layout, 16)
    store = make_store(codec, layouts=[layout], capacity=3 << 20)
    batch = BlockBatch(_keys(16), _rows(payloads), layout.tag)
    outcomes = _run(store.store, batch)
    assert Outcome.FULL in outcomes
    kept = [n for n, outcome in enumerate(outcomes) if outcome == Outcome.OK]
    assert kept
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    keys = [_keys(16)[n] for n in kept]
    out = np.zeros_like(payloads[kept])
    assert _run(store.load, BlockBatch(keys, _rows(out), layout.tag)) == [Outcome.OK] * len(kept)
    assert np.array_equal(out, _expected(layout, codec, payloads[kept]))


@pytest.mark.parametrize("codec", [RAW, LOSSLESS, FP8])
def test_what_would_be_restored_slowly_is_a_miss(
    make_store: Callable[..., BlockStore], both_kernels: bool, codec: int
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 3)
    store = make_store(codec, layouts=[layout])
    batch = BlockBatch(_keys(3), _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * 3
    here = both_kernels or codec == RAW
    assert store.lookup([*_keys(3), bytes(32)]).tolist() == [Lookup.HIT * here] * 3 + [Lookup.MISS]
    # It is there all the same, for who insists.
    assert _run(store.store, batch) == [Outcome.PRESENT] * 3
    out = np.zeros_like(payloads)
    assert _run(store.load, BlockBatch(_keys(3), _rows(out), layout.tag)) == [Outcome.OK] * 3


@pytest.mark.usefixtures("both_kernels")
def test_a_store_without_memory_to_encode_in_ends(
    make_store: Callable[..., BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 4)
    store = make_store(1, layouts=[layout])

    def none_left(size: int) -> Payloads:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "io_memory", none_left)
        batch = BlockBatch(_keys(4), _rows(payloads), layout.tag)
        assert _run(store.store, batch) == [Outcome.FAILED] * 4
    assert store.queue()["pending_bytes"] == 0
    batch = BlockBatch(_keys(4), _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * 4


@pytest.mark.usefixtures("both_kernels")
def test_what_cannot_be_accounted_for_ends_all_the_same(
    make_store: Callable[..., BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 300)
    store = make_store(FP8, layouts=[layout])

    def none_left(codec: int) -> bool:
        raise MemoryError

    monkeypatch.setattr(store._policy.guard, "wants", none_left)
    batch = BlockBatch(_keys(300), _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * 300
    out = np.zeros_like(payloads)
    assert _run(store.load, BlockBatch(_keys(300), _rows(out), layout.tag)) == [Outcome.OK] * 300


@pytest.mark.usefixtures("both_kernels")
def test_closing_ends_stores_of_unknown_length(make_store: Callable[..., BlockStore]) -> None:
    layout = _layout(layers=8, pages=4, tokens=16, heads=4, dim=64)
    payloads = _payloads(layout, 64)
    store = make_store(1, layouts=[layout])
    outcomes: list[int] = []
    ended = threading.Event()

    def done(job: Job) -> None:
        outcomes.extend(job.outcomes.tolist())
        ended.set()

    store.store(BlockBatch(_keys(64), _rows(payloads), layout.tag), done)
    assert store.drain(30, cancel=True)
    assert ended.wait(1)
    assert set(outcomes) <= {Outcome.OK, Outcome.CANCELLED}
    found = (make_store(layouts=[layout]).sizes(_keys(64)) >= 0).tolist()
    assert found == [outcome == Outcome.OK for outcome in outcomes]


@pytest.mark.usefixtures("both_kernels")
def test_a_store_that_must_be_exact_does_not_see_what_is_not(
    make_store: Callable[..., BlockStore],
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 4)
    keys = _keys(4)
    lossy = make_store(FP8, layouts=[layout])
    assert _run(lossy.store, BlockBatch(keys, _rows(payloads), layout.tag)) == [Outcome.OK] * 4
    policy = CodecPolicy.fixed("raw")
    policy.exact = True
    exact = make_store(layouts=[layout], policy=policy)
    assert not exact.lookup(keys).any()
    out = np.zeros_like(payloads)
    assert _run(exact.load, BlockBatch(keys, _rows(out), layout.tag)) == [Outcome.MISSING] * 4
    assert _run(exact.store, BlockBatch(keys, _rows(payloads), layout.tag)) == [Outcome.OK] * 4
    again = make_store(layouts=[layout], policy=policy)
    assert _run(again.load, BlockBatch(keys, _rows(out), layout.tag)) == [Outcome.OK] * 4
    assert np.array_equal(out, payloads)


@pytest.mark.parametrize("codec", [RAW, FP8])
def test_what_a_codec_makes_small_is_read_by_as_many_tasks(
    make_store: Callable[..., BlockStore], monkeypatch: pytest.MonkeyPatch, codec: int
) -> None:
    layout = _layout(layers=4, pages=4, tokens=16)  # 128 KiB
    store = make_store(codec, layouts=[layout])
    payloads = _payloads(layout, 64)
    keys = _keys(64)
    batch = BlockBatch(keys, _rows(payloads), layout.tag)
    assert _run(store.store, batch) == [Outcome.OK] * 64
    monkeypatch.setattr("lifeboat_cache.store.load_plan._LEAST_READ_BYTES", 1 << 16)
    submit = store._executor.submit
    tasks: list[Any] = []

    def submitted(some: Sequence[Any]) -> None:
        tasks.extend(some)
        submit(some)

    monkeypatch.setattr(store._executor, "submit", submitted)
    back = np.zeros_like(payloads)
    assert _run(store.load, BlockBatch(keys, _rows(back), layout.tag)) == [Outcome.OK] * 64
    assert len(tasks) in (3, 4)  # 8 MiB by three threads


def test_what_is_stored_is_waited_for_while_kernels_are_loaded(
    make_store: Callable[..., BlockStore],
    kernels_on: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    layout = _layout()
    payloads = _payloads(layout, 4)
    batch = BlockBatch(_keys(4), _rows(payloads), layout.tag)
    first = make_store(FP8, layouts=[layout])
    assert _run(first.store, batch) == [Outcome.OK] * 4
    first.close()
    there = threading.Event()

    def slowly(home: Path | None = None) -> bool:
        there.wait(30)
        monkeypatch.setattr(kernels, "_ready", True)
        return True

    monkeypatch.setattr(kernels, "_ready", False)
    monkeypatch.setattr(kernels, "load", slowly)
    monkeypatch.setattr(keeper, "_KERNELS_S", 0.01)
    stores = [BlockStore(_NAMESPACE, [FilesystemTarget(tmp_path / name)]) for name in ("kv", "no")]
    later, empty = stores
    try:
        later.describe(layout)
        assert empty.wait_recovered(10)  # there is nothing to wait for
        while len(later) < 4:
            time.sleep(0.01)
        assert not later.wait_recovered(0.3)
        assert set(later.lookup(_keys(4)).tolist()) == {Lookup.RETRY}
        there.set()
        assert later.wait_recovered(10)
        assert set(later.lookup(_keys(4)).tolist()) == {Lookup.HIT}
        out = np.zeros_like(payloads)
        assert _run(later.load, BlockBatch(_keys(4), _rows(out), layout.tag)) == [Outcome.OK] * 4
    finally:
        there.set()
        for store in stores:
            store.close()
