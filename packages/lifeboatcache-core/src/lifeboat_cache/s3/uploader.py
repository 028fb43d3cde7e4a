"""Brings staged segments into the bucket, those of processes that have died, too.

A segment is one object; after it, a slice of its writer's journal is put into the feed. **The slice
is the commit point**: before it nobody else knows of the segment, and what is done again after a
crash replaces an object by an equal one. Only then is the local file removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lifeboat_cache.errors import FormatError, LifeboatError, NewerFormatError
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.janitor.bitmaps import Bitmap
from lifeboat_cache.s3.names import FeedKind, FeedName
from lifeboat_cache.s3.slices import pack_slice
from lifeboat_cache.s3.staging import LeftBehind, Sealed, read_left_behind
from lifeboat_cache.targets.files import close_file, open_file
from lifeboat_cache.targets.layout import parse_name
from lifeboat_cache.targets.writer_lock import writer_alive

if TYPE_CHECKING:
    from lifeboat_cache.s3.archive import Archive

__all__ = ["Uploader"]

_log = logging.getLogger("lifeboat_cache")

#: A segment with records in it is uploaded after so many seconds, full or not …
_SEAL_S = 30.0
#: … and so are tombstones.
_BURIED_S = 30.0

#: How often it is looked for segments that are complete, and for those of dead processes.
_LOOK_S = 1.0
_LEFT_S = 20.0

#: After an error it is tried again after so many seconds, and later at most.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 30.0

#: Tombstones alone have numbers that no segment has.
_FIRST_DEAD = 50_000_000


class Uploader:
    """Uploads what is staged, on a thread of its own.

    Parameters
    ----------
    archive
        Where from and where to.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._hurry = False
        self._left_at = 0.0
        self._buried_at = 0.0
        self._pause_s = _LEAST_PAUSE_S
        self._dead_number = _FIRST_DEAD
        self._said: set[str] = set()
        self.problem = ""
        #: Writers whose journals a later release has written: it uploads what they have staged.
        self.left_alone: frozenset[str] = frozenset()
        #: Bytes that are complete and not in the bucket yet.
        self.waiting = 0
        #: Segments in the bucket because of this process.
        self.uploaded = 0

    def start(self) -> None:
        """Begin, if that has not been done yet."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._work, name="s3 upload", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Look for what a writer has left that has just been closed."""
        self._left_at = 0.0
        self._wake.set()

    def stop(self) -> None:
        """End after the object under way."""
        self._stop.set()
        self._wake.set()

    @property
    def busy(self) -> bool:
        """Whether something is still to be uploaded."""
        return self.waiting > 0

    def flush(self, timeout: float) -> bool:
        """Upload everything that was stored before, complete or not; whether that was done."""
        end = time.monotonic() + timeout
        self._hurry = True
        self.start()
        self.wake()
        while time.monotonic() < end:
            if not self._hurry:
                return not self.problem
            time.sleep(0.05)
        return False

    def _work(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            pause = _LOOK_S
            try:
                hurry = self._hurry
                self._round(hurry=hurry)
                if hurry:
                    self._hurry = False
                self.problem = ""
                self._pause_s = _LEAST_PAUSE_S
            except (OSError, LifeboatError) as exc:
                self.problem = str(exc)
                self._say(self.problem)
                pause = self._pause_s
                self._pause_s = min(_MOST_PAUSE_S, 2 * self._pause_s)
            except Exception as exc:
                _log.exception("LifeboatCache: uploading failed; please report this")
                self.problem = f"internal error: {exc}"
                pause = _MOST_PAUSE_S
            self._wake.wait(pause)

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            if len(self._said) > 64:
                self._said.clear()
            self._said.add(problem)
            _log.warning("LifeboatCache: staged blocks wait for the bucket: %s", problem)

    def _round(self, *, hurry: bool) -> None:
        self._archive.claim()
        now = time.monotonic()
        age = 0.0 if hurry else _SEAL_S
        todo = [
            (writer, sealed) for writer in self._archive.writers() for sealed in writer.sealed(age)
        ]
        left: list[tuple[Path, LeftBehind]] = []
        if hurry or now >= self._left_at:
            self._left_at = now + _LEFT_S
            left = self._find_left()
        self.waiting = sum(sealed.size for _, sealed in todo) + sum(
            sealed.size for _, one in left for sealed in one.sealed
        )
        problem: OSError | None = None
        for writer, sealed in todo:
            try:
                self._upload(sealed)
            except OSError as exc:
                problem = self._local_problem(exc)
                if sealed.path.exists():
                    continue
                # Somebody has deleted it: there is nothing to upload any more.
            writer.forget(sealed.number)
        for directory, one in left:
            try:
                self._finish(directory, one)
            except OSError as exc:
                problem = self._local_problem(exc)
        if hurry or now >= self._buried_at:
            self._buried_at = now + _BURIED_S
            self._publish_buried()
        self._archive.describe_again()
        if problem is not None:
            raise problem

    def _local_problem(self, exc: OSError) -> OSError:
        """A file that cannot be read does not keep others waiting; a bucket that fails does."""
        if isinstance(exc, LifeboatError) or self._stop.is_set():
            raise exc
        return exc

    # One segment ------------------------------------------------------------

    def _upload(self, sealed: Sealed) -> None:
        """Put a segment and its slice, and remove the file. Raises ``OSError``."""
        waited = sealed.size
        sealed = _living(sealed)
        archive, size = self._archive, sealed.size
        if self._stop.is_set():
            raise InterruptedError("the process ends")
        if size and not archive.catalog(sealed.namespace).has(sealed.writer, sealed.number):
            folder = sealed.namespace.hex()[:32]
            archive.document(sealed.namespace, _document(sealed.path.parent))
            fd = open_file(sealed.path)
            try:
                key = archive.names.segment(folder, sealed.writer, sealed.number)
                archive.client.put_file(key, fd, size)
                # What was purged while it was sent does not stay there, either.
                while (left := _living(sealed)).entries.shape[0] < sealed.entries.shape[0]:
                    sealed, size = left, left.size
                    if size:
                        archive.client.put_file(key, fd, size)
                    else:
                        archive.client.delete([key])
            finally:
                close_file(fd)
            if size:
                self._publish(sealed.namespace, sealed.writer, sealed.number, size, sealed.entries)
                self.uploaded += 1
        self.waiting = max(0, self.waiting - waited)
        # Not cut before: who reads it just now goes on.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sealed.path)
        self._archive.health.good()

    def _publish(
        self, namespace: bytes, writer: bytes, number: int, size: int, entries: Entries
    ) -> None:
        archive = self._archive
        folder = namespace.hex()[:32]
        kind: FeedKind = "journal" if size else "dead"
        name = FeedName(int(archive.client.now()), writer, number, size, kind)
        data = pack_slice(namespace, writer, number, entries)
        archive.client.put(archive.names.in_feed(folder, name), data)
        archive.catalog(namespace).uploaded(name, data)

    def _publish_buried(self) -> None:
        for writer in self._archive.writers():
            tombstones = writer.take_buried()
            if not tombstones.shape[0]:
                continue
            try:
                self._bury(writer.namespace, writer.writer, tombstones)
            except BaseException:
                writer.put_back(tombstones)
                raise

    def _bury(self, namespace: bytes, writer: bytes, tombstones: Entries) -> None:
        self._dead_number += 1
        self._publish(namespace, writer, self._dead_number, 0, tombstones)

    # Those of dead processes ------------------------------------------------

    def _find_left(self) -> list[tuple[Path, LeftBehind]]:
        found: list[tuple[Path, LeftBehind]] = []
        left_alone: set[str] = set()
        for directory in self._archive.staging.directories():
            journals: set[str] = set()
            numbers: dict[str, list[int]] = {}
            for entry in os.scandir(directory):
                name = parse_name(entry.name)
                if name is None:
                    continue
                if name.kind == "journal":
                    journals.add(name.writer)
                elif name.kind == "segment":
                    numbers.setdefault(name.writer, []).append(name.segment)
            for writer in sorted(journals | numbers.keys()):
                if writer_alive(directory, writer):
                    continue
                try:
                    one = read_left_behind(directory, writer, sorted(numbers.get(writer, ())))
                except FileNotFoundError:
                    continue  # another process has done it meanwhile
                except NewerFormatError as exc:
                    left_alone.add(writer)
                    self._say(str(exc))
                    continue
                if one.problem:
                    self._say(one.problem)
                found.append((directory, one))
        self.left_alone = frozenset(left_alone)
        return found

    def _finish(self, directory: Path, left: LeftBehind) -> None:
        """Upload what a dead writer has staged, and remove the rest of it."""
        if any(sealed.size for sealed in left.sealed):
            # It may have died after the upload.
            self._archive.catalog(left.namespace).refresh(whole=True)
        for sealed in left.sealed:
            self._upload(sealed)
        if left.tombstones.shape[0]:
            self._bury(left.namespace, left.writer, left.tombstones)
        for kind in ("journal", "lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / f"{left.writer.hex()}.{kind}")


def _living(sealed: Sealed) -> Sealed:
    """Without the records that were marked dead while they waited, and their bytes.

    So what is purged does not get into the bucket afterwards. Raises ``OSError``.
    """
    path = sealed.path
    bitmap = Bitmap(path.parent, sealed.namespace, sealed.writer, sealed.number)
    try:
        dead = bitmap.read()
    except FormatError:  # as if there were none: it can only have been made later
        return sealed
    slots = sealed.entries["slot"].astype(np.int64)
    gone = (slots < dead.shape[0]) & (
        dead[np.minimum(slots, dead.shape[0] - 1)] if dead.shape[0] else False
    )
    if not gone.any():
        return sealed
    fd = open_file(path, os.O_WRONLY)
    try:
        for entry in sealed.entries[gone]:
            os.pwrite(fd, bytes(int(entry["stored_length"])), int(entry["offset"]))
    finally:
        close_file(fd)
    return replace(sealed, entries=sealed.entries[~gone])


def _document(directory: Path) -> bytes:
    return (directory / "namespace.json").read_bytes()
