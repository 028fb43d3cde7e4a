"""A real vLLM server keeps its KV across a restart, however it ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from long_prompt import long_prompt
from stored import algorithms, journal_entries, stored_files
from vllm_launches import CHUNK, PROMPT, Launches, full_chunks, wait_until_stored
from vllm_server import StartServer, VllmServer, shm_regions

from lifeboat_cache.checksum import ALGORITHM_BLAKE3, ALGORITHM_XXH3

pytestmark = pytest.mark.engine

WAYS = [
    pytest.param(False, signal.SIGKILL, id="zero-flag-SIGKILL"),
    pytest.param(False, signal.SIGINT, id="zero-flag-SIGINT", marks=pytest.mark.full),
    pytest.param(False, signal.SIGTERM, id="zero-flag-SIGTERM", marks=pytest.mark.full),
    pytest.param(True, signal.SIGKILL, id="explicit-SIGKILL", marks=pytest.mark.full),
    pytest.param(True, signal.SIGINT, id="explicit-SIGINT", marks=pytest.mark.full),
    pytest.param(True, signal.SIGTERM, id="explicit-SIGTERM", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("explicit", "how"), WAYS)
def test_the_prompt_is_restored_with_the_same_text(
    start_server: StartServer, tmp_path: Path, home: Path, explicit: bool, how: signal.Signals
) -> None:
    regions = shm_regions()
    # Those with flags are without compiled kernels, as a server is that nobody compiled any for.
    launch = Launches(
        start_server, tmp_path / "no kernels" if explicit else home, explicit=explicit
    )
    secret = long_prompt(9, seed=5)

    first = launch()
    cold = first.complete(PROMPT)
    repeat = first.complete(PROMPT)
    salted = first.complete(secret, cache_salt="one")
    chunks = full_chunks(cold)
    assert cold.cached_tokens == 0
    assert repeat.cached_tokens == chunks * CHUNK, "see the comment at PROMPT"
    wait_until_stored(first, chunks + full_chunks(salted))
    assert algorithms(launch.home) == {ALGORITHM_BLAKE3 if explicit else ALGORITHM_XXH3}
    first.stop(how)

    second = launch()
    restored = second.complete(PROMPT)
    assert restored.cached_tokens >= 0.95 * chunks * CHUNK
    assert restored.text == repeat.text
    assert second.metric("vllm:external_prefix_cache_hits_total") == restored.cached_tokens
    assert second.metric("lifeboat_blocks_loaded_total") == restored.cached_tokens / CHUNK
    assert second.metric("lifeboat_load_blocks_failed_total") == 0

    assert second.complete(secret, cache_salt="two").cached_tokens == 0
    assert second.complete(secret).cached_tokens == 0
    again = second.complete(secret, cache_salt="one")
    assert again.cached_tokens >= 0.95 * full_chunks(salted) * CHUNK
    second.stop(signal.SIGINT)
    assert shm_regions() <= regions


def damage(launch: Launches) -> tuple[int, int]:
    """Do three kinds of damage at once.

    Returns the tokens in front of the first damage, and how many chunks are lost.
    """
    (segment,) = stored_files(launch.home, "segment")
    (journal,) = stored_files(launch.home, "journal")
    entries = journal_entries(journal)
    torn = entries[-1]
    rest = entries[:-1]
    cut = rest[rest["offset"].argmax()]
    flipped = rest[rest["position"].argsort()[1]]  # the prompt's second chunk
    assert flipped["slot"] != cut["slot"]
    with journal.open("r+b") as file:
        file.truncate(journal.stat().st_size - 50)
    with segment.open("r+b") as file:
        end = min(int(torn["offset"]), int(cut["offset"]))
        file.truncate(end + 1000)
        file.seek(int(flipped["offset"]) + 12345)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x20]))
    lost = 1 + int((entries["offset"] >= end).sum())
    return int(flipped["position"]) - CHUNK, lost


@pytest.mark.full
def test_damage_is_a_counted_miss_with_the_same_text(start_server: StartServer, home: Path) -> None:
    # In float32, since in bfloat16 the text depends on how many tokens are computed
    # together, with or without LifeboatCache.
    launch = Launches(start_server, home)
    first = launch("--dtype", "float32")
    cold = first.complete(PROMPT)
    wait_until_stored(first, full_chunks(cold))
    first.stop(signal.SIGKILL)
    chunks = full_chunks(cold)
    whole_tokens, lost = damage(launch)

    second = launch("--dtype", "float32")
    restored = second.complete(PROMPT)
    assert restored.cached_tokens == whole_tokens
    assert 0 < whole_tokens < chunks * CHUNK
    assert second.metric("lifeboat_load_blocks_failed_total", reason="corrupt") == 1
    assert restored.text == cold.text
    wait_until_stored(second, lost)  # the others are still there
    second.stop(signal.SIGKILL)

    third = launch("--dtype", "float32")
    healed = third.complete(PROMPT)
    assert healed.cached_tokens == chunks * CHUNK
    assert healed.text == cold.text
    third.stop(signal.SIGINT)


@pytest.mark.full
def test_a_full_disk_drops_chunks_and_nothing_else(start_server: StartServer, home: Path) -> None:
    launch = Launches(start_server, home)
    launch.configure("storage: {fallback_local: {capacity_gb: 0.02}}\n")
    first = launch("--dtype", "float32")
    cold = first.complete(PROMPT)
    deadline = time.monotonic() + 30
    while not first.metric("lifeboat_store_blocks_dropped_total", reason="full"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    first.stop(signal.SIGKILL)
    second = launch("--dtype", "float32")
    restored = second.complete(PROMPT)
    assert restored.cached_tokens < full_chunks(cold) * CHUNK
    assert restored.text == cold.text
    second.stop(signal.SIGINT)


@pytest.mark.full
def test_another_checkpoint_at_the_same_path_finds_nothing(
    start_server: StartServer, tmp_path: Path, home: Path, model: Path
) -> None:
    from safetensors.torch import load_file, save_file

    place = tmp_path / "model"
    place.mkdir()
    for path in model.iterdir():
        if path.name != "model.safetensors":
            (place / path.name).symlink_to(path)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    launch = Launches(start_server, home)

    def server() -> VllmServer:
        return start_server(env=launch.env, model=place)

    first = server()
    cold = first.complete(PROMPT)
    wait_until_stored(first, full_chunks(cold))
    first.stop(signal.SIGKILL)

    name = "model.layers.17.self_attn.k_proj.weight"
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    second = server()
    assert second.complete(PROMPT).cached_tokens == 0
    assert second.metric("lifeboat_blocks_loaded_total") == 0
    assert len(list((launch.home / "kv").rglob("namespace.json"))) == 2
    second.stop(signal.SIGKILL)
