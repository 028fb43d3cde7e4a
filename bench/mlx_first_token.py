"""Times from a prompt to its first token with mlx-lm: what a returning prompt costs.

    python3 tools/dev.py bench mlx_first_token

The same prompt in five ways: computed; from a prompt cache that is still in memory (the limit);
from ours after a restart of the process, with its files in the page cache and without; and
from ``load_prompt_cache`` in another new process. Each process loads the model first, which is not
counted; what is counted begins with opening the store or the file, and ends with the token.
All ways have to give the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from devkit.places import dev_home
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as caches

from lifeboat_cache.bench import (
    LEAST_PAIRS,
    Report,
    compare,
    forget_pages,
    machine_use,
    ready_kernels,
)
from lifeboat_cache.mlx import PersistentPromptCache

_MEMORY, _COMPUTED, _FILE = "from memory", "computed", "load_prompt_cache"
_WARM, _COLD = "ours, page cache", "ours, medium"
_ANSWER = 8


def say(text: str) -> None:
    """Tell whoever runs the benchmark what is going on."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def _prompt(tokenizer: Any, tokens: int) -> list[int]:
    text = "The ferry leaves at noon, and whoever is late stays on the island. " * (tokens // 8)
    return [int(token) for token in tokenizer.encode(text)][:tokens]


def _answer(model: Any, rest: Sequence[int], cache: list[Any]) -> tuple[float, list[int]]:
    """When the first token was there, and all tokens."""
    found: list[int] = []
    first = 0.0
    steps = generate_step(mx.array(rest), model, prompt_cache=cache, max_tokens=_ANSWER)
    for token, _ in steps:
        first = first or time.perf_counter()
        found.append(int(token))
    return first, found


def _timed(
    model: Any, prompt: Sequence[int], get: Callable[[], tuple[list[Any], int]]
) -> tuple[float, list[int], int]:
    """Seconds to the first token, all tokens, and how many were not computed."""
    begin = time.perf_counter()
    cache, held = get()
    first, tokens = _answer(model, prompt[held:], cache)
    return first - begin, tokens, held


def _kept(cache: list[Any], held: int) -> tuple[list[Any], int]:
    return cache, held


def _child(arguments: argparse.Namespace) -> None:
    """In a new process: restore, answer, and say how it went."""
    model, tokenizer = load(str(arguments.model))
    prompt = _prompt(tokenizer, arguments.tokens)
    mx.eval(model(mx.array([[1, 2]])))  # as a process that has answered something
    if arguments.child == _FILE:

        def get() -> tuple[list[Any], int]:
            return list(caches.load_prompt_cache(str(arguments.file))), len(prompt) - 1

    else:

        def get() -> tuple[list[Any], int]:
            ours = PersistentPromptCache(model, config=arguments.config, wait_s=60)
            return ours.fetch(prompt)

    print(json.dumps(_timed(model, prompt, get)))


def _restarted(
    arguments: argparse.Namespace, place: Path, who: str
) -> tuple[float, list[int], int]:
    command = [
        sys.executable, __file__, "--child", who, "--model", str(arguments.model),
        "--tokens", str(arguments.tokens), "--config", str(place / "lifeboat.yaml"),
        "--file", str(place / "cache.safetensors"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{who}: {done.stderr[-2000:]}")
    seconds, tokens, held = json.loads(done.stdout.splitlines()[-1])
    return float(seconds), [int(token) for token in tokens], int(held)


def measure(report: Report, arguments: argparse.Namespace, place: Path) -> None:
    """Measure one prompt and report it."""
    (place / "lifeboat.yaml").write_text(
        f"storage: {{fallback_local: {{path: {place / 'kv'}, min_free_gb: 1}}}}\n"
        "agent: {autostart: false}\n"
    )
    model, tokenizer = load(str(arguments.model))
    prompt = _prompt(tokenizer, arguments.tokens)
    say(f"the prompt of {len(prompt)} tokens is computed")
    known = caches.make_prompt_cache(model)
    model(mx.array(prompt[:-1])[None], cache=known)  # the last token is computed in any case
    mx.eval([one.state for one in known])
    caches.save_prompt_cache(str(place / "cache.safetensors"), known)
    with PersistentPromptCache(model, config=place / "lifeboat.yaml", wait_s=60) as ours:
        ours.store(prompt[:-1], known)
        if not ours.flush(120):
            raise RuntimeError(f"nothing was stored: {ours.reason}")
    found: dict[str, list[float]] = defaultdict(list)
    answers: set[tuple[int, ...]] = set()
    restored: list[int] = []
    for turn in range(arguments.rounds):
        say(f"round {turn + 1} of {arguments.rounds}")
        for who in (_COMPUTED, _MEMORY, _WARM, _COLD, _FILE):
            if who == _COMPUTED:
                result = _timed(model, prompt, lambda: (caches.make_prompt_cache(model), 0))
            elif who == _MEMORY:
                kept = copy.deepcopy(known)
                mx.eval([one.state for one in kept])
                result = _timed(model, prompt, partial(_kept, kept, len(prompt) - 1))
            else:
                if who in (_COLD, _FILE):
                    forget_pages(place)
                result = _restarted(arguments, place, who)
            found[who].append(result[0])
            answers.add(tuple(result[1]))
            if who in (_WARM, _COLD):
                restored.append(result[2])
    if len(answers) != 1:
        raise RuntimeError(f"the tokens are not the same: {answers}")
    if not min(restored):
        raise RuntimeError("nothing was restored")
    case = f"{len(prompt)} tokens, {min(restored)} restored"
    for ours_ in (_WARM, _COLD):
        for peer in (_COMPUTED, _FILE):
            report.add(
                compare(
                    "mlx_first_token",
                    case,
                    f"first token after a restart, {ours_}",
                    "s",
                    found[ours_],
                    peer=(peer, found[peer]),
                    limit=(_MEMORY, found[_MEMORY]),
                )
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench mlx_first_token",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=129, help="of the prompt")
    parser.add_argument(
        "--model", type=Path, default=os.environ.get("LIFEBOAT_TEST_MODEL"), help="a directory"
    )
    parser.add_argument("--root", type=Path, help="where to put the files")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not compile kernels that are not there"
    )
    for hidden in ("--child", "--config", "--file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.model is None:
        parser.error("say with --model which model to use")
    if arguments.child:
        _child(arguments)
        return
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    ready_kernels(say, compiling=not arguments.no_compile)
    root = arguments.root or dev_home() / "bench"
    root.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.json)
    machine_use("before")
    with tempfile.TemporaryDirectory(prefix="mlx_first_token-", dir=root) as place:
        measure(report, arguments, Path(place))
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
