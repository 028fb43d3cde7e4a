"""What a bucket holds of one namespace, as far as this host knows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.names import FeedName, Names, parse_feed
from lifeboat_cache.s3.slice_cache import SliceCache
from lifeboat_cache.s3.slices import unpack_gone, unpack_slice

__all__ = ["Catalog"]

_log = logging.getLogger("lifeboat_cache")

#: The feed is listed so often: at least, and when nothing new has come for a while.
_SOON_S, _LATER_S = 5.0, 60.0

#: Who waits for the first look that goes through tries again after so many seconds at most.
_AGAIN_S = 15.0

#: All of it is listed after so many seconds, to find what was deleted.
_WHOLE_S = 3600.0

#: What a listing does not have is gone if another one, so many seconds later, has not either.
_CONFIRM_S = 60.0

#: An object may be put so long after the time in its name, or be listed so late.
_LATE_S = 1200

#: What is younger than so many seconds may not be readable everywhere yet.
_YOUNG_S = 300.0

#: Slices that are fetched at the same time.
_PARALLEL = 8

_Place = tuple[bytes, int]


class Catalog:
    """Follows the feed of one namespace. Thread-safe.

    Parameters
    ----------
    client, names
        The bucket.
    digest
        The namespace's 32 bytes.
    cache
        Where slices are kept.
    """

    def __init__(self, client: S3Client, names: Names, digest: bytes, cache: SliceCache) -> None:
        self._client = client
        self._names = names
        self._digest = digest
        self._folder = digest.hex()[:32]
        self._cache = cache
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()
        self._known: set[str] = set()  # names in the feed that were dealt with
        self._where: dict[_Place, list[FeedName]] = {}  # segments that are there
        self._order: list[FeedName] = []  # slices, as they became known
        self._gone: list[_Place] = []  # segments that went, as that became known
        self._used = 0
        self._suspects: dict[str, float] = {}  # not in a listing, and since when
        self._listed_to = 0.0  # by the server's clock
        self._whole_at = 0.0
        self._next_at = 0.0
        self._pause_s = _SOON_S
        self._complete = False
        self._failed_until = 0.0
        self._failure_s = _SOON_S

    # What it knows ----------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the last look at the feed went through."""
        return self._complete

    @property
    def failing(self) -> bool:
        """Whether the last look failed, and that was just now."""
        return time.monotonic() < self._failed_until

    @property
    def used(self) -> int:
        """Bytes of all segments that are known."""
        return self._used

    def has(self, writer: bytes, number: int) -> bool:
        """Whether a segment is in the bucket."""
        return (writer, number) in self._where

    def knows_writer(self, writer: bytes) -> bool:
        """Whether any segment of a writer is in the bucket."""
        with self._lock:
            return any(owner == writer for owner, _ in self._where)

    def segments(self) -> list[FeedName]:
        """The segments that are there, the oldest first."""
        with self._lock:
            return sorted((names[0] for names in self._where.values()), key=str)

    def feed_names(self, writer: bytes, number: int) -> list[FeedName]:
        """All objects of the feed that name a segment."""
        with self._lock:
            return list(self._where.get((writer, number), ()))

    def slices(self, since: int) -> list[FeedName]:
        """Slices that became known after the first ``since``."""
        with self._lock:
            return self._order[since:]

    @property
    def losses(self) -> int:
        """How many segments turned out to be gone."""
        return len(self._gone)

    def gone(self, since: int) -> list[_Place]:
        """Segments that turned out to be gone after the first ``since``."""
        with self._lock:
            return self._gone[since:]

    def entries(self, name: FeedName) -> tuple[Entries, int]:
        """What a slice holds, and how many entries of it are bad.

        Raises
        ------
        OSError, FormatError
            If it cannot be had.
        """
        data = self._cache.get(name)
        # What the local disk, or the way to it, has damaged is not kept for ever.
        if data is None or not self._whole(data, name):
            data = self._fetch_slice(name)
            self._cache.put(name, data)
        return unpack_slice(data, self._digest, name)

    def _whole(self, data: bytes, name: FeedName) -> bool:
        """Whether nothing of a slice is damaged, as far as this release can tell."""
        try:
            return not unpack_slice(data, self._digest, name)[1]
        except NewerFormatError:
            return True
        except FormatError:
            return False

    def _fetch_slice(self, name: FeedName) -> bytes:
        """A slice; once more if it comes damaged, which the way may have done."""
        data = self._fetch(name)
        return data if self._whole(data, name) else self._fetch(name)

    # What changes it --------------------------------------------------------

    def refresh(self, *, whole: bool = False) -> None:
        """Look at the feed if it is time for that; returns at once if somebody does already.

        Parameters
        ----------
        whole
            Look at all of it now.

        Raises
        ------
        S3Error
            If it cannot be listed. What was taken in before that counts.
        """
        now = time.monotonic()
        if not whole and now < self._next_at:
            return
        if not self._refreshing.acquire(blocking=whole):
            return
        try:
            self._complete = False
            self._next_at = now + self._pause_s
            whole = whole or now >= self._whole_at
            found = self._look(whole=whole)
            self._pause_s = _SOON_S if found else min(_LATER_S, 1.5 * self._pause_s)
            self._next_at = time.monotonic() + self._pause_s
            self._complete = True
            self._failed_until, self._failure_s = 0.0, _SOON_S
        except BaseException:
            self._failed_until = time.monotonic() + self._failure_s
            self._failure_s = min(_AGAIN_S, 1.5 * self._failure_s)
            raise
        finally:
            self._refreshing.release()

    def _look(self, *, whole: bool) -> int:
        feed = self._names.feed(self._folder)
        begun = self._client.now()
        since = 0 if whole else max(0, int(self._listed_to) - _LATE_S)
        after = feed + f"{since:010x}" if since else ""
        seen: set[str] = set()
        new: list[FeedName] = []
        for found in self._client.objects(feed, after):
            text = found.key[len(feed) :]
            name = parse_feed(text)
            if name is None:
                continue
            seen.add(text)
            if text not in self._known:
                new.append(name)
        self._take_in(new)
        self._listed_to = max(begun, self._listed_to)
        if whole:
            self._whole_at = time.monotonic() + _WHOLE_S
            self._compare(seen)
            with self._lock:
                there = {str(name) for names in self._where.values() for name in names}
            self._cache.trim(seen | there, begun - _LATE_S)
        return len(new)

    def _take_in(self, new: Sequence[FeedName]) -> None:
        """Fetch slices that are new here, and keep them."""
        slices = [name for name in new if name.kind != "gone"]
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="s3 journal") as pool:
            for name, good in zip(slices, pool.map(self._keep, slices), strict=True):
                if good:
                    self._add(name)
        for name in new:
            if name.kind == "gone":
                self._follow_gone(name)

    def _keep(self, name: FeedName) -> bool:
        """Have a slice in the cache; whether it is there. What has gone meanwhile is no fault."""
        if self._cache.get(name) is not None:
            return True
        try:
            data = self._fetch_slice(name)
        except S3Error as exc:
            if exc.fault is Fault.MISSING:
                return False
            raise
        self._cache.put(name, data)
        return True

    def _fetch(self, name: FeedName) -> bytes:
        return self._client.get(self._names.in_feed(self._folder, name))

    def _follow_gone(self, name: FeedName) -> None:
        try:
            places = unpack_gone(self._fetch(name))
        except FormatError as exc:
            _log.warning("LifeboatCache: %s: %s", self._client.where, exc)
            places = []
        except S3Error as exc:
            if exc.fault is not Fault.MISSING:
                raise
            places = []
        self.forget(places)
        with self._lock:
            self._known.add(str(name))

    def _add(self, name: FeedName) -> None:
        with self._lock:
            text = str(name)
            if text in self._known:
                return
            self._known.add(text)
            self._order.append(name)
            if name.kind == "journal":
                place = (name.writer, name.number)
                if place not in self._where:
                    self._used += name.size
                self._where.setdefault(place, []).append(name)

    def uploaded(self, name: FeedName, data: bytes) -> None:
        """Take in a slice that this process has put."""
        self._cache.put(name, data)
        self._add(name)

    def forget(self, places: Sequence[_Place]) -> None:
        """Say that segments have been deleted."""
        doomed: list[FeedName] = []
        with self._lock:
            for place in places:
                names = self._where.pop(place, None)
                if names is not None:
                    self._used -= names[0].size
                    self._gone.append(place)
                    doomed += names
        for name in doomed:
            self._cache.drop(name)

    def missing(self, writer: bytes, number: int) -> bool:
        """Take in that a segment could not be found; whether it is gone.

        What was put just now may only not be seen yet.
        """
        names = self.feed_names(writer, number)
        if names and self._client.now() - max(name.time for name in names) < _YOUNG_S:
            return False
        self.forget([(writer, number)])
        return True

    def _compare(self, seen: set[str]) -> None:
        """Find out what has gone, from a listing of all there is."""
        now = time.monotonic()
        with self._lock:
            absent = {str(name) for names in self._where.values() for name in names} - seen
            self._suspects = {text: self._suspects.get(text, now) for text in absent}
            certain = {text for text, since in self._suspects.items() if now - since >= _CONFIRM_S}
            places = [
                place
                for place, names in self._where.items()
                if all(str(name) in certain for name in names)
            ]
        self.forget(places)
        if self._suspects:
            # Listings may lag: whether it has gone is looked at once more.
            self._whole_at = min(self._whole_at, now + _CONFIRM_S)

    def recall(self) -> Iterator[FeedName]:
        """Take in the slices that a process before this one has kept."""
        for name in self._cache.names():
            self._add(name)
            yield name
