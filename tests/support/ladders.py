"""Looking behind a ladder that has one target."""

from __future__ import annotations

from lifeboat_cache.interface import Store
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.store.tiered_store import TieredStore

__all__ = ["only_store"]


def only_store(store: Store) -> BlockStore:
    """The store of a ladder's only target."""
    assert isinstance(store, TieredStore)
    (member,) = store._members
    assert isinstance(member.store, BlockStore)
    return member.store
