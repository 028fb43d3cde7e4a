"""Fixtures of the adapter's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devkit.shell import heed_interrupts
from suites import compiled_kernels
from vllm_tiering import Engine

from lifeboat_cache.agent import AgentState, AgentStatus
from lifeboat_cache.integrations import vllm_namespace

heed_interrupts()

OpenEngine = Callable[..., Engine]

ROW = 64 << 10


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
    """LifeboatCache's home, which does not exist yet."""
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    # Another test of this process may have loaded vLLM's plugins, as an engine does.
    monkeypatch.setattr(vllm_namespace, "_inside_engine", lambda: False)
    return tmp_path / "home"


@pytest.fixture
def engine(home: Path) -> Iterator[OpenEngine]:
    """A function that starts vLLM's real tiering manager with a tier of ours."""
    opened: list[Engine] = []

    def start(**options: Any) -> Engine:
        tier = {
            "type": "LifeboatTier",
            "module_path": "lifeboat_cache.integrations.vllm_tier",
            **options.pop("tier", {}),
        }
        found = Engine(tier, row_bytes=options.pop("row_bytes", ROW), **options)
        opened.append(found)
        return found

    yield start
    for one in opened:
        one.shutdown()
