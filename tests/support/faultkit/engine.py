"""A process that stores and loads, told what to do line by line.

``engine.py ROOT SIZE``. Each line on stdin is JSON (``[command, argument]``), each answer a
line of JSON. :class:`Engine` is the other end.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Engine", "engines"]


class Engine:
    """An engine process."""

    def __init__(self, root: Path, size: int = 8192) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(root), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, argument: object = None) -> None:
        """Send a command and do not wait for the answer."""
        assert self.process.stdin is not None
        print(json.dumps([command, argument]), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        """The answer to the oldest command that was not answered."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine died with {self.process.wait()}"
        return json.loads(line)

    def ask(self, command: str, argument: object = None) -> Any:
        """Send a command and return the answer."""
        self.tell(command, argument)
        return self.hear()

    def kill(self) -> None:
        """As the out-of-memory killer does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def engines(root: Path, count: int, size: int = 8192) -> Iterator[list[Engine]]:
    """So many engine processes on one root; killed at the end."""
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            started.append(Engine(root, size))
            stack.callback(started[-1].kill)
        for engine in started:
            engine.ask("ready")
        yield started


def _main() -> None:
    from lifeboat_cache.interface import BlockStore, Namespace
    from lifeboat_cache.targets.filesystem import FilesystemTarget
    from lifeboat_cache.testing import StoreDriver

    root, size = Path(sys.argv[1]), int(sys.argv[2])
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    driver = StoreDriver(store, size=size)

    def names(outcomes: Sequence[Any]) -> list[str]:
        return [outcome.name for outcome in outcomes]

    def churn(seed: int, seconds: float, count: int) -> dict[str, dict[str, int]]:
        """Store and load numbers below ``count`` at random; StoreDriver compares all bytes."""
        choice = random.Random(seed)
        said: dict[str, Counter[str]] = {"store": Counter(), "load": Counter()}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            numbers = choice.sample(range(count), min(count, 16))
            said["store"].update(names(driver.store(numbers)))
            said["load"].update(names(driver.load(choice.sample(range(count), min(count, 16)))))
        return {kind: dict(counts) for kind, counts in said.items()}

    def answer(command: str, argument: Any) -> object:
        if command == "ready":
            return [store.wait_recovered(60), store.state.name]
        if command in ("store", "load", "lookup"):
            return names(getattr(driver, command)(argument))
        if command == "delete":
            return driver.delete(argument)
        if command == "touch":
            store.touch(driver.keys(argument))
            return None
        if command == "churn":
            return churn(*argument)
        if command == "descriptors":
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            if argument is None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                return None
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + argument, hard))
            return lowest_free
        if command == "fork":
            # A worker that is forked with the store open, uses nothing and exits.
            child = os.fork()
            if not child:
                time.sleep(argument)
                os._exit(0 if store.close() and store.drain() else 1)
            return child
        if command == "counters":
            found = store.counters()
            return [found.bad_entries, dict(found.load_outcomes)]
        if command == "close":
            return store.close()
        raise ValueError(command)

    for line in sys.stdin:
        command, argument = json.loads(line)
        print(json.dumps(answer(command, argument)), flush=True)


if __name__ == "__main__":
    _main()
