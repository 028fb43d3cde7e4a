"""The dashboard beside a real SGLang server: its figures are the engine's."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from agents import agent_home
from dashboard_pages import PACKAGE, Pages, until
from long_prompt import long_prompt
from sglang_server import StartSglang
from vllm_server import free_port

pytestmark = [pytest.mark.engine, pytest.mark.full]


def test_figures_are_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path, start_sglang: StartSglang
) -> None:
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        port = free_port()
        (home / "lifeboat.yaml").write_text(
            "telemetry: {prometheus: {port: 0}}\n"
            f"dashboard: {{port: {port}}}\n"
            "storage: {fallback_local: {min_free_gb: 0}}\n"
            "compression: {ladder: {local: lossless}}\n"
        )
        options: Any = {
            "env": {
                "LIFEBOAT_CACHE": "1",
                "LIFEBOAT_CACHE_HOME": str(home),
                "LIFEBOAT_SGLANG_HOST_GB": "1",
                "PYTHONPATH": str(PACKAGE),
            }
        }
        prompt = long_prompt(14)
        pages = Pages(port)
        server = start_sglang(**options)
        first = server.generate(prompt)
        whole = first.prompt_tokens // 64
        facts = until(
            lambda: pages.get("/api/targets")["targets"],
            lambda now: sum(one["stored_blocks"] or 0 for one in now) >= whole,
        )
        assert facts[0]["state"] == "ready"
        ever = until(
            lambda: pages.get("/api/overview")["since_ever"],
            lambda now: now["prompt_tokens"] == first.prompt_tokens,
        )
        assert ever["token_hit_rate"] == 0
        # Raw is what it has until the kernels are loaded.
        (process,) = until(
            lambda: pages.get("/api/processes")["processes"],
            lambda now: {one["codec"] for one in now[0]["codecs"]} == {"lossless"},
        )
        assert process["engine"] == "sglang"
        server.stop(signal.SIGTERM)

        server = start_sglang(**options)
        second = server.generate(prompt)
        assert second.storage_tokens > 0
        asked = first.prompt_tokens + second.prompt_tokens
        ever = until(
            lambda: pages.get("/api/overview")["since_ever"],
            lambda now: (
                (now["served_tokens"], now["prompt_tokens"]) == (second.storage_tokens, asked)
            ),
        )
        assert ever["token_hit_rate"] == second.storage_tokens / asked
        own = second.cached_tokens - second.storage_tokens
        assert ever["engine_hit_rate"] == own / asked
        assert pages.get("/api/overview")["problems"] == []
        server.stop(signal.SIGKILL)
