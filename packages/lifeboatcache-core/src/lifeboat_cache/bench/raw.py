"""What a device and the memory do by themselves: the limits that stores are compared with."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lifeboat_cache.bench.page_cache import forget_pages
from lifeboat_cache.targets.direct import MAX_PIECES, open_direct
from lifeboat_cache.targets.files import open_file

__all__ = ["RawFile"]

#: The most bytes of one call: what a store of ours moves at once, too.
_CALL_BYTES = 16 << 20

#: Calls that each thread gets at least, so that none idles at the end.
_CALLS_PER_THREAD = 2

#: Pieces of a call, where in the file they belong, and their bytes.
_Call = tuple[list[memoryview], int, int]


class RawFile:
    """Vectored I/O between one file and memory, and copies within memory.

    As good as a store of the blocks could be that does nothing else: the blocks lie
    together, they are moved by large calls of several threads, and nobody looks at
    them. The calls are made up before the clock starts; a thread needs the GIL
    only from one call to the next.

    Parameters
    ----------
    path
        The file; written anew by :meth:`write`.
    source, target
        uint8 ``(size,)``, page-aligned: what is written, and where to read to.
    block
        Bytes of a block; each is a piece of a vectored call.
    depth
        Calls that are under way at the same time.
    direct
        Whether to use O_DIRECT.
    wave
        Bytes after which all calls have to be done before the next ones begin, as where an
        engine asks for so much, and for more once it has that; ``None``: never.
    """

    def __init__(
        self,
        path: Path,
        source: npt.NDArray[np.uint8],
        target: npt.NDArray[np.uint8],
        *,
        block: int,
        depth: int,
        direct: bool,
        wave: int | None = None,
    ) -> None:
        self._path = path
        self._open = open_direct if direct else open_file
        self._depth = depth
        self._size = source.nbytes
        self._wave = wave or self._size
        aim = min(_CALL_BYTES, -(-self._wave // (depth * _CALLS_PER_THREAD)))
        self._step = max(1, min(MAX_PIECES, aim // block)) * block
        self._source = self._cut(source, block)
        self._target = self._cut(target, block)

    def _cut(self, memory: npt.NDArray[np.uint8], block: int) -> list[_Call]:
        view = memory.data.cast("B")
        calls = []
        for first in range(0, self._size, self._wave):
            last = min(self._size, first + self._wave)
            for start in range(first, last, self._step):
                end = min(last, start + self._step)
                bounds = range(start, end, block)
                pieces = [view[at : min(end, at + block)] for at in bounds]
                calls.append((pieces, start, end - start))
        return calls

    def _in_parallel(
        self,
        calls: list[_Call],
        move: Callable[[list[memoryview], int], int],
        threads: int,
    ) -> float:
        """Seconds until all calls have been made."""
        waves = [deque(group) for _, group in groupby(calls, lambda call: call[1] // self._wave)]
        gate = threading.Event()
        done = threading.Barrier(threads)
        errors: list[BaseException] = []

        def work() -> None:
            gate.wait()
            try:
                for left in waves:
                    while left:
                        try:
                            pieces, at, size = left.popleft()
                        except IndexError:
                            break  # another thread has taken the last one
                        if move(pieces, at) != size:
                            raise OSError("a short read or write: is the disk full?")
                    if left is not waves[-1]:
                        done.wait()
            except threading.BrokenBarrierError:
                return  # another thread has failed
            except BaseException as error:
                errors.append(error)
                done.abort()

        workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        begin = time.perf_counter()
        gate.set()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - begin
        if errors:
            raise errors[0]
        return seconds

    def write(self) -> float:
        """Seconds to write everything to a new file."""
        self._path.unlink(missing_ok=True)
        os.close(open_file(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        fd = self._open(self._path, os.O_WRONLY)
        try:
            return self._in_parallel(
                self._source, lambda pieces, at: os.pwritev(fd, pieces, at), self._depth
            )
        finally:
            os.close(fd)

    def read(self) -> float:
        """Seconds to read everything back, the file out of the page cache."""
        forget_pages(self._path)
        return self._read(self._open)

    def read_cached(self) -> float:
        """Seconds to read everything from the page cache."""
        try:
            self._read(open_file)  # it is in there from now on
            return self._read(open_file)
        finally:
            forget_pages(self._path)

    def _read(self, opened: Callable[[Path, int], int]) -> float:
        fd = opened(self._path, os.O_RDONLY)
        try:
            return self._in_parallel(
                self._target, lambda pieces, at: os.preadv(fd, pieces, at), self._depth
            )
        finally:
            os.close(fd)

    def copy(self) -> float:
        """Seconds to copy everything within memory, block by block, on all cores."""
        pairs = {
            at: [
                (np.frombuffer(there, np.uint8), np.frombuffer(here, np.uint8))
                for there, here in zip(goals, pieces, strict=True)
            ]
            for (goals, _, _), (pieces, at, _) in zip(self._target, self._source, strict=True)
        }

        def move(pieces: list[memoryview], at: int) -> int:
            for there, here in pairs[at]:
                np.copyto(there, here)  # lets go of the GIL, unlike a memoryview's assignment
            return sum(piece.nbytes for piece in pieces)

        return self._in_parallel(self._source, move, min(self._depth, os.cpu_count() or 1))

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
