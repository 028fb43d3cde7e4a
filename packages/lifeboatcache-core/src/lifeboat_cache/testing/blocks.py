"""Blocks whose content follows from their key, so that any process can check them."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.checksum import ALGORITHM_BLAKE3, Binding, payload_checksum
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, Entries
from lifeboat_cache.keys import block_keys
from lifeboat_cache.namespace import Namespace

__all__ = [
    "aligned_memory",
    "cut_at",
    "empty_like",
    "flip_byte",
    "payload_of",
    "sample_keys",
    "sample_payloads",
    "sample_records",
]


def sample_keys(numbers: Iterable[int], *, space: bytes = b"") -> list[bytes]:
    """Block keys of numbered blocks."""
    return block_keys((b"block %d" % number for number in numbers), space=space)


def payload_of(key: bytes, size: int) -> bytes:
    """``size`` bytes that follow from ``key`` and look random."""
    return blake3(key).digest(length=size)


def sample_payloads(keys: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
    """The payload of each key with the given size in bytes."""
    return [payload_of(key, size) for key, size in zip(keys, sizes, strict=True)]


def aligned_memory(size: int) -> npt.NDArray[np.uint8]:
    """uint8 ``(size,)`` zeros that start at a page boundary, as O_DIRECT wants them."""
    pages = mmap.mmap(-1, max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE)
    return np.frombuffer(pages, dtype=np.uint8, count=size)


def cut_at(payload: bytes, cuts: Sequence[int] = ()) -> list[npt.NDArray[np.uint8]]:
    """A writable copy of ``payload`` in pieces.

    Parameters
    ----------
    payload
        Content of the block.
    cuts
        Ascending offsets at which a new piece starts. Each piece lies in memory
        of its own, at a page boundary.
    """
    bounds = [0, *cuts, len(payload)]
    pieces = []
    for first, last in itertools.pairwise(bounds):
        piece = aligned_memory(last - first)
        piece[:] = np.frombuffer(payload, dtype=np.uint8)[first:last]
        pieces.append(piece)
    return pieces


def empty_like(
    blocks: Sequence[Sequence[npt.NDArray[np.uint8]]],
) -> list[list[npt.NDArray[np.uint8]]]:
    """Memory of the same shape as ``blocks`` (see :func:`cut_at`), zeroed, to load into."""
    return [[aligned_memory(piece.nbytes) for piece in pieces] for pieces in blocks]


def sample_records(
    namespace: Namespace,
    keys: Sequence[bytes],
    buffers: BlockBuffers,
    *,
    layout: int = 0,
    time: int = 1_700_000_000,
    algorithms: Sequence[int] = (ALGORITHM_BLAKE3,),
    integrity_key: bytes | None = None,
) -> Entries:
    """Journal entries for blocks stored as they are, complete but for their place.

    Parameters
    ----------
    namespace
        Whose blocks they are.
    keys
        One per block of ``buffers``.
    buffers
        Where the payloads lie.
    layout, time
        For all entries.
    algorithms
        Of the payload checksums, in turns.
    integrity_key
        The 32 bytes for keyed ones.

    Returns
    -------
    ``ENTRY`` array ``(n,)``
        As :meth:`TargetWriter.append` takes it.
    """
    binding = Binding(namespace.digest)
    entries = np.zeros(len(keys), dtype=ENTRY)
    entries["kind"] = KIND_RECORD
    entries["algorithm"] = np.resize(np.array(algorithms, dtype=np.uint8), len(keys))
    entries["layout"] = layout
    entries["time"] = time
    for number, (key, size) in enumerate(zip(keys, buffers.sizes().tolist(), strict=True)):
        entries["key"][number] = np.void(key)
        entries["raw_length"][number] = entries["stored_length"][number] = size
        bound = binding.pack(key, layout, size, size, 0, int(entries["algorithm"][number]))
        checksum = payload_checksum(bound, buffers.pieces(number), key=integrity_key)
        entries["payload_checksum"][number] = np.void(checksum)
    return entries


def flip_byte(path: Path, offset: int, mask: int = 0xFF) -> None:
    """Change one byte of a file: a damage that checksums must notice.

    Parameters
    ----------
    path
        The file; its size and modification time stay plausible.
    offset
        Which byte; negative counts from the end.
    mask
        Bits to invert.
    """
    size = path.stat().st_size
    at = offset if offset >= 0 else size + offset
    if not 0 <= at < size:
        raise ValueError(f"{path} has {size} bytes, none at {offset}")
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))
