"""Folding access logs: the last use of each record survives the logs' deletion.

What all logs of a namespace say is kept in one log of the janitor's own, in the
name of a writer whose 16 bytes are zero. It is replaced as a whole; then the logs
that it sums up are removed, or punched out while their processes still append.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.access import ACCESS, ACCESS_BYTES, pack_accesses, parse_accesses
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_ACCESS, FileHeader
from lifeboat_cache.janitor.catalogue import Catalogue, Segment
from lifeboat_cache.janitor.report import JanitorReport
from lifeboat_cache.targets.direct import ALIGNMENT
from lifeboat_cache.targets.files import close_file, open_file, read_range
from lifeboat_cache.targets.holes import data_start, punch_hole
from lifeboat_cache.targets.layout import SUMMARY_WRITER, write_atomically

__all__ = ["AccessFolder"]

#: Entries read in one go.
_PAGE_BYTES = ACCESS_BYTES << 15


class AccessFolder:
    """The access logs of one namespace.

    Parameters
    ----------
    catalogue
        The namespace.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._path = catalogue.directory / f"{SUMMARY_WRITER.hex()}.access"
        self._ends: dict[str, int] = {}  # how far each process's log was read
        self._summary: npt.NDArray[Any] | None = None
        self._news = False
        self._written = float("-inf")

    def read(self, present: int, report: JanitorReport) -> None:
        """Take in what logs hold beyond what was read before.

        Parameters
        ----------
        present
            The time now, in seconds since 1970; later uses count as now.
        """
        if self._summary is None:
            summary = self._read_log(self._path, 0, report)[0] if self._catalogue.summary else None
            self._summary = np.zeros(0, dtype=ACCESS) if summary is None else summary
            # What a record of the future was really used is in there, if anywhere.
            self._correct(present, 0)
            self.apply(self._summary, present)
        self._correct(present, present)
        for writer in self._catalogue.writers.values():
            if "access" not in writer.files or writer.untouchable:
                continue
            start = self._ends.get(writer.name, 0)
            accesses, end = self._read_log(writer.path("access"), start, report)
            if accesses is not None and accesses.shape[0]:
                self._news = True
                self.apply(accesses, present)
            self._ends[writer.name] = end
        for name in self._ends.keys() - self._catalogue.writers.keys():
            del self._ends[name]

    def _correct(self, present: int, instead: int) -> None:
        """Let no record count as used later than now."""
        for segment in self._catalogue.segments():
            rows = segment.rows.array
            wrong = (rows["used"] > present) | (rows["used"] == 0)
            if wrong.any():
                rows["used"][wrong] = instead
                self._news = True

    def _read_log(
        self, path: Path, start: int, report: JanitorReport
    ) -> tuple[npt.NDArray[Any] | None, int]:
        """Intact entries from ``start`` (behind the header), and where they end."""
        try:
            fd = open_file(path)
        except OSError:
            return None, start
        try:
            header = FileHeader.unpack(read_range(fd, HEADER_BYTES, 0), MAGIC_ACCESS, path.name)
            if header.namespace != self._catalogue.digest:
                return None, start
            parts = []
            if not start:  # what an earlier janitor has punched out
                first = max(0, data_start(fd, HEADER_BYTES) - HEADER_BYTES)
                start = first // ACCESS_BYTES * ACCESS_BYTES
            while data := read_range(fd, _PAGE_BYTES, HEADER_BYTES + start):
                whole = len(data) // ACCESS_BYTES * ACCESS_BYTES
                parts.append(parse_accesses(data[:whole]))
                start += whole
                if whole < _PAGE_BYTES:
                    break
            return (np.concatenate(parts) if parts else np.zeros(0, dtype=ACCESS)), start
        except FormatError:
            return None, start
        except OSError as error:
            report.problem(path.name, error)
            return None, start
        finally:
            close_file(fd)

    def apply(self, accesses: npt.NDArray[Any], present: int) -> None:
        """Let records count as used when accesses say so, but not later than now."""
        if not accesses.shape[0]:
            return
        owners, place = np.unique(accesses["writer"], return_inverse=True)
        for number, owner in enumerate(owners.tolist()):
            writer = self._catalogue.writers.get(bytes(owner).hex())
            if writer is None:
                continue
            mine = accesses[place == number]
            for segment_number in np.unique(mine["segment"]).tolist():
                segment = writer.segments.get(segment_number)
                if segment is None:
                    continue
                uses = mine[mine["segment"] == segment_number]
                at = segment.rows.at(uses["slot"])
                found = at >= 0
                times = np.minimum(uses["time"][found], np.uint32(present))
                np.maximum.at(segment.rows.array["used"], at[found], times)

    def carry(self, segment: Segment, slots: npt.NDArray[Any], used: npt.NDArray[Any]) -> None:
        """Note when records that were copied to other places had been used."""
        at = segment.rows.at(slots)
        found = at >= 0
        np.maximum.at(segment.rows.array["used"], at[found], used[found].astype(np.uint32))
        self._news = True

    def due(self, now: float, every: float) -> bool:
        """Whether the summary should be written."""
        return self._news and now - self._written >= every

    def write(self, now: float) -> None:
        """Replace the summary. Raises ``OSError``."""
        catalogue = self._catalogue
        parts = []
        for segment in catalogue.segments():
            rows = segment.rows.array
            worth = rows[(rows["used"] != rows["time"]) & segment.rows.live()]
            if worth.shape[0]:
                part = np.zeros(worth.shape[0], dtype=ACCESS)
                part["writer"] = np.void(segment.writer.id)
                part["segment"] = segment.number
                part["slot"] = worth["slot"]
                part["time"] = worth["used"]
                parts.append(part)
        # Neither may anything be lost of writers that are not understood.
        if self._summary is not None and self._summary.shape[0]:
            skipped = {w.id for w in catalogue.writers.values() if w.untouchable}
            if skipped:
                kept = np.array([bytes(w) in skipped for w in self._summary["writer"].tolist()])
                parts.append(self._summary[kept])
        body = pack_accesses(np.concatenate(parts)) if parts else b""
        header = FileHeader(MAGIC_ACCESS, catalogue.digest, SUMMARY_WRITER, 0, 0)
        if body:
            write_atomically(self._path, header.pack() + body)
        elif catalogue.summary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        catalogue.summary = bool(body)
        self._news = False
        self._written = now

    @property
    def pending(self) -> bool:
        """Whether the summary on disk lacks something that was read from logs."""
        return self._news

    def discard(self, report: JanitorReport) -> None:
        """Remove what the summary on disk holds. To be called only after it was written."""
        for writer in self._catalogue.writers.values():
            end = self._ends.get(writer.name, 0)
            if "access" not in writer.files or writer.untouchable or not end:
                continue
            path = writer.path("access")
            try:
                if not writer.alive:
                    if path.stat().st_size <= HEADER_BYTES + end + ACCESS_BYTES - 1:
                        os.unlink(path)
                        writer.files.discard("access")
                        report.logs_folded += 1
                    continue
                length = end // ALIGNMENT * ALIGNMENT
                fd = open_file(path, os.O_WRONLY)
                try:
                    # Not again what was punched out before.
                    start = data_start(fd, HEADER_BYTES)
                    if start < HEADER_BYTES + length and punch_hole(
                        fd, start, HEADER_BYTES + length - start
                    ):
                        report.logs_folded += 1
                finally:
                    close_file(fd)
            except FileNotFoundError:  # another janitor, or a purge, was faster
                writer.files.discard("access")
            except OSError as error:
                report.problem(path.name, error)
