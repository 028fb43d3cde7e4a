"""Real vLLM servers side by side: with our cache, with vLLM's fs tier, and with none."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from devkit.places import dev_home
from vllm_server import VllmServer

from lifeboat_cache import kernels

__all__ = ["FS", "OURS", "PLAIN", "Servers", "cpu_seconds", "wait_until_idle"]

OURS = "ours"
FS = "vLLM's fs tier"
PLAIN = "no cache"

_CPU_TIER_BYTES = 500_000_000
_TICKS = os.sysconf("SC_CLK_TCK")


class Servers:
    """Describes and starts the servers of one benchmark.

    Parameters
    ----------
    name
        Of the benchmark; its files go to a directory of that name, emptied first.
    chunk_tokens
        Tokens per chunk, for ours and for the fs tier; ``None`` leaves the fs tier at
        vLLM's default of one block.
    settings
        More for ours: lines of its configuration file.
    packages
        Sources that ours needs besides what is installed.
    """

    def __init__(
        self,
        name: str,
        *,
        chunk_tokens: int | None = 256,
        settings: str = "",
        packages: Sequence[Path] = (),
    ) -> None:
        self.model = Path(os.environ["LIFEBOAT_TEST_MODEL"])
        self.directory = dev_home() / "bench" / name
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.home = self.directory / "home"
        self.home.mkdir(mode=0o700)
        # Once for all benchmarks; else the servers' agent would do it beside the measurements.
        shared = dev_home() / "bench" / "home"
        shared.mkdir(mode=0o700, exist_ok=True)
        kernels.compile_all(shared)
        (self.home / "kernels").symlink_to(shared / "kernels")
        self.root = self.directory / "fs"
        # The CPU tier is touched as a whole at the start: three servers share this machine.
        (self.home / "lifeboat.yaml").write_text(
            f"engine: {{native_cpu_gb: {_CPU_TIER_BYTES / 1e9}}}\n{settings}"
        )
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": _CPU_TIER_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(self.root)}],
        }
        if chunk_tokens is not None:
            extra["block_size"] = chunk_tokens
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        self._args = {FS: ["--kv-transfer-config", json.dumps(transfer)]}
        self._env = {OURS: {"LIFEBOAT_CACHE": "1", "LIFEBOAT_CACHE_HOME": str(self.home)}}
        if packages:
            known = [*map(str, packages), os.environ.get("PYTHONPATH", "")]
            self._env[OURS]["PYTHONPATH"] = os.pathsep.join(filter(None, known))
        self._started = 0

    def _describe(self, who: str) -> VllmServer:
        self._started += 1
        log = self.directory / "logs" / f"{self._started}.log"
        return VllmServer(self.model, log=log, args=self._args.get(who, ()), env=self._env.get(who))

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[dict[str, VllmServer]]:
        """Servers that are up at the same time, by name."""
        with ExitStack() as stack:
            up = {who: stack.enter_context(self._describe(who)) for who in names}
            for server in up.values():
                wait_until_idle(server)
            yield up

    def stored(self, who: str) -> Path:
        """Where a server keeps its files."""
        return {OURS: self.home / "kv", FS: self.root}[who]


def cpu_seconds(server: VllmServer) -> float:
    """CPU time of a server's living processes, in all since they started."""
    session = server.pid
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def wait_until_idle(server: VllmServer, *, timeout_s: float = 60.0) -> None:
    """Wait until a server has done what it does behind its answers, such as storing.

    Raises
    ------
    TimeoutError
        If it goes on using more than a tenth of a core.
    """
    end = time.monotonic() + timeout_s
    quiet = 0
    before = cpu_seconds(server)
    while quiet < 2:
        time.sleep(0.25)
        now = cpu_seconds(server)
        quiet = quiet + 1 if now - before <= 0.03 else 0
        before = now
        if time.monotonic() > end:
            raise TimeoutError("a server does not come to rest: see its log")
