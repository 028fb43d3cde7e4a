"""How a store keeps in touch with the mover of its target."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.config import Config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.index import Index
from lifeboat_cache.mover.breaker import Breaker
from lifeboat_cache.mover.deletions import DELETION
from lifeboat_cache.mover.feed import take_in
from lifeboat_cache.mover.hosting import layout_to_json
from lifeboat_cache.mover.link import Link, reason_of
from lifeboat_cache.mover.places import MoverPlaces, target_key
from lifeboat_cache.mover.transfers import Transfers, answer_of
from lifeboat_cache.mover.wire import PROTOCOL, Kind, Message, from_json, to_json
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.version import __version__

__all__ = ["LOOK_S", "MoverClient"]

_log = logging.getLogger("lifeboat_cache")

#: How often what goes on in the background is looked at, in seconds.
LOOK_S = 2.0

#: Deadlines are looked at so often, in seconds: while there are some, and else.
_TICK_S, _IDLE_TICK_S = 0.1, 1.0

#: A mover says something every second. One that has not for so long is given up.
_SILENT_S = 15.0

#: How long to wait before a mover is looked for again, in seconds.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 2.0

#: Memory that nothing has used for so many seconds is given back.
_QUIET_S = 30.0


class MoverClient:
    """Reaches the mover again and again, and takes in what it says.

    Parameters
    ----------
    tier, home
        The target, and where its mover is found.
    config
        What this process runs with. A :class:`LiveConfig` is followed.
    native, secret, arena_bytes
        See :class:`~lifeboat_cache.mover.remote_store.RemoteStore`.
    breaker, transfers
        Those of the store.
    on_deleted
        Called with the number of a deletion and whether its tombstones are on storage, or
        with ``None``: no answer to those under way comes any more.
    on_records
        Called when the mover has told of records.

    Attributes
    ----------
    index
        What is on the target, as far as the mover has told.
    link
        The connection; ``None`` if there is none.
    reason
        Why there is none.
    ever_synced
        Whether a mover has told everything once.
    recovered
        Set from then on, or when the store gives up.
    recovered_blocks
        How many blocks that were.
    """

    def __init__(
        self,
        tier: Tier,
        home: Path,
        config: Config | LiveConfig,
        *,
        native: bool,
        secret: bytes | None,
        arena_bytes: int,
        breaker: Breaker,
        transfers: Transfers,
        on_deleted: Callable[[int | None, bool], None],
        on_records: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._places = MoverPlaces.of(home, target_key(tier))
        self._config = config
        self._native = native
        self._secret = secret
        self._arena_bytes = arena_bytes
        self._breaker = breaker
        self._transfers = transfers
        self._on_deleted = on_deleted
        self._on_records = on_records
        self._namespace: Namespace | None = None
        self._layouts: dict[int, KVLayout] = {}
        self._settings: dict[str, Any] = {}
        self._reader: threading.Thread | None = None
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._work = threading.Event()
        self.index = Index()
        self.link: Link | None = None
        self.reason = ""
        self.ever_synced = False
        self.recovered = threading.Event()
        self.recovered_blocks = 0

    # What it is now ---------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether jobs have a chance."""
        link = self.link
        return link is not None and link.usable() and self._breaker.closed

    def why(self) -> str:
        """Why not; empty if they have."""
        link = self.link
        if link is None:
            return self.reason
        if not self._breaker.closed:
            return (
                f"{self._tier.location} is not used: {self._breaker.reason}; it is tried again by "
                f"itself: check {'the network' if self._tier.type == 's3' else 'its mount'} and "
                "its server"
            )
        if not link.usable():
            return str(link.status.get("reason") or f"{self._tier.location} is being opened")
        return ""

    def describe(self, layout: KVLayout) -> None:
        """Tell movers, this one and those to come, of a layout."""
        self._layouts[layout.tag] = layout
        self._transfers.tell(Kind.LAYOUT, to_json(layout_to_json(layout)))

    def busy(self) -> None:
        """Say that something has a deadline now."""
        self._work.set()

    # Keeping in touch -------------------------------------------------------

    def follow(self, namespace: Namespace, tick: Callable[[], None]) -> None:
        """Reach the mover again and again, until it is to stop.

        Parameters
        ----------
        namespace
            Whose blocks.
        tick
            Called every few seconds.
        """
        self._namespace = namespace
        pause = _LEAST_PAUSE_S
        looked = -LOOK_S
        while not self._stop.is_set():
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                tick()
                self._say_wanted()
            link = self.link
            if link is None:
                pause = _LEAST_PAUSE_S if self._reach() else min(2 * pause, _MOST_PAUSE_S)
                if self.link is None:
                    self._stop.wait(pause)
                continue
            if time.monotonic() - link.heard > _SILENT_S:
                self.reason = "its mover is silent; it is looked for again"
                link.shut()
            self._reconfigure()
            self._lost.wait(LOOK_S)
            if self._lost.is_set():
                self._lost.clear()
                self._let_go(link)
        link = self.link
        if link is not None:
            link.shut()
            self._let_go(link)

    def _say_wanted(self) -> None:
        try:
            self._places.want(self._tier)
        except OSError as error:
            self.reason = f"its mover cannot be asked for ({error}): correct the home directory"

    def _reach(self) -> bool:
        """Connect to the mover; whether that was done."""
        if not self._transfers.room(self._arena_bytes):
            self.reason = "a mover that has ended still holds memory; its target does not answer"
            return False
        try:
            link = Link.connect(self._places, self._hello(), self._arena_bytes)
        except (OSError, LifeboatError) as error:
            self.reason = reason_of(error)
            return False
        self._breaker.reset()
        self.index = Index()
        self._settings = self._sections()
        self._on_deleted(None, False)
        self.link, self.reason = link, ""
        self._transfers.attach(link)
        for layout in list(self._layouts.values()):
            self._transfers.tell(Kind.LAYOUT, to_json(layout_to_json(layout)))
        self._reader = threading.Thread(
            target=self._read, args=(link,), name="lifeboat-mover-in", daemon=True
        )
        self._reader.start()
        return True

    def _hello(self) -> dict[str, Any]:
        assert self._namespace is not None
        return {
            "protocol": PROTOCOL,
            "core": __version__,
            "namespace": self._namespace.to_json(),
            "native": self._native,
            "secret": None if self._secret is None else self._secret.hex(),
            "shared_lookup": self._loaded().storage.shared_lookup,
            "config": self._sections(),
        }

    def _loaded(self) -> Config:
        config = self._config
        return config.config if isinstance(config, LiveConfig) else config

    def _sections(self) -> dict[str, Any]:
        config = self._loaded()
        return {
            "compression": config.compression.model_dump(mode="json"),
            "engine": config.engine.model_dump(mode="json"),
        }

    def _reconfigure(self) -> None:
        """Tell the mover of a changed configuration."""
        if isinstance(self._config, LiveConfig):
            sections = self._sections()
            if sections != self._settings and self._transfers.tell(Kind.CONFIG, to_json(sections)):
                self._settings = sections

    def _let_go(self, link: Link) -> None:
        """The mover has gone, or is to go."""
        self.link = None
        self._on_deleted(None, False)
        self._transfers.detach(link)
        if self._reader is not None:
            self._reader.join()
        link.close()
        if not self._stop.is_set():
            _log.warning("LifeboatCache: the mover of target %s has gone", self._tier.name)

    def _read(self, link: Link) -> None:
        """Take in what the mover says."""
        try:
            while (message := link.receive()) is not None:
                self._hear(link, message)
        except (OSError, LifeboatError) as error:
            _log.info("LifeboatCache: the connection to a mover ended: %s", error)
        except Exception:
            _log.exception("LifeboatCache: a mover is not understood; please report this")
        finally:
            link.shut()
            self._lost.set()

    def _hear(self, link: Link, message: Message) -> None:
        if message.kind == Kind.DONE:
            if message.number >= DELETION:
                done = bool((answer_of(message)[1] == Outcome.OK).all())
                self._on_deleted(message.number, done)
            else:
                self._transfers.done(link, message)
        elif message.kind == Kind.STATUS:
            was = link.usable()
            link.status = from_json(message.body)
            if link.usable() != was:
                self._transfers.wake()
        elif message.kind == Kind.SYNCED:
            if not self.ever_synced:
                self.recovered_blocks = len(self.index)
            link.synced = self.ever_synced = True
            self.recovered.set()
            self._transfers.wake()
        elif message.kind == Kind.RESET:
            link.synced = False
            self.index = Index()
            # The mover may have opened its target anew, and know of none of them.
            self._on_deleted(None, False)
        elif message.kind == Kind.PROBED:
            answer = from_json(message.body)
            if self._breaker.probed(answer.get("ok") is True, str(answer.get("reason") or "")):
                _log.warning("LifeboatCache: target %s answers again", self._tier.name)
                self._transfers.wake()
        elif take_in(self.index, message) and message.kind == Kind.INSERT:
            self._on_records()

    def watch_deadlines(self) -> None:
        """End what takes too long; nothing that this thread does can wait."""
        said = False
        quiet_since = time.monotonic()
        while not self._stop.is_set():
            busy = self._transfers.waiting() or not self._breaker.closed
            if busy:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > _QUIET_S:
                quiet_since = time.monotonic()
                self._transfers.trim()
            self._work.wait(_TICK_S if busy else _IDLE_TICK_S)
            self._work.clear()
            if busy:
                self._stop.wait(_TICK_S)
            self._transfers.tick()
            if self._breaker.wants_probe() and not self._transfers.tell(Kind.PROBE, b""):
                self._breaker.probed(False)
            if self._breaker.closed:
                said = False
            elif not said:
                said = True
                _log.warning(
                    "LifeboatCache: target %s is not used for now: %s",
                    self._tier.name,
                    self._breaker.reason,
                )

    # The end ----------------------------------------------------------------

    def stop(self) -> None:
        """Let go of the mover; all threads end."""
        self._stop.set()
        self._work.set()
        self._lost.set()
        link = self.link
        if link is not None:
            link.shut()

    def withdraw(self) -> None:
        """Say that the mover is not wanted any more."""
        self._places.withdraw()

    def after_fork(self) -> None:
        """In a forked child: the threads stayed with the parent."""
        link, self.link = self.link, None
        if link is not None:
            # When the parent dies, the mover must see that.
            link.after_fork()
        self.index = Index()

    def purge(self) -> None:
        """Have the namespace removed from the target; returns at once."""
        if self._namespace is not None:
            threading.Thread(target=self._purge, name="lifeboat-purge", daemon=True).start()

    def _purge(self) -> None:
        try:
            link = Link.connect(self._places, self._hello(), 1 << 12)
        except (OSError, LifeboatError) as error:
            _log.info("LifeboatCache: a namespace is left on %s: %s", self._tier.name, error)
            return
        try:
            link.send(Kind.PURGE)
        except OSError:
            pass
        finally:
            link.shut()
            link.close()
