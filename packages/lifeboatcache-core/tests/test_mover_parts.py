"""The parts of a mover's connection: breaker, arena, index feed, messages, throttle."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.config.schema import Config, Tier
from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.index import Index
from lifeboat_cache.mover.arena import PAGE, Arena, Extent, padded_offsets
from lifeboat_cache.mover.breaker import Breaker, BreakerState
from lifeboat_cache.mover.feed import FedIndex, Subscription, take_in
from lifeboat_cache.mover.hanging import needs_mover, resolved_mount
from lifeboat_cache.mover.places import MoverPlaces, forget_old, target_key
from lifeboat_cache.mover.throttle import Throttle
from lifeboat_cache.mover.wire import MOST_BODY, Kind, Message, Receiver, from_json, receive, send
from lifeboat_cache.targets.mounts import Mount
from lifeboat_cache.testing import aligned_memory, sample_keys

OPEN, CLOSED, HALF_OPEN = BreakerState.OPEN, BreakerState.CLOSED, BreakerState.HALF_OPEN


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(10.0, clock)


# The breaker ----------------------------------------------------------------


def test_breaker_opens_at_the_third_error_in_a_row(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.failed("no")
        breaker.failed("no")
        breaker.succeeded()
    assert breaker.closed
    for _ in range(3):
        breaker.failed("disk on fire")
    assert breaker.state is OPEN
    assert breaker.reason == "disk on fire"
    assert breaker.opened == 1


def test_deadline_with_nothing_else_answered_opens_at_once(breaker: Breaker, clock: Clock) -> None:
    asked = clock.now
    clock.now += 10
    breaker.timed_out(asked, "late")
    assert breaker.state is OPEN


def test_deadline_among_answers_counts_as_an_error(breaker: Breaker, clock: Clock) -> None:
    for _ in range(2):
        asked = clock.now
        clock.now += 5
        breaker.succeeded()
        clock.now += 5
        breaker.timed_out(asked, "late")
        assert breaker.closed
    for _ in range(3):
        asked = clock.now
        clock.now += 1
        breaker.failed("no")
        breaker.timed_out(asked, "late")
    assert breaker.state is OPEN


def test_probes_come_ever_more_rarely_until_one_succeeds(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed("no")
    assert not breaker.wants_probe()
    pauses = []
    for _ in range(8):
        begun = clock.now
        while not breaker.wants_probe():
            clock.now += 0.25
        pauses.append(clock.now - begun)
        assert breaker.state is HALF_OPEN
        assert not breaker.closed
        assert not breaker.probed(False, "still no")
        assert breaker.reason == "still no"
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    clock.now += 30
    assert breaker.wants_probe()
    assert breaker.probed(True)
    assert breaker.closed
    assert breaker.reason == ""
    assert not breaker.probed(True), "nothing has changed"


def test_probe_without_an_answer_is_made_again_and_a_late_answer_counts(
    breaker: Breaker, clock: Clock
) -> None:
    breaker.timed_out(clock.now + 1, "late")
    clock.now += 1
    assert breaker.wants_probe()
    clock.now += 9.5
    assert not breaker.wants_probe()
    clock.now += 1
    assert not breaker.wants_probe()  # given up; the next one is due later
    assert breaker.state is OPEN
    assert breaker.retry_in() == 2.0
    assert breaker.probed(True), "the first probe came back after all"
    assert breaker.closed


# The arena ------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * PAGE)
    yield made
    made.close()


def _fill(arena: Arena, extent: Extent, blocks: list[Any]) -> None:
    buffers = BlockBuffers.from_buffers(blocks)
    arena.fill(extent, buffers, buffers.sizes())


def _empty(arena: Arena, extent: Extent, blocks: list[Any]) -> None:
    buffers = BlockBuffers.from_buffers(blocks)
    arena.empty(extent, buffers, buffers.sizes())


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE)), max_size=60))
def test_ranges_never_overlap_and_all_come_back(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(64 * PAGE)
    try:
        taken: list[Extent] = []
        for take, number in steps:
            if take or not taken:
                extent = arena.take(number)
                if extent is not None:
                    assert extent.length >= number
                    taken.append(extent)
            else:
                arena.give_back(taken.pop(number % len(taken)))
            ranges = sorted((one.offset, one.offset + one.length) for one in taken)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
            assert arena.used == sum(one.length for one in taken)
        for extent in taken:
            arena.give_back(extent)
        whole = arena.take(arena.size)
        assert whole is not None
        assert whole.offset == 0
    finally:
        arena.close()


@pytest.mark.parametrize("sizes", [[PAGE] * 3, [1, 5000, PAGE, 12_345], [7] * 40])
def test_blocks_come_out_as_they_went_in(arena: Arena, sizes: list[int]) -> None:
    choice = np.random.default_rng(5)
    blocks = [[choice.integers(0, 256, size, dtype=np.uint8)] for size in sizes]
    # A block in three pieces, one of them empty.
    blocks[-1] = [blocks[-1][0][:3], blocks[-1][0][3:3], blocks[-1][0][3:]]
    offsets = padded_offsets(np.array(sizes, dtype=np.int64))
    extent = arena.take(int(offsets[-1]))
    assert extent is not None
    _fill(arena, extent, blocks)
    for block, offset in zip(blocks, offsets.tolist(), strict=False):
        payload = b"".join(piece.tobytes() for piece in block)
        assert offset % PAGE == 0
        assert os.pread(arena.fd, len(payload), extent.offset + offset) == payload
    back = [[np.zeros_like(piece) for piece in block] for block in blocks]
    _empty(arena, extent, back)
    for block, other in zip(blocks, back, strict=True):
        assert all((a == b).all() for a, b in zip(block, other, strict=True))


def test_more_pieces_than_one_call_takes(arena: Arena) -> None:
    memory = aligned_memory(40 * PAGE)
    memory[:] = np.arange(40 * PAGE, dtype=np.int64).astype(np.uint8)
    pieces = [memory[at : at + 64] for at in range(0, 40 * PAGE, 64)]
    extent = arena.take(40 * PAGE)
    assert extent is not None
    _fill(arena, extent, [pieces])
    back = aligned_memory(40 * PAGE)
    _empty(arena, extent, [back])
    assert (back == memory).all()


def test_memory_is_given_back(arena: Arena) -> None:
    extent = arena.take(8 * PAGE)
    assert extent is not None
    memory = aligned_memory(8 * PAGE)
    memory[:] = 1
    _fill(arena, extent, [memory])
    assert os.fstat(arena.fd).st_blocks > 0
    arena.forget(extent)
    assert os.fstat(arena.fd).st_blocks == 0


def test_other_side_cannot_take_the_memory_away(arena: Arena) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, PAGE)


# The feed -------------------------------------------------------------------

WRITERS = [bytes([number]) * 16 for number in (1, 2)]


def records(numbers: list[int], segment: int, first: int, kind: int = KIND_RECORD) -> Entries:
    entries = np.zeros(len(numbers), dtype=ENTRY)
    for row, key in enumerate(sample_keys(numbers)):
        entries["key"][row] = np.void(key)
    entries["kind"] = kind
    entries["segment"] = segment
    entries["slot"] = np.arange(first, first + len(numbers))
    entries["raw_length"] = entries["stored_length"] = 100 + np.array(numbers)
    return entries


def drain(subscription: Subscription, into: Index, most: int = 1 << 30) -> Index:
    """Tell an index what is to be told."""
    while most and (change := subscription.next()) is not None:
        most -= 1
        if change[0] == Kind.RESET:
            into = Index()
        else:
            assert take_in(into, Message(change[0], 0, bytearray(change[1]), []))
    return into


def same(index: FedIndex, mirror: Index) -> None:
    keys = sorted(index.keys())
    assert sorted(mirror.keys()) == keys
    ours, theirs = index.gather(keys), mirror.gather(keys)
    assert (ours.raw_length == theirs.raw_length).all()
    assert (ours.slot == theirs.slot).all()


_step = st.one_of(
    st.tuples(st.just("insert"), st.sampled_from([0, 1]), st.lists(st.integers(0, 30), max_size=8)),
    st.tuples(st.just("bury"), st.sampled_from([0, 1]), st.integers(0, 30)),
    st.tuples(st.just("take"), st.just(0), st.lists(st.integers(0, 30), max_size=5)),
    st.tuples(st.just("dead"), st.sampled_from([0, 1]), st.integers(0, 3)),
    st.tuples(st.just("gone"), st.sampled_from([0, 1]), st.integers(0, 3)),
    st.tuples(st.just("tell"), st.just(0), st.integers(0, 5)),
    st.tuples(st.just("late"), st.just(0), st.just(0)),
    st.tuples(st.just("settled"), st.just(0), st.just(0)),
)


@settings(max_examples=60)
@given(st.lists(_step, max_size=40))
def test_engines_know_what_the_mover_knows(steps: list[tuple[str, int, object]]) -> None:
    index = FedIndex()
    told = [(index.subscribe(lambda: None), Index())]
    slots = [[0] * 4, [0] * 4]
    for what, who, how in steps:
        writer = WRITERS[who]
        if what == "insert" and isinstance(how, list):
            segment = len(how) % 4
            index.insert(writer, records(how, segment, slots[who][segment]))
            slots[who][segment] += len(how)
        elif what == "bury" and isinstance(how, int):
            found = index.get(sample_keys([how]))[0]
            if found is not None:
                stone = records([how], int(found[1]["segment"]), int(found[1]["slot"]))
                stone["kind"] = KIND_TOMBSTONE
                stone["payload_checksum"] = np.void(found[0])
                index.insert(writer, stone)
        elif what == "take" and isinstance(how, list):
            index.take_many(sample_keys(how))
        elif what == "dead" and isinstance(how, int):
            index.drop_dead(writer, how, np.arange(slots[who][how]) % 2 == 0)
        elif what == "gone" and isinstance(how, int):
            index.drop_segment(writer, how)
        elif what == "tell" and isinstance(how, int):
            told = [(one, drain(one, mirror, how)) for one, mirror in told]
        elif what == "late" and len(told) < 3:
            told.append((index.subscribe(lambda: None), Index()))
        elif what == "settled":
            index.settled()
    for subscription, mirror in told:
        same(index, drain(subscription, mirror))


def test_keys_that_the_mover_does_not_have_are_forgotten() -> None:
    mirror = Index()
    mirror.insert(WRITERS[0], records([1, 2, 3], 0, 0))
    mirror.insert(WRITERS[1], records([2], 0, 0))
    keys = b"".join(sample_keys([2, 3, 9]))
    assert take_in(mirror, Message(Kind.FORGET, 0, keys))
    assert mirror.contains(sample_keys([1, 2, 3])) == [True, False, False]
    assert not take_in(mirror, Message(Kind.DONE, 0, b""))


def test_a_record_that_is_just_being_taken_in_is_not_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = FedIndex()
    subscription = index.subscribe(lambda: None)
    drain(subscription, Index())
    noted, go_on = threading.Event(), threading.Event()
    take = Index.insert

    def slow(self: Index, writer: bytes, entries: Entries) -> int:
        noted.set()
        assert go_on.wait(60)
        return take(self, writer, entries)

    monkeypatch.setattr(Index, "insert", slow)
    storing = threading.Thread(target=index.insert, args=(bytes(16), records([1], 0, 0)))
    storing.start()
    assert noted.wait(60)
    change = subscription.next()
    assert change is not None
    assert change[0] == Kind.INSERT  # an engine knows of it from here on
    absent: list[list[bytes]] = []
    asking = threading.Thread(target=lambda: absent.append(index.absent(sample_keys([1, 2]))))
    asking.start()
    asking.join(0.2)
    go_on.set()
    asking.join(60)
    storing.join(60)
    assert absent == [sample_keys([2])]
    assert index.absent(()) == []


def test_engine_that_does_not_listen_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lifeboat_cache.mover.feed._MOST_BYTES", 10 * 128)
    index = FedIndex()
    subscription = index.subscribe(lambda: None)
    mirror = drain(subscription, Index())
    for first in range(0, 200, 10):
        index.insert(WRITERS[0], records(list(range(first, first + 10)), 0, first))
    assert subscription.next() == (Kind.RESET, b"")
    same(index, drain(subscription, mirror := Index()) and mirror)


def test_feed_while_others_store() -> None:
    index = FedIndex()
    subscription = index.subscribe(lambda: None)
    stop = threading.Event()

    def store(who: int) -> None:
        at = 0
        while not stop.is_set() and at < 3000:
            index.insert(WRITERS[who], records([10_000 * who + at, 7], 0, 2 * at))
            if at % 5 == 0:
                index.take_many(sample_keys([10_000 * who + at]))
            at += 1

    threads = [threading.Thread(target=store, args=(who,)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    mirror = Index()
    for _ in range(50):
        mirror = drain(subscription, mirror, 20)
    stop.set()
    for thread in threads:
        thread.join()
    mirror = drain(subscription, mirror)
    assert sorted(mirror.keys()) == sorted(index.keys())


# Where a path leads -----------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Mount]]:
    """A local directory, beside mounts that must not be looked at."""
    looked: list[str] = []
    real = os.lstat

    def lstat(path: Path) -> os.stat_result:
        assert not Path(path).is_relative_to(tmp_path / "nfs"), "a dead mount was touched"
        looked.append(str(path))
        return real(path)

    monkeypatch.setattr("lifeboat_cache.mover.hanging.os.lstat", lstat)
    table = [
        Mount(Path("/"), "9p", "root"),
        Mount(tmp_path, "ext4", "/dev/sda1"),
        Mount(tmp_path / "nfs", "nfs4", "server:/kv"),
        Mount(tmp_path / "strange", "newfs", "x"),
    ]
    return tmp_path, table


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("kv", "ext4"),
        ("not/there/yet", "ext4"),
        ("nfs/kv/deep", "nfs4"),
        ("strange", "newfs"),
        ("link", "nfs4"),
        ("link/below", "nfs4"),
        ("relative", "nfs4"),
        ("chain/kv", "nfs4"),
        ("kv/../nfs/kv", "nfs4"),
        ("back", "ext4"),
    ],
)
def test_where_a_path_leads(local: tuple[Path, list[Mount]], path: str, kind: str) -> None:
    root, table = local
    (root / "kv").mkdir()
    (root / "link").symlink_to(root / "nfs/kv")
    (root / "relative").symlink_to("nfs/kv")
    (root / "chain").symlink_to("./kv/../link")
    (root / "back").symlink_to("kv/../kv")
    mount = resolved_mount(root / path, table)
    assert mount is not None
    assert mount.type == kind


def test_links_without_end_count_as_what_can_hang(local: tuple[Path, list[Mount]]) -> None:
    root, table = local
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    assert resolved_mount(root / "a", table) is None
    assert resolved_mount(root, []) is None


def test_what_a_mover_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tier(**more: object) -> Tier:
        path = str(tmp_path / "kv")
        return Tier.model_validate({"name": "x", "type": "filesystem", "path": path, **more})

    assert not needs_mover(tier())
    assert needs_mover(tier(bandwidth_limit_gbps=1.0))
    found = [Mount(Path("/"), "ext4", "disk"), Mount(tmp_path, "fuse.sshfs", "far")]
    monkeypatch.setattr("lifeboat_cache.mover.hanging.mounts", lambda: found)
    assert needs_mover(tier())
    monkeypatch.setattr("lifeboat_cache.mover.hanging.mounts", list)
    assert needs_mover(tier()), "nothing is known of the mounts"
    assert target_key(tier()) == target_key(tier(capacity_gb=5.0))


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "filesystem", "capacity_gb": "200G", "timeout_s": "5s", "direct_io": "off"},
        {"type": "nfs", "mount": "/mnt/x", "protocol": "pnfs", "file_mode": "0660", "group": "kv"},
        {"type": "ontap", "bandwidth_limit_gbps": 2.5},
    ],
)
def test_mover_keeps_the_tier_that_an_engine_wants(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    tier = Tier.model_validate({"name": "x", "path": "/mnt/x/kv", **settings})
    places = MoverPlaces.of(tmp_path / "home", target_key(tier))
    assert places.wanted() == []
    places.want(tier)
    places.want(tier)
    assert places.wanted() == [tier]
    places.withdraw()
    assert places.wanted() == []


def test_fallback_may_need_a_mover_too(tmp_path: Path) -> None:
    tier = Config.model_validate({}).storage.fallback_local.as_tier()
    places = MoverPlaces.of(tmp_path / "home", target_key(tier))
    places.want(tier)
    assert places.wanted() == [tier]


def test_what_is_wanted_by_nobody_any_more_is_forgotten(tmp_path: Path) -> None:
    tier = Tier.model_validate({"name": "x", "type": "filesystem", "path": "/mnt/x/kv"})
    places = MoverPlaces.of(tmp_path, target_key(tier))
    places.want(tier)
    (mine,) = (tmp_path / "run").glob("*.want-*")
    os.utime(mine, (time.time() - 120, time.time() - 120))
    assert places.wanted() == [], "its process has died"
    forget_old(tmp_path)
    assert mine.exists()
    os.utime(mine, (time.time() - 3600, time.time() - 3600))
    forget_old(tmp_path)
    assert not mine.exists()


# Messages -------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_message_with_a_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    read, write = os.pipe()
    body = os.urandom(300_000)
    sender = threading.Thread(target=send, args=(pair[0], Kind.HELLO, 9, [body], [write]))
    sender.start()
    message = receive(pair[1])
    sender.join()
    assert message is not None
    assert (message.kind, message.number, bytes(message.body)) == (Kind.HELLO, 9, body)
    os.write(message.fds[0], b"x")
    assert os.read(read, 1) == b"x"
    for fd in (read, write, *message.fds):
        os.close(fd)


def test_many_messages_with_few_calls(pair: tuple[socket.socket, socket.socket]) -> None:
    bodies = [os.urandom(size) for size in (0, 1, 70_000, 300_000, 5)] * 3

    def tell() -> None:
        for number, body in enumerate(bodies):
            send(pair[0], Kind.DONE, number, [body])
        pair[0].shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=tell)
    sender.start()
    receiver = Receiver(pair[1])
    for number, body in enumerate(bodies):
        message = receiver.next()
        assert message is not None
        assert (message.number, message.body) == (number, body)
    assert receiver.next() is None
    sender.join()
    receiver.close()


@pytest.mark.parametrize("sent", [0, 5, 20])
def test_end_in_the_middle_of_a_message(
    pair: tuple[socket.socket, socket.socket], sent: int
) -> None:
    pair[0].sendall((b"\x10\0\0\0\x01\0\0\0" + bytes(8) + b"half")[:sent])
    pair[0].shutdown(socket.SHUT_WR)
    assert (receive(pair[1]) if sent == 5 else Receiver(pair[1]).next()) is None


@pytest.mark.parametrize(
    "head", [(MOST_BODY + 1).to_bytes(4, "little") + bytes(12), bytes(6) + b"\1\0" + bytes(8)]
)
def test_what_is_no_message_is_refused(
    pair: tuple[socket.socket, socket.socket], head: bytes
) -> None:
    pair[0].sendall(2 * head)
    with pytest.raises(FormatError, match="restart the engine"):
        receive(pair[1])
    with pytest.raises(FormatError, match="restart the engine"):
        Receiver(pair[1]).next()


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff"])
def test_json_that_is_no_mapping_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        from_json(body)


def test_array_that_is_not_whole_is_refused() -> None:
    with pytest.raises(FormatError):
        Message(Kind.REMOVE, 0, bytearray(59), []).table(np.dtype("V60"))


# The throttle ---------------------------------------------------------------


def test_throttle_lets_no_more_through_than_its_limit() -> None:
    throttle = Throttle()
    throttle.limit(1e6)
    done: list[tuple[str, float]] = []
    begun = time.monotonic()
    for number in range(6):
        lane = "load" if number == 5 else "store"

        def work(lane: str = lane) -> None:
            done.append((lane, time.monotonic() - begun))

        throttle.submit(lane, 100_000, work)
    give_up = time.monotonic() + 60
    while len(done) < 6:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    # 600 kB at 1 MB/s, of which the first quarter of a second and the last part are free.
    assert done[-1][1] >= 0.2
    assert "load" in [lane for lane, _ in done[:3]], "loads go before stores"


def test_throttle_without_a_limit_does_it_at_once() -> None:
    done: list[int] = []
    Throttle().submit("store", 1 << 40, lambda: done.append(1))
    assert done == [1]


def test_throttle_asks_nothing_for_what_passed_without_a_limit() -> None:
    throttle = Throttle()
    throttle.limit(1e6)
    throttle.limit(None)
    done = threading.Semaphore(0)
    throttle.submit("store", 1 << 40, done.release)
    assert done.acquire(timeout=60)
    throttle.limit(1e6)
    for _ in range(2):
        throttle.submit("store", 1000, done.release)
    # 1 TiB at 1 MB/s would keep these waiting for twelve days.
    assert done.acquire(timeout=60)
    assert done.acquire(timeout=60)
