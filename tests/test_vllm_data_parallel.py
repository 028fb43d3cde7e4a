"""Data-parallel ranks of one real server share what they store, while they run."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from long_prompt import long_prompt
from vllm_server import Completion, StartServer, VllmServer, shm_regions

pytestmark = [pytest.mark.engine, pytest.mark.full]

CHUNK = 256

# See test_vllm_restart: what is computed after a hit and after a restore is the same.
PROMPT = long_prompt(49)


def ask(server: VllmServer, rank: int) -> Completion:
    return server.complete(PROMPT, max_tokens=16, headers={"X-data-parallel-rank": str(rank)})


def test_a_rank_restores_what_another_stored(start_server: StartServer, home: Path) -> None:
    regions = shm_regions()
    (home / "lifeboat.yaml").write_text("engine: {native_cpu_gb: 1}\nagent: {autostart: false}\n")
    server = start_server(
        env={"LIFEBOAT_CACHE": "1", "LIFEBOAT_CACHE_HOME": str(home)},
        args=["--data-parallel-size", "2", "--shutdown-timeout", "20"],
        start_timeout_s=600.0,
    )
    cold = ask(server, 0)
    chunks = (cold.prompt_tokens - 1) // CHUNK
    assert cold.cached_tokens == 0
    hit = ask(server, 0)

    # The other rank knows of the chunks as soon as it has looked at the journal again.
    deadline = time.monotonic() + 120
    while server.metric("lifeboat_blocks_indexed", engine="1") < chunks:
        assert time.monotonic() < deadline, "the other rank never found the chunks"
        server.complete("A", max_tokens=2, headers={"X-data-parallel-rank": "1"})
        time.sleep(0.2)
    restored = ask(server, 1)
    assert restored.cached_tokens == chunks * CHUNK == hit.cached_tokens
    assert restored.text == hit.text
    assert server.metric("lifeboat_blocks_loaded_total", engine="1") == chunks
    assert server.metric("lifeboat_blocks_loaded_total", engine="0") == 0
    assert server.metric("lifeboat_blocks_stored_total", engine="1") == 0
    server.stop(signal.SIGINT)
    assert shm_regions() <= regions
