"""Real SGLang servers on the MLX backend keep prefixes across a restart.

On Linux they run with MLX's CPU build: what Metal computes is not seen here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_hybrid
import tiny_llama
from long_prompt import long_prompt
from sglang_server import Generation, SglangServer, StartSglang
from stored import journal_entries, stored_files

from lifeboat_cache.format.journal import KIND_RECORD

pytestmark = [pytest.mark.engine, pytest.mark.full]

CHUNK = 64

Launch = Callable[..., SglangServer]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny random model: every byte of a prompt is a token."""
    directory = tmp_path / "tiny"
    tiny_llama.write(directory)
    return directory


@pytest.fixture
def launch(start_sglang: StartSglang, home: Path) -> Launch:
    """Starts servers of one home, with LifeboatCache switched on by the variable."""
    (home / "lifeboat.yaml").write_text(
        "storage: {fallback_local: {min_free_gb: 0}}\nagent: {autostart: false}\n"
    )

    def start(*args: str, switch: str = "1", overlap: bool = True, **options: Any) -> SglangServer:
        environment = {
            "SGLANG_USE_MLX": "1",
            "LIFEBOAT_CACHE": switch,
            "LIFEBOAT_CACHE_HOME": str(home),
        }
        path = os.environ.get("PYTHONPATH")
        if path:
            environment["PYTHONPATH"] = path
        return start_sglang(env=environment, args=args, overlap=overlap, **options)

    return start


def chunks_stored(home: Path) -> int:
    return sum(
        int((journal_entries(journal)["kind"] == KIND_RECORD).sum())
        for journal in stored_files(home, "journal")
    )


def wait_until_stored(home: Path, chunks: int) -> None:
    deadline = time.monotonic() + 60
    while chunks_stored(home) < chunks:
        assert time.monotonic() < deadline, f"{chunks_stored(home)} of {chunks} were stored"
        time.sleep(0.1)


def whole(tokens: int) -> int:
    """Tokens of whole chunks; the last one is always computed."""
    return (tokens - 1) // CHUNK * CHUNK


def wait_until_published(home: Path, tokens: int) -> Any:
    """The one engine's part of the status, once it has served so many tokens."""
    deadline = time.monotonic() + 60
    while True:
        run = subprocess.run(
            [sys.executable, "-m", "lifeboat_cache.cli.main", "status", "--json"],
            env={**os.environ, "LIFEBOAT_CACHE_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
        found = json.loads(run.stdout)
        if found["totals"]["served_tokens"] == tokens:
            (engine,) = found["processes"]
            return engine
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("how", "overlap"),
    [
        pytest.param(signal.SIGTERM, True, id="SIGTERM-overlap"),
        pytest.param(signal.SIGKILL, False, id="SIGKILL-no-overlap"),
    ],
)
def test_a_prompt_comes_back_after_a_restart_with_the_same_text(
    launch: Launch, home: Path, tiny: Path, how: signal.Signals, overlap: bool
) -> None:
    prompt = "".join(f"{number} bottles, " for number in range(40))
    first = launch(model=tiny, overlap=overlap)
    cold = first.generate(prompt)
    repeat = first.generate(prompt)
    assert cold.cached_tokens == 0
    assert repeat.cached_tokens > 0
    assert repeat.storage_tokens == 0
    # The answer is stored, too.
    wait_until_stored(home, (cold.prompt_tokens + 15) // CHUNK)
    first.stop(how)

    second = launch(model=tiny, overlap=overlap)
    restored = second.generate(prompt)
    assert restored.storage_tokens == restored.cached_tokens == whole(cold.prompt_tokens)
    assert restored.text == repeat.text == cold.text
    salted = second.generate(prompt, extra_key="somebody else")
    assert salted.cached_tokens == 0
    engine = wait_until_published(home, restored.storage_tokens)
    assert engine["engine"]["name"] == "sglang"
    second.stop(signal.SIGTERM)


def test_a_real_models_text_is_that_of_sglangs_own_hit(
    launch: Launch, home: Path, model: Path
) -> None:
    prompt = long_prompt(2)
    first = launch(model=model)
    cold = first.generate(prompt)
    repeat = first.generate(prompt)
    assert repeat.cached_tokens > 0
    assert repeat.text.strip()
    wait_until_stored(home, (cold.prompt_tokens + 15) // CHUNK)
    first.stop(signal.SIGTERM)
    second = launch(model=model)
    restored = second.generate(prompt)
    assert restored.storage_tokens == whole(cold.prompt_tokens)
    assert restored.text == repeat.text
    again = second.generate(prompt)
    assert again.storage_tokens == 0
    assert again.cached_tokens > restored.cached_tokens
    assert again.text == repeat.text
    second.stop(signal.SIGTERM)


def at_once(server: SglangServer, prompts: list[str]) -> list[Generation]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(server.generate, prompts))


def test_requests_at_once_cancelled_ones_and_evicted_slots_each_get_their_own(
    launch: Launch, home: Path, tiny: Path
) -> None:
    common = "".join(f"{number}, " for number in range(60))
    prompts = [common + f"story {number}: " + f"{number * 7919}; " * 20 for number in range(6)]
    # Not all of them fit into the pool at a time: slots are used again and again.
    pool = ("--max-total-tokens", "1024")
    first = launch(*pool, model=tiny)
    expected = [first.generate(prompt) for prompt in prompts]
    first.stop(signal.SIGTERM)

    second = launch(*pool, model=tiny)
    with ThreadPoolExecutor(4) as background:
        gone = [
            background.submit(
                second.post,
                "/generate",
                {
                    "rid": f"gone-{number}",
                    "text": prompt,
                    "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
                },
            )
            for number, prompt in enumerate(prompts[:3])
        ]
        time.sleep(0.2)
        for number in range(3):
            second.post("/abort_request", {"rid": f"gone-{number}"})
        for one in gone:
            one.exception()  # an aborted request is answered in one way or another
    for group in (prompts[:3], prompts[3:], prompts[:3]):
        for prompt, found in zip(group, at_once(second, group), strict=True):
            assert found.text == expected[prompts.index(prompt)].text
            assert found.cached_tokens >= 0
    second.stop(signal.SIGTERM)

    third = launch(*pool, model=tiny)
    for prompt, before in zip(prompts, expected, strict=True):
        restored = third.generate(prompt)
        assert restored.cached_tokens >= whole(before.prompt_tokens)
        assert restored.storage_tokens > 0
        assert restored.text == before.text
    third.stop(signal.SIGTERM)


def test_a_hybrid_models_prompts_come_back_after_a_restart(
    launch: Launch, home: Path, tmp_path: Path
) -> None:
    """Layers with attention and layers with recurrent state, in one model.

    SGLang starts it on MLX only where scheduling does not overlap with computing.
    """
    hybrid = tiny_hybrid.write(tmp_path / "hybrid")
    prompts = [
        "".join(f"{number} {what}, " for number in range(30)) for what in ("bottles", "candles")
    ]
    longer = prompts[0] + "and what was in them? "
    chunks = [whole(len(prompt)) // CHUNK for prompt in prompts]
    first = launch(model=hybrid, overlap=False)
    assert first.log.read_text().count("this model has recurrent state") == 1
    cold = [first.generate(prompt) for prompt in prompts]
    assert [one.prompt_tokens for one in cold] == [len(prompt) for prompt in prompts]
    # Each prompt's chunks, and the state at the end of the last one.
    wait_until_stored(home, sum(chunks) + len(prompts))
    expected = first.generate(longer, extra_key="computed")
    assert expected.cached_tokens == 0
    first.stop(signal.SIGTERM)

    second = launch(model=hybrid, overlap=False)
    continued = second.generate(longer)
    assert continued.storage_tokens == continued.cached_tokens == whole(len(prompts[0]))
    assert continued.text == expected.text
    other = second.generate(prompts[1])
    assert other.storage_tokens == other.cached_tokens == whole(len(prompts[1]))
    assert other.text == cold[1].text
    second.stop(signal.SIGTERM)

    third = launch(model=hybrid, overlap=False)
    for before, found in zip(cold, at_once(third, prompts), strict=True):
        assert found.storage_tokens == whole(before.prompt_tokens)
        assert found.text == before.text
    third.stop(signal.SIGTERM)


def test_a_model_with_sliding_windows_is_left_to_sglang(
    launch: Launch, home: Path, tmp_path: Path
) -> None:
    """SGLang's MLX backend keeps no pool for it."""
    windows = tiny_llama.write(
        tmp_path / "windows",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=CHUNK,
    )
    prompt = "".join(f"{number} bottles, " for number in range(40))

    def answers(switch: str) -> tuple[list[Generation], str]:
        server = launch(model=windows, switch=switch)
        found = [server.generate(prompt) for _ in range(2)]
        server.stop(signal.SIGTERM)
        return found, server.log.read_text()

    found, log = answers("1")
    assert log.count("LifeboatCache stands down, SGLang runs without it: ") == 1
    assert "keeps no pool for models with sliding windows" in log
    without, _ = answers("0")
    assert [one.text for one in found] == [one.text for one in without]
    assert [one.cached_tokens for one in found] == [one.cached_tokens for one in without]
    assert not stored_files(home, "segment")


def test_a_launch_that_names_a_prefix_cache_keeps_its_choice(
    launch: Launch, home: Path, tiny: Path
) -> None:
    server = launch("--radix-cache-backend", "lifeboat", model=tiny, switch="0")
    assert "LifeboatCache is on: prefixes" in server.log.read_text()
    prompt = "a " * 100
    server.generate(prompt)
    wait_until_stored(home, 2)
    server.stop(signal.SIGTERM)
    other = launch(model=tiny, switch="0")
    assert "LifeboatCache" not in other.log.read_text().replace("LIFEBOAT_CACHE", "")
    assert other.generate(prompt).cached_tokens == 0
    other.stop(signal.SIGTERM)
