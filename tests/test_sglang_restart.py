"""A real SGLang server keeps its KV across a restart, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from long_prompt import long_prompt
from sglang_server import SglangServer, StartSglang
from stored import journal_entries, stored_files

from lifeboat_cache.format.journal import KIND_RECORD

pytestmark = pytest.mark.engine

PAGE = 64

EXPLICIT = {
    "backend_name": "lifeboat",
    "module_path": "lifeboat_cache.integrations.sglang_backend",
    "class_name": "LifeboatHiCacheStorage",
}

# 371 tokens: SGLang asks storage for no less than 256.
PROMPT = long_prompt(4)


class Launches:
    """Servers of one home, switched on by the variable or by explicit flags."""

    def __init__(self, start: StartSglang, home: Path, *, explicit: bool = False) -> None:
        self._start = start
        self.home = home
        self.env = {"LIFEBOAT_CACHE_HOME": str(home)}
        self.args: list[str] = []
        if explicit:
            self.args = [
                "--enable-hierarchical-cache", "--page-size", str(PAGE), "--hicache-size", "1",
                "--hicache-storage-backend", "dynamic",
                "--hicache-storage-backend-extra-config", json.dumps(EXPLICIT),
            ]  # fmt: skip
        else:
            self.env |= {"LIFEBOAT_CACHE": "1", "LIFEBOAT_SGLANG_HOST_GB": "1"}
        home.mkdir(mode=0o700, exist_ok=True)
        (home / "lifeboat.yaml").write_text(
            # However full the disk of this machine is.
            "storage: {fallback_local: {min_free_gb: 0}}\nagent: {autostart: false}\n"
            # The same text is expected after a restart.
            "compression: {ladder: {local: lossless}}\n"
        )

    def __call__(self, *args: str, **env: str) -> SglangServer:
        return self._start(env={**self.env, **env}, args=[*self.args, *args])


def pages_stored(home: Path) -> int:
    return sum(
        int((journal_entries(journal)["kind"] == KIND_RECORD).sum())
        for journal in stored_files(home, "journal")
    )


def wait_until_stored(home: Path, pages: int) -> None:
    deadline = time.monotonic() + 60
    while pages_stored(home) < pages:
        assert time.monotonic() < deadline, f"{pages_stored(home)} of {pages} pages were stored"
        time.sleep(0.2)


def status(home: Path) -> Any:
    run = subprocess.run(
        [sys.executable, "-m", "lifeboat_cache.cli.main", "status", "--json"],
        env={**os.environ, "LIFEBOAT_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stderr
    return json.loads(run.stdout)


def wait_until_published(home: Path, tokens: int) -> Any:
    """The one engine's part of the status, once it has served so many tokens."""
    deadline = time.monotonic() + 60
    while True:
        found = status(home)
        if found["totals"]["served_tokens"] == tokens:
            (engine,) = found["processes"]
            return engine
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def full_pages(tokens: int) -> int:
    return (tokens - 1) // PAGE


WAYS = [
    pytest.param(False, signal.SIGKILL, id="zero-flag-SIGKILL"),
    pytest.param(False, signal.SIGTERM, id="zero-flag-SIGTERM", marks=pytest.mark.full),
    pytest.param(True, signal.SIGKILL, id="explicit-SIGKILL", marks=pytest.mark.full),
    pytest.param(True, signal.SIGTERM, id="explicit-SIGTERM", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("explicit", "how"), WAYS)
def test_the_prompt_is_restored_with_the_same_text(
    start_sglang: StartSglang, home: Path, explicit: bool, how: signal.Signals
) -> None:
    launch = Launches(start_sglang, home, explicit=explicit)
    first = launch()
    cold = first.generate(PROMPT)
    repeat = first.generate(PROMPT)
    pages = full_pages(cold.prompt_tokens)
    assert (cold.cached_tokens, cold.storage_tokens) == (0, 0)
    assert (repeat.cached_tokens, repeat.storage_tokens) == (pages * PAGE, 0)
    assert repeat.text.strip()
    wait_until_stored(home, pages)
    first.stop(how)

    second = launch()
    restored = second.generate(PROMPT)
    assert restored.storage_tokens == restored.cached_tokens == pages * PAGE
    assert restored.text == repeat.text
    # Another tenant shares nothing.
    salted = second.generate(PROMPT, extra_key="somebody else")
    assert salted.cached_tokens == 0
    assert salted.text == repeat.text
    engine = wait_until_published(home, restored.storage_tokens)
    assert engine["engine"]["name"] == "sglang"
    assert engine["engine"]["version"]
    assert engine["state"] == "ready"
    second.stop(signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize(("writes", "reads"), [("1", "0"), ("0", "1")])
def test_both_interfaces_read_what_the_other_stored(
    start_sglang: StartSglang, home: Path, writes: str, reads: str
) -> None:
    launch = Launches(start_sglang, home)
    first = launch(LIFEBOAT_SGLANG_ZERO_COPY=writes)
    cold = first.generate(PROMPT, max_tokens=16)
    pages = full_pages(cold.prompt_tokens)
    stored = full_pages(cold.prompt_tokens + 16)  # SGLang keeps the answer, too
    wait_until_stored(home, stored)
    first.stop(signal.SIGTERM)
    second = launch(LIFEBOAT_SGLANG_ZERO_COPY=reads)
    restored = second.generate(PROMPT, max_tokens=16)
    assert restored.storage_tokens == pages * PAGE
    assert restored.text == cold.text
    assert pages_stored(home) == stored
    second.stop(signal.SIGTERM)


def altered(model: Path, place: Path) -> Path:
    """The same checkpoint with other weights in one layer."""
    from safetensors.torch import load_file, save_file

    place.mkdir()
    for path in model.iterdir():
        if path.name != "model.safetensors":
            (place / path.name).symlink_to(path)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.3.self_attn.k_proj.weight"
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.full
def test_nothing_is_shared_across_weights_that_change_in_place(
    start_sglang: StartSglang, home: Path, model: Path, tmp_path: Path
) -> None:
    launch = Launches(start_sglang, home)
    first = launch()
    before = first.generate(PROMPT)
    pages = full_pages(before.prompt_tokens)
    wait_until_stored(home, pages)
    other = altered(model, tmp_path / "other")
    answer = first.post("/update_weights_from_disk", {"model_path": str(other)})
    assert answer["success"], answer
    changed = first.generate(PROMPT)
    assert changed.cached_tokens == 0
    assert changed.text != before.text
    first.stop(signal.SIGKILL)

    # What the changed weights computed is not served to the original ones, nor the other way.
    second = launch()
    restored = second.generate(PROMPT)
    assert restored.storage_tokens == pages * PAGE
    assert restored.text == before.text
    second.stop(signal.SIGTERM)


_PROGRAM = """
import json, sys, time
import sglang

if __name__ == "__main__":
    model, prompt, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
    engine = sglang.Engine(
        model_path=model, device="cpu", attention_backend="torch_native", dtype="float32",
        max_total_tokens=4096, mem_fraction_static=0.3, disable_overlap_schedule=True,
        skip_server_warmup=True, hicache_io_backend="direct",
    )
    answer = engine.generate(prompt, {"temperature": 0, "max_new_tokens": 16})
    time.sleep(pause)
    engine.shutdown()
    about = answer["meta_info"]
    details = about.get("cached_tokens_details") or {}
    print(json.dumps([answer["text"], about["prompt_tokens"], details.get("storage", 0)]))
"""


@pytest.mark.full
def test_an_engine_inside_a_program_restores_too(home: Path, model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    launch = Launches(lambda **_: pytest.fail("no server"), home)

    def run(pause: float) -> Any:
        done = subprocess.run(
            [sys.executable, str(program), str(model), PROMPT, str(pause)],
            env={**os.environ, **launch.env, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return json.loads(done.stdout.splitlines()[-1])

    text, tokens, storage = run(5.0)
    assert storage == 0
    again = run(0.0)
    assert again == [text, tokens, full_pages(tokens) * PAGE]


@pytest.mark.full
def test_a_pool_that_cannot_be_built_does_not_end_the_server(
    start_sglang: StartSglang, home: Path
) -> None:
    launch = Launches(start_sglang, home)
    # Without LifeboatCache nobody looks at the size, since there is no hierarchical cache.
    server = launch("--hicache-size", "100000")
    assert "LifeboatCache stands down" in server.log.read_text()
    assert "Not enough host memory" in server.log.read_text()
    cold = server.generate(PROMPT)
    repeat = server.generate(PROMPT)
    assert repeat.cached_tokens > 0
    assert repeat.text == cold.text
    assert pages_stored(home) == 0
    server.stop(signal.SIGTERM)
