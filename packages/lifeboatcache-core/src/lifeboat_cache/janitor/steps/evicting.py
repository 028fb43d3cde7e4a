"""A step of the janitor: what was used least recently makes room."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from lifeboat_cache.janitor.estate import DeadBits, Estate
from lifeboat_cache.janitor.eviction import choose_victims
from lifeboat_cache.janitor.policy import MOST_INTERVAL_S
from lifeboat_cache.janitor.reclaim import remove_segment
from lifeboat_cache.janitor.rows import padded
from lifeboat_cache.janitor.steps.reclaiming import Reclaimer

__all__ = ["Evictor"]

#: The growth of the store counts for the headroom for about this long.
_RATE_HALF_LIFE_S = 120.0


class Evictor:
    """Marks dead what was used least recently, until there will be room."""

    def __init__(self, estate: Estate, reclaimer: Reclaimer) -> None:
        self._estate = estate
        self._reclaimer = reclaimer
        self._rate = 0.0
        self._last: tuple[float, int] | None = None

    def remember(self, used: int) -> None:
        """Note how much is used at the end of a run: what is added until the next is growth."""
        self._last = self._estate.now, used

    def run(self, dry_run: bool) -> None:
        """Mark dead what was used least recently, until there will be room."""
        self._estate.step("evict")
        if self._estate.policy.eviction == "none":
            return
        wanted = self._wanted(self._reclaimer.pending())
        if wanted <= 0:
            return
        segments = [segment for segment in self._estate.segments() if len(segment.rows)]
        if not segments:
            return
        kin_of = {n.catalogue.directory: np.uint64(n.kin) for n in self._estate.namespaces.values()}
        present = self._estate.present()
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
                    (age >= 0) & (age < self._estate.policy.young_s),
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
        self._estate.report.evicted_bytes += int(columns[4][victims].sum())
        if dry_run:
            self._estate.report.evicted_blocks += int(victims.sum())
            return
        plan = DeadBits()
        first = 0
        for segment, part_of in zip(segments, parts, strict=True):
            last = first + part_of[6].shape[0]
            plan.slots.append((segment, part_of[6][victims[first:last]]))
            first = last
        self._estate.no_space = False
        self._estate.report.evicted_blocks += self._estate.mark(plan)
        if self._estate.no_space:
            self._make_first_room()

    def _headroom(self, capacity: int) -> int:
        """Bytes kept free for stores that come before evicted space is reclaimed."""
        policy = self._estate.policy
        used = self._estate.used()
        if self._last is not None:
            seconds = self._estate.now - self._last[0]
            if seconds > 0:
                grown = max(0, used - self._last[1]) / seconds
                weight = 0.5 ** (seconds / _RATE_HALF_LIFE_S)
                self._rate = max(grown, self._rate * weight)
            lead = policy.grace_s + 2 * min(seconds, MOST_INTERVAL_S)
        else:
            lead = policy.grace_s
        least = round(capacity * (1 - policy.high))
        return min(round(capacity * policy.most_headroom), max(least, round(self._rate * lead)))

    def _wanted(self, pending: int) -> int:
        """Bytes that have to be evicted."""
        policy = self._estate.policy
        used = self._estate.used()
        wanted = 0
        capacity = self._estate.target.capacity
        if capacity is not None:
            headroom = self._headroom(capacity)
            if used - pending > capacity - headroom:
                low = capacity - headroom - round(capacity * max(0.0, policy.high - policy.low))
                wanted = used - pending - low
        try:
            stat = os.statvfs(self._estate.root)
        except OSError as error:
            self._estate.report.problem("free space", error)
            return wanted
        margin = policy.margin_bytes
        if margin is None:
            margin = min(512 << 20, stat.f_blocks * stat.f_frsize // 100)
        above = stat.f_bavail * stat.f_frsize - self._estate.target.reserve + pending
        if above < margin:
            wanted = max(wanted, 2 * margin - above)
        return wanted

    def _make_first_room(self) -> None:
        """Remove a segment without its dead bits, for which a full disk has no space.

        What has gone as a whole is missing to readers, whatever they know of it.
        """
        settled = [
            segment
            for segment in self._estate.segments()
            if segment.allocated and segment.settled(self._estate.now, self._estate.policy.grace_s)
        ]
        if not settled:
            return
        oldest = min(settled, key=lambda s: int(s.rows.array["used"].max(initial=0)))
        try:
            remove_segment(oldest)
        except OSError as error:
            self._estate.report.problem(oldest.path.name, error)
            return
        live = int(oldest.rows.live().sum())
        self._estate.report.evicted_blocks += live
        self._estate.report.segments_removed += 1
        self._estate.report.removed_bytes += oldest.allocated
        del oldest.writer.segments[oldest.number]


def _mix(tags: npt.NDArray[np.uint64], kin: np.uint64) -> npt.NDArray[np.uint64]:
    """Tags of families, apart from those of namespaces that are not akin."""
    mixed: npt.NDArray[np.uint64] = (tags ^ kin) * np.uint64(0x9E3779B97F4A7C15)
    return mixed | np.uint64(1)
