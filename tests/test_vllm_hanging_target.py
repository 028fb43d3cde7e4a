"""A real vLLM server with a target that hangs: it goes on, ends, starts, and has it back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import agent_home
from faultkit.disks import EVERYTHING_HANGS, FaultyDisk, faulty_disk
from long_prompt import long_prompt
from published import published_targets
from vllm_launches import CHUNK, full_chunks
from vllm_server import Completion, StartServer, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.full]

_PATIENCE_S = 120.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    with faulty_disk(tmp_path) as made:
        yield made


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path, disk: FaultyDisk
) -> Iterator[Path]:
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        (home / "lifeboat.yaml").write_text(
            "engine: {native_cpu_gb: 0.5}\n"
            "telemetry: {prometheus: {port: 0}}\ndashboard: {enabled: false}\n"
            "storage:\n"
            "  fallback_local: {enabled: false}\n"
            "  tiers:\n"
            # With the deadline that targets have by default: what a slow machine takes long for
            # must not look like a target that hangs.
            f"    - {{name: share, type: filesystem, path: {disk.root}, min_free_gb: 0}}\n"
            f"    - {{name: local, type: filesystem, path: {tmp_path}/local, min_free_gb: 0}}\n"
        )
        yield home


def until(home: Path, condition: Callable[[dict[str, dict[str, Any]]], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = published_targets(home)
        if found and condition(found):
            return
        assert time.monotonic() < deadline, f"it has not happened: {found}"
        time.sleep(0.2)


def only_movers_wait(disk: FaultyDisk) -> None:
    assert disk.hanging()
    assert [command for command in disk.waiting() if b"--mover" not in command] == []


def test_a_target_hangs_and_returns(
    start_server: StartServer, place: Path, disk: FaultyDisk
) -> None:
    prompts = [long_prompt(17, seed=seed) for seed in range(5)]

    def serve() -> VllmServer:
        # In float32 a text does not depend on how many tokens are computed together.
        return start_server(
            env={"LIFEBOAT_CACHE": "1", "LIFEBOAT_CACHE_HOME": str(place)},
            args=["--dtype", "float32"],
        )

    def stored(server: VllmServer, number: int, where: str) -> Completion:
        """A request; its blocks are stored on one target."""
        before = published_targets(place)[where]["stored_blocks"]
        answer = server.complete(prompts[number])
        assert answer.cached_tokens == 0
        wanted = before + full_chunks(answer)
        until(place, lambda found: found[where]["stored_blocks"] >= wanted)
        return answer

    server = serve()
    until(place, lambda found: found["share"]["writing"])
    first = stored(server, 0, "share")

    # It hangs under the running server, which goes on: soon on the other target.
    disk.rules(*EVERYTHING_HANGS)
    server.complete(prompts[1])
    disk.wait_hanging()
    until(place, lambda found: not found["share"]["writing"] and found["local"]["writing"])
    assert published_targets(place)["share"]["reason"]
    second = stored(server, 2, "local")
    only_movers_wait(disk)

    # It ends while a transfer is under way that has not been answered.
    server.stop(signal.SIGTERM)
    assert disk.hanging()

    # Another one starts while nothing answers, has what the other target has, and goes on.
    server = serve()
    again = server.complete(prompts[2])
    assert again.cached_tokens >= full_chunks(second) * CHUNK
    assert again.text == second.text
    stored(server, 3, "local")
    assert not published_targets(place)["share"]["writing"]

    only_movers_wait(disk)

    # It answers again, and is taken back: for new blocks, and with what it had.
    disk.rules()
    disk.release()
    until(place, lambda found: found["share"]["writing"] and found["share"]["state"] == "ready")
    stored(server, 4, "share")
    again = server.complete(prompts[0])
    assert server.metric("lifeboat_load_blocks_failed_total") == 0
    assert again.cached_tokens >= full_chunks(first) * CHUNK
    assert again.text == first.text
    server.stop(signal.SIGTERM)
