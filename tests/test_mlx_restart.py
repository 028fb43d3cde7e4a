"""A prompt cache of mlx-lm after a restart of the process: the same bytes, the same tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

mlx_models = pytest.importorskip("mlx_models")

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache  # noqa: E402
from mlx_lm.models import cache as caches  # noqa: E402

from lifeboat_cache.mlx import PersistentPromptCache  # noqa: E402

#: The kinds of caches: growing, growing beside others in one layer, rotating, state spaces, and
#: states beside keys and values.
KINDS = ("llama", "deepseek", "gemma3", "mamba", "falcon_h1", "qwen3_next")
QUANTIZED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
_ANSWER = 6


def model_of(kind: str) -> Any:
    """A model of a kind, or one that is stored in a directory."""
    if os.sep not in kind:
        return mlx_models.make(kind)
    from mlx_lm import load

    return load(kind)[0]


def tokens_of(length: int) -> list[int]:
    """A prompt."""
    return [(17 * n * n + 5 * n + 31) % mlx_models.VOCABULARY for n in range(length)]


def answer(model: Any, rest: list[int], cache: list[Any], **options: Any) -> dict[str, Any]:
    """Its tokens, and how long the first one took."""
    began = time.perf_counter()
    steps = generate_step(mx.array(rest), model, prompt_cache=cache, max_tokens=_ANSWER, **options)
    found = []
    first = 0.0
    for token, _ in itertools.islice(steps, _ANSWER):
        first = first or time.perf_counter() - began
        found.append(int(token))
    return {"tokens": found, "first": first}


def digest(cache: list[Any], held: int) -> str:
    """Of the classes of a cache, and of its arrays for its first tokens: all but its length."""
    state = [part for part in mlx_models.state_bytes(cache, held) if not isinstance(part, int)]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def restored(kind: str, length: int, options: dict[str, Any]) -> None:
    """What a new process does with the prompt."""
    model, prompt = model_of(kind), tokens_of(length)
    with PersistentPromptCache(model, wait_s=60) as stored:
        began = time.perf_counter()
        cache, held = stored.fetch(prompt, **options)
        fetched = time.perf_counter() - began
        found = {"held": held, "digest": digest(cache, held), "fetched": fetched}
        found |= answer(model, prompt[held:], cache, **options)
    print(json.dumps(found))


@pytest.fixture
def lifeboat(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (home / "lifeboat.yaml").write_text(
        "agent: {autostart: false}\nstorage: {fallback_local: {min_free_gb: 1}}\n"
    )
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    return home


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), ("llama", QUANTIZED)],
    ids=[*KINDS, "llama quantized"],
)
@pytest.mark.usefixtures("lifeboat")
def test_a_restart_costs_neither_bytes_nor_tokens(kind: str, options: dict[str, Any]) -> None:
    _check(kind, 201, options)


@pytest.mark.full
@pytest.mark.usefixtures("lifeboat")
def test_a_restart_of_a_real_model(model: Path) -> None:
    times = _check(str(model), 129, {})
    # A prompt of so few tokens takes seconds here; a restored one takes one step.
    assert times["restored"] < times["computed"]


def _check(kind: str, length: int, options: dict[str, Any]) -> dict[str, float]:
    model, prompt = model_of(kind), tokens_of(length)
    computed = caches.make_prompt_cache(model)
    cold = answer(model, prompt, computed, **options)
    # All but the last token, which is computed in any case.
    kept = caches.make_prompt_cache(model)
    model(mx.array(prompt[:-1])[None], cache=kept)
    if options:
        maybe_quantize_kv_cache(kept, **options)
    mx.eval([one.state for one in kept])
    with PersistentPromptCache(model, wait_s=60) as stored:
        stored.store(prompt[:-1], kept, **options)
        assert stored.flush(60), stored.reason
    code = (
        "import sys, json; from test_mlx_restart import restored; "
        f"restored({kind!r}, {length}, json.loads(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(options)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    held = found["held"]
    assert held >= length - 1 - 64
    assert found["digest"] == digest(kept, held)
    assert found["tokens"] == cold["tokens"]
    warm = answer(model, prompt[-1:], kept, **options)
    assert warm["tokens"] == cold["tokens"]
    times = {
        "computed": cold["first"],
        "in memory": warm["first"],
        "restored": found["fetched"] + found["first"],
    }
    print(f"first token of {length} tokens of {kind}: {times}")
    return times
