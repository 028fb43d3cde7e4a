"""Batches of blocks and the caller's memory they live in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.keys import check_keys

__all__ = ["BlockBatch", "BlockBuffers"]

_U64 = npt.NDArray[np.uint64]
_I64 = npt.NDArray[np.int64]


def _address(buffer: memoryview) -> int:
    """Address of the first byte of a contiguous buffer, writable or not."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


@dataclass(frozen=True)
class BlockBuffers:
    """The caller's memory for a batch of blocks, as addresses.

    A block may lie in several pieces (K and V apart, one piece per layer, …);
    its payload is the concatenation of its pieces in order. Blocks of one batch
    may have different sizes.

    Attributes
    ----------
    addresses
        uint64 ``(n_pieces,)``, address of each piece.
    lengths
        uint64 ``(n_pieces,)``, length of each piece in bytes.
    starts
        int64 ``(n_blocks + 1,)``; the pieces of block ``i`` are
        ``starts[i]:starts[i + 1]``.
    owner
        Whatever keeps the memory alive. The store holds it until the job is
        reported, and not longer.
    writable
        Whether blocks may be loaded into this memory.
    """

    addresses: _U64
    lengths: _U64
    starts: _I64
    owner: Any
    writable: bool = True

    @classmethod
    def from_rows(
        cls, base: int, stride: int, rows: npt.ArrayLike, length: int, owner: object
    ) -> BlockBuffers:
        """One piece per block, taken from a table of equal rows.

        Parameters
        ----------
        base
            Address of row 0.
        stride
            Distance of two rows in bytes.
        rows
            integers ``(n_blocks,)``, row of each block.
        length
            Bytes of each block.
        owner
            Keeps the table alive.
        """
        index = np.asarray(rows, dtype=np.int64)
        count = index.shape[0]
        addresses = (np.int64(base) + index * np.int64(stride)).astype(np.uint64)
        lengths = np.full(count, length, dtype=np.uint64)
        return cls(addresses, lengths, np.arange(count + 1, dtype=np.int64), owner)

    @classmethod
    def from_buffers(cls, blocks: Sequence[Any]) -> BlockBuffers:
        """From buffer objects: per block one contiguous buffer, or a list of them."""
        addresses: list[int] = []
        lengths: list[int] = []
        starts = [0]
        writable = True
        for block in blocks:
            pieces = block if isinstance(block, (list, tuple)) else (block,)
            for piece in pieces:
                view = memoryview(piece).cast("B")
                writable = writable and not view.readonly
                addresses.append(_address(view) if view.nbytes else 0)
                lengths.append(view.nbytes)
            starts.append(len(addresses))
        return cls(
            np.array(addresses, dtype=np.uint64),
            np.array(lengths, dtype=np.uint64),
            np.array(starts, dtype=np.int64),
            list(blocks),
            writable,
        )

    def __len__(self) -> int:
        return int(self.starts.shape[0]) - 1

    def sizes(self) -> _I64:
        """int64 ``(n_blocks,)``: bytes of each block."""
        total = np.zeros(self.lengths.shape[0] + 1, dtype=np.int64)
        np.cumsum(self.lengths.astype(np.int64), out=total[1:])
        sizes: _I64 = total[self.starts[1:]] - total[self.starts[:-1]]
        return sizes

    def window(self, first: int, last: int) -> BlockBuffers:
        """The blocks ``first:last``; their memory stays with ``owner``."""
        starts = self.starts[first : last + 1]
        pieces = slice(int(starts[0]), int(starts[-1]))
        return BlockBuffers(
            self.addresses[pieces],
            self.lengths[pieces],
            starts - starts[0],
            self.owner,
            self.writable,
        )

    def take(self, blocks: npt.NDArray[np.int64]) -> BlockBuffers:
        """Some of the blocks, in an order of their own; their memory stays with ``owner``."""
        counts = (self.starts[1:] - self.starts[:-1])[blocks]
        starts = np.zeros(blocks.shape[0] + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        # Where each piece was: its block's first one, and how many it is behind that.
        pieces = np.repeat(self.starts[:-1][blocks] - starts[:-1], counts) + np.arange(starts[-1])
        return BlockBuffers(
            self.addresses[pieces], self.lengths[pieces], starts, self.owner, self.writable
        )

    def pieces(self, block: int) -> list[memoryview]:
        """Views of one block's pieces. They are valid only while ``owner`` lives."""
        out = []
        for index in range(int(self.starts[block]), int(self.starts[block + 1])):
            length = int(self.lengths[index])
            if length:
                array = (ctypes.c_ubyte * length).from_address(int(self.addresses[index]))
                out.append(memoryview(array).cast("B"))
        return out

    def aligned(self, alignment: int) -> bool:
        """Whether every piece starts and ends on a multiple of ``alignment`` bytes."""
        mask = np.uint64(alignment - 1)
        return not bool(((self.addresses | self.lengths) & mask).any())


@dataclass(frozen=True)
class BlockBatch:
    """Blocks to store or to load.

    Attributes
    ----------
    keys
        32-byte keys (see :func:`lifeboat_cache.interface.block_keys`).
    buffers
        The caller's memory, one entry per key.
    layout
        Tag of what the bytes of a block mean (dtype, shapes, order), 0 = opaque; one for all
        blocks, or one for each. A load of a record with another tag is a mismatch.
    positions
        End of each block in its prefix, in tokens; ``None`` = unknown.
    groups
        KV group or pool of each block; ``None`` = 0.
    families
        8-byte tags shared by all groups and ranks of one block, so that they can
        be evicted together; ``None`` = unknown.
    parents
        8-byte tags of the block before each block; ``None`` = unknown.
    salt
        8-byte tag of the request's cache salt (:func:`~lifeboat_cache.keys.salt_tag`), one for
        all blocks or one for each; 0 = unknown. ``lifeboat-cache purge --salt`` finds blocks by it.
    codecs
        What each block has been through: number of the codec that it was stored with
        elsewhere. It is not stored in a larger one, which could not bring back what that has
        lost. ``None`` = as it came from the engine.
    """

    keys: Sequence[bytes]
    buffers: BlockBuffers
    layout: int | Sequence[int] = 0
    positions: Sequence[int] | None = None
    groups: Sequence[int] | None = None
    families: Sequence[int] | None = None
    parents: Sequence[int] | None = None
    salt: int | Sequence[int] = 0
    codecs: Sequence[int] | None = None

    def __post_init__(self) -> None:
        count = len(self.keys)
        if len(self.buffers) != count:
            raise ValueError(
                f"a batch of {count} keys has {len(self.buffers)} buffers: give one per key"
            )
        for name in ("layout", "positions", "groups", "families", "parents", "salt", "codecs"):
            values = getattr(self, name)
            if values is not None and not isinstance(values, int) and len(values) != count:
                raise ValueError(f"{name} has {len(values)} values for {count} keys")
        check_keys(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def tags(self) -> _U64:
        """uint64 ``(n_blocks,)``: layout tag of each block."""
        if isinstance(self.layout, int):
            return np.full(len(self), self.layout, dtype=np.uint64)
        # Not by way of numpy's own choice of a dtype, which would round them.
        return np.array(self.layout, dtype=np.uint64)

    def window(self, first: int, last: int) -> BlockBatch:
        """The blocks ``first:last``."""

        def part(values: Sequence[int] | None) -> Sequence[int] | None:
            return None if values is None else values[first:last]

        return BlockBatch(
            self.keys[first:last],
            self.buffers.window(first, last),
            self.layout if isinstance(self.layout, int) else self.layout[first:last],
            part(self.positions),
            part(self.groups),
            part(self.families),
            part(self.parents),
            self.salt if isinstance(self.salt, int) else self.salt[first:last],
            part(self.codecs),
        )

    def take(self, blocks: npt.NDArray[np.int64]) -> BlockBatch:
        """Some of the blocks, in an order of their own."""
        rows = blocks.tolist()

        def part(values: Sequence[int] | None) -> Sequence[int] | None:
            return None if values is None else [values[row] for row in rows]

        return BlockBatch(
            [self.keys[row] for row in rows],
            self.buffers.take(blocks),
            self.layout if isinstance(self.layout, int) else [self.layout[row] for row in rows],
            part(self.positions),
            part(self.groups),
            part(self.families),
            part(self.parents),
            self.salt if isinstance(self.salt, int) else [self.salt[row] for row in rows],
            part(self.codecs),
        )
