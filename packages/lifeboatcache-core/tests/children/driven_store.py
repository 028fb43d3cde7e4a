"""A store in a process of its own: ``driven_store.py ROOT SIZE``.

Reads one command a line from stdin (a word and block numbers) and answers each
with one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store import keeper
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

root, size = Path(sys.argv[1]), int(sys.argv[2])
keeper._TAIL_S = 0.02  # follow other writers closely
target = FilesystemTarget(root)
namespace = Namespace.from_identity({"engine": "test", "model": "small"})
store = BlockStore(namespace, [target], io_workers=2)
store.wait_recovered(60)
driver = StoreDriver(store, size=size)


def answer(command: str, numbers: list[int]) -> object:
    if command == "store":
        return [outcome.name for outcome in driver.store(numbers)]
    if command == "load":
        return [outcome.name for outcome in driver.load(numbers)]
    if command == "lookup":
        return [found.name for found in driver.lookup(numbers)]
    if command == "delete":
        return driver.delete(numbers)
    if command == "touch":
        store.touch(driver.keys(numbers))
        return None
    if command == "drain":
        return store.drain(60)
    if command == "bad":
        return store.counters().bad_entries
    if command == "purge":
        report = target.purge(namespace.hex)
        return [report.blocks, len(report.kept)]
    if command == "owners":
        return [
            [writer.alive, writer.owner] for info in target.namespaces() for writer in info.writers
        ]
    if command == "fork":
        # A child that closes what it inherited, as an engine's worker at its exit.
        child = os.fork()
        if not child:
            os._exit(0 if store.close() and store.drain() else 1)
        return os.waitpid(child, 0)[1]
    if command == "close":
        return store.close()
    raise ValueError(command)


for line in sys.stdin:
    command, *rest = line.split()
    print(json.dumps(answer(command, [int(word) for word in rest])), flush=True)
