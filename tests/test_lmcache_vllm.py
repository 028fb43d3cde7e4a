"""vLLM with LMCache and our connector: the server it starts, restarts, kills, sharing."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from long_prompt import long_prompt
from vllm_server import VllmServer, free_port

from lifeboat_cache.integrations.lmcache_leases import ServerPlaces
from lifeboat_cache.integrations.lmcache_starter import server_pid

pytestmark = [pytest.mark.engine, pytest.mark.full]

Launch = Callable[..., VllmServer]

#: 1,111 tokens: four chunks of 256 can be restored.
PROMPT = long_prompt(12)
RESTORABLE = 1024


@pytest.fixture
def home(home: Path) -> Iterator[Path]:
    while True:
        port = free_port()
        if port < 65000 and all(_free(port + step) for step in (1, 2)):
            break
    (home / "lifeboat.yaml").write_text(
        f"engine: {{vllm_mode: lmcache, lmcache_port: {port}, native_cpu_gb: 1}}\n"
        "storage: {fallback_local: {min_free_gb: 1}}\n"
        "compression: {ladder: {local: raw}}\n"
        "agent: {autostart: false}\n"
    )
    yield home
    pid = server_pid(places(home))
    if pid:
        os.kill(pid, signal.SIGKILL)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def launch(model: Path, home: Path, tmp_path: Path) -> Iterator[Launch]:
    made: list[VllmServer] = []

    def start(name: str = "vllm", **options: Any) -> VllmServer:
        environment = {
            "LIFEBOAT_CACHE": "1",
            "LIFEBOAT_CACHE_HOME": str(home),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **options.pop("env", {}),
        }
        server = VllmServer(model, log=tmp_path / f"{name}.log", env=environment, **options)
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        if server._process is not None:
            server.stop(signal.SIGKILL)


def places(home: Path) -> ServerPlaces:
    text = (home / "lifeboat.yaml").read_text()
    return ServerPlaces(home, int(text.partition("lmcache_port: ")[2].partition(",")[0]))


def gone(pid: int, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except OSError:
            return True
        if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.2)
    return False


def shared_memory() -> set[str]:
    """What LMCache has in shared memory, but for living processes of other tests."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if "lmcache" in name
        and not any(part.isdecimal() and Path("/proc", part).exists() for part in name.split("_"))
    }


def test_restart_of_everything_restores_the_prompt(home: Path, launch: Launch) -> None:
    before = shared_memory()
    first = launch()
    cold = first.complete(PROMPT, max_tokens=24)
    assert cold.cached_tokens == 0
    pid = server_pid(places(home))
    assert pid
    first.stop(signal.SIGINT)
    # The server outlives the engine, writes what is queued, and ends.
    assert gone(pid), places(home).log.read_text()
    assert shared_memory() <= before

    second = launch("second")
    warm = second.complete(PROMPT, max_tokens=24)
    assert warm.cached_tokens == RESTORABLE
    assert warm.text == cold.text
    pid = server_pid(places(home))
    second.stop(signal.SIGKILL)
    assert gone(pid)
    assert shared_memory() <= before


def test_two_engines_share_one_server(home: Path, launch: Launch) -> None:
    first = launch("first")
    cold = first.complete(PROMPT, max_tokens=24)
    pid = server_pid(places(home))
    second = launch("second")
    assert server_pid(places(home)) == pid
    warm = second.complete(PROMPT, max_tokens=24)
    assert warm.cached_tokens == RESTORABLE
    assert warm.text == cold.text
    first.stop(signal.SIGINT)
    time.sleep(15)  # more than its grace
    assert server_pid(places(home)) == pid  # the second engine still uses it
    assert second.complete(long_prompt(12, seed=2), max_tokens=4).cached_tokens == 0
    second.stop(signal.SIGINT)
    assert gone(pid)


def test_kills_of_engine_server_and_both(home: Path, launch: Launch) -> None:
    before = shared_memory()
    first = launch("first")
    cold = first.complete(PROMPT, max_tokens=24)
    pid = server_pid(places(home))
    # The engine: its server notices, writes what is queued, and ends.
    first.stop(signal.SIGKILL)
    assert gone(pid)
    assert shared_memory() <= before

    second = launch("second")
    pid = server_pid(places(home))
    # The server: the engine goes on and starts another one.
    os.kill(pid, signal.SIGKILL)
    assert second.complete(long_prompt(4, seed=3), max_tokens=4).text
    end = time.monotonic() + 90
    while server_pid(places(home)) in (0, pid):
        assert time.monotonic() < end, (second.log).read_text()[-4000:]
        time.sleep(0.5)
    again = server_pid(places(home))
    # Both: nothing is left, and what was stored is served by the next ones.
    os.kill(again, signal.SIGKILL)
    second.stop(signal.SIGKILL)
    assert gone(again)
    third = launch("third")
    warm = third.complete(PROMPT, max_tokens=24)
    assert warm.cached_tokens == RESTORABLE
    assert warm.text == cold.text
    pid = server_pid(places(home))
    third.stop(signal.SIGINT)
    assert gone(pid)
    assert shared_memory() <= before
