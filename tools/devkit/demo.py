"""The demonstration: one long prompt, before and after a restart of a real server."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from devkit import recipes
from devkit.model import make_model
from devkit.places import SUPPORT, dev_home
from devkit.shell import DevError, locked, note, run

sys.path.insert(0, str(SUPPORT))

from long_prompt import long_prompt
from vllm_server import Completion, ServerError, VllmServer

__all__ = ["TIERS", "run_demo"]

TIERS = ("fs", "lifeboat")
_CPU_TIER_BYTES = 500_000_000
_MIN_PROMPT_TOKENS = 4_000


@dataclasses.dataclass(frozen=True)
class _Result:
    """What the demonstration measured; the fields are the keys of ``--json``."""

    prompt_tokens: int
    cold_s: float
    restart_without_s: float
    restart_with_s: float
    restored_tokens: int
    same_text: bool
    disk_bytes: int


class _Stage:
    """Where the demonstration runs: interpreter, model, and a directory of its own."""

    def __init__(self, tier: str) -> None:
        self.python = recipes.vllm().make()
        self.model = make_model()
        self.tier = tier
        self.home = dev_home() / "demo" / tier
        self.store = self.home / "kv"
        self.logs = self.home / "logs"

    def clear(self) -> None:
        """Remove what an earlier run has left, but for its compiled kernels."""
        self.home.mkdir(parents=True, mode=0o700, exist_ok=True)
        self.stop_agent()  # of a run that was killed
        for path in self.home.iterdir():
            if path.name == "kernels":
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if self.tier == "lifeboat":
            # By default the CPU tier takes what a server can have, and touches all of it at the
            # start; one prompt needs far less of a newcomer's memory. A demonstration also takes
            # no port of the machine.
            (self.home / "lifeboat.yaml").write_text(
                f"engine:\n  native_cpu_gb: {_CPU_TIER_BYTES / 1e9}\n"
                "telemetry:\n  prometheus:\n    port: 0\n"
            )

    def command(self, name: str) -> list[str]:
        """Return a ``lifeboat-cache`` command for the home directory, to be run or shown."""
        program = self.python.with_name("lifeboat-cache")
        return ["env", f"LIFEBOAT_CACHE_HOME={self.home}", str(program), *name.split()]

    def compile_kernels(self) -> None:
        """Do what the agent would do for ten seconds beside the first server, and slow it down."""
        if self.tier == "lifeboat":
            home = {"LIFEBOAT_CACHE_HOME": str(self.home)}
            run([self.python, "-m", "lifeboat_cache.kernels"], env=home)

    def stop_agent(self) -> None:
        """End the agent that the servers have started, which would stay for another minute."""
        if self.tier == "lifeboat" and (self.home / "run").exists():
            run(self.command("agent --stop"))

    def server(self, name: str, *, cached: bool) -> VllmServer:
        """Describe a server, with or without a cache on disk."""
        args: list[str] = []
        env: dict[str, str] = {}
        if cached and self.tier == "lifeboat":
            env = {"LIFEBOAT_CACHE": "1", "LIFEBOAT_CACHE_HOME": str(self.home)}
        elif cached:
            args = ["--kv-transfer-config", json.dumps(_fs_tier(self.store))]
        return VllmServer(
            self.model, log=self.logs / f"{name}.log", python=self.python, args=args, env=env
        )


def _fs_tier(root: Path) -> dict[str, object]:
    """Return the configuration of vLLM's own filesystem tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": _CPU_TIER_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        },
    }


def run_demo(tier: str, *, as_json: bool) -> int:
    """Run the demonstration and print its result.

    Parameters
    ----------
    tier
        ``lifeboat``, or ``fs`` for vLLM's own filesystem tier.
    as_json
        Print one JSON object instead of a table.

    Returns
    -------
    int
        0 when the restored text is right and something was restored, else 1.

    Raises
    ------
    DevError
        When a server fails.
    """
    stage = _Stage(tier)
    # One at a time: two would share the directory and slow each other down.
    with locked(stage.home.with_name("demo.lock")):
        stage.clear()
        try:
            result = _measure(stage)
        except ServerError as error:
            msg = f"{error}\nthe servers' logs are in {stage.logs}"
            raise DevError(msg) from error
        finally:
            stage.stop_agent()
    if as_json:
        print(json.dumps(dataclasses.asdict(result)), flush=True)
    else:
        print(_table(result, stage), flush=True)
    return 0 if result.same_text and result.restored_tokens else 1


def _measure(stage: _Stage) -> _Result:
    prompt = long_prompt()
    stage.compile_kernels()

    note("1 of 3: a server with the cache; the prompt is new to it, then repeated")
    with stage.server("first", cached=True) as server:
        _warm_up(server)
        cold = server.complete(prompt)
        repeat = server.complete(prompt)
        _wait_until_stored(stage.store)
        server.stop(signal.SIGINT)
    if cold.prompt_tokens < _MIN_PROMPT_TOKENS:
        msg = f"the prompt has only {cold.prompt_tokens} tokens; raise the days of long_prompt()"
        raise DevError(msg)
    if not repeat.text.strip():
        msg = "the model answered nothing, so no text can be compared; see logs/first.log"
        raise DevError(msg)
    disk_bytes = _bytes_below(stage.store)

    note("2 of 3: restarted without the cache")
    with stage.server("without", cached=False) as server:
        _warm_up(server)
        without = server.complete(prompt)
        server.stop(signal.SIGINT)

    note("3 of 3: restarted with the cache; the stored files are dropped from the page cache")
    _forget_pages(stage.store)
    with stage.server("with", cached=True) as server:
        _warm_up(server)
        restored, restored_tokens = _complete_counting_restored(server, prompt)
        server.stop(signal.SIGINT)

    return _Result(
        prompt_tokens=cold.prompt_tokens,
        cold_s=round(cold.first_token_s, 3),
        restart_without_s=round(without.first_token_s, 3),
        restart_with_s=round(restored.first_token_s, 3),
        restored_tokens=restored_tokens,
        same_text=restored.text == repeat.text,
        disk_bytes=disk_bytes,
    )


def _warm_up(server: VllmServer) -> None:
    """Let the server do what it does only once, with a prompt that shares nothing."""
    server.complete("Count to three.", max_tokens=4)


def _complete_counting_restored(server: VllmServer, prompt: str) -> tuple[Completion, int]:
    """Complete a prompt and return how many of its tokens came from the connector."""
    counter = "vllm:external_prefix_cache_hits_total"
    before = server.metric(counter)
    completion = server.complete(prompt)
    return completion, int(server.metric(counter) - before)


def _wait_until_stored(store: Path, *, quiet_s: float = 1.0, timeout_s: float = 60.0) -> None:
    """Wait until nothing more is written: storing goes on behind the answers."""
    deadline = time.monotonic() + timeout_s
    size, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        now = _bytes_below(store)
        if now != size:
            size, since = now, time.monotonic()
        elif size and time.monotonic() - since >= quiet_s:
            return
        time.sleep(0.1)
    if size <= 0:
        msg = (
            f"nothing was stored in {store} within {timeout_s:.0f} s; logs/first.log beside it "
            "says why (in a container /dev/shm is often too small: start it with --shm-size=2g)"
        )
        raise DevError(msg)


def _bytes_below(directory: Path) -> int:
    """Return the bytes that the files of a directory occupy on disk."""
    total = 0
    for path in directory.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a temporary file that got its name meanwhile
            continue
        if not path.is_dir():
            total += status.st_blocks * 512
    return total


def _forget_pages(directory: Path) -> None:
    """Drop the files from the page cache, so that they are read from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            try:
                file = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # the agent is at work
                continue
            try:
                os.fsync(file)  # only clean pages can be dropped
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def _table(result: _Result, stage: _Stage) -> str:
    name = "LifeboatCache" if stage.tier == "lifeboat" else "vLLM's fs tier"
    text = "same as the repeat" if result.same_text else "DIFFERENT from the repeat"
    rows = [
        ("", "first token", "restored", "text"),
        ("cold", f"{result.cold_s:.2f} s", "", ""),
        (f"restarted without {name}", f"{result.restart_without_s:.2f} s", "", ""),
        (
            f"restarted with {name}",
            f"{result.restart_with_s:.2f} s",
            f"{result.restored_tokens:,} tokens",
            text,
        ),
    ]
    width = max(len(row[0]) for row in rows)
    body = "\n".join(
        f"  {row[0]:<{width}}  {row[1]:>11}  {row[2]:>12}   {row[3]}".rstrip() for row in rows
    )
    return (
        f"\nSmolLM2-135M on vLLM's CPU build, one prompt of {result.prompt_tokens:,} tokens:\n\n"
        f"{body}\n\n"
        f"  on disk: {result.disk_bytes / 1e6:.1f} MB in {stage.store}\n"
        "  `repeat`: the same prompt again in the first server, found in its own memory\n\n"
        f"{_where_next(stage)}"
    )


def _where_next(stage: _Stage) -> str:
    lines = [f"  the servers' logs     {stage.logs}"]
    if stage.tier == "lifeboat":
        for what, name in (
            ("what is stored", "ls"),
            ("what it did", "status"),
            ("is this machine fit", "doctor"),
        ):
            lines.append(f"  {what:<20}  {' '.join(stage.command(name)[1:])}")
        lines += [
            "                        (it warns of vLLM's CPU build: a test plugin offloads here)",
            '  with your own vLLM    README.md, "Use it": LIFEBOAT_CACHE=1 vllm serve MODEL',
        ]
    lines.append("  everything else       README.md")
    return "Where to look next:\n" + "\n".join(lines)
