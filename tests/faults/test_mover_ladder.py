"""A ladder whose first target hangs: the second takes over, and the first is taken back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import agent_home, until
from faultkit.disks import EVERYTHING_HANGS, FaultyDisk
from published import published_targets

from lifeboat_cache.config import load_config
from lifeboat_cache.interface import Namespace, Outcome, Store, open_block_store
from lifeboat_cache.testing import StoreDriver

OK = Outcome.OK


@pytest.fixture
def store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel_home: Path,
    faulty: FaultyDisk,
    namespace: Namespace,
) -> Iterator[Store]:
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        (home / "lifeboat.yaml").write_text(
            "telemetry: {prometheus: {port: 0}}\ndashboard: {enabled: false}\n"
            "storage:\n"
            "  fallback_local: {enabled: false}\n"
            "  tiers:\n"
            f"    - {{name: share, type: filesystem, path: {faulty.root}, min_free_gb: 0,"
            " timeout_s: 1s}\n"
            f"    - {{name: local, type: filesystem, path: {tmp_path / 'local'}, min_free_gb: 0}}\n"
        )
        opened = open_block_store(load_config().config, namespace)
        yield opened
        faulty.rules()
        faulty.release()
        opened.close(1.0)


def test_first_target_hangs_and_returns(store: Store, faulty: FaultyDisk) -> None:
    driver, home = StoreDriver(store), Path(os.environ["LIFEBOAT_CACHE_HOME"])
    until(lambda: store.targets() and store.targets()[0].writing, "the first target")
    assert driver.store(range(16)) == [OK] * 16
    assert store.targets()[0].blocks == 16
    assert store.targets()[0].counters.bytes_written == 16 * driver.size
    faulty.rules(*EVERYTHING_HANGS)
    driver.load([0])
    driver.store([100])
    until(lambda: not store.targets()[0].writing, "the first target to be given up")
    assert driver.store(range(200, 216)) == [OK] * 16
    assert driver.load(range(200, 216)) == [OK] * 16
    assert OK not in driver.load(range(16))
    # This process says so, and none of its threads waits for that target.
    until(lambda: not published_targets(home)["share"]["writing"], "the state to be published")
    assert [command for command in faulty.waiting() if b"--mover" not in command] == []
    faulty.rules()
    faulty.release()
    until(lambda: store.targets()[0].writing, "the first target to be taken back")
    until(lambda: driver.load(range(16)) == [OK] * 16, "its blocks")
    assert driver.load(range(200, 216)) == [OK] * 16
