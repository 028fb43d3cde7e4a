"""Fixtures of the tests with mlx-lm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from devkit.shell import heed_interrupts
from suites import compiled_kernels

from lifeboat_cache.agent import AgentState, AgentStatus
from lifeboat_cache.mlx import PersistentPromptCache

heed_interrupts()

Open = Callable[..., PersistentPromptCache]

CONFIG = """\
agent: {autostart: false}
storage:
  fallback_local: {min_free_gb: 1}
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
    """LifeboatCache's home."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "lifeboat.yaml").write_text(CONFIG)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    return home


@pytest.fixture
def open_cache(home: Path) -> Iterator[Open]:
    """Opens prompt caches that are closed after the test."""
    with ExitStack() as stack:

        def make(model: Any, tokenizer: Any = None, **options: Any) -> PersistentPromptCache:
            return stack.enter_context(PersistentPromptCache(model, tokenizer, **options))

        yield make
