"""Movers that the agent starts, as an adapter's store asks for them; the agent dies too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import agent_home, gone, running, until
from faultkit.disks import EVERYTHING_HANGS, FaultyDisk

from lifeboat_cache.config import load_config
from lifeboat_cache.interface import Namespace, Outcome, Store, open_block_store
from lifeboat_cache.mover.places import wants
from lifeboat_cache.testing import StoreDriver

OK = Outcome.OK


@pytest.fixture
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path, faulty: FaultyDisk
) -> Iterator[Path]:
    with agent_home(tmp_path, monkeypatch, kernel_home) as made:
        (made / "lifeboat.yaml").write_text(
            "telemetry: {prometheus: {port: 0}}\ndashboard: {enabled: false}\n"
            "storage:\n"
            "  fallback_local: {enabled: false}\n"
            "  tiers:\n"
            f"    - {{name: share, type: filesystem, path: {faulty.root}, min_free_gb: 0,"
            " timeout_s: 2s}\n"
        )
        yield made
        faulty.rules()
        faulty.release()


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    opened: list[Store] = []
    yield opened
    for store in opened:
        store.close(1.0)


def mover_of(store: Store) -> int:
    pid = next((target.facts["mover"] for target in store.targets() if "mover" in target.facts), 0)
    assert isinstance(pid, int)
    return pid


def test_agent_and_movers_are_killed_in_the_middle_of_jobs(
    home: Path, stores: list[Store], faulty: FaultyDisk, namespace: Namespace
) -> None:
    store = open_block_store(load_config().config, namespace)
    stores.append(store)
    # A FUSE file system is none that is known to be local: no thread here touches it.
    until(lambda: mover_of(store), "the mover")
    driver = StoreDriver(store)
    assert store.wait_recovered(60), store.reason
    assert driver.store(range(16)) == [OK] * 16
    first_agent, first_mover = running(home), mover_of(store)
    os.kill(first_agent, signal.SIGKILL)
    # The mover goes on without it.
    assert driver.store(range(16, 32)) == [OK] * 16
    assert driver.load(range(32)) == [OK] * 32
    assert mover_of(store) == first_mover
    until(lambda: running(home) != first_agent, "another agent")
    assert not gone(first_mover)
    # Both at once, with jobs under way.
    good = set(range(32))
    agent, mover = running(home), mover_of(store)
    for number in range(100, 130):
        if number == 110:
            os.kill(mover, signal.SIGKILL)
            os.kill(agent, signal.SIGKILL)
        if driver.store([number]) == [OK]:
            good.add(number)
    until(lambda: mover_of(store) not in (0, mover) and store.usable, "a third mover")
    until(lambda: driver.load(sorted(good)) == [OK] * len(good), "all that was stored")
    assert len(wants(home)) == 1


def test_agent_never_touches_a_target_that_hangs(
    home: Path, stores: list[Store], faulty: FaultyDisk, namespace: Namespace
) -> None:
    faulty.rules(*EVERYTHING_HANGS)
    store = open_block_store(load_config().config, namespace)
    stores.append(store)
    agent = running(home)
    until(lambda: mover_of(store), "the mover")
    faulty.wait_hanging()
    # It ends at once when it is told to: none of its threads is stuck.
    os.kill(agent, signal.SIGTERM)
    until(lambda: gone(agent), "the end of the agent")
    assert store.close()
