"""Several nodes on one directory: no wrong block, and what was reported stored is there."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from nodes import SCALE, Node, nodes, until

from lifeboat_cache.targets.layout import JANITOR_LEASE
from lifeboat_cache.targets.writer_lock import LEASE_S

#: A janitor that does something at once. Graces are not scaled: they are the janitor's own.
KEEN = {"grace_s": 1.0, "young_s": 0.0, "merge_count": 2}

pytestmark = pytest.mark.usefixtures("kernel_home")


def test_nodes_whose_clocks_disagree_share(root: Path) -> None:
    with nodes(root, "ann", "bob", "cid") as started:
        assert [node.ask("hostname") for node in started] == ["ann", "bob", "cid"]
        stored = []
        for at, node in enumerate(started):
            stored += node.good(at * 100, at * 100 + 40)
        assert len(stored) == 120
        for node in started:
            assert node.finds(stored)
        # Who lives is known everywhere, by everybody's clock.
        time.sleep(1.5 * SCALE * LEASE_S)
        for node in started:
            assert node.ask("writers") == {"ann": True, "bob": True, "cid": True}
            assert node.ask("counters")["bad"] == 0


def test_a_node_that_is_killed_leaves_what_it_stored(root: Path) -> None:
    with nodes(root, "ann", "bob") as (ann, bob):
        stored = ann.good(0, 40)
        assert len(stored) == 40
        ann.tell("store", [40, 4000])
        time.sleep(0.1)
        ann.kill()
        assert bob.finds(stored)
        assert bob.ask("writers")["ann"], "it is not known yet"
        assert until(lambda: not bob.ask("writers")["ann"])
        assert bob.finds(stored)


@pytest.mark.full
def test_a_living_writer_of_another_node_is_left_alone(root: Path) -> None:
    with nodes(root, "ann", "bob") as (ann, bob):
        for first in range(0, 60, 20):
            assert len(ann.good(first, first + 20)) == 20
        bob.ask("janitor", KEEN)
        time.sleep(2 * SCALE * LEASE_S)  # ann only shows that it lives
        reports = bob.ask("reports", 0)
        assert len(reports) > 5
        assert not any(r["writers_removed"] or r["merged_segments"] for r in reports)
        assert len(ann.good(60, 80)) == 20
        assert bob.finds(list(range(80)))
        assert ann.ask("writers")["ann"]
        assert len(list(root.glob("*/*.journal"))) == 1


@pytest.mark.full
def test_a_node_that_comes_back_after_its_files_were_taken_over(root: Path) -> None:
    with nodes(root, "ann", "bob", "dan") as started:
        ann, bob, dan = started
        stored = ann.good(0, 40) + dan.good(100, 104)
        assert dan.ask("close")
        ann.send(signal.SIGSTOP)
        bob.ask("janitor", KEEN)
        # Both have lost their journals, and what these named is in files of bob's janitor.
        assert until(lambda: sum(r["writers_removed"] for r in bob.ask("reports", 0)) >= 2)
        assert bob.finds(stored)
        ann.send(signal.SIGCONT)
        assert until(lambda: len(ann.good(200, 240)) == 40)
        fresh = Node(root, "cid")
        started.append(fresh)
        fresh.hear()
        assert fresh.finds([*stored, *range(200, 240)])
        assert bob.finds(list(range(200, 240)))
        assert ann.finds(stored)


def test_a_janitor_that_dies_is_followed_by_another_nodes(root: Path) -> None:
    with nodes(root, "ann", "bob") as (ann, bob):
        assert len(ann.good(0, 4)) == 4
        ann.ask("janitor", KEEN)
        lease = root / JANITOR_LEASE
        assert until(lambda: lease.exists() and json.loads(lease.read_text())["host"] == "ann")
        bob.ask("janitor", KEEN)
        assert until(lambda: len(bob.ask("reports", 0)) > 3)
        reports = bob.ask("reports", 0)
        assert all(r["busy"] and "on ann" in r["holder"] for r in reports)
        ann.kill()
        assert until(lambda: not bob.ask("reports", 0)[-1]["busy"])
        assert json.loads(lease.read_text())["host"] == "bob"


@pytest.mark.full
def test_eviction_beside_readers_of_other_nodes(root: Path) -> None:
    settings = {"capacity": 24 << 20, "segment_bytes": 2 << 20, "size": 32 << 10}
    with nodes(root, "ann", "bob", "cid", **settings) as (ann, bob, cid):
        ann.ask("janitor", {**KEEN, "grace_s": 0.3})
        evicted = 0
        for first in range(0, 3000, 100):
            ann.tell("store", [first, first + 100])
            numbers = list(range(max(0, first - 700), first))
            for node in (bob, cid):
                node.tell("load", numbers)
            outcomes = {said for node in (bob, cid) for said in node.hear()}
            assert outcomes <= {"OK", "MISSING"}, outcomes
            ann.hear()
            evicted = sum(r["evicted_blocks"] for r in ann.ask("reports", 0))
        assert evicted > 500
        for node in (bob, cid):
            counters = node.ask("counters")
            assert "corrupt" not in counters["load"]
            assert counters["load"]["ok"] > 1000
            assert counters["bad"] == 0
