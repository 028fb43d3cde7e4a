"""SGLang's own failure injector, and storage that fails or is slow."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sglang_rig import Case, Restored, Rig

from lifeboat_cache.integrations import sglang_windows
from lifeboat_cache.integrations.sglang_moves import Mover, Pages
from lifeboat_cache.interface import (
    BlockBuffers,
    BlockStore,
    Namespace,
    block_keys,
)
from lifeboat_cache.targets.filesystem import FilesystemTarget

Attach = Callable[..., Rig]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(pages=300), id="kv"),
        pytest.param(Case(pages=200, mamba=True, layout="page_first"), id="hybrid"),
        pytest.param(Case(pages=300, zero_copy=False), id="copies"),
    ],
)
def test_injected_failures_and_delays_give_no_wrong_byte_and_no_hang(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    rig = attach(case)
    assert type(rig.backend).__name__ == "HiCacheStorageFailureInjector"
    found: list[Restored] = []
    for turn in range(25):
        if turn % 2 == 0:
            rig.store()
        found.append(rig.restore())
    assert all(one.same for one in found)
    assert any(one.loaded_pages == case.pages for one in found)
    assert any(one.loaded_pages < case.pages for one in found)


def test_a_disk_that_fails_is_a_miss_and_never_an_error(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(pages=20)
    rig = attach(case)
    rig.ready()

    def no_writer(self: FilesystemTarget, namespace: Namespace) -> object:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(FilesystemTarget, "writer", no_writer)
        assert rig.store() == 0
        assert rig.restore() == Restored(0, 0, same=True, state=False)


def _pages(buffers: list[bytearray], first: int = 0) -> Pages:
    hashes = [f"{number:064x}" for number in range(first, first + len(buffers))]
    return Pages(
        hashes,
        block_keys([one.encode() for one in hashes]),
        BlockBuffers.from_buffers(buffers),
        1,
        0,
    )


@pytest.fixture
def block_store(tmp_path: Path) -> BlockStore:
    store = BlockStore(
        Namespace.from_identity({"test": 1}),
        [FilesystemTarget(tmp_path / "kv")],
    )
    assert store.wait_recovered(60)
    return store


def test_a_call_ends_when_its_time_is_up_and_is_counted(
    block_store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_windows, "WINDOW_BYTES", 1 << 20)
    mover = Mover(call_s=0.3)
    buffers = [bytearray([number]) * (1 << 19) for number in range(40)]
    original = block_store.store

    def slowly(*args: object, **kwargs: object) -> object:
        time.sleep(0.1)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(block_store, "store", slowly)
    done = mover.store(block_store, _pages(buffers))
    kept = int(np.flatnonzero(~done)[0])
    assert 0 < kept < 40
    assert done[:kept].all()
    assert not done[kept:].any()
    assert mover.moves.totals()["calls_cut_short"] == 1
    monkeypatch.undo()
    back = [bytearray(1 << 19) for _ in range(40)]
    loaded = Mover().load(block_store, _pages(back))
    assert loaded.tolist() == done.tolist()
    assert back[:kept] == buffers[:kept]
    block_store.close()


def test_a_load_does_not_go_on_behind_a_page_that_is_missing(
    block_store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_windows, "WINDOW_BYTES", 1 << 20)
    mover = Mover()
    buffers = [bytearray([number]) * (1 << 19) for number in range(40)]
    assert mover.store(block_store, _pages(buffers[:7])).all()
    assert mover.store(block_store, _pages(buffers[8:], first=8)).all()
    back = [bytearray(1 << 19) for _ in range(40)]
    done = mover.load(block_store, _pages(back))
    assert done[:7].all()
    assert not done[7]
    assert mover.moves.totals()["load_pages"] < 20
    block_store.close()
