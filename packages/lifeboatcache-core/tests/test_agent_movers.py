"""The agent and its movers: started when wanted, started again, ended when they hang."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifeboat_cache.agent.lock import AgentLock
from lifeboat_cache.agent.movers import Movers
from lifeboat_cache.agent.status import clock
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.mover.places import MoverPlaces, target_key
from lifeboat_cache.registry.files import replace_json
from lifeboat_cache.registry.host import process_start

TIER = Tier.model_validate({"name": "share", "type": "nfs", "path": "/mnt/nowhere/kv"})


class Starts:
    def __init__(self) -> None:
        self.keys: list[str] = []
        self.answer = ""

    def __call__(self, key: str) -> str:
        self.keys.append(key)
        return self.answer


@pytest.fixture
def starts() -> Starts:
    return Starts()


@pytest.fixture
def movers(tmp_path: Path, starts: Starts) -> Movers:
    return Movers(tmp_path, starts)


@pytest.fixture
def places(tmp_path: Path) -> MoverPlaces:
    return MoverPlaces.of(tmp_path, target_key(TIER))


@pytest.fixture
def child() -> Iterator[int]:
    """A process that does nothing."""
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def settle(movers: Movers) -> None:
    for mover in movers._movers.values():
        if mover.starter is not None:
            mover.starter.join(60)


def say(places: MoverPlaces, pid: int, age: float = 0.0) -> None:
    replace_json(
        places.document,
        {"pid": pid, "born": process_start(pid), "clock": clock() - age, "engines": 2,
         "facts": {"name": "share", "location": "/mnt/nowhere/kv", "blocks": 7, "new": 1}},
    )  # fmt: skip


def test_mover_is_started_when_an_engine_wants_it(
    movers: Movers, places: MoverPlaces, starts: Starts
) -> None:
    movers.look([])
    assert starts.keys == []
    places.want(TIER)
    movers.look([])
    settle(movers)
    assert starts.keys == [places.target]
    assert movers.has("/mnt/nowhere/kv")
    assert movers.has("/mnt/nowhere/../nowhere/kv/")
    assert not movers.has("/mnt/nowhere")
    (facts,) = movers.facts()
    assert (facts.name, facts.blocks) == ("share", None)


def test_mover_of_the_configuration_is_wanted_by_the_agent(
    movers: Movers, places: MoverPlaces, starts: Starts
) -> None:
    movers.look([TIER])
    settle(movers)
    assert starts.keys == [places.target]
    movers.look([])
    assert places.wanted() == []
    assert not movers.has("/mnt/nowhere/kv")


def test_mover_that_dies_again_and_again_is_started_more_and_more_rarely(
    movers: Movers, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("lifeboat_cache.agent.movers.clock", lambda: now[0])
    starts.answer = "it ended with 2 at its start: see mover.log"
    at = []
    for _ in range(2000):
        before = len(starts.keys)
        movers.look([TIER])
        settle(movers)
        if len(starts.keys) > before:
            at.append(now[0])
        now[0] += 0.1
    pauses = [round(after - before) for before, after in itertools.pairwise(at)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 1
    assert 59 <= pauses[-1] <= 61
    assert any(starts.answer in problem for problem in movers.problems())


def test_living_mover_is_left_alone_and_shown(
    movers: Movers, places: MoverPlaces, starts: Starts, child: int
) -> None:
    places.want(TIER)
    lock = AgentLock.acquire(places.lock)
    assert lock is not None
    try:
        say(places, child)
        movers.look([])
        settle(movers)
        assert starts.keys == []
        (facts,) = movers.facts()
        assert (facts.blocks, facts.problem) == (7, "")
        (described,) = movers.describe()
        assert (described["mover"], described["engines"]) == (child, 2)
        assert movers.problems() == []
    finally:
        lock.release()


def test_mover_that_says_nothing_any_more_is_ended(
    movers: Movers, places: MoverPlaces, child: int, caplog: pytest.LogCaptureFixture
) -> None:
    places.want(TIER)
    lock = AgentLock.acquire(places.lock)
    assert lock is not None
    try:
        say(places, child, age=300)
        for _ in range(3):
            movers.look([])
        give_up = time.monotonic() + 60
        while "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
            assert time.monotonic() < give_up
            time.sleep(0.01)
        # It is dead but not gone, as one that waits in the kernel for its target.
        movers.look([])
        (facts,) = movers.facts()
        assert "cannot be ended: repair or unmount the target" in facts.problem
        assert caplog.text.count("is ended") == 1
    finally:
        lock.release()
