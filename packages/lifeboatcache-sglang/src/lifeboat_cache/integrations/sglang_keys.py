"""From SGLang's page hashes to the keys of our records.

A page hash is a chained SHA-256 over all tokens up to the page's end, begun with the
request's extra key and cache salt (:mod:`lifeboat_cache.integrations.sglang_lora` sees
to adapters). It names neither the pool nor what a page holds: these are the key space.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from lifeboat_cache.integrations.sglang_pools import PoolPages
from lifeboat_cache.interface import block_keys, tag
from lifeboat_cache.namespace import canonical_json

__all__ = ["GROUPS", "PageKeys", "families", "is_sharded", "key_space"]

_SPACE_CONTEXT = "lifeboatcache 2026 sglang pool key space v1"

#: Number of each pool in our records; pools of later releases share the last one.
GROUPS = {
    name: number
    for number, name in enumerate(
        (
            "kv",
            "mamba",
            "swa",
            "auxiliary_swa",
            "indexer",
            "draft",
            "draft_indexer",
            "draft_swa",
        )
    )
}


def is_sharded(pool: Any, replicated: bool) -> bool:
    """Whether every tensor-parallel rank has pages of its own in a pool.

    Parameters
    ----------
    pool
        The host pool.
    replicated
        Whether the model's KV is the same on every rank (MLA and its relatives).

    Returns
    -------
    bool
        Mamba states and pools with attention heads are cut by rank in every model.
    """
    if not replicated:
        return True
    kinds = {base.__name__ for base in type(pool).__mro__}
    return bool(kinds & {"MambaPoolHost", "MHATokenToKVPoolHost", "MHATokenToKOnlyPoolHost"})


def key_space(pages: PoolPages, shard: Sequence[int]) -> bytes:
    """Name of the key space of a pool's pages.

    Parameters
    ----------
    pages
        The pool.
    shard
        Rank and size, where ranks of one namespace hold different pages; else empty.
    """
    document = {
        "pool": pages.name,
        "tokens": pages.tokens,
        "bytes": pages.page_bytes,
        "layout": pages.layout.tag,
        "facts": dict(pages.facts),
        "shard": list(shard),
    }
    return blake3(canonical_json(document), derive_key_context=_SPACE_CONTEXT).digest()


class PageKeys:
    """Keys, groups and families of one pool's pages.

    Parameters
    ----------
    pages
        The pool.
    shard
        See :func:`key_space`.
    """

    def __init__(self, pages: PoolPages, shard: Sequence[int] = ()) -> None:
        self._space = key_space(pages, shard)
        self.group = GROUPS.get(pages.name, len(GROUPS))

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        """32-byte keys of pages with these hashes."""
        return block_keys(map(_engine_key, hashes), space=self._space)


def families(hashes: Sequence[str]) -> list[int]:
    """Tags that the pages of all pools and ranks at one place of a prefix share."""
    return [tag(_engine_key(one)) for one in hashes]


def _engine_key(page_hash: str) -> bytes:
    return page_hash.encode("utf-8", "surrogatepass")
