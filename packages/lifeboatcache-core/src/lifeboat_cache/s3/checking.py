"""Verifying what a bucket holds, and mending it.

Everything is read, which costs requests and, with some providers, what is transferred.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from lifeboat_cache.check.payloads import Progress
from lifeboat_cache.check.report import RUN_REPAIR, Finding, NamespaceReport, TargetReport
from lifeboat_cache.checksum import (
    ALGORITHM_KEYED_BLAKE3,
    KNOWN_ALGORITHMS,
    Binding,
    payload_checksum,
)
from lifeboat_cache.codecs.names import CODECS
from lifeboat_cache.errors import FormatError, LifeboatError
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.integrity import IDENTITY_FIELD, IntegrityKey
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.inventory import HeldNamespace, HeldSegment, Inventory
from lifeboat_cache.s3.janitor import ORPHAN_S
from lifeboat_cache.s3.moving import request_runs
from lifeboat_cache.s3.names import FeedName
from lifeboat_cache.s3.slices import pack_slice, unpack_slice
from lifeboat_cache.targets.layout import new_writer_id

__all__ = ["check_bucket"]

#: Requests that are under way at the same time.
_THREADS = 4


def check_bucket(
    archive: Archive,
    report: TargetReport,
    *,
    only: Collection[str] | None,
    repair: bool,
    stop: threading.Event,
    progress: Progress,
    key: IntegrityKey | None,
) -> None:
    """Check a bucket beside engines that use it.

    Parameters
    ----------
    archive
        The bucket.
    report
        What is found is added here.
    only
        Names of the namespaces' directories; ``None`` = all.
    repair
        Whether to mend what can be mended.
    stop, progress
        When to end early, and who is told of it.
    key
        The integrity key.

    Raises
    ------
    LifeboatError
        If the bucket cannot be listed.
    """
    archive.client.check_bucket()
    inventory = Inventory(archive.client, archive.names)
    inventory.refresh(archive.survey())
    for directory, held in inventory.namespaces.items():
        if stop.is_set():
            return
        if only is None or directory in only:
            found = NamespaceReport(directory, held.digest.hex() or None)
            report.namespaces.append(found)
            _Check(archive, held, found, stop, progress, key).run()
            if repair:
                for finding in found.findings:
                    finding.apply()


class _Check:
    """The check of one namespace."""

    def __init__(
        self,
        archive: Archive,
        held: HeldNamespace,
        report: NamespaceReport,
        stop: threading.Event,
        progress: Progress,
        key: IntegrityKey | None,
    ) -> None:
        self._archive, self._client, self._names = archive, archive.client, archive.names
        self._held, self._report = held, report
        self._stop, self._progress = stop, progress
        needed = held.namespace.identity.get(IDENTITY_FIELD) if held.namespace else None
        self._key = key.secret if key is not None and key.id == needed else None
        self._binding = Binding(held.digest)
        self._feed: set[str] | None = None  # segments that a second listing names

    def run(self) -> None:
        held, report = self._held, self._report
        report.writers = len({writer for writer, _ in held.segments})
        if held.namespace is None and (held.segments or held.dead):
            self._find(
                "namespace-document",
                "namespace.json",
                "it is missing or damaged: nothing says which model these blocks are of",
                "start an engine that stores with that model",
            )
        prefix = self._names.segments(held.directory)
        there = {one.key: one for one in self._client.objects(prefix)}
        for segment in list(held.segments.values()):
            if self._stop.is_set():
                return
            found = there.pop(self._names.segment(held.directory, *segment.place), None)
            self._check_segment(segment, None if found is None else found.size)
        oldest = self._client.now() - ORPHAN_S
        for key, one in there.items():
            self._find(
                "orphan-segment",
                key[len(prefix) :],
                "nothing names it: its upload has not ended",
                fix=partial(self._drop_orphan, key) if one.modified < oldest else None,
                level="leftover",
                remedy=None if one.modified < oldest else "wait: it may still be named",
            )

    def _find(
        self,
        kind: str,
        path: str,
        detail: str,
        remedy: str | None = None,
        *,
        fix: Any = None,
        level: Any = "fault",
        count: int = 1,
    ) -> None:
        said = RUN_REPAIR if remedy is None else remedy
        self._report.findings.append(Finding(kind, level, path, detail, said, count, fix=fix))

    def _delete(self, key: str) -> None:
        self._client.delete([key])

    def _remove(self, segment: HeldSegment) -> None:
        self._archive.remove_from(self._held.directory, [segment.place], list(segment.names))

    # One segment ------------------------------------------------------------

    def _check_segment(self, segment: HeldSegment, size: int | None) -> None:
        name = str(segment.name)
        if size is None:
            size = self._size_of(segment)
        if size is None and not self._named(segment):
            self._report.records.dead += len(segment.rows)  # deleted meanwhile
            return
        if size is None:
            self._find(
                "segment-missing",
                name,
                "the segment that it names is not there",
                fix=partial(self._remove, segment),
            )
            return
        entries = self._entries(segment)
        if entries is None:
            return
        records = self._report.records
        live = segment.rows.live()
        alive = set(segment.rows.array["slot"][live].tolist())
        records.dead += len(segment.rows) - len(alive)
        known = np.isin(entries["algorithm"], list(KNOWN_ALGORITHMS)) & np.isin(
            entries["codec"], list(CODECS)
        )
        records.unknown += int((~known).sum())
        mine = entries[known & np.isin(entries["slot"], list(alive))]
        keyed = (mine["algorithm"] == ALGORITHM_KEYED_BLAKE3) & (self._key is None)
        records.keyed += int(keyed.sum())
        self._verify(segment, mine[~keyed])

    def _entries(self, segment: HeldSegment) -> Entries | None:
        """All records that the segment's slices name; ``None`` if they cannot be read."""
        found: list[Entries] = []
        for name in segment.names:
            try:
                entries, bad = self._slice(name)
            except S3Error as error:
                if error.fault is not Fault.MISSING:
                    raise
                return None  # deleted meanwhile
            except LifeboatError as error:
                newer = "newer" in str(error)
                self._find(
                    "slice-damaged",
                    str(name),
                    str(error),
                    "upgrade lifeboatcache-core" if newer else None,
                    level="skipped" if newer else "fault",
                    fix=None if newer else partial(self._remove, segment),
                )
                return None
            if bad:
                self._find(
                    "entry-bad",
                    str(name),
                    "entries that do not match their checksum: these blocks are not found",
                    count=bad,
                    fix=partial(self._rewrite, name, entries),
                )
            found.append(entries[entries["kind"] == KIND_RECORD])
        together = np.concatenate(found) if found else np.zeros(0, dtype=ENTRY)
        _, first = np.unique(together["slot"], return_index=True)
        once: Entries = together[first]
        return once

    def _size_of(self, segment: HeldSegment) -> int | None:
        """What a listing does not have may be there: it may lag."""
        try:
            return self._client.size_of(self._names.segment(self._held.directory, *segment.place))
        except S3Error as error:
            if error.fault is not Fault.MISSING:
                raise
            return None

    def _named(self, segment: HeldSegment) -> bool:
        """Whether the feed names a segment still: what names it goes first."""
        for name in segment.names:
            try:
                self._client.size_of(self._names.in_feed(self._held.directory, name))
            except S3Error as error:
                if error.fault is not Fault.MISSING:
                    raise
            else:
                return True
        return False

    def _drop_orphan(self, key: str) -> None:
        """Delete a segment if a second listing names it as little as the first."""
        if self._feed is None:
            self._feed = {
                self._names.segment(self._held.directory, name.writer, name.number)
                for name in self._archive.feed(self._held.directory)
            }
        if key not in self._feed:
            self._delete(key)

    def _slice(self, name: FeedName) -> tuple[Entries, int]:
        """What a slice holds; a verdict that drops data has to be certain."""
        key = self._names.in_feed(self._held.directory, name)
        with contextlib.suppress(FormatError):
            found = unpack_slice(self._client.get(key), self._held.digest, name)
            if not found[1]:
                return found
        return unpack_slice(self._client.get(key), self._held.digest, name)

    def _rewrite(self, name: FeedName, entries: Entries) -> None:
        data = pack_slice(self._held.digest, name.writer, name.number, entries)
        self._client.put(self._names.in_feed(self._held.directory, name), data)

    def _verify(self, segment: HeldSegment, entries: Entries) -> None:
        entries = entries[np.argsort(entries["offset"], kind="stable")]
        self._progress.add(total=int(entries["stored_length"].sum()))
        bad: list[Any] = []
        unreadable = 0
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3 check") as pool:
            runs = [entries[first:last] for first, last in request_runs(entries)]
            for run, verdicts in zip(
                runs, pool.map(partial(self._verify_run, segment), runs), strict=True
            ):
                for entry, good in zip(run, verdicts, strict=True):
                    if good:
                        self._report.records.verified += 1
                        self._report.verified_bytes += int(entry["stored_length"])
                    elif good is None:
                        unreadable += 1
                    else:
                        bad.append(entry)
        path = f"{segment.place[0].hex()}.{segment.place[1]:08d}.segment"
        if unreadable and self._size_of(segment) is None and not self._named(segment):
            self._report.records.dead += unreadable  # deleted meanwhile
        elif unreadable:
            self._report.records.unreadable += unreadable
            self._find(
                "record-unreadable",
                path,
                "the server does not return these bytes",
                "check the network and the server, then run it again",
                count=unreadable,
            )
        if bad:
            self._report.records.bad += len(bad)
            self._find(
                "record-corrupt",
                path,
                "what is stored does not match its checksum: it is never served",
                count=len(bad),
                fix=partial(self._bury, segment, bad),
            )

    def _verify_run(self, segment: HeldSegment, run: Entries) -> list[bool | None]:
        """Whether each record is right; ``None`` where it could not be read."""
        verdicts: list[bool | None] = [None] * run.shape[0]
        if self._stop.is_set():
            return verdicts
        begin = int(run["offset"][0])
        end = int(run["offset"][-1]) + int(run["stored_length"][-1])
        into = memoryview(bytearray(end - begin))
        key = self._names.segment(self._held.directory, *segment.place)
        for _ in range(2):  # a verdict that drops data has to be certain
            try:
                self._client.read(key, begin, into)
            except S3Error as error:
                short = error.fault is Fault.MISSING and self._size_of(segment) is not None
                return [False if short else None] * run.shape[0]
            verdicts = [self._right(entry, into, begin) for entry in run]
            if all(verdicts):
                break
        self._progress.add(done=int(run["stored_length"].sum()))
        return verdicts

    def _right(self, entry: Any, data: memoryview, begin: int) -> bool:
        bound = self._binding.pack(
            entry["key"].tobytes(),
            int(entry["layout"]),
            int(entry["raw_length"]),
            int(entry["stored_length"]),
            int(entry["codec"]),
            int(entry["algorithm"]),
        )
        at = int(entry["offset"]) - begin
        payload = data[at : at + int(entry["stored_length"])]
        found = payload_checksum(bound, [payload], key=self._key)
        return bool(found == entry["payload_checksum"].tobytes())

    def _bury(self, segment: HeldSegment, bad: list[Any]) -> None:
        """Declare records dead, in a name of one's own."""
        dead = np.zeros(len(bad), dtype=ENTRY)
        dead["kind"] = KIND_TOMBSTONE
        dead["payload_checksum"] = np.void(segment.place[0])
        dead["segment"] = segment.place[1]
        for at, entry in enumerate(bad):
            dead["key"][at], dead["slot"][at] = entry["key"], entry["slot"]
        writer = new_writer_id()
        name = FeedName(int(self._client.now()), writer, 0, 0, "dead")
        data = pack_slice(self._held.digest, writer, 0, dead)
        self._client.put(self._names.in_feed(self._held.directory, name), data)
