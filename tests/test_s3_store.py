"""Blocks in a bucket of a real S3 server: stored, found by others, kept through faults."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from s3_proxy import Fault, S3Proxy, s3_proxy
from s3_server import S3Server

from lifeboat_cache import kernels
from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.errors import TargetError
from lifeboat_cache.janitor import Janitor, Selection
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.janitor import BucketJanitor
from lifeboat_cache.s3.settings import S3Settings
from lifeboat_cache.s3.target import S3Target
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget

BLOCKS, SIZE = 40, 64 << 10
NAMESPACE = Namespace.from_identity({"model": "test of buckets"}, {})
KEYS = [hashlib.sha256(str(number).encode()).digest() for number in range(BLOCKS)]
CONTENT = np.random.default_rng(7).integers(0, 256, (BLOCKS, SIZE), dtype=np.uint8)


class Node:
    """A host of its own: only the bucket is shared."""

    def __init__(self, path: Path, bucket: str, endpoint: str, **settings: object) -> None:
        options = {"timeout_s": 5.0, **settings}
        self.archive = Archive(S3Settings("cold", path, bucket, endpoint, **options))  # type: ignore[arg-type]
        self.target = S3Target(self.archive.settings)
        self.target._archive = self.archive
        self.store = BlockStore(NAMESPACE, [self.target])
        assert self.store.wait_recovered(60)

    def keep(self, first: int = 0, last: int = BLOCKS) -> list[int]:
        blocks = [CONTENT[number] for number in range(first, last)]
        job = self.store.store(BlockBatch(KEYS[first:last], BlockBuffers.from_buffers(blocks)))
        assert self.store.drain(60)
        return list(job.outcomes.tolist())

    def load(self) -> npt.NDArray[np.uint8]:
        """Load all; what is reported as loaded has to be right."""
        memory = np.zeros_like(CONTENT)
        batch = BlockBatch(KEYS, BlockBuffers.from_buffers(list(memory)))
        job = self.store.load(batch)
        assert self.store.drain(60)
        good = job.outcomes == Outcome.OK
        assert (memory[good] == CONTENT[good]).all()
        return job.outcomes.copy()

    def upload(self) -> None:
        assert self.archive.uploader.flush(60), self.archive.uploader.problem

    def hits(self) -> int:
        return int((self.store.lookup(KEYS) == 1).sum())

    def look(self) -> None:
        """Take in now what others have done."""
        self.archive.catalog(NAMESPACE.digest).refresh(whole=True)
        self.store._keeper.follower.follow(recovering=False)
        self.store._keeper.follower.forget_reclaimed()

    def close(self) -> None:
        self.store.close()
        self.archive.close()


MakeNode = Callable[..., Node]


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3.new_bucket()


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def node(bucket: str, proxy: S3Proxy, tmp_path: Path) -> Iterator[MakeNode]:
    made: list[Node] = []

    def make(name: str, **settings: object) -> Node:
        one = Node(tmp_path / name, bucket, proxy.endpoint, **settings)
        made.append(one)
        return one

    yield make
    proxy.faults()
    for one in made:
        one.close()


ALL_OK = [Outcome.OK] * BLOCKS


def test_another_host_finds_what_was_stored(node: MakeNode, s3: S3Server, bucket: str) -> None:
    a = node("a")
    assert a.keep() == ALL_OK
    a.upload()
    b = node("b")
    assert b.hits() == BLOCKS
    assert b.load().tolist() == ALL_OK
    # One object for the segment, one for its journal.
    names = [name for name in s3.objects(bucket) if NAMESPACE.directory in name]
    assert sorted(name.rpartition(".")[2] for name in names) == ["journal", "json", "segment"]
    # Nothing is left on the disk of the first, which reads from the bucket, too.
    assert not list((a.archive.settings.path / "staging").rglob("*.segment"))
    assert a.load().tolist() == ALL_OK


def test_a_restart_reads_journals_only_and_those_once(node: MakeNode, proxy: S3Proxy) -> None:
    a = node("a")
    a.keep()
    a.upload()
    a.close()
    proxy.forget()
    again = node("a")
    assert again.hits() == BLOCKS
    asked = [one for one in proxy.asked if one.verb == "GET" and NAMESPACE.directory in one.path]
    assert asked == []


def test_neighbours_are_read_with_few_requests(node: MakeNode, proxy: S3Proxy) -> None:
    a = node("a")
    a.keep()
    a.upload()
    proxy.forget()
    assert a.load().tolist() == ALL_OK
    # 2.5 MiB in parts of two.
    assert proxy.counts()["GET"] <= 2


def test_much_is_read_with_large_requests(node: MakeNode, proxy: S3Proxy) -> None:
    a = node("a")
    a.keep()
    a.upload()
    proxy.forget()
    proxy.faults(Fault("delay", verb="GET", match="segments/", seconds=0.2))
    memory = np.zeros_like(CONTENT)
    batch = BlockBatch(KEYS, BlockBuffers.from_buffers(list(memory)))
    jobs = [a.store.load(batch) for _ in range(40)]
    assert a.store.drain(60)
    assert all((job.outcomes == Outcome.OK).all() for job in jobs)
    assert (memory == CONTENT).all()
    # 2.5 MiB in parts of 2 MiB as long as there are connections, and at once after that.
    asked = [one for one in proxy.asked if "segments/" in one.path]
    assert 40 <= len(asked) < 2 * 40


@pytest.mark.parametrize("order", ["in order", "mixed", "in small pieces"])
def test_what_needs_no_decoding_goes_straight_to_its_memory_and_is_verified_there(
    node: MakeNode, proxy: S3Proxy, kernel_home: Path, order: str
) -> None:
    assert kernels.load(kernel_home)
    a = node("a")
    a.keep()
    a.upload()
    numbers = list(range(BLOCKS))
    if order == "mixed":
        random.Random(5).shuffle(numbers)
    # Where each half of each block goes.
    memory = np.zeros((BLOCKS, 2, SIZE // 2), dtype=np.uint8)
    if order == "in small pieces":
        memory = np.zeros((BLOCKS, 4, SIZE // 2), dtype=np.uint8)[:, ::2]
    at = [memory[row, half].ctypes.data for row in range(BLOCKS) for half in (0, 1)]
    buffers = BlockBuffers(
        np.array(at, dtype=np.uint64),
        np.full(2 * BLOCKS, SIZE // 2, dtype=np.uint64),
        np.arange(BLOCKS + 1) * 2,
        memory,
    )
    batch = BlockBatch([KEYS[number] for number in numbers], buffers)

    def load() -> list[int]:
        memory[:] = 0
        job = a.store.load(batch)
        assert a.store.drain(60)
        for row, number in enumerate(numbers):
            if job.outcomes[row] == Outcome.OK:
                assert memory[row].tobytes() == CONTENT[number].tobytes()
        return list(job.outcomes.tolist())

    assert load() == ALL_OK
    assert bool(a.archive.fetcher._area._idle) is (order == "in small pieces")
    for do in ("corrupt", "truncate"):
        proxy.faults(Fault(do, verb="GET", match="segments/", at=-5))
        found = load()
        assert found != ALL_OK
        assert (Outcome.OK in found) is (do == "corrupt")
        proxy.faults()
        while Outcome.UNAVAILABLE in (outcomes := load()):
            pass
        assert outcomes == ALL_OK


def test_one_load_takes_what_is_uploaded_and_what_is_staged(node: MakeNode) -> None:
    """Parts of both kinds were missing: what is staged lay in no object."""
    a = node("a")
    assert set(a.keep(0, 20)) == {Outcome.OK}
    a.upload()
    assert set(a.keep(20)) == {Outcome.OK}
    for _ in range(2):
        assert set(a.load().tolist()) == {Outcome.OK}
    assert a.hits() == BLOCKS


def test_what_is_stored_later_is_found_by_those_who_run(node: MakeNode) -> None:
    a, b = node("a"), node("b")
    assert b.hits() == 0
    a.keep()
    a.upload()
    b.look()
    assert b.load().tolist() == ALL_OK


def test_what_is_staged_survives_the_process_and_is_uploaded_by_the_next(
    node: MakeNode, proxy: S3Proxy
) -> None:
    a = node("a")
    proxy.faults(Fault("answer", verb="PUT|PART|MULTIPART_BEGIN", match="segments/"))
    assert a.keep() == ALL_OK
    assert not a.archive.uploader.flush(1)
    assert "SlowDown" in a.archive.uploader.problem
    a.close()  # nothing of it is in the bucket
    proxy.faults()
    again = node("a")
    assert again.hits() == BLOCKS
    assert again.load().tolist() == ALL_OK
    again.upload()
    assert node("b").load().tolist() == ALL_OK


def test_what_was_uploaded_before_a_crash_is_not_uploaded_twice(
    node: MakeNode, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = node("a")
    a.keep()
    with monkeypatch.context() as patch:
        patch.setattr("lifeboat_cache.s3.uploader.os.unlink", lambda _path: None)
        a.upload()
        a.close()
    assert list((a.archive.settings.path / "staging").rglob("*.segment"))
    proxy.forget()
    again = node("a")
    again.upload()
    assert again.load().tolist() == ALL_OK
    assert not [one for one in proxy.asked if one.verb != "GET" and "segments/" in one.path]
    assert not list((a.archive.settings.path / "staging").rglob("*.segment"))


@pytest.mark.parametrize("do", ["truncate", "corrupt"])
def test_bodies_that_are_damaged_on_the_way_cost_a_miss_and_no_block(
    node: MakeNode, proxy: S3Proxy, do: str
) -> None:
    a = node("a")
    a.keep()
    a.upload()
    proxy.faults(Fault(do, verb="GET", match="segments/", at=5))
    assert a.load().tolist() != ALL_OK
    proxy.faults()
    while Outcome.UNAVAILABLE in (outcomes := a.load().tolist()):
        pass
    assert outcomes == ALL_OK


def test_blocks_are_found_again_after_the_server_was_away(node: MakeNode, proxy: S3Proxy) -> None:
    a = node("a")
    a.keep()
    a.upload()
    proxy.faults(Fault("reset"))
    assert set(a.load().tolist()) == {Outcome.UNAVAILABLE}
    assert a.hits() == BLOCKS
    proxy.faults()
    while Outcome.UNAVAILABLE in (outcomes := a.load().tolist()):
        pass
    assert outcomes == ALL_OK


def test_a_server_that_asks_for_fewer_requests_gets_fewer(node: MakeNode, proxy: S3Proxy) -> None:
    a = node("a")
    a.keep()
    a.upload()
    proxy.faults(Fault("answer", verb="GET", times=1))
    assert a.load().tolist() == ALL_OK
    assert a.archive.facts()["errors"] == {"throttled": 1}


def test_what_somebody_deleted_is_missing(node: MakeNode, s3: S3Server, bucket: str) -> None:
    a, b, c = node("a"), node("b"), node("c")
    a.keep()
    a.upload()
    for one in (b, c):
        one.look()
        assert one.hits() == BLOCKS
    catalog = a.archive.catalog(NAMESPACE.digest)
    a.archive.remove(NAMESPACE.digest, [(one.writer, one.number) for one in catalog.segments()])
    b.look()
    assert b.hits() == 0
    # Who has not heard of it yet finds out.
    assert set(c.load().tolist()) == {Outcome.UNAVAILABLE}
    assert [name for name in s3.objects(bucket) if name.endswith((".segment", ".journal"))] == []


def test_a_full_staging_drops_what_comes(node: MakeNode, proxy: S3Proxy) -> None:
    a = node("a", staging=1 << 20)
    proxy.faults(Fault("answer", verb="PUT", match="segments/"))
    outcomes = a.keep()
    assert set(outcomes) == {Outcome.OK, Outcome.BUSY}
    proxy.faults()
    a.upload()
    assert [bool(one == Outcome.OK) for one in a.load()] == [one == Outcome.OK for one in outcomes]


def test_a_full_bucket_takes_no_more(node: MakeNode) -> None:
    a = node("a", capacity=1 << 20)
    outcomes = a.keep()
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    a.upload()
    assert a.archive.used() <= 1 << 20


def test_what_is_purged_while_it_waits_does_not_get_into_the_bucket(
    node: MakeNode, s3: S3Server, bucket: str
) -> None:
    a = node("a")
    a.keep()
    waiting = Janitor(FilesystemTarget(a.archive.settings.path / "staging"))
    keys = [int.from_bytes(key[:8], "little") for key in KEYS[:5]]
    assert waiting.doom(Selection(keys=frozenset(keys))).blocks == 5
    a.upload()
    b = node("b")
    assert b.hits() == BLOCKS - 5
    (name,) = [name for name in s3.objects(bucket) if name.endswith(".segment")]
    content = s3.client().get_object(Bucket=bucket, Key=name)["Body"].read()
    assert all(CONTENT[number].tobytes() not in content for number in range(5))
    assert all(CONTENT[number].tobytes() in content for number in range(5, BLOCKS))


@pytest.mark.parametrize("count", [5, BLOCKS])
def test_what_is_purged_while_it_is_uploaded_does_not_stay_in_the_bucket(
    node: MakeNode,
    s3: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    a = node("a")
    a.keep()
    put_file, waiting = a.archive.client.put_file, a.archive.settings.path / "staging"
    keys = frozenset(int.from_bytes(key[:8], "little") for key in KEYS[:count])

    def slow(key: str, fd: int, size: int) -> None:
        put_file(key, fd, size)
        Janitor(FilesystemTarget(waiting)).doom(Selection(keys=keys))

    monkeypatch.setattr(a.archive.client, "put_file", slow)
    a.upload()
    assert node("b").hits() == BLOCKS - count
    for name in s3.objects(bucket):
        content = s3.client().get_object(Bucket=bucket, Key=name)["Body"].read()
        assert all(CONTENT[number].tobytes() not in content for number in range(count))


def test_what_waits_for_one_bucket_does_not_get_into_another(
    node: MakeNode, s3: S3Server, proxy: S3Proxy, bucket: str, tmp_path: Path
) -> None:
    a = node("a")
    a.keep(0, 20)
    a.upload()
    proxy.faults(Fault("answer", verb="PUT|PART|MULTIPART_BEGIN", match="segments/"))
    a.keep(20)
    a.close()
    proxy.faults()
    # Somebody writes another bucket into the configuration.
    other = s3.new_bucket()
    archive = Archive(S3Settings("cold", tmp_path / "a", other, proxy.endpoint))
    with pytest.raises(TargetError, match="set the tier's path"):
        archive.probe()
    assert not archive.uploader.flush(1)
    archive.close()
    again = node("a")
    again.upload()
    assert again.load().tolist() == ALL_OK
    again.close()
    # Nothing waits any more; of what was in the first one, nothing is found in the second.
    last = Node(tmp_path / "a", other, proxy.endpoint)
    assert last.hits() == 0
    last.close()
    assert not [name for name in s3.objects(other) if name.endswith(".segment")]


def test_a_namespace_is_named_again_after_a_purge(
    node: MakeNode, s3: S3Server, bucket: str
) -> None:
    a, b = node("a"), node("b")
    document = a.archive.names.document(NAMESPACE.directory)
    a.keep(0, 20)
    a.upload()
    assert document in s3.objects(bucket)
    janitor = BucketJanitor(b.archive)
    janitor.doom(Selection())
    assert document not in s3.objects(bucket)
    a.look()
    a.keep(20)
    a.upload()
    assert document in s3.objects(bucket)
    # Also if it hears of the purge only after it has uploaded something.
    janitor.doom(Selection())
    a.keep(0, 20)
    a.upload()
    assert document not in s3.objects(bucket)
    a.look()
    a.upload()
    assert document in s3.objects(bucket)


def staged(node: MakeNode, proxy: S3Proxy) -> Path:
    """Have blocks wait on a host whose mover has died; their directory."""
    a = node("a")
    proxy.faults(Fault("answer", verb="PUT|PART|MULTIPART_BEGIN", match="segments/"))
    assert a.keep() == ALL_OK
    a.close()
    proxy.faults()
    return a.archive.settings.path / "staging" / NAMESPACE.directory


@pytest.mark.parametrize("damage", ["a byte", "cut"])
def test_what_a_damaged_journal_still_says_is_uploaded(
    node: MakeNode, proxy: S3Proxy, damage: str
) -> None:
    (journal,) = staged(node, proxy).glob("*.journal")
    data = bytearray(journal.read_bytes())
    data[100 if damage == "a byte" else 4096 + 5] ^= 1
    journal.write_bytes(data)
    again = node("a")
    again.upload()
    assert not again.archive.unfinished()
    assert node("b").hits() == (BLOCKS if damage == "a byte" else BLOCKS - 1)


@pytest.mark.parametrize("lost", ["journal", "journal and document"])
def test_what_nothing_names_is_not_waited_for(node: MakeNode, proxy: S3Proxy, lost: str) -> None:
    directory = staged(node, proxy)
    (journal,) = directory.glob("*.journal")
    if lost == "journal":
        journal.unlink()
    else:
        data = bytearray(journal.read_bytes())
        data[100] ^= 1
        journal.write_bytes(data)
        (directory / "namespace.json").write_text("damaged")
    archive = Archive(node("b").archive.settings)
    archive = Archive(replace(archive.settings, path=directory.parent.parent))
    assert archive.unfinished()
    assert archive.uploader.flush(60), archive.uploader.problem
    assert not archive.unfinished()
    assert not list(directory.glob("*.journal"))
    archive.close()


def test_what_a_later_release_has_staged_is_left_to_it(node: MakeNode, proxy: S3Proxy) -> None:
    (journal,) = staged(node, proxy).glob("*.journal")
    data = bytearray(journal.read_bytes())
    data[8] = 99
    journal.write_bytes(data)
    again = node("a")
    again.upload()
    archive = again.archive
    assert archive.unfinished()
    # A mover does not stay for it.
    assert not archive.unfinished(archive.uploader.left_alone)
    assert journal.exists()
