"""Reading journals, dead bitmaps and access logs of a filesystem target."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.errors import FormatError, NewerFormatError
from lifeboat_cache.format.access import ACCESS_BYTES, parse_accesses
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_ACCESS, MAGIC_JOURNAL, FileHeader
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES, Entries, intact_entries, parse_entries
from lifeboat_cache.targets.base import JournalPage, Place
from lifeboat_cache.targets.directory_listing import DirectoryListing
from lifeboat_cache.targets.files import (
    GONE,
    NotAFileError,
    close_file,
    open_file,
    read_range,
    refresh_attributes,
)
from lifeboat_cache.targets.holes import data_start
from lifeboat_cache.targets.layout import DEAD_GENERATION, segment_name
from lifeboat_cache.targets.segment_extents import SegmentExtents, stamp_of
from lifeboat_cache.targets.traits import traits_of
from lifeboat_cache.targets.writer_lock import writer_alive

__all__ = ["JournalReader"]

#: Entries read and checked in one go: about 2 ms of work, after which other threads get
#: the interpreter. Kernels do without it.
_PAGE_ENTRIES = 2048
_KERNEL_PAGE_ENTRIES = 8192

#: An access log is read in pieces of so many bytes.
_LOG_PAGE_BYTES = 4096 * ACCESS_BYTES

_NO_ENTRIES: Entries = np.zeros(0, dtype=ENTRY)

#: A journal that seems not to have grown is opened at every so many polls nevertheless:
#: a network filesystem may know a file's size only then.
_OPEN_ANYWAY = 16

#: Its writer is asked whether it lives after so many seconds, later less and less often.
_FIRST_PROBE_S = 10.0
_LAST_PROBE_S = 120.0

#: What another host has flushed, or had written when it died, is seen here after so many seconds
#: at the latest, whatever is remembered of its files.
_VISIBLE_S = 60.0

#: The generation before anything was looked at; no file has it.
_NEVER = (-1, -1, -1)


class _Journal:
    """How far a journal has been read."""

    __slots__ = (
        "checked",
        "dead_since",
        "idle",
        "index",
        "opened",
        "pending",
        "probe_at",
        "probe_s",
        "stamp",
        "stuck_at",
        "stuck_since",
        "torn",
        "valid",
        "writer",
    )

    def __init__(self, writer: bytes) -> None:
        self.writer = writer
        self.index = 0
        self.valid = False
        self.torn = False
        #: What the file looked like when it was read last.
        self.stamp: tuple[int, int, int] | None = None
        #: Something at its end, or in its header, may still change.
        self.pending = False
        #: Polls since it was opened.
        self.idle = 0
        #: Whether it was opened since all were.
        self.opened = False
        #: Whether its writer was asked for once.
        self.checked = False
        self.probe_at = 0.0
        self.probe_s = _FIRST_PROBE_S
        #: Since when its writer is known to be dead.
        self.dead_since: float | None = None
        #: At which entry it does not go on, and since when.
        self.stuck_at = -1
        self.stuck_since = 0.0

    def patient(self, now: float) -> bool:
        """Whether what cannot be read here may only not have got here yet, from another host."""
        if self.stuck_at != self.index:
            self.stuck_at, self.stuck_since = self.index, now
        return now - self.stuck_since < _VISIBLE_S


class JournalReader:
    """Reads what the writers of one namespace directory have journaled.

    A poll lists the directory if it has changed, looks at the journals of writers that
    may live, and opens those that have grown, and all once in a while; that of a dead
    writer is read to its end once. At most one file is open at a time. One thread polls.

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
        self._listing = DirectoryListing(directory)
        self._extents = SegmentExtents(directory, namespace, self._listing.dead)
        self._unfinished: dict[str, _Journal] = {}
        self._finished: set[str] = set()
        self._vanished: list[tuple[bytes, int | None]] = []
        self._generation: tuple[int, int, int] | None = _NEVER
        self._complete = False
        self._shared = traits_of(directory).shared

    @property
    def complete(self) -> bool:
        """Whether the last poll ended a round: every journal was opened and read to its end.

        By then every record is known that was journaled before the round began. A round
        takes one poll or a few: see above what is not opened at each.
        """
        return self._complete

    def poll(self, skip: bytes | None = None) -> Iterator[JournalPage]:
        """See :meth:`TargetReader.poll`."""
        own = "" if skip is None else skip.hex()
        self._complete = False
        complete = self._look()
        for writer in self._listing.journals - self._unfinished.keys() - self._finished:
            if writer != own:
                self._unfinished[writer] = _Journal(bytes.fromhex(writer))
        for writer in sorted(self._unfinished):
            journal = self._unfinished.get(writer)
            if journal is None or writer == own:
                continue
            path = self._directory / f"{writer}.journal"
            try:
                yield from self._follow(path, journal)
            except NewerFormatError:
                continue  # not ours to judge
            except FormatError:
                journal.pending = not journal.torn
                if not journal.torn and self._ended(journal):
                    journal.torn = True
                    journal.pending = False
                    yield JournalPage(journal.writer, _NO_ENTRIES, 1)
            except FileNotFoundError:
                continue  # the next listing says so too
            except NotAFileError:
                journal.opened = True  # somebody else's, with nothing of ours in it
                continue
            except OSError:
                journal.stamp = None
                journal.opened = False
                complete = False  # it may be readable at the next poll
        living = [journal for name, journal in self._unfinished.items() if name != own]
        self._complete = complete and all(journal.opened for journal in living)
        if self._complete:
            for journal in living:
                journal.opened = False

    def _look(self) -> bool:
        """List the directory if it has changed; returns whether it could be read."""
        readable = self._listing.refresh()
        gone = self._listing.take_gone()
        journals = {name.writer for name in gone if name.kind == "journal"}
        for writer in sorted(journals):
            self._unfinished.pop(writer, None)
            self._finished.discard(writer)
            self._vanished.append((bytes.fromhex(writer), None))
        for name in gone:
            if name.kind == "segment" and name.writer not in journals:
                self._vanished.append((bytes.fromhex(name.writer), name.segment))
            elif name.kind == "dead":
                self._extents.forget(name.writer, name.segment)
        return readable

    def take_vanished(self) -> list[tuple[bytes, int | None]]:
        """What was there and is not there any more, as the polls since the last call noticed.

        Returns
        -------
        list
            Writer and segment of each segment that has gone, or writer and ``None`` if its
            journal has, and with it all of its records. Should a journal come back, it is
            read anew.
        """
        vanished, self._vanished = self._vanished, []
        return vanished

    # Journals -----------------------------------------------------------------

    def _follow(self, path: Path, journal: _Journal) -> Iterator[JournalPage]:
        """Read what is new in a journal, if there may be something."""
        now = time.monotonic()
        dead = False
        if not journal.checked or now >= journal.probe_at:
            # Before it is read: what a dead writer's journal holds then is all.
            dead = self._ended(journal)
            journal.checked = True
            journal.probe_at = now + journal.probe_s
            journal.probe_s = min(2 * journal.probe_s, _LAST_PROBE_S)
        journal.idle += 1
        if not (dead or journal.pending or journal.idle >= _OPEN_ANYWAY):
            if self._shared:
                refresh_attributes(path)
            if stamp_of(os.stat(path, follow_symlinks=False)) == journal.stamp:
                return
            journal.probe_at = now + _FIRST_PROBE_S
            journal.probe_s = _FIRST_PROBE_S
        journal.idle = 0
        dead = yield from self._read(path, journal, dead)
        if dead:
            writer = journal.writer.hex()
            self._unfinished.pop(writer, None)
            self._finished.add(writer)

    def _ended(self, journal: _Journal) -> bool:
        """Whether a writer is dead, and all that it has written can be seen."""
        if writer_alive(self._directory, journal.writer.hex()):
            journal.dead_since = None
            return False
        if not self._shared:
            return True
        now = time.monotonic()
        if journal.dead_since is None:
            journal.dead_since = now
        return now - journal.dead_since >= _VISIBLE_S

    def _read(
        self, path: Path, journal: _Journal, dead: bool
    ) -> Generator[JournalPage, None, bool]:
        """Read on; the generator returns whether the journal was read to its very end."""
        fd = open_file(path)
        try:
            journal.opened = True
            journal.stamp = stamp_of(os.fstat(fd))
            if not journal.valid:
                header = FileHeader.unpack(
                    read_range(fd, HEADER_BYTES, 0), MAGIC_JOURNAL, path.name
                )
                if header.namespace != self._namespace or header.writer != journal.writer:
                    raise FormatError(f"{path.name}: the header names another writer; skipped")
                journal.valid = True
            journal.pending = False
            self._extents.begin(journal.writer, whole=not journal.index)
            while True:
                page = _KERNEL_PAGE_ENTRIES if kernels.ready() else _PAGE_ENTRIES
                at = HEADER_BYTES + journal.index * ENTRY_BYTES
                data = read_range(fd, page * ENTRY_BYTES, at)
                whole = len(data) // ENTRY_BYTES
                if not data:
                    return dead
                entries, bad = parse_entries(data, journal.writer, journal.index, self._namespace)
                last_page = whole < page
                ready = self._ready(data[: whole * ENTRY_BYTES], entries, bad, journal)
                if ready < whole:
                    entries, bad, whole = entries[:ready], 0, ready
                    last_page = journal.pending = True
                elif last_page:
                    tail = len(data) % ENTRY_BYTES > 0
                    if (bad or tail) and not dead:
                        dead = self._ended(journal)
                        if dead:  # read what it finished before it died
                            continue
                    if dead:
                        # Nobody will ever finish it.
                        bad += int(tail and not journal.torn)
                        journal.torn = journal.torn or tail
                    else:
                        journal.pending = tail
                        # What is bad at the very end may still be being written:
                        # look again next time, and judge then.
                        while bad and whole and not self._entry_good(data, whole - 1, journal):
                            whole -= 1
                            bad -= 1
                            journal.pending = True
                journal.index += whole
                kept, misplaced = self._extents.placed(entries)
                if kept.shape[0] or bad or misplaced:
                    yield JournalPage(journal.writer, kept, bad + misplaced)
                if last_page and (not whole or journal.pending or journal.torn):
                    return dead and not journal.pending
        finally:
            close_file(fd)

    def _ready(self, data: bytes, entries: Entries, bad: int, journal: _Journal) -> int:
        """How many of the entries in ``data`` may be judged now.

        On a shared mount what is bad, or lies outside its segment, may be on its way: it is
        looked at again, for a while.
        """
        count = len(data) // ENTRY_BYTES
        if not self._shared:
            return count
        if not bad and self._extents.first_misplaced(entries) == count:
            return count
        if not journal.patient(time.monotonic()):
            return count
        every = np.frombuffer(data, dtype=ENTRY)
        good = intact_entries(every, journal.writer, journal.index, self._namespace)
        first = count if good.all() else int(np.argmin(good))
        return min(first, self._extents.first_misplaced(every[:first]))

    def _entry_good(self, data: bytes, number: int, journal: _Journal) -> bool:
        one = data[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        _, bad = parse_entries(one, journal.writer, journal.index + number, self._namespace)
        return bad == 0

    # Dead bitmaps -------------------------------------------------------------

    def poll_dead(self) -> Iterator[tuple[bytes, int, npt.NDArray[np.bool_]]]:
        """Dead bitmaps that may have changed since they were read last.

        Looks at them only when a janitor says that it has set bits.

        Yields
        ------
        writer, segment, dead
            Of which segment, and bool ``(slots,)``: which are dead. What is yielded may
            have been yielded before.
        """
        if self._shared:
            refresh_attributes(self._directory)
            refresh_attributes(self._directory / DEAD_GENERATION)
        try:
            generation = stamp_of(os.stat(self._directory / DEAD_GENERATION))
        except OSError:
            generation = None
        if generation == self._generation:
            return
        self._look()
        for writer, segment in sorted(self._listing.dead):
            if self._extents.changed(writer, segment):
                dead = self._extents.dead(bytes.fromhex(writer), segment, remember=True)
                if dead is not None and dead.any():
                    yield bytes.fromhex(writer), segment, dead
        self._generation = generation

    def declared_dead(self, places: Sequence[Place], slots: Sequence[int]) -> list[bool]:
        """See :meth:`TargetReader.declared_dead`."""
        known: dict[tuple[bytes, int], npt.NDArray[np.bool_] | None] = {}
        out = []
        for place, slot in zip(places, slots, strict=True):
            key = (place.writer, place.segment)
            if key not in known:
                known[key] = self._extents.dead(*key)
            dead = known[key]
            marked = dead is not None and slot < dead.shape[0] and bool(dead[slot])
            out.append(marked or (dead is None and self._reclaimed(*key)))
        return out

    def _reclaimed(self, writer: bytes, segment: int) -> bool:
        """Whether a segment was removed or is being removed, which its bitmap follows."""
        try:
            path = self._directory / segment_name(writer.hex(), segment)
            return os.stat(path).st_size < HEADER_BYTES
        except OSError as error:
            return error.errno in GONE

    # Access logs --------------------------------------------------------------

    def accesses(self) -> Iterator[Entries]:
        """See :meth:`TargetReader.accesses`."""
        self._look()
        for writer in sorted(self._listing.access):
            name = f"{writer}.access"
            with contextlib.suppress(OSError, FormatError):
                yield from self._read_log(name)

    def _read_log(self, name: str) -> Iterator[Entries]:
        fd = open_file(self._directory / name)
        try:
            header = FileHeader.unpack(read_range(fd, HEADER_BYTES, 0), MAGIC_ACCESS, name)
            if header.namespace != self._namespace:
                return
            # Where a janitor has read it, a living process's log is one large hole.
            at = data_start(fd, HEADER_BYTES)
            at = max(HEADER_BYTES, at - (at - HEADER_BYTES) % ACCESS_BYTES)
            while data := read_range(fd, _LOG_PAGE_BYTES, at):
                yield parse_accesses(data)
                at += len(data)
                if len(data) < _LOG_PAGE_BYTES:
                    return
        finally:
            close_file(fd)
