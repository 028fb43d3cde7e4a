"""Which prefixes of prompts are used most: from access logs, and what follows what in journals.

Only for people: journals are read as they are, without checking every entry, and what was
evicted inside a file that is still there counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.format.access import ACCESS, ACCESS_BYTES
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES, KIND_RECORD
from lifeboat_cache.targets.files import close_file, open_file, read_range

__all__ = ["Prefix", "shared_prefixes"]

#: More blocks of one namespace are not looked at: the newest of each writer stand for them.
MAX_BLOCKS = 2_000_000

_PAGE = 1 << 15

_NODE = np.dtype(
    [
        ("family", "<u8"),
        ("parent", "<u8"),
        ("position", "<u4"),
        ("used", "<u4"),
        ("uses", "<u4"),
        ("group", "<u2"),
        ("writer", "<u2"),
        ("segment", "<u4"),
        ("slot", "<u4"),
    ]
)

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Prefix:
    """The beginning of prompts.

    Attributes
    ----------
    tokens
        How long it is.
    uses
        How often it was used, as far back as access logs go: what one engine does within
        twenty seconds is one use.
    continuations
        How many stored prompts go on after it, each in its own way.
    blocks
        Blocks of tokens stored after it and with it, all of which need it.
    last_used
        When one of them was stored or read last, in seconds since 1970.
    """

    tokens: int
    uses: int
    continuations: int
    blocks: int
    last_used: float


def shared_prefixes(directory: Path, most: int = 5) -> list[Prefix]:
    """The prefixes of a namespace that save most: by their length and how often they are used.

    Parameters
    ----------
    directory
        The namespace's directory.
    most
        How many to return.

    Raises
    ------
    OSError
        If the directory cannot be read.
    """
    nodes = _read(directory)
    return _shared(nodes, most) if len(nodes) else []


def _read(directory: Path) -> _Array:
    names = sorted(os.listdir(directory))
    segments = {name.rpartition(".")[0] for name in names if name.endswith(".segment")}
    writers = [name.removesuffix(".journal") for name in names if name.endswith(".journal")]
    left = MAX_BLOCKS
    parts: list[_Array] = []
    for number, writer in enumerate(writers[:65535]):
        part = _journal(directory / f"{writer}.journal", left)
        part = part[[f"{writer}.{segment:08d}" in segments for segment in part["segment"].tolist()]]
        part["writer"] = number
        left -= len(part)
        parts.append(part)
    nodes = np.concatenate(parts) if parts else np.zeros(0, _NODE)
    _take_uses(directory, [name for name in names if name.endswith(".access")], writers, nodes)
    return nodes


def _journal(path: Path, most: int) -> _Array:
    """The records of a journal, the newest ``most`` of them."""
    parts: list[_Array] = []
    for entries in _pages(path, ENTRY, ENTRY_BYTES, most):
        records = entries[entries["kind"] == KIND_RECORD]
        part = np.zeros(len(records), _NODE)
        for name in ("family", "parent", "position", "group", "segment", "slot"):
            part[name] = records[name]
        part["used"] = records["time"]
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, _NODE)


def _pages(path: Path, kind: np.dtype[Any], size: int, most: int) -> list[_Array]:
    try:
        fd = open_file(path)
    except OSError:  # purged in the meantime
        return []
    try:
        count = max(0, os.fstat(fd).st_size - HEADER_BYTES) // size
        pages = []
        for first in range(max(0, count - most), count, _PAGE):
            data = read_range(fd, min(_PAGE, count - first) * size, HEADER_BYTES + first * size)
            pages.append(np.frombuffer(data, kind, count=len(data) // size))
        return pages
    except OSError:
        return []
    finally:
        close_file(fd)


def _take_uses(directory: Path, logs: list[str], writers: list[str], nodes: _Array) -> None:
    """Note when records were used, and how often, from access logs."""
    if not len(nodes):
        return
    numbers = {bytes.fromhex(writer): number for number, writer in enumerate(writers)}
    place = _place(nodes["writer"], nodes["segment"], nodes["slot"])
    order = np.argsort(place, kind="stable")
    place = place[order]
    for log in logs:
        for page in _pages(directory / log, ACCESS, ACCESS_BYTES, MAX_BLOCKS):
            names, which = np.unique(page["writer"], return_inverse=True)
            known = np.array([numbers.get(bytes(name), -1) for name in names.tolist()])
            writer = known[which.reshape(-1)]
            rows = page[writer >= 0]
            if not len(rows):
                continue
            wanted = _place(writer[writer >= 0].astype("<u2"), rows["segment"], rows["slot"])
            at = np.minimum(np.searchsorted(place, wanted), len(place) - 1)
            found = place[at] == wanted
            np.maximum.at(nodes["used"], order[at[found]], rows["time"][found])
            np.add.at(nodes["uses"], order[at[found]], 1)


def _place(writer: _Array, segment: _Array, slot: _Array) -> _Array:
    value = writer.astype(np.uint64) << np.uint64(48)
    value |= (segment.astype(np.uint64) & np.uint64(0xFFFF)) << np.uint64(32)
    out: _Array = value | slot.astype(np.uint64)
    return out


def _shared(nodes: _Array, most: int) -> list[Prefix]:
    # Every group of layers holds the same tokens: the first stands for all.
    nodes = nodes[(nodes["group"] == nodes["group"].min()) & (nodes["position"] > 0)]
    families, at, copy = np.unique(nodes["family"], return_index=True, return_inverse=True)
    # Of what several processes have stored, each copy may be used.
    uses = np.bincount(copy.reshape(-1), weights=nodes["uses"]).astype(np.int64)
    nodes = nodes[at]
    if not len(nodes):
        return []
    parent = np.minimum(np.searchsorted(families, nodes["parent"]), len(families) - 1)
    has_parent = (families[parent] == nodes["parent"]) & (nodes["parent"] != 0)
    has_parent &= nodes["position"][parent] < nodes["position"]
    children = np.bincount(parent[has_parent], minlength=len(nodes))
    ends = (children == 0).astype(np.int64)
    below = np.ones(len(nodes), np.int64)
    used = nodes["used"].astype(np.int64)
    # From the ends of prompts to their beginnings: who is deeper has been added up already.
    order = np.argsort(-nodes["position"].astype(np.int64), kind="stable")
    depths = nodes["position"][order]
    edges = np.flatnonzero(np.diff(depths)) + 1
    for level in np.split(order, edges):
        rows = level[has_parent[level]]
        np.add.at(ends, parent[rows], ends[rows])
        np.add.at(below, parent[rows], below[rows])
        np.maximum.at(used, parent[rows], used[rows])
        np.maximum.at(uses, parent[rows], uses[rows])
    longer = np.zeros(len(nodes), np.int64)  # how often what comes after it is used
    np.maximum.at(longer, parent[has_parent], uses[has_parent])
    ending = np.flatnonzero((children > 1) | ((uses > 1) & (uses > longer)))
    # What the others need not store or compute again.
    times = np.maximum(uses, ends)[ending] - 1
    worth = times * nodes["position"][ending].astype(np.int64)
    best = ending[np.argsort(-worth, kind="stable")[:most]]
    return [
        Prefix(
            int(nodes["position"][index]),
            int(uses[index]),
            int(ends[index]),
            int(below[index]),
            float(used[index]),
        )
        for index in best.tolist()
    ]
