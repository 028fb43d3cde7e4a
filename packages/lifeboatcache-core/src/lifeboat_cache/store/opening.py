"""Opening a store as the configuration says."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path

from lifeboat_cache.codecs.ladder import rung_of
from lifeboat_cache.codecs.policies import CodecPolicies
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.config import FALLBACK_NAME, Config, Tier
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.integrity import (
    IntegrityKey,
    configured_integrity_key,
    namespace_with_integrity,
)
from lifeboat_cache.mover.hanging import hosts_movers, needs_mover, require_movers
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import DEFAULT_PENDING_BYTES, BlockStore
from lifeboat_cache.store.household import Household
from lifeboat_cache.store.member import MemberSpec
from lifeboat_cache.store.protocol import Store
from lifeboat_cache.store.tiered_store import TieredStore, Tiering
from lifeboat_cache.targets.opening import target_of

__all__ = ["open_block_store"]


def open_block_store(
    config: Config | LiveConfig,
    namespace: Namespace | Callable[[], Namespace],
    *,
    pending_bytes: int = DEFAULT_PENDING_BYTES,
    native: bool = False,
    page_cache: bool = False,
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
        Bound of bytes that wait to be written, for each target.
    native
        Whether it is that of an engine's native mode: then ``engine.native_codec`` says whether
        blocks are kept exactly.
    page_cache
        For engines that keep no copy of their own in memory: where a tier's ``direct_io`` is
        ``auto``, what is stored stays in the page cache, and is read from there as long as it is
        there.
    """
    home = home_directory(os.environ)
    started = config.config if isinstance(config, LiveConfig) else config
    key: IntegrityKey | None = None
    try:
        key = configured_integrity_key(started)
    except ConfigError as exc:  # without its key the store stands down, the engine goes on
        namespace = partial(_refuse, exc)
    codecs = CodecPolicies(
        partial(CodecPolicy, config, native=native, home=home),
        config if isinstance(config, LiveConfig) else None,
    )
    members = _Members(
        config,
        home,
        codecs,
        None if key is None else key.secret,
        native,
        pending_bytes,
        page_cache,
    )
    store = TieredStore(
        namespace if key is None else partial(_keyed, namespace, key),
        Tiering(members.specs, lambda: members.config.storage.write_mode),
        companion=Household(home, autostart=started.agent.autostart, codecs=codecs),
        pending_bytes=pending_bytes,
    )
    codecs.written = store.written
    return store


class _Members:
    """Makes the targets of a store from the configuration, as it is now."""

    def __init__(
        self,
        given: Config | LiveConfig,
        home: Path,
        codecs: CodecPolicies,
        secret: bytes | None,
        native: bool,
        pending_bytes: int,
        page_cache: bool,
    ) -> None:
        self._given = given
        self._page_cache = page_cache
        self._home = home
        self._codecs = codecs
        self._secret = secret
        self._native = native
        self._pending_bytes = pending_bytes
        self._places: tuple[Tier, ...] | None = None
        self._specs: tuple[MemberSpec, ...] = ()

    @property
    def config(self) -> Config:
        """What is in effect now."""
        given = self._given
        return given.config if isinstance(given, LiveConfig) else given

    def specs(self) -> Sequence[MemberSpec]:
        """See :class:`Tiering`."""
        places = self.config.storage.places
        if places != self._places:
            self._places = places
            self._specs = tuple(self._spec(tier) for tier in places)
        return self._specs

    def _spec(self, tier: Tier) -> MemberSpec:
        # A store behind a mover sees itself to being usable again.
        remote = needs_mover(tier)
        return MemberSpec(
            name=tier.name,
            type=tier.type,
            rung=tier.rung or rung_of(tier.type),
            location=tier.location,
            open=partial(self._open, tier),
            probe=None if remote and hosts_movers() else partial(_probe, tier),
            look=None if remote else partial(_identity, tier),
            identity=repr(tier),
            fallback=tier.name == FALLBACK_NAME,
            wanted=partial(_holds, tier),
        )

    def _open(self, tier: Tier, namespace: Namespace) -> Store:
        policy = self._codecs.of(tier.name)
        if needs_mover(tier):  # what can hang is never touched by this process
            require_movers(tier)
            policy.opened(target_of(tier))
            return RemoteStore(
                namespace,
                tier,
                home=self._home,
                config=self._given,
                native=self._native,
                pending_bytes=self._pending_bytes,
                secret=self._secret,
                counts=policy.counts,
            )
        cached = self._page_cache and tier.direct_io == "auto"
        if cached:
            policy.expect_cached()
        return BlockStore(
            namespace,
            [target_of(tier)],
            io_workers=self.config.engine.io_workers,
            pending_bytes=self._pending_bytes,
            shared_lookup=self.config.storage.shared_lookup,
            integrity_key=self._secret,
            codecs=policy,
            quiet=True,
            page_cache=cached,
        )


def _probe(tier: Tier) -> Hashable:
    """Whether a target can be used, and which directory it is."""
    if needs_mover(tier):
        require_movers(tier)
    else:
        target_of(tier).probe()
    return _identity(tier)


def _identity(tier: Tier) -> Hashable:
    """Which directory a target is; nothing is touched that can hang (a mount has come)."""
    return "behind a mover" if needs_mover(tier) else target_of(tier).identity()


def _holds(tier: Tier, namespace: Namespace) -> bool:
    """Whether there may be blocks of a namespace on a target."""
    return needs_mover(tier) or os.path.isdir(tier.path / namespace.directory)


def _refuse(reason: ConfigError) -> Namespace:
    raise reason


def _keyed(namespace: Namespace | Callable[[], Namespace], key: IntegrityKey) -> Namespace:
    found = namespace if isinstance(namespace, Namespace) else namespace()
    return namespace_with_integrity(found, key)
