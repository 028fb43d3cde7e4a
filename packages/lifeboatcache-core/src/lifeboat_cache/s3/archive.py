"""A bucket as one process uses it: shared by all stores that keep blocks there.

Who asks for the same bucket with the same settings gets the same :class:`Archive`.

For eviction (whoever deletes from the bucket)
----------------------------------------------
- :meth:`Archive.namespaces` and ``Catalog.segments`` say what there is: a listing of feeds alone
  has names, ages and sizes of all segments.
- :meth:`Archive.remove` deletes whole segments: first it puts an object ``.gone`` in the feed,
  which others read within a minute, then it deletes what the feed says of the segments, then the
  segments. Each step may be cut off, repeated, and done by two hosts at once: what is not there
  counts as deleted. A reader that is later finds no object, and forgets the segment.
- What is hot is moved by storing it again with a writer of one's own before its segment is removed.
- Who does it: an object that is put with a condition (:meth:`S3Client.put` with ``absent`` and
  ``replacing``) works as a lease; it only saves work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from lifeboat_cache.errors import ForeignDataError, NewerFormatError, TargetError
from lifeboat_cache.format.header import FORMAT_VERSION
from lifeboat_cache.s3.catalog import Catalog
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.fetcher import Fetcher
from lifeboat_cache.s3.health import Health
from lifeboat_cache.s3.names import STAGING, FeedName, Names, parse_feed
from lifeboat_cache.s3.settings import S3Settings
from lifeboat_cache.s3.slice_cache import SliceCache, forget_unused
from lifeboat_cache.s3.slices import blocks_of, pack_gone
from lifeboat_cache.s3.staging import StagedWriter, StagingTarget
from lifeboat_cache.s3.uploader import Uploader
from lifeboat_cache.targets.layout import new_writer_id, write_atomically

__all__ = ["Archive", "archive_of"]

#: What another host says of the bucket is of use for so many seconds.
_HEARD_S = 2400.0

#: Which bucket a local directory is in front of.
_OWNER = "bucket.json"


class Archive:
    """One bucket, its local directory, and what is known of it. Thread-safe.

    Parameters
    ----------
    settings
        Which bucket, and how it is used. Nothing is touched before it is needed.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.names = Names.of(settings.prefix)
        self.health = Health()
        self.identity = new_writer_id()
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._fetcher: Fetcher | None = None
        self._catalogs: dict[bytes, Catalog] = {}
        self._writers: set[StagedWriter] = set()
        self._documents: dict[bytes, tuple[bytes, int]] = {}
        self._surveyed: dict[str, tuple[int, int]] = {}
        self._claiming = threading.Lock()
        self._claimed = False
        self.staging = StagingTarget(
            settings.path / STAGING,
            name=settings.name,
            capacity=settings.staging,
            reserve=settings.reserve,
            direct_io=settings.direct_io,
            opened=self._opened,
            closed=self._closed,
            fits=self._fits,
        )
        self.uploader = Uploader(self)

    def limit(self, settings: S3Settings) -> None:
        """Use the limits of other settings for the same place, and what else may change."""
        self.settings = settings
        self.staging.limit(settings.staging, settings.reserve)
        with self._lock:
            if self._fetcher is not None:
                self._fetcher.timeout_s = settings.timeout_s
            if self._client is not None:
                self._client.encrypt(settings.sse, settings.sse_kms_key_id)

    @property
    def _slices(self) -> Path:
        return self.settings.path / "journals"

    def _room(self) -> int:
        """Bytes that may be written to the local directory. Raises ``OSError``."""
        found = os.statvfs(self.settings.path)
        return found.f_bavail * found.f_frsize - self.settings.reserve

    def tidy(self) -> None:
        """Let go of what is kept on the local disk and not used."""
        used = {digest.hex()[:32] for digest in self.catalogs()}
        with contextlib.suppress(OSError):
            forget_unused(self._slices, used, short=self._room() < 0)

    @property
    def client(self) -> S3Client:
        """The way to the bucket.

        Raises
        ------
        TargetError
            If boto3 is missing, or its configuration cannot be used.
        """
        with self._lock:
            if self._client is None:
                of = self.settings
                self._client = S3Client(
                    of.bucket,
                    endpoint_url=of.endpoint_url,
                    region=of.region,
                    sse=of.sse,
                    sse_kms_key_id=of.sse_kms_key_id,
                )
            return self._client

    @property
    def fetcher(self) -> Fetcher:
        """What loads read with."""
        client = self.client
        with self._lock:
            if self._fetcher is None:
                self._fetcher = Fetcher(client, self.health, self.settings.timeout_s)
            return self._fetcher

    @property
    def has_fetcher(self) -> bool:
        """Whether anything was read from the bucket yet."""
        return self._fetcher is not None

    def catalog(self, digest: bytes) -> Catalog:
        """What is known of a namespace, given as 32 bytes."""
        client = self.client
        with self._lock:
            found = self._catalogs.get(digest)
            if found is None:
                cache = SliceCache(self._slices / digest.hex()[:32], self._room)
                found = self._catalogs[digest] = Catalog(client, self.names, digest, cache)
            return found

    def catalogs(self) -> dict[bytes, Catalog]:
        """Those that are in use, by namespace."""
        with self._lock:
            return dict(self._catalogs)

    # Probing ----------------------------------------------------------------

    def claim(self) -> None:
        """Make sure that what is in the local directory belongs to this bucket.

        Raises
        ------
        TargetError
            If blocks wait there for another bucket.
        OSError
            If the directory cannot be used.
        """
        with self._claiming:
            if self._claimed:
                return
            path, mine = self.settings.path, self.settings.location
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            before = ""
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                before = str(json.loads((path / _OWNER).read_bytes())["bucket"])
            if before and before != mine:
                if self.unfinished():
                    raise TargetError(
                        errno.EBUSY,
                        f"blocks wait in {path} to be uploaded to {before}, not to {mine}: set the "
                        f"tier's path to another directory, or delete {path / STAGING}",
                    )
                # What it says of the other bucket would be looked for in this one.
                shutil.rmtree(self._slices, ignore_errors=True)
            if before != mine:
                write_atomically(path / _OWNER, json.dumps({"bucket": mine}).encode() + b"\n")
            self._claimed = True

    def probe(self) -> None:
        """Put, read and delete a small object, here and in the local directory.

        Raises
        ------
        TargetError
            If the bucket or the directory cannot be used.
        """
        self.claim()
        self.staging.probe()
        client = self.client
        client.check_bucket()
        self._check_marker()
        key = self.names.probe(secrets.token_hex(8))
        content = secrets.token_bytes(16)
        client.put(key, content)
        try:
            found = client.get(key)
        finally:
            client.delete([key])
        if found != content:
            raise S3Error(
                Fault.SERVER,
                f"{self.settings.location}: an object that was put is another one when it is read: "
                "check the server",
            )
        self.health.good()

    def _check_marker(self) -> None:
        client, marker = self.client, self.names.marker
        try:
            text = client.get(marker)
        except S3Error as exc:
            if exc.fault is not Fault.MISSING:
                raise
            client.put(marker, json.dumps({"format": FORMAT_VERSION}).encode(), absent=True)
            return
        try:
            version = int(json.loads(text)["format"])
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise ForeignDataError(
                f"{marker} in {self.settings.location} is damaged: delete that object if the "
                "prefix holds nothing but KV of LifeboatCache, or set the tier's prefix"
            ) from exc
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{self.settings.location} is in format {version}, this release knows up to "
                f"{FORMAT_VERSION}: upgrade lifeboatcache-core, or set another prefix"
            )

    # Staging ----------------------------------------------------------------

    def _opened(self, writer: StagedWriter) -> None:
        with self._lock:
            self._writers.add(writer)
        self.uploader.start()

    def _closed(self, writer: StagedWriter) -> None:
        with self._lock:
            self._writers.discard(writer)
        self.uploader.wake()

    def writers(self) -> list[StagedWriter]:
        """Writers of this process."""
        with self._lock:
            return list(self._writers)

    def _fits(self, wanted: int) -> bool:
        capacity = self.settings.capacity
        return capacity is None or self.used() + wanted <= capacity

    def used(self) -> int:
        """Bytes of all segments in the bucket, as far as is known."""
        followed = {digest.hex()[:32]: one.used for digest, one in self.catalogs().items()}
        with self._lock:
            others = {folder: size for folder, (size, _) in self._surveyed.items()}
        return sum({**others, **followed}.values())

    def blocks(self) -> int | None:
        """Records in the bucket, as far as is known; ``None`` = not at all yet."""
        with self._lock:
            if not self._surveyed:
                return None
            return sum(blocks for _, blocks in self._surveyed.values())

    def unfinished(self, besides: Container[str] = ()) -> bool:
        """Whether segments are not in the bucket yet, but for those of some writers.

        Raises ``OSError``.
        """
        return any(
            name.endswith(".segment") and name.partition(".")[0] not in besides
            for directory in self.staging.directories()
            for name in os.listdir(directory)
        )

    def staged(self) -> int:
        """Bytes of segments that are not in the bucket yet."""
        return sum(self.staging.allocated(one) for one in self.staging.directories())

    def survey(self) -> dict[str, dict[FeedName, int]]:
        """Look at the feeds of all namespaces; one request for each thousand segments.

        Returns
        -------
        dict
            By namespace (the name of its directory): what is in its feed, and the sizes of these
            objects.

        Raises
        ------
        S3Error
            If that could not be listed.
        """
        found = {folder: self.feed(folder) for folder in self.namespaces()}
        surveyed = {}
        for folder, feed in found.items():
            journals = {name: size for name, size in feed.items() if name.kind == "journal"}
            used = {(name.writer, name.number): name.size for name in journals}
            blocks = sum(blocks_of(size) for size in journals.values())
            surveyed[folder] = (sum(used.values()), blocks)
        self.learn(surveyed)
        return found

    def learn(self, surveyed: Mapping[str, tuple[int, int]]) -> None:
        """Take in how many bytes and blocks there are of each namespace."""
        with self._lock:
            self._surveyed = dict(surveyed)

    def tell(self) -> dict[str, Any]:
        """What is known of all namespaces, for other hosts."""
        with self._lock:
            sums = {folder: list(both) for folder, both in self._surveyed.items()}
        return {"at": int(self.client.now()), "namespaces": sums}

    def hear(self, said: Mapping[str, Any]) -> bool:
        """Take in what another host tells; whether it is of use."""
        try:
            fresh = self.client.now() - float(said["at"]) < _HEARD_S
            found = {
                str(folder): (int(size), int(blocks))
                for folder, (size, blocks) in said["namespaces"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
        if fresh:
            self.learn(found)
        return fresh

    def feed(self, folder: str) -> dict[FeedName, int]:
        """What is in the feed of a namespace, and the sizes of these objects.

        Raises
        ------
        S3Error
            If it could not be listed.
        """
        feed = self.names.feed(folder)
        found: dict[FeedName, int] = {}
        for item in self.client.objects(feed):
            name = parse_feed(item.key[len(feed) :])
            if name is not None:
                found[name] = item.size
        return found

    def document(self, digest: bytes, text: bytes) -> None:
        """Put the description of a namespace, unless it is there.

        Raises
        ------
        S3Error
            If it cannot be put.
        """
        losses = self.catalog(digest).losses
        known = self._documents.get(digest)
        if known is None or known[1] != losses:
            folder = digest.hex()[:32]
            self.client.put(self.names.document(folder), text, absent=True)
            self._documents[digest] = text, losses

    def describe_again(self) -> None:
        """Put descriptions again of namespaces that may have been purged since.

        A purge that was not meant for what came after it takes them along. Raises
        :class:`S3Error`.
        """
        for digest, (text, _) in list(self._documents.items()):
            if self.catalog(digest).used:
                self.document(digest, text)

    # What is in the bucket --------------------------------------------------

    def namespaces(self) -> list[str]:
        """Names of the directories of all namespaces in the bucket. Raises :class:`S3Error`."""
        folders = self.client.folders(self.names.prefix)
        return [folder for folder in folders if Names.is_namespace(folder)]

    def remove(self, digest: bytes, places: Sequence[tuple[bytes, int]]) -> None:
        """Delete segments from the bucket; see the module.

        Raises
        ------
        S3Error
            If it could not be done to the end. It may be done again.
        """
        catalog = self.catalog(digest)
        feed = [name for place in places for name in catalog.feed_names(*place)]
        self.remove_from(digest.hex()[:32], places, feed)
        catalog.forget(places)

    def remove_from(
        self, folder: str, places: Sequence[tuple[bytes, int]], feed: Sequence[FeedName]
    ) -> None:
        """Delete segments and objects of a feed, as :meth:`remove` does; nothing is asked before.

        Raises
        ------
        S3Error
            If it could not be done to the end.
        """
        client = self.client
        if places:
            number = secrets.randbelow(10**8)
            notice = FeedName(int(client.now()), self.identity, number, 0, "gone")
            client.put(self.names.in_feed(folder, notice), pack_gone(places))
        # What nobody finds may go.
        left = client.delete(self.names.in_feed(folder, name) for name in feed)
        left += client.delete(
            self.names.segment(folder, writer, number) for writer, number in places
        )
        if left:
            raise S3Error(
                Fault.REFUSED,
                f"{self.settings.location}: {len(left)} objects could not be deleted: check that "
                "the credentials may delete",
            )

    def facts(self) -> dict[str, Any]:
        """What it does and costs, for people and metrics."""
        client = self._client
        if client is None:
            return {}
        traffic = client.traffic.snapshot()
        return {
            "requests": dict(traffic.requests),
            "errors": dict(traffic.errors),
            "bytes_in": traffic.bytes_in,
            "bytes_out": traffic.bytes_out,
            "staged_bytes": self.uploader.waiting,
            "problem": self.uploader.problem or self.health.problem,
        }

    def close(self) -> None:
        """End its threads. What is staged stays for the next process."""
        self.uploader.stop()
        with self._lock:
            fetcher, client = self._fetcher, self._client
        if fetcher is not None:
            fetcher.close()
        if client is not None:
            client.close()


_archives: dict[tuple[object, ...], Archive] = {}
_guard = threading.Lock()


def archive_of(settings: S3Settings) -> Archive:
    """The archive of this process for some settings; if there is one, its limits stay."""
    with _guard:
        found = _archives.get(settings.place)
        if found is None:
            found = _archives[settings.place] = Archive(settings)
        return found
