"""Opening a block store as the configuration says."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.config import Config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.integrity import (
    IntegrityKey,
    configured_integrity_key,
    namespace_with_integrity,
)
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import DEFAULT_PENDING_BYTES, BlockStore
from lifeboat_cache.store.household import Household
from lifeboat_cache.store.protocol import Store
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.filesystem import FilesystemTarget

__all__ = ["configured_targets", "open_block_store"]


def configured_targets(config: Config) -> list[Target]:
    """The enabled targets in the order in which they are tried."""
    return [FilesystemTarget.from_tier(tier) for tier in config.storage.places]


def open_block_store(
    config: Config | LiveConfig,
    namespace: Namespace | Callable[[], Namespace],
    *,
    pending_bytes: int = DEFAULT_PENDING_BYTES,
    native: bool = False,
) -> Store:
    """Open the store of one namespace.

    Parameters
    ----------
    config
        Where and with how many workers. A :class:`LiveConfig` is followed while the store is
        open.
    namespace
        See :class:`BlockStore`.
    pending_bytes
        Bound of bytes that wait to be written.
    native
        Whether it is that of an engine's native mode: then ``engine.native_codec`` says whether
        blocks are kept exactly.
    """
    home = home_directory(os.environ)
    policy = CodecPolicy(config, native=native, home=home)
    config = config.config if isinstance(config, LiveConfig) else config
    key: IntegrityKey | None = None
    try:
        key = configured_integrity_key(config)
    except ConfigError as exc:  # without its key the store stands down, the engine goes on
        namespace = partial(_refuse, exc)
    return BlockStore(
        namespace if key is None else partial(_keyed, namespace, key),
        configured_targets(config),
        io_workers=config.engine.io_workers,
        pending_bytes=pending_bytes,
        shared_lookup=config.storage.shared_lookup,
        integrity_key=None if key is None else key.secret,
        companion=Household(home, autostart=config.agent.autostart, codecs=policy),
        codecs=policy,
    )


def _refuse(reason: ConfigError) -> Namespace:
    raise reason


def _keyed(namespace: Namespace | Callable[[], Namespace], key: IntegrityKey) -> Namespace:
    found = namespace if isinstance(namespace, Namespace) else namespace()
    return namespace_with_integrity(found, key)
