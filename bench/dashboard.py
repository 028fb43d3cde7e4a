"""How long the dashboard takes for its pages on a busy node.

    python3 tools/dev.py bench dashboard

A real dashboard in a process of its own, in front of made-up documents: sixteen engines and an
agent with eight targets, two weeks of history and journals of a million blocks. Of each page
the time from asking to having it, over the loopback interface; the limit is an answer of the same
server that shows nothing, `/healthz`.
"""

from __future__ import annotations

import argparse
import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from published import MadeUpHome, agent_facts, engine_facts
from vllm_server import free_port

from lifeboat_cache import version
from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, machine_use
from lifeboat_cache.format.header import MAGIC_JOURNAL, MAGIC_SEGMENT, FileHeader
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.targets.filesystem import FilesystemTarget

PACKAGE = Path(__file__).parents[1] / "packages/lifeboatcache-dashboard/src"

PAGES = (
    "/",
    "/?range=14d",
    "/targets",
    "/contents",
    "/recovery",
    "/processes",
    "/configure",
    "/api/overview",
    "/metrics",
)

# As the agent starts it, so that it need not be installed.
_MAIN = PACKAGE / "lifeboat_cache/dashboard/__main__.py"
_CORE = Path(version.__file__).parents[1]


def write_blocks(root: Path, blocks: int, writers: int = 8) -> None:
    """Journals of prompts of 64 blocks that share their first half in groups of 16."""
    identity = {"engine": "vllm", "model": "made up", "root": str(root)}
    namespace = Namespace.from_identity(identity, {"model": "made up", "dtype": "bfloat16"})
    target = FilesystemTarget(root, name="made up", reserve=0)
    target.probe()
    target.writer(namespace).close()
    directory = root / namespace.directory
    for number in range(writers):
        writer = bytes([number + 1]) * 16
        count = blocks // writers
        entries = np.zeros(count, ENTRY)
        place = np.arange(count, dtype=np.uint64)
        prompt, depth = place // 64, place % 64
        shared = np.where(depth < 32, prompt // 16 * 16, prompt)
        base = np.uint64((number + 1) << 40)
        entries["family"] = base + shared * np.uint64(64) + depth + np.uint64(1)
        above = np.where(depth <= 32, prompt // 16 * 16, prompt)
        parent = base + above * np.uint64(64) + depth
        entries["parent"] = np.where(depth == 0, 0, parent)
        entries["position"] = (depth + 1) * 256
        entries["slot"] = place
        entries["time"] = int(time.time())
        entries["kind"] = KIND_RECORD
        made = int(time.time())
        for magic, name in ((MAGIC_JOURNAL, "journal"), (MAGIC_SEGMENT, "00000000.segment")):
            header = FileHeader(magic, namespace.digest, writer, 0, made)
            data = entries.tobytes() if magic == MAGIC_JOURNAL else b""
            (directory / f"{writer.hex()}.{name}").write_bytes(header.pack() + data)


def write_configuration(home: Path, port: int, targets: int) -> None:
    tiers = "".join(
        f"    - {{name: nvme{number}, type: filesystem, path: {home}/nvme{number}}}\n"
        for number in range(targets)
    )
    (home / "lifeboat.yaml").write_text(f"storage:\n  tiers:\n{tiers}dashboard: {{port: {port}}}\n")


def write_history(home: Path) -> None:
    """Two weeks of samples, as a dashboard takes them."""
    sys.path.append(str(PACKAGE))
    from lifeboat_cache.dashboard.history import FIELDS, SPANS, History

    history = History(home / "dashboard" / "history")
    now = time.time()
    for span in reversed(SPANS):
        for at in np.arange(now - span.seconds, now, span.step_s):
            history.add(at, dict.fromkeys(FIELDS, at * 7))
    history.close()


class Browser:
    """One connection, kept open as browsers do."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def seconds(self, path: str) -> float:
        """How long a page takes."""
        begin = time.perf_counter()
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path} was answered with {answer.status}")
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Until somebody answers."""
        give_up = time.monotonic() + 60
        while True:
            try:
                self.seconds("/healthz")
                return
            except OSError:
                self._connection.close()
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.1)


def measure(report: Report, engines: int, targets: int, blocks: int, rounds: int) -> None:
    case = f"{engines} engines, {targets} targets, {blocks:,} blocks"
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary) / "home"
        home.mkdir(mode=0o700)
        port = free_port()
        write_configuration(home, port, targets)
        for number in range(targets):
            write_blocks(home / f"nvme{number}", blocks // targets)
        write_history(home)
        made = MadeUpHome(home)
        for number in range(engines):
            made.publish(engine_facts(number, of=targets))
        made.publish(agent_facts(targets), "agent")
        environ = {**os.environ, "LIFEBOAT_CACHE_HOME": str(home)}
        environ.pop("LIFEBOAT_CACHE_CONFIG", None)
        process = subprocess.Popen(
            [sys.executable, "-P", _MAIN, _CORE],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            browser = Browser(port)
            browser.wait()
            browser.seconds("/contents")
            time.sleep(2)  # as processes do, and so that prefixes are being read
            ours: dict[str, list[float]] = defaultdict(list)
            limit: dict[str, list[float]] = defaultdict(list)
            for turn in range(rounds):
                made.beat()
                for page in PAGES[turn % len(PAGES) :] + PAGES[: turn % len(PAGES)]:
                    ours[page].append(browser.seconds(page))
                    limit[page].append(browser.seconds("/healthz"))
            for page in PAGES:
                beside = ("/healthz", limit[page])
                report.add(compare("dashboard", case, page, "s", ours[page], limit=beside))
            slowest = [max(times) for times in zip(*ours.values(), strict=True)]
            report.add(compare("dashboard", case, "the slowest page of a round", "s", slowest))
        finally:
            process.kill()
            process.wait()
            made.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench dashboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    arguments = parser.parse_args(argv)
    if arguments.rounds < LEAST_PAIRS:
        parser.error(f"an interval needs at least {LEAST_PAIRS} rounds")
    report = Report(arguments.json)
    machine_use("before")
    measure(report, arguments.engines, arguments.targets, arguments.blocks, arguments.rounds)
    machine_use("after")
    report.close()


if __name__ == "__main__":
    main()
