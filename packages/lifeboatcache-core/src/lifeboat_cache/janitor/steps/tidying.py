"""A step of the janitor: what ended writers have left goes."""

from __future__ import annotations

import contextlib
import os

from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.janitor.catalogue import Catalogue, Writer
from lifeboat_cache.janitor.estate import Estate, Household
from lifeboat_cache.janitor.reclaim import trim
from lifeboat_cache.targets.files import is_gone
from lifeboat_cache.targets.layout import segment_name

__all__ = ["Tidier"]


class Tidier:
    """Removes what ended writers have left and nobody needs, and sums up access logs."""

    def __init__(self, estate: Estate) -> None:
        self._estate = estate

    def run(self) -> None:
        """Remove what ended writers have left and nobody needs."""
        self._estate.step("tidy")
        for namespace in self._estate.namespaces.values():
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
                    self._estate.report.problem(writer.name, error)

    @staticmethod
    def _tidy_bitmaps(writer: Writer) -> None:
        """Remove bitmaps of segments that have gone."""
        for number in writer.bitmaps.keys() - writer.segments.keys():
            path = writer.directory / segment_name(writer.name, number)
            if is_gone(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path.with_suffix(".dead"))

    def _tidy_writer(self, catalogue: Catalogue, namespace: Household, writer: Writer) -> None:
        if not writer.complete:
            return
        for segment in writer.segments.values():
            kept = max(HEADER_BYTES, segment.rows.end())
            if not (segment.untouchable or segment.trimmed) and (
                segment.allocated > kept + (64 << 10) or segment.size > kept + (64 << 10)
            ):
                self._estate.report.trimmed_bytes += trim(segment)
                segment.trimmed = True
        if writer.segments or writer.tombstones:
            return
        for number in writer.named:  # a listing may have left out what is there
            if not is_gone(writer.directory / segment_name(writer.name, number)):
                return
        if "access" in writer.files:
            if namespace.folder.pending:
                return  # its uses are not in the summary yet
            namespace.folder.discard(self._estate.report)
            if "access" in writer.files:
                return
        self._estate.step("unlink")
        # The journal first: what is killed half-way leaves nothing half-alive.
        for kind in ("journal", "lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(writer.path(kind))
            self._estate.step("unlinked")
        del catalogue.writers[writer.name]
        self._estate.report.writers_removed += 1

    def summarize(self) -> None:
        self._estate.step("summaries")
        for namespace in self._estate.namespaces.values():
            if namespace.folder.due(self._estate.now, self._estate.policy.summary_s):
                self._estate.write_summary(namespace)
