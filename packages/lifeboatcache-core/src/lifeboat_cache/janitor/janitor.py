"""The janitor: one run after the other over a filesystem target."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable

from lifeboat_cache.codecs.names import codec_name
from lifeboat_cache.integrity import IntegrityKey
from lifeboat_cache.janitor.catalogue import Segment
from lifeboat_cache.janitor.estate import Estate
from lifeboat_cache.janitor.policy import JanitorClock, JanitorPolicy
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.janitor.rows import Bools, padded
from lifeboat_cache.janitor.selection import Purged, Selection
from lifeboat_cache.janitor.steps.burying import Burier
from lifeboat_cache.janitor.steps.evicting import Evictor
from lifeboat_cache.janitor.steps.expiring import Expirer
from lifeboat_cache.janitor.steps.reclaiming import Reclaimer
from lifeboat_cache.janitor.steps.rewriting import Rewriter
from lifeboat_cache.janitor.steps.tidying import Tidier
from lifeboat_cache.targets.files import close_file, open_file
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import FILE_MODE, JANITOR_LOCK, check_root
from lifeboat_cache.targets.published_usage import publish_usage
from lifeboat_cache.targets.traits import owned

__all__ = ["Janitor"]


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

    Attributes
    ----------
    estate
        What it looks after, as it was found by the last run.
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
        estate = Estate(target, policy or JanitorPolicy(), key, clock or JanitorClock(), on_step)
        self.estate = estate
        self._burier = Burier(estate)
        self._expirer = Expirer(estate)
        self._reclaimer = Reclaimer(estate)
        self._evictor = Evictor(estate, self._reclaimer)
        self._rewriter = Rewriter(estate, self._burier)
        self._tidier = Tidier(estate)
        self._lock_fd = -1
        self._doomed: list[tuple[Segment, Bools]] = []

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
        estate = self.estate
        report = JanitorReport(capacity=estate.target.capacity, reserve=estate.target.reserve)
        estate.begin(report)
        started = estate.now
        estate.target.prepare()
        if not check_root(estate.root, create=False):
            return report
        if not dry_run and not self._take_lock():
            report.busy = True
            return report
        try:
            self._run(dry_run)
        finally:
            self._drop_lock()
        report.seconds = estate.clock.monotonic() - started
        return report

    def close(self) -> None:
        """Forget everything. Nothing needs to be written."""
        self.estate.namespaces.clear()
        self._drop_lock()
        self.estate.lease.release()

    def _run(self, dry_run: bool) -> None:
        estate = self.estate
        estate.step("survey")
        estate.survey()
        estate.report.used_before = estate.used()
        if not dry_run:
            self._burier.run()
            self._expirer.run()
            self._reclaimer.run()
        self._evictor.run(dry_run)
        if dry_run:
            self._summarize()
            return
        self._rewriter.run()
        self._tidier.run()
        self._tidier.summarize()
        estate.survey_again()
        self._summarize()
        self._publish()

    # One at a time ------------------------------------------------------------

    def _take_lock(self) -> bool:
        """Whether no other janitor is at work, as far as that can be known."""
        if self.estate.target.shared:
            self.estate.report.holder = self.estate.lease.take()
            if self.estate.report.holder:
                return False
        try:
            self._lock_fd = open_file(
                self.estate.root / JANITOR_LOCK, os.O_CREAT | os.O_RDWR, FILE_MODE
            )
            with contextlib.suppress(OSError):  # of another user, who made it as it should be
                owned(self._lock_fd, self.estate.target.traits)
        except OSError as error:
            self.estate.report.problem(JANITOR_LOCK, error)
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
        estate = self.estate
        estate.begin(JanitorReport())
        estate.target.prepare()
        purged = Purged()
        self._doomed = []
        if not check_root(estate.root, create=False):
            return purged
        estate.survey()
        self._doomed = self._expirer.choose(selection, only_left=only_left)
        for segment, chosen in self._doomed:
            rows = segment.rows.array[chosen]
            purged.blocks += rows.shape[0]
            purged.bytes += int(padded(rows["stored"]).sum())
            purged.keys.update(rows["key"].tolist())
        purged.problems = estate.report.problems
        return purged

    def doom(self, selection: Selection) -> Purged:
        """Mark the records that are selected, also those of living writers."""
        purged = self.find(selection)
        self._expirer.doom(self._doomed)
        return purged

    def erase_doomed(self) -> int:
        """Erase what was marked by :meth:`doom`, a grace later; how many records are left."""
        estate = self.estate
        estate.begin(estate.report)
        if not self._doomed:
            return 0
        estate.survey()
        self._reclaimer.run()
        estate.survey_again()
        there = {id(segment) for segment in estate.segments()}
        return sum(
            int((segment.rows.array["erase"] & ~segment.rows.array["done"]).sum())
            for segment, _ in self._doomed
            if id(segment) in there
        )

    # Accounting ---------------------------------------------------------------

    def _summarize(self) -> None:
        estate, report = self.estate, self.estate.report
        report.used_after = estate.used()
        report.free = estate.free()
        report.pending = self._reclaimer.pending()
        report.namespaces = len(estate.namespaces)
        for name, namespace in estate.namespaces.items():
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
        report.by_namespace.update(estate.strange)
        self._evictor.remember(report.used_after)

    def _publish(self) -> None:
        estate = self.estate
        estate.step("publish")
        catalogues = {name: n.catalogue for name, n in estate.namespaces.items()}
        try:
            publish_usage(
                estate.root,
                time=estate.clock.time(),
                used=estate.used(),
                settled=sum(c.allocated - c.growing for c in catalogues.values()),
                known={name: c.known() for name, c in catalogues.items()},
            )
        except OSError as error:
            estate.report.problem("usage.json", error)
