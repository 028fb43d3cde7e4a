"""The janitor: one run after the other over a filesystem target."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.names import codec_name
from lifeboat_cache.errors import FormatError, LifeboatError, NewerFormatError
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.integrity import IDENTITY_FIELD, IntegrityKey
from lifeboat_cache.janitor.accesses import AccessFolder
from lifeboat_cache.janitor.catalogue import Catalogue, Segment, Writer
from lifeboat_cache.janitor.copying import copy_segments
from lifeboat_cache.janitor.eviction import choose_victims
from lifeboat_cache.janitor.kinship import kinship
from lifeboat_cache.janitor.lease import JanitorLease
from lifeboat_cache.janitor.policy import JanitorClock, JanitorPolicy
from lifeboat_cache.janitor.reclaim import (
    Hole,
    dead_runs,
    erase,
    note_holes,
    punch,
    remove_segment,
    trim,
)
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.janitor.rows import Bools, padded
from lifeboat_cache.janitor.selection import Purged, Selection
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.direct import ALIGNMENT
from lifeboat_cache.targets.files import close_file, is_gone, open_file, read_document
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import (
    DEAD_GENERATION,
    FILE_MODE,
    JANITOR_LOCK,
    check_root,
    segment_name,
    write_atomically,
)
from lifeboat_cache.targets.published_usage import publish_usage
from lifeboat_cache.targets.server_clock import file_time
from lifeboat_cache.targets.traits import owned

__all__ = ["Janitor"]

_LATEST = (1 << 32) - 1

#: The growth of the store counts for the headroom for about this long.
_RATE_HALF_LIFE_S = 120.0

#: By so much, for a grace, the copies of a sparse segment may overshoot the capacity.
_LENT_BYTES = 256 << 20

#: The shortest run that is punched where records cannot be copied.
_SHORTEST_HOLE = 64 << 10

#: Who runs less often than this is no reason for a larger headroom.
_MOST_INTERVAL_S = 60.0


@dataclass
class _Namespace:
    """A namespace and what belongs to it."""

    catalogue: Catalogue
    folder: AccessFolder
    kin: int
    #: Its integrity key, and whether payloads can be verified with it.
    key: bytes | None = None
    verifiable: bool = True
    #: Whether its document was there.
    documented: bool = True
    news: bool = False  # dead bits that readers have not been told of


@dataclass
class _Plan:
    """Dead bits to set, by segment."""

    slots: list[tuple[Segment, npt.NDArray[np.int64]]] = field(default_factory=list)


class Janitor:
    """Keeps a target within its capacity and reserve, and tidy.

    All writers and namespaces of the directory are looked after together. Every
    step may be done again and only ever adds dead bits or removes what is dead, so
    that a janitor may be killed at any moment, and two at once do no harm.

    Parameters
    ----------
    target
        The target. Its ``capacity`` and ``reserve`` are what is kept.
    policy
        The settings.
    key
        The integrity key. Records of namespaces with another one can be evicted and
        reclaimed, but not copied, because they cannot be verified.
    clock
        Where the time comes from.
    on_step
        Told what is done next: a word, for progress and for tests.
    """

    def __init__(
        self,
        target: FilesystemTarget,
        *,
        policy: JanitorPolicy | None = None,
        key: IntegrityKey | None = None,
        clock: JanitorClock | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        self._target = target
        self._root = target.root
        self._policy = policy or JanitorPolicy()
        self._key = key
        self._clock = clock or JanitorClock()
        self._on_step = on_step
        self._namespaces: dict[str, _Namespace] = {}
        self._lock_fd = -1
        self._lease = JanitorLease(self._root)
        self._report = JanitorReport()
        self._now = 0.0
        self._rate = 0.0
        self._last: tuple[float, int] | None = None
        self._no_holes = False
        self._no_space = False
        self._copies: list[tuple[float, int]] = []  # whose originals are not reclaimed yet
        self._doomed: list[tuple[Segment, Bools]] = []
        self._strange: dict[str, int] = {}  # bytes in namespaces of which nothing is known

    def run_once(self, *, dry_run: bool = False) -> JanitorReport:
        """Do everything that is due now.

        Faults of the storage are noted in the report and stepped over.

        Parameters
        ----------
        dry_run
            Change nothing; the report says what would be evicted.

        Raises
        ------
        LifeboatError
            If the directory is not ours, or is in a newer format.
        """
        report = self._report = JanitorReport(
            capacity=self._target.capacity, reserve=self._target.reserve
        )
        self._now = started = max(self._clock.monotonic(), 1e-9)
        self._target.prepare()
        if not check_root(self._root, create=False):
            return report
        if not dry_run and not self._take_lock():
            report.busy = True
            return report
        try:
            self._run(dry_run)
        finally:
            self._drop_lock()
        report.seconds = self._clock.monotonic() - started
        return report

    def close(self) -> None:
        """Forget everything. Nothing needs to be written."""
        self._namespaces.clear()
        self._drop_lock()
        self._lease.release()

    def _run(self, dry_run: bool) -> None:
        report = self._report
        self._step("survey")
        self._survey()
        report.used_before = self._used()
        if not dry_run:
            self._bury()
            self._expire()
            self._reclaim()
        self._evict(dry_run)
        if dry_run:
            self._summarize()
            return
        self._rewrite()
        self._tidy()
        self._write_summaries()
        self._survey_again()
        self._summarize()
        self._publish()

    def _step(self, name: str) -> None:
        self._lease.beat()
        if self._on_step is not None:
            self._on_step(name)

    # One at a time ------------------------------------------------------------

    def _take_lock(self) -> bool:
        """Whether no other janitor is at work, as far as that can be known."""
        if self._target.shared:
            self._report.holder = self._lease.take()
            if self._report.holder:
                return False
        try:
            self._lock_fd = open_file(self._root / JANITOR_LOCK, os.O_CREAT | os.O_RDWR, FILE_MODE)
            with contextlib.suppress(OSError):  # of another user, who made it as it should be
                owned(self._lock_fd, self._target.traits)
        except OSError as error:
            self._report.problem(JANITOR_LOCK, error)
            return True
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._drop_lock()
            return False
        except OSError:
            pass  # a filesystem without locks: two at once do no harm
        return True

    def _drop_lock(self) -> None:
        if self._lock_fd >= 0:
            close_file(self._lock_fd)
            self._lock_fd = -1

    # What is there ------------------------------------------------------------

    def _survey(self) -> None:
        report = self._report
        names = {path.name: path for path in self._target.directories()}
        for gone in self._namespaces.keys() - names.keys():
            del self._namespaces[gone]
        self._strange = {}
        for name, path in names.items():
            known = self._namespaces.get(name)
            if known is None or not (known.documented or self._document(path) is None):
                known = self._open(path)
                if known is None:  # nothing says whose it is, but it holds space
                    self._strange[name] = self._target.allocated(path)
                    continue
                self._namespaces[name] = known
            self._refresh(known)
        present = self._present()
        for namespace in self._namespaces.values():
            namespace.folder.read(present, report)

    @staticmethod
    def _document(path: Path) -> Namespace | None:
        """What a namespace's document says, if it is intact and belongs there."""
        try:
            document = Namespace.from_json(read_document(path / "namespace.json"))
        except (OSError, LifeboatError):
            return None
        return document if document.directory == path.name else None

    def _open(self, path: Path) -> _Namespace | None:
        document = self._document(path)
        digest = document.digest if document is not None else self._target.digest_of(path)
        if digest is None:
            return None
        catalogue = Catalogue(path, digest, lambda: self._now)
        # Without the document it is not known whether there is a key.
        needed = document.identity.get(IDENTITY_FIELD) if document is not None else ""
        mine = self._key is not None and self._key.id == needed
        return _Namespace(
            catalogue,
            AccessFolder(catalogue),
            kinship(document, digest),
            key=self._key.secret if self._key is not None and mine else None,
            verifiable=mine or needed is None,
            documented=document is not None,
        )

    def _refresh(self, namespace: _Namespace) -> None:
        try:
            namespace.catalogue.refresh(self._report)
        except OSError as error:
            self._report.problem(namespace.catalogue.directory.name, error)

    def _survey_again(self) -> None:
        """What is allocated now."""
        for namespace in self._namespaces.values():
            self._refresh(namespace)

    def _present(self) -> int:
        """The time now, as far as the records let it be believed.

        A record of the future would be the most recent one for ever: it counts as
        used now. But when most records are of the future, this clock is wrong.
        """
        now = min(max(int(self._clock.time()), 0), _LATEST)
        times = [s.rows.array["time"] for s in self._segments() if len(s.rows)]
        if not times:
            return now
        everything = np.concatenate(times)
        middle = int(np.median(everything))
        return now if now >= middle else int(everything.max())

    def _segments(self) -> list[Segment]:
        return [s for n in self._namespaces.values() for s in n.catalogue.segments()]

    def _used(self) -> int:
        known = sum(n.catalogue.allocated for n in self._namespaces.values())
        return known + sum(self._strange.values())

    def _free(self) -> int:
        try:
            stat = os.statvfs(self._root)
        except OSError as error:
            self._report.problem("free space", error)
            return 0
        return stat.f_bavail * stat.f_frsize

    # Dead bits ----------------------------------------------------------------

    def _mark(self, plan: _Plan) -> int:
        """Set dead bits and tell readers; how many records are dead that were not."""
        total = 0
        created = min(max(int(self._clock.time()), 0), _LATEST)
        touched = set()
        for segment, slots in plan.slots:
            if not slots.shape[0]:
                continue
            try:
                os.stat(segment.path)
                segment.bitmap.mark(slots, created)
            except FileNotFoundError:  # another janitor, or a purge, was faster
                pass
            except (OSError, FormatError) as error:
                self._report.problem(segment.bitmap.path.name, error)
                self._no_space |= getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
                continue
            self._step("marked")
            touched.add(segment.writer.directory.name)
            at = segment.rows.at(slots)
            rows = segment.rows.array
            at = at[at >= 0]
            new = at[rows["marked"][at] == 0]
            rows["marked"][new] = self._now
            total += new.shape[0]
        for name in touched:
            self._namespaces[name].news = True
        self._tell()
        return total

    def _tell(self) -> None:
        """Replace the files whose change tells readers to look at the bitmaps."""
        for namespace in self._namespaces.values():
            if not namespace.news:
                continue
            path = namespace.catalogue.directory / DEAD_GENERATION
            try:
                write_atomically(path, os.urandom(8).hex().encode() + b"\n", durable=False)
            except OSError as error:
                self._report.problem(f"{path.parent.name}/{path.name}", error)
                continue
            namespace.news = False

    def _bury(self) -> None:
        """Set the dead bits of what tombstones name."""
        self._step("bury")
        plan = _Plan()
        for namespace in self._namespaces.values():
            writers = namespace.catalogue.writers
            for writer in writers.values():
                if writer.untouchable:
                    continue
                for place, slots in list(writer.tombstones.items()):
                    segment = self._named(writers, *place)
                    if segment is None:
                        if self._gone(writers, *place):
                            del writer.tombstones[place]
                        continue
                    wanted = np.array(sorted(slots), dtype=np.int64)
                    try:
                        dead = segment.bitmap.read()
                    except NewerFormatError:
                        continue
                    there = (wanted < dead.shape[0]) & (
                        dead[np.minimum(wanted, dead.shape[0] - 1)] if dead.shape[0] else False
                    )
                    if there.all():
                        del writer.tombstones[place]
                    else:
                        plan.slots.append((segment, wanted[~there]))
        self._report.buried_blocks += self._mark(plan)

    @staticmethod
    def _named(writers: dict[str, Writer], owner: str, number: int) -> Segment | None:
        writer = writers.get(owner)
        if writer is None or writer.untouchable:
            return None
        segment = writer.segments.get(number)
        return None if segment is None or segment.untouchable else segment

    @staticmethod
    def _gone(writers: dict[str, Writer], owner: str, number: int) -> bool:
        """Whether a tombstone's record does not exist any more."""
        writer = writers.get(owner)
        return writer is None or number not in writer.segments

    def _there(self) -> float:
        """The time as the files have it."""
        now = file_time(self._root) if self._target.shared else self._clock.time()
        return 0.0 if now is None else now

    def _expire(self) -> None:
        """Mark dead what was stored too long ago."""
        if not self._policy.max_age_s:
            return
        self._step("expire")
        chosen = self._choose_doomed(Selection(older_than_s=self._policy.max_age_s))
        self._report.expired_blocks += self._doom(chosen)

    def _choose_doomed(
        self, selection: Selection, *, only_left: bool = False
    ) -> list[tuple[Segment, Bools]]:
        """Records that are selected and hold bytes, by segment.

        ``only_left``: leave out what goes with the files that it lies in.
        """
        now = self._there()
        out = []
        for name, namespace in self._namespaces.items():
            if not selection.concerns(name):
                continue
            for segment in namespace.catalogue.segments():
                rows = segment.rows.array
                chosen = selection.chosen(rows, now)
                if (chosen & ~segment.rows.live()).any():
                    note_holes(segment)
                chosen &= ~rows["done"]
                if only_left and not segment.writer.alive and bool(chosen.all()):
                    continue
                if chosen.any():
                    out.append((segment, chosen))
        return out

    def _doom(self, doomed: list[tuple[Segment, Bools]]) -> int:
        """Mark records dead and have their bytes erased; how many were alive."""
        plan = _Plan()
        for segment, chosen in doomed:
            rows = segment.rows.array
            rows["erase"] |= chosen
            live = chosen & segment.rows.live()
            plan.slots.append((segment, rows["slot"][live].astype(np.int64)))
        return self._mark(plan)

    # Purging ------------------------------------------------------------------
    # Unlike a run it does not ask whose janitor is at work: two at once do no harm.

    def find(self, selection: Selection, *, only_left: bool = False) -> Purged:
        """Find the records that are selected, and change nothing.

        Parameters
        ----------
        selection
            Which.
        only_left
            Leave out segments of ended writers that hold nothing else: somebody removes them.

        Raises
        ------
        LifeboatError
            See :meth:`run_once`.
        """
        self._report = JanitorReport()
        self._now = max(self._clock.monotonic(), 1e-9)
        self._target.prepare()
        purged = Purged()
        self._doomed = []
        if not check_root(self._root, create=False):
            return purged
        self._survey()
        self._doomed = self._choose_doomed(selection, only_left=only_left)
        for segment, chosen in self._doomed:
            rows = segment.rows.array[chosen]
            purged.blocks += rows.shape[0]
            purged.bytes += int(padded(rows["stored"]).sum())
            purged.keys.update(rows["key"].tolist())
        purged.problems = self._report.problems
        return purged

    def doom(self, selection: Selection) -> Purged:
        """Mark the records that are selected, also those of living writers."""
        purged = self.find(selection)
        self._doom(self._doomed)
        return purged

    def erase_doomed(self) -> int:
        """Erase what was marked by :meth:`doom`, a grace later; how many records are left."""
        self._now = max(self._clock.monotonic(), 1e-9)
        if not self._doomed:
            return 0
        self._survey()
        self._reclaim()
        self._survey_again()
        there = {id(segment) for segment in self._segments()}
        return sum(
            int((segment.rows.array["erase"] & ~segment.rows.array["done"]).sum())
            for segment, _ in self._doomed
            if id(segment) in there
        )

    # Space --------------------------------------------------------------------

    def _ripe(self, segment: Segment) -> Bools:
        """Rows that have been dead for as long as readers may need."""
        rows = segment.rows.array
        ripe: Bools = (rows["marked"] > 0) & (self._now - rows["marked"] >= self._policy.grace_s)
        return ripe

    def _reclaim(self) -> None:
        """Give back the space of records whose grace is over."""
        self._step("reclaim")
        for namespace in self._namespaces.values():
            for writer in list(namespace.catalogue.writers.values()):
                if writer.untouchable:
                    continue
                for segment in list(writer.segments.values()):
                    if segment.untouchable:
                        continue
                    try:
                        namespace.catalogue.allocated -= self._reclaim_segment(segment)
                    except FileNotFoundError:  # another janitor, or a purge, was faster
                        continue
                    except OSError as error:
                        self._report.problem(segment.path.name, error)

    def _reclaim_segment(self, segment: Segment) -> int:
        """Give back what can be given back of a segment; the bytes. Raises ``OSError``."""
        writer = segment.writer
        ripe = self._ripe(segment)
        settled = segment.settled(self._now, self._policy.grace_s)
        # Cut off by a janitor or a purge that did not get to unlinking it.
        cut = segment.size < HEADER_BYTES
        dead = bool(ripe.all()) and (writer.complete or len(segment.rows) > 0)
        if settled and (cut or dead):
            if not cut and len(segment.rows) and not self._confirmed(segment, ripe):
                return 0
            self._step("remove")
            remove_segment(segment)
            self._step("removed")
            self._report.segments_removed += 1
            self._report.removed_bytes += segment.allocated
            del writer.segments[segment.number]
            return segment.allocated
        if not ripe.any():
            return 0
        ripe &= ~segment.rows.array["done"]
        least = self._least_hole(segment)
        holes = [] if self._no_holes else dead_runs(segment, ripe, least)
        if segment.allocated < segment.rows.live_bytes() + least:
            holes = []  # an earlier janitor has done it
        doomed = dead_runs(segment, ripe & segment.rows.array["erase"], ALIGNMENT)
        if not (holes or doomed) or not self._confirmed(segment, ripe):
            return 0
        self._step("punch")
        return self._punch(segment, holes, doomed)

    def _punch(self, segment: Segment, holes: list[Hole], doomed: list[Hole]) -> int:
        """Punch runs out of a segment; what has to go is overwritten where that is not possible."""
        freed = 0
        for runs in (holes, doomed):
            if runs and not self._no_holes:
                punched = punch(segment, runs)
                self._no_holes = punched is None
                freed += punched or 0
        if doomed and self._no_holes:
            self._report.erased_bytes += erase(segment, doomed)
        self._report.punched_bytes += freed
        freed = min(freed, segment.allocated)
        segment.allocated -= freed
        return freed

    def _confirmed(self, segment: Segment, ripe: Bools) -> bool:
        """Whether the bits of ripe rows are set on disk; sets them again if they are not.

        Another janitor, on a filesystem without locks, may have written over them.
        """
        rows = segment.rows.array
        try:
            dead = segment.bitmap.read()
        except NewerFormatError:
            return False
        slots = rows["slot"].astype(np.int64)
        there = (
            dead[np.minimum(slots, dead.shape[0] - 1)] & (slots < dead.shape[0])
            if dead.shape[0]
            else np.zeros(slots.shape[0], dtype=np.bool_)
        )
        lost = ripe & ~there
        if not lost.any():
            return True
        rows["marked"][lost] = 0
        self._mark(_Plan([(segment, slots[lost])]))
        return False

    def _pending(self) -> int:
        """Bytes that will be given back when the graces are over."""
        total = 0
        for segment in self._segments():
            rows = segment.rows.array
            dead = rows["marked"] > 0
            if not dead.any():
                continue
            waste = max(0, segment.allocated - segment.rows.live_bytes())
            settled = not segment.writer.alive or segment.sealed_at > 0
            if settled and (bool(dead.all()) or self._sparse(segment)):
                total += waste
            elif not self._no_holes:
                runs = dead_runs(segment, dead & ~rows["done"], self._least_hole(segment))
                total += min(waste, sum(hole.end - hole.start for hole in runs))
        return total

    def _verifiable(self, segment: Segment) -> bool:
        namespace = self._namespaces.get(segment.writer.directory.name)
        return namespace is None or namespace.verifiable

    def _least_hole(self, segment: Segment) -> int:
        """The shortest run that is punched out of a segment."""
        if self._verifiable(segment):
            return self._policy.punch_bytes
        # Nothing else gives the space of these back.
        return min(self._policy.punch_bytes, _SHORTEST_HOLE)

    def _sparse(self, segment: Segment) -> bool:
        """Whether so little of a segment is live that it is rewritten."""
        if not self._verifiable(segment):
            return False
        live = segment.rows.live_bytes()
        return live < self._policy.live_ratio * (segment.allocated - HEADER_BYTES)

    def _headroom(self, capacity: int) -> int:
        """Bytes kept free for stores that come before evicted space is reclaimed."""
        policy = self._policy
        used = self._used()
        if self._last is not None:
            seconds = self._now - self._last[0]
            if seconds > 0:
                grown = max(0, used - self._last[1]) / seconds
                weight = 0.5 ** (seconds / _RATE_HALF_LIFE_S)
                self._rate = max(grown, self._rate * weight)
            lead = policy.grace_s + 2 * min(seconds, _MOST_INTERVAL_S)
        else:
            lead = policy.grace_s
        least = round(capacity * (1 - policy.high))
        return min(round(capacity * policy.most_headroom), max(least, round(self._rate * lead)))

    def _wanted(self, pending: int) -> int:
        """Bytes that have to be evicted."""
        policy = self._policy
        used = self._used()
        wanted = 0
        capacity = self._target.capacity
        if capacity is not None:
            headroom = self._headroom(capacity)
            if used - pending > capacity - headroom:
                low = capacity - headroom - round(capacity * max(0.0, policy.high - policy.low))
                wanted = used - pending - low
        try:
            stat = os.statvfs(self._root)
        except OSError as error:
            self._report.problem("free space", error)
            return wanted
        margin = policy.margin_bytes
        if margin is None:
            margin = min(512 << 20, stat.f_blocks * stat.f_frsize // 100)
        above = stat.f_bavail * stat.f_frsize - self._target.reserve + pending
        if above < margin:
            wanted = max(wanted, 2 * margin - above)
        return wanted

    def _evict(self, dry_run: bool) -> None:
        """Mark dead what was used least recently, until there will be room."""
        self._step("evict")
        if self._policy.eviction == "none":
            return
        wanted = self._wanted(self._pending())
        if wanted <= 0:
            return
        segments = [segment for segment in self._segments() if len(segment.rows)]
        if not segments:
            return
        kin_of = {n.catalogue.directory: np.uint64(n.kin) for n in self._namespaces.values()}
        present = self._present()
        parts = []
        for segment in segments:
            rows = segment.rows.array
            live = np.flatnonzero(segment.rows.live())
            kin = kin_of[segment.writer.directory]
            part = rows[live]
            age = present - part["time"].astype(np.int64)
            parts.append(
                (
                    np.where(part["family"] != 0, _mix(part["family"], kin), np.uint64(0)),
                    np.where(part["parent"] != 0, _mix(part["parent"], kin), np.uint64(0)),
                    part["position"],
                    part["used"],
                    padded(part["stored"]),
                    (age >= 0) & (age < self._policy.young_s),
                    part["slot"].astype(np.int64),
                )
            )
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        victims = choose_victims(
            units=columns[0],
            parents=columns[1],
            positions=columns[2],
            used=columns[3],
            sizes=columns[4],
            spared=columns[5],
            wanted=wanted,
        )
        self._report.evicted_bytes += int(columns[4][victims].sum())
        if dry_run:
            self._report.evicted_blocks += int(victims.sum())
            return
        plan = _Plan()
        first = 0
        for segment, part_of in zip(segments, parts, strict=True):
            last = first + part_of[6].shape[0]
            plan.slots.append((segment, part_of[6][victims[first:last]]))
            first = last
        self._no_space = False
        self._report.evicted_blocks += self._mark(plan)
        if self._no_space:
            self._make_first_room()

    def _make_first_room(self) -> None:
        """Remove a segment without its dead bits, for which a full disk has no space.

        What has gone as a whole is missing to readers, whatever they know of it.
        """
        settled = [
            segment
            for segment in self._segments()
            if segment.allocated and segment.settled(self._now, self._policy.grace_s)
        ]
        if not settled:
            return
        oldest = min(settled, key=lambda s: int(s.rows.array["used"].max(initial=0)))
        try:
            remove_segment(oldest)
        except OSError as error:
            self._report.problem(oldest.path.name, error)
            return
        live = int(oldest.rows.live().sum())
        self._report.evicted_blocks += live
        self._report.segments_removed += 1
        self._report.removed_bytes += oldest.allocated
        del oldest.writer.segments[oldest.number]

    # Rewriting ----------------------------------------------------------------

    def _rewrite(self) -> None:
        """Copy what is live out of sparse segments, and out of many small ones."""
        self._step("rewrite")
        left = self._policy.copy_bytes
        for namespace in self._namespaces.values():
            if not namespace.verifiable:
                continue
            chosen, sparse = self._choose(namespace.catalogue, left)
            if not chosen:
                continue
            left -= sum(segment.rows.live_bytes() for segment in chosen)
            self._copy(namespace, chosen, sparse)

    def _choose(self, catalogue: Catalogue, budget: int) -> tuple[list[Segment], int]:
        """Segments to rewrite, and how many of them because they are sparse."""
        settled = [
            segment
            for segment in catalogue.segments()
            if segment.settled(self._now, self._policy.grace_s)
            and segment.rows.live().any()
            # Their records are all known, and none is on its way.
            and (segment.writer.complete or segment.writer.alive)
        ]
        sparse = [segment for segment in settled if self._sparse(segment)]
        known = {id(segment) for segment in sparse}
        small = [
            segment
            for segment in settled
            if id(segment) not in known
            and not segment.writer.alive
            and segment.rows.live_bytes() < self._policy.small_bytes
        ]
        chosen = list(sparse)
        if len(small) + len(sparse) >= self._policy.merge_count:
            chosen += small
        # What was written first first, so that what belongs together stays together.
        chosen.sort(key=lambda segment: int(segment.rows.array["time"].min()))
        room, above = self._room(), self._above_reserve()
        lent = self._lendable()
        taken: list[Segment] = []
        for segment in chosen:
            live = segment.rows.live_bytes()
            # What is sparse gives back more than it takes: that must begin somewhere,
            # even in a target that is full.
            more = lent if id(segment) in known else 0
            if live > min(budget, above, room + more):
                continue
            room -= live
            above -= live
            budget -= live
            taken.append(segment)
        if not any(id(segment) in known for segment in taken) and len(taken) < 2:
            return [], 0
        return taken, sum(id(segment) in known for segment in taken)

    def _lendable(self) -> int:
        """Bytes by which copies may overshoot the capacity now."""
        ago = self._now - self._policy.grace_s - _MOST_INTERVAL_S
        self._copies = [(when, size) for when, size in self._copies if when > ago]
        return max(0, _LENT_BYTES - sum(size for _, size in self._copies))

    def _above_reserve(self) -> int:
        return max(0, self._free() - self._target.reserve)

    def _room(self) -> int:
        """Bytes that copies may take before what they replace is given back."""
        room = self._above_reserve()
        if self._target.capacity is not None:
            room = min(room, self._target.capacity - self._used())
        return max(0, room)

    def _copy(self, namespace: _Namespace, chosen: list[Segment], sparse: int) -> None:
        catalogue, report = namespace.catalogue, self._report

        def allow(size: int) -> Outcome | None:
            self._step("copy")
            short = self._free() - size < self._target.reserve
            return Outcome.RESERVE if short else None

        try:
            direct = self._target.direct
        except LifeboatError:
            direct = False
        before = report.copied_bytes
        try:
            copied = copy_segments(
                catalogue,
                chosen,
                allowance=allow,
                direct=direct,
                key=namespace.key,
                report=report,
            )
        except (OSError, FormatError) as error:
            report.problem(catalogue.directory.name, error)
            return
        self._step("copied")
        if copied.writer:
            self._copies.append((self._now, report.copied_bytes - before))
            # Learn of the copies, and when they were used, before the originals go.
            self._refresh(namespace)
            writer = catalogue.writers.get(copied.writer)
            for number, places in copied.places.items():
                segment = writer.segments.get(number) if writer is not None else None
                if segment is not None:
                    table = np.array(places, dtype=np.int64)
                    namespace.folder.carry(segment, table[:, 0], table[:, 1])
            self._write_summary(namespace)
        self._step("summarized")
        plan = _Plan()
        for segment, slots in copied.done:
            plan.slots.append((segment, np.array(slots, dtype=np.int64)))
        self._mark(plan)
        good = len(chosen) - len(copied.failed)
        report.compacted_segments += min(sparse, good)
        report.merged_segments += max(0, good - sparse)

    # Leftovers ----------------------------------------------------------------

    def _tidy(self) -> None:
        """Remove what ended writers have left and nobody needs."""
        self._step("tidy")
        for namespace in self._namespaces.values():
            catalogue = namespace.catalogue
            for writer in list(catalogue.writers.values()):
                if writer.untouchable:
                    continue
                try:
                    self._tidy_bitmaps(writer)
                    if writer.alive:
                        continue
                    self._tidy_writer(catalogue, namespace, writer)
                except OSError as error:
                    self._report.problem(writer.name, error)

    @staticmethod
    def _tidy_bitmaps(writer: Writer) -> None:
        """Remove bitmaps of segments that have gone."""
        for number in writer.bitmaps.keys() - writer.segments.keys():
            path = writer.directory / segment_name(writer.name, number)
            if is_gone(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path.with_suffix(".dead"))

    def _tidy_writer(self, catalogue: Catalogue, namespace: _Namespace, writer: Writer) -> None:
        if not writer.complete:
            return
        for segment in writer.segments.values():
            kept = max(HEADER_BYTES, segment.rows.end())
            if not (segment.untouchable or segment.trimmed) and (
                segment.allocated > kept + (64 << 10) or segment.size > kept + (64 << 10)
            ):
                self._report.trimmed_bytes += trim(segment)
                segment.trimmed = True
        if writer.segments or writer.tombstones:
            return
        for number in writer.named:  # a listing may have left out what is there
            if not is_gone(writer.directory / segment_name(writer.name, number)):
                return
        if "access" in writer.files:
            if namespace.folder.pending:
                return  # its uses are not in the summary yet
            namespace.folder.discard(self._report)
            if "access" in writer.files:
                return
        self._step("unlink")
        # The journal first: what is killed half-way leaves nothing half-alive.
        for kind in ("journal", "lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(writer.path(kind))
            self._step("unlinked")
        del catalogue.writers[writer.name]
        self._report.writers_removed += 1

    def _write_summaries(self) -> None:
        self._step("summaries")
        for namespace in self._namespaces.values():
            if namespace.folder.due(self._now, self._policy.summary_s):
                self._write_summary(namespace)

    def _write_summary(self, namespace: _Namespace) -> None:
        try:
            namespace.folder.write(self._now)
        except OSError as error:
            self._report.problem(f"{namespace.catalogue.directory.name}: summary", error)
            return
        self._step("summary")
        namespace.folder.discard(self._report)

    # Accounting ---------------------------------------------------------------

    def _summarize(self) -> None:
        report = self._report
        report.used_after = self._used()
        report.free = self._free()
        report.pending = self._pending()
        report.namespaces = len(self._namespaces)
        for name, namespace in self._namespaces.items():
            catalogue = namespace.catalogue
            report.by_namespace[name] = catalogue.allocated
            report.writers += len(catalogue.writers)
            report.alive += sum(writer.alive for writer in catalogue.writers.values())
            report.skipped_writers += sum(bool(w.untouchable) for w in catalogue.writers.values())
            for codec, sums in catalogue.census().items():
                report.records += sums[0]
                before = report.by_codec.get(codec_name(codec), (0, 0, 0))
                report.by_codec[codec_name(codec)] = (
                    before[0] + sums[0],
                    before[1] + sums[1],
                    before[2] + sums[2],
                )
        report.by_namespace.update(self._strange)
        self._last = self._now, report.used_after

    def _publish(self) -> None:
        self._step("publish")
        catalogues = {name: n.catalogue for name, n in self._namespaces.items()}
        try:
            publish_usage(
                self._root,
                time=self._clock.time(),
                used=self._used(),
                settled=sum(c.allocated - c.growing for c in catalogues.values()),
                known={name: c.known() for name, c in catalogues.items()},
            )
        except OSError as error:
            self._report.problem("usage.json", error)


def _mix(tags: npt.NDArray[np.uint64], kin: np.uint64) -> npt.NDArray[np.uint64]:
    """Tags of families, apart from those of namespaces that are not akin."""
    mixed: npt.NDArray[np.uint64] = (tags ^ kin) * np.uint64(0x9E3779B97F4A7C15)
    return mixed | np.uint64(1)
