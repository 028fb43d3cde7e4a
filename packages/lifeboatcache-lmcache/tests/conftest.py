"""Fixtures of the adapter's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from devkit.shell import heed_interrupts
from lmcache_rig import Driver, Memory, plugin
from suites import compiled_kernels

from lifeboat_cache.agent import AgentState, AgentStatus

heed_interrupts()

Open = Callable[..., Driver]

#: Exact: most of these tests compare what comes back byte for byte.
CONFIG = """\
agent: {autostart: false}
storage:
  fallback_local: {min_free_gb: 1}
compression: {ladder: {local: raw}}
"""


@pytest.fixture(scope="session", autouse=True)
def _kernels(pytestconfig: pytest.Config) -> None:
    """Kernels are there, as in production; kept from one run of pytest to the next."""
    compiled_kernels(pytestconfig)


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of this process start no agent."""
    there = AgentStatus(AgentState.RUNNING)
    monkeypatch.setattr("lifeboat_cache.agent.ensure_agent", lambda home, **options: there)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LifeboatCache's home, with a configuration that stores exactly."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "lifeboat.yaml").write_text(CONFIG)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    return home


@pytest.fixture
def memory() -> Iterator[Memory]:
    """LMCache's own memory."""
    made = Memory()
    yield made
    made.close()


@pytest.fixture
def attach(home: Path, memory: Memory) -> Iterator[Open]:
    """Makes adapters, which are closed in the end."""
    made: list[Driver] = []

    def make(**params: object) -> Driver:
        driver = Driver(plugin(memory, **params))
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.adapter.close()
