"""Nodes that share a mount for minutes, with kills, pauses and a mount that answers late and wrong.

Every block that any node reports stored is there in the end, and right; no block is ever wrong.
``LIFEBOAT_SOAK_S`` says how long it takes (by default five minutes), ``LIFEBOAT_SOAK_BLOCKS`` how
many blocks there have to be.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from faultkit.disks import FaultyDisk, faulty_disk
from nodes import DAY, SCALE, Node, until

_SECONDS = float(os.environ.get("LIFEBOAT_SOAK_S", "300"))
_LEAST_BLOCKS = int(os.environ.get("LIFEBOAT_SOAK_BLOCKS", "100000"))

_BATCH = 400
_SIZE = 4096

#: Janitors merge and compact all the time; nothing is evicted.
_KEEN = {"grace_s": 1.0, "young_s": 0.0, "merge_count": 3, "eviction": "none"}

#: What a mount does now and then, for a second or so.
_MOODS: list[list[dict[str, object]]] = [
    [],
    [{"op": "read", "match": r"\.(journal|segment)$", "do": "delay", "seconds": 0.05, "times": 40}],
    [{"op": "read", "match": r"\.journal$", "do": "torn", "times": 4}],
    [{"op": "read", "match": r"\.segment$", "do": "torn", "times": 4}],
    [{"op": "read", "match": r"\.(journal|segment)$", "do": "error", "errno": 116, "times": 6}],
    [{"op": "open", "match": r"\.(journal|segment)$", "do": "error", "errno": 116, "times": 4}],
    [{"op": "read", "match": r"\.(journal|segment)$", "do": "error", "errno": 5, "times": 6}],
    [{"op": "write", "match": r"\.(journal|segment)$", "do": "error", "errno": 5, "times": 3}],
    [{"op": "write", "match": r"\.segment$", "do": "error", "errno": 28, "times": 6}],
    [{"op": "fsync", "match": r"\.(journal|segment)$", "do": "error", "errno": 5, "times": 2}],
    [{"op": "readdir", "match": r"\.segment$", "do": "hide", "times": 6}],
]


class Fleet:
    """Nodes, and what they have reported stored."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.nodes: list[Node] = []
        self.paused: dict[Node, float] = {}
        self.stored: list[int] = []
        self.next = 0
        self.deaths = self.pauses = self.started = self.loaded = 0

    def start(self) -> None:
        self.started += 1
        clock = self.random.choice((-400, -1, 0, 1, 400)) * DAY
        node = Node(
            self.root, f"node{self.started}", clock=clock, size=_SIZE, segment_bytes=4 << 20
        )
        self.nodes.append(node)
        assert node.hear() in ("ready", "recovering")
        node.ask("janitor", _KEEN)

    def work(self) -> None:
        """Each node stores a batch, and loads some of what others have stored."""
        busy = [node for node in self.nodes if node not in self.paused]
        given: dict[Node, range] = {}
        for node in busy:
            given[node] = range(self.next, self.next + _BATCH)
            self.next += _BATCH
            node.tell("store", [given[node].start, given[node].stop])
        for node in busy:
            outcomes = node.hear()
            kept = [n for n, said in zip(given[node], outcomes, strict=True) if said == "OK"]
            self.stored += kept
        if not self.stored:
            return
        wanted = self.random.sample(self.stored, min(200, len(self.stored)))
        for node in busy:
            node.tell("load", wanted)
        for node in busy:
            # Whatever is not there now is there later; what is there has been compared.
            self.loaded += node.hear().count("OK")

    def upset(self) -> None:
        """Kill a node, or stop one for longer than its lease."""
        now = time.monotonic()
        for node, until_ in list(self.paused.items()):
            if now > until_:
                node.send(signal.SIGCONT)
                del self.paused[node]
        chance = self.random.random()
        busy = [node for node in self.nodes if node not in self.paused]
        if chance < 0.04 and len(busy) > 1:
            victim = self.random.choice(busy)
            victim.tell("store", [self.next, self.next + _BATCH])  # nobody hears of it
            self.next += _BATCH
            time.sleep(self.random.random() * 0.1)
            victim.kill()
            self.nodes.remove(victim)
            self.deaths += 1
            self.start()
        elif chance < 0.07 and len(busy) > 2:
            victim = self.random.choice(busy)
            victim.send(signal.SIGSTOP)
            self.paused[victim] = now + self.random.choice((1.0, 12.0))
            self.pauses += 1

    def end(self) -> None:
        for node in self.nodes:
            node.process.kill()
            node.process.wait(30)


@pytest.mark.full
@pytest.mark.parametrize("faults", [False, True], ids=["kills", "kills-and-faults"])
def test_nodes_that_share_a_mount_for_minutes(tmp_path: Path, faults: bool) -> None:
    if faults:
        with faulty_disk(tmp_path) as disk:
            soak(disk.root, disk)
    else:
        soak(tmp_path / "kv", None)


def soak(root: Path, disk: FaultyDisk | None) -> None:
    seed = int(os.environ.get("LIFEBOAT_SOAK_SEED", time.time()))
    fleet = Fleet(root, seed)
    try:
        for _ in range(3):
            fleet.start()
        ends = time.monotonic() + _SECONDS
        mood_ends = 0.0
        while time.monotonic() < ends or len(fleet.stored) < _LEAST_BLOCKS:
            if disk is not None and time.monotonic() > mood_ends:
                disk.rules(*fleet.random.choice(_MOODS))
                mood_ends = time.monotonic() + 1.0
            fleet.work()
            fleet.upset()
        if disk is not None:
            disk.rules()
        for node in list(fleet.paused):
            node.send(signal.SIGCONT)
        time.sleep(3 * SCALE * 60.0)
        fleet.start()
        fresh = fleet.nodes[-1]
        lost = set(fleet.stored)

        def all_there() -> bool:
            for first in range(0, len(fleet.stored), 1000):
                part = [n for n in fleet.stored[first : first + 1000] if n in lost]
                if part:
                    outcomes = fresh.ask("load", part)
                    lost.difference_update(
                        n for n, said in zip(part, outcomes, strict=True) if said == "OK"
                    )
            return not lost

        there = until(all_there)
        print(
            f"seed {seed}: {len(fleet.stored):,} blocks stored, {fleet.loaded:,} loads compared, "
            f"{fleet.deaths} nodes killed, {fleet.pauses} stopped, {len(lost)} lost"
        )
        assert there, f"seed {seed}: reported stored and not there: {sorted(lost)[:20]}"
        assert "corrupt" not in fresh.ask("counters")["load"]
    finally:
        fleet.end()
