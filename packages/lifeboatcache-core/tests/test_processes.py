"""Several processes on one directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ladders import only_store

from lifeboat_cache.config import Config
from lifeboat_cache.errors import StoreClosedError
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store import keeper
from lifeboat_cache.store.block_store import BlockStore, State
from lifeboat_cache.store.opening import open_block_store
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import new_writer_id
from lifeboat_cache.targets.writer_lock import writer_alive
from lifeboat_cache.testing import StoreDriver

Open = Callable[..., StoreDriver]
Start = Callable[..., Any]

OK, PRESENT = Outcome.OK, Outcome.PRESENT


def until(answers: Callable[[], Sequence[Any]], expected: Sequence[Any]) -> None:
    """Ask again until the answer is as expected; it never is if something is broken."""
    give_up = time.monotonic() + 60
    while list(answers()) != list(expected):
        assert time.monotonic() < give_up, f"still {answers()} instead of {expected}"
        time.sleep(0.01)


def test_another_process_hits_what_this_one_stored(open_driver: Open, start_process: Start) -> None:
    driver = open_driver()
    assert driver.store(range(5)) == [OK] * 5
    other = start_process()
    assert other.ask("lookup", range(6)) == ["HIT"] * 5 + ["MISS"]
    assert other.ask("load", range(6)) == ["OK"] * 5 + ["MISSING"]
    assert other.ask("store", range(6)) == ["PRESENT"] * 5 + ["OK"]
    assert other.ask("close") is True


def test_killed_process_leaves_what_it_reported(open_driver: Open, start_process: Start) -> None:
    other = start_process()
    assert other.ask("store", range(5)) == ["OK"] * 5
    other.kill()
    driver = open_driver()
    assert driver.load(range(5)) == [OK] * 5
    assert driver.block_store.counters().bad_entries == 0


def test_reader_follows_a_living_writer(
    open_driver: Open, start_process: Start, root: Path
) -> None:
    driver = open_driver()
    reader = start_process()
    for first in range(0, 60, 6):
        numbers = range(first, first + 6)
        assert driver.store(numbers) == [OK] * 6
        until(lambda n=numbers: reader.ask("lookup", n), ["HIT"] * 6)  # type: ignore[misc]
        assert reader.ask("load", numbers) == ["OK"] * 6
    assert driver.delete([3]) == [True]
    until(lambda: reader.ask("lookup", range(6)), ["HIT"] * 3 + ["MISS"] + ["HIT"] * 2)
    assert reader.ask("bad") == 0


def test_a_store_that_does_not_share_finds_what_was_there_and_what_it_stores(
    open_driver: Open,
    start_process: Start,
    root: Path,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "_TAIL_S", 0.02)
    writer = start_process()
    assert writer.ask("store", range(3)) == ["OK"] * 3
    sharing = open_driver()
    alone = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1, shared_lookup=False)
    try:
        assert alone.wait_recovered(60)
        driver = StoreDriver(alone)
        # Stored one after the other: when the second is found, others have looked twice.
        for number in (3, 4):
            assert writer.ask("store", [number]) == ["OK"]
            until(lambda n=number: sharing.lookup([n]), [Lookup.HIT])  # type: ignore[misc]
        time.sleep(0.1)
        assert driver.lookup(range(5)) == [Lookup.HIT] * 3 + [Lookup.MISS] * 2
        assert driver.store([3, 7]) == [OK] * 2
        assert driver.lookup([3, 7]) == [Lookup.HIT] * 2
        until(lambda: writer.ask("lookup", [7]), ["HIT"])
    finally:
        alone.close()


@pytest.mark.parametrize("shared", [True, False])
def test_the_configuration_says_whether_to_share(
    tmp_path: Path, namespace: Namespace, shared: bool
) -> None:
    config = Config.model_validate(
        {
            "storage": {
                "shared_lookup": shared,
                "fallback_local": {"path": str(tmp_path / "kv"), "min_free_gb": 0},
            }
        }
    )
    store = open_block_store(config, namespace)
    assert store.wait_recovered(60)
    assert only_store(store)._keeper._shared_lookup is shared
    store.close()


def test_two_processes_store_the_same_keys_at_once(open_driver: Open, start_process: Start) -> None:
    first, second = start_process(), start_process()
    for round_ in range(5):
        numbers = range(round_ * 20, round_ * 20 + 20)
        for process in (first, second):
            process.tell("store", numbers)
        for process in (first, second):
            assert set(process.hear()) <= {"OK", "PRESENT"}
        for process in (first, second):
            assert process.ask("load", numbers) == ["OK"] * 20
    # One of them dies with its copies; the other's are still there.
    first.kill()
    driver = open_driver()
    assert driver.load(range(100)) == [OK] * 100
    assert second.ask("load", range(100)) == ["OK"] * 100


def test_deleting_covers_all_copies(open_driver: Open, start_process: Start) -> None:
    first, second = start_process(), start_process()
    for process in (first, second):
        process.tell("store", range(20))
    assert set(first.hear() + second.hear()) <= {"OK", "PRESENT"}
    for process in (first, second):
        assert process.ask("close") is True
    driver = open_driver()
    assert driver.delete(range(20)) == [True] * 20
    assert driver.block_store.close()
    assert open_driver().lookup(range(20)) == [Lookup.MISS] * 20


def test_healed_block_is_found_whatever_the_order_of_the_journals(open_driver: Open) -> None:
    # Writers have random names, and journals are read in the order of names.
    for _ in range(12):
        driver = open_driver()
        assert driver.delete([1]) in ([True], [False])
        assert driver.store([1]) == [OK]
        assert driver.block_store.close()
        again = open_driver()
        assert again.lookup([1]) == [Lookup.HIT]
        assert again.load([1]) == [OK]
        assert again.block_store.close()


def test_open_store_survives_a_purge_by_another_process(
    open_driver: Open, start_process: Start
) -> None:
    before = open_driver()
    assert before.store(range(10)) == [OK] * 10
    assert before.block_store.close()

    driver = open_driver()
    assert driver.store(range(10, 15)) == [OK] * 5
    assert driver.load(range(5)) == [OK] * 5
    other = start_process()
    # The dead writer's blocks go, this process's stay.
    assert other.ask("purge") == [10, 1]
    assert driver.load(range(15)) == [Outcome.MISSING] * 10 + [OK] * 5
    assert driver.lookup(range(15)) == [Lookup.MISS] * 10 + [Lookup.HIT] * 5
    assert driver.store(range(15)) == [OK] * 10 + [PRESENT] * 5
    assert driver.load(range(15)) == [OK] * 15
    assert other.ask("purge") == [0, 1]
    assert driver.load(range(15)) == [OK] * 15


def test_purging_while_others_store_and_load(open_driver: Open, start_process: Start) -> None:
    writer = start_process()
    purger = start_process()
    driver = open_driver()
    for round_ in range(10):
        numbers = range(round_ * 10, round_ * 10 + 10)
        writer.tell("store", numbers)
        purger.tell("purge")
        outcomes = driver.load(range(100))
        assert set(outcomes) <= {OK, Outcome.MISSING}
        assert writer.hear() == ["OK"] * 10
        assert purger.hear()[0] == 0, "nothing here is of a dead writer"
        assert writer.ask("load", numbers) == ["OK"] * 10


def test_opening_while_another_process_purges(open_driver: Open, start_process: Start) -> None:
    purger = start_process()
    for _ in range(10):
        driver = open_driver()
        assert set(driver.load(range(30))) <= {OK, Outcome.MISSING}
        assert {outcome.good for outcome in driver.store(range(30))} == {True}
        for _ in range(5):
            purger.tell("purge")
        assert driver.block_store.close()
        again = open_driver()
        assert set(again.load(range(30))) <= {OK, Outcome.MISSING}
        assert again.block_store.counters().load_outcomes.get("corrupt", 0) == 0
        for _ in range(5):
            purger.hear()
        assert {outcome.good for outcome in again.store([99])} == {True}
        assert again.block_store.close()


def test_second_store_of_a_process_does_not_drop_the_locks_of_the_first(
    open_driver: Open, start_process: Start, root: Path, namespace: Namespace
) -> None:
    first = open_driver()
    assert first.store(range(3)) == [OK] * 3
    second = open_driver()
    assert second.load(range(3)) == [OK] * 3
    assert second.store([3]) == [OK]
    # Looks at all writers' lock files, and once closed one of them in doing so.
    assert [w.alive for i in FilesystemTarget(root).namespaces() for w in i.writers] == [True] * 2
    assert FilesystemTarget(root).purge(namespace.hex).blocks == 0
    assert second.block_store.close()

    outside = start_process()
    owners = outside.ask("owners")
    assert sorted(alive for alive, _ in owners) == [False, True]
    assert all(owner.startswith(f"pid {os.getpid()} on ") for _, owner in owners)
    assert outside.ask("purge") == [1, 1]
    assert first.load(range(3)) == [OK] * 3


def test_forked_child_neither_holds_nor_drops_the_lock(
    open_driver: Open, start_process: Start
) -> None:
    parent = start_process()
    assert parent.ask("store", range(3)) == ["OK"] * 3
    assert parent.ask("fork") == 0
    other = start_process()
    assert [alive for alive, _ in other.ask("owners")] == [True]
    assert other.ask("purge") == [0, 1]
    assert parent.ask("store", range(6)) == ["PRESENT"] * 3 + ["OK"] * 3
    assert parent.ask("load", range(6)) == ["OK"] * 6
    parent.kill()
    assert [alive for alive, _ in other.ask("owners")] == [False]
    assert open_driver().load(range(6)) == [OK] * 6


def test_child_that_outlives_its_parent_does_not_keep_the_writer_alive(
    tmp_path: Path, namespace: Namespace
) -> None:
    target = FilesystemTarget(tmp_path / "kv")
    target.probe()
    directory = tmp_path / "kv" / namespace.directory
    go_on, ready, verdict = os.pipe(), os.pipe(), os.pipe()
    middle = os.fork()
    if not middle:
        writer = target.writer(namespace)
        if not os.fork():
            # The grandchild inherited everything but the lock.
            os.read(go_on[0], 1)
            os.write(verdict[1], b"%d" % writer_alive(directory, writer.writer.hex()))
            os._exit(0)
        os.write(ready[1], writer.writer)
        os._exit(0)
    name = os.read(ready[0], 16).hex()
    os.waitpid(middle, 0)
    assert not writer_alive(directory, name)
    os.write(go_on[1], b"x")
    assert os.read(verdict[0], 1) == b"0"
    for pipe in (go_on, ready, verdict):
        for fd in pipe:
            os.close(fd)


def test_forked_child_is_told_to_open_its_own_store(open_driver: Open) -> None:
    driver = open_driver()
    assert driver.store(range(2)) == [OK] * 2
    result, report = os.pipe()
    child = os.fork()
    if not child:
        said = b"nothing"
        try:
            driver.store([9])
        except StoreClosedError as exc:
            said = str(exc).encode()
        # Nor does it end what is its parent's.
        store = driver.block_store
        closed = store.close() and store.drain() and store.state is State.CLOSED
        store.purge()
        os.write(report, said + b" %d" % closed)
        os._exit(0)
    said = os.read(result, 1000)
    assert b"open a store of its own" in said
    assert said.endswith(b" 1")
    assert os.waitpid(child, 0)[1] == 0
    os.close(result)
    os.close(report)
    assert driver.load(range(2)) == [OK] * 2


def test_writer_without_a_lock_file_is_dead_and_a_locked_one_is_alive(tmp_path: Path) -> None:
    assert not writer_alive(tmp_path, new_writer_id().hex())
    name = new_writer_id().hex()
    (tmp_path / f"{name}.lock").touch()
    assert not writer_alive(tmp_path, name)


def test_lock_that_cannot_be_probed_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = new_writer_id().hex()
    (tmp_path / f"{name}.lock").touch()

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    assert writer_alive(tmp_path, name)


def test_recency_outlives_the_process(
    open_driver: Open, start_process: Start, root: Path, namespace: Namespace
) -> None:
    old = open_driver()
    assert old.store(range(3)) == [OK] * 3
    stored = [old.block_store._index.last_used(key) for key in old.keys(range(3))]
    assert old.block_store.close()
    time.sleep(1.1)  # times are whole seconds
    reader = start_process()
    reader.ask("touch", [1])
    assert reader.ask("close") is True
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
    assert store.wait_recovered(60)
    used = [store._index.last_used(key) for key in old.keys(range(3))]
    assert used[0] == stored[0]
    assert used[2] == stored[2]
    assert used[1] is not None
    assert stored[1] is not None
    assert used[1] > stored[1]
    assert store.close()
