"""Moving records from one object to another before the first is deleted.

Records keep everything but their place. Their bytes are verified where that is possible, and
records that do not match are left behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from lifeboat_cache.checksum import ALGORITHM_KEYED_BLAKE3, Binding, payload_checksum
from lifeboat_cache.clock import coarse_time
from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_SEGMENT, FileHeader
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, Entries
from lifeboat_cache.janitor.rows import Bools, padded
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.inventory import HeldNamespace, HeldSegment, Place
from lifeboat_cache.s3.names import FeedName, Names
from lifeboat_cache.s3.slices import pack_slice, unpack_slice
from lifeboat_cache.targets.layout import new_writer_id
from lifeboat_cache.targets.segment_writer import SEGMENT_BYTES

__all__ = ["Moved", "Removal", "move_records", "request_runs"]

#: What lies between two records is read along with them up to so many bytes: a request costs
#: more than that.
_GAP_BYTES = 1 << 20

#: One request asks for so much at most, so many at a time.
_READ_BYTES = 16 << 20
_THREADS = 4


@dataclass
class Removal:
    """A segment that is to go, and which of its rows are to be moved first."""

    segment: HeldSegment
    kept: Bools


@dataclass
class Moved:
    """What became of it.

    Attributes
    ----------
    done
        Segments of which nothing is needed any more.
    written
        Names of the slices that were put.
    places
        Where records have gone: from writer, segment and slot to the same.
    records, bytes
        That were moved.
    corrupt
        Records that did not match.
    problems
        What could not be done and why, for people.
    """

    done: list[HeldSegment] = field(default_factory=list)
    written: list[FeedName] = field(default_factory=list)
    places: dict[tuple[bytes, int, int], tuple[bytes, int, int]] = field(default_factory=dict)
    records: int = 0
    bytes: int = 0
    corrupt: int = 0
    problems: list[str] = field(default_factory=list)


def move_records(
    client: S3Client,
    names: Names,
    held: HeldNamespace,
    removals: Sequence[Removal],
    *,
    scratch: Path,
    key: bytes | None,
    on_step: Callable[[], None] = lambda: None,
) -> Moved:
    """Move records of one namespace to new segments, in a name of their own.

    A segment counts as done only when the slice that names the copies has been put.

    Parameters
    ----------
    client, names
        The bucket.
    held
        The namespace.
    removals
        What to move.
    scratch
        A local directory for a segment that is being written.
    key
        The namespace's integrity key, if there is one here. Without it, records that it
        protects are moved unverified: whoever loads them verifies them.
    on_step
        Told again and again that it goes on.

    Raises
    ------
    S3Error
        If the bucket fails. What is done by then can be done again.
    OSError
        If ``scratch`` cannot be used.
    """
    return _Mover(client, names, held, scratch, key, on_step).run(removals)


class _Mover:
    def __init__(
        self,
        client: S3Client,
        names: Names,
        held: HeldNamespace,
        scratch: Path,
        key: bytes | None,
        on_step: Callable[[], None],
    ) -> None:
        self._client, self._names, self._held = client, names, held
        self._scratch, self._key, self._on_step = scratch, key, on_step
        self._binding = Binding(held.digest)
        self._writer = new_writer_id()
        self._number = -1
        self._file: IO[bytes] | None = None
        self._end = 0
        self._entries: list[Entries] = []
        self._waiting: list[HeldSegment] = []  # whose copies are not named yet
        self._from: list[tuple[bytes, int, int]] = []
        self.moved = Moved()

    def run(self, removals: Sequence[Removal]) -> Moved:
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            for removal in removals:
                self._on_step()
                if not removal.kept.any():
                    self.moved.done.append(removal.segment)
                    continue
                self._copy(removal)
                if self._end >= SEGMENT_BYTES:
                    self._finish()
            self._finish()
        finally:
            if self._file is not None:
                self._file.close()
        return self.moved

    def _copy(self, removal: Removal) -> None:
        segment = removal.segment
        try:
            wanted = self._wanted(removal)
            for entries, pieces in self._read(segment, wanted):
                self._append(segment, entries, pieces)
        except (FormatError, FileNotFoundError) as error:
            # It has gone, or is not what it was: another node's janitor was faster.
            self.moved.problems.append(f"{segment.name}: {error}")
            return
        except S3Error as error:
            if error.fault is not Fault.MISSING:
                raise
            self.moved.problems.append(f"{segment.name}: {error}")
            return
        self._waiting.append(segment)

    def _wanted(self, removal: Removal) -> Entries:
        """The entries of the rows that are kept, by their places."""
        segment = removal.segment
        slots = segment.rows.array["slot"][removal.kept]
        found: list[Entries] = []
        for name in segment.names:
            data = self._client.get(self._names.in_feed(self._held.directory, name))
            entries, _ = unpack_slice(data, self._held.digest, name)
            mine = (entries["kind"] == KIND_RECORD) & np.isin(entries["slot"], slots)
            found.append(entries[mine])
        together = np.concatenate(found) if found else np.zeros(0, dtype=ENTRY)
        _, first = np.unique(together["slot"], return_index=True)
        chosen = together[first]
        if chosen.shape[0] < np.unique(slots).shape[0]:
            raise FormatError("its journal was damaged on the way: it stays for now")
        wanted: Entries = chosen[np.argsort(chosen["offset"], kind="stable")]
        return wanted

    def _read(
        self, segment: HeldSegment, wanted: Entries
    ) -> Iterator[tuple[Entries, list[memoryview]]]:
        """Entries and their bytes, some at a time."""
        key = self._names.segment(self._held.directory, *segment.place)
        runs = list(request_runs(wanted))

        def read(run: tuple[int, int]) -> memoryview:
            first, last = run
            begin = int(wanted["offset"][first])
            end = int(wanted["offset"][last - 1]) + int(wanted["stored_length"][last - 1])
            into = memoryview(bytearray(end - begin))
            self._client.read(key, begin, into)
            return into

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3 move") as pool:
            for at in range(0, len(runs), _THREADS):
                some = runs[at : at + _THREADS]
                for (first, last), data in zip(some, pool.map(read, some), strict=True):
                    self._on_step()
                    entries = wanted[first:last]
                    begin = int(entries["offset"][0])
                    yield (
                        entries,
                        [
                            data[offset - begin : offset - begin + length]
                            for offset, length in zip(
                                entries["offset"].tolist(),
                                entries["stored_length"].tolist(),
                                strict=True,
                            )
                        ],
                    )

    def _right(self, entry: Entries, payload: memoryview) -> bool:
        keyed = int(entry["algorithm"]) == ALGORITHM_KEYED_BLAKE3
        if keyed and self._key is None:
            return True
        bound = self._binding.pack(
            entry["key"].tobytes(),
            int(entry["layout"]),
            int(entry["raw_length"]),
            int(entry["stored_length"]),
            int(entry["codec"]),
            int(entry["algorithm"]),
        )
        found = payload_checksum(bound, [payload], key=self._key)
        return bool(found == entry["payload_checksum"].tobytes())

    def _append(self, segment: HeldSegment, entries: Entries, pieces: list[memoryview]) -> None:
        file = self._file or self._begin()
        writer, number = segment.place
        for position, piece in enumerate(pieces):
            entry = entries[position : position + 1].copy()
            payload = piece
            if not self._right(entry[0], payload):
                # What drops a record for good has to be certain.
                payload = self._read_again(segment, entry[0])
                if not self._right(entry[0], payload):
                    self.moved.corrupt += 1
                    continue
            self._from.append((writer, number, int(entry["slot"][0])))
            entry["segment"], entry["offset"] = self._number, self._end
            entry["slot"] = len(self._entries)  # one record each
            self._entries.append(entry)
            file.write(payload)
            file.write(bytes(int(padded(entry["stored_length"])[0]) - payload.nbytes))
            self._end += int(padded(entry["stored_length"])[0])
            self.moved.records += 1
            self.moved.bytes += payload.nbytes

    def _read_again(self, segment: HeldSegment, entry: Entries) -> memoryview:
        into = memoryview(bytearray(int(entry["stored_length"])))
        key = self._names.segment(self._held.directory, *segment.place)
        self._client.read(key, int(entry["offset"]), into)
        return into

    def _begin(self) -> IO[bytes]:
        self._number += 1
        # Without a name: nothing is left of it when this process dies.
        file: IO[bytes] = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115
        header = FileHeader(
            MAGIC_SEGMENT, self._held.digest, self._writer, self._number, coarse_time()
        )
        file.write(header.pack())
        self._file, self._end = file, HEADER_BYTES
        return file

    def _finish(self) -> None:
        """Put what was written, then what names it; only then is it there."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.flush()
                if self._entries:
                    self._put(file)
        self._entries, self._from, self._end = [], [], 0
        self.moved.done += self._waiting
        self._waiting = []

    def _put(self, file: IO[bytes]) -> None:
        directory = self._held.directory
        place: Place = self._writer, self._number
        self._client.put_file(self._names.segment(directory, *place), file.fileno(), self._end)
        self._on_step()
        entries = np.concatenate(self._entries)
        data = pack_slice(self._held.digest, *place, entries)
        name = FeedName(int(self._client.now()), *place, self._end)
        self._client.put(self._names.in_feed(directory, name), data)
        self.moved.written.append(name)
        for slot, source in enumerate(self._from):
            self.moved.places[source] = (*place, slot)


def request_runs(entries: Entries) -> Iterator[tuple[int, int]]:
    """Records that one request reads, as first and last but one; they are in order."""
    begins = entries["offset"].astype(np.int64)
    ends = begins + entries["stored_length"]
    first = 0
    for at in range(1, entries.shape[0] + 1):
        if (
            at == entries.shape[0]
            or begins[at] - ends[at - 1] > _GAP_BYTES
            or ends[at] - begins[first] > _READ_BYTES
        ):
            yield first, at
            first = at
