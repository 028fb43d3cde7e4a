"""Reading journals, dead bitmaps and access logs of a filesystem target."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.access import parse_accesses
from lifeboat_cache.format.bitmap import dead_slots
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_ACCESS,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    FileHeader,
)
from lifeboat_cache.format.journal import (
    ENTRY,
    ENTRY_BYTES,
    KIND_RECORD,
    KIND_TOMBSTONE,
    Entries,
    parse_entries,
)
from lifeboat_cache.targets.base import JournalPage, Place
from lifeboat_cache.targets.direct import ALIGNMENT
from lifeboat_cache.targets.layout import parse_name, segment_name, writer_alive

__all__ = ["JournalReader"]

#: Entries read and checked in one go: about 2 ms of work, after which other
#: threads get the interpreter.
_PAGE_ENTRIES = 2048

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

_NO_ENTRIES: Entries = np.zeros(0, dtype=ENTRY)


class _Journal:
    """How far a journal has been read."""

    __slots__ = ("index", "torn", "valid", "writer")

    def __init__(self, writer: bytes) -> None:
        self.writer = writer
        self.index = 0
        self.valid = False
        self.torn = False


class JournalReader:
    """Reads what the writers of one namespace directory have journaled.

    Parameters
    ----------
    directory
        The namespace's directory; may not exist yet.
    namespace
        Its 32-byte digest; files of another namespace are skipped.
    """

    def __init__(self, directory: Path, namespace: bytes) -> None:
        self._directory = directory
        self._namespace = namespace
        self._journals: dict[str, _Journal] = {}

    def poll(self, skip: bytes | None = None) -> Iterator[JournalPage]:
        """See :meth:`TargetReader.poll`."""
        own = "" if skip is None else skip.hex()
        try:
            names = sorted(os.listdir(self._directory))
        except OSError:
            return
        for name in names:
            parsed = parse_name(name)
            if parsed is None or parsed.kind != "journal" or parsed.writer == own:
                continue
            journal = self._journals.setdefault(
                parsed.writer, _Journal(bytes.fromhex(parsed.writer))
            )
            try:
                yield from self._read_journal(self._directory / name, journal)
            except NewerFormatError:
                continue  # not ours to judge
            except FormatError:
                if not journal.torn and not writer_alive(self._directory, parsed.writer):
                    journal.torn = True
                    yield JournalPage(journal.writer, _NO_ENTRIES, 1)
            except OSError:
                continue  # it may be readable at the next poll

    def _read_journal(self, path: Path, journal: _Journal) -> Iterator[JournalPage]:
        fd = os.open(path, _OPEN)
        try:
            if not journal.valid:
                header = FileHeader.unpack(os.pread(fd, HEADER_BYTES, 0), MAGIC_JOURNAL, path.name)
                if header.namespace != self._namespace or header.writer != journal.writer:
                    raise FormatError(f"{path.name}: the header names another writer; skipped")
                journal.valid = True
            dead = False
            while True:
                at = HEADER_BYTES + journal.index * ENTRY_BYTES
                data = os.pread(fd, _PAGE_ENTRIES * ENTRY_BYTES, at)
                whole = len(data) // ENTRY_BYTES
                if not data:
                    return
                entries, bad = parse_entries(data, journal.writer, journal.index, self._namespace)
                last_page = whole < _PAGE_ENTRIES
                if last_page:
                    tail = len(data) % ENTRY_BYTES > 0
                    if (bad or tail) and not dead:
                        dead = not writer_alive(self._directory, journal.writer.hex())
                        if dead:  # read what it finished before it died
                            continue
                    if dead:
                        # Nobody will ever finish it.
                        bad += int(tail and not journal.torn)
                        journal.torn = journal.torn or tail
                    elif bad:
                        # What is bad at the very end may still be being written:
                        # look again next time, and judge then.
                        while whole and not self._entry_good(data, whole - 1, journal):
                            whole -= 1
                            bad -= 1
                journal.index += whole
                kept, misplaced = self._placed(entries, journal.writer)
                if kept.shape[0] or bad or misplaced:
                    yield JournalPage(journal.writer, kept, bad + misplaced)
                if last_page:
                    return
        finally:
            os.close(fd)

    def _entry_good(self, data: bytes, number: int, journal: _Journal) -> bool:
        one = data[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        _, bad = parse_entries(one, journal.writer, journal.index + number, self._namespace)
        return bad == 0

    def _placed(self, entries: Entries, writer: bytes) -> tuple[Entries, int]:
        """Leave out records that are dead, gone, or not inside their segment."""
        keep = np.zeros(entries.shape[0], dtype=bool)
        misplaced = 0
        keep[entries["kind"] == KIND_TOMBSTONE] = True
        records = entries["kind"] == KIND_RECORD
        for segment in np.unique(entries["segment"][records]).tolist():
            # Not remembered from page to page: a living writer's segment grows.
            size, dead = self._extent(writer, segment)
            mine = records & (entries["segment"] == segment)
            if not size:  # purged: nothing is wrong, nothing is there
                continue
            offset = entries["offset"]
            inside = (
                (offset >= HEADER_BYTES)
                & (offset % ALIGNMENT == 0)
                & (
                    entries["stored_length"]
                    <= np.uint64(size) - np.minimum(offset, np.uint64(size))
                )
            )
            slot = entries["slot"]
            marked = (
                dead[np.minimum(slot, dead.shape[0] - 1)] & (slot < dead.shape[0])
                if dead.shape[0]
                else np.zeros(entries.shape[0], dtype=bool)
            )
            misplaced += int((mine & ~inside).sum())
            keep |= mine & inside & ~marked
        kept: Entries = entries[keep]
        return kept, misplaced

    def _extent(self, writer: bytes, segment: int) -> tuple[int, npt.NDArray[np.bool_]]:
        """A segment's size in bytes (0 if it has gone) and its dead slots."""
        none: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        try:
            size = os.stat(self._directory / segment_name(writer.hex(), segment)).st_size
        except OSError:
            return 0, none
        name = segment_name(writer.hex(), segment, "dead")
        try:
            data = (self._directory / name).read_bytes()
            header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_DEAD, name)
        except (OSError, FormatError):
            return size, none
        if (header.namespace, header.writer, header.segment) != (
            self._namespace,
            writer,
            segment,
        ):
            return size, none
        return size, dead_slots(data[HEADER_BYTES:])

    def declared_dead(self, places: Sequence[Place], slots: Sequence[int]) -> list[bool]:
        """See :meth:`TargetReader.declared_dead`."""
        out = []
        for place, slot in zip(places, slots, strict=True):
            _, dead = self._extent(place.writer, place.segment)
            out.append(slot < dead.shape[0] and bool(dead[slot]))
        return out

    def accesses(self) -> Iterator[Entries]:
        """See :meth:`TargetReader.accesses`."""
        try:
            names = sorted(os.listdir(self._directory))
        except OSError:
            return
        for name in names:
            parsed = parse_name(name)
            if parsed is None or parsed.kind != "access":
                continue
            with contextlib.suppress(OSError, FormatError):
                data = (self._directory / name).read_bytes()
                header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_ACCESS, name)
                if header.namespace == self._namespace:
                    yield parse_accesses(data[HEADER_BYTES:])
