"""The dashboard beside real vLLM servers: its figures are the engine's, its changes reach it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from agents import agent_home, running
from dashboard_pages import PACKAGE, Pages, until
from long_prompt import long_prompt
from vllm_server import StartServer, free_port

from lifeboat_cache.config import load_config

pytestmark = [pytest.mark.engine, pytest.mark.full]

TOKENS = 1024


def test_figures_are_the_engines_and_changes_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path, start_server: StartServer
) -> None:
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        port = free_port()
        (home / "lifeboat.yaml").write_text(
            "# Written by hand.\n"
            "telemetry: {prometheus: {port: 0}}\n"
            f"dashboard: {{port: {port}}}\n"
            "storage: {fallback_local: {min_free_gb: 0}}\n"
            "compression: {ladder: {local: raw}}\n"
            "engine: {native_cpu_gb: 0.5, native_codec: ladder}\n"
        )
        options: Any = {
            "env": {
                "LIFEBOAT_CACHE": "1",
                "LIFEBOAT_CACHE_HOME": str(home),
                "PYTHONPATH": str(PACKAGE),
            }
        }
        pages = Pages(port)
        server = start_server(**options)
        assert server.complete(long_prompt(14)).cached_tokens == 0
        stored = until(
            lambda: server.metric("lifeboat_blocks_stored_total"),
            lambda blocks: blocks == TOKENS / 256,
        )
        # The agent serves it as soon as there is an engine.
        facts = until(
            lambda: pages.get("/api/overview"),
            lambda now: now["since_ever"]["stored_bytes"] > 0,
        )
        assert facts["problems"] == []
        assert facts["engines"] == 1
        assert facts["since_ever"]["stored_bytes"] == server.metric("lifeboat_bytes_stored_total")
        assert [one["codec"] for one in facts["codecs"]] == ["raw"]
        assert "All is well" in pages.text("/")
        (process,) = pages.get("/api/processes")["processes"]
        assert process["engine"] == "vllm"
        assert process["state"] == "ready"
        assert {one["codec"] for one in process["codecs"]} == {"raw"}
        (target,) = pages.get("/api/targets")["targets"]
        assert target["stored_blocks"] == stored

        # Another codec, without a restart of the engine; another target, with one.
        done = pages.save(**{"compression.ladder.local": "lossless", "engine.io_workers": "3"})
        assert [(one["key"], one["restart"]) for one in done["changes"]] == [
            ("compression.ladder.local", False),
            ("engine.io_workers", True),
        ]
        assert (home / "lifeboat.yaml").read_text().startswith("# Written by hand.\n")
        assert load_config().config.compression.ladder.local == "lossless"
        (process,) = until(
            lambda: pages.get("/api/processes")["processes"],
            lambda now: {one["codec"] for one in now[0]["codecs"]} == {"lossless"},
        )
        assert process["restart"] == ["engine.io_workers"]
        assert "restart required" in pages.text("/processes")
        assert server.complete(long_prompt(14, seed=2)).cached_tokens == 0
        facts = until(
            lambda: pages.get("/api/overview"),
            lambda now: [one["codec"] for one in now["codecs"]] == ["raw", "lossless"],
        )
        assert facts["since_ever"]["saved_bytes"] > 0
        # Its targets, too: new blocks go to a second one, without a restart.
        tier = {"name": "second", "type": "filesystem", "path": str(home / "second")}
        done = pages.save(**{f"storage.tiers.new.{key}": text for key, text in tier.items()})
        assert not any(one["restart"] for one in done["changes"])
        until(
            lambda: pages.get("/api/targets")["targets"],
            lambda now: any(
                one["name"] == "second" and any(user["writing"] for user in one["seen_by"])
                for one in now
            ),
        )
        assert server.complete(long_prompt(14, seed=3)).cached_tokens == 0
        until(lambda: list((home / "second").glob("*/*.segment")), bool)
        # What prompts were made of is what vLLM says.
        asked = server.metric("vllm:prompt_tokens_total")
        facts = until(
            lambda: pages.get("/api/overview")["since_ever"],
            lambda now: now["prompt_tokens"] == asked,
        )
        assert facts["token_hit_rate"] == facts["engine_hit_rate"] == 0
        assert facts["prefill_tokens_per_second"] > 0
        server.stop(signal.SIGTERM)

        # Both codecs are read back, and tokens are those that vLLM counts.
        server = start_server(**options)
        for seed in (1, 2):
            prompt = long_prompt(14) if seed == 1 else long_prompt(14, seed=seed)
            assert server.complete(prompt).cached_tokens == TOKENS
        said = server.metric("vllm:prompt_tokens_cached_by_source_total", source="disk")
        assert said == 2 * TOKENS
        facts = until(
            lambda: pages.get("/api/overview"),
            lambda now: now["since_ever"]["served_tokens"] == said,
        )
        assert facts["since_ever"]["loaded_bytes"] == server.metric("lifeboat_bytes_loaded_total")
        assert facts["since_ever"]["loaded_blocks"] == server.metric("lifeboat_blocks_loaded_total")
        ever = until(
            lambda: pages.get("/api/overview")["since_ever"],
            lambda now: now["prompt_tokens"] == asked + server.metric("vllm:prompt_tokens_total"),
        )
        assert ever["token_hit_rate"] == said / ever["prompt_tokens"]
        assert ever["loads"] == server.metric("lifeboat_load_seconds_count")
        assert ever["load_p99_s"] >= ever["load_p50_s"] > 0
        shown = re.sub(r"<[^>]*>", " ", pages.text("/"))
        assert "2.0k in all" in shown
        samples = pages.get("/api/history")["samples"]
        assert len(samples) >= 2, "history goes on across the engine's restart"
        assert running(home)
        # Eviction is the agent's: it makes room within the capacity that is saved here.
        done = pages.save(**{"storage.tiers.0.capacity_gb": "0.01"})
        assert not any(one["restart"] for one in done["changes"])
        until(
            lambda: {one["name"]: one for one in pages.get("/api/targets")["targets"]},
            lambda now: (now["second"]["evicted_blocks"] or 0) > 0,
        )
        pages.save(**{"eviction.policy": "none"})
        assert load_config().config.eviction.policy == "none"
        server.stop(signal.SIGKILL)
