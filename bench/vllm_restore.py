"""First token after a restart: ours, vLLM's own fs tier, and computing it again.

    python3 tools/dev.py bench vllm_restore

Two servers store the same prompts of about 2,100 tokens and are killed. Then three are
up at the same time on the same cores, with empty GPU and CPU memory: ours, the fs tier,
and one without a cache; for half of the prompts they are started in the reverse order. Each
round sends one of the prompts to all of them, in another
order each time, its files dropped from the page cache. The limit is the same prompt
once more on our server, which then finds it in its own memory.

By default the prompts end shortly after the end of a chunk, so that the same tokens are
left to compute, whatever the size of a block or a chunk: 128 or 256 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import signal
from collections import defaultdict
from collections.abc import Sequence

from long_prompt import long_prompt
from several_servers import FS, OURS, PLAIN, Servers, wait_until_idle

from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, forget_pages, machine_use

#: Prompts after each start that are thrown away.
_WARM_UP = 2

_IN_MEMORY = "found in the server's own memory"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_restore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--days", type=int, default=25, help="length of a prompt, 86 tokens a day")
    parser.add_argument(
        "--fs-default-chunk",
        action="store_true",
        help="leave the fs tier at vLLM's default of one block a chunk, instead of 256 tokens",
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")

    report = Report(arguments.json)
    machine_use("before")
    servers = Servers("vllm_restore", chunk_tokens=None if arguments.fs_default_chunk else 256)
    # Some more to warm up with after each start, which are not counted.
    prompts = [
        long_prompt(arguments.days, seed=200 + n) for n in range(arguments.rounds + 2 * _WARM_UP)
    ]
    for who in (OURS, FS):
        with servers.running((who,)) as up:
            for prompt in prompts:
                up[who].complete(prompt, max_tokens=1)
            wait_until_idle(up[who])
            up[who].stop(signal.SIGKILL)

    found: dict[str, list[float]] = defaultdict(list)
    restored: dict[str, list[int]] = defaultdict(list)
    orders = list(itertools.permutations((OURS, FS, PLAIN)))
    tokens = 0
    half = len(prompts) // 2
    for started, part in (
        ((OURS, FS, PLAIN), prompts[half:]),
        ((PLAIN, FS, OURS), prompts[:half]),
    ):
        with servers.running(started) as up:
            for turn, prompt in enumerate(part, start=-_WARM_UP):
                for who in orders[turn % len(orders)]:
                    if who != PLAIN:
                        forget_pages(servers.stored(who))
                    answer = up[who].complete(prompt, max_tokens=8)
                    wait_until_idle(up[who])
                    tokens = answer.prompt_tokens
                    if turn >= 0:
                        found[who].append(answer.first_token_s)
                        restored[who].append(answer.cached_tokens)
                again = up[OURS].complete(prompt, max_tokens=8).first_token_s
                if turn >= 0:
                    found[_IN_MEMORY].append(again)
                wait_until_idle(up[OURS])
    for who in (OURS, FS):
        if min(restored[who]) < 0.8 * tokens:
            raise RuntimeError(
                f"{who}: only {min(restored[who])} of {tokens} tokens were restored; "
                f"see the logs in {servers.directory}"
            )
    case = f"{tokens} tokens, {min(restored[OURS])} restored (fs tier: {min(restored[FS])})"
    in_memory = (_IN_MEMORY, found[_IN_MEMORY])
    for peer in (FS, PLAIN):
        report.add(
            compare(
                "vllm_restore",
                case,
                "first token after a restart",
                "s",
                found[OURS],
                peer=("computed again" if peer == PLAIN else peer, found[peer]),
                limit=in_memory,
            )
        )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
