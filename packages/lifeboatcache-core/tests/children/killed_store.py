"""Stores blocks until it is killed.

Imports once, then starts a copy of itself for every line on stdin (``SEED FIRST ROOT``)
and prints the copy's process id. The copy writes what became of each block as
``+NUMBER SIZE`` (the store reported it as good) or ``-NUMBER SIZE`` (it was
deleted) to stdout, one write a line, and never stops by itself.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets import segment_writer
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

segment_writer.SEGMENT_BYTES = 1 << 20  # so that segments are sealed now and then


def work(seed: int, number: int, root: Path) -> None:
    choice = random.Random(seed)
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    store.wait_recovered(60)
    while True:
        size = choice.choice((1, 100, 4096, 8192, 20_000, 65_536))
        driver = StoreDriver(store, size=size)
        count = choice.randint(1, 12)
        numbers = range(number, number + count)
        number += count
        lines = ""
        for one, outcome in zip(numbers, driver.store(numbers), strict=True):
            if outcome.good:
                lines += f"+{one} {size}\n"
        if lines:
            os.write(1, lines.encode())
        if choice.random() < 0.2:
            os.write(1, f"-{numbers[0]} {size}\n".encode())
            driver.delete(numbers[:1])
        if choice.random() < 0.1:
            store.touch(driver.keys(numbers))


for line in sys.stdin:
    seed, first, root = line.split(maxsplit=2)
    child = os.fork()
    if not child:
        work(int(seed), int(first), Path(root.strip()))
    os.write(1, f"pid {child}\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\n")
