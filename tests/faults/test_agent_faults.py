"""The agent is killed or hangs, its home fails: engines go on storing and loading."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import agent_home, running, until
from faultkit.disks import FaultyDisk

from lifeboat_cache import kernels
from lifeboat_cache.agent import AgentState, agent_status
from lifeboat_cache.config import load_config
from lifeboat_cache.interface import Namespace, Outcome, State, Store, open_block_store
from lifeboat_cache.testing import StoreDriver

OK, PRESENT = Outcome.OK, Outcome.PRESENT

Opened = Callable[[], StoreDriver]


def configure(home: Path, place: Path) -> None:
    (home / "lifeboat.yaml").write_text(
        "storage:\n"
        "  tiers:\n"
        f"    - {{name: one, type: filesystem, path: {place}, min_free_gb: 0}}\n"
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path) -> Iterator[Path]:
    with agent_home(tmp_path, monkeypatch, kernel_home) as made:
        configure(made, tmp_path / "kv")
        yield made


@pytest.fixture
def opened(namespace: Namespace) -> Iterator[Opened]:
    """Opens stores as an adapter does, agent and all."""
    stores: list[Store] = []

    def make() -> StoreDriver:
        stores.append(open_block_store(load_config().config, namespace))
        return StoreDriver(stores[-1])

    yield make
    for store in stores:
        store.close()


def another(home: Path, gone: int) -> None:
    """Wait for an agent that is not the one that has gone."""

    def there() -> bool:
        status = agent_status(home)
        return status.alive and status.pid != gone

    until(there, "another agent")


def test_engines_go_on_while_the_agent_is_killed_again_and_again(
    home: Path, opened: Opened
) -> None:
    driver = opened()
    assert driver.driven.wait_recovered(60)
    first = gone = 0
    for _ in range(1):
        gone = running(home)
        os.kill(gone, signal.SIGKILL)
        for _ in range(10):
            assert driver.store(range(first, first + 8)) == [OK] * 8
            first += 8
            assert driver.load(range(first)) == [OK] * first
        # Somebody starts another one.
        another(home, gone)
    fresh = opened()
    assert fresh.driven.wait_recovered(60)
    assert fresh.load(range(first)) == [OK] * first


def test_engines_go_on_while_the_agent_hangs(home: Path, opened: Opened) -> None:
    driver = opened()
    assert driver.driven.wait_recovered(60)
    pid = running(home)
    os.kill(pid, signal.SIGSTOP)
    try:
        for round_ in range(10):
            numbers = range(round_ * 8, round_ * 8 + 8)
            assert driver.store(numbers) == [OK] * 8
            assert driver.load(range(round_ * 8 + 8)) == [OK] * (round_ * 8 + 8)
        # A new engine starts beside it, and one ends.
        late = opened()
        assert late.driven.wait_recovered(60)
        assert late.load(range(80)) == [OK] * 80
        assert late.store([500]) == [OK]
        assert late.driven.close()
        assert driver.driven.close()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_no_agent_can_be_started(home: Path, opened: Opened, tmp_path: Path) -> None:
    (home / "run").mkdir(exist_ok=True)
    (home / "agent.lock").mkdir()  # what it needs is something else
    (home / "agent.log").mkdir()
    driver = opened()
    assert driver.driven.wait_recovered(60)
    assert driver.store(range(8)) == [OK] * 8
    assert driver.load(range(8)) == [OK] * 8
    assert driver.driven.close()
    assert agent_status(home).state is not AgentState.RUNNING


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_home_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    faulty: FaultyDisk,
    tmp_path: Path,
    namespace: Namespace,
    number: int,
) -> None:
    home = faulty.mount / "home"
    home.mkdir(mode=0o700)
    configure(home, tmp_path / "kv")
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    config = load_config().config
    faulty.rules(
        *(
            {"op": op, "do": "error", "errno": number}
            for op in ("create", "mkdir", "write", "rename")
        ),
        {"op": "open", "match": "run|kernels|agent", "do": "error", "errno": number},
    )
    store = open_block_store(config, namespace)
    driver = StoreDriver(store)
    assert store.wait_recovered(60)
    assert store.state is State.READY
    assert driver.store(range(8)) == [OK] * 8
    assert driver.load(range(8)) == [OK] * 8
    assert store.close()


@pytest.mark.parametrize("when", ["open", "start"])
def test_home_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
    faulty: FaultyDisk,
    tmp_path: Path,
    namespace: Namespace,
    when: str,
) -> None:
    # A home directory on a network disk that does not answer; the blocks are on a local one.
    home = faulty.mount / "home"
    home.mkdir(mode=0o700)
    configure(home, tmp_path / "kv")
    with (home / "lifeboat.yaml").open("a") as file:
        file.write("agent: {autostart: false}\n")
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    config = load_config().config
    hang = [
        {"op": op, "match": "home", "do": "hang"}
        for op in ("lookup", "create", "write", "rename", "open", "getattr", "opendir", "mkdir")
    ]
    if when == "start":
        # As in a process that has no kernels yet.
        monkeypatch.setattr(kernels, "_ready", False)
        faulty.rules(*hang)
    store = open_block_store(config, namespace)
    try:
        ready = store.wait_recovered(2 if when == "start" else 60)
        faulty.rules(*hang)
        assert ready, "the store waits for the home directory"
        driver = StoreDriver(store)
        assert driver.store(range(8)) == [OK] * 8
        assert driver.load(range(8)) == [OK] * 8
        assert store.close(timeout=5)
    finally:
        faulty.rules()
        faulty.release()
        store.close()
