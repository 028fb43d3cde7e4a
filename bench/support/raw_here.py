"""What a device does by itself, from and to the very memory that the parties use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
from raw_process import RawProcess

from lifeboat_cache.bench import RawFile

__all__ = ["RawHere"]


class RawHere:
    """A :class:`RawProcess` that reads and writes the medium from this process.

    How an engine's memory lies in that of the machine is luck, and decides with how many requests
    a device is asked: one memory was found a quarter slower than another. What a party does is
    compared with the same memory.

    Parameters
    ----------
    process
        Does all else.
    directory
        That of the process: the page cache is read by it from the file that is written here.
    address, size
        Of the memory; it begins on a page boundary.
    block, depth, wave
        As of :class:`RawProcess`.
    """

    def __init__(
        self,
        process: RawProcess,
        directory: Path,
        address: int,
        size: int,
        *,
        block: int,
        depth: int,
        wave: int | None = None,
    ) -> None:
        self._process = process
        self.direct = process.direct
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
        self._file = RawFile(
            directory / "raw",
            memory,
            memory,
            block=block,
            depth=depth,
            direct=self.direct,
            wave=wave,
        )

    def run(self, operation: str, rest: Callable[[], None]) -> float:
        """Seconds of an operation; see :meth:`RawProcess.run`. Nothing else is to run here."""
        if operation == "write":
            return self._file.write()
        if operation == "read":
            return self._file.read()
        return self._process.run(operation, rest)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
