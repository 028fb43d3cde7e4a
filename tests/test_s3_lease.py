"""One node at a time looks after a bucket, as far as a real server can tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from s3_proxy import Fault as ProxyFault
from s3_proxy import s3_proxy
from s3_server import S3Server

from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.lease import LEASE_S, BucketLease

KEY = "cache/janitor.lease"

Make = Callable[..., tuple[BucketLease, S3Client]]


@pytest.fixture
def make(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    bucket = s3.new_bucket()
    clients = []

    def lease(
        endpoint: str = "", clock: Callable[[], float] = lambda: 0.0
    ) -> tuple[BucketLease, S3Client]:
        client = S3Client(bucket, endpoint_url=endpoint or s3.endpoint)
        clients.append(client)
        return BucketLease(client, KEY, clock), client

    yield lease
    for client in clients:
        client.close()


def test_one_has_it_until_it_lets_go(make: Make) -> None:
    (one, _), (other, _) = make(), make()
    assert one.take() == ""
    assert one.take() == ""
    assert "pid" in other.take()
    assert one.keep()
    assert not other.keep()
    other.release()
    assert other.take()
    one.release()
    assert other.take() == ""
    assert not one.keep()
    assert one.take()


def test_renewing_costs_a_request_only_when_it_is_due(make: Make) -> None:
    now = [0.0]
    one, client = make(clock=lambda: now[0])
    assert one.take() == ""
    before = client.traffic.snapshot().requests
    for _ in range(5):
        now[0] += 10
        assert one.keep()
    assert client.traffic.snapshot().requests == before
    now[0] += 1000
    assert one.keep()
    after = client.traffic.snapshot().requests
    assert {verb: after[verb] - before[verb] for verb in after} == {"get": 1, "put": 1}


def test_who_was_away_for_too_long_has_lost_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    (one, _), (other, client) = make(clock=lambda: now[0]), make()
    assert one.take() == ""
    late = client.now() + LEASE_S + 5
    with monkeypatch.context() as patch:
        patch.setattr(client, "now", lambda: late)
        assert other.take() == ""
    now[0] += LEASE_S + 5
    # It has been taken: what one knows is not there any more, so that it cannot renew it.
    assert not one.keep()
    assert one.take()
    assert other.keep()


def test_of_many_that_are_equally_fast_one_gets_it(make: Make) -> None:
    leases = [make()[0] for _ in range(6)]
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda it: said.append(it.take()), args=(it,)) for it in leases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 6
    assert said.count("") == 1


def test_answer_that_was_lost_is_found_out(s3: S3Server, make: Make) -> None:
    with s3_proxy(s3.port) as proxy:
        one, _ = make(proxy.endpoint)
        proxy.faults(ProxyFault("lose", verb="PUT", times=1))
        # It was written, and the second attempt meets what the first has left.
        assert one.take() == ""
        assert one.keep()
