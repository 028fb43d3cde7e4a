"""``lifeboat-cache selftest sglang``."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.integrations import sglang_selftest
from lifeboat_cache.selftest import Report

pytest.importorskip("sglang")


def run() -> Report:
    return sglang_selftest.run(argparse.Namespace(config=None, keep=False))


def statuses(report: Report) -> dict[str, str]:
    return {step.name: step.status for step in report.steps}


@pytest.fixture
def _no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process takes half a minute to import SGLang."""

    def skip(self: Any) -> str:
        raise sglang_selftest._SkippedError("left out")

    monkeypatch.setattr(sglang_selftest._SelfTest, "_restore", skip)


def test_everything_works_with_this_sglang_and_nothing_is_left(home: Path) -> None:
    report = run()
    assert [step for step in report.steps if step.status != "ok"] == []
    steps = [step.name for step in report.steps]
    assert len(steps) == (9 if importlib.util.find_spec("mlx") is None else 10)
    assert report.facts["tested"] is True
    assert not (home / "kv").exists()
    assert not list(home.parent.glob(".lifeboat-selftest-*"))


@pytest.mark.usefixtures("_no_child")
def test_what_sglang_has_moved_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    monkeypatch.delattr(MambaPoolHost, "_iter_page_tensors")
    monkeypatch.delattr(UnifiedRadixCache, "write_backup_storage")
    monkeypatch.setattr(
        hicache_storage.HiCacheStorage, "batch_exists", lambda self, keys, extra, more: 0
    )
    report = run()
    found = {step.name: step for step in report.steps}
    assert found["interface"].status == "failed"
    said = " ".join((found["interface"].summary, *found["interface"].details))
    assert "MambaPoolHost._iter_page_tensors" in said
    assert "batch_exists with self, keys, extra, more" in said
    assert "write_backup_storage" in found["hooks"].summary
    assert "LIFEBOAT_CACHE=0" in found["hooks"].remedy


@pytest.mark.usefixtures("_no_child")
def test_wrong_bytes_are_noticed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lifeboat_cache.integrations.sglang_page_calls import PageCalls

    monkeypatch.setattr(
        PageCalls,
        "load",
        lambda self, store, pool, hashes, buffers: [True] * len(hashes),
    )
    found = statuses(run())
    assert (found["interfaces"], found["flipped byte"]) == ("failed", "failed")


@pytest.mark.usefixtures("_no_child")
def test_what_is_wrong_with_the_mlx_backend_is_noticed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx")
    from sglang.srt.hardware_backend.mlx.kv_cache import MlxAttentionKVPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    write = MlxAttentionKVPool.set_kv_all_layers
    with monkeypatch.context() as patch:
        patch.setattr(
            MlxAttentionKVPool,
            "set_kv_all_layers",
            lambda self, slots, k, v: write(self, slots, k, k),
        )
        assert statuses(run())["MLX backend"] == "failed"
    monkeypatch.delattr(UnifiedRadixCache, "check_prefetch_progress")
    found = {step.name: step for step in run().steps}["MLX backend"]
    assert found.status == "failed"
    assert "check_prefetch_progress" in found.summary


@pytest.mark.usefixtures("_no_child")
def test_a_store_that_takes_nothing_fails_with_the_reason(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache.targets.filesystem import FilesystemTarget

    def refuse(self: FilesystemTarget) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FilesystemTarget, "probe", refuse)
    report = run()
    found = {step.name: step for step in report.steps}
    assert found["store"].status == "failed"
    assert "No space left on device" in found["store"].summary
    assert found["flipped byte"].status == "skipped"
