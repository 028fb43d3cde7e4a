"""First token after a restart of SGLang's MLX backend: restored, and computed again.

    python3 tools/dev.py bench sglang_mlx

A server computes prompts and is told to end; another one gets the same prompts, their files
dropped from the page cache. The peer is what the first one took to compute each; the limit is
the same prompt once more on the second one, which then finds it in its own memory. MLX's
CPU build computes: on Apple silicon all of these are other times.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sglang_server import SglangServer

from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, forget_pages, machine_use

_CHUNK = 64

#: Prompts to each server that are thrown away.
_WARM_UP = 1


def _ask(server: SglangServer, tokens: list[int]) -> tuple[float, int]:
    """Seconds until the first token of an answer, and how many tokens were not computed."""
    begin = time.perf_counter()
    answer = server.post(
        "/generate",
        {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 1}},
        timeout_s=300.0,
    )
    return time.perf_counter() - begin, int(answer["meta_info"]["cached_tokens"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench sglang_mlx",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="of 64 tokens, of each prompt")
    parser.add_argument("--model", type=Path, default=os.environ.get("LIFEBOAT_TEST_MODEL"))
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")

    report = Report(arguments.json)
    machine_use("before")
    dice = random.Random(1)
    length = arguments.chunks * _CHUNK + 4
    prompts = [
        [dice.randrange(10, 256) for _ in range(length)] for _ in range(arguments.rounds + _WARM_UP)
    ]
    cold: list[float] = []
    restored: list[float] = []
    held: list[float] = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang_mlx-")))
        (place / "lifeboat.yaml").write_text(
            f"storage: {{fallback_local: {{path: {place / 'kv'}, min_free_gb: 1}}}}\n"
            "agent: {autostart: false}\n"
        )

        def start(name: str) -> SglangServer:
            variables = {
                "SGLANG_USE_MLX": "1",
                "LIFEBOAT_CACHE": "1",
                "LIFEBOAT_CACHE_CONFIG": str(place / "lifeboat.yaml"),
                # With the kernels that are kept there.
                "LIFEBOAT_CACHE_HOME": os.environ["LIFEBOAT_CACHE_HOME"],
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            }
            log = place / f"{name}.log"
            server = SglangServer(arguments.model, log=log, env=variables, overlap=True)
            return stack.enter_context(server)

        first = start("first")
        for turn, prompt in enumerate(prompts, start=-_WARM_UP):
            seconds, _ = _ask(first, prompt)
            if turn >= 0:
                cold.append(seconds)
        first.stop(signal.SIGTERM)
        second = start("second")
        for turn, prompt in enumerate(prompts, start=-_WARM_UP):
            forget_pages(place / "kv")
            seconds, cached = _ask(second, prompt)
            again, _ = _ask(second, prompt)
            if cached != arguments.chunks * _CHUNK:
                raise RuntimeError(f"{cached} of {length} tokens were restored")
            if turn >= 0:
                restored.append(seconds)
                held.append(again)
        second.stop(signal.SIGTERM)
    report.add(
        compare(
            "sglang_mlx",
            f"{length} tokens, {arguments.chunks * _CHUNK} restored",
            "first token after a restart",
            "s",
            restored,
            peer=("computed again", cold),
            limit=("found in the server's own memory", held),
        )
    )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
