"""What the client does with a real S3 server: parts of objects, conditions, counts, errors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing

import pytest
from s3_proxy import Fault as ProxyFault
from s3_proxy import s3_proxy
from s3_server import S3Server

from lifeboat_cache.s3.client import PART_BYTES, S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.names import Names


@pytest.fixture
def chain(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's standard chain of credentials finds those of the server."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def client(s3: S3Server, chain: None) -> Iterator[S3Client]:
    with closing(S3Client(s3.new_bucket(), endpoint_url=s3.endpoint)) as client:
        yield client


def read(client: S3Client, key: str, offset: int, size: int) -> bytes:
    memory = bytearray(size)
    client.read(key, offset, memoryview(memory))
    return bytes(memory)


def test_a_large_file_is_sent_in_parts_and_read_by_ranges(s3: S3Server, client: S3Client) -> None:
    content = os.urandom(1 << 20) * (PART_BYTES // (1 << 20)) + os.urandom(12345)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        client.put_file("large", file.fileno(), len(content))
    assert s3.objects(client.bucket) == {"large": len(content)}
    for offset, size in ((0, 1), (4096, 8 << 20), (PART_BYTES - 5, 10), (len(content) - 7, 7)):
        assert read(client, "large", offset, size) == content[offset : offset + size]
    counted = client.traffic.snapshot()
    # What begins and ends an upload counts, too.
    assert counted.requests == {"put": 4, "get": 4}
    assert counted.bytes_in == 1 + (8 << 20) + 10 + 7
    assert counted.bytes_out >= len(content)
    assert not counted.errors


@pytest.mark.parametrize("offset", [95, 100, 1000])
def test_a_range_beyond_the_end_is_missing(client: S3Client, offset: int) -> None:
    client.put("small", bytes(100))
    with pytest.raises(S3Error) as caught:
        read(client, "small", offset, 10)
    assert caught.value.fault is Fault.MISSING


def test_an_object_that_is_not_there_is_missing_and_no_error(client: S3Client) -> None:
    with pytest.raises(S3Error) as caught:
        read(client, "none", 0, 10)
    assert caught.value.fault is Fault.MISSING
    with pytest.raises(S3Error) as caught:
        client.get("none")
    assert caught.value.fault is Fault.MISSING
    assert not client.traffic.snapshot().errors


def test_a_proxy_is_used_where_the_environment_names_one(
    s3: S3Server, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put("a/b", b"0123456789")
    tagged = client.get_tagged("a/b")
    with s3_proxy(s3.port) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with closing(S3Client(client.bucket, endpoint_url=s3.endpoint)) as proxied:
            assert not proxied.put("a/b", b"other", absent=True)
            assert read(proxied, "a/b", 2, 3) == b"234"
            assert proxied.get_tagged("a/b") == tagged
            assert dict(proxy.counts()) == {"PUT": 1, "GET": 2}
            with pytest.raises(S3Error) as caught:
                proxied.get("none")
            assert caught.value.fault is Fault.MISSING
            proxy.faults(ProxyFault(do="truncate", verb="GET", times=1))
            assert proxied.get("a/b") == b"0123456789"


def test_conditions_decide_who_comes_first(client: S3Client) -> None:
    assert client.put("lease", b"1", absent=True)
    assert not client.put("lease", b"2", absent=True)
    content, tag = client.get_tagged("lease")
    assert content == b"1"
    assert client.put("lease", b"3", replacing=tag)
    assert not client.put("lease", b"4", replacing=tag)
    assert client.get("lease") == b"3"
    client.delete(["lease"])
    assert not client.put("lease", b"5", replacing=tag)


def test_a_listing_begins_where_it_is_told_to(client: S3Client) -> None:
    for name in ("a/1", "a/2", "a/3", "b/c/1", "d"):
        client.put(name, name.encode())
    assert [found.key for found in client.objects("a/", after="a/1")] == ["a/2", "a/3"]
    assert client.folders("") == ["a", "b"]
    assert client.folders("b/") == ["c"]
    assert client.delete(["a/1", "a/2", "a/3", "not there"]) == []
    assert [found.key for found in client.objects("")] == ["b/c/1", "d"]
    assert client.traffic.snapshot().requests["delete"] == 1


def test_uploads_that_nobody_ended_are_given_up(s3: S3Server, client: S3Client) -> None:
    plain = s3.client()
    names = Names.of("ns")
    ours = names.segment("0" * 32, bytes(16), 1)
    for key in (ours, "ns/backup.tar", "other/two"):
        plain.create_multipart_upload(Bucket=client.bucket, Key=key)
    assert client.forget_uploads("ns/", 3600.0, names.is_segment) == 0
    assert client.forget_uploads("ns/", -3600.0, names.is_segment) == 1
    # What others do in the bucket is not ours to end.
    left = plain.list_multipart_uploads(Bucket=client.bucket).get("Uploads", [])
    assert {upload["Key"] for upload in left} == {"ns/backup.tar", "other/two"}


def test_what_is_damaged_on_the_way_is_not_kept(
    s3: S3Server, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lifeboat_cache.s3.client._md5", lambda _data: "A" * 22 + "==")
    with pytest.raises(S3Error) as caught:
        client.put("key", b"content")
    assert caught.value.code == "BadDigest"
    assert s3.objects(client.bucket) == {}


def test_errors_say_what_to_do(
    s3: S3Server, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(S3Client("no-such-bucket", endpoint_url=s3.endpoint)) as other:
        with pytest.raises(S3Error, match="create it") as caught:
            other.check_bucket()
        assert caught.value.fault is Fault.BUCKET
    with closing(S3Client("bucket", endpoint_url="http://127.0.0.1:1")) as nowhere:
        with pytest.raises(S3Error, match="check the network") as caught:
            nowhere.check_bucket()
        assert caught.value.fault is Fault.UNREACHABLE
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with closing(S3Client(client.bucket, endpoint_url=s3.endpoint)) as wrong:
        with pytest.raises(S3Error, match="check the credentials") as caught:
            wrong.check_bucket()
        assert caught.value.fault is Fault.DENIED
        with pytest.raises(S3Error, match="check the credentials") as caught:
            read(wrong, "a", 0, 1)
        assert caught.value.fault is Fault.DENIED
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with closing(S3Client(client.bucket, endpoint_url=s3.endpoint)) as nobody:
        with pytest.raises(S3Error, match="Unable to locate credentials") as caught:
            nobody.check_bucket()
        assert caught.value.fault is Fault.DENIED
