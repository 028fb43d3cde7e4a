"""What LMCache's own file adapters do wrong, done right: damage, full disks, ends, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_rig import Driver, Listener, Memory, desc, keys, raw
from stored import stored_files

from lifeboat_cache.config import load_config
from lifeboat_cache.integrations import lmcache_keeper
from lifeboat_cache.janitor import Janitor, JanitorPolicy
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import flip_byte

Open = Callable[..., Driver]

CHUNK = desc((2, 4, 64, 128))
SIZE = 2 * 4 * 64 * 128 * 2


def stored_and_closed(attach: Open, memory: Memory, count: int = 4) -> list[torch.Tensor]:
    """Store objects and end; what they held."""
    driver = attach()
    objects = memory.filled(keys(count), CHUNK)
    assert driver.store(keys(count), objects).is_successful()
    driver.adapter.close()
    return [raw(one).clone() for one in objects]


def test_a_flipped_byte_is_a_miss_and_heals(attach: Open, memory: Memory, home: Path) -> None:
    before = stored_and_closed(attach, memory)
    (segment,) = stored_files(home, "segment")
    flip_byte(segment, 4096 + SIZE + 777)  # in the second object
    driver = attach()
    mine = keys(4)
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1, 2, 3]
    loaded = memory.objects(mine, CHUNK)
    assert driver.load(mine, loaded) == [0, 2, 3]
    for number in (0, 2, 3):
        assert torch.equal(raw(loaded[number]), before[number])
    assert driver.lookup(mine, {0: CHUNK}) == [0, 2, 3]
    assert driver.adapter.get_usage().total_bytes_used <= 4 * SIZE
    again = driver.store(mine, memory.filled(mine, CHUNK))
    assert again.is_successful()
    assert again.bytes_transferred() >= SIZE
    assert driver.load(mine, loaded) == [0, 1, 2, 3]
    assert all(torch.equal(raw(one), was) for one, was in zip(loaded, before, strict=True))


def test_a_file_cut_in_half_is_a_miss_and_heals(attach: Open, memory: Memory, home: Path) -> None:
    before = stored_and_closed(attach, memory)
    (segment,) = stored_files(home, "segment")
    os.truncate(segment, 4096 + SIZE + SIZE // 2)
    driver = attach()
    mine = keys(4)
    loaded = memory.objects(mine, CHUNK)
    driver.lookup(mine, {0: CHUNK})
    assert driver.load(mine, loaded) == [0]
    again = driver.store(mine, memory.filled(mine, CHUNK))
    assert again.is_successful()
    assert again.bytes_transferred() >= 3 * SIZE
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1, 2, 3]
    assert driver.load(mine, loaded) == [0, 1, 2, 3]
    assert all(torch.equal(raw(one), was) for one, was in zip(loaded, before, strict=True))


def test_a_full_disk_fails_the_task_and_what_is_shown_is_whole(
    attach: Open, memory: Memory, home: Path
) -> None:
    path = home / "lifeboat.yaml"
    path.write_text(
        path.read_text().replace("min_free_gb: 1", "min_free_gb: 1, capacity_gb: 0.004")
    )
    driver = attach()
    tasks = [keys(8, seed=str(number)) for number in range(8)]
    results = []
    stored = {}
    for number, mine in enumerate(tasks):
        objects = memory.filled(mine, CHUNK, seed=number)
        results.append(driver.store(mine, objects).is_successful())
        stored.update({key: raw(one).clone() for key, one in zip(mine, objects, strict=True)})
    assert results[0]
    assert not results[-1]
    mine = [key for task in tasks for key in task]
    shown = [mine[number] for number in driver.lookup(mine, {0: CHUNK})]
    assert 8 <= len(shown) < len(mine)
    loaded = memory.objects(shown, CHUNK)
    assert driver.load(shown, loaded) == list(range(len(shown)))
    assert all(torch.equal(raw(one), stored[key]) for key, one in zip(shown, loaded, strict=True))
    assert driver.adapter.get_usage().total_bytes_used == len(shown) * SIZE


def test_close_writes_what_is_queued(attach: Open, memory: Memory) -> None:
    driver = attach()
    tasks = [keys(2, seed=str(number)) for number in range(40)]
    objects = [memory.filled(mine, CHUNK, seed=n) for n, mine in enumerate(tasks)]
    for mine, ones in zip(tasks, objects, strict=True):
        driver.adapter.submit_store_task(mine, ones)
    driver.adapter.close()
    memory.free()

    second = attach()
    every = [key for mine in tasks for key in mine]
    assert second.lookup(every, {0: CHUNK}) == list(range(80))
    loaded = memory.objects(every, CHUNK)
    assert second.load(every, loaded) == list(range(80))


def test_objects_of_before_a_restart_are_evicted_and_lmcache_hears_of_it(
    attach: Open, memory: Memory, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_keeper, "_TICK_S", 0.1)
    monkeypatch.setattr(lmcache_keeper, "_COMPARE_S", 0.1)
    stored_and_closed(attach, memory, count=32)
    capacity = 16 * SIZE
    path = home / "lifeboat.yaml"
    path.write_text(
        path.read_text().replace("min_free_gb: 1", f"min_free_gb: 1, capacity_gb: {capacity / 1e9}")
    )
    driver = attach()
    listener = Listener()
    driver.adapter.register_listener(listener)
    mine = keys(32)
    driver.lookup(keys(1, seed="any of this model"), {0: CHUNK})
    until(lambda: driver.adapter.get_usage().total_bytes_used == 32 * SIZE)

    (place,) = load_config().config.storage.places
    policy = JanitorPolicy(young_s=0.0, grace_s=0.0, margin_bytes=0)
    report = Janitor(FilesystemTarget.from_tier(place), policy=policy).run_once()
    assert report.problems == []
    until(lambda: driver.adapter.get_usage().total_bytes_used <= capacity)
    there = driver.lookup(mine, {0: CHUNK})
    assert 0 < len(there) <= 16
    until(lambda: set(listener.deleted) == {mine[n] for n in range(32) if n not in there})


def test_objects_without_memory_of_the_host_are_refused(attach: Open, memory: Memory) -> None:
    class OnGpu:
        """As LMCache's objects of GPU-direct storage are."""

        def __init__(self, one: Any) -> None:
            self.get_shapes, self.get_dtypes = one.get_shapes, one.get_dtypes
            self.get_size = one.get_size

        @property
        def data_ptr(self) -> int:
            raise NotImplementedError("never the MemoryObj's data_ptr")

    driver = attach()
    mine = keys(2)
    objects = [OnGpu(one) for one in memory.filled(mine, CHUNK)]
    assert not driver.store(mine, objects).is_successful()
    assert driver.load(mine, objects) == []
    assert driver.lookup(mine, {0: CHUNK}) == []


def test_what_a_serde_has_changed_is_refused(attach: Open, memory: Memory) -> None:
    driver = attach()
    mine = keys(1)
    (one,) = memory.filled(mine, CHUNK)
    smaller = type("Smaller", (), {})()
    smaller.get_shapes, smaller.get_dtypes = one.get_shapes, one.get_dtypes
    smaller.get_size, smaller.data_ptr = lambda: SIZE // 2, one.data_ptr
    assert not driver.store(mine, [smaller]).is_successful()
    assert driver.lookup(mine, {0: CHUNK}) == []


def test_after_close_nothing_is_taken_and_nothing_raises(attach: Open, memory: Memory) -> None:
    driver = attach()
    mine = keys(1)
    objects = memory.filled(mine, CHUNK)
    driver.store(mine, objects)
    adapter = driver.adapter
    adapter.close()
    adapter.close()
    adapter.delete(mine)
    adapter.submit_unlock(mine)
    assert adapter.report_status()["is_healthy"] is False


def test_what_was_reported_stored_survives_a_kill(
    home: Path, attach: Open, memory: Memory, tmp_path: Path
) -> None:
    script = """
        import sys
        from lmcache_rig import Driver, Memory, desc, keys, plugin
        chunk, memory = desc((2, 4, 64, 128)), Memory()
        driver = Driver(plugin(memory))
        for number in range(10_000):
            mine = keys(2, seed=str(number))
            if driver.store(mine, memory.filled(mine, chunk, seed=number)).is_successful():
                print(number, flush=True)
            memory.free()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert child.stdout is not None
    told = [int(child.stdout.readline()) for _ in range(25)]
    child.send_signal(signal.SIGKILL)
    told += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    child.wait()

    driver = attach()
    for number in told:
        mine = keys(2, seed=str(number))
        assert driver.lookup(mine, {0: CHUNK}) == [0, 1]
        loaded = memory.objects(mine, CHUNK)
        assert driver.load(mine, loaded) == [0, 1]
        expected = memory.filled(mine, CHUNK, seed=number)
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(loaded, expected, strict=True))
        memory.free()


def test_other_weights_under_the_same_name_share_nothing(
    attach: Open, memory: Memory, tmp_path: Path
) -> None:
    from safetensors_file import Tensor, write_file

    model = tmp_path / "model"
    model.mkdir()
    write_file(model / "model.safetensors", {"a": Tensor("U8", (4096,), b"\1" * 4096)})
    mine = keys(2, model=str(model))
    driver = attach()
    assert driver.store(mine, memory.filled(mine, CHUNK)).is_successful()
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1]
    write_file(model / "model.safetensors", {"a": Tensor("U8", (4096,), b"\2" * 4096)})
    until(lambda: driver.lookup(mine, {0: CHUNK}) == [])
    # An engine that has loaded the weights of before goes on with them.
    late = keys(2, seed="late", model=str(model))
    assert not driver.store(late, memory.filled(late, CHUNK)).is_successful()
    assert driver.lookup(late, {0: CHUNK}) == []
    status = driver.adapter.report_status()
    assert status["is_healthy"] is False
    assert status["faults"] == [
        f"the weights of {model} have changed: restart its engines, then this server"
    ]
    driver.adapter.close()
    # Whoever asks now may have loaded those of now.
    driver = attach()
    assert driver.lookup([*mine, *late], {0: CHUNK}) == []
    assert driver.store(mine, memory.filled(mine, CHUNK)).is_successful()
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1]


def test_a_name_that_leads_to_another_snapshot_is_another_model(
    attach: Open, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors_file import Tensor, write_file

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for commit, content in (("a" * 40, b"\1"), ("b" * 40, b"\2")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        write_file(snapshot / "model.safetensors", {"a": Tensor("U8", (4096,), content * 4096)})
    (repository / "refs/main").write_text("a" * 40)
    mine = keys(2, model="org/name")
    driver = attach()
    assert driver.store(mine, memory.filled(mine, CHUNK)).is_successful()
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1]
    (repository / "refs/main").write_text("b" * 40)
    until(lambda: driver.lookup(mine, {0: CHUNK}) == [])


def test_weights_that_cannot_be_read_are_not_known_by_their_name(
    attach: Open, memory: Memory, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    mine = keys(2, model=str(model))
    driver = attach()
    assert not driver.store(mine, memory.filled(mine, CHUNK)).is_successful()
    (fault,) = driver.adapter.report_status()["faults"]
    assert str(model) in fault


def test_lookups_that_come_while_journals_are_read_are_answered(
    attach: Open, memory: Memory
) -> None:
    stored_and_closed(attach, memory)
    # At once: the store has not found out whose blocks these are.
    assert attach().lookup(keys(4), {0: CHUNK}) == [0, 1, 2, 3]


@pytest.mark.parametrize("what", ["stores", "loads"])
def test_many_tasks_at_once(attach: Open, memory: Memory, what: str) -> None:
    driver = attach()
    tasks = [keys(2, seed=str(number)) for number in range(20)]
    objects = [memory.filled(mine, CHUNK, seed=n) for n, mine in enumerate(tasks)]
    numbers = [
        driver.adapter.submit_store_task(mine, ones)
        for mine, ones in zip(tasks, objects, strict=True)
    ]
    assert all(driver.stored(number).is_successful() for number in numbers)
    if what == "stores":
        return
    loaded = [memory.objects(mine, CHUNK) for mine in tasks]
    adapter = driver.adapter
    waiting = [
        adapter.submit_load_task(mine, ones) for mine, ones in zip(tasks, loaded, strict=True)
    ]
    found: dict[int, object] = {}

    def ask() -> bool | None:
        for number in waiting:
            answer = adapter.query_load_result(number)
            if answer is not None:
                found[number] = answer.get_indices_list()
        return True if len(found) == len(waiting) else None

    driver.wait(adapter.get_load_event_fd(), ask)
    assert all(answer == [0, 1] for answer in found.values())
    for mine, theirs in zip(objects, loaded, strict=True):
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(mine, theirs, strict=True))


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in the background."""
    import time

    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen within 30 s"
        time.sleep(0.05)
