"""A real vLLM server whose KV is on the ladder of codecs, which is changed while it runs."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import pytest
from long_prompt import long_prompt
from stored import journal_entries, stored_files
from vllm_launches import CHUNK, PROMPT, Launches, full_chunks, wait_until_stored
from vllm_server import StartServer, VllmServer

from lifeboat_cache.codecs.names import EXACT, FP8, LBQ4
from lifeboat_cache.format.journal import KIND_RECORD

pytestmark = pytest.mark.engine

#: What a configuration file that has changed takes until it is followed, in seconds, at most.
_FOLLOWED_S = 30.0


def _ladder(codec: str) -> str:
    # native_cpu_gb as in Launches.configure, which this replaces.
    return (
        "engine: {native_cpu_gb: 0.5, native_codec: ladder}\n"
        "agent: {autostart: false}\n"
        f"compression: {{ladder: {{local: {codec}}}}}\n"
    )


def _stored(home: Path) -> list[tuple[int, int, int, int]]:
    """Position, codec, stored and raw length of each record, in the order of their storing."""
    return [
        (
            int(entry["position"]),
            int(entry["codec"]),
            int(entry["stored_length"]),
            int(entry["raw_length"]),
        )
        for journal in stored_files(home, "journal")
        for entry in journal_entries(journal)
        if entry["kind"] == KIND_RECORD
    ]


def _next_tokens(server: VllmServer, text: str) -> list[dict[str, float]]:
    """What the server expects next after the prompt and each beginning of a text, in words."""
    words = text.split(" ")
    prompts = [PROMPT + " ".join(words[:count]) for count in range(len(words))]
    answers = [server.complete(prompt, max_tokens=1, logprobs=20) for prompt in prompts]
    return [answer.top_logprobs[0] for answer in answers]


def _likeliest(logprobs: dict[str, float]) -> str:
    return max(logprobs, key=lambda token: logprobs[token])


def _divergence(p: dict[str, float], q: dict[str, float]) -> float:
    """KL divergence over the most probable tokens; what ``q`` lacks counts as its least one."""
    least = min(q.values())
    return sum(math.exp(lp) * (lp - q.get(token, least)) for token, lp in p.items())


@pytest.mark.full
def test_restored_kv_is_close_and_the_ladder_changes_while_the_server_runs(
    start_server: StartServer, home: Path
) -> None:
    launch = Launches(start_server, home)
    (home / "lifeboat.yaml").write_text(_ladder("fp8"))
    other = long_prompt(9, seed=5)

    first = launch()
    cold = first.complete(PROMPT)
    first_text = first.complete(PROMPT, max_tokens=24).text
    expected = _next_tokens(first, first_text)
    assert len(expected) >= 8
    chunks = full_chunks(cold)
    wait_until_stored(first, chunks)
    stored = _stored(home)
    assert [codec for _, codec, _, _ in stored] == [FP8] * chunks
    assert all(raw > 1.9 * size for _, _, size, raw in stored)

    (home / "lifeboat.yaml").write_text(_ladder("lbq4"))
    time.sleep(_FOLLOWED_S)
    more = full_chunks(first.complete(other))
    assert more >= 2
    wait_until_stored(first, chunks + more)
    fresh = _stored(home)[chunks:]
    assert [codec for _, codec, _, _ in fresh] == [LBQ4] * more
    assert all(raw > 3.5 * size for _, _, size, raw in fresh)
    first.stop(signal.SIGKILL)

    second = launch()
    restored = second.complete(PROMPT, max_tokens=24)
    assert restored.cached_tokens >= 0.95 * chunks * CHUNK
    assert second.metric("lifeboat_load_blocks_failed_total") == 0
    found = _next_tokens(second, first_text)
    divergences = [_divergence(p, q) for p, q in zip(expected, found, strict=True)]
    assert sum(divergences) / len(divergences) < 0.02
    same = sum(_likeliest(p) == _likeliest(q) for p, q in zip(expected, found, strict=True))
    assert same >= 0.85 * len(expected)
    assert second.complete(other).cached_tokens == more * CHUNK
    second.stop(signal.SIGINT)


@pytest.mark.full
def test_an_exact_server_takes_nothing_that_was_stored_with_loss(
    start_server: StartServer, home: Path
) -> None:
    launch = Launches(start_server, home)
    (home / "lifeboat.yaml").write_text(_ladder("fp8"))
    first = launch()
    chunks = full_chunks(first.complete(PROMPT))
    wait_until_stored(first, chunks)
    first.stop(signal.SIGKILL)
    launch.configure("")
    second = launch()
    assert second.complete(PROMPT).cached_tokens == 0
    wait_until_stored(second, chunks)
    second.stop(signal.SIGKILL)
    assert {codec for _, codec, _, _ in _stored(home)[chunks:]} <= EXACT
    # The other way round everything is good enough.
    (home / "lifeboat.yaml").write_text(_ladder("fp8"))
    third = launch()
    assert third.complete(PROMPT).cached_tokens >= 0.95 * chunks * CHUNK
    third.stop(signal.SIGINT)
