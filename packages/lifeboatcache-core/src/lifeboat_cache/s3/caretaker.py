"""Looks after a bucket: uploads what is staged, makes room, and says what it costs.

Each pass costs a few requests, so there are few: every ten minutes, and earlier when the bucket is
about to be full.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lifeboat_cache.agent.priority import step_back
from lifeboat_cache.agent.status import HUNG_AFTER_S
from lifeboat_cache.errors import ConfigError, LifeboatError
from lifeboat_cache.integrity import IntegrityKey, integrity_key
from lifeboat_cache.janitor import JanitorPolicy, JanitorReport
from lifeboat_cache.registry import TargetFacts
from lifeboat_cache.s3.archive import Archive, archive_of
from lifeboat_cache.s3.janitor import BucketJanitor
from lifeboat_cache.s3.settings import S3Settings

__all__ = ["Keeping", "S3Caretaker"]

_log = logging.getLogger("lifeboat_cache")

#: A pass begins so many seconds after the one before; a listing costs one request for every
#: thousand segments.
_PASS_S = 600.0
#: … or so many, if more than the janitor wants is used.
_FULL_S = 60.0

#: After a fault it is tried again after so many seconds.
_RETRY_S = 30.0

#: How often it looks whether a pass is due.
_LOOK_S = 2.0

#: Whoever ends waits so many seconds for the step under way.
_END_S = 5.0

#: What went wrong is said again after so many seconds.
_SAY_AGAIN_S = 600.0


@dataclass(frozen=True)
class Keeping:
    """What is kept in a bucket, and how long.

    Attributes
    ----------
    eviction, max_age_s
        See :class:`~lifeboat_cache.janitor.JanitorPolicy`.
    integrity_key
        The key's file; without it, records that it protects are moved unverified.
    """

    eviction: Literal["lru", "none"] = "lru"
    max_age_s: float = 0.0
    integrity_key: Path | None = None


class _EndedError(BaseException):
    """Ends a pass between two of its steps."""


class S3Caretaker:
    """Looks after the bucket of one mover, on a thread of its own.

    Parameters
    ----------
    settings, keeping
        Which bucket, and what is kept there; replaced by :meth:`update`.
    """

    def __init__(self, settings: S3Settings, keeping: Keeping) -> None:
        self._settings = settings
        self._keeping = keeping
        self._archive: Archive = archive_of(settings)
        self._problem = ""
        self._totals: Counter[str] = Counter()
        self._free = 0
        self._in_vain = False  # whether to look again soon would change nothing
        self._report: JanitorReport | None = None
        self._said: tuple[str, float] = ("", float("-inf"))
        self._since: float | None = None  # begin of the pass under way
        self._moved = 0.0
        self._step = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="s3 caretaker", daemon=True)
        self._thread.start()

    def update(self, settings: S3Settings, keeping: Keeping) -> None:
        """Use other limits from now on."""
        self._keeping = keeping
        if settings != self._settings:
            self._settings = settings
            self._archive = archive_of(settings)
            self._archive.limit(settings)

    @property
    def busy(self) -> bool:
        """Whether something is to be uploaded, and can be."""
        uploader = self._archive.uploader
        try:
            return not uploader.problem and (
                uploader.busy or self._archive.unfinished(uploader.left_alone)
            )
        except OSError:
            return False

    def facts(self) -> TargetFacts:
        """The bucket, for the registry."""
        settings, archive = self._settings, self._archive
        said = archive.facts()
        problem = "; ".join(filter(None, (str(said.get("problem") or ""), self._problem)))
        counters: dict[str, float] = dict(self._totals)
        for verb, count in said.get("requests", {}).items():
            counters[f"s3_requests:{verb}"] = count
        for kind, count in said.get("errors", {}).items():
            counters[f"s3_errors:{kind}"] = count
        counters["s3_received_bytes"] = said.get("bytes_in", 0)
        counters["s3_sent_bytes"] = said.get("bytes_out", 0)
        counters["s3_uploaded_segments"] = archive.uploader.uploaded
        report = self._report
        return TargetFacts(
            name=settings.name,
            location=settings.location,
            used_bytes=archive.used(),
            capacity_bytes=settings.capacity,
            free_bytes=self._free,
            reserve_bytes=settings.reserve,
            blocks=archive.blocks(),
            problem=problem,
            codecs=report.by_codec if report is not None else {},
            staged_bytes=archive.staged(),
            counters=counters,
        )

    def describe(self) -> dict[str, Any]:
        """The bucket, for the mover's own document."""
        since, now = self._since, time.monotonic()
        return {
            "path": self._settings.location,
            "pass_s": None if since is None else round(now - since, 1),
            "step": "" if since is None else self._step,
            "stuck": since is not None and now - self._moved > HUNG_AFTER_S,
            "problem": self._problem,
        }

    def close(self) -> None:
        """End after the step of the pass under way, and let another node look after the bucket.

        Does not wait for long.
        """
        self._ending.set()
        self._thread.join(_END_S)

    def _work(self) -> None:
        step_back()
        janitor: BucketJanitor | None = None
        of: tuple[Archive, Keeping] | None = None
        ended = float("-inf")
        pause = 0.0
        while not self._ending.is_set():
            wanted = self._archive, self._keeping
            if of == wanted and not self._due(time.monotonic() - ended, pause):
                self._ending.wait(_LOOK_S)
                continue
            pause = _PASS_S
            try:
                if janitor is None or of != wanted:
                    of, old = wanted, janitor
                    janitor = self._open(*wanted)
                    if old is not None:
                        old.close()
                archive = self._archive
                archive.uploader.start()
                archive.tidy()
                self._free = archive.staging.usage().free
                self._since = self._moved = time.monotonic()
                self._note(janitor.run_once())
            except _EndedError:
                break
            except (OSError, LifeboatError) as exc:
                self._say(str(exc))
                pause = _RETRY_S
            except Exception as exc:
                _log.exception("looking after a bucket failed; please report this")
                self._problem = f"internal error: {exc}"
                janitor = None
            finally:
                self._since = None
                ended = time.monotonic()
        if janitor is not None:
            janitor.close()

    def _due(self, seconds: float, pause: float) -> bool:
        """Whether a pass is, so long after the last one."""
        if seconds >= pause:
            return True
        capacity = self._settings.capacity
        full = capacity is not None and self._archive.used() > JanitorPolicy().high * capacity
        return full and not self._in_vain and seconds >= _FULL_S

    def _open(self, archive: Archive, keeping: Keeping) -> BucketJanitor:
        policy = JanitorPolicy(eviction=keeping.eviction, max_age_s=keeping.max_age_s)
        return BucketJanitor(archive, policy=policy, key=self._key(keeping), on_step=self._on_step)

    def _key(self, keeping: Keeping) -> IntegrityKey | None:
        try:
            return integrity_key(keeping.integrity_key)
        except ConfigError as exc:
            self._say(str(exc))
            return None

    def _on_step(self, step: str) -> None:
        self._step, self._moved = step, time.monotonic()
        if self._ending.is_set():
            raise _EndedError

    def _note(self, report: JanitorReport) -> None:
        self._totals = report.add_to(self._totals)
        self._in_vain = self._keeping.eviction == "none"
        if not report.busy:
            self._report = report
        self._problem = ""
        if report.problems:
            self._say("; ".join(report.problems))
        if report.segments_removed:
            _log.info(
                "%s: deleted %d segments of %s bytes, moved %s bytes before; %s bytes used now",
                self._settings.location,
                report.segments_removed,
                f"{report.removed_bytes:,}",
                f"{report.copied_bytes:,}",
                f"{report.used_after:,}",
            )

    def _say(self, problem: str) -> None:
        self._problem = problem
        now = time.monotonic()
        if problem != self._said[0] or now - self._said[1] >= _SAY_AGAIN_S:
            self._said = problem, now
            _log.warning("%s", problem)
