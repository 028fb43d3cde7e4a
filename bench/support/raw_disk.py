"""What the disk and the memory themselves do: the limits that tiers are compared with."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

__all__ = ["RawDisk"]

_CALL_BYTES = 16 << 20
_MAX_PIECES = 1024


class RawDisk:
    """Vectored O_DIRECT I/O between one file and shared memory, and a copy in memory.

    As good as a store of the chunks could be that does nothing else: the chunks lie
    together, are moved by few large calls of several threads, and are not looked at.

    Parameters
    ----------
    path
        The file; written anew by :meth:`write`.
    size
        Bytes in all.
    piece
        Bytes of a chunk; each is a piece of a vectored call.
    threads
        How many threads move parts of the file.
    """

    def __init__(self, path: Path, *, size: int, piece: int, threads: int = 4) -> None:
        self._path = path
        self._size = size
        self._piece = piece
        self._threads = threads
        shared = Path(f"/dev/shm/lifeboat_bench_{os.getpid()}_{id(self)}")
        with shared.open("xb+") as file:
            shared.unlink()
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        array = np.frombuffer(self._memory, dtype=np.uint8)
        array[:] = np.random.default_rng(3).integers(0, 255, size, dtype=np.uint8)
        self._target = np.empty_like(array)
        self._target[:] = 0
        del array

    def _in_parallel(self, move: Callable[[list[memoryview], int], int]) -> None:
        view = memoryview(self._memory)
        pieces_per_call = max(1, min(_MAX_PIECES, _CALL_BYTES // self._piece))
        starts = list(range(0, self._size, pieces_per_call * self._piece))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while True:
                    with lock:
                        if not starts:
                            return
                        start = starts.pop(0)
                    end = min(self._size, start + pieces_per_call * self._piece)
                    pieces = [view[at : at + self._piece] for at in range(start, end, self._piece)]
                    if move(pieces, start) != end - start:
                        raise OSError("a short read or write: is the disk full?")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def write(self) -> float:
        """Seconds to write everything to a new file."""
        self._path.unlink(missing_ok=True)
        begin = time.perf_counter()
        fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            self._in_parallel(lambda pieces, at: os.pwritev(fd, pieces, at))
        finally:
            os.close(fd)
        return time.perf_counter() - begin

    def read(self) -> float:
        """Seconds to read everything back."""
        begin = time.perf_counter()
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._in_parallel(lambda pieces, at: os.preadv(fd, pieces, at))
        finally:
            os.close(fd)
        return time.perf_counter() - begin

    def copy(self) -> float:
        """Seconds to copy everything, chunk by chunk, within memory on one thread."""
        source = np.frombuffer(self._memory, dtype=np.uint8)
        begin = time.perf_counter()
        for at in range(0, self._size, self._piece):
            self._target[at : at + self._piece] = source[at : at + self._piece]
        seconds = time.perf_counter() - begin
        del source
        return seconds

    def close(self) -> None:
        """Remove the file and give the memory back."""
        self._path.unlink(missing_ok=True)
        self._memory.close()
