"""``lifeboat-cache status`` and the agent's metrics beside real engines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from long_prompt import long_prompt
from prometheus_client.parser import text_string_to_metric_families
from vllm_server import StartServer

pytestmark = pytest.mark.engine

TOKENS = 1024


def until(ask: Callable[[], Any], right: Callable[[Any], bool]) -> Any:
    """Ask again until the answer is right; processes publish every 2 s."""
    give_up = time.monotonic() + 300
    while not right(answer := ask()):
        assert time.monotonic() < give_up, f"still {answer}"
        time.sleep(0.2)
    return answer


def test_tokens_served_are_what_vllm_says_and_survive_a_kill(
    start_server: StartServer, home: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = home / "lifeboat.yaml"
    config.write_text(
        f"telemetry: {{prometheus: {{port: {port}}}}}\n"
        # However full the disk of this machine is.
        "storage: {fallback_local: {min_free_gb: 0}}\n"
        "engine: {native_cpu_gb: 0.5}\n"
    )
    config.chmod(0o600)
    options = {"env": {"LIFEBOAT_CACHE_HOME": str(home), "LIFEBOAT_CACHE": "1"}}

    def status() -> Any:
        run = subprocess.run(
            [sys.executable, "-m", "lifeboat_cache.cli.main", "status", "--json"],
            env={**os.environ, "LIFEBOAT_CACHE_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode in (0, 1), run.stderr
        return json.loads(run.stdout)

    def served() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "lifeboat_node_served_tokens_total"
        )

    prompt = long_prompt(14)
    first = start_server(**options)
    assert first.complete(prompt).cached_tokens == 0
    found = until(status, lambda now: now["totals"]["stored_blocks"] == TOKENS / 256)
    (engine,) = found["processes"]
    assert engine["engine"]["name"] == "vllm"
    assert engine["engine"]["version"]
    assert engine["state"] == "ready"
    assert engine["counts"]["served_tokens"] == 0
    assert found["agent"] is not None
    assert found["problems"] == []
    first.stop(signal.SIGTERM)

    second = start_server(**options)
    assert second.complete(prompt).cached_tokens == TOKENS
    said = second.metric("vllm:prompt_tokens_cached_by_source_total", source="disk")
    assert said == TOKENS
    until(status, lambda now: now["totals"]["served_tokens"] == said)
    until(served, lambda now: now == said)
    second.stop(signal.SIGKILL)
    found = until(status, lambda now: now["processes"] == [])
    assert found["totals"]["served_tokens"] == said
    assert found["totals"]["stored_blocks"] == TOKENS / 256
    assert served() == said
    subprocess.run(
        [sys.executable, "-m", "lifeboat_cache.cli.main", "agent", "--stop"],
        env={**os.environ, "LIFEBOAT_CACHE_HOME": str(home)},
        check=True,
        capture_output=True,
    )
