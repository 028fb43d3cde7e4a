"""What a storage target does, apart from how it does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome

if TYPE_CHECKING:
    from lifeboat_cache.store.io_task import IoTask

__all__ = [
    "JournalPage",
    "NamespaceInfo",
    "OpenFile",
    "Place",
    "PurgeReport",
    "Reservation",
    "Target",
    "TargetReader",
    "TargetWriter",
    "Usage",
    "WriterInfo",
]


@dataclass(frozen=True)
class Usage:
    """Space on a target, in bytes.

    Attributes
    ----------
    used
        What all writers of the target have allocated together.
    capacity
        What they may allocate; ``None`` = only the reserve limits them.
    free
        What the filesystem has left.
    reserve
        What the filesystem must keep free.
    """

    used: int
    capacity: int | None
    free: int
    reserve: int

    def refusal(self, wanted: int) -> Outcome | None:
        """Why ``wanted`` more bytes may not be stored, or ``None`` if they may."""
        if self.capacity is not None and self.used + wanted > self.capacity:
            return Outcome.FULL
        if self.free - wanted < self.reserve:
            return Outcome.RESERVE
        return None


@dataclass(frozen=True)
class WriterInfo:
    """One writer (a process's life) in a namespace; sizes in bytes, times in seconds."""

    writer: str
    alive: bool
    owner: str
    segments: int
    blocks: int
    bytes: int
    created: float
    last_used: float


@dataclass(frozen=True)
class NamespaceInfo:
    """What a target holds for one namespace; sizes in bytes, times in seconds."""

    digest: str
    identity: dict[str, Any]
    display: dict[str, Any]
    writers: tuple[WriterInfo, ...]
    problems: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """Journal entries of all writers, an upper bound of the blocks served."""
        return sum(writer.blocks for writer in self.writers)

    @property
    def bytes(self) -> int:
        """Bytes allocated on disk."""
        return sum(writer.bytes for writer in self.writers)

    @property
    def created(self) -> float:
        """When the oldest writer started, 0.0 if unknown.

        A writer that has only just begun, or lost its journal, does not say.
        """
        return min((one.created for one in self.writers if one.created > 0), default=0.0)

    @property
    def last_used(self) -> float:
        """When something was last written or read, 0.0 if unknown."""
        return max((writer.last_used for writer in self.writers), default=0.0)


@dataclass
class PurgeReport:
    """What a purge removed (or would remove), and what it left and why."""

    files: int = 0
    bytes: int = 0
    blocks: int = 0
    kept: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class JournalPage:
    """Entries newly read from one writer's journal.

    Attributes
    ----------
    writer
        The writer's 16-byte identity.
    entries
        ``ENTRY`` array of intact entries (records and tombstones) whose payload
        lies inside an existing segment and is not marked dead.
    bad
        Entries skipped because their checksum or their place is wrong.
    """

    writer: bytes
    entries: Entries
    bad: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record's stored bytes lie (``offset`` and ``length`` in bytes)."""

    writer: bytes
    segment: int
    offset: int
    length: int


class OpenFile(Protocol):
    """An open segment. Its descriptors stay open as long as the object lives.

    Attributes
    ----------
    fd
        For buffered I/O.
    direct_fd
        For O_DIRECT; -1 if the filesystem does not take it.
    """

    @property
    def fd(self) -> int: ...
    @property
    def direct_fd(self) -> int: ...


@dataclass(frozen=True)
class Reservation:
    """Room for some consecutive entries in one segment, or why there is none.

    Attributes
    ----------
    first, last
        The entries ``first:last`` of those that were to get room.
    file
        The segment, open for writing; ``None`` if the room was refused.
    refusal
        Why it was refused.
    """

    first: int
    last: int
    file: OpenFile | None = None
    refusal: Outcome = Outcome.PENDING


class TargetWriter(ABC):
    """Appends to one namespace on behalf of one process."""

    #: 16-byte identity of this writer.
    writer: bytes

    #: Whether its files were removed under it. Nothing it appends can be kept any
    #: more: close it and start another.
    lost: bool = False

    @abstractmethod
    def append(self, entries: Entries, buffers: BlockBuffers, blocks: Sequence[int]) -> list[int]:
        """Write payloads, then their journal entries.

        Parameters
        ----------
        entries
            ``ENTRY`` array ``(n,)`` complete but for ``segment``, ``offset``,
            ``slot`` and ``checksum``, which are filled in here.
        buffers
            The memory of the batch.
        blocks
            Which block of ``buffers`` each entry describes.

        Returns
        -------
        list of int
            An :class:`Outcome` for each entry. ``OK`` means that the block
            survives the death of this process.
        """

    @abstractmethod
    def reserve(self, entries: Entries, part_bytes: int) -> list[Reservation]:
        """Give records room, in their order, without writing anything.

        Parameters
        ----------
        entries
            As for :meth:`append`; ``segment``, ``offset`` and ``slot`` are filled in.
        part_bytes
            A reservation covers about so many bytes.
        """

    @abstractmethod
    def commit(self, entries: Entries, files: Sequence[OpenFile]) -> Outcome:
        """Journal records whose payloads are written.

        Parameters
        ----------
        entries
            Complete but for ``checksum``.
        files
            The segments that they lie in, from :meth:`reserve`.

        Returns
        -------
        Outcome
            ``OK`` when they survive the death of this process; otherwise none of
            them counts.
        """

    @abstractmethod
    def settle(self, entries: Entries) -> None:
        """Say that nothing of a reservation is under way any more, whatever became of it.

        Until then its bytes count against the capacity and the reserve, beside what
        the target has measured. Called once per reservation.
        """

    @abstractmethod
    def give_back(self, entries: Entries, file: OpenFile) -> None:
        """Give the room of a whole reservation back, whose payloads were not written."""

    @abstractmethod
    def bury(self, entries: Entries) -> bool:
        """Append tombstones, whose kind and places are already set; whether that was done.

        Faults are swallowed.
        """

    @abstractmethod
    def log_access(self, accesses: Entries) -> None:
        """Append an ``ACCESS`` array to this process's access log. Faults are swallowed."""

    @abstractmethod
    def beat(self) -> None:
        """Show other hosts that this writer lives, if that is to be shown. Faults are swallowed.

        To be called every few seconds; sets :attr:`lost` when it could not for too long.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish and let go of every file. Idempotent."""


class TargetReader(ABC):
    """Reads one namespace: journals while recovering and tailing, payloads for loads."""

    @abstractmethod
    def poll(self, skip: bytes | None = None) -> Iterator[JournalPage]:
        """What other writers' journals hold beyond what was read before.

        Parameters
        ----------
        skip
            A writer to leave out (one's own).
        """

    @abstractmethod
    def read(
        self, places: Sequence[Place], buffers: BlockBuffers, blocks: Sequence[int]
    ) -> list[int]:
        """Read stored bytes into the caller's memory, unverified.

        Returns an :class:`Outcome` per place: ``OK`` (all bytes are there),
        ``MISSING`` (file or bytes have gone) or ``FAILED``. Does not return
        before the last system call on the memory has.
        """

    @abstractmethod
    def open_segment(self, writer: bytes, segment: int) -> OpenFile:
        """A segment, open for reading.

        Raises
        ------
        FormatError
            If its header is not that of this segment.
        OSError
            If it cannot be opened; ``ENOENT`` or ``ESTALE`` if it has gone.
        """

    def fetch(
        self,
        tasks: list[IoTask],
        ready: Callable[[list[IoTask]], None],
        failed: Callable[[list[IoTask]], None],
    ) -> None:
        """Bring what tasks read to where they can read it.

        Parameters
        ----------
        tasks
            Loads from segments that :meth:`open_segment` has opened.
        ready
            Called with tasks that can be run now; from any thread, for each of them once.
        failed
            Called instead with those of which nothing was brought; their outcomes are filled in.
        """
        del failed
        ready(tasks)

    def settle(self, task: IoTask) -> None:
        """Say that a task is over that went through :meth:`fetch`.

        Its outcomes are changed where what it has read is not what it should have read.
        """
        del task

    @abstractmethod
    def declared_dead(self, places: Sequence[Place], slots: Sequence[int]) -> list[bool]:
        """Whether the record at each place, of that slot, is marked dead by now.

        Asked when bytes do not match their checksum: what a janitor has reclaimed
        after this process indexed it is missing, not corrupt.
        """

    @property
    @abstractmethod
    def doubts(self) -> int:
        """How many records are doubtful now."""

    @abstractmethod
    def believe(self, writer: bytes, segment: int, slot: int) -> None:
        """Say that a record was read and is right: it is not doubtful any more."""

    @abstractmethod
    def doubtful(self, writer: bytes, segment: int, slot: int) -> bool:
        """Whether a record that could not be read, or does not match, may only not be seen yet.

        On mounts that other hosts write to: it is missing now, and may be there in a while. What
        was read is forgotten, so that it is read anew.
        """

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the last poll went through, and could read every journal to its end."""

    @abstractmethod
    def poll_dead(self) -> Iterator[tuple[bytes, int, npt.NDArray[np.bool_]]]:
        """Segments in which records have been marked dead: writer, segment, bool per slot."""

    @abstractmethod
    def take_vanished(self) -> list[tuple[bytes, int | None]]:
        """Segments, or with ``None`` whole writers, that were there and are no more."""

    @abstractmethod
    def accesses(self) -> Iterator[Entries]:
        """``ACCESS`` arrays from all access logs of the namespace."""

    @abstractmethod
    def close(self) -> None:
        """Let go of every file. Idempotent."""


class Target(ABC):
    """A place that keeps segments and journals."""

    #: Name from the configuration.
    name: str

    #: Kind of storage, as in ``storage.tiers[].type``; decides its rung, unless ``rung`` does.
    type: str = "filesystem"

    #: The rung that the configuration puts it on; ``None``: that of its type.
    rung: Literal["local", "shared", "archive"] | None = None

    @property
    @abstractmethod
    def location(self) -> str:
        """Where it is, for people."""

    @property
    def special(self) -> dict[str, object]:
        """What else whoever looks after it must know: JSON values by name; empty as a rule."""
        return {}

    @abstractmethod
    def probe(self) -> None:
        """Create what is missing, then write, read back and delete a file.

        Raises
        ------
        TargetError
            If the target cannot be used; the message says why and what to do.
        """

    def identity(self) -> Hashable:
        """Which place it is: another value after something else has come there.

        Raises
        ------
        TargetError
            If it is not there any more.
        """
        return self.location

    @abstractmethod
    def usage(self) -> Usage:
        """Space now. May scan the target."""

    @abstractmethod
    def writer(self, namespace: Namespace) -> TargetWriter:
        """Start a writer; creates the namespace when needed."""

    @abstractmethod
    def reader(self, namespace: Namespace) -> TargetReader:
        """Start a reader."""

    @abstractmethod
    def namespaces(self) -> list[NamespaceInfo]:
        """What the target holds, oldest first."""

    @abstractmethod
    def purge(
        self, digest: str, *, older_than_s: float | None = None, dry_run: bool = False
    ) -> PurgeReport:
        """Remove whole segments of dead writers.

        Parameters
        ----------
        digest
            The namespace's full hexadecimal digest.
        older_than_s
            Only segments last written more than so many seconds ago.
        dry_run
            Only count.
        """
