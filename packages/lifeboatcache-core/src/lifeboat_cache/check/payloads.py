"""Threads that read payloads in long runs and compare checksums."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lifeboat_cache.checksum import payload_checksum
from lifeboat_cache.targets.direct import ALIGNMENT, open_direct, read_into
from lifeboat_cache.targets.files import GONE, close_file, open_file

__all__ = ["Payload", "Progress", "Verdict", "Verifier", "runs"]

#: One read; each thread has one buffer of this size.
_READ_BYTES = 4 << 20

#: A run goes to one thread as a whole.
_RUN_BYTES = 32 << 20

#: Reading over so small a gap is cheaper than another read.
_GAP_BYTES = 64 << 10


class Verdict(Enum):
    """What reading a payload showed."""

    GOOD = "good"
    CORRUPT = "corrupt"
    #: The file ends before the payload does, or has gone.
    CUT = "cut"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Payload:
    """Stored bytes to verify: where they lie, and what they have to match."""

    entry: Any
    offset: int
    length: int
    bound: bytes

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.offset + self.length

    @property
    def checksum(self) -> bytes:
        """What the bytes have to match."""
        return bytes(self.entry["payload_checksum"].tobytes())


def runs(payloads: Sequence[Payload]) -> Iterator[list[Payload]]:
    """Cut payloads of one segment, in the order of their offsets, into runs."""
    run: list[Payload] = []
    for payload in payloads:
        if run and not (
            0 <= payload.offset - run[-1].end <= _GAP_BYTES
            and payload.end - run[0].offset <= _RUN_BYTES
        ):
            yield run
            run = []
        run.append(payload)
    if run:
        yield run


class Progress:
    """Bytes verified of bytes to verify; calls ``show`` now and then.

    Parameters
    ----------
    show
        Called with ``(done, total)`` on any thread, a few times a second.
    """

    _EVERY_S = 0.2

    def __init__(self, show: Callable[[int, int], None] | None = None) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._shown = 0.0
        self.done = 0
        self.total = 0

    def add(self, *, done: int = 0, total: int = 0) -> None:
        """Add to what is done, or to what there is to do."""
        with self._lock:
            self.done += done
            self.total += total
            now = time.monotonic()
            if self._show is not None and now - self._shown >= self._EVERY_S:
                self._shown = now
                self._show(self.done, max(self.done, self.total))


class _CutError(Exception):
    """The file ends too early."""


class _Window:
    """Reads a run through one buffer, piece by piece."""

    def __init__(self, fd: int, buffer: memoryview, end: int) -> None:
        self._fd = fd
        self._buffer = buffer
        self._last = end
        self._start = self._stop = 0

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        end = offset + length
        while offset < end:
            if not self._start <= offset < self._stop:
                self._fill(offset)
            upto = min(end, self._stop)
            yield self._buffer[offset - self._start : upto - self._start]
            offset = upto

    def _fill(self, offset: int) -> None:
        start = offset // ALIGNMENT * ALIGNMENT
        wanted = -(-(self._last - start) // ALIGNMENT) * ALIGNMENT
        moved = read_into(self._fd, [self._buffer[: min(wanted, len(self._buffer))]], start)
        self._start, self._stop = start, start + moved
        if offset >= self._stop:
            raise _CutError


class Verifier:
    """A few threads that verify runs of payloads.

    Parameters
    ----------
    threads
        How many.
    stop
        Ends the work early: what has not been read then has no verdict.
    progress
        Told about verified bytes.
    key
        The integrity key, for keyed checksums.
    """

    def __init__(
        self, threads: int, stop: threading.Event, progress: Progress, key: bytes | None = None
    ) -> None:
        self._key = key
        self._stop = stop
        self._progress = progress
        self._queue: queue.Queue[tuple[Path, list[Payload], bool] | None] = queue.Queue(2 * threads)
        self._lock = threading.Lock()
        self._verdicts: list[tuple[Path, Payload, Verdict]] = []
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"lifeboat-check-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, path: Path, run: list[Payload], *, direct: bool) -> None:
        """Queue one run of a segment; waits while the queue is full."""
        self._queue.put((path, run, direct))

    def drain(self) -> list[tuple[Path, Payload, Verdict]]:
        """Wait for everything submitted; the verdicts since the last time."""
        self._queue.join()
        if self._error is not None:
            raise self._error
        with self._lock:
            out, self._verdicts = self._verdicts, []
        return out

    def skip(self, size: int) -> None:
        """Say that so many bytes will not be submitted after all."""
        self._progress.add(total=-size)

    def close(self) -> None:
        """Let the threads end."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        # Pages of its own, aligned as O_DIRECT wants them.
        buffer = memoryview(mmap.mmap(-1, _READ_BYTES))
        while (task := self._queue.get()) is not None:
            try:
                if not self._stop.is_set() and self._error is None:
                    self._verify(*task, buffer)
            except BaseException as error:  # raised where the verdicts are waited for
                self._error = error
            finally:
                self._queue.task_done()

    def _verify(self, path: Path, run: list[Payload], direct: bool, buffer: memoryview) -> None:
        at = 0
        while at < len(run) and not self._stop.is_set():
            for first in _verdicts(path, run[at:], direct, buffer, self._key):
                # Alone and once more: a bad sector must not cost its neighbours, and a
                # verdict that declares data dead has to be certain.
                verdict = (
                    first
                    if first is Verdict.GOOD
                    else next(_verdicts(path, [run[at]], direct, buffer, self._key))
                )
                with self._lock:
                    self._verdicts.append((path, run[at], verdict))
                self._progress.add(done=run[at].length)
                at += 1
                if self._stop.is_set():
                    return


def _verdicts(
    path: Path, run: list[Payload], direct: bool, buffer: memoryview, key: bytes | None
) -> Iterator[Verdict]:
    """Verdicts in the order of a run; they end with the first that is not good."""
    try:
        fd = _open(path, direct)
    except OSError as error:
        gone = error.errno in GONE
        yield Verdict.CUT if gone else Verdict.UNREADABLE
        return
    try:
        window = _Window(fd, buffer, run[-1].end)
        for at, payload in enumerate(run):
            try:
                pieces = window.pieces(payload.offset, payload.length)
                good = payload_checksum(payload.bound, pieces, key=key) == payload.checksum
            except _CutError:
                yield Verdict.CUT
                return
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    yield from _verdicts(path, run[at:], False, buffer, key)
                    return
                yield Verdict.UNREADABLE
                return
            yield Verdict.GOOD if good else Verdict.CORRUPT
            if not good:
                return
    finally:
        close_file(fd)


def _open(path: Path, direct: bool) -> int:
    # Past the page cache: what the disk holds is to be verified, and what engines
    # keep in memory must not make room for it.
    if direct:
        try:
            return open_direct(path, os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return open_file(path)
