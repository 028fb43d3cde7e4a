"""Parts of the way to a bucket that need no server: pace, health, memory, names, errors."""

from __future__ import annotations

import base64
import builtins
import contextlib
import itertools
import os
import queue
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from lifeboat_cache.agent.lock import AgentLock
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.errors import FormatError, TargetError
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE
from lifeboat_cache.mover.places import MoverPlaces, target_key
from lifeboat_cache.mover.process import Mover
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.s3.archive import archive_of
from lifeboat_cache.s3.catalog import Catalog
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.connections import Connections, InterruptedBodyError
from lifeboat_cache.s3.errors import Fault, S3Error, of_answer
from lifeboat_cache.s3.fetcher import Fetcher, Source
from lifeboat_cache.s3.health import Health
from lifeboat_cache.s3.landing import LandingArea
from lifeboat_cache.s3.names import FeedName, Names, parse_feed
from lifeboat_cache.s3.pace import Pace
from lifeboat_cache.s3.reader import S3Reader
from lifeboat_cache.s3.settings import S3Settings
from lifeboat_cache.s3.slice_cache import SliceCache, forget_unused
from lifeboat_cache.s3.slices import pack_gone, pack_slice, unpack_gone, unpack_slice
from lifeboat_cache.s3.traffic import verb_of
from lifeboat_cache.store.io_task import IoTask


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_requests_are_kept_apart_after_a_server_asked_for_fewer_and_let_go_again() -> None:
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    assert pace.wait()
    assert clock.now == 100.0
    pace.slower()
    pace.slower()
    before = clock.now
    assert pace.wait()
    assert pace.wait()
    assert clock.now - before > pace.pause_s
    assert not pace.wait(deadline=clock.now)
    for _ in range(20):
        pace.good()
    assert pace.pause_s == 0.0


def test_a_bucket_that_does_not_answer_is_left_alone_for_a_while() -> None:
    clock = Clock()
    health = Health(clock)
    health.bad("one")
    assert health.may_try()
    health.bad("two")
    assert not health.may_try()
    clock.now += 1.0
    # One of many finds out.
    assert [health.may_try() for _ in range(5)] == [True, False, False, False, False]
    assert health.problem == "two"
    health.good()
    assert health.may_try()
    assert health.problem == ""


def test_many_requests_that_fail_at_once_are_one_reason_to_pause() -> None:
    clock = Clock()
    health = Health(clock)
    for number in range(16):
        health.bad(str(number))
    clock.now += 0.6
    assert health.may_try()
    health.bad("again")  # the one that was let through: the next pause is longer
    clock.now += 0.6
    assert not health.may_try()
    clock.now += 0.5
    assert health.may_try()


def test_memory_for_reads_is_used_again_and_bounded() -> None:
    area = LandingArea(limit=4 << 20)
    first = area.take(3 << 20)
    assert first.size == 4 << 20
    free = [area.free]
    area.give_back(first)
    free.append(area.free)
    assert free == [False, True]
    assert area.take(4 << 20) is first
    area.give_back(first)
    assert area.take(1 << 20) is first  # it serves for what is a little smaller, and counts whole
    assert not area.free
    other = area.take(1 << 20)
    area.give_back(other)
    area.give_back(first)
    assert area.take(1 << 20) is first  # what was given back before it made room


def test_names_in_a_feed_are_read_back_and_sorted_by_time() -> None:
    names = [FeedName(time, bytes(16), 7, 4096) for time in (5, 1_800_000_000, 1_700_000_000)]
    assert [parse_feed(str(name)) for name in names] == names
    assert sorted(names, key=str) == sorted(names, key=lambda name: name.time)
    for text in ("x", str(names[0]) + "x", str(names[0]).replace(".journal", ".other")):
        assert parse_feed(text) is None
    assert Names.of("/a/b/").feed("f" * 32) == f"a/b/{'f' * 32}/feed/"
    assert Names.of("").marker == "lifeboat-cache.json"


def entries() -> Any:
    found = np.zeros(3, dtype=ENTRY)
    found["segment"], found["stored_length"], found["slot"] = 7, 4096, (0, 1, 2)
    found["offset"] = (4096, 8192, 12288)
    found["kind"] = (KIND_RECORD, KIND_RECORD, KIND_TOMBSTONE)
    return found


@pytest.mark.parametrize("prefix", ["", "kv"])
def test_segments_are_told_from_what_others_keep_in_the_bucket(prefix: str) -> None:
    names = Names.of(prefix)
    key = names.segment("ab" * 16, bytes(16), 7)
    assert names.is_segment(key)
    for other in ("backup.tar", f"{'ab' * 16}/segments/dump", f"x/{key}", key + ".bak"):
        assert not names.is_segment(names.prefix + other)


def remote_load(count: int) -> IoTask:
    """A load of some blocks of a segment that is in a bucket."""
    return IoTask(
        "load",
        np.arange(count),
        np.array([[-2, 0, 0, count, -1]], dtype=np.int64),
        np.arange(count) * 4096,
        np.full(count, 4096),
        np.zeros((count, 2), dtype=np.uint64),
        np.arange(count + 1),
        np.zeros((count, 96), dtype=np.uint8),
        np.zeros((count, 16), dtype=np.uint8),
        np.zeros(count, dtype=np.uint8),
        4096,
        np.full(count, Outcome.PENDING, dtype=np.uint8),
    )


def test_loads_of_what_went_while_they_waited_end_as_misses() -> None:
    fetcher = Fetcher(cast(S3Client, None), Health(), 1.0)
    ended: queue.Queue[list[IoTask]] = queue.Queue()
    for _ in range(200):  # more than there is memory for, if it were not given back
        task = remote_load(3)
        fetcher.fetch([task], lambda fd: None, ended.put, ended.put)
        assert ended.get(timeout=5.0) == [task]
        assert set(task.outcomes.tolist()) == {Outcome.MISSING}
    fetcher.close()


@pytest.mark.parametrize("when", ["before there is memory", "with memory"])
def test_a_fault_of_ours_ends_a_load(when: str) -> None:
    fetcher = Fetcher(cast(S3Client, None), Health(), 1.0)
    ended: queue.Queue[list[IoTask]] = queue.Queue()

    def source(fd: int) -> Source:
        if when == "before there is memory":
            raise RuntimeError("a fault")
        return Source("key", lambda: True)

    for _ in range(200):
        task = remote_load(3)
        task.offsets.flags.writeable = False  # it cannot be led to the memory
        fetcher.fetch([task], source, ended.put, ended.put)
        assert ended.get(timeout=5.0) == [task]
        assert set(task.outcomes.tolist()) == {Outcome.UNAVAILABLE}
    fetcher.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of this host and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=t",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", f"{path}.cert"],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_bytes(path.read_bytes() + Path(f"{path}.cert").read_bytes())
    return path


def as_server(certificate: Path | None, connection: socket.socket) -> socket.socket:
    """The server's side of a connection, within TLS if there is a certificate."""
    if certificate is None:
        return connection
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    return tls.wrap_socket(connection, server_side=True)


def as_client(certificate: Path | None) -> ssl.SSLContext | None:
    return None if certificate is None else ssl.create_default_context(cafile=str(certificate))


def test_a_load_ends_where_nothing_can_fetch_it() -> None:
    class Archive:
        @property
        def fetcher(self) -> Fetcher:
            raise RuntimeError("can't start new thread")

    reader = cast(S3Reader, SimpleNamespace(_archive=Archive(), _sources={}))
    ended: list[list[IoTask]] = []
    task = remote_load(3)
    S3Reader.fetch(reader, [task], ended.append, ended.append)
    assert ended == [[task]]
    assert set(task.outcomes.tolist()) == {Outcome.UNAVAILABLE}


@contextlib.contextmanager
def trickling(head: bytes, certificate: Path | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers with a head and then a byte now and then: its port, what it heard."""
    over = threading.Event()
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with as_server(certificate, server.accept()[0]) as connection:
                heard.append(connection.recv(65536))
                connection.sendall(head)
                with contextlib.suppress(OSError):
                    while not over.wait(0.02):
                        connection.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], heard
        finally:
            over.set()
            thread.join()


def part_head(size: int) -> bytes:
    """What comes before all of an object that was asked for as a part."""
    return (
        f"HTTP/1.1 206 Partial\r\nContent-Length: {size}\r\n"
        f"Content-Range: bytes 0-{size - 1}/{size}\r\n\r\n"
    ).encode()


_PART = part_head(4096)
_WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n"


@pytest.mark.parametrize("proxied", [False, True], ids=["at once", "through a proxy"])
@pytest.mark.parametrize("what", ["a part", "an object"])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up_at_the_deadline(
    what: str, proxied: bool
) -> None:
    with trickling(_PART if what == "a part" else _WHOLE) as (port, heard):
        proxy = f"http://me:%40word@127.0.0.1:{port}" if proxied else ""
        connections = Connections(5.0, 5.0, None, lambda _: proxy)
        url = f"http://{'bucket.example' if proxied else f'127.0.0.1:{port}'}/x"
        deadline = time.monotonic() + 0.5
        read = {
            "a part": partial(connections.read, url, 0, [memoryview(bytearray(4096))], deadline),
            "an object": partial(connections.get, url, deadline),
        }
        with pytest.raises(TimeoutError):
            read[what]()
        connections.close()
    assert heard[0].startswith(b"GET " + (url.encode() if proxied else b"/x") + b" HTTP")
    said = b"Proxy-Authorization: Basic " + base64.b64encode(b"me:@word")
    assert (said in heard[0]) is proxied


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_large_body_that_trickles_in_is_given_up_at_the_deadline(
    tls: bool, request: pytest.FixtureRequest
) -> None:
    certificate = request.getfixturevalue("certificate") if tls else None
    size = 1 << 20
    with trickling(part_head(size), certificate) as (port, _):
        connections = Connections(5.0, 5.0, as_client(certificate))
        into = [memoryview(bytearray(size // 2)), memoryview(bytearray(size // 2))]
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            connections.read(f"http{'s' * tls}://127.0.0.1:{port}/x", 0, into, begin + 0.7)
        assert time.monotonic() > begin + 0.6  # not sooner: it may still come
        connections.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_large_body_comes_whole_or_not_at_all_however_it_is_cut(
    tls: bool, request: pytest.FixtureRequest
) -> None:
    certificate = request.getfixturevalue("certificate") if tls else None
    body = np.random.default_rng(3).bytes((1 << 20) + 12345)
    cuts = [0, 1, 5000, 70_000, 70_001, 400_000, len(body)]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with as_server(certificate, server.accept()[0]) as connection:
                for _ in range(2):  # one after the other on the same connection
                    connection.recv(65536)
                    connection.sendall(part_head(len(body)) + body[:1])
                    for first, last in itertools.pairwise(cuts[1:]):
                        time.sleep(0.01)
                        connection.sendall(body[first:last])
                connection.recv(65536)
                connection.sendall(part_head(len(body)) + body[:-1])

        thread = threading.Thread(target=serve)
        thread.start()
        connections = Connections(5.0, 5.0, as_client(certificate))
        url = f"http{'s' * tls}://127.0.0.1:{server.getsockname()[1]}/x"
        pieces = [100, 300_000, 7, len(body) - 300_107]
        for _ in range(2):
            into = [memoryview(bytearray(size)) for size in pieces]
            assert connections.read(url, 0, into, time.monotonic() + 30).status == 206
            assert b"".join(into) == body
        into = [memoryview(bytearray(size)) for size in pieces]
        with pytest.raises(InterruptedBodyError, match=rf"after {len(body) - 1} of {len(body)} "):
            connections.read(url, 0, into, time.monotonic() + 30)
        connections.close()
        thread.join()


def test_a_proxy_that_says_a_byte_now_and_then_is_given_up_at_the_deadline() -> None:
    with trickling(b"HTTP/1.1 200 OK\r\nX: ") as (port, heard):
        proxy = f"http://127.0.0.1:{port}"
        connections = Connections(5.0, 5.0, ssl.create_default_context(), lambda _: proxy)
        with pytest.raises(TimeoutError):
            connections.get("https://bucket.example/x", time.monotonic() + 0.5)
        connections.close()
    assert heard[0].startswith(b"CONNECT bucket.example:443 ")


def test_a_proxy_that_refuses_is_no_answer_of_the_server() -> None:
    with trickling(b"HTTP/1.1 407 Tell me who you are\r\n\r\n") as (port, _):
        proxy = f"http://127.0.0.1:{port}"
        connections = Connections(5.0, 5.0, ssl.create_default_context(), lambda _: proxy)
        with pytest.raises(OSError, match="407"):
            connections.get("https://bucket.example/x", time.monotonic() + 5.0)
        connections.close()


def test_a_slice_holds_what_lies_in_its_segment_and_nothing_else() -> None:
    namespace, writer = bytes(range(32)), bytes(range(16))
    data = pack_slice(namespace, writer, 7, entries())
    whole = FeedName(1, writer, 7, 12288)
    found, bad = unpack_slice(data, namespace, whole)
    assert found["slot"].tolist() == [0, 1, 2]
    assert bad == 0
    # The second record ends behind this segment.
    found, bad = unpack_slice(data, namespace, FeedName(1, writer, 7, 8192))
    assert found["slot"].tolist() == [0, 2]
    assert bad == 1
    flipped = bytearray(data)
    flipped[4096 + 60] ^= 1
    found, bad = unpack_slice(bytes(flipped), namespace, whole)
    assert found["slot"].tolist() == [1, 2]
    assert bad == 1
    for name, of in ((FeedName(1, writer, 8, 12288), namespace), (whole, bytes(32))):
        with pytest.raises(FormatError, match="another segment"):
            unpack_slice(data, of, name)


def test_a_list_of_what_is_gone_is_read_back() -> None:
    places = [(bytes(16), 3), (bytes(range(16)), 4)]
    assert unpack_gone(pack_gone(places)) == places
    for damaged in (b"", b"{}", b'{"segments": [["zz", 1]]}', b"[" * 100_000):
        with pytest.raises(FormatError):
            unpack_gone(damaged)


def test_operations_are_counted_as_what_they_cost() -> None:
    counted = {
        "PutObject": "put",
        "UploadPart": "put",
        "CompleteMultipartUpload": "put",
        "AbortMultipartUpload": "delete",
        "GetObject": "get",
        "HeadBucket": "get",
        "ListObjectsV2": "list",
        "ListMultipartUploads": "list",
        "DeleteObjects": "delete",
    }
    assert {name: verb_of(name) for name in counted} == counted


def test_errors_are_told_apart_by_what_to_do() -> None:
    assert of_answer("b", 503, "SlowDown").fault is Fault.THROTTLED
    assert of_answer("b", 404, "NoSuchBucket").fault is Fault.BUCKET
    assert of_answer("b", 404, "").fault is Fault.MISSING
    assert of_answer("b", 403, "RequestTimeTooSkewed").fault is Fault.CLOCK
    late = of_answer("b", 403, "SignatureDoesNotMatch", skew_s=-86_400.0)
    assert late.fault is Fault.CLOCK
    assert "86400 s behind the server's" in str(late)
    assert of_answer("b", 403, "AccessDenied", skew_s=2.0).fault is Fault.DENIED
    assert of_answer("b", 500, "Whatever").passing


def test_without_boto3_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "boto3":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(TargetError, match="pip install boto3"):
        S3Client("bucket")


def test_a_bucket_that_cannot_be_listed_is_not_asked_at_every_look(tmp_path: Path) -> None:
    class Denying:
        asked = 0
        where = "s3://kv"

        def now(self) -> float:
            return 1e9

        def objects(self, prefix: str, after: str = "") -> list[Any]:
            self.asked += 1
            raise of_answer(self.where, 403, "AccessDenied")

    client = Denying()
    cache = SliceCache(tmp_path, lambda: 1 << 40)
    catalog = Catalog(cast(S3Client, client), Names.of(""), bytes(32), cache)
    for failing in (False, True):
        assert catalog.failing is failing
        with pytest.raises(S3Error):
            catalog.refresh(whole=True)
    assert not catalog.complete


@pytest.mark.parametrize("where", ["entry", "header"])
@pytest.mark.parametrize("kept", [False, True], ids=["on the way", "in the cache"])
def test_a_slice_that_came_damaged_is_fetched_again(tmp_path: Path, where: str, kept: bool) -> None:
    namespace, writer = bytes(range(32)), bytes(range(16))
    data = pack_slice(namespace, writer, 7, entries())
    spoiled = bytearray(data)
    spoiled[4096 + 60 if where == "entry" else 20] ^= 1
    name = FeedName(1000, writer, 7, 12288)

    class Once:
        where = "s3://kv"
        answers: ClassVar = [data] if kept else [bytes(spoiled), data]

        def now(self) -> float:
            return 1e9

        def objects(self, prefix: str, after: str = "") -> list[Any]:
            return [SimpleNamespace(key=f"{prefix}{name}")]

        def get(self, key: str) -> bytes:
            return self.answers.pop(0)

    cache = SliceCache(tmp_path, lambda: 1 << 40)
    if kept:
        cache.put(name, bytes(spoiled))
    catalog = Catalog(cast(S3Client, Once()), Names.of(""), namespace, cache)
    catalog.refresh(whole=True)
    found, bad = catalog.entries(name)
    assert found["slot"].tolist() == [0, 1, 2]
    assert not bad
    assert cache.get(name) == data
    assert not Once.answers


def test_a_slice_that_cannot_be_had_is_asked_for_again() -> None:
    names = [FeedName(1000 + number, bytes(16), number, 12288) for number in range(3)]
    faults = [of_answer("b", 503, "SlowDown"), of_answer("b", 404, "NoSuchKey")]
    said: list[str] = []

    def read(name: FeedName) -> tuple[Any, int]:
        if name.number and faults:
            raise faults.pop(0)
        return entries(), 0

    reader = S3Reader.__new__(S3Reader)
    catalog = SimpleNamespace(slices=lambda since: names[since:], entries=read)
    reader._catalog = cast(Catalog, catalog)
    reader._archive = cast(Any, SimpleNamespace(health=SimpleNamespace(bad=said.append)))
    reader._slices, reader._unread = 0, []
    assert [page.entries.shape[0] for page in reader._new(None)] == [3]
    assert len(said) == 1
    # What has been deleted meanwhile holds nothing; what comes behind it is read all the same.
    assert [page.entries.shape[0] for page in reader._new(None)] == [0, 3]
    assert list(reader._new(None)) == []


def test_slices_are_kept_where_there_is_room_and_dropped_when_nobody_wants_them(
    tmp_path: Path,
) -> None:
    room = 1000
    cache = SliceCache(tmp_path / "one", lambda: room)
    old, new = FeedName(1000, bytes(16), 1, 4096), FeedName(5000, bytes(16), 2, 4096)
    cache.put(old, b"a" * 1000)
    cache.put(new, b"b")
    room = 999
    large = FeedName(5000, bytes(16), 3, 4096)
    cache.put(large, b"c" * 1000)
    assert cache.names() == [old, new]
    assert cache.get(large) is None
    begun = tmp_path / "one" / ".x.tmp"
    begun.write_bytes(b"")
    cache.trim({str(old)}, 4000)
    assert cache.names() == [old, new]
    os.utime(begun, (0, 0))
    cache.trim(set(), 4000)
    assert cache.names() == [new]
    assert not begun.exists()


def test_slices_of_namespaces_that_nobody_uses_go(tmp_path: Path) -> None:
    name = FeedName(1000, bytes(16), 1, 4096)
    for directory in ("mine", "young", "old"):
        SliceCache(tmp_path / directory, lambda: 100).put(name, b"x")
    os.utime(tmp_path / "old", (0, 0))
    os.utime(tmp_path / "mine", (0, 0))
    forget_unused(tmp_path, {"mine"}, short=False)
    assert sorted(os.listdir(tmp_path)) == ["mine", "young"]
    forget_unused(tmp_path, {"mine"}, short=True)
    assert os.listdir(tmp_path) == ["mine"]


def test_settings_of_one_place_are_one_bucket_whatever_their_limits(tmp_path: Path) -> None:
    one = S3Settings("a", tmp_path, "kv", "http://host:1/", prefix="/x/", timeout_s=1.0)
    archive = archive_of(one)
    other = replace(
        one, endpoint_url="http://host:1", prefix="x", sse="AES256", timeout_s=9.0, capacity=5
    )
    assert archive_of(other) is archive
    # Who only asks for it changes nothing.
    assert archive.settings == one
    assert archive.fetcher.timeout_s == 1.0
    archive.limit(other)
    assert archive.settings == other
    assert archive.fetcher.timeout_s == 9.0
    assert archive.client._sse == {"ServerSideEncryption": "AES256"}
    assert archive_of(replace(one, path=tmp_path / "x")) is not archive
    archive.close()


def test_a_mover_uses_limits_on_which_all_engines_agree(tmp_path: Path) -> None:
    mover = Mover(MoverPlaces.of(tmp_path, "0" * 16), cast(AgentLock, None), None, 1.0)
    common = {"name": "a", "type": "s3", "bucket": "kv", "path": str(tmp_path)}
    mover._tiers = [
        Tier.model_validate({**common, **more})
        for more in (
            {"timeout_s": 5.0, "staging_gb": 2.0, "capacity_gb": 50.0, "min_free_gb": 1.0},
            {"timeout_s": 30.0, "staging_gb": 1.0, "min_free_gb": 3.0, "prefix": "/"},
        )
    ]
    assert len({target_key(tier) for tier in mover._tiers}) == 1
    settings = mover._make_target().archive.settings
    assert settings.timeout_s == 30.0
    assert (settings.staging, settings.reserve) == (1_000_000_000, 3_000_000_000)
    assert settings.capacity == 50_000_000_000
