"""The ground that our tests stand on: vLLM's own fs tier, restarted on this machine.

When this fails, the environment, the CPU plugin or the harness is broken, not
LifeboatCache. It says nothing of LifeboatCache, and so it is left to full runs.
"""

import json
import signal
import time
from pathlib import Path

import pytest
from long_prompt import long_prompt
from vllm_server import StartServer, shm_regions

pytestmark = [pytest.mark.engine, pytest.mark.full]


def _stored(directory: Path) -> int:
    return sum(1 for _ in directory.rglob("*.bin"))


def test_prompt_is_restored_after_kill_and_nothing_is_left_behind(
    start_server: StartServer, tmp_path: Path
) -> None:
    store = tmp_path / "kv"
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 256 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": str(store)}],
        },
    }
    args = ["--kv-transfer-config", json.dumps(transfer)]
    regions = shm_regions()
    prompt = long_prompt(16)

    first = start_server(args=args)
    cold = first.complete(prompt)
    repeat = first.complete(prompt)
    chunks = cold.prompt_tokens // 128
    assert cold.cached_tokens == 0
    assert repeat.cached_tokens >= (chunks - 1) * 128
    deadline = time.monotonic() + 60
    while _stored(store) < chunks and time.monotonic() < deadline:
        time.sleep(0.1)
    leaked = first.stop(signal.SIGKILL)
    assert len(leaked) == 1, "kill -9 leaves vLLM's region, which the harness removes"

    second = start_server(args=args)
    restored = second.complete(prompt)
    assert restored.cached_tokens >= 0.95 * chunks * 128
    assert restored.text == repeat.text
    assert second.metric("vllm:external_prefix_cache_hits_total") == restored.cached_tokens
    second.stop(signal.SIGINT)
    assert shm_regions() <= regions
