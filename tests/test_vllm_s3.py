"""A real vLLM server restores on one node what another has computed, through a bucket only."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents import agent_home, until
from published import published_targets
from s3_server import S3Server
from vllm_launches import CHUNK, PROMPT, full_chunks, wait_until_stored
from vllm_server import StartServer, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.full]


class Node:
    """A home directory of its own; the bucket is all that it shares."""

    def __init__(self, home: Path, start: StartServer, s3: S3Server, bucket: str) -> None:
        self.home = home
        self._start = start
        self._env = {
            "LIFEBOAT_CACHE": "1",
            "LIFEBOAT_CACHE_HOME": str(home),
            **s3.environment(),
        }
        tier = {"name": "archive", "type": "s3", "bucket": bucket, "endpoint_url": s3.endpoint}
        document = {
            "storage": {"tiers": [tier], "fallback_local": {"enabled": False}},
            "telemetry": {"prometheus": {"port": 0}},
            "dashboard": {"enabled": False},
            "engine": {"native_cpu_gb": 0.5},
        }
        (home / "lifeboat.yaml").write_text(json.dumps(document))  # JSON is YAML

    def serve(self) -> VllmServer:
        # In float32 a text does not depend on how many tokens are computed together.
        server = self._start(env=self._env, args=["--dtype", "float32"])
        until(self._ready, "the bucket in use")
        return server

    def _ready(self) -> bool:
        found = published_targets(self.home).get("archive")
        return found is not None and found["state"] == "ready"


@pytest.fixture
def homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path
) -> Iterator[list[Path]]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        yield [
            stack.enter_context(agent_home(tmp_path / name, monkeypatch, kernel_home))
            for name in ("a", "b")
        ]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ends", "is-killed"])
def test_prompt_is_restored_on_a_node_that_shares_only_the_bucket(
    start_server: StartServer, s3: S3Server, homes: list[Path], how: signal.Signals
) -> None:
    bucket = s3.new_bucket()
    nodes = [Node(home, start_server, s3, bucket) for home in homes]
    server = nodes[0].serve()
    cold = server.complete(PROMPT)
    assert cold.cached_tokens == 0
    chunks = full_chunks(cold)
    wait_until_stored(server, chunks)
    server.stop(how)

    def uploaded() -> bool:
        return sum(s3.objects(bucket).values()) > chunks * CHUNK * 1000

    until(uploaded, "the blocks in the bucket")
    until(lambda: not list((nodes[0].home / "s3").rglob("*.segment")), "the end of the upload")
    # Nothing of the first node is left.
    shutil.rmtree(nodes[0].home)

    server = nodes[1].serve()
    restored = server.complete(PROMPT)
    assert restored.cached_tokens == chunks * CHUNK
    assert restored.text == cold.text
    assert server.metric("lifeboat_blocks_loaded_total") == chunks
    assert server.metric("lifeboat_load_blocks_failed_total") == 0
    server.stop(signal.SIGINT)
