"""A step of the janitor: sparse and small segments are rewritten."""

from __future__ import annotations

import contextlib

import numpy as np

from lifeboat_cache.errors import FormatError, LifeboatError
from lifeboat_cache.janitor.catalogue import Catalogue, Segment
from lifeboat_cache.janitor.copying import Copied, copy_segments
from lifeboat_cache.janitor.estate import DeadBits, Estate, Household
from lifeboat_cache.janitor.policy import MOST_INTERVAL_S
from lifeboat_cache.janitor.steps.burying import Burier
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.files import is_gone

__all__ = ["Rewriter"]

#: By so much, for a grace, the copies of a sparse segment may overshoot the capacity.
_LENT_BYTES = 256 << 20


class Rewriter:
    """Copies what is live out of sparse segments, and out of many small ones."""

    def __init__(self, estate: Estate, burier: Burier) -> None:
        self._estate = estate
        self._burier = burier
        self._copies: list[tuple[float, int]] = []  # whose originals are not reclaimed yet

    def run(self) -> None:
        """Copy what is live out of sparse segments, and out of many small ones."""
        self._estate.step("rewrite")
        left = self._estate.policy.copy_bytes
        for namespace in self._estate.namespaces.values():
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
            if segment.settled(self._estate.now, self._estate.policy.grace_s)
            and segment.rows.live().any()
            # Their records are all known, and none is on its way.
            and (segment.writer.complete or segment.writer.alive)
        ]
        sparse = [segment for segment in settled if self._estate.sparse(segment)]
        known = {id(segment) for segment in sparse}
        small = [
            segment
            for segment in settled
            if id(segment) not in known
            and not segment.writer.alive
            and segment.rows.live_bytes() < self._estate.policy.small_bytes
        ]
        chosen = list(sparse)
        if len(small) + len(sparse) >= self._estate.policy.merge_count:
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
        ago = self._estate.now - self._estate.policy.grace_s - MOST_INTERVAL_S
        self._copies = [(when, size) for when, size in self._copies if when > ago]
        return max(0, _LENT_BYTES - sum(size for _, size in self._copies))

    def _above_reserve(self) -> int:
        return max(0, self._estate.free() - self._estate.target.reserve)

    def _room(self) -> int:
        """Bytes that copies may take before what they replace is given back."""
        room = self._above_reserve()
        if self._estate.target.capacity is not None:
            room = min(room, self._estate.target.capacity - self._estate.used())
        return max(0, room)

    def _copy(self, namespace: Household, chosen: list[Segment], sparse: int) -> None:
        catalogue, report = namespace.catalogue, self._estate.report

        def allow(size: int) -> Outcome | None:
            self._estate.step("copy")
            short = self._estate.free() - size < self._estate.target.reserve
            return Outcome.RESERVE if short else None

        try:
            direct = self._estate.target.direct
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
        self._estate.step("copied")
        if copied.writer:
            self._copies.append((self._estate.now, report.copied_bytes - before))
            # Learn of the copies, and when they were used, before the originals go.
            self._estate.refresh(namespace)
            writer = catalogue.writers.get(copied.writer)
            for number, places in copied.places.items():
                segment = writer.segments.get(number) if writer is not None else None
                if segment is not None:
                    table = np.array(places, dtype=np.int64)
                    namespace.folder.carry(segment, table[:, 0], table[:, 1])
            self._estate.write_summary(namespace)
        self._estate.step("summarized")
        plan = self._note(namespace, copied)
        for segment, slots in copied.done:
            plan.slots.append((segment, np.array(slots, dtype=np.int64)))
        self._estate.mark(plan)
        if copied.moves:
            self._burier.run()  # also what tombstones name that came meanwhile
        good = len(chosen) - len(copied.failed)
        report.compacted_segments += min(sparse, good)
        report.merged_segments += max(0, good - sparse)

    def _note(self, namespace: Household, copied: Copied) -> DeadBits:
        """Note where records are now; copies of what has died meanwhile are to die, too."""
        estate = self._estate
        plan = DeadBits()
        moves: dict[tuple[int, str, int], list[tuple[int, int]]] = {}
        origins: dict[int, Segment] = {}
        for segment, slot, name, number, there in copied.moves:
            origins[id(segment)] = segment
            moves.setdefault((id(segment), name, number), []).append((slot, there))
        for (which, name, number), pairs in moves.items():
            origin = origins[which]
            mine = origin.writer.name, origin.number
            estate.copies.add(mine, pairs, (name, number), estate.now)
            writer = namespace.catalogue.writers.get(name)
            copy = None if writer is None else writer.segments.get(number)
            if copy is None:
                continue
            table = np.array(pairs, dtype=np.int64)
            dead = origin.rows.array["marked"][origin.rows.at(table[:, 0])] > 0
            with contextlib.suppress(OSError):  # it cannot be known whether it is there
                if is_gone(origin.path):  # by somebody who had no use for any of it
                    dead[:] = True
            plan.slots.append((copy, table[:, 1][dead]))
        return plan
