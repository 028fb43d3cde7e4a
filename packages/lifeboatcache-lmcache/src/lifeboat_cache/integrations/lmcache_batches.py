"""From LMCache's objects to batches of blocks, and back to objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from lmcache.v1.distributed.api import ObjectKey

from lifeboat_cache.integrations.lmcache_keys import NAMES_GROUP, names_block, names_key
from lifeboat_cache.integrations.lmcache_layout import ObjectLayout
from lifeboat_cache.integrations.lmcache_prefixes import Prefixes, family
from lifeboat_cache.integrations.lmcache_space import ModelSpace
from lifeboat_cache.interface import BlockBatch, BlockBuffers, Job, Outcome, salt_tag

__all__ = ["load_batch", "store_batch", "whole_objects", "with_names"]


def store_batch(
    space: ModelSpace,
    keys: Sequence[ObjectKey],
    layouts: Sequence[ObjectLayout],
    objects: Sequence[Any],
    prefixes: Prefixes,
) -> BlockBatch:
    """The blocks of objects that are to be stored. Raises as :func:`load_batch` does."""
    addresses = _addresses_of(objects, layouts)
    tags: list[int] = []
    positions: list[int] = []
    groups: list[int] = []
    families: list[int] = []
    parents: list[int] = []
    salts: list[int] = []
    for key, layout in zip(keys, layouts, strict=True):
        depth, parent = prefixes.place(key)
        parts = len(layout.parts)
        tags += [part.tag for part in layout.parts]
        positions += [(depth + 1) * layout.tokens] * parts
        groups += [min(key.object_group_id, NAMES_GROUP - 1)] * parts
        families += [family(key)] * parts
        parents += [parent] * parts
        salts += [salt_tag(key.cache_salt)] * parts
    return BlockBatch(
        [block for parts in space.blocks(keys, layouts) for block in parts],
        _buffers_of(addresses, layouts, objects),
        tags,
        positions=positions,
        groups=groups,
        families=families,
        parents=parents,
        salt=salts,
    )


def load_batch(
    space: ModelSpace,
    keys: Sequence[ObjectKey],
    layouts: Sequence[ObjectLayout],
    objects: Sequence[Any],
) -> BlockBatch:
    """The blocks of objects that are to be loaded, and where to.

    Raises
    ------
    ValueError
        If an object is not as large as its shapes say.
    NotImplementedError
        If one has no memory of the host's (GPU-direct storage).
    """
    addresses = _addresses_of(objects, layouts)
    return BlockBatch(
        [block for parts in space.blocks(keys, layouts) for block in parts],
        _buffers_of(addresses, layouts, objects),
        [part.tag for layout in layouts for part in layout.parts],
    )


def _buffers_of(
    addresses: Sequence[int], layouts: Sequence[ObjectLayout], owner: object
) -> BlockBuffers:
    """The memory of objects: a block per part."""
    starts: list[int] = []
    lengths: list[int] = []
    for address, layout in zip(addresses, layouts, strict=True):
        at = address
        for part in layout.parts:
            starts.append(at)
            lengths.append(part.nbytes)
            at += part.nbytes
    count = len(starts)
    blocks: npt.NDArray[np.int64] = np.arange(count + 1, dtype=np.int64)
    return BlockBuffers(
        np.array(starts, dtype=np.uint64), np.array(lengths, dtype=np.uint64), blocks, owner
    )


def _addresses_of(objects: Sequence[Any], layouts: Sequence[ObjectLayout]) -> list[int]:
    """Where objects lie in memory; see :func:`load_batch`."""
    for one, layout in zip(objects, layouts, strict=True):
        if int(one.get_size()) != layout.nbytes:
            raise ValueError(
                f"an object of {one.get_size()} bytes has shapes of {layout.nbytes}: take `serde` "
                "out of the adapter's configuration, LifeboatCache has codecs of its own"
            )
    return [int(one.data_ptr) for one in objects]


def with_names(batch: BlockBatch, keys: list[ObjectKey], layouts: list[ObjectLayout]) -> BlockBatch:
    """Add blocks with the names of objects, one for each salt.

    Each is evicted together with the first of its objects.
    """
    by_salt: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        by_salt.setdefault(key.cache_salt, []).append(number)
    rows = list(by_salt.values())
    blocks = [names_block([keys[n] for n in row], [layouts[n] for n in row]) for row in rows]
    first = [keys[row[0]] for row in rows]
    none = [0] * len(rows)
    buffers = batch.buffers
    salts = batch.salt if not isinstance(batch.salt, int) else [batch.salt] * len(batch)
    return BlockBatch(
        [*batch.keys, *map(names_key, blocks)],
        BlockBuffers(
            np.append(buffers.addresses, [np.uint64(block.ctypes.data) for block in blocks]),
            np.append(buffers.lengths, [np.uint64(block.nbytes) for block in blocks]),
            np.arange(len(batch) + len(blocks) + 1, dtype=np.int64),
            (buffers.owner, blocks),
        ),
        [*batch.tags().tolist(), *none],
        positions=[*(batch.positions or ()), *none],
        groups=[*(batch.groups or ()), *[NAMES_GROUP] * len(rows)],
        families=[*(batch.families or ()), *map(family, first)],
        parents=[*(batch.parents or ()), *none],
        salt=[*salts, *(salt_tag(key.cache_salt) for key in first)],
    )


def whole_objects(job: Job, layouts: Sequence[ObjectLayout], *, present: bool) -> list[bool]:
    """Which objects of a job have gone well in all of their parts."""
    good = job.outcomes == Outcome.OK
    if present:
        good = good | (job.outcomes == Outcome.PRESENT)
    if good.all():
        return [True] * len(layouts)
    out = []
    at = 0
    for layout in layouts:
        out.append(bool(good[at : at + len(layout.parts)].all()))
        at += len(layout.parts)
    return out
