"""On a real server: KV of an adapter is served to the same content only."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import tiny_llama
from tiny_adapter import write_adapter
from vllm_server import StartServer, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.full]

# The tokenizer makes a token of each byte; chunks of 256 tokens.
PROMPT = "".join(chr(97 + number * 7 % 26) for number in range(1200))
FULL_CHUNKS = 4


def wait_until_stored(server: VllmServer, chunks: int) -> None:
    deadline = time.monotonic() + 60
    while server.metric("lifeboat_blocks_stored_total") < chunks:
        assert time.monotonic() < deadline, "the prompts' chunks were not stored"
        time.sleep(0.2)


def test_a_changed_adapter_at_the_same_path_finds_nothing_and_the_same_one_everything(
    start_server: StartServer, tmp_path: Path, home: Path
) -> None:
    model = tiny_llama.write(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter")
    (home / "lifeboat.yaml").write_text("engine: {native_cpu_gb: 0.5}\nagent: {autostart: false}\n")

    def start() -> VllmServer:
        return start_server(
            model=model,
            env={"LIFEBOAT_CACHE_HOME": str(home), "LIFEBOAT_CACHE": "1"},
            args=["--max-model-len", "2048", "--enable-lora", "--lora-modules", f"ad={adapter}"],
        )

    server = start()
    base = server.complete(PROMPT)
    adapted = server.complete(PROMPT, model="ad")
    assert base.cached_tokens == adapted.cached_tokens == 0
    wait_until_stored(server, 2 * FULL_CHUNKS)
    server.stop(signal.SIGKILL)

    server = start()
    again = server.complete(PROMPT, model="ad")
    assert again.cached_tokens >= 256 * FULL_CHUNKS
    server.stop(signal.SIGKILL)

    write_adapter(adapter, seed=1)
    server = start()
    changed = server.complete(PROMPT, model="ad")
    assert changed.cached_tokens == 0
    assert server.complete(PROMPT).cached_tokens >= 256 * FULL_CHUNKS, "the base model's is shared"
