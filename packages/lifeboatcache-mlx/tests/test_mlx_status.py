"""``lifeboat-cache status`` and the metrics show a process with mlx-lm, as the dashboard does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_models
from mlx_lm.models import cache as caches
from prometheus_client.parser import text_string_to_metric_families

from lifeboat_cache.mlx import PersistentPromptCache
from lifeboat_cache.registry.prometheus import Exporter


def _until(ask: Callable[[], Any], right: Callable[[Any], bool]) -> Any:
    """Ask again until the answer is right; processes publish every 2 s."""
    give_up = time.monotonic() + 60
    while not right(answer := ask()):
        assert time.monotonic() < give_up, f"still {answer}"
        time.sleep(0.2)
    return answer


def test_what_was_stored_and_served_is_shown(home: Path) -> None:
    def status() -> Any:
        run = subprocess.run(
            [sys.executable, "-m", "lifeboat_cache.cli.main", "status", "--json"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode in (0, 1), run.stderr
        return json.loads(run.stdout)

    model, tokens = mlx_models.make("llama"), [n % 251 for n in range(200)]
    computed = caches.make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=computed)
    with PersistentPromptCache(model, name="tiny") as cache:
        cache.store(tokens, computed)
        assert cache.flush(60)
        assert cache.fetch([*tokens, 1])[1] == 192
        found = _until(status, lambda now: now["totals"]["served_tokens"] == 192)
        (process,) = found["processes"]
        assert process["engine"]["name"] == "mlx-lm"
        assert process["engine"]["version"]
        assert process["counts"]["stored_blocks"] == 3 + 1  # and what the layers are
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with contextlib.closing(Exporter(home, "127.0.0.1", port)):

            def served() -> float:
                try:
                    answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)
                except OSError:
                    return -1.0
                with answer:
                    families = text_string_to_metric_families(answer.read().decode())
                return sum(
                    sample.value
                    for family in families
                    for sample in family.samples
                    if sample.name == "lifeboat_node_served_tokens_total"
                )

            _until(served, lambda now: now == 192)
