"""What the cache costs a real server: prompts that nobody has seen, on or off.

    python3 tools/dev.py bench vllm_overhead

Three servers are up at the same time on the same cores: LIFEBOAT_CACHE=1, vLLM's own
fs tier, and no cache. Each round sends one new prompt of about 2,100 tokens to all of
them, in another order each time: cold, the same again at once (while the cache still
stores), and once more when all is quiet. Half of the rounds is measured after starting the
servers in one order and half after starting them in the reverse, because the first one may
get the better place on the machine; their pairs are pooled. The CPU time is that of the
whole server for the first two, with all that it does behind its answers. The limit is the
server without a cache.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Sequence

from long_prompt import long_prompt
from several_servers import FS, OURS, PLAIN, Servers, cpu_seconds, wait_until_idle
from vllm_server import VllmServer

from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, machine_use

_COLD = "cold, first token"
_TOTAL = "cold, whole answer"
_AGAIN = "repeat at once, first token"
_LATER = "repeat later, first token"
_CPU = "cold and repeat, CPU time"
#: Rounds after each start that are thrown away.
_WARM_UP = 2

_METRICS = (_COLD, _TOTAL, _AGAIN, _LATER, _CPU)


def measure(
    server: VllmServer, prompt: str, max_tokens: int, found: dict[str, list[float]]
) -> tuple[int, int]:
    """Send one prompt three times; its tokens, and those that the last answer found cached."""
    cpu = cpu_seconds(server)
    cold = server.complete(prompt, max_tokens=max_tokens)
    if cold.cached_tokens:
        raise RuntimeError("the prompt is not new to the server: its first words are shared")
    again = server.complete(prompt, max_tokens=max_tokens)
    wait_until_idle(server)
    found[_CPU].append(cpu_seconds(server) - cpu)
    later = server.complete(prompt, max_tokens=max_tokens)
    wait_until_idle(server)
    found[_COLD].append(cold.first_token_s)
    found[_TOTAL].append(cold.total_s)
    found[_AGAIN].append(again.first_token_s)
    found[_LATER].append(later.first_token_s)
    return cold.prompt_tokens, later.cached_tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--days", type=int, default=25, help="length of a prompt, 86 tokens a day")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of an answer")
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")

    report = Report(arguments.json)
    machine_use("before")
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    orders = list(itertools.permutations((OURS, FS, PLAIN)))
    servers = Servers("vllm_overhead")
    seeds = itertools.count(100)
    tokens = cached = 0
    half = arguments.rounds // 2
    for started, rounds in (
        ((OURS, FS, PLAIN), arguments.rounds - half),
        ((PLAIN, FS, OURS), half),
    ):
        with servers.running(started) as up:
            for turn in range(-_WARM_UP, rounds):
                prompt = long_prompt(arguments.days, seed=next(seeds))
                for who in orders[turn % len(orders)]:
                    taken: dict[str, list[float]] = defaultdict(list)
                    tokens, cached = measure(up[who], prompt, arguments.max_tokens, taken)
                    if turn >= 0:
                        for metric, values in taken.items():
                            found[who][metric] += values
    for metric in _METRICS:
        report.add(
            compare(
                "vllm_overhead",
                f"{tokens} tokens, {cached} of them cached in the end",
                metric,
                "s",
                found[OURS][metric],
                peer=(FS, found[FS][metric]),
                limit=(PLAIN, found[PLAIN][metric]),
            )
        )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
