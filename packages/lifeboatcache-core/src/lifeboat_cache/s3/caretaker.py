"""Looks after a bucket: uploads what is staged, knows how much there is, and says what it costs."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

from lifeboat_cache.agent.priority import step_back
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.registry import TargetFacts
from lifeboat_cache.s3.archive import Archive, archive_of
from lifeboat_cache.s3.settings import S3Settings

__all__ = ["S3Caretaker"]

_log = logging.getLogger("lifeboat_cache")

#: How often it is looked how much there is in namespaces that nobody here uses; a listing costs
#: one request for every thousand segments.
_SURVEY_S = 600.0

#: After a fault it is tried again after so many seconds.
_RETRY_S = 30.0

#: Uploads that nobody has ended are given up when they are so old.
_UPLOAD_AGE_S = 86_400.0


class S3Caretaker:
    """Looks after the bucket of one mover, on a thread of its own.

    Parameters
    ----------
    settings
        Which bucket; replaced by :meth:`update`.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._archive: Archive = archive_of(settings)
        self._problem = ""
        self._totals: Counter[str] = Counter()
        self._free = 0
        self._thread = threading.Thread(target=self._work, name="s3 caretaker", daemon=True)
        self._thread.start()

    def update(self, settings: S3Settings) -> None:
        """Use other limits from now on."""
        if settings != self._settings:
            self._settings = settings
            self._archive = archive_of(settings)

    @property
    def busy(self) -> bool:
        """Whether something is to be uploaded, and can be."""
        return self._archive.uploader.busy and not self._archive.uploader.problem

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
        return TargetFacts(
            name=settings.name,
            location=settings.location,
            used_bytes=archive.used(),
            capacity_bytes=settings.capacity,
            free_bytes=self._free,
            reserve_bytes=settings.reserve,
            blocks=archive.blocks(),
            problem=problem,
            staged_bytes=archive.staged(),
            counters=counters,
        )

    def describe(self) -> dict[str, Any]:
        """The bucket, for the mover's own document."""
        return {
            "path": self._settings.location,
            "pass_s": None,
            "step": "",
            "stuck": False,
            "problem": self._problem,
        }

    def _work(self) -> None:
        step_back()
        tidied = False
        while True:
            pause = _SURVEY_S
            archive = self._archive
            try:
                archive.uploader.start()
                self._free = archive.staging.usage().free
                archive.survey()
                if not tidied:
                    archive.client.forget_uploads(archive.names.prefix, _UPLOAD_AGE_S)
                    tidied = True
                self._problem = ""
            except (OSError, LifeboatError) as exc:
                self._say(str(exc))
                pause = _RETRY_S
            except Exception as exc:
                _log.exception("looking after a bucket failed; please report this")
                self._problem = f"internal error: {exc}"
            time.sleep(pause)

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s", problem)
