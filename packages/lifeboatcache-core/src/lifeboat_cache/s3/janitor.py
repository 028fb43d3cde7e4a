"""Looks after a bucket: keeps it within its capacity, and removes what is of no use.

It deletes whole segments, in bulk, and moves what is worth keeping to new ones before. What goes
first is decided as by the janitor of directories. All steps may be cut off anywhere and be done
again, and two at once do no harm; a lease keeps them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.names import codec_name
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.integrity import IDENTITY_FIELD, IntegrityKey
from lifeboat_cache.janitor.copies import Copies
from lifeboat_cache.janitor.policy import JanitorClock, JanitorPolicy
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.janitor.rows import Bools, padded
from lifeboat_cache.janitor.selection import Purged, Selection
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.choice import Records, choose_objects
from lifeboat_cache.s3.inventory import HeldNamespace, HeldSegment, Inventory, Place
from lifeboat_cache.s3.lease import BucketLease
from lifeboat_cache.s3.moving import Removal, move_records
from lifeboat_cache.s3.names import FeedName
from lifeboat_cache.s3.slices import pack_slice
from lifeboat_cache.s3.uses import NodeUses, SharedUses
from lifeboat_cache.store.records import tombstones_at
from lifeboat_cache.targets.layout import new_writer_id

__all__ = ["BucketJanitor"]

#: A segment that no slice names belongs to an upload that never ended after so many seconds.
ORPHAN_S = 6 * 3600.0

#: Orphans are looked for at most this often.
_ORPHANS_EVERY_S = 6 * 3600.0

#: More than this part of all segments are no orphans: something is wrong with the listing.
_MOST_ORPHANS = 0.5

#: Nodes have heard of what was deleted after so many seconds.
_TOLD_S = 2 * 86400.0

#: What is too old, but shares a segment with what is not, stays so much longer at most.
EXPIRY_SLACK_S = 3600.0

#: Tombstones alone have numbers that no segment has.
_FIRST_NUMBER = 50_000_000

#: It is not worth a request to give back less than this.
_LEAST_DEAD_BYTES = 8 << 20

#: A node that is not told what the bucket takes lists all of it at most this often.
_SURVEY_S = 3600.0

#: Segments below this size are merged when a namespace has so many of them that are older than
#: so many seconds. What comes of it is as a rule not small any more, so that nothing is moved
#: again and again.
_SMALL_BYTES = 32 << 20
_MANY_SMALL = 32
_SETTLED_S = 3600.0

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class _Plan:
    """Segments that are to go, each once, with the rows that are to be moved first."""

    removals: dict[int, tuple[HeldNamespace, Removal]] = field(default_factory=dict)

    def add(self, held: HeldNamespace, segment: HeldSegment, kept: Bools) -> None:
        self.removals[id(segment)] = held, Removal(segment, kept)

    def has(self, segment: HeldSegment) -> bool:
        return id(segment) in self.removals

    def freed(self) -> int:
        """Bytes that it gives back, less what is moved."""
        return sum(
            removal.segment.size - _bytes(removal.segment, removal.kept)
            for _, removal in self.removals.values()
        )

    def within(self, budget: int) -> dict[str, tuple[HeldNamespace, list[Removal]]]:
        """What can be done with so many bytes of moving, by namespace."""
        out: dict[str, tuple[HeldNamespace, list[Removal]]] = {}
        order = sorted(self.removals.values(), key=lambda pair: bool(pair[1].kept.any()))
        for held, removal in order:
            size = _bytes(removal.segment, removal.kept)
            if size > budget:
                continue
            budget -= size
            out.setdefault(held.directory, (held, []))[1].append(removal)
        return out


def _bytes(segment: HeldSegment, rows: Bools) -> int:
    return int(padded(segment.rows.array["stored"][rows]).sum())


class BucketJanitor:
    """Looks after what is below a prefix of a bucket, for all nodes that use it.

    Parameters
    ----------
    archive
        The bucket.
    policy
        The settings; those of directories that make no sense for objects are not used.
    key
        The integrity key. Records that another one protects are moved unverified.
    clock
        Where the time for pauses comes from; what has happened when is the server's.
    on_step
        Told what is done next: a word, for progress and for tests.
    """

    def __init__(
        self,
        archive: Archive,
        *,
        policy: JanitorPolicy | None = None,
        key: IntegrityKey | None = None,
        clock: JanitorClock | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        self._archive = archive
        self._client, self._names = archive.client, archive.names
        self._local = archive.settings.path / "janitor"
        self._policy = policy or JanitorPolicy()
        self._key = key
        self._clock = clock or JanitorClock()
        self._on_step = on_step
        self._inventory = Inventory(self._client, self._names, lambda: self._step("survey"))
        self._lease = BucketLease(self._client, self._names.lease, self._clock.monotonic)
        self._uses = NodeUses(self._client, self._names, self._local, archive.staging.root)
        self._shared = SharedUses(self._client, self._names)
        self._writer = new_writer_id()  # of tombstones
        self._number = _FIRST_NUMBER
        self._orphans_at = self._surveyed_at = float("-inf")
        self._suspects: dict[str, set[str]] = {}
        self._doomed_left = 0
        self._copies = Copies()
        self._report = JanitorReport()

    def run_once(self, *, dry_run: bool = False) -> JanitorReport:
        """Do everything that is due now.

        Parameters
        ----------
        dry_run
            Change nothing; the report says what would be evicted.

        Raises
        ------
        S3Error
            If the bucket fails. What was done by then counts.
        OSError
            If this node's directory cannot be used.
        """
        report = self._report = JanitorReport(capacity=self._archive.settings.capacity)
        started = self._clock.monotonic()
        before = self._client.traffic.snapshot().requests
        self._run(report, dry_run=dry_run)
        after = self._client.traffic.snapshot().requests
        # Those of loads and stores meanwhile are among them.
        report.requests = {verb: count - before.get(verb, 0) for verb, count in after.items()}
        report.seconds = self._clock.monotonic() - started
        return report

    def _run(self, report: JanitorReport, *, dry_run: bool) -> None:
        if not dry_run:
            self._step("lease")
            report.holder = self._lease.take()
            self._uses.tell(self._clock.monotonic())
            if report.holder:
                report.busy = True
                self._hear()
                report.used_before = report.used_after = self._archive.used()
                return
        self._step("survey")
        self._inventory.refresh(self._archive.survey())
        for held in self._inventory.namespaces.values():
            report.problems += held.problems
            self._shared.read(held)
            if not dry_run:
                self._bury_copies(held)
        report.used_before = self._inventory.size
        plan = self._plan()
        if not dry_run:
            self._carry_out(plan)
            self._collect_orphans()
            self._tidy()
            self._tell()
        self._summarize()

    def _hear(self) -> None:
        """Know what the bucket takes from the node that looks after it."""
        if self._archive.hear(self._lease.heard):
            return
        now = self._clock.monotonic()
        if now - self._surveyed_at >= _SURVEY_S:
            self._archive.survey()
            self._surveyed_at = now

    def _tell(self) -> None:
        """Let other nodes know what the bucket takes, with the lease: they need not list it."""
        self._archive.learn(
            {
                held.directory: (
                    sum(one.name.size for one in held.segments.values()),
                    sum(len(one.rows) for one in held.segments.values()),
                )
                for held in self._inventory.namespaces.values()
            }
        )
        self._lease.says = self._archive.tell()

    def close(self) -> None:
        """Let another node look after the bucket at once."""
        self._lease.release()

    def _step(self, name: str) -> None:
        if self._on_step is not None:
            self._on_step(name)

    # What is to go ------------------------------------------------------------

    def _plan(self) -> _Plan:
        plan = _Plan()
        for held, segment in self._inventory.segments():
            if segment.untouchable:
                continue
            live = segment.rows.live()
            if segment.doomed or not live.any():
                plan.add(held, segment, np.zeros(live.shape[0], dtype=np.bool_))
        self._expire(plan)
        self._evict(plan)
        self._thin_out(plan)
        self._merge(plan)
        return plan

    def _expire(self, plan: _Plan) -> None:
        """What was stored too long ago."""
        age = self._policy.max_age_s
        if not age:
            return
        now = self._client.now()
        for held, segment in self._inventory.segments():
            if plan.has(segment) or segment.untouchable:
                continue
            rows = segment.rows.array
            live = segment.rows.live()
            born = rows["born"].astype(np.int64)
            kept = live & (born >= now - age)
            overdue = bool((live & (born < now - age - EXPIRY_SLACK_S)).any())
            # A segment is filled within an hour: as a rule all of it is too old soon.
            if overdue or not kept.any():
                self._report.expired_blocks += int((live & ~kept).sum())
                plan.add(held, segment, kept)

    def _evict(self, plan: _Plan) -> None:
        """What was used least recently, until there is room."""
        capacity, policy = self._archive.settings.capacity, self._policy
        if capacity is None or policy.eviction == "none":
            return
        used = self._inventory.size - plan.freed()
        if used <= policy.high * capacity:
            return
        segments = [pair for pair in self._inventory.segments() if not plan.has(pair[1])]
        if not segments:
            return
        now = int(self._client.now())
        records, places = _records(segments, now, policy.young_s)
        fixed = np.array(
            [bool(s.untouchable) or s.name.time > now - policy.young_s for _, s in segments]
        )
        sizes = np.array([s.size for _, s in segments], dtype=np.int64)
        choice = choose_objects(records, sizes, fixed, used - int(policy.low * capacity))
        gone = choice.objects[records.object] & ~choice.moved
        left = np.isin(records.keys, records.keys[~gone])
        self._report.evicted_blocks += int((gone & ~left).sum())
        self._report.evicted_bytes += int(records.sizes[gone & ~left].sum())
        for number in np.flatnonzero(choice.objects).tolist():
            held, segment = segments[number]
            mine = records.object == number
            kept = np.zeros(len(segment.rows), dtype=np.bool_)
            kept[places[mine & choice.moved]] = True
            plan.add(held, segment, kept)

    def _thin_out(self, plan: _Plan) -> None:
        """What is mostly dead is rewritten."""
        for held, segment in self._inventory.segments():
            if plan.has(segment) or segment.untouchable:
                continue
            live = segment.rows.live()
            size = _bytes(segment, live)
            dead = segment.name.size - size
            if size < self._policy.live_ratio * segment.name.size and dead >= _LEAST_DEAD_BYTES:
                plan.add(held, segment, live)

    def _merge(self, plan: _Plan) -> None:
        """Many small segments become few: each costs a line in every listing."""
        oldest = self._client.now() - _SETTLED_S
        for held in self._inventory.namespaces.values():
            small = [
                segment
                for segment in held.segments.values()
                if segment.name.size < _SMALL_BYTES
                and segment.name.time < oldest
                and not segment.untouchable
                and not plan.has(segment)
            ]
            if len(small) >= _MANY_SMALL:
                for segment in small:
                    plan.add(held, segment, segment.rows.live())

    # Doing it -----------------------------------------------------------------

    def _carry_out(self, plan: _Plan) -> None:
        for held, removals in plan.within(self._policy.copy_bytes).values():
            self._remove(held, removals)

    def _remove(self, held: HeldNamespace, removals: Sequence[Removal]) -> None:
        """Move what is kept of segments, then delete them."""
        report = self._report
        moved = move_records(
            self._client,
            self._names,
            held,
            removals,
            scratch=self._local,
            key=self._secret(held),
            on_step=lambda: self._step("move"),
        )
        report.problems += moved.problems
        report.copied_blocks += moved.records
        report.copied_bytes += moved.bytes
        report.corrupt_blocks += moved.corrupt
        self._step("moved")
        for (writer, number, slot), (owner, there, at) in moved.places.items():
            origin, copy = (writer.hex(), number), (owner.hex(), there)
            self._copies.add(origin, [(slot, at)], copy, self._clock.monotonic())
        if moved.places:
            self._shared.moved(held, moved.places)
        kept = {id(removal.segment) for removal in removals if removal.kept.any()}
        report.compacted_segments += sum(id(segment) in kept for segment in moved.done)
        # It may have taken long. Who has the lease meanwhile has seen the copies, or moves them.
        self._delete(held, moved.done)

    def _secret(self, held: HeldNamespace) -> bytes | None:
        needed = held.namespace.identity.get(IDENTITY_FIELD) if held.namespace else None
        return self._key.secret if self._key is not None and self._key.id == needed else None

    def _delete(self, held: HeldNamespace, segments: Sequence[HeldSegment]) -> None:
        """Delete whole segments of a namespace, with a handful of requests."""
        if not segments:
            return
        places = {segment.place for segment in segments}
        self._keep_tombstones(held, segments, places)
        slices = [name for segment in segments for name in segment.names]
        self._archive.remove_from(held.directory, sorted(places), slices)
        catalog = self._archive.catalogs().get(held.digest)
        if catalog is not None:  # engines of this node need not wait until they hear of it
            catalog.forget(sorted(places))
        for segment in segments:
            self._report.segments_removed += 1
            self._report.removed_bytes += segment.size
            held.segments.pop(segment.place, None)

    def _keep_tombstones(
        self, held: HeldNamespace, segments: Sequence[HeldSegment], going: set[Place]
    ) -> None:
        """Say again what slices that go have declared dead, and is still there."""
        kept: list[Entries] = []
        for segment in segments:
            for tombstones in segment.tombstones:
                still = [
                    (bytes(owner), number) in held.segments and (bytes(owner), number) not in going
                    for owner, number in zip(
                        tombstones["payload_checksum"].tolist(),
                        tombstones["segment"].tolist(),
                        strict=True,
                    )
                ]
                if any(still):
                    kept.append(tombstones[np.array(still)])
        if kept:
            self._declare_dead(held, np.concatenate(kept))

    def _declare_dead(self, held: HeldNamespace, tombstones: Entries) -> None:
        self._number += 1
        name = FeedName(int(self._client.now()), self._writer, self._number, 0, "dead")
        data = pack_slice(held.digest, name.writer, name.number, tombstones)
        self._client.put(self._names.in_feed(held.directory, name), data)
        held.dead[name] = tombstones

    def _bury_copies(self, held: HeldNamespace) -> None:
        """Declare copies dead of what has been declared dead where it was."""
        copies = self._copies
        copies.forget(self._clock.monotonic())
        keys: list[bytes] = []
        places: list[tuple[bytes, int, int]] = []
        done: list[tuple[tuple[str, int], int]] = []
        for tombstones in held.tombstones():
            for key, owner, number, slot in zip(
                tombstones["key"].tolist(),
                tombstones["payload_checksum"].tolist(),
                tombstones["segment"].tolist(),
                tombstones["slot"].tolist(),
                strict=True,
            ):
                origin = owner.hex(), number
                for (writer, there), slots in copies.of(origin, [slot]).items():
                    done.append((origin, slot))
                    keys += [key] * len(slots)
                    places += [(bytes.fromhex(writer), there, at) for at in slots]
        if not places:
            return
        writers, numbers, slots_there = zip(*places, strict=True)
        table = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32)
        self._declare_dead(held, tombstones_at(table, writers, numbers, slots_there))
        self._inventory.mark(held)
        for origin, slot in done:
            copies.drop(origin, slot)

    def _delete_objects(self, keys: Iterable[str]) -> None:
        left = self._client.delete(keys)
        if left:
            self._report.problems.append(
                f"{len(left)} objects were not deleted ({left[0]}, …): check that the credentials "
                "allow s3:DeleteObject"
            )

    # Leftovers ----------------------------------------------------------------

    def _collect_orphans(self) -> None:
        """Segments that nothing names, and uploads in parts that never ended."""
        now = self._clock.monotonic()
        if now - self._orphans_at < _ORPHANS_EVERY_S:
            return
        self._step("orphans")
        oldest = self._client.now() - ORPHAN_S
        for held in self._inventory.namespaces.values():
            prefix = self._names.segments(held.directory)
            named = {self._names.segment(held.directory, *place) for place in held.segments}
            found = {one.key: one for one in self._client.objects(prefix)}
            unnamed = {k for k in found.keys() - named if found[k].modified < oldest}
            # Should a listing leave out what is there, the next one may not.
            orphans = unnamed & self._suspects.get(held.directory, set())
            self._suspects[held.directory] = unnamed
            if len(orphans) > _MOST_ORPHANS * len(found) and held.segments:
                self._report.problems.append(
                    f"{len(orphans)} of {len(found)} segments of {held.directory[:12]} are named "
                    "by nothing, which is too many to be true: run lifeboat-cache check"
                )
            elif orphans:
                self._delete_objects(sorted(orphans))
                self._report.trimmed_bytes += sum(found[key].size for key in orphans)
        self._client.forget_uploads(self._names.prefix, ORPHAN_S, self._names.is_segment)
        self._orphans_at = now

    def _tidy(self) -> None:
        """Objects of feeds that say nothing any more, and what was told of what is gone."""
        self._step("tidy")
        oldest = self._client.now() - _TOLD_S
        for held in self._inventory.namespaces.values():
            keys = [
                self._names.in_feed(held.directory, name)
                for name in held.gone
                if name.time < oldest
            ]
            keys += [
                self._names.in_feed(held.directory, name)
                for name, tombstones in held.dead.items()
                if name.time < oldest and not _names_any(tombstones, held)
            ]
            keys += self._shared.tidy(held)
            if keys:
                self._delete_objects(keys)

    # Purging ------------------------------------------------------------------

    def find(self, selection: Selection, *, only_left: bool = False) -> Purged:
        """Find what is selected, and change nothing.

        ``only_left`` is for targets whose files go by themselves. Raises :class:`S3Error`.
        """
        del only_left
        purged = Purged()
        self._doomed(selection, purged)
        return purged

    def doom(self, selection: Selection) -> Purged:
        """Remove what is selected from the bucket at once, whoever looks after it.

        Raises
        ------
        S3Error
            If the bucket fails; it can be done again.
        """
        self._report = JanitorReport()
        purged = Purged()
        plan = self._doomed(selection, purged)
        for held, removals in plan.within(1 << 62).values():
            self._remove(held, removals)
        if selection.whole:
            self._forget(selection)
        purged.problems += self._report.problems
        self._doomed_left = 0
        for held, removal in self._doomed(selection, Purged()).removals.values():
            gone = removal.segment.rows.live() & ~removal.kept
            self._doomed_left += int(gone.sum()) if held.segments else 0
        purged.left = self._doomed_left
        return purged

    def erase_doomed(self) -> int:
        """How many records that :meth:`doom` was to remove are still there."""
        return self._doomed_left

    def _forget(self, selection: Selection) -> None:
        """Remove what else is there of namespaces that are empty now.

        What tells other nodes that segments are gone stays for a while.
        """
        for held in self._inventory.namespaces.values():
            if not selection.concerns(held.directory) or held.segments:
                continue
            keys = [self._names.document(held.directory)]
            keys += [self._names.in_feed(held.directory, name) for name in held.dead]
            uses = self._client.objects(self._names.all_uses(held.directory))
            self._delete_objects([*keys, *(one.key for one in uses)])

    def _doomed(self, selection: Selection, purged: Purged) -> _Plan:
        self._inventory.refresh(self._archive.survey())
        now = self._client.now()
        plan = _Plan()
        for held, segment in self._inventory.segments():
            if not selection.concerns(held.directory):
                continue
            rows = segment.rows.array
            chosen = selection.chosen(rows, now)
            if segment.untouchable:
                if len(segment.rows) or selection.salt is None:
                    purged.problems.append(f"{segment.name}: left alone: {segment.untouchable}")
                continue
            if not chosen.any() and (len(rows) or selection.salt is not None):
                continue
            plan.add(held, segment, segment.rows.live() & ~chosen)
            purged.blocks += int(chosen.sum())
            purged.bytes += _bytes(segment, chosen)
            purged.keys.update(rows["key"][chosen].tolist())
        return plan

    # Accounting ---------------------------------------------------------------

    def _summarize(self) -> None:
        report = self._report
        report.used_after = self._inventory.size
        report.namespaces = len(self._inventory.namespaces)
        writers = set()
        for directory, held in self._inventory.namespaces.items():
            report.by_namespace[directory] = held.size
            for segment in held.segments.values():
                writers.add(segment.place[0])
                report.skipped_writers += bool(segment.untouchable)
                for codec, sums in segment.rows.census().items():
                    report.records += sums[0]
                    before = report.by_codec.get(codec_name(codec), (0, 0, 0))
                    report.by_codec[codec_name(codec)] = (
                        before[0] + sums[0],
                        before[1] + sums[1],
                        before[2] + sums[2],
                    )
        report.writers = len(writers)


def _names_any(tombstones: Entries, held: HeldNamespace) -> bool:
    return any(
        (bytes(owner), number) in held.segments
        for owner, number in zip(
            tombstones["payload_checksum"].tolist(), tombstones["segment"].tolist(), strict=True
        )
    )


def _records(
    segments: Sequence[tuple[HeldNamespace, HeldSegment]], now: int, young_s: float
) -> tuple[Records, npt.NDArray[np.int64]]:
    """Live records of segments, and which row of its segment each is."""
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    for number, (held, segment) in enumerate(segments):
        live = np.flatnonzero(segment.rows.live())
        rows = segment.rows.array[live]
        kin = np.uint64(held.kin)
        age = now - rows["time"].astype(np.int64)
        columns.append(
            (
                np.full(live.shape[0], number, dtype=np.int64),
                (rows["key"] ^ np.uint64(int(held.directory[:16], 16))) * _MIX,
                np.where(rows["family"] != 0, _mix(rows["family"], kin), np.uint64(0)),
                np.where(rows["parent"] != 0, _mix(rows["parent"], kin), np.uint64(0)),
                rows["position"].copy(),
                rows["used"].copy(),
                padded(rows["stored"]),
                (age >= 0) & (age < young_s),
                live,
            )
        )
    together = [np.concatenate(column) for column in zip(*columns, strict=True)]
    return Records(*together[:8]), together[8]


def _mix(tags: npt.NDArray[np.uint64], kin: np.uint64) -> npt.NDArray[np.uint64]:
    """Tags of families, apart from those of namespaces that are not akin."""
    mixed: npt.NDArray[np.uint64] = (tags ^ kin) * _MIX
    return mixed | np.uint64(1)
