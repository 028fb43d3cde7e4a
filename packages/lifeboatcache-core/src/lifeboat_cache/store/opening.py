"""Opening a block store as the configuration says."""

from __future__ import annotations

from collections.abc import Callable

from lifeboat_cache.config import Config
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import DEFAULT_PENDING_BYTES, BlockStore
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["configured_targets", "open_block_store"]


def configured_targets(config: Config) -> list[Target]:
    """The enabled targets in the order in which they are tried."""
    return [FilesystemTarget.from_tier(tier) for tier in config.storage.places]


def open_block_store(
    config: Config,
    namespace: Namespace | Callable[[], Namespace],
    *,
    pending_bytes: int = DEFAULT_PENDING_BYTES,
) -> BlockStore:
    """Open the store of one namespace.

    Parameters
    ----------
    config
        Where and with how many workers.
    namespace
        See :class:`BlockStore`.
    pending_bytes
        Bound of bytes that wait to be written.
    """
    return BlockStore(
        namespace,
        configured_targets(config),
        io_workers=config.engine.io_workers,
        pending_bytes=pending_bytes,
        shared_lookup=config.storage.shared_lookup,
    )
