"""What it costs an engine that somebody looks at the dashboard.

    python3 tools/dev.py bench vllm_dashboard

One real server with the cache, whose agent serves the dashboard. In each round new prompts are
sent while the overview is open and refreshes itself, as a browser does it but every second
instead of every five, and while nobody looks; in turn, in the order ABBA. After a page was
closed the dashboard goes on looking for half a minute, which is waited for. The limit is the
same server with the page closed. Takes about eight minutes with 7 rounds on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from typing import Self

from dashboard_pages import PACKAGE, Pages, until
from long_prompt import long_prompt
from several_servers import OURS, Servers, wait_until_idle
from vllm_server import VllmServer, free_port

from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, machine_use

#: How often the page refreshes itself, in seconds.
_REFRESH_S = 1.0

#: The dashboard looks as often as for a reader for so long after the last one.
_INTEREST_S = 32.0

_OPEN, _CLOSED = "page open", "page closed"

#: Rounds that are thrown away.
_WARM_UP = 1


class Reader:
    """Looks at the overview until told to stop."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.looked = 0

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self.looked, bool)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.is_set():
            self._pages.text("/")
            self.looked += 1
            self._stop.wait(_REFRESH_S)


def seconds(server: VllmServer, prompts: Sequence[str], max_tokens: int) -> float:
    """How long a server takes for some new prompts, one after the other."""
    begin = time.perf_counter()
    for prompt in prompts:
        if server.complete(prompt, max_tokens=max_tokens).cached_tokens:
            raise RuntimeError("the prompt is not new to the server: its first words are shared")
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench vllm_dashboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=1, help="of a measurement")
    parser.add_argument("--days", type=int, default=4, help="length of a prompt, 86 tokens a day")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of an answer")
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")

    report = Report(arguments.json)
    machine_use("before")
    port = free_port()
    servers = Servers(
        "vllm_dashboard", settings=f"dashboard: {{port: {port}}}\n", packages=(PACKAGE,)
    )
    found: dict[str, list[float]] = {_OPEN: [], _CLOSED: []}
    seeds = itertools.count(100)
    with servers.running((OURS,)) as up:
        server, pages = up[OURS], Pages(port)
        until(lambda: pages.get("/api/overview")["engines"], bool)
        forgotten = 0.0  # when the dashboard looks no more for a reader
        for turn in range(-_WARM_UP, arguments.rounds):
            for state in (_OPEN, _CLOSED) if turn % 2 == 0 else (_CLOSED, _OPEN):
                prompts = [
                    long_prompt(arguments.days, seed=next(seeds)) for _ in range(arguments.prompts)
                ]
                wait_until_idle(server)
                if state == _OPEN:
                    with Reader(pages):
                        taken = seconds(server, prompts, arguments.max_tokens)
                    forgotten = time.monotonic() + _INTEREST_S
                else:
                    time.sleep(max(0.0, forgotten - time.monotonic()))
                    taken = seconds(server, prompts, arguments.max_tokens)
                if turn >= 0:
                    found[state].append(taken)
                    print(f"[bench] round {turn}, {state}: {taken:.2f} s", file=sys.stderr)
    report.add(
        compare(
            "vllm_dashboard",
            f"{arguments.prompts} new prompts of {86 * arguments.days} tokens",
            "all answers",
            "s",
            found[_OPEN],
            limit=(_CLOSED, found[_CLOSED]),
        )
    )
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
