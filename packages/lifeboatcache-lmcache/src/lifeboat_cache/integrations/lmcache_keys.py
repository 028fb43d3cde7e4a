"""From LMCache's keys to block keys, and the lists of names that outlive a restart.

Block keys are digests, but LMCache counts, lists and evicts what is stored by its own keys.
So each store also keeps a block with the names of what was stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from lmcache.v1.distributed.api import ObjectKey

from lifeboat_cache.integrations.lmcache_layout import ObjectLayout, ObjectLayouts
from lifeboat_cache.interface import block_keys

__all__ = ["NAMES_GROUP", "aligned", "names_block", "names_key", "object_blocks", "read_names"]

#: The group number of blocks that hold names.
NAMES_GROUP = 0xFFFF

_PAGE = 4096

_SPACE = b"lmcache object 1\0"
_NAMES_SPACE = b"lmcache names 1"


def object_blocks(keys: Iterable[ObjectKey], layout: ObjectLayout) -> list[list[bytes]]:
    """The block keys of objects of one layout: a list for each, with one key per part.

    The layout is part of every key: an object is found only by who expects its shapes
    and dtypes.
    """
    names = [_name(key) for key in keys]
    space = _SPACE + layout.signature
    if len(layout.parts) == 1:
        return [[key] for key in block_keys(names, space=space)]
    columns = [
        block_keys(names, space=space + part.to_bytes(2, "little"))
        for part in range(len(layout.parts))
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _name(key: ObjectKey) -> bytes:
    # Of fixed length but for the salt, which is last: no two keys run into each other.
    return b"".join(
        (
            len(key.chunk_hash).to_bytes(2, "little"),
            key.chunk_hash,
            key.kv_rank.to_bytes(8, "little"),
            key.object_group_id.to_bytes(4, "little"),
            key.cache_salt.encode(),
        )
    )


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """uint8 ``(nbytes,)`` that begins on a page."""
    room = np.zeros(nbytes + _PAGE, dtype=np.uint8)
    first = -int(room.ctypes.data) % _PAGE
    return room[first : first + nbytes]


def names_block(keys: Sequence[ObjectKey], layouts: Sequence[ObjectLayout]) -> Any:
    """The content of a block with the names of objects (uint8, whole pages)."""
    distinct = {layout.signature: layout for layout in layouts}
    number = {signature: at for at, signature in enumerate(distinct)}
    text = json.dumps(
        {
            "format": 1,
            "layouts": [layout.to_json() for layout in distinct.values()],
            "keys": [
                [
                    key.chunk_hash.hex(),
                    key.kv_rank,
                    key.object_group_id,
                    key.cache_salt,
                    number[layout.signature],
                ]
                for key, layout in zip(keys, layouts, strict=True)
            ],
        },
        separators=(",", ":"),
    ).encode()
    block = aligned(-(-len(text) // _PAGE) * _PAGE)
    block[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    return block


def names_key(block: npt.NDArray[np.uint8]) -> bytes:
    """The block key of a block of names."""
    return block_keys([blake3(block.tobytes()).digest()], space=_NAMES_SPACE)[0]


def read_names(
    block: npt.NDArray[np.uint8], model_name: str, layouts: ObjectLayouts
) -> list[tuple[ObjectKey, ObjectLayout]]:
    """Read a block of names.

    Raises
    ------
    ValueError
        If it is none, or one of a newer release.
    """
    try:
        document = json.loads(block.tobytes().rstrip(b"\0"))
        if document["format"] != 1:
            raise ValueError("a list of names of a newer release")
        found = [layouts.of(item["shapes"], item["dtypes"]) for item in document["layouts"]]
        return [
            (
                ObjectKey(
                    chunk_hash=bytes.fromhex(chunk),
                    model_name=model_name,
                    kv_rank=int(rank),
                    object_group_id=int(group),
                    cache_salt=str(salt),
                ),
                found[layout],
            )
            for chunk, rank, group, salt, layout in document["keys"]
        ]
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as exc:
        raise ValueError(f"not a list of names ({exc!r})") from exc
