"""Repairs of single files. Each may be done again, and raises ``OSError`` if it fails."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lifeboat_cache.clock import coarse_time
from lifeboat_cache.format.access import pack_accesses, parse_accesses
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_ACCESS, FileHeader
from lifeboat_cache.format.journal import (
    ENTRY,
    ENTRY_BYTES,
    KIND_TOMBSTONE,
    Entries,
    seal_entries,
)
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.targets.direct import write_from
from lifeboat_cache.targets.files import (
    close_file,
    cut_file,
    is_gone,
    open_file,
    read_document,
)
from lifeboat_cache.targets.layout import write_atomically
from lifeboat_cache.targets.segment_writer import SegmentWriter
from lifeboat_cache.targets.writer_lock import writer_alive

__all__ = [
    "Undertaker",
    "cut_tail",
    "fill_entries",
    "put_header",
    "remove_files",
    "rewrite_accesses",
]


def put_header(path: Path, magic: bytes, namespace: bytes, writer: bytes, segment: int = 0) -> None:
    """Write a header anew over a damaged one of a dead writer."""
    _require_dead(path)
    header = FileHeader(magic, namespace, writer, segment, int(path.stat().st_mtime))
    fd = open_file(path, os.O_WRONLY)
    try:
        write_from(fd, [memoryview(header.pack())], 0)
    finally:
        close_file(fd)


def fill_entries(path: Path, writer: bytes, namespace: bytes, numbers: Sequence[int]) -> None:
    """Overwrite bad entries of a dead writer's journal.

    What takes their place is a tombstone of a record that nobody has: a writer
    whose 16 bytes are zero.
    """
    _require_dead(path)
    filler = np.zeros(1, dtype=ENTRY)
    filler["kind"] = KIND_TOMBSTONE
    filler["time"] = coarse_time()
    fd = open_file(path, os.O_WRONLY)
    try:
        for number in numbers:
            data = seal_entries(filler, writer, number, namespace)
            write_from(fd, [memoryview(data)], HEADER_BYTES + number * ENTRY_BYTES)
    finally:
        close_file(fd)


def cut_tail(path: Path, entries: int) -> None:
    """Cut a dead writer's journal behind its last whole entry."""
    _require_dead(path)
    cut_file(path, HEADER_BYTES + entries * ENTRY_BYTES)


def rewrite_accesses(path: Path, namespace: bytes, writer: bytes) -> None:
    """Keep the intact entries of a dead writer's access log."""
    _require_dead(path)
    kept = parse_accesses(read_document(path, 32 << 30)[HEADER_BYTES:])
    if not kept.shape[0]:
        remove_files([path])
        return
    header = FileHeader(MAGIC_ACCESS, namespace, writer, 0, int(path.stat().st_mtime))
    write_atomically(path, header.pack() + pack_accesses(kept))


def remove_files(paths: Sequence[Path], unless: Path | None = None) -> None:
    """Remove files of dead writers; one that has gone is no error.

    Parameters
    ----------
    paths
        In the order in which they are removed.
    unless
        A file whose existence means that they are needed after all.
    """
    for path in paths:
        _require_dead(path)
    if unless is not None and not is_gone(unless):
        raise OSError(errno.EBUSY, "its journal has appeared")
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            # A process that still has the file open would keep its space otherwise.
            if path.suffix == ".segment":
                cut_file(path, 0)
            os.unlink(path)


def _require_dead(path: Path) -> None:
    if writer_alive(path.parent, path.name.split(".")[0]):
        raise OSError(errno.EBUSY, "its writer is alive")


class Undertaker:
    """Declares records of a namespace dead, as a writer of its own.

    Parameters
    ----------
    directory
        The namespace's directory.
    digest
        The namespace's 32-byte digest.
    """

    def __init__(self, directory: Path, digest: bytes) -> None:
        self._directory = directory
        self._namespace = Namespace({}, digest)
        self._writer: SegmentWriter | None = None

    def bury(self, entries: Entries) -> None:
        """Append tombstones. Raises ``OSError`` if they did not reach the journal."""
        if self._writer is None:
            self._writer = SegmentWriter(
                self._directory, self._namespace, direct=False, allowance=lambda _: None
            )
        if not self._writer.bury(entries):
            raise OSError(errno.EIO, "the tombstones could not be written")

    def close(self) -> None:
        """Let go of its files; its journal stays."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
