"""Real vLLM servers and the agent that they start: kernels, eviction, and who dies when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import agent_home, running
from long_prompt import long_prompt
from stored import algorithms, stored_files
from vllm_server import Completion, StartServer, VllmServer

from lifeboat_cache.agent import agent_status
from lifeboat_cache.checksum import ALGORITHM_XXH3

pytestmark = pytest.mark.engine

CHUNK = 256
CHUNKS = 4  # of long_prompt(14)

# In float32 a text does not depend on how many tokens are computed together.
CHUNK_BYTES = CHUNK * 2 * 23_040

# What copies of blocks that stay may take above the capacity, until their originals go.
COPIES_BYTES = 256 << 20


def until(what: Callable[[], Any], wanted: str, *, timeout_s: float = 600.0) -> Any:
    """Ask until the answer is true."""
    give_up = time.monotonic() + timeout_s
    while not (answer := what()):
        assert time.monotonic() < give_up, f"waited in vain: {wanted}"
        time.sleep(0.2)
    return answer


class Place:
    """A home directory, and servers that use it."""

    def __init__(self, home: Path, start: StartServer) -> None:
        self.home = home
        self._start = start

    def configure(self, **fallback: float) -> None:
        self.home.mkdir(mode=0o700, exist_ok=True)
        document = {
            # However full the disk of this machine is, and whoever has the usual port.
            "storage": {"fallback_local": {"min_free_gb": 0, **fallback}},
            "telemetry": {"prometheus": {"port": 0}},
            "engine": {"native_cpu_gb": 0.5},
        }
        (self.home / "lifeboat.yaml").write_text(json.dumps(document))  # JSON is YAML

    def serve(self) -> VllmServer:
        return self._start(
            env={"LIFEBOAT_CACHE": "1", "LIFEBOAT_CACHE_HOME": str(self.home)},
            args=["--dtype", "float32"],
        )

    def status(self) -> Any:
        run = subprocess.run(
            [sys.executable, "-m", "lifeboat_cache.cli.main", "status", "--json"],
            env={**os.environ, "LIFEBOAT_CACHE_HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode in (0, 1), run.stderr
        return json.loads(run.stdout)

    def bytes_on_disk(self) -> int:
        found = 0
        for kind in ("segment", "journal"):
            for path in stored_files(self.home, kind):
                with contextlib.suppress(FileNotFoundError):  # the agent is at work
                    found += path.stat().st_blocks * 512
        return found


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> Iterator[Place]:
    with agent_home(tmp_path, monkeypatch) as home:
        yield Place(home, start_server)


def prompt(seed: int) -> str:
    return long_prompt(14, seed=seed)


def ask(server: VllmServer, seed: int) -> Completion:
    return server.complete(prompt(seed), max_tokens=16)


def stored(server: VllmServer) -> float:
    return server.metric("lifeboat_blocks_stored_total")


def wait_until_stored(server: VllmServer, prompts: int) -> None:
    until(lambda: stored(server) >= prompts * CHUNKS, f"{prompts} prompts are stored")


@pytest.mark.full
def test_kernels_come_while_a_server_runs_and_neither_needs_the_other(place: Place) -> None:
    place.configure()
    server = place.serve()
    cold = {1: ask(server, 1)}
    agent = running(place.home)
    wait_until_stored(server, 1)
    until(lambda: agent_status(place.home).document["kernels"] == "ready", "kernels")

    # The engine takes them up without a restart.
    for seed in range(2, 20):
        cold[seed] = ask(server, seed)
        wait_until_stored(server, seed)
        if ALGORITHM_XXH3 in algorithms(place.home):
            break
        time.sleep(1)
    assert ALGORITHM_XXH3 in algorithms(place.home), "the engine never took up the kernels"

    os.kill(agent, signal.SIGKILL)
    seed = max(cold) + 1
    cold[seed] = ask(server, seed)
    assert ask(server, 1).text == cold[1].text
    wait_until_stored(server, len(cold))
    until(lambda: running(place.home) != agent, "another agent")
    server.stop(signal.SIGKILL)

    server = place.serve()
    for seed in (1, max(cold)):
        restored = ask(server, seed)
        assert restored.cached_tokens == CHUNKS * CHUNK
        assert restored.text == cold[seed].text
    assert server.metric("lifeboat_load_blocks_failed_total") == 0
    found = until(lambda: place.status()["agent"], "the agent in the status")
    assert found is not None
    server.stop(signal.SIGKILL)


@pytest.mark.full
def test_a_server_goes_on_while_its_agent_makes_room(place: Place, kernel_home: Path) -> None:
    capacity = 30 * CHUNK_BYTES
    place.configure(capacity_gb=capacity / 1e9)
    (place.home / "kernels").symlink_to(kernel_home / "kernels")
    server = place.serve()
    cold: dict[int, Completion] = {}
    evicted = 0.0
    at_eviction = 0.0
    give_up = time.monotonic() + 300
    while not at_eviction or stored(server) < at_eviction + 3 * CHUNKS:
        assert time.monotonic() < give_up, f"evicted {evicted} blocks, stored {stored(server)}"
        seed = len(cold) + 1
        cold[seed] = ask(server, seed)
        assert cold[seed].text
        assert place.bytes_on_disk() <= capacity + COPIES_BYTES + CHUNK_BYTES
        (target,) = place.status()["targets"]
        evicted = target["evicted_blocks"]
        if target["reclaimed_bytes"] and not at_eviction:
            at_eviction = stored(server)
    assert evicted > 0
    assert server.metric("lifeboat_load_blocks_failed_total") == 0
    server.stop(signal.SIGKILL)

    server = place.serve()
    tokens = 0
    for seed in (1, *sorted(cold)[-8:]):
        again = ask(server, seed)
        assert again.text == cold[seed].text
        if seed == 1:
            assert again.cached_tokens == 0, "it was used least recently"
        tokens += again.cached_tokens
    assert tokens > 0
    assert server.metric("lifeboat_load_blocks_failed_total") == 0
    server.stop(signal.SIGKILL)
