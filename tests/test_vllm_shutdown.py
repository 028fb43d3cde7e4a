"""What a server leaves in shared memory, which docs/vllm.md tells."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from vllm_server import StartServer

pytestmark = [pytest.mark.engine, pytest.mark.full]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("timeout_s", [0, 20])
def test_a_shutdown_timeout_lets_vllm_clean_up(
    start_server: StartServer, home: Path, how: signal.Signals, timeout_s: int
) -> None:
    (home / "lifeboat.yaml").write_text("engine: {native_cpu_gb: 0.5}\nagent: {autostart: false}\n")
    server = start_server(
        env={"LIFEBOAT_CACHE": "1", "LIFEBOAT_CACHE_HOME": str(home)},
        args=["--shutdown-timeout", str(timeout_s)],
    )
    server.complete("Count to three.", max_tokens=4)
    leaked = server.stop(how)
    assert len(leaked) == (0 if timeout_s else 1)
