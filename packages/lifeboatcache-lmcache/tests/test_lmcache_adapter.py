"""The contract of LMCache's second tier, with LMCache's own keys, objects and descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lmcache_rig import Driver, Listener, Memory, desc, keys, raw

from lifeboat_cache.errors import ConfigError

Open = Callable[..., Driver]

CHUNK = desc((2, 4, 64, 128))
SMALL = desc((2, 2, 64, 128))


def test_the_descriptors_are_three(attach: Open) -> None:
    adapter = attach().adapter
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3


def test_what_was_stored_comes_back_bit_for_bit_after_a_restart(
    attach: Open, memory: Memory
) -> None:
    mine = keys(6)
    first = attach()
    stored = memory.filled(mine, CHUNK)
    result = first.store(mine, stored)
    assert result.is_successful()
    assert result.bytes_transferred() >= 6 * stored[0].get_size()
    first.adapter.close()

    second = attach()
    wanted = [*keys(1, seed="other"), *mine]
    assert second.lookup(wanted, {0: CHUNK}, unlock=False) == [1, 2, 3, 4, 5, 6]
    loaded = memory.objects(mine, CHUNK)
    assert second.load(mine, loaded) == list(range(6))
    for before, after in zip(stored, loaded, strict=True):
        assert torch.equal(raw(before), raw(after))
    second.adapter.submit_unlock(mine)


def test_one_task_holds_objects_of_several_sizes(attach: Open, memory: Memory) -> None:
    driver = attach()
    large, small = keys(3), keys(3, group=1)
    stored = [*memory.filled(large, CHUNK), *memory.filled(small, SMALL, seed=1)]
    assert driver.store([*large, *small], stored).is_successful()
    assert driver.lookup([*large, *small], {0: CHUNK, 1: SMALL}) == list(range(6))
    loaded = [*memory.objects(large, CHUNK), *memory.objects(small, SMALL)]
    assert driver.load([*large, *small], loaded) == list(range(6))
    for before, after in zip(stored, loaded, strict=True):
        assert torch.equal(raw(before), raw(after))


def test_an_object_of_several_tensors_and_dtypes(attach: Open, memory: Memory) -> None:
    driver = attach()
    mixed = desc((2, 2, 64, 128), (3, 64, 96))
    mine = keys(2)
    stored = memory.filled(mine, mixed)
    assert driver.store(mine, stored).is_successful()
    assert driver.lookup(mine, {0: mixed}) == [0, 1]
    loaded = memory.objects(mine, mixed)
    assert driver.load(mine, loaded) == [0, 1]
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(stored, loaded, strict=True))


def test_large_objects_are_stored_in_parts(
    attach: Open, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lifeboat_cache.integrations.lmcache_layout.MOST_PART_BYTES", 40_000)
    driver = attach()
    mine = keys(2)
    stored = memory.filled(mine, CHUNK)
    assert driver.store(mine, stored).is_successful()
    space = driver.adapter._spaces.all()[0]
    assert len(space.store) == 2 * 4 + 1  # two layers a part, and the names
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1]
    loaded = memory.objects(mine, CHUNK)
    assert driver.load(mine, loaded) == [0, 1]
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(stored, loaded, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        desc((2, 4, 64, 128), dtype=torch.float16),
        desc((2, 8, 64, 128), dtype=torch.uint8),
        desc((2, 8, 32, 128)),
        desc((2, 4, 128, 64)),
        desc((8, 64, 128)),
        SMALL,
    ],
    ids=["dtype", "8 bit", "tokens", "hidden", "planes", "layers"],
)
def test_another_layout_is_rejected_at_lookup(attach: Open, memory: Memory, other: object) -> None:
    driver = attach()
    mine = keys(3)
    assert driver.store(mine, memory.filled(mine, CHUNK)).is_successful()
    assert driver.lookup(mine, {0: other}) == []
    loaded = memory.objects(mine, other)
    assert driver.load(mine, loaded) == []
    # Both may be there; each is found by who expects it.
    mixed = memory.filled(mine, other, seed=7)
    assert driver.store(mine, mixed).is_successful()
    assert driver.lookup(mine, {0: CHUNK}) == driver.lookup(mine, {0: other}) == [0, 1, 2]


@pytest.mark.parametrize(
    "changed",
    [{"group": 1}, {"salt": "u1"}, {"world": 2}, {"world": 2, "rank": 1}, {"model": "tests/two"}],
    ids=["group", "salt", "world", "rank", "model"],
)
def test_keys_that_differ_never_meet(attach: Open, memory: Memory, changed: dict[str, Any]) -> None:
    driver = attach()
    mine, theirs = keys(2), keys(2, **changed)
    assert driver.store(mine, memory.filled(mine, CHUNK)).is_successful()
    assert driver.lookup(theirs, {0: CHUNK, 1: CHUNK}) == []
    assert driver.store(theirs, memory.filled(theirs, CHUNK, seed=1)).is_successful()
    loaded = memory.objects(mine, CHUNK)
    assert driver.load(mine, loaded) == [0, 1]
    again = memory.filled(mine, CHUNK)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(loaded, again, strict=True))


def test_ranks_of_one_chunk_in_one_task(attach: Open, memory: Memory) -> None:
    driver = attach()
    mine = [*keys(2, world=2, rank=0), *keys(2, world=2, rank=1)]
    stored = memory.filled(mine, CHUNK)
    assert driver.store(mine, stored).is_successful()
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1, 2, 3]
    loaded = memory.objects(mine, CHUNK)
    assert driver.load(mine, loaded) == [0, 1, 2, 3]
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(stored, loaded, strict=True))


def test_a_result_is_handed_out_once(attach: Open, memory: Memory) -> None:
    driver = attach()
    mine = keys(1)
    driver.store(mine, memory.filled(mine, CHUNK))
    adapter = driver.adapter
    assert adapter.pop_completed_store_tasks() == {}
    task = adapter.submit_lookup_and_lock_task(mine, {0: CHUNK})
    fd = adapter.get_lookup_and_lock_event_fd()
    assert driver.wait(fd, lambda: adapter.query_lookup_and_lock_result(task)) is not None
    assert adapter.query_lookup_and_lock_result(task) is None
    adapter.submit_unlock(mine)


def test_a_result_is_there_when_the_descriptor_is_signalled(attach: Open, memory: Memory) -> None:
    driver = attach()
    mine = keys(1)
    seen = []

    def watch(results: Any) -> None:
        notify = results._notify

        def watched() -> None:
            seen.append(len(results._ready))
            notify()

        results._notify = watched

    for results in (driver.adapter._stored, driver.adapter._looked, driver.adapter._loaded):
        watch(results)
    objects = memory.filled(mine, CHUNK)
    driver.store(mine, objects)
    driver.lookup(mine, {0: CHUNK})
    driver.load(mine, memory.objects(mine, CHUNK))
    assert seen == [1, 1, 1]


def test_locked_objects_are_not_deleted_until_the_last_unlock(attach: Open, memory: Memory) -> None:
    driver = attach()
    adapter, mine = driver.adapter, keys(3)
    driver.store(mine, memory.filled(mine, CHUNK))
    assert driver.lookup(mine[:2], {0: CHUNK}, unlock=False) == [0, 1]
    assert driver.lookup(mine[:1], {0: CHUNK}, unlock=False) == [0]
    adapter.delete(mine)
    assert driver.lookup(mine, {0: CHUNK}) == [0, 1]
    adapter.submit_unlock(mine)  # the third was never locked
    adapter.delete(mine)
    assert driver.lookup(mine, {0: CHUNK}) == [0]
    adapter.submit_unlock(mine)
    adapter.submit_unlock([*mine, *keys(1, seed="never seen")])
    adapter.delete(mine)
    assert driver.lookup(mine, {0: CHUNK}) == []
    assert adapter.get_usage().total_bytes_used == 0


def test_lmcache_is_told_what_is_stored_used_and_deleted(attach: Open, memory: Memory) -> None:
    driver = attach()
    listener = Listener()
    driver.adapter.register_listener(listener)
    mine = [*keys(2), *keys(1, salt="u1")]
    objects = memory.filled(mine, CHUNK)
    size = objects[0].get_size()
    driver.store(mine, objects)
    driver.store(mine, objects)  # is there already, and counts once
    assert listener.stored == dict.fromkeys(mine, size)
    usage = driver.adapter.get_usage()
    assert usage.total_bytes_used == 3 * size
    assert dict(usage.bytes_by_cache_salt) == {"": 2 * size, "u1": size}
    driver.lookup(mine[:1], {0: CHUNK})
    assert listener.accessed == mine[:1]
    driver.adapter.delete([*mine[1:], *keys(1, seed="never seen")])
    assert listener.deleted == mine[1:]
    assert driver.adapter.get_usage().total_bytes_used == size


def test_listing_in_pages(attach: Open, memory: Memory) -> None:
    driver = attach()
    mine = [*keys(5), *keys(2, model="tests/two")]
    driver.store(mine, memory.filled(mine, CHUNK))
    adapter = driver.adapter
    found, cursor = [], None
    for _ in range(4):
        page = adapter.list_l2_keys(page_size=2, cursor=cursor)
        found += page.entries
        cursor = page.next_page_token
    assert cursor is None
    assert {entry.key for entry in found} == {key.to_encoded_object_key() for key in mine}
    assert len(found) == 7
    assert {entry.size_bytes for entry in found} == {2 * 4 * 64 * 128 * 2}
    assert len(adapter.list_l2_keys(model_name="tests/two").entries) == 2
    with pytest.raises(ValueError, match="page_size"):
        adapter.list_l2_keys(page_size=0)
    with pytest.raises(ValueError, match="cursor"):
        adapter.list_l2_keys(cursor="nonsense")


def test_after_a_restart_usage_and_listing_are_as_before(attach: Open, memory: Memory) -> None:
    first = attach()
    mine = keys(4)
    objects = memory.filled(mine, CHUNK)
    first.store(mine[:3], objects[:3])
    first.store(mine[3:], objects[3:])
    first.adapter.delete(mine[:1])
    before = first.adapter.get_usage()
    first.adapter.close()

    second = attach()
    second.lookup(keys(1, seed="any of this model"), {0: CHUNK})
    listener = Listener()
    until(lambda: len(second.adapter.list_l2_keys().entries) == 3)
    second.adapter.register_listener(listener)  # later than the constructor, as LMCache does
    assert set(listener.stored) == set(mine[1:])
    assert second.adapter.get_usage() == before
    second.adapter.delete(mine)
    assert second.adapter.get_usage().total_bytes_used == 0
    assert second.lookup(mine, {0: CHUNK}) == []


def test_state_that_may_be_recurrent_is_exact_where_kv_is_not(
    attach: Open, memory: Memory, home: object
) -> None:
    _configure(home, "fp8")
    driver = attach()
    state = desc((4, 64, 128))
    kv, single = keys(2), keys(2, group=1)
    stored = [*memory.filled(kv, CHUNK), *memory.filled(single, state)]
    assert driver.store([*kv, *single], stored).is_successful()
    loaded = [*memory.objects(kv, CHUNK), *memory.objects(single, state)]
    assert driver.load([*kv, *single], loaded) == [0, 1, 2, 3]
    for before, after in zip(stored[:2], loaded[:2], strict=True):
        a, b = (raw(one).view(torch.bfloat16).float() for one in (before, after))
        assert not torch.equal(a, b)
        assert (a - b).abs().max() <= 0.07 * a.abs().max()
    for before, after in zip(stored[2:], loaded[2:], strict=True):
        assert torch.equal(raw(before), raw(after))


def test_8_bit_kv_is_exact(attach: Open, memory: Memory, home: object) -> None:
    _configure(home, "fp8")
    driver = attach()
    mine, eight = keys(2), desc((2, 4, 64, 128), dtype=torch.uint8)
    stored = memory.filled(mine, eight)
    assert driver.store(mine, stored).is_successful()
    loaded = memory.objects(mine, eight)
    assert driver.load(mine, loaded) == [0, 1]
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(stored, loaded, strict=True))


def test_status_is_healthy_and_names_the_model(attach: Open, memory: Memory) -> None:
    driver = attach()
    mine = keys(1)
    driver.store(mine, memory.filled(mine, CHUNK))
    status = driver.adapter.report_status()
    assert status["is_healthy"] is True
    assert status["objects"] == 1
    assert [one["state"] for one in status["models"]] == ["ready"]


def test_a_broken_configuration_is_a_miss_and_not_a_crash(
    attach: Open, memory: Memory, home: object
) -> None:
    (home / "lifeboat.yaml").write_text("storage: 7")  # type: ignore[operator]
    driver = attach()
    mine = keys(2)
    assert driver.lookup(mine, {0: CHUNK}) == []
    assert not driver.store(mine, memory.filled(mine, CHUNK)).is_successful()
    assert driver.load(mine, memory.objects(mine, CHUNK)) == []
    driver.adapter.delete(mine)
    status = driver.adapter.report_status()
    assert status["is_healthy"] is False
    assert "storage" in status["faults"][0]


def test_parameters_that_do_not_exist_are_refused(home: object) -> None:
    from lmcache_rig import plugin

    with pytest.raises(ConfigError, match="path"):
        plugin(path="/tmp/elsewhere")


def test_another_release_of_lmcache_is_refused(
    home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_rig import plugin

    monkeypatch.setattr(
        "lifeboat_cache.integrations.lmcache_versions.lmcache_version", lambda: "0.6.0"
    )
    with pytest.raises(ImportError, match=r"LMCache 0\.6\.0: pip install"):
        plugin()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in the background."""
    import time

    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen within 30 s"
        time.sleep(0.01)


def _configure(home: object, codec: str) -> None:
    path = home / "lifeboat.yaml"  # type: ignore[operator]
    path.write_text(path.read_text().replace("local: raw", f"local: {codec}"))
