"""A bucket is looked after: what goes, what is moved, and what that costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_objects import Shelf
from s3_proxy import Fault, S3Proxy, s3_proxy
from s3_server import S3Server

from lifeboat_cache.format.access import ACCESS, pack_accesses
from lifeboat_cache.format.header import MAGIC_ACCESS, FileHeader
from lifeboat_cache.janitor import JanitorPolicy, Selection
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.s3 import janitor as janitor_module
from lifeboat_cache.s3 import lease as lease_module
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.errors import S3Error
from lifeboat_cache.s3.janitor import BucketJanitor
from lifeboat_cache.s3.settings import S3Settings

Connect = Callable[..., Archive]

BLOCK = 65_536

#: A slice, a header and what segments are rounded up to, generously.
ABOUT = 3 * 4096


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def connect(
    s3: S3Server, proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connect]:
    """Makes archives, each with a local directory of its own."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    bucket = s3.new_bucket()
    archives: list[Archive] = []

    def make(capacity: int | None = None) -> Archive:
        settings = S3Settings(
            "archive",
            tmp_path / f"node-{len(archives)}",
            bucket,
            endpoint_url=proxy.endpoint,
            prefix="cache",
            capacity=capacity,
        )
        archives.append(Archive(settings))
        return archives[-1]

    yield make
    for archive in archives:
        archive.close()


@pytest.fixture
def shelf(connect: Connect, namespace: Namespace) -> Shelf:
    return Shelf(connect().client, "cache", namespace)


@pytest.fixture
def namespace() -> Namespace:
    return Namespace.from_identity({"engine": "test", "model": "small"})


@pytest.fixture
def janitor(connect: Connect) -> Iterator[Any]:
    """Makes janitors, each of a node of its own."""
    made: list[BucketJanitor] = []

    def make(
        capacity: int | None = None,
        on_step: Callable[[str], None] | None = None,
        **policy: Any,
    ) -> BucketJanitor:
        archive = connect(capacity)
        made.append(BucketJanitor(archive, policy=JanitorPolicy(**policy), on_step=on_step))
        return made[-1]

    yield make
    for one in made:
        one.close()


def use(janitor: BucketJanitor, shelf: Shelf, uses: list[tuple[Any, int]]) -> None:
    """This node's engines use records: of a segment, a slot each."""
    accesses = np.zeros(len(uses), dtype=ACCESS)
    for at, (name, slot) in enumerate(uses):
        accesses[at] = (np.void(name.writer), name.number, slot, int(shelf.client.now()),
                        np.void(bytes(4)))  # fmt: skip
    directory = janitor._archive.staging.root / shelf.folder
    directory.mkdir(parents=True, exist_ok=True)
    header = FileHeader(MAGIC_ACCESS, shelf.namespace.digest, bytes(16), 0, 0)
    (directory / f"{'ab' * 16}.access").write_bytes(header.pack() + pack_accesses(accesses))


def test_nothing_goes_while_there_is_room(shelf: Shelf, janitor: Any) -> None:
    shelf.segment(range(4))
    report = janitor(capacity=100 * BLOCK).run_once()
    assert (
        report.used_before
        == report.used_after
        == sum(one.size for one in shelf.client.objects(shelf.names.feed(shelf.folder)))
        + sum(one.size for one in shelf.client.objects(shelf.names.segments(shelf.folder)))
    )
    assert (report.records, report.evicted_blocks, report.problems) == (4, 0, [])
    assert shelf.held() == [0, 1, 2, 3]


def test_segments_that_were_used_least_recently_go(
    shelf: Shelf, janitor: Any, proxy: S3Proxy
) -> None:
    names = [shelf.segment(range(8 * n, 8 * n + 8), age_s=86_400 - n) for n in range(6)]
    one = janitor(capacity=6 * (8 * BLOCK + ABOUT) * 10 // 12)
    # The oldest one was used a moment ago.
    use(one, shelf, [(names[0], slot) for slot in range(8)])
    proxy.forget()
    report = one.run_once()
    counts = proxy.counts()
    assert report.used_after <= 0.9 * report.capacity
    assert (report.segments_removed, report.evicted_blocks) == (2, 16)
    assert shelf.held() == [*range(8), *range(24, 48)]
    assert shelf.segments() == 4
    # However many segments go: their slices with one request, they themselves with another.
    assert counts["DELETE_MANY"] == 2
    assert counts["DELETE"] == 0
    # Namespaces, the feed, the uses, orphans, and uploads that never ended.
    assert counts["LIST"] == 5
    again = one.run_once()
    assert (again.evicted_blocks, again.segments_removed) == (0, 0)


def test_what_is_hot_is_moved_first(shelf: Shelf, janitor: Any) -> None:
    old = shelf.segment(range(16), age_s=86_400)
    shelf.segment(range(16, 32), age_s=4000)
    one = janitor(capacity=30 * BLOCK)
    use(one, shelf, [(old, 3), (old, 9)])
    report = one.run_once()
    assert (report.copied_blocks, report.evicted_blocks, report.segments_removed) == (2, 14, 1)
    assert shelf.held() == [3, 9, *range(16, 32)]
    # It stays hot where it is now, also for another node's janitor.
    one.close()
    for number in range(3):
        shelf.segment(range(100 + 16 * number, 116 + 16 * number), age_s=3000 - number)
    report = janitor(capacity=40 * BLOCK).run_once()
    assert report.used_after <= 0.9 * 40 * BLOCK
    assert {3, 9} <= set(shelf.held())
    assert not {*range(16, 32)} & set(shelf.held())


def test_uses_of_another_node_count(shelf: Shelf, janitor: Any) -> None:
    old = shelf.segment(range(8), age_s=86_400)
    shelf.segment(range(8, 16), age_s=4000)
    other, one = janitor(), janitor(capacity=14 * BLOCK)
    use(other, shelf, [(old, slot) for slot in range(8)])
    other.run_once()
    other.close()
    one.run_once()
    assert shelf.held() == list(range(8))


def test_what_is_too_old_goes(shelf: Shelf, janitor: Any) -> None:
    shelf.segment(range(4), age_s=10_000)
    shelf.segment(range(4, 8), age_s=1000)
    report = janitor(max_age_s=5000.0).run_once()
    assert (report.expired_blocks, report.segments_removed) == (4, 1)
    assert shelf.held() == [4, 5, 6, 7]


def test_segment_that_is_mostly_dead_is_rewritten(
    shelf: Shelf, janitor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor_module, "_LEAST_DEAD_BYTES", BLOCK)
    name = shelf.segment(range(8))
    shelf.bury(name, range(5))
    report = janitor().run_once()
    assert (report.copied_blocks, report.segments_removed) == (3, 1)
    assert shelf.held() == [5, 6, 7]


@pytest.mark.parametrize("when", ["moved", "later"])
def test_what_is_deleted_while_it_is_moved_does_not_come_back(
    shelf: Shelf, janitor: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(janitor_module, "_LEAST_DEAD_BYTES", BLOCK)
    name = shelf.segment(range(8))
    shelf.bury(name, range(5))

    def step(what: str) -> None:
        if what == when:  # told by an engine that knows it where it was
            shelf.bury(name, [6])

    one = janitor(on_step=step)
    assert one.run_once().copied_blocks == 3
    step("later")
    one.run_once()
    assert shelf.held() == [5, 7]
    before = sum(1 for _ in shelf.client.objects(shelf.names.feed(shelf.folder)))
    one.run_once()
    assert shelf.held() == [5, 7]
    # It is said once.
    assert sum(1 for _ in shelf.client.objects(shelf.names.feed(shelf.folder))) <= before


def test_what_is_all_dead_goes_and_corrupt_records_are_not_moved(
    shelf: Shelf, janitor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor_module, "_LEAST_DEAD_BYTES", BLOCK)
    shelf.bury(shelf.segment([0, 1]), [0, 1])
    shelf.bury(shelf.segment(range(2, 10), spoiled=[9]), range(5))
    report = janitor().run_once()
    assert (report.segments_removed, report.corrupt_blocks) == (2, 1)
    assert shelf.held() == [7, 8]


def test_tombstones_outlive_the_segment_they_came_with(shelf: Shelf, janitor: Any) -> None:
    stays = shelf.segment([0, 1, 2], age_s=1000)
    goes = shelf.segment([3, 4], age_s=10_000)
    slices = shelf.names.in_feed(shelf.folder, goes)
    dead = shelf.bury(stays, [1])
    # The tombstone comes with the segment that goes.
    other = shelf.names.in_feed(shelf.folder, dead)
    from lifeboat_cache.s3.slices import unpack_slice

    digest = shelf.namespace.digest
    records, _ = unpack_slice(shelf.client.get(slices), digest, goes)
    tombs, _ = unpack_slice(shelf.client.get(other), digest, dead)
    shelf.put_slice(goes, np.concatenate([records, tombs]))
    shelf.client.delete([other])
    assert shelf.held() == [0, 2, 3, 4]
    janitor(max_age_s=5000.0).run_once()
    assert shelf.held() == [0, 2]


def test_orphans_are_collected_when_they_are_old(
    shelf: Shelf, janitor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.segment([0])
    shelf.segment([1], named=False)
    first = janitor()
    first.run_once()
    first.close()
    assert shelf.segments() == 2
    monkeypatch.setattr(janitor_module, "ORPHAN_S", -5.0)
    monkeypatch.setattr(janitor_module, "_ORPHANS_EVERY_S", -1.0)
    one = janitor()
    one.run_once()
    # Not at the first look: a listing may have left something out.
    assert shelf.segments() == 2
    report = one.run_once()
    assert shelf.segments() == 1
    assert report.trimmed_bytes > BLOCK
    assert shelf.held() == [0]


def test_listing_without_names_is_not_believed(
    shelf: Shelf, janitor: Any, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor_module, "ORPHAN_S", -5.0)
    monkeypatch.setattr(janitor_module, "_ORPHANS_EVERY_S", -1.0)
    first = shelf.segment([0])
    for number in range(1, 4):
        shelf.segment([number], named=False)
    one = janitor()
    for _ in range(3):
        report = one.run_once()
    assert shelf.segments() == 4
    assert "too many" in report.problems[0]
    assert first in shelf.feed()


def test_slice_that_is_damaged_on_the_way_is_read_again(
    shelf: Shelf, janitor: Any, proxy: S3Proxy
) -> None:
    shelf.segment([0, 1])
    proxy.faults(Fault("corrupt", verb="GET", match="feed/", times=1, at=4096 + 3))
    report = janitor().run_once()
    assert (report.problems, report.records, report.segments_removed) == ([], 2, 0)
    shelf.segment([2])
    proxy.faults(Fault("corrupt", verb="GET", match="feed/", at=4096 + 3))
    janitor().run_once()
    proxy.faults()
    # What it cannot read it leaves alone.
    assert shelf.held() == [0, 1, 2]


def test_one_node_at_a_time(shelf: Shelf, janitor: Any) -> None:
    shelf.segment(range(8), age_s=10_000)
    one, other = janitor(), janitor(max_age_s=100.0)
    one.run_once()
    report = other.run_once()
    assert report.busy
    assert "pid" in report.holder
    assert shelf.held() == list(range(8))
    one.close()
    assert other.run_once().expired_blocks == 8


def test_other_nodes_hear_from_the_lease_what_the_bucket_takes(
    shelf: Shelf, janitor: Any, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.segment(range(8))
    monkeypatch.setattr(lease_module, "_RENEW_S", -1.0)
    one, other = janitor(), janitor()
    one.run_once()
    first = other.run_once()  # nothing has been told yet: it lists, once
    assert first.requests["list"] > 0
    one.run_once()
    proxy.forget()
    report = other.run_once()
    assert report.busy
    assert dict(proxy.counts()) == {"GET": 1}
    used = one._archive.used()
    assert used > 8 * BLOCK
    assert report.used_after == first.used_after == used
    assert one._archive.blocks() == other._archive.blocks() == 8
    # What is said is nonsense: it lists again, but not each time.
    one._lease.says = {"at": "yesterday"}
    one._lease.take()
    assert other.run_once().requests.get("list", 0) == 0
    monkeypatch.setattr(janitor_module, "_SURVEY_S", -1.0)
    assert other.run_once().requests["list"] > 0


def test_many_small_segments_become_one(
    shelf: Shelf, janitor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor_module, "_MANY_SMALL", 6)
    for number in range(5):
        shelf.segment([2 * number, 2 * number + 1], age_s=10_000 - number)
    shelf.segment([10], age_s=60)  # may still be followed by others
    one = janitor()
    one.run_once()
    assert shelf.segments() == 6
    shelf.segment([11, 12], age_s=8000)
    report = one.run_once()
    assert (shelf.segments(), report.copied_blocks) == (2, 12)
    assert shelf.held() == list(range(13))
    assert report.evicted_blocks == 0
    # It has settled.
    assert one.run_once().copied_blocks == 0


@pytest.mark.parametrize(
    "requests",
    [
        number if number in (11, 14) else pytest.param(number, marks=pytest.mark.full)
        for number in range(24)
    ],
)
def test_cut_off_anywhere_nothing_that_stays_is_lost(
    shelf: Shelf, janitor: Any, proxy: S3Proxy, requests: int
) -> None:
    old = shelf.segment(range(16), age_s=86_400)
    shelf.segment(range(16, 32), age_s=4000)
    one = janitor(capacity=30 * BLOCK)
    use(one, shelf, [(old, 3), (old, 9)])
    # As if the process were killed: after so many requests nothing more arrives.
    proxy.faults(Fault("reset", after=requests))
    with contextlib.suppress(S3Error):
        one.run_once()
    proxy.faults()
    assert {3, 9, *range(16, 32)} <= set(shelf.held())
    # Whoever comes next sees all of it, and finishes it.
    one.close()
    other = janitor(capacity=30 * BLOCK)
    use(other, shelf, [(old, 3), (old, 9)])
    other.run_once()
    assert shelf.held() == [3, 9, *range(16, 32)]
    assert other.run_once().used_after <= 27 * BLOCK


def test_two_at_once_do_no_harm(shelf: Shelf, janitor: Any) -> None:
    old = shelf.segment(range(16), age_s=86_400)
    shelf.segment(range(16, 32), age_s=4000)
    other = janitor(capacity=30 * BLOCK)
    other._lease.take = lambda: ""
    done = False

    def on_step(name: str) -> None:
        nonlocal done
        if name == "moved" and not done:
            done = True
            use(other, shelf, [(old, 3), (old, 9)])
            other.run_once()

    one = janitor(capacity=30 * BLOCK, on_step=on_step)
    use(one, shelf, [(old, 3), (old, 9)])
    one.run_once()
    assert done
    assert shelf.held() == [3, 9, *range(16, 32)]


def test_bucket_that_fails_half_way_loses_nothing(
    shelf: Shelf, janitor: Any, proxy: S3Proxy
) -> None:
    old = shelf.segment(range(16), age_s=86_400)
    shelf.segment(range(16, 32), age_s=4000)
    one = janitor(capacity=30 * BLOCK)
    use(one, shelf, [(old, 3), (old, 9)])
    proxy.faults(Fault("answer", verb="DELETE_MANY|DELETE", status=500, code="InternalError"))
    with pytest.raises(S3Error):
        one.run_once()
    proxy.faults(Fault("reset", verb="PUT", times=40))
    with pytest.raises(S3Error):
        one.run_once()
    proxy.faults()
    one.run_once()
    assert shelf.held() == [3, 9, *range(16, 32)]


def test_purge_by_namespace_age_and_salt(shelf: Shelf, janitor: Any, connect: Connect) -> None:
    other = Shelf(
        connect().client, "cache", Namespace.from_identity({"engine": "test", "model": "big"})
    )
    other.segment(range(200, 204))
    shelf.segment(range(4), age_s=10_000)
    shelf.segment(range(4, 8), age_s=100)
    salted = shelf.segment([8, 9], salt=77)
    entries_before = shelf.held()
    one = janitor()
    found = one.find(Selection(salt=77))
    assert (found.blocks, found.bytes) == (2, 2 * BLOCK)
    assert shelf.held() == entries_before
    purged = one.doom(Selection(salt=77))
    assert (purged.blocks, purged.left, purged.problems) == (2, 0, [])
    assert salted not in shelf.feed()
    assert shelf.held() == list(range(8))
    assert one.doom(Selection(frozenset({shelf.folder}), older_than_s=5000)).blocks == 4
    assert shelf.held() == [4, 5, 6, 7]
    assert one.doom(Selection(frozenset({shelf.folder}))).blocks == 4
    assert (shelf.held(), shelf.segments()) == ([], 0)
    assert other.held() == list(range(200, 204))
