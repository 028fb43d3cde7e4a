"""Reading what is in a bucket, and what is staged in front of it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.errors import FormatError, LifeboatError, NewerFormatError
from lifeboat_cache.format.journal import ENTRY, Entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.fetcher import Source
from lifeboat_cache.s3.names import FeedName
from lifeboat_cache.targets.base import JournalPage, OpenFile, Place, TargetReader
from lifeboat_cache.targets.files import GONE

if TYPE_CHECKING:
    from lifeboat_cache.store.io_task import IoTask

__all__ = ["S3Reader"]

_log = logging.getLogger("lifeboat_cache")

_NOTHING: Entries = np.zeros(0, dtype=ENTRY)

#: What does not match is read anew for so many seconds before it counts as corrupt: it may have
#: been damaged on its way.
_DOUBT_S = 60.0
_MOST_DOUBTS = 65536

#: Entries of one page.
_PAGE_ENTRIES = 8192

_Slot = tuple[bytes, int, int]


class _RemoteSegment:
    """A segment in the bucket. Its descriptor stands for it, and is none of the system's."""

    __slots__ = ("direct_fd", "fd")

    def __init__(self, marker: int) -> None:
        self.fd = marker
        self.direct_fd = -1


class S3Reader(TargetReader):
    """Reads one namespace.

    Parameters
    ----------
    archive
        The bucket.
    namespace
        Whose records.
    """

    def __init__(self, archive: Archive, namespace: Namespace) -> None:
        self._archive = archive
        self._folder = namespace.directory
        self._local = archive.staging.reader(namespace)
        self._catalog = archive.catalog(namespace.digest)
        self._lock = threading.Lock()
        self._markers = itertools.count(-2, -1)
        self._segments: dict[tuple[bytes, int], _RemoteSegment] = {}
        self._sources: dict[int, Source] = {}
        self._first = True
        self._slices = self._gone = 0
        self._unread: list[FeedName] = []  # slices that could not be had yet
        self._doubts: dict[_Slot, float] = {}
        archive.uploader.start()

    # Journals ---------------------------------------------------------------

    def poll(self, skip: bytes | None = None) -> Iterator[JournalPage]:
        yield from self._local.poll(skip)
        if self._first:
            # What was known before answers while the bucket is asked what is new.
            for _ in self._catalog.recall():
                pass
            yield from self._new(skip)
        if not (self._first and self._catalog.failing):
            self._refresh()
        yield from self._new(skip)
        if self._archive.has_fetcher:
            self._archive.fetcher.tidy()

    def _refresh(self) -> None:
        try:
            self._catalog.refresh(whole=self._first)
        except S3Error as exc:
            self._archive.health.bad(str(exc))
            if self._first:
                _log.warning("LifeboatCache: what is in the bucket is not known yet: %s", exc)
        else:
            self._first = False

    def _new(self, skip: bytes | None) -> Iterator[JournalPage]:
        new = self._catalog.slices(self._slices)
        self._slices += len(new)
        self._unread += [name for name in new if name.writer != skip]
        while self._unread:
            found = self._entries(self._unread[0])
            if found is None:
                return  # at the next poll
            name = self._unread.pop(0)
            entries, bad = found
            yield JournalPage(name.writer, entries[:_PAGE_ENTRIES], bad)
            for first in range(_PAGE_ENTRIES, entries.shape[0], _PAGE_ENTRIES):
                yield JournalPage(name.writer, entries[first : first + _PAGE_ENTRIES], 0)

    def _entries(self, name: FeedName) -> tuple[Entries, int] | None:
        """What a slice holds; ``None`` if it cannot be had now."""
        try:
            return self._catalog.entries(name)
        except NewerFormatError:
            return _NOTHING, 0  # not ours to judge
        except FormatError:
            return _NOTHING, 1
        except OSError as exc:
            if isinstance(exc, S3Error) and exc.fault is Fault.MISSING:
                return _NOTHING, 0  # deleted meanwhile, with what it names
            self._archive.health.bad(str(exc))
            return None

    @property
    def complete(self) -> bool:
        return self._local.complete and self._catalog.complete and not self._unread

    def take_vanished(self) -> list[tuple[bytes, int | None]]:
        catalog = self._catalog
        # What was uploaded is not staged any more, and not gone.
        vanished = [
            (writer, number)
            for writer, number in self._local.take_vanished()
            if not (catalog.knows_writer(writer) if number is None else catalog.has(writer, number))
        ]
        gone = catalog.gone(self._gone)
        self._gone += len(gone)
        for place in gone:
            with self._lock:
                segment = self._segments.pop(place, None)
                if segment is not None:
                    self._sources.pop(segment.fd, None)
        return [*vanished, *gone]

    def poll_dead(self) -> Iterator[tuple[bytes, int, npt.NDArray[np.bool_]]]:
        return self._local.poll_dead()

    def declared_dead(self, places: Sequence[Place], slots: Sequence[int]) -> list[bool]:
        return [
            not self._catalog.has(place.writer, place.segment) and dead
            for place, dead in zip(places, self._local.declared_dead(places, slots), strict=True)
        ]

    def accesses(self) -> Iterator[Entries]:
        return self._local.accesses()

    # Doubts -----------------------------------------------------------------

    @property
    def doubts(self) -> int:
        return len(self._doubts) + self._local.doubts

    def believe(self, writer: bytes, segment: int, slot: int) -> None:
        self._doubts.pop((writer, segment, slot), None)
        self._local.believe(writer, segment, slot)

    def doubtful(self, writer: bytes, segment: int, slot: int) -> bool:
        if not self._catalog.has(writer, segment):
            return self._local.doubtful(writer, segment, slot)
        now = time.monotonic()
        if len(self._doubts) >= _MOST_DOUBTS:
            self._doubts = {
                place: since for place, since in self._doubts.items() if now - since < _DOUBT_S
            }
        place = (writer, segment, slot)
        if now - self._doubts.setdefault(place, now) < _DOUBT_S:
            return True
        del self._doubts[place]
        return False

    # Payloads ---------------------------------------------------------------

    def open_segment(self, writer: bytes, segment: int) -> OpenFile:
        if self._catalog.has(writer, segment):
            return self._remote(writer, segment)
        try:
            return self._local.open_segment(writer, segment)
        except OSError as exc:
            # It may have been uploaded just now.
            if exc.errno in GONE and self._catalog.has(writer, segment):
                return self._remote(writer, segment)
            raise

    def _remote(self, writer: bytes, number: int) -> OpenFile:
        with self._lock:
            found = self._segments.get((writer, number))
            if found is None:
                found = _RemoteSegment(next(self._markers))
                self._segments[writer, number] = found
                self._sources[found.fd] = Source(
                    self._archive.names.segment(self._folder, writer, number),
                    partial(self._catalog.missing, writer, number),
                )
            return found

    def fetch(
        self,
        tasks: list[IoTask],
        ready: Callable[[list[IoTask]], None],
        failed: Callable[[list[IoTask]], None],
    ) -> None:
        far = [task for task in tasks if (task.runs[:, 0] < -1).any()]
        near = [task for task in tasks if not (task.runs[:, 0] < -1).any()]
        if near:
            ready(near)
        if not far:
            return
        try:
            fetcher = self._archive.fetcher
        except (RuntimeError, LifeboatError) as exc:  # no threads are left, say
            _log.warning("LifeboatCache: nothing can be loaded from a bucket: %s", exc)
            for task in far:
                task.outcomes[:] = Outcome.UNAVAILABLE
            failed(far)
        else:
            fetcher.fetch(far, self._sources.get, ready, failed)

    def settle(self, task: IoTask) -> None:
        if self._archive.has_fetcher:
            self._archive.fetcher.settle(task)

    def read(
        self, places: Sequence[Place], buffers: BlockBuffers, blocks: Sequence[int]
    ) -> list[int]:
        outcomes = [int(Outcome.PENDING)] * len(places)
        local = []
        for number, place in enumerate(places):
            if self._catalog.has(place.writer, place.segment):
                outcomes[number] = int(self._read_remote(place, buffers.pieces(blocks[number])))
            else:
                local.append(number)
        found = self._local.read(
            [places[number] for number in local], buffers, [blocks[number] for number in local]
        )
        for number, outcome in zip(local, found, strict=True):
            outcomes[number] = outcome
        return outcomes

    def _read_remote(self, place: Place, pieces: Sequence[memoryview]) -> Outcome:
        key = self._archive.names.segment(self._folder, place.writer, place.segment)
        at = place.offset
        try:
            for piece in pieces:
                self._archive.client.read(key, at, piece)
                at += piece.nbytes
        except S3Error as exc:
            if exc.fault is not Fault.MISSING:
                return Outcome.FAILED
            gone = self._catalog.missing(place.writer, place.segment)
            return Outcome.MISSING if gone else Outcome.FAILED
        return Outcome.OK

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._local.close()
        with self._lock:
            self._segments.clear()
            self._sources.clear()
