"""A store whose configuration changes while it is open."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ladders import only_store

from lifeboat_cache.cli.main import main
from lifeboat_cache.codecs import guard as guard_module
from lifeboat_cache.codecs.guard import Guard
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.names import FP8, LOSSLESS, RAW
from lifeboat_cache.config import load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Namespace,
    Outcome,
    Store,
    block_keys,
    open_block_store,
)
from lifeboat_cache.store import tiered_store

pytestmark = pytest.mark.usefixtures("kernels_on")

SIZE = 2 * 64 * 4 * 64 * 2


def part(role: Any, at: int) -> TensorLayout:
    return TensorLayout(role, "bfloat16", 0, 4, 16, 4, 64, 16 * 512, 512, 128, at)


LAYOUT = KVLayout.of(SIZE, [part("key", 0), part("value", SIZE // 2)])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    monkeypatch.setattr(tiered_store, "_TICK_S", 0.02)
    monkeypatch.setattr(tiered_store, "_COMPANION_S", 0.02)
    return home


def configure(home: Path, codec: str, more: str = "") -> None:
    (home / "new").write_text(
        f"compression: {{ladder: {{local: {codec}}}}}\n"
        f"storage: {{fallback_local: {{min_free_gb: 0}}}}\n{more}"
    )
    os.replace(home / "new", home / "lifeboat.yaml")


Open = Callable[..., BlockStore]


@pytest.fixture
def open_store(home: Path) -> Iterator[Open]:
    opened: list[Store] = []

    def make(**settings: bool) -> BlockStore:
        store = open_block_store(
            LiveConfig(load_config()), Namespace.from_identity({"test": "live"}), **settings
        )
        opened.append(store)
        store.describe(LAYOUT)
        assert store.wait_recovered(60)
        return only_store(store)

    yield make
    for store in opened:
        store.close()


def batch(name: str, count: int = 4) -> tuple[BlockBatch, Any]:
    values = np.random.default_rng(7).standard_normal((count, SIZE // 2)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    payloads = np.ascontiguousarray(bits).view(np.uint8).reshape(count, SIZE)
    keys = block_keys([f"{name}{number}".encode() for number in range(count)])
    return BlockBatch(keys, BlockBuffers.from_buffers(list(payloads)), LAYOUT.tag), payloads


def run(start: Callable[..., Any], blocks: BlockBatch) -> None:
    done = threading.Event()
    job = start(blocks, lambda _: done.set())
    assert done.wait(60)
    assert set(job.outcomes.tolist()) == {Outcome.OK}


def until(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.01)


def status(capsys: pytest.CaptureFixture[str]) -> Any:
    main(["status", "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_next_blocks_follow_the_file_and_the_earlier_ones_stay_readable(
    home: Path, open_store: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(home, "raw")
    store = open_store()
    first, payloads = batch("first")
    run(store.store, first)
    configure(home, "fp8", "engine: {io_workers: 3}\n")
    until(lambda: store._policy.choose(LAYOUT).codec == FP8, "the change")
    second, _ = batch("second")
    run(store.store, second)
    for blocks in (first, second):
        out = np.zeros_like(payloads)
        run(store.load, BlockBatch(blocks.keys, BlockBuffers.from_buffers(list(out)), LAYOUT.tag))
        assert (out == payloads).all() == (blocks is first)

    def shown() -> bool:
        (engine,) = status(capsys)["processes"]
        return bool(engine["counts"]["codecs"].get("fp8", {}).get("decoded_blocks") == 4)

    until(shown, "the counts")
    document = status(capsys)
    (engine,) = document["processes"]
    (choice,) = engine["codecs"]["choices"]
    assert (choice["codec"], choice["reason"]) == ("fp8", "compression.ladder.local is fp8")
    assert engine["config"]["restart"] == ["engine.io_workers"]
    codecs = document["totals"]["codecs"]
    assert codecs["raw"]["encoded_raw_bytes"] == codecs["raw"]["encoded_bytes"] == 4 * SIZE
    assert codecs["fp8"]["encoded_raw_bytes"] == 4 * SIZE
    assert codecs["fp8"]["ratio"] > 1.9

    configure(home, "fp9")
    until(lambda: status(capsys)["problems"], "the problem")
    document = status(capsys)
    assert not document["healthy"]
    (problem,) = document["problems"]
    assert "there is no codec 'fp9'; did you mean 'fp8'?" in problem
    third, _ = batch("third")
    run(store.store, third)
    assert store._policy.choose(LAYOUT).codec == FP8
    configure(home, "raw")
    until(lambda: status(capsys)["healthy"], "its end")
    assert store._policy.choose(LAYOUT).codec == RAW


def test_native_stores_are_exact_whatever_the_ladder_says(
    home: Path, open_store: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(home, "lbq2")
    store = open_store(native=True)
    blocks, payloads = batch("native")
    run(store.store, blocks)
    out = np.zeros_like(payloads)
    run(store.load, BlockBatch(blocks.keys, BlockBuffers.from_buffers(list(out)), LAYOUT.tag))
    assert np.array_equal(out, payloads)
    assert store._policy.choose(LAYOUT).codec in (RAW, LOSSLESS)
    configure(home, "fp8", "engine: {native_codec: ladder}\n")

    def shown() -> bool:
        (engine,) = status(capsys)["processes"]
        return bool(engine["config"]["restart"] == ["engine.native_codec"])

    until(shown, "the change")
    assert store._policy.choose(LAYOUT).codec in (RAW, LOSSLESS)
    store.close()
    assert open_store(native=True)._policy.choose(LAYOUT).codec == FP8


def test_a_codec_that_the_guard_rules_out_gives_way(
    home: Path,
    open_store: Open,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(guard_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(guard_module, "_SHARE", 0)
    configure(home, "fp8")
    store = open_store()
    store._policy.guard = Guard(compare=lambda *_: (0.5, 0.5))
    for number in range(200):
        blocks, _ = batch(f"block {number} ", 1)
        run(store.store, blocks)
        if store._policy.choose(LAYOUT).codec == LOSSLESS:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the guard was not heard")

    def shown() -> bool:
        (engine,) = status(capsys)["processes"]
        (choice,) = engine["codecs"]["choices"]
        return "but fp8 moves 50 % of attention here" in choice["reason"]

    until(shown, "the reason")
    document = status(capsys)
    assert document["healthy"], "that is what the guard is for"
    (guarded,) = [g for g in document["processes"][0]["codecs"]["guard"] if g["codec"] == "fp8"]
    assert guarded["samples"] >= 8
    blocks, payloads = batch("exact now", 1)
    run(store.store, blocks)
    out = np.zeros_like(payloads)
    run(store.load, BlockBatch(blocks.keys, BlockBuffers.from_buffers(list(out)), LAYOUT.tag))
    assert np.array_equal(out, payloads)
