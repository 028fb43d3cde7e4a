"""When records were used, as nodes tell each other by small objects.

Each node puts one object per namespace, which sums up when its engines used which records. Who
looks after the bucket reads those that have changed. To lose one costs nothing but the order in
which records go.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.clock import coarse_time
from lifeboat_cache.errors import FormatError
from lifeboat_cache.format.access import ACCESS, ACCESS_BYTES, pack_accesses, parse_accesses
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_ACCESS, FileHeader
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.s3.inventory import HeldNamespace
from lifeboat_cache.s3.names import Names
from lifeboat_cache.targets.layout import write_atomically

__all__ = ["NodeUses", "SharedUses", "Whereabouts"]

#: The most uses that a node tells of, the latest ones.
_MOST = 1 << 18

#: A node tells of new ones at most this often, by the clock of graces.
_TELL_S = 900.0

_LOG = ".access"

Accesses = npt.NDArray[Any]

#: Where records are now: from writer, segment and slot to the same.
Whereabouts = Mapping[tuple[bytes, int, int], tuple[bytes, int, int]]


def _latest(*parts: Accesses) -> Accesses:
    """One access per record, its last one, and of these the latest."""
    together = np.concatenate([np.zeros(0, dtype=ACCESS), *parts])
    together = together[np.argsort(together["time"], kind="stable")[::-1]]
    # Writer, segment and slot are the first 24 bytes.
    places = together.view("<u8").reshape(-1, ACCESS_BYTES // 8)[:, :3]
    _, first = np.unique(places, axis=0, return_index=True)
    kept: Accesses = together[np.sort(first)[:_MOST]]
    return kept


def _read(data: bytes, directory: str, where: str) -> tuple[bytes, Accesses]:
    """The digest of a log's namespace and what it holds; nothing if it is another's or damaged."""
    try:
        header = FileHeader.unpack(data[:HEADER_BYTES], MAGIC_ACCESS, where)
    except FormatError:
        return b"", np.zeros(0, dtype=ACCESS)
    if header.namespace.hex()[:32] != directory:
        return b"", np.zeros(0, dtype=ACCESS)
    return header.namespace, parse_accesses(data[HEADER_BYTES:])


class NodeUses:
    """What this node's engines have used, told to others.

    Parameters
    ----------
    client, names
        The bucket.
    place
        The directory of this node for the bucket: its name and what it has told are kept there.
    logs
        The directory in which namespaces' directories have access logs.
    """

    def __init__(self, client: S3Client, names: Names, place: Path, logs: Path) -> None:
        self._client, self._names = client, names
        self._place, self._logs = place, logs
        self._told: dict[str, tuple[float, int]] = {}  # when, and how many bytes of logs

    def tell(self, now: float) -> None:
        """Put what is new, if that is due.

        Parameters
        ----------
        now
            Seconds that never jump.

        Raises
        ------
        S3Error
            If the bucket fails.
        """
        with contextlib.suppress(OSError):
            for directory in sorted(filter(Names.is_namespace, os.listdir(self._logs))):
                self._tell(directory, now)

    def _tell(self, directory: str, now: float) -> None:
        logs = self._found(directory)
        size = sum(length for _, length in logs)
        when, before = self._told.get(directory, (float("-inf"), 0))
        if size == before or now - when < _TELL_S:
            return
        kept = self._place / f"{directory}{_LOG}"
        found = [self._log(path, directory) for path in (kept, *(path for path, _ in logs))]
        digest = next((digest for digest, _ in found if digest), b"")
        uses = _latest(*(accesses for _, accesses in found))
        if not digest or not uses.shape[0]:
            return
        node = self._node()
        header = FileHeader(MAGIC_ACCESS, digest, node, 0, coarse_time())
        data = header.pack() + pack_accesses(uses)
        self._client.put(self._names.uses(directory, node), data)
        with contextlib.suppress(OSError):
            write_atomically(kept, data, durable=False)
            self._forget(path for path, _ in logs)
        self._told[directory] = now, sum(length for _, length in self._found(directory))

    @staticmethod
    def _forget(logs: Iterable[Path]) -> None:
        """Remove logs of writers that are no more: what they say is told and kept."""
        for path in logs:
            if not path.with_suffix(".lock").exists():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _found(self, directory: str) -> list[tuple[Path, int]]:
        found: list[tuple[Path, int]] = []
        with contextlib.suppress(OSError), os.scandir(self._logs / directory) as listing:
            for entry in listing:
                if entry.name.endswith(_LOG):
                    with contextlib.suppress(OSError):
                        found.append((Path(entry.path), entry.stat().st_size))
        return found

    @staticmethod
    def _log(path: Path, directory: str) -> tuple[bytes, Accesses]:
        try:
            return _read(path.read_bytes(), directory, path.name)
        except OSError:
            return b"", np.zeros(0, dtype=ACCESS)

    def _node(self) -> bytes:
        """The name of this node: 16 bytes, made once. Raises ``OSError``."""
        path = self._place / "node"
        with contextlib.suppress(OSError, ValueError):
            found = bytes.fromhex(path.read_text().strip())
            if len(found) == 16:
                return found
        self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = secrets.token_bytes(16)
        write_atomically(path, made.hex().encode() + b"\n")
        return made


class SharedUses:
    """What all nodes have told.

    Parameters
    ----------
    client, names
        The bucket.
    """

    def __init__(self, client: S3Client, names: Names) -> None:
        self._client, self._names = client, names
        self._known: dict[str, tuple[tuple[int, float], Accesses]] = {}

    def read(self, held: HeldNamespace) -> None:
        """Let a namespace's records count as used when nodes say so. Raises :class:`S3Error`."""
        prefix = self._names.all_uses(held.directory)
        there = {one.key: (one.size, one.modified) for one in self._client.objects(prefix)}
        for key in [key for key in self._known if key.startswith(prefix) and key not in there]:
            del self._known[key]
        for key, version in there.items():
            known = self._known.get(key)
            if known is None or known[0] != version:
                try:
                    data = self._client.get(key)
                except S3Error as error:
                    if error.fault is Fault.MISSING:
                        continue
                    raise
                self._known[key] = version, _read(data, held.directory, key)[1]
            _apply(held, self._known[key][1], int(self._client.now()))

    def moved(self, held: HeldNamespace, places: Whereabouts) -> None:
        """Tell when records were used that are elsewhere now. Raises :class:`S3Error`.

        Parameters
        ----------
        held
            Their namespace, in which they still are where they were.
        places
            Where they are now.
        """
        told = np.zeros(len(places), dtype=ACCESS)
        count = 0
        for (writer, number, slot), new in places.items():
            segment = held.segments.get((writer, number))
            if segment is None:
                continue
            at = segment.rows.at(np.array([slot], dtype=np.int64))[0]
            row = segment.rows.array[at]
            if at < 0 or row["used"] <= row["time"]:
                continue
            told[count] = (np.void(new[0]), new[1], new[2], row["used"], np.void(bytes(4)))
            count += 1
        if not count:
            return
        # In a name of their own: told by nobody else, and read like a node's.
        source = next(iter(places.values()))[0]
        header = FileHeader(MAGIC_ACCESS, held.digest, source, 0, coarse_time())
        data = header.pack() + pack_accesses(told[:count])
        self._client.put(self._names.uses(held.directory, source), data)

    def tidy(self, held: HeldNamespace) -> list[str]:
        """Objects that tell of nothing that is still there."""
        prefix = self._names.all_uses(held.directory)
        writers = {writer for writer, _ in held.segments}
        return [
            key
            for key, (_, uses) in self._known.items()
            if key.startswith(prefix)
            and not any(bytes(w) in writers for w in np.unique(uses["writer"]).tolist())
        ]


def _apply(held: HeldNamespace, uses: Accesses, present: int) -> None:
    places = np.ascontiguousarray(uses["writer"]).view(np.uint8).reshape(-1, 16)
    owners, which = np.unique(places, axis=0, return_inverse=True)
    which = which.reshape(-1)
    for number, owner in enumerate(owners):
        mine = uses[which == number]
        for segment_number in np.unique(mine["segment"]).tolist():
            segment = held.segments.get((owner.tobytes(), segment_number))
            if segment is None:
                continue
            some = mine[mine["segment"] == segment_number]
            at = segment.rows.at(some["slot"].astype(np.int64))
            times = np.minimum(some["time"], np.uint32(present))[at >= 0]
            np.maximum.at(segment.rows.array["used"], at[at >= 0], times)
