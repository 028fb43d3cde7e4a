"""What a device and the memory do by themselves, measured in a process of its own.

The benchmarks' own process has a scheduler's thread in it that counts in Python: a
limit that needs its GIL would be none.
"""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from lifeboat_cache.bench import RawFile
from lifeboat_cache.targets.direct import supports_direct

__all__ = ["OPERATIONS", "RawProcess"]

#: What it can be told to do.
OPERATIONS = ("write", "read", "read_cached", "copy", "both")


class RawProcess:
    """A :class:`~lifeboat_cache.bench.RawFile` in a process of its own.

    Parameters
    ----------
    directory
        Where its files go.
    size
        Bytes moved per operation.
    block
        Bytes of a block.
    depth
        Calls that are under way at the same time.
    wave
        As of :class:`~lifeboat_cache.bench.RawFile`.
    """

    def __init__(
        self, directory: Path, *, size: int, block: int, depth: int, wave: int | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.direct = supports_direct(directory, "auto")
        self._process = subprocess.Popen(
            [sys.executable, __file__, directory, *map(str, (size, block, depth, wave or size))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LIFEBOAT_BENCH_DIRECT": str(int(self.direct))},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tell, self._hear = self._process.stdin, self._process.stdout
        self._wait(lambda: time.sleep(0.01))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, operation: str, rest: Callable[[], None]) -> float:
        """Seconds of an operation of :data:`OPERATIONS`.

        Parameters
        ----------
        operation
            ``both`` writes one file and reads another at the same time, each of
            the whole size.
        rest
            Called again and again until it is done: what this process does meanwhile.
        """
        self._tell.write(operation.encode() + b"\n")
        self._tell.flush()
        return self._wait(rest)

    def _wait(self, rest: Callable[[], None]) -> float:
        text = b""
        while not text.endswith(b"\n"):
            rest()  # at least once: it is measured, too
            if not select.select([self._hear], [], [], 0)[0]:
                continue
            data = os.read(self._hear.fileno(), 100)
            if not data:
                raise RuntimeError("the process with the raw files has died: see above")
            text += data
        return float(text)

    def close(self) -> None:
        """End the process and remove its files."""
        self._tell.close()
        self._process.wait()
        self._hear.close()


def _memory(size: int) -> npt.NDArray[np.uint8]:
    """uint8 ``(size,)`` in shared memory, as vLLM's CPU tier is."""
    path = Path(f"/dev/shm/lifeboat_bench_{os.getpid()}")
    with path.open("xb+") as file:
        path.unlink()
        file.truncate(size)
        array = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
    noise = np.random.default_rng(3).integers(0, 255, min(size, 8 << 20), dtype=np.uint8)
    for at in range(0, size, noise.nbytes):
        array[at : at + noise.nbytes] = noise[: size - at]
    return array


def _serve(directory: Path, size: int, block: int, depth: int, wave: int, *, direct: bool) -> None:
    source, target = _memory(size), _memory(size)

    def raw(name: str, threads: int) -> RawFile:
        return RawFile(
            directory / name, source, target, block=block, depth=threads, direct=direct, wave=wave
        )

    one = raw("raw", depth)
    # In both directions at once the threads are shared, as those of a store are.
    old, new = raw("raw-read", max(1, depth // 2)), raw("raw-write", max(1, depth // 2))
    old_is_there = False
    print(0.0, flush=True)
    try:
        for line in sys.stdin:
            if line.strip() == "both":
                if not old_is_there:
                    old.write()
                    old_is_there = True
                seconds = _at_once(old.read, new.write)
            else:
                seconds = {
                    "write": one.write,
                    "read": one.read,
                    "read_cached": one.read_cached,
                    "copy": one.copy,
                }[line.strip()]()
            print(seconds, flush=True)
    finally:
        for file in (one, old, new):
            file.close()


def _at_once(*moves: Callable[[], float]) -> float:
    """Seconds of several operations that are made at the same time."""
    with ThreadPoolExecutor(len(moves)) as pool:
        return max([future.result() for future in [pool.submit(move) for move in moves]])


if __name__ == "__main__":
    _serve(
        Path(sys.argv[1]),
        *map(int, sys.argv[2:6]),
        direct=os.environ["LIFEBOAT_BENCH_DIRECT"] == "1",
    )
