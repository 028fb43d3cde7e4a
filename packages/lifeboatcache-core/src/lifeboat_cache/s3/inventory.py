"""What a bucket holds, known from listings and journal slices, and kept from pass to pass.

A pass costs a listing of each feed, and reading the slices that are new in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from lifeboat_cache.errors import FormatError, LifeboatError
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, FileHeader
from lifeboat_cache.format.journal import (
    ENTRY,
    KIND_RECORD,
    KIND_TOMBSTONE,
    Entries,
    parse_entries,
)
from lifeboat_cache.janitor.kinship import kinship
from lifeboat_cache.janitor.rows import Rows
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.names import FeedName, Names
from lifeboat_cache.s3.slices import unpack_gone, unpack_slice
from lifeboat_cache.store.records import readable

__all__ = ["HeldNamespace", "HeldSegment", "Inventory", "Place"]

#: Slices that are read at the same time.
_THREADS = 8

#: A segment's writer and number.
Place = tuple[bytes, int]

#: A record is not younger than the slice that names it, but for so many seconds.
_SLACK_S = 60

#: What is marked has been declared dead.
_MARKED = 1.0


@dataclass
class HeldSegment:
    """A segment that a feed names.

    Attributes
    ----------
    names
        Of the slices that name it, with their sizes; most often there is one.
    rows
        Its records.
    tombstones
        What its slices declare dead, as ``ENTRY`` arrays.
    bad
        Entries that are not intact.
    untouchable
        Why it must be left alone, or empty.
    doomed
        Whether somebody has said that it is deleted, and did not finish that.
    """

    names: dict[FeedName, int] = field(default_factory=dict)
    rows: Rows = field(default_factory=Rows)
    tombstones: list[Entries] = field(default_factory=list)
    bad: int = 0
    untouchable: str = ""
    doomed: bool = False

    @property
    def name(self) -> FeedName:
        """Of the first slice."""
        return next(iter(self.names))

    @property
    def place(self) -> Place:
        """Writer and number."""
        return self.name.writer, self.name.number

    @property
    def size(self) -> int:
        """What deleting it gives back."""
        return self.name.size + sum(self.names.values())


@dataclass
class HeldNamespace:
    """One namespace of a bucket.

    Attributes
    ----------
    directory
        The first 32 digits of its digest.
    namespace
        What its document says; ``None`` if it has none that is intact.
    digest
        32 bytes; empty as long as nothing says it.
    segments
        By place, in the order of the feed.
    dead
        Slices of tombstones alone, by their names, with these.
    gone
        Lists of deleted segments: the names of the objects, with the segments.
    other_bytes
        What else is in the feed.
    kin
        See :func:`~lifeboat_cache.janitor.kinship.kinship`.
    problems
        What cannot be read, for people.
    """

    directory: str
    namespace: Namespace | None = None
    digest: bytes = b""
    segments: dict[Place, HeldSegment] = field(default_factory=dict)
    dead: dict[FeedName, Entries] = field(default_factory=dict)
    gone: dict[FeedName, list[Place]] = field(default_factory=dict)
    other_bytes: int = 0
    kin: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """All of it."""
        return self.other_bytes + sum(one.size for one in self.segments.values())

    def tombstones(self) -> Iterator[Entries]:
        """All that is declared dead."""
        for segment in self.segments.values():
            yield from segment.tombstones
        yield from self.dead.values()


class Inventory:
    """All namespaces below a prefix.

    Parameters
    ----------
    client
        The bucket.
    names
        The names below the prefix.
    on_step
        Told again and again that it goes on.
    """

    def __init__(
        self, client: S3Client, names: Names, on_step: Callable[[], None] = lambda: None
    ) -> None:
        self.namespaces: dict[str, HeldNamespace] = {}
        self._client = client
        self._names = names
        self._on_step = on_step

    @property
    def size(self) -> int:
        """What all namespaces take."""
        return sum(one.size for one in self.namespaces.values())

    def segments(self) -> list[tuple[HeldNamespace, HeldSegment]]:
        """All segments, older ones before younger ones."""
        found = [(n, s) for n in self.namespaces.values() for s in n.segments.values()]
        return sorted(found, key=lambda pair: (pair[1].name.time, pair[1].place))

    def refresh(self, listing: Mapping[str, Mapping[FeedName, int]]) -> None:
        """Read what is new in a listing of all feeds; see :meth:`Archive.survey`.

        Raises
        ------
        S3Error
            If it cannot be read.
        """
        for directory in self.namespaces.keys() - listing.keys():
            del self.namespaces[directory]
        for directory, feed in sorted(listing.items()):
            held = self.namespaces.setdefault(directory, HeldNamespace(directory))
            self._refresh(held, feed)

    def _refresh(self, held: HeldNamespace, there: Mapping[FeedName, int]) -> None:
        held.problems = []
        held.other_bytes = sum(size for name, size in there.items() if name.kind != "journal")
        self._on_step()
        for place in [
            p for p, one in held.segments.items() if not one.names.keys() <= there.keys()
        ]:
            del held.segments[place]  # what is left of it is read anew
        for name in held.dead.keys() - there.keys():
            del held.dead[name]
        for name in held.gone.keys() - there.keys():
            del held.gone[name]
        known = {name for one in held.segments.values() for name in one.names}
        new = [n for n in there if n not in known and n not in held.dead and n not in held.gone]
        if new and (held.namespace is None or not held.digest):
            self._identify(held)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3 slices") as pool:
            read = pool.map(lambda name: self._read(self._names.in_feed(held.directory, name)), new)
            for name, data in zip(new, read, strict=True):
                self._on_step()
                if data is not None and not self._take_in(held, name, data, certain=False):
                    # It may have been damaged on the way only.
                    again = self._read(self._names.in_feed(held.directory, name))
                    if again is not None:
                        self._take_in(held, name, again, certain=True)
        held.segments = dict(
            sorted(held.segments.items(), key=lambda item: (item[1].name.time, item[0]))
        )
        self.mark(held)

    def _identify(self, held: HeldNamespace) -> None:
        data = self._read(self._names.document(held.directory))
        try:
            found = None if data is None else Namespace.from_json(data)
        except LifeboatError as error:
            found = None
            held.problems.append(f"namespace.json: {error}")
        if found is not None and found.directory == held.directory:
            held.namespace, held.digest = found, found.digest
            held.kin = kinship(found, found.digest)

    def _read(self, key: str) -> bytes | None:
        """A small object; ``None`` if it is not there any more. Raises :class:`S3Error`."""
        try:
            return self._client.get(key)
        except S3Error as error:
            if error.fault is Fault.MISSING:
                return None
            raise

    def _take_in(self, held: HeldNamespace, name: FeedName, data: bytes, *, certain: bool) -> bool:
        """Take in an object of a feed; false if it is damaged and that is not certain yet."""
        if name.kind == "gone":
            try:
                held.gone[name] = unpack_gone(data)
            except FormatError as error:
                if not certain:
                    return False
                held.problems.append(str(error))
                held.gone[name] = []
            return True
        try:
            if not held.digest:  # without a document, every slice says it, too
                header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_JOURNAL, str(name))
                if header.namespace.hex()[:32] == held.directory:
                    held.digest = header.namespace
                    held.kin = kinship(None, held.digest)
            entries, bad = unpack_slice(data, held.digest, name)
        except FormatError as error:
            if not certain:
                return False
            held.problems.append(str(error))
            if name.kind == "dead":
                held.dead[name] = np.zeros(0, dtype=ENTRY)
                return True
            segment = held.segments.setdefault((name.writer, name.number), HeldSegment())
            segment.names[name] = len(data)
            segment.bad += 1
            # Written by a later release, or damaged on the way: what it holds is not known.
            segment.untouchable = str(error)
            return True
        if bad and not certain:
            return False
        records = entries["kind"] == KIND_RECORD
        tombstones = entries[entries["kind"] == KIND_TOMBSTONE].copy()
        if name.kind == "dead":
            held.dead[name] = tombstones
            return True
        segment = held.segments.setdefault((name.writer, name.number), HeldSegment())
        segment.names[name] = len(data)
        segment.bad += bad
        if tombstones.shape[0]:
            segment.tombstones.append(tombstones)
        raw, _ = parse_entries(data[HEADER_BYTES:], name.writer, 0, held.digest)
        if not readable(raw).all():
            segment.untouchable = "it holds records of a later release"
        mine = entries[records]
        new = segment.rows.at(mine["slot"].astype(np.int64)) < 0
        count = int(np.count_nonzero(new))
        segment.rows.add(mine[new], np.zeros(count, dtype=np.int64), name.time + _SLACK_S)
        if bad and not len(segment.rows):
            segment.untouchable = "none of its entries is intact"
        return True

    @staticmethod
    def mark(held: HeldNamespace) -> None:
        """Mark what is declared dead."""
        for segment in held.segments.values():
            segment.doomed = False
        for places in held.gone.values():
            for place in places:
                if place in held.segments:
                    held.segments[place].doomed = True
        for tombstones in held.tombstones():
            for owner, number, slot in zip(
                tombstones["payload_checksum"].tolist(),
                tombstones["segment"].tolist(),
                tombstones["slot"].tolist(),
                strict=True,
            ):
                found = held.segments.get((bytes(owner), int(number)))
                if found is None:
                    continue
                at = found.rows.at(np.array([slot], dtype=np.int64))
                if at[0] >= 0:
                    found.rows.array["marked"][at[0]] = _MARKED
