"""What a store does for its node besides storing: it is seen, and it has an agent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lifeboat_cache import spans

if TYPE_CHECKING:
    from lifeboat_cache.registry.document import PublishedCodecs
    from lifeboat_cache.registry.publisher import StorePublisher
    from lifeboat_cache.store.protocol import Store

__all__ = ["Alone", "Companion", "Household"]

_log = logging.getLogger("lifeboat_cache")


class Companion(Protocol):
    """Accompanies a store through its life, on its background thread."""

    def begin(self, store: Store) -> None:
        """The store has been opened; nothing is known yet."""

    def tick(self) -> None:
        """Called every few seconds."""

    def end(self) -> None:
        """The store is being closed."""


class Alone:
    """No companion."""

    def begin(self, store: Store) -> None:
        """See :class:`Companion`."""

    def tick(self) -> None:
        """See :class:`Companion`."""

    def end(self) -> None:
        """See :class:`Companion`."""


class Household:
    """Publishes a store under a home directory and sees to it that an agent runs there.

    Nothing that goes wrong here concerns the store: no method raises.

    Parameters
    ----------
    home
        The home directory.
    autostart
        Whether to start the agent when there is none.
    codecs
        The store's codecs, which follow the configuration and are published too.
    """

    def __init__(
        self, home: Path, *, autostart: bool, codecs: PublishedCodecs | None = None
    ) -> None:
        self._home = home
        self._codecs = codecs
        self._autostart = autostart
        self._publisher: StorePublisher | None = None

    def begin(self, store: Store) -> None:
        """See :class:`Companion`."""
        self._guarded(lambda: self._publish(store))
        self._guarded(spans.begin)
        self.tick()

    def _publish(self, store: Store) -> None:
        from lifeboat_cache.registry.publisher import StorePublisher  # it imports this package

        self._publisher = StorePublisher(store, self._home, queue=store.queue, codecs=self._codecs)

    def tick(self) -> None:
        """See :class:`Companion`."""
        publisher = self._publisher
        if publisher is not None:
            self._guarded(publisher.tick)
        if self._autostart:
            self._guarded(self._see_to_the_agent)

    def _see_to_the_agent(self) -> None:
        from lifeboat_cache.agent import ensure_agent

        # It says itself why there is none.
        ensure_agent(self._home, wait=False)

    def end(self) -> None:
        """See :class:`Companion`."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            self._guarded(publisher.close)
        self._guarded(spans.end)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            _log.exception("LifeboatCache: publishing failed; please report this")
