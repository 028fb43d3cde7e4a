"""Fixtures of the adapter's tests."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from devkit.shell import heed_interrupts
from sglang_rig import Case, Rig, prepare
from suites import compiled_kernels

from lifeboat_cache.agent import AgentState, AgentStatus

heed_interrupts()

Attach = Callable[..., Rig]

#: Exact: these tests compare what comes back byte for byte.
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


@pytest.fixture(autouse=True)
def _weights_are_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that another test has changed are not changed in this one."""
    monkeypatch.setattr("lifeboat_cache.integrations.sglang_epoch._has_changed", False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LifeboatCache's home, with a configuration that stores exactly."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "lifeboat.yaml").write_text(CONFIG)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    return home


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random model, for which this process is prepared."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang: run `python3 tools/dev.py test sglang`")
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama.write(directory)
    prepare(directory)
    return directory


@pytest.fixture
def attach(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """A function that attaches our backend to SGLang's real controller and host pools."""
    # The model was made after this process had started, which a server would refuse.
    monkeypatch.setattr("lifeboat_cache.integrations.sglang_identity.process_start_time", time.time)
    with ExitStack() as stack:

        def open_rig(case: Case | None = None, **options: Any) -> Rig:
            return stack.enter_context(Rig(case or Case(), **options))

        yield open_rig
