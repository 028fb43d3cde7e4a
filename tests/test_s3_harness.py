"""The tests' S3 server and the proxy in front of it do what tests rely on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import botocore.exceptions
import pytest
from s3_proxy import Fault, S3Proxy, s3_proxy
from s3_server import READER_KEY, S3Server

BODY = bytes(range(256)) * 8192


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def client(s3: S3Server, proxy: S3Proxy) -> Any:
    return s3.client(endpoint=proxy.endpoint, read_timeout=5)


@pytest.fixture
def bucket(s3: S3Server) -> str:
    return s3.new_bucket()


def read(client: Any, bucket: str, **options: Any) -> bytes:
    found: bytes = client.get_object(Bucket=bucket, Key="a/b", **options)["Body"].read()
    return found


@pytest.mark.full
def test_server_keeps_what_was_written_when_it_is_killed(s3: S3Server, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a/b", Body=BODY)
    s3.restart()
    assert read(s3.client(), bucket) == BODY
    assert s3.objects(bucket) == {"a/b": len(BODY)}


@pytest.mark.full
def test_server_knows_who_may_do_what(s3: S3Server, bucket: str) -> None:
    with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
        s3.client(READER_KEY).put_object(Bucket=bucket, Key="a/b", Body=b"")
    with pytest.raises(botocore.exceptions.ClientError, match="InvalidAccessKeyId"):
        s3.client("nobody").list_objects_v2(Bucket=bucket)
    with pytest.raises(botocore.exceptions.ClientError, match="NoSuchBucket"):
        s3.client().put_object(Bucket="no-such-bucket", Key="a/b", Body=b"")


@pytest.mark.full
def test_server_honours_conditions(s3: S3Server, bucket: str) -> None:
    client = s3.client()
    first = client.put_object(Bucket=bucket, Key="lease", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="lease", Body=b"2", IfNoneMatch="*")
    client.put_object(Bucket=bucket, Key="lease", Body=b"3", IfMatch=first)
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="lease", Body=b"4", IfMatch=first)


def test_server_encrypts_when_it_is_asked_to(s3: S3Server, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a/b", Body=BODY, ServerSideEncryption="AES256")
    assert client.head_object(Bucket=bucket, Key="a/b")["ServerSideEncryption"] == "AES256"
    assert read(client, bucket, Range="bytes=100-199") == BODY[100:200]


def test_proxy_passes_on_and_counts(s3: S3Server, proxy: S3Proxy, client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="a/b", Body=BODY)
    assert read(client, bucket) == BODY
    assert read(client, bucket, Range="bytes=5-14") == BODY[5:15]
    part = client.create_multipart_upload(Bucket=bucket, Key="big")
    upload = {"Bucket": bucket, "Key": "big", "UploadId": part["UploadId"]}
    etag = client.upload_part(**upload, PartNumber=1, Body=BODY * 3)["ETag"]
    client.complete_multipart_upload(
        **upload, MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]}
    )
    client.head_object(Bucket=bucket, Key="big")
    listed = client.list_objects_v2(Bucket=bucket)
    assert {found["Key"]: found["Size"] for found in listed["Contents"]} == s3.objects(bucket)
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "a/b"}, {"Key": "big"}]})
    assert not s3.objects(bucket)
    assert proxy.counts() == {
        "PUT": 1, "GET": 2, "MULTIPART_BEGIN": 1, "PART": 1, "MULTIPART_END": 1, "HEAD": 1,
        "LIST": 1, "DELETE_MANY": 1,
    }  # fmt: skip
    assert sum(one.received for one in proxy.asked if one.verb == "GET") == len(BODY) + 10
    assert sum(one.sent for one in proxy.asked if one.verb == "PART") >= 3 * len(BODY)


def test_proxy_answers_instead_of_the_server(proxy: S3Proxy, client: Any, bucket: str) -> None:
    proxy.faults(Fault("answer", verb="PUT", times=1), Fault("answer", status=403,
                 code="RequestTimeTooSkewed", verb="LIST"))  # fmt: skip
    with pytest.raises(botocore.exceptions.ClientError, match="SlowDown"):
        client.put_object(Bucket=bucket, Key="a/b", Body=BODY)
    client.put_object(Bucket=bucket, Key="a/b", Body=BODY)
    with pytest.raises(botocore.exceptions.ClientError, match="RequestTimeTooSkewed"):
        client.list_objects_v2(Bucket=bucket)


@pytest.mark.full
def test_proxy_cuts_connections(s3: S3Server, proxy: S3Proxy, client: Any, bucket: str) -> None:
    proxy.faults(Fault("reset", verb="PUT", match="/one$"), Fault("lose", verb="PUT"))
    for key in ("one", "a/b"):
        with pytest.raises(botocore.exceptions.BotoCoreError):
            client.put_object(Bucket=bucket, Key=key, Body=BODY)
    assert s3.objects(bucket) == {"a/b": len(BODY)}


def test_proxy_spoils_bodies(proxy: S3Proxy, client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="a/b", Body=BODY)
    plain = {"Range": f"bytes=0-{len(BODY) - 1}"}
    proxy.faults(Fault("corrupt", verb="GET", at=-3, times=1), Fault("truncate", verb="GET"))
    spoiled = read(client, bucket, **plain)
    assert [n for n, pair in enumerate(zip(spoiled, BODY, strict=True)) if pair[0] != pair[1]] == [
        len(BODY) - 3
    ]
    with pytest.raises((botocore.exceptions.BotoCoreError, OSError)):
        read(client, bucket, **plain)


@pytest.mark.full
def test_proxy_stalls_until_it_is_told_to_go_on(proxy: S3Proxy, client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="a/b", Body=BODY)
    proxy.faults(Fault("stall", verb="GET", times=1))
    result: list[bytes] = []
    thread = threading.Thread(target=lambda: result.append(read(client, bucket)))
    thread.start()
    while "GET" not in proxy.counts():
        thread.join(0.01)
    thread.join(0.3)
    assert thread.is_alive()
    proxy.go_on()
    thread.join(30)
    assert result == [BODY]


def test_proxy_hides_new_objects_from_listings(proxy: S3Proxy, client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="old", Body=b"1")
    proxy.listing_lag = 3600.0
    client.put_object(Bucket=bucket, Key="a/b", Body=b"1")
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    proxy.listing_lag = 0.0
    assert len(client.list_objects_v2(Bucket=bucket)["Contents"]) == 2
