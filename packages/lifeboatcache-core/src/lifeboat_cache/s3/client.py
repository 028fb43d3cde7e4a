"""Requests to one bucket of an object store: every call returns in bounded time, or raises.

boto3 finds the credentials (its standard chain only), signs, and does whatever is small or rare.
Objects and parts of them are read past it (:mod:`lifeboat_cache.s3.connections`), with addresses
that it has signed: one signature serves many reads of an object, and bytes that trickle in do not
keep a read from its deadline.

Checksums: bodies are sent with their MD5, which every server compares. What is read is not
compared here; records carry checksums of their own.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import http.client
import os
import re
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.s3.connections import Answer, Connections
from lifeboat_cache.s3.errors import (
    Fault,
    S3Error,
    missing_boto3,
    of_answer,
    of_exception,
    unreachable,
)
from lifeboat_cache.s3.pace import Pace
from lifeboat_cache.s3.traffic import Traffic, verb_of

__all__ = ["PART_BYTES", "Found", "S3Client"]

#: Objects above this size are sent in parts of this size.
PART_BYTES = 32 << 20

#: Parts of one object that are sent at the same time.
_PARALLEL_PARTS = 4

#: A connection takes so many seconds at most, and so does a wait for the next bytes.
_CONNECT_S = 5.0
_READ_S = 15.0

#: A small object that is not there after so many seconds, however often it was asked for, is
#: given up.
_WHOLE_S = 60.0

#: A request is sent so often at most.
_ATTEMPTS = 3

#: Objects that one request deletes, at most; the limit of S3.
_DELETE_MANY = 1000

#: A signed address is used for so many seconds, and valid for longer.
_SIGNED_S = 300.0
_VALID_S = 900
_MOST_SIGNED = 4096

_CODE = re.compile(rb"<Code>([A-Za-z0-9._-]{1,64})</Code>")


@dataclass(frozen=True, slots=True)
class Found:
    """An object, as a listing has it; ``modified`` in seconds since 1970."""

    key: str
    size: int
    modified: float


class S3Client:
    """One bucket. Thread-safe; nothing is sent when it is made.

    Parameters
    ----------
    bucket
        The bucket's name.
    endpoint_url
        Where the server is; ``None``: where boto3's configuration says, as a rule AWS.
    region
        The bucket's region; ``None``: as boto3's configuration says.
    sse, sse_kms_key_id
        Server-side encryption of what is put: its algorithm, and its key.
    connect_s, read_s
        How long a connection may take, and how long nothing may come.

    Raises
    ------
    TargetError
        If boto3 is not installed or its configuration cannot be used.
    """

    def __init__(
        self,
        bucket: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        sse: str | None = None,
        sse_kms_key_id: str | None = None,
        connect_s: float = _CONNECT_S,
        read_s: float = _READ_S,
    ) -> None:
        self.bucket = bucket
        self.where = f"s3://{bucket}" + (f" at {endpoint_url}" if endpoint_url else "")
        self.traffic = Traffic()
        self.pace = Pace()
        self._sse: dict[str, str] = {}
        self.encrypt(sse, sse_kms_key_id)
        self._skew_s: float | None = None
        self._lock = threading.Lock()
        self._signed: OrderedDict[str, tuple[float, str]] = OrderedDict()
        try:
            self._boto, tls = _make_boto(endpoint_url, region, connect_s, read_s)
        except ImportError as exc:
            raise missing_boto3() from exc
        except Exception as exc:
            raise of_exception(self.where, exc) from exc
        self._connections = Connections(connect_s, read_s, tls, self._proxy)
        self._proxies: dict[str, str] = {}
        events = self._boto.meta.events
        events.register("before-send.s3", self._before_send)
        events.register("response-received.s3", self._received)

    def encrypt(self, sse: str | None, sse_kms_key_id: str | None) -> None:
        """Ask for this encryption of what is put from now on."""
        wanted = {"ServerSideEncryption": sse, "SSEKMSKeyId": sse_kms_key_id}
        self._sse = {name: value for name, value in wanted.items() if value}

    # What boto3 tells -------------------------------------------------------

    def _before_send(self, request: Any, event_name: str, **_: Any) -> None:
        size = request.headers.get("Content-Length", 0)
        self.traffic.request(verb_of(event_name.rpartition(".")[2]), int(size or 0))

    def _received(self, response_dict: Any, **_: Any) -> None:
        if response_dict:
            headers = response_dict.get("headers") or {}
            self._note_date(headers.get("date") or headers.get("Date") or "")

    def _note_date(self, date: str) -> None:
        with contextlib.suppress(TypeError, ValueError):
            self._skew_s = time.time() - email.utils.parsedate_to_datetime(date).timestamp()

    @property
    def skew_s(self) -> float:
        """By how many seconds this host's clock is ahead of the server's, as far as is known."""
        return self._skew_s or 0.0

    def now(self) -> float:
        """The time by the server's clock, once it has answered; until then by this host's."""
        return time.time() - self.skew_s

    # Requests ---------------------------------------------------------------

    def _call(self, operation: str, **arguments: Any) -> Any:
        """Do what boto3 does. Raises :class:`S3Error`."""
        method = getattr(self._boto, operation)
        for attempt in range(_ATTEMPTS):
            self.pace.wait()
            try:
                answer = method(Bucket=self.bucket, **arguments)
            except Exception as exc:
                error = of_exception(self.where, exc, self._skew_s)
                self._note(error)
                if not error.passing or attempt == _ATTEMPTS - 1:
                    raise error from exc
                _pause(attempt)
            else:
                self.pace.good()
                return answer
        raise AssertionError("no attempt was made")

    def _note(self, error: S3Error) -> None:
        if error.fault is Fault.THROTTLED:
            self.pace.slower()
        if error.fault not in (Fault.MISSING, Fault.EXISTS):
            self.traffic.error(error.fault.value)

    def check_bucket(self) -> None:
        """Find out whether the bucket is there.

        Raises
        ------
        S3Error
            If it is not, or may not be used.
        """
        try:
            self._call("head_bucket")
        except S3Error as exc:
            if exc.fault is Fault.MISSING:  # an answer without a body does not say more
                raise of_answer(self.where, 404, "NoSuchBucket") from exc
            raise

    def put(
        self, key: str, data: bytes, *, absent: bool = False, replacing: str | None = None
    ) -> bool:
        """Put a small object.

        Parameters
        ----------
        key, data
            The object.
        absent
            Only if there is none of that name. A server that does not know such conditions
            replaces it.
        replacing
            Only if what is there has this tag; see :meth:`get_tagged`.

        Returns
        -------
        bool
            Whether it was put; False if the condition did not hold.
        """
        condition = {"IfNoneMatch": "*"} if absent else {}
        if replacing is not None:
            condition = {"IfMatch": replacing}
        try:
            self._call(
                "put_object", Key=key, Body=data, ContentMD5=_md5(data), **condition, **self._sse
            )
        except S3Error as exc:
            if condition and exc.fault is Fault.EXISTS:
                return False
            if replacing is not None and exc.fault is Fault.MISSING:
                return False
            if condition and exc.code == "NotImplemented":
                return self.put(key, data)
            raise
        return True

    def put_file(self, key: str, fd: int, size: int) -> None:
        """Put the first ``size`` bytes of a file, in parts if they are many.

        Raises
        ------
        S3Error
            If that failed; nothing of it can be seen then.
        OSError
            If the file cannot be read.
        """
        parts = _parts(size)
        if len(parts) == 1:
            self.put(key, _read(fd, 0, size))
            return
        upload = self._call("create_multipart_upload", Key=key, **self._sse)["UploadId"]
        try:
            sent = self._put_parts(key, upload, fd, parts)
            self._call(
                "complete_multipart_upload",
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": sent},
            )
        except BaseException:
            # What was sent costs money as long as it is there.
            with contextlib.suppress(S3Error):
                self._call("abort_multipart_upload", Key=key, UploadId=upload)
            raise

    def _put_parts(
        self, key: str, upload: str, fd: int, parts: Sequence[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        failed = threading.Event()

        def put(number: int) -> dict[str, Any]:
            if failed.is_set():
                raise unreachable(self.where, "another part failed")
            first, last = parts[number]
            try:
                data = _read(fd, first, last - first)
                answer = self._call(
                    "upload_part",
                    Key=key,
                    UploadId=upload,
                    PartNumber=number + 1,
                    Body=data,
                    ContentMD5=_md5(data),
                )
            except BaseException:
                failed.set()
                raise
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="s3 part") as pool:
            return list(pool.map(put, range(len(parts))))

    def forget_uploads(self, prefix: str, older_s: float, ours: Callable[[str], bool]) -> int:
        """Give up uploads in parts that somebody began so long ago and never ended.

        Parameters
        ----------
        prefix
            What their keys begin with.
        older_s
            How long ago.
        ours
            Whether a key is one of ours: others may use the bucket, too.

        Returns
        -------
        int
            How many.
        """
        oldest = self.now() - older_s
        count = 0
        marks: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=prefix, **marks)
            for upload in page.get("Uploads", ()):
                if upload["Initiated"].timestamp() < oldest and ours(upload["Key"]):
                    self._call(
                        "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    count += 1
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return count
            marks = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    def get(self, key: str) -> bytes:
        """A whole object, a small one.

        Raises
        ------
        S3Error
            If it is not there (``Fault.MISSING``), or was not read.
        """
        return self.get_tagged(key)[0]

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        """A whole object, and a tag that another object of that name does not have.

        Raises
        ------
        S3Error
            As :meth:`get`.
        """
        answer = self._again(partial(self._get_once, key), time.monotonic() + _WHOLE_S)
        self.traffic.received(len(answer.body))
        return answer.body, answer.tag

    def read(
        self,
        key: str,
        offset: int,
        into: memoryview | Sequence[memoryview],
        deadline: float | None = None,
    ) -> None:
        """Read a part of an object into memory, all of ``into``.

        Parameters
        ----------
        key, offset
            The object, and where the part begins.
        into
            Writable bytes, in one or several pieces. They may hold anything if this raises.
        deadline
            When to give up, by ``time.monotonic``.

        Raises
        ------
        S3Error
            If not all bytes have come.
        """
        pieces = [into] if isinstance(into, memoryview) else into
        self._again(partial(self._read_once, key, offset, pieces), deadline)
        self.traffic.received(sum(piece.nbytes for piece in pieces))

    def _again(self, ask: Callable[[float | None, bool], Answer], deadline: float | None) -> Answer:
        """Ask, and ask again where that may help. Raises :class:`S3Error`."""
        fresh = False
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                if not self.pace.wait(deadline):
                    raise of_answer(self.where, 503, "SlowDown")
                answer = ask(deadline, fresh)
            except S3Error as exc:
                self._note(exc)
                # The credentials that an address was signed with may have changed.
                again = exc.passing or (exc.fault is Fault.DENIED and not fresh)
                late = deadline is not None and time.monotonic() >= deadline
                if last or late or not again:
                    raise
                fresh = exc.fault is Fault.DENIED
                if not fresh:
                    _pause(attempt)
            else:
                self.pace.good()
                return answer
        raise AssertionError("no attempt was made")

    def _get_once(self, key: str, deadline: float | None, fresh: bool) -> Answer:
        return self._ask(
            key,
            fresh,
            lambda url: self._connections.get(url, deadline),
            lambda: self._boto_get(key),
        )

    def _read_once(
        self,
        key: str,
        offset: int,
        into: Sequence[memoryview],
        deadline: float | None,
        fresh: bool,
    ) -> Answer:
        def through_boto() -> Answer:
            size = sum(piece.nbytes for piece in into)
            answer = self._boto_get(key, Range=f"bytes={offset}-{offset + size - 1}")
            if len(answer.body) != size:
                raise unreachable(self.where, "a body of another length than asked for")
            at = 0
            for piece in into:
                piece[:] = answer.body[at : at + piece.nbytes]
                at += piece.nbytes
            return answer

        return self._ask(
            key,
            fresh,
            lambda url: self._connections.read(url, offset, into, deadline),
            through_boto,
        )

    def _ask(
        self,
        key: str,
        fresh: bool,
        ask: Callable[[str], Answer],
        through_boto: Callable[[], Answer],
    ) -> Answer:
        """Get an object or a part of it. Raises :class:`S3Error`."""
        url = self._address(key, fresh)
        if self._proxy(url).startswith("https:"):  # within TLS no other one can be begun here
            return through_boto()
        self.traffic.request("get")
        try:
            answer = ask(url)
        except (OSError, http.client.HTTPException) as exc:
            said = str(exc) if isinstance(exc, OSError) and str(exc) else type(exc).__name__
            raise unreachable(self.where, said) from exc
        self._note_date(answer.date)
        if answer.status not in (200, 206):
            code = _CODE.search(answer.body)
            said = "" if code is None else code[1].decode()
            if answer.status == 416:  # it is shorter than it was: cut off, or another one
                raise S3Error(Fault.MISSING, f"{self.where}: {key} is shorter than that", said)
            raise of_answer(self.where, answer.status, said, self._skew_s)
        return answer

    def _boto_get(self, key: str, **arguments: str) -> Answer:
        try:
            found = self._boto.get_object(Bucket=self.bucket, Key=key, **arguments)
            body = bytes(found["Body"].read())
        except Exception as exc:
            raise of_exception(self.where, exc, self._skew_s) from exc
        return Answer(200, body, "", str(found.get("ETag", "")))

    def _proxy(self, url: str) -> str:
        """The address of the proxy before an address; empty without one."""
        parts = urlsplit(url)
        found = self._proxies.get(parts.netloc)
        if found is None:
            from botocore.utils import get_environ_proxies

            found = str(get_environ_proxies(url).get(parts.scheme) or "")
            if found and "://" not in found:
                found = f"http://{found}"
            self._proxies[parts.netloc] = found
        return found

    def _address(self, key: str, fresh: bool) -> str:
        """A signed address of an object. Never to be shown to anybody."""
        now = time.monotonic()
        with self._lock:
            found = self._signed.get(key)
        if found is not None and not fresh and now - found[0] < _SIGNED_S:
            return found[1]
        try:
            url: str = self._boto.generate_presigned_url(
                "get_object", Params={"Bucket": self.bucket, "Key": key}, ExpiresIn=_VALID_S
            )
        except Exception as exc:
            raise of_exception(self.where, exc, self._skew_s) from exc
        with self._lock:
            self._signed[key] = (now, url)
            while len(self._signed) > _MOST_SIGNED:
                self._signed.popitem(last=False)
        return url

    def objects(self, prefix: str, after: str = "") -> Iterator[Found]:
        """Objects whose keys begin with ``prefix`` and come after ``after``, in their order.

        A request brings up to 1,000 of them. Raises :class:`S3Error`, also half-way.
        """
        mark: dict[str, str] = {"StartAfter": after} if after else {}
        while True:
            page = self._call("list_objects_v2", Prefix=prefix, **mark)
            for item in page.get("Contents", ()):
                yield Found(item["Key"], int(item["Size"]), item["LastModified"].timestamp())
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return
            mark = {"ContinuationToken": token}

    def folders(self, prefix: str) -> list[str]:
        """What comes between ``prefix`` and the next slash, in all keys."""
        names: list[str] = []
        mark: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=prefix, Delimiter="/", **mark)
            names += [item["Prefix"][len(prefix) : -1] for item in page.get("CommonPrefixes", ())]
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return names
            mark = {"ContinuationToken": token}

    def size_of(self, key: str) -> int:
        """Bytes of an object. Raises :class:`S3Error`."""
        return int(self._call("head_object", Key=key)["ContentLength"])

    def delete(self, keys: Iterable[str]) -> list[str]:
        """Delete objects, 1,000 with one request. What is not there counts as deleted.

        Returns
        -------
        list of str
            Those that the server has not deleted.

        Raises
        ------
        S3Error
            If a request failed.
        """
        todo = list(keys)
        left: list[str] = []
        for first in range(0, len(todo), _DELETE_MANY):
            some = todo[first : first + _DELETE_MANY]
            if len(some) == 1:
                self._call("delete_object", Key=some[0])
                continue
            wanted = {"Objects": [{"Key": key} for key in some], "Quiet": True}
            answer = self._call("delete_objects", Delete=wanted)
            left += [
                item["Key"]
                for item in answer.get("Errors", ())
                if item.get("Code") not in ("NoSuchKey", "404")
            ]
        return left

    def close(self) -> None:
        """Let go of all connections."""
        self._connections.close()
        self._boto.close()


def _make_boto(
    endpoint_url: str | None, region: str | None, connect_s: float, read_s: float
) -> tuple[Any, ssl.SSLContext | None]:
    import boto3.session
    from botocore.config import Config
    from botocore.httpsession import get_cert_path

    style: Literal["path", "auto"] = "path" if endpoint_url else "auto"
    session = boto3.session.Session()
    config = Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        max_pool_connections=32,
        # Counted and paced here.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Other servers do not know the checksums that boto3 adds by itself.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        # The MD5 that is sent is signed.
        s3={"addressing_style": style, "payload_signing_enabled": False},
    )
    client = session.client(
        "s3",
        endpoint_url=endpoint_url,
        # A server of one's own does not care, but a signature needs one.
        region_name=region or session.region_name or "us-east-1",
        config=config,
    )
    if urlsplit(client.meta.endpoint_url).scheme != "https":
        return client, None
    bundle = session._session.get_config_variable("ca_bundle") or get_cert_path(True)
    return client, ssl.create_default_context(cafile=bundle)


def _parts(size: int) -> list[tuple[int, int]]:
    """Where the parts of an object begin and end.

    All but the first begin where blocks may begin, behind a segment's header: servers read ranges
    faster that do not cross what was sent together.
    """
    firsts = [0, *range(HEADER_BYTES + PART_BYTES, size, PART_BYTES)]
    return list(zip(firsts, [*firsts[1:], size], strict=True))


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _read(fd: int, offset: int, size: int) -> bytes:
    """Bytes of a file. Raises ``OSError`` if it is shorter."""
    pieces: list[bytes] = []
    while size > 0:
        piece = os.pread(fd, size, offset)
        if not piece:
            raise InterruptedError("the file is shorter than it was")
        pieces.append(piece)
        offset += len(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _pause(attempt: int, seconds: Sequence[float] = (0.1, 0.4)) -> None:
    time.sleep(seconds[min(attempt, len(seconds) - 1)])
