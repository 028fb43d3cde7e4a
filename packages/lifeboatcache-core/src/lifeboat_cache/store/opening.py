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
from lifeboat_cache.mover.hanging import needs_mover
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import DEFAULT_PENDING_BYTES, BlockStore
from lifeboat_cache.store.household import Household
from lifeboat_cache.store.protocol import Store
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.opening import target_of

__all__ = ["configured_targets", "open_block_store"]


def configured_targets(config: Config) -> list[Target]:
    """The enabled targets in the order in which they are tried."""
    return [target_of(tier) for tier in config.storage.places]


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
    live = config
    config = config.config if isinstance(config, LiveConfig) else config
    key: IntegrityKey | None = None
    try:
        key = configured_integrity_key(config)
    except ConfigError as exc:  # without its key the store stands down, the engine goes on
        namespace = partial(_refuse, exc)
    if key is not None:
        namespace = partial(_keyed, namespace, key)
    companion = Household(home, autostart=config.agent.autostart, codecs=policy)
    tiers = config.storage.places
    if tiers and needs_mover(tiers[0]):
        policy.opened(target_of(tiers[0]))
        return RemoteStore(
            namespace,
            tiers[0],
            home=home,
            config=live,
            native=native,
            pending_bytes=pending_bytes,
            secret=None if key is None else key.secret,
            companion=companion,
        )
    return BlockStore(
        namespace,
        # What can hang is never touched by this process.
        [target_of(tier) for tier in tiers if not needs_mover(tier)],
        io_workers=config.engine.io_workers,
        pending_bytes=pending_bytes,
        shared_lookup=config.storage.shared_lookup,
        integrity_key=None if key is None else key.secret,
        companion=companion,
        codecs=policy,
    )


def _refuse(reason: ConfigError) -> Namespace:
    raise reason


def _keyed(namespace: Namespace | Callable[[], Namespace], key: IntegrityKey) -> Namespace:
    found = namespace if isinstance(namespace, Namespace) else namespace()
    return namespace_with_integrity(found, key)
