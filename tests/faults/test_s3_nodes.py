"""Nodes that share nothing but a bucket, while the way to it and the server fail."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from agents import gone, until
from s3_nodes import S3Node, facts, s3_node
from s3_proxy import Fault, S3Proxy, s3_proxy
from s3_server import READER_KEY, S3Server

from lifeboat_cache.interface import Lookup, Outcome
from lifeboat_cache.testing import StoreDriver

# Each waits for half a minute or more until movers have uploaded what they have;
# tests/test_s3_store.py has what is quick.
pytestmark = pytest.mark.full

OK = Outcome.OK
SIZE = 65_536

#: Seconds of faults in the soak.
_SOAK_S = float(os.environ.get("LIFEBOAT_SOAK_S", "240"))

#: What is not there now, and may be in a while.
LATER = {Outcome.UNAVAILABLE, Outcome.TIMEOUT}

MakeNode = Callable[..., S3Node]


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def make(
    s3: S3Server,
    proxy: S3Proxy,
    tmp_path: Path,
    kernel_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeNode]:
    """Makes nodes; all of them use the same bucket, through the proxy."""
    with ExitStack() as stack:
        bucket = s3.new_bucket()

        def node(name: str, **options: str) -> S3Node:
            options.setdefault("bucket", bucket)
            return stack.enter_context(
                s3_node(
                    tmp_path / name, monkeypatch, kernel_home, s3,
                    options.pop("bucket"), endpoint=proxy.endpoint, **options,
                )
            )  # fmt: skip

        yield node
        proxy.go_on()


def taken(driver: StoreDriver, number: int) -> bool:
    """Whether a block can be stored now."""
    return driver.store([number]) in ([OK], [Outcome.PRESENT])


def found(driver: StoreDriver, numbers: Sequence[int]) -> bool:
    """Whether all blocks are known to be there."""
    return Lookup.MISS not in driver.lookup(numbers)


def restored(driver: StoreDriver, numbers: Sequence[int]) -> bool:
    """Whether all blocks can be loaded now; every byte is compared."""
    return driver.load(numbers) == [OK] * len(numbers)


def test_what_one_node_stores_another_restores(make: MakeNode) -> None:
    one = make("a")
    tier = one.archive()
    driver = one.open(tier, size=SIZE)
    assert driver.store(range(48)) == [OK] * 48
    assert restored(driver, range(48))
    one.upload()
    # Nothing of the first node is left.
    one.kill(tier)
    shutil.rmtree(one.home)
    other = make("b")
    driver = other.open(other.archive(), size=SIZE)
    until(lambda: driver.lookup(range(48)) == [Lookup.HIT] * 48, "the blocks")
    assert restored(driver, range(48))
    # They share: what the second one stores is found by a third.
    assert driver.store(range(48, 60)) == [OK] * 12
    other.upload()
    third = make("c")
    driver = third.open(third.archive(), size=SIZE)
    until(lambda: Lookup.MISS not in driver.lookup(range(60)), "the blocks of both")
    assert restored(driver, range(60))


def test_mover_that_is_killed_before_the_upload_loses_nothing(
    make: MakeNode, proxy: S3Proxy
) -> None:
    node = make("a")
    tier = node.archive()
    driver = node.open(tier, size=SIZE)
    proxy.faults(Fault("reset", verb="PUT|PART|MULTIPART.*"))
    stored = range(32)
    assert driver.store(stored) == [OK] * 32
    assert node.waits()
    node.kill(tier)
    proxy.faults()
    node.start(tier)
    until(lambda: Lookup.MISS not in driver.lookup(stored), "what was stored")
    assert restored(driver, stored)
    node.upload()
    other = make("b")
    driver = other.open(other.archive(), size=SIZE)
    until(lambda: Lookup.MISS not in driver.lookup(stored), "the blocks")
    assert restored(driver, stored)


def test_server_is_killed_in_the_middle_and_comes_back(make: MakeNode, s3: S3Server) -> None:
    node = make("a")
    driver = node.open(node.archive(timeout_s=3.0), size=SIZE)
    stored = [n for n in range(16) if driver.store([n]) == [OK]]
    assert len(stored) == 16
    s3.kill()
    # Stores go on, into the local directory; nothing fails or hangs.
    stored += [n for n in range(16, 32) if driver.store([n]) == [OK]]
    assert set(driver.load(range(32))) <= {OK, Outcome.MISSING, *LATER}
    s3.start()
    node.upload()
    until(lambda: restored(driver, range(len(stored))), "all that was stored")
    other = make("b")
    driver = other.open(other.archive(), size=SIZE)
    until(lambda: Lookup.MISS not in driver.lookup(stored), "the blocks")
    assert driver.load(stored) == [OK] * len(stored)


def test_slow_and_throttling_server_is_waited_for(make: MakeNode, proxy: S3Proxy) -> None:
    node = make("a")
    driver = node.open(node.archive(timeout_s=60.0), size=SIZE)
    proxy.faults(
        Fault("answer", verb="GET|PUT|LIST", times=4),
        Fault("delay", seconds=0.3),
    )
    assert driver.store(range(16)) == [OK] * 16
    node.upload()
    proxy.forget()
    assert restored(driver, range(16))
    assert proxy.counts()["GET"]
    assert facts(driver)["breaker_opened"] == 0


def test_body_that_stalls_is_given_up_and_read_again(make: MakeNode, proxy: S3Proxy) -> None:
    node = make("a")
    driver = node.open(node.archive(timeout_s=2.0), size=SIZE)
    assert driver.store(range(16)) == [OK] * 16
    node.upload()
    proxy.faults(Fault("stall", verb="GET", match="segments/"))
    begun = time.monotonic()
    outcomes = set(driver.load(range(16)))
    assert time.monotonic() - begun < 60
    assert outcomes <= LATER
    proxy.go_on()
    until(lambda: restored(driver, range(16)), "the blocks")


@pytest.mark.parametrize("do", ["truncate", "corrupt"])
def test_spoiled_bodies_are_never_served(make: MakeNode, proxy: S3Proxy, do: str) -> None:
    node = make("a")
    driver = node.open(node.archive(timeout_s=5.0), size=SIZE)
    assert driver.store(range(16)) == [OK] * 16
    node.upload()
    # The driver compares what it is given; what is not given is not there.
    proxy.faults(Fault(do, verb="GET", match="segments/", at=100))
    outcomes = set(driver.load(range(16)))
    assert outcomes <= {OK, Outcome.CORRUPT, Outcome.MISSING, *LATER}
    proxy.faults()
    answer = driver.load(range(16))
    until(lambda: not LATER & set(driver.load(range(16))), "an answer")
    answer = driver.load(range(16))
    assert answer.count(OK) >= 15  # one block may have been taken for corrupt


def test_listing_that_lags_shows_blocks_later(make: MakeNode, proxy: S3Proxy) -> None:
    proxy.listing_lag = 6.0
    node, other = make("a"), make("b")
    driver = node.open(node.archive(), size=SIZE)
    reader = other.open(other.archive(), size=SIZE)
    assert driver.store(range(8)) == [OK] * 8
    node.upload()
    assert reader.lookup(range(8)) == [Lookup.MISS] * 8
    until(lambda: reader.lookup(range(8)) == [Lookup.HIT] * 8, "the blocks")
    assert restored(reader, range(8))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("credentials", "the server denies it"),
        ("permission", "the server denies it"),
        ("bucket", "does not exist"),
        ("clock", "clock"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_said_and_harms_nobody(
    make: MakeNode, proxy: S3Proxy, what: str, said: str
) -> None:
    options = {
        "credentials": {"key": "nobody"},
        "permission": {"key": READER_KEY},
        "bucket": {"bucket": "no-such-bucket"},
    }.get(what, {})
    if what == "clock":
        proxy.faults(Fault("answer", status=403, code="RequestTimeTooSkewed", seconds=3600.0))
    node = make("a", **options)
    driver = node.open(node.archive(), size=SIZE, wait=False)
    until(lambda: said in driver.driven.reason, f"{said} among the reasons")
    assert set(driver.store([0])) <= {*LATER, Outcome.FAILED, OK}
    assert driver.lookup([0])[0] in (Lookup.MISS, Lookup.RETRY, Lookup.HIT)
    if what == "clock":
        proxy.faults()
        until(lambda: driver.store([1]) in ([OK], [Outcome.PRESENT]), "the bucket in use")


def test_soak_with_faults(make: MakeNode, proxy: S3Proxy, s3: S3Server) -> None:
    choice = random.Random(9)
    writer, reader = make("a"), make("b")
    tier = writer.archive(timeout_s=5.0)
    other = reader.archive(timeout_s=5.0)
    store = writer.open(tier, size=16_384)
    look = reader.open(other, size=16_384)
    good: list[int] = []
    dropped: set[int] = set()
    first = moved = 0
    faults: list[list[Fault]] = [
        [],
        [],
        [Fault("answer", times=8)],
        [Fault("reset", verb="GET|PUT", times=6)],
        [Fault("lose", verb="PUT", times=3)],
        [Fault("truncate", verb="GET", match="segments/", times=4)],
        [Fault("corrupt", verb="GET", match="segments/", times=4, at=50_000)],
        [Fault("corrupt", verb="GET", match="feed/", times=2, at=4200)],
        [Fault("stall", verb="GET", match="segments/", times=2)],
        [Fault("delay", seconds=0.5, times=20)],
        [Fault("answer", status=500, code="InternalError", times=6)],
        [Fault("answer", status=403, code="RequestTimeTooSkewed", times=4)],
    ]
    end = time.monotonic() + _SOAK_S
    while time.monotonic() < end:
        proxy.faults(*choice.choice(faults))
        proxy.listing_lag = choice.choice([0.0, 0.0, 3.0])
        if choice.random() < 0.05:
            s3.restart()
        killing = choice.random() < 0.06
        for _ in range(4):
            numbers = range(first, first + 128)
            first += 128
            outcomes = store.store(numbers)
            good += [n for n, o in zip(numbers, outcomes, strict=True) if o is OK]
            for driver in (store, look):
                sample = choice.sample(good, min(len(good), 96))
                answer = driver.load(sample)  # compares every byte
                moved += answer.count(OK)
                dropped.update(
                    n for n, o in zip(sample, answer, strict=True) if o is Outcome.CORRUPT
                )
        if killing:
            node, of = choice.choice([(writer, tier), (reader, other)])
            pid = node.pid(of)
            os.kill(pid, signal.SIGKILL)
            until(partial(gone, pid), "the end of the mover")
            proxy.go_on()
            node.start(of)
        proxy.go_on()
        until(partial(taken, store, first), "the bucket in use")
        good.append(first)
        first += 1
    proxy.listing_lag = 0.0
    assert moved > 1000
    writer.upload()
    kept = [n for n in good if n not in dropped]
    assert len(kept) > len(good) * 0.9
    # Nothing that was reported as stored is lost, on either node.
    for driver in (store, look):
        until(partial(found, driver, kept), "all that was stored")
        for at in range(0, len(kept), 512):
            until(partial(restored, driver, kept[at : at + 512]), "all bytes")
