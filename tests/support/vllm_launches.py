"""vLLM servers of one home directory, one after the other."""

from __future__ import annotations

import json
import time
from pathlib import Path

from long_prompt import long_prompt
from vllm_server import Completion, StartServer, VllmServer

__all__ = ["CHUNK", "PROMPT", "Launches", "full_chunks", "wait_until_stored"]

CHUNK = 256  # engine.native_block_tokens; the CPU platform's block has 128 tokens

EXPLICIT = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 512 << 20,
        "block_size": CHUNK,
        "secondary_tiers": [
            {"type": "LifeboatTier", "module_path": "lifeboat_cache.integrations.vllm_tier"}
        ],
    },
}

# 4,195 tokens: the last chunk boundary is also the last boundary of a block. vLLM's own
# hit and a restored one then compute the same tokens, and bfloat16 rounds them the same way.
PROMPT = long_prompt(49)


class Launches:
    """Servers of one home, switched on by the variable or by explicit flags."""

    def __init__(self, start: StartServer, home: Path, *, explicit: bool = False) -> None:
        self._start = start
        self.home = home
        self.env = {"LIFEBOAT_CACHE_HOME": str(home)}
        self.args = ["--kv-transfer-config", json.dumps(EXPLICIT)] if explicit else []
        home.mkdir(mode=0o700, exist_ok=True)
        self.configure("")
        if not explicit:
            self.env["LIFEBOAT_CACHE"] = "1"

    def configure(self, text: str) -> None:
        """Write lifeboat.yaml. The CPU tier is small, for it is touched at every start."""
        (self.home / "lifeboat.yaml").write_text(
            f"engine: {{native_cpu_gb: 0.5}}\nagent: {{autostart: false}}\n{text}"
        )

    def __call__(self, *args: str) -> VllmServer:
        return self._start(env=self.env, args=[*self.args, *args])


def full_chunks(completion: Completion) -> int:
    return (completion.prompt_tokens - 1) // CHUNK


def wait_until_stored(server: VllmServer, chunks: int) -> None:
    deadline = time.monotonic() + 60
    while server.metric("lifeboat_blocks_stored_total") < chunks:
        assert time.monotonic() < deadline, "the prompt's chunks were not stored"
        time.sleep(0.2)
