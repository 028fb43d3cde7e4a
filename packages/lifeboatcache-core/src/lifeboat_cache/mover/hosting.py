"""The stores of a mover: one for each namespace, all on the mover's target."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.config.schema import Config
from lifeboat_cache.errors import FormatError, LifeboatError
from lifeboat_cache.mover.feed import FedIndex
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.store.household import Alone
from lifeboat_cache.store.protocol import State
from lifeboat_cache.targets.base import Target

__all__ = ["Host", "Hosts", "Wish", "layout_from_json", "layout_to_json"]

_log = logging.getLogger("lifeboat_cache")

#: A store that could not use the target is opened again after so many seconds.
_REOPEN_S, _MOST_REOPEN_S = 2.0, 60.0

#: A store that no engine uses is closed after so many seconds.
_LINGER_S = 30.0

#: Engines bound what is under way: the memory it is in is theirs.
_NO_LIMIT = 1 << 50


@dataclass(frozen=True)
class Wish:
    """What an engine asks for.

    Attributes
    ----------
    namespace
        Whose blocks.
    native
        See :class:`CodecPolicy`.
    secret
        The integrity key's bytes, if there is one.
    shared_lookup
        See :class:`BlockStore`.
    config
        The engine's sections ``compression`` and ``engine``.
    """

    namespace: Namespace
    native: bool
    secret: bytes | None
    shared_lookup: bool
    config: Config

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Wish:
        """Read it out of a message.

        Raises
        ------
        LifeboatError
            If it is not whole.
        """
        try:
            secret = value.get("secret")
            return cls(
                Namespace.from_json(value["namespace"]),
                bool(value["native"]),
                None if secret is None else bytes.fromhex(secret),
                bool(value["shared_lookup"]),
                config_from(value["config"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"what the engine asks for is not clear ({error})") from error

    @property
    def name(self) -> tuple[bytes, bool, bytes | None, bool]:
        """Equal for those that share a store."""
        exact = self.native and self.config.engine.native_codec == "exact"
        return self.namespace.digest, exact, self.secret, self.shared_lookup


def config_from(sections: Any) -> Config:
    """A configuration out of some of its sections. Raises ``ValueError``."""
    if not isinstance(sections, dict):
        raise ValueError("no sections")
    return Config.model_validate(
        {name: sections[name] for name in ("compression", "engine") if name in sections}
    )


class _Looking(Alone):
    """Has the codecs look at what they depend on."""

    def __init__(self, policy: CodecPolicy) -> None:
        self._policy = policy

    def tick(self) -> None:
        try:
            self._policy.look()
        except Exception:
            _log.exception("choosing codecs failed; please report this")


class Host:
    """The store of one namespace; opened again when the target comes back.

    Attributes
    ----------
    store, index
        Those of now.
    epoch
        Changes with them.
    users
        Connections that use it.
    """

    def __init__(self, wish: Wish, target: Callable[[], Target], home: Path) -> None:
        self.wish = wish
        self._make_target = target
        self._home = home
        self._layouts: dict[int, KVLayout] = {}
        self._pause_s = _REOPEN_S
        self._disabled: float | None = None
        self.epoch = 0
        self.users = 0
        self.idle_since = time.monotonic()
        self._open()

    def _open(self) -> None:
        self.policy = CodecPolicy(self.wish.config, native=self.wish.native, home=self._home)
        self.index = FedIndex()
        self.store = BlockStore(
            self.wish.namespace,
            [self._make_target()],
            io_workers=self.wish.config.engine.io_workers,
            pending_bytes=_NO_LIMIT,
            integrity_key=self.wish.secret,
            shared_lookup=self.wish.shared_lookup,
            companion=_Looking(self.policy),
            codecs=self.policy,
            index=self.index,
        )
        for layout in list(self._layouts.values()):
            self.store.describe(layout)
        self.epoch += 1

    def describe(self, layout: KVLayout) -> None:
        """Take in the layout of blocks to come."""
        self._layouts[layout.tag] = layout
        self.store.describe(layout)

    def look(self) -> None:
        """Open the store again if it stands down; to be called every second."""
        now = time.monotonic()
        if self.store.state is State.READY:
            self._pause_s = _REOPEN_S
        if self.store.state is not State.DISABLED:
            self._disabled = None
        elif self._disabled is None:
            self._disabled = now
        elif now - self._disabled >= self._pause_s:
            self._pause_s = min(2 * self._pause_s, _MOST_REOPEN_S)
            self._disabled = None
            old = self.store
            self._open()
            _close_later(old)

    def close(self) -> None:
        """Let go of everything, as far as the target answers; does not wait for that."""
        _close_later(self.store)


class Hosts:
    """All stores of a mover. Thread-safe.

    Parameters
    ----------
    target
        Makes the target; touches nothing.
    home
        The home directory.
    """

    def __init__(self, target: Callable[[], Target], home: Path) -> None:
        self._target = target
        self._home = home
        self._lock = threading.Lock()
        self._hosts: dict[object, Host] = {}

    def acquire(self, wish: Wish) -> Host:
        """The store for a wish, in use until it is released."""
        with self._lock:
            host = self._hosts.get(wish.name)
            if host is None:
                host = self._hosts[wish.name] = Host(wish, self._target, self._home)
            host.users += 1
            return host

    def release(self, host: Host) -> None:
        """Say that one connection uses it no more."""
        with self._lock:
            host.users -= 1
            host.idle_since = time.monotonic()

    def look(self) -> None:
        """See to all stores; to be called every second."""
        with self._lock:
            hosts = dict(self._hosts)
        for name, host in hosts.items():
            with self._lock:
                idle = host.users == 0 and time.monotonic() - host.idle_since > _LINGER_S
                if idle:
                    del self._hosts[name]
            if idle:
                host.close()
            elif host.users:
                host.look()

    def purge(self, namespace: Namespace) -> None:
        """Remove a namespace from the target, unless another connection uses it."""
        with self._lock:
            mine = [
                (name, host)
                for name, host in self._hosts.items()
                if host.wish.namespace == namespace
            ]
            if any(host.users for _, host in mine):
                return
            for name, _ in mine:
                del self._hosts[name]

        def work() -> None:
            for _, host in mine:
                host.store.close()
            try:
                self._target().purge(namespace.hex)
            except (OSError, LifeboatError) as error:
                _log.warning("namespace %s was not removed: %s", namespace.hex[:12], error)

        threading.Thread(target=work, name="purge", daemon=True).start()


def _close_later(store: BlockStore) -> None:
    threading.Thread(target=store.close, name="close", daemon=True).start()


def layout_to_json(layout: KVLayout) -> dict[str, Any]:
    """A layout for a message."""
    return {"nbytes": layout.nbytes, "tensors": [vars(tensor) for tensor in layout.tensors]}


def layout_from_json(value: Mapping[str, Any]) -> KVLayout:
    """Read it back.

    Raises
    ------
    FormatError
        If it is none.
    """
    try:
        tensors = tuple(TensorLayout(**tensor) for tensor in value["tensors"])
        return KVLayout(int(value["nbytes"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"a layout is not clear ({error}): restart the engine") from error
