"""What a janitor looks after: the namespaces of a target, and what is known of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError, LifeboatError
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.integrity import IDENTITY_FIELD, IntegrityKey
from lifeboat_cache.janitor.accesses import AccessFolder
from lifeboat_cache.janitor.catalogue import Catalogue, Segment
from lifeboat_cache.janitor.copies import Copies
from lifeboat_cache.janitor.kinship import kinship
from lifeboat_cache.janitor.lease import JanitorLease
from lifeboat_cache.janitor.policy import JanitorClock, JanitorPolicy
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.targets.files import read_document
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import DEAD_GENERATION, write_atomically

__all__ = ["DeadBits", "Estate", "Household"]

_LATEST = (1 << 32) - 1


@dataclass
class Household:
    """A namespace and what belongs to it.

    Attributes
    ----------
    catalogue, folder
        Its files and records, and when these were used.
    kin
        What its families and those of the namespaces akin to it have in common.
    key, verifiable
        Its integrity key, and whether payloads can be verified with it.
    documented
        Whether its document was there.
    news
        Dead bits that readers have not been told of.
    """

    catalogue: Catalogue
    folder: AccessFolder
    kin: int
    key: bytes | None = None
    verifiable: bool = True
    documented: bool = True
    news: bool = False


@dataclass
class DeadBits:
    """Dead bits to set, by segment."""

    slots: list[tuple[Segment, npt.NDArray[np.int64]]] = field(default_factory=list)


class Estate:
    """The namespaces of a target, as the steps of a janitor find and leave them.

    Parameters
    ----------
    target, policy, key, clock, on_step
        See :class:`~lifeboat_cache.janitor.janitor.Janitor`.

    Attributes
    ----------
    namespaces
        What is known, by the names of their directories.
    strange
        Bytes in namespaces of which nothing is known.
    copies
        Where records were copied to lately.
    report, now
        Of the run under way; see :meth:`begin`.
    on_step
        Told what is done next.
    no_holes, no_space
        Whether the filesystem has shown that it cannot punch, or has no space for dead bits.
    """

    def __init__(
        self,
        target: FilesystemTarget,
        policy: JanitorPolicy,
        key: IntegrityKey | None,
        clock: JanitorClock,
        on_step: Callable[[str], None] | None,
    ) -> None:
        self.target = target
        self.root = target.root
        self.policy = policy
        self.clock = clock
        self.lease = JanitorLease(self.root)
        self.namespaces: dict[str, Household] = {}
        self.strange: dict[str, int] = {}
        self.copies = Copies()
        self.report = JanitorReport()
        self.now = 0.0
        self.no_holes = False
        self.no_space = False
        self._key = key
        self.on_step = on_step

    def begin(self, report: JanitorReport) -> None:
        """From now on it is another run."""
        self.report = report
        self.now = max(self.clock.monotonic(), 1e-9)

    def step(self, name: str) -> None:
        self.lease.beat()
        if self.on_step is not None:
            self.on_step(name)

    def survey(self) -> None:
        report = self.report
        names = {path.name: path for path in self.target.directories()}
        for gone in self.namespaces.keys() - names.keys():
            del self.namespaces[gone]
        self.strange = {}
        for name, path in names.items():
            known = self.namespaces.get(name)
            if known is None or not (known.documented or self._document(path) is None):
                known = self._open(path)
                if known is None:  # nothing says whose it is, but it holds space
                    self.strange[name] = self.target.allocated(path)
                    continue
                self.namespaces[name] = known
            self.refresh(known)
        present = self.present()
        for namespace in self.namespaces.values():
            namespace.folder.read(present, report)

    @staticmethod
    def _document(path: Path) -> Namespace | None:
        """What a namespace's document says, if it is intact and belongs there."""
        try:
            document = Namespace.from_json(read_document(path / "namespace.json"))
        except (OSError, LifeboatError):
            return None
        return document if document.directory == path.name else None

    def _open(self, path: Path) -> Household | None:
        document = self._document(path)
        digest = document.digest if document is not None else self.target.digest_of(path)
        if digest is None:
            return None
        catalogue = Catalogue(path, digest, lambda: self.now)
        # Without the document it is not known whether there is a key.
        needed = document.identity.get(IDENTITY_FIELD) if document is not None else ""
        mine = self._key is not None and self._key.id == needed
        return Household(
            catalogue,
            AccessFolder(catalogue),
            kinship(document, digest),
            key=self._key.secret if self._key is not None and mine else None,
            verifiable=mine or needed is None,
            documented=document is not None,
        )

    def refresh(self, namespace: Household) -> None:
        try:
            namespace.catalogue.refresh(self.report)
        except OSError as error:
            self.report.problem(namespace.catalogue.directory.name, error)

    def survey_again(self) -> None:
        """What is allocated now."""
        for namespace in self.namespaces.values():
            self.refresh(namespace)

    def present(self) -> int:
        """The time now, as far as the records let it be believed.

        A record of the future would be the most recent one for ever: it counts as
        used now. But when most records are of the future, this clock is wrong.
        """
        now = min(max(int(self.clock.time()), 0), _LATEST)
        times = [s.rows.array["time"] for s in self.segments() if len(s.rows)]
        if not times:
            return now
        everything = np.concatenate(times)
        middle = int(np.median(everything))
        return now if now >= middle else int(everything.max())

    def segments(self) -> list[Segment]:
        return [s for n in self.namespaces.values() for s in n.catalogue.segments()]

    def used(self) -> int:
        known = sum(n.catalogue.allocated for n in self.namespaces.values())
        return known + sum(self.strange.values())

    def free(self) -> int:
        try:
            stat = os.statvfs(self.root)
        except OSError as error:
            self.report.problem("free space", error)
            return 0
        return stat.f_bavail * stat.f_frsize

    def verifiable(self, segment: Segment) -> bool:
        namespace = self.namespaces.get(segment.writer.directory.name)
        return namespace is None or namespace.verifiable

    def sparse(self, segment: Segment) -> bool:
        """Whether so little of a segment is live that it is rewritten."""
        if not self.verifiable(segment):
            return False
        live = segment.rows.live_bytes()
        return live < self.policy.live_ratio * (segment.allocated - HEADER_BYTES)

    # Dead bits ----------------------------------------------------------------

    def mark(self, plan: DeadBits) -> int:
        """Set dead bits and tell readers; how many records are dead that were not."""
        total = 0
        created = min(max(int(self.clock.time()), 0), _LATEST)
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
                self.report.problem(segment.bitmap.path.name, error)
                self.no_space |= getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
                continue
            self.step("marked")
            touched.add(segment.writer.directory.name)
            at = segment.rows.at(slots)
            rows = segment.rows.array
            at = at[at >= 0]
            new = at[rows["marked"][at] == 0]
            rows["marked"][new] = self.now
            total += new.shape[0]
        for name in touched:
            self.namespaces[name].news = True
        self._tell()
        return total

    def _tell(self) -> None:
        """Replace the files whose change tells readers to look at the bitmaps."""
        for namespace in self.namespaces.values():
            if not namespace.news:
                continue
            path = namespace.catalogue.directory / DEAD_GENERATION
            try:
                write_atomically(path, os.urandom(8).hex().encode() + b"\n", durable=False)
            except OSError as error:
                self.report.problem(f"{path.parent.name}/{path.name}", error)
                continue
            namespace.news = False

    def write_summary(self, namespace: Household) -> None:
        try:
            namespace.folder.write(self.now)
        except OSError as error:
            self.report.problem(f"{namespace.catalogue.directory.name}: summary", error)
            return
        self.step("summary")
        namespace.folder.discard(self.report)
