"""One target of a ladder: opened, watched, given up and taken back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from lifeboat_cache.codecs.ladder import Rung
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.counters import CounterSnapshot
from lifeboat_cache.store.prober import Prober
from lifeboat_cache.store.protocol import State, Store, TargetStatus
from lifeboat_cache.store.speedometer import Speedometer

__all__ = ["PATIENCE_S", "Member", "MemberSpec"]

_log = logging.getLogger("lifeboat_cache")

#: A target that has not answered for so many seconds is not reckoned with.
PATIENCE_S = 10.0

#: A target that cannot be used is probed again after so many seconds, then ever more rarely.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 2.0, 60.0

#: Whether a target is still what it was is seen after so many seconds …
_LOOK_S = 5.0
#: … or after so many, if something failed there.
_SUSPICION_S = 1.0

#: Deletions that a target has missed are remembered up to so many.
_MOST_OWED = 1 << 18

#: An old store has so many seconds to finish what it was given.
_CLOSE_S = 30.0


@dataclass(frozen=True)
class MemberSpec:
    """A target, and how its store is opened.

    Attributes
    ----------
    name, type, rung, location
        What it is, and where.
    open
        Opens its store. Must not wait for storage.
    probe
        Writes, reads back and deletes; raises if that does not work. What it returns is
        another value when something else is there than before. ``None`` if the store
        sees itself to being usable again.
    look
        As ``probe``, without writing.
    identity
        Two specs with the same identity are the same target with the same settings.
    fallback
        Whether it is used for new blocks only if no other target is usable.
    wanted
        Whether there may be blocks of a namespace in a fallback already. May read a directory.
    """

    name: str
    type: str
    rung: Rung
    location: str
    open: Callable[[Namespace], Store]
    probe: Callable[[], Hashable] | None = None
    look: Callable[[], Hashable] | None = None
    identity: Hashable = None
    fallback: bool = False
    wanted: Callable[[Namespace], bool] = lambda _: False


class Member:
    """The store of one target, as long as the target is usable.

    :meth:`look` is called every few moments, on one thread; everything else by anybody.

    Attributes
    ----------
    spec
        What it was made of.
    store
        Its store; ``None`` while the target is not used.
    speed
        How fast loads from it are.
    """

    def __init__(self, spec: MemberSpec) -> None:
        self.spec = spec
        self.store: Store | None = None
        self.speed = Speedometer()
        self._opened = 0.0
        self._reason = ""
        self._prober = Prober(f"lifeboat-probe {spec.name}")
        self._pause = _LEAST_PAUSE_S
        self._probe_at = 0.0
        self._looked = 0.0
        self._seen: Hashable = None
        self._failures = 0
        self._late = False
        self._left = 0  # how many times it was given up
        self._past = CounterSnapshot()
        self._owing = threading.Lock()
        self._owed: set[bytes] = set()
        self._in_debt = False
        self._leaving: list[threading.Thread] = []
        self._last: Store | None = None

    # What it is now ---------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether blocks can be stored and loaded now."""
        return self.answering() is not None

    @property
    def ready(self) -> bool:
        """Whether it knows everything that is on its target."""
        store = self.store
        return store is not None and store.state is State.READY

    @property
    def tried(self) -> bool:
        """Whether its target has been opened, or has turned out not to be usable."""
        return self.store is not None or bool(self._reason)

    @property
    def coming(self) -> bool:
        """Whether it may soon be usable: not tried yet, or being opened."""
        return not self.tried or (self.undecided and not self.usable)

    @property
    def blind(self) -> bool:
        """Whether there may be blocks on its target that nothing is known of now."""
        store = self.store
        return store is None or not store.usable or store.state is not State.READY

    def answering(self) -> Store | None:
        """Its store, if blocks can be stored and loaded now."""
        store = self.store
        return store if store is not None and not self._in_debt and store.usable else None

    @property
    def undecided(self) -> bool:
        """Whether it may soon know more than now."""
        store = self.store
        if store is None or self._late:
            return False
        return store.state in (State.OPENING, State.RECOVERING)

    @property
    def reason(self) -> str:
        """Why it is not usable; empty if it is."""
        store = self.store
        if store is None:
            return self._reason
        if store.usable:
            return "what was deleted in the meantime is being deleted" if self._in_debt else ""
        why = _reason_of(store)
        if self._late and not why:
            return f"{self.spec.location} has not answered for {PATIENCE_S:g} s: check its mount"
        return why or "it is being opened"

    def counters(self) -> CounterSnapshot:
        """Totals over all of its stores."""
        store = self.store
        return self._past if store is None else self._past + store.counters()

    def status(self, *, writing: bool) -> TargetStatus:
        """What is published of it."""
        store, spec = self.store, self.spec
        found = store.targets() if store is not None else []
        more = {"left": self._left, "owed_deletions": len(self._owed)}
        if not found:
            return TargetStatus(
                name=spec.name,
                type=spec.type,
                rung=spec.rung,
                location=spec.location,
                state=State.DISABLED if self._reason else State.CLOSED,
                reason=self._reason,
                writing=False,
                counters=self._past,
                facts=more,
            )
        one = found[0]
        state = one.state
        if self._late and not self.usable:
            state = State.DISABLED
        elif self._in_debt and state is State.READY:  # it answers for nothing yet
            state = State.RECOVERING
        return replace(
            one,
            rung=spec.rung,
            state=state,
            reason=self.reason,
            writing=writing,
            counters=self._past + one.counters,
            facts={**one.facts, **more},
        )

    # Opening and giving up --------------------------------------------------

    def start(self, namespace: Namespace, layouts: Callable[[], Sequence[KVLayout]]) -> None:
        """Open its store. Does not wait."""
        self._opened = time.monotonic()
        self._looked = self._opened
        self._late = False
        self._seen, self._failures = None, 0
        try:
            store = self.spec.open(namespace)
        except Exception as exc:  # no threads are left, say
            self._given_up(f"its store cannot be opened: {exc}")
            return
        for layout in layouts():
            store.describe(layout)
        self._reason = ""
        self.store = self._last = store
        # What was described while nobody could see the store yet.
        for layout in layouts():
            store.describe(layout)

    def leave(self, reason: str) -> None:
        """Use the target no more until it has been probed."""
        self._given_up(reason)
        store, self.store = self.store, None
        if store is not None:
            self._past = self._past + store.counters()
            self._left += 1
            self.owe(store.undone_deletions())
            self._close_aside(store)

    def _given_up(self, reason: str) -> None:
        _log.warning("LifeboatCache: target %s is skipped: %s", self.spec.name, reason)
        self._reason = reason
        self._pause = _LEAST_PAUSE_S
        self._probe_at = time.monotonic() + self._pause

    def _close_aside(self, store: Store) -> None:
        """Close a store on a thread of its own: it may have to wait."""
        thread = threading.Thread(
            target=store.close, args=(_CLOSE_S,), name="lifeboat-leave", daemon=True
        )
        self._leaving = [*(one for one in self._leaving if one.is_alive()), thread]
        try:
            thread.start()
        except RuntimeError:  # no threads are left: it goes on being open
            self._leaving.remove(thread)

    def close(self, timeout: float) -> bool:
        """Close its store; whether nothing is under way any more."""
        store = self.store
        quiet = store is None or store.close(timeout)
        for thread in self._leaving:
            thread.join(timeout)
            quiet = quiet and not thread.is_alive()
        return quiet

    def purge(self) -> None:
        """Remove the namespace from the target, once the store is closed."""
        if self._last is not None:
            self._last.purge()

    # Deletions --------------------------------------------------------------

    def owe(self, keys: Sequence[bytes], *, hide: bool = False) -> None:
        """Remember that blocks are to be deleted which nothing is known of now.

        What is not even being read yet answers for nothing before that is done, nor does
        anything else with ``hide``.
        """
        store = self.store
        with self._owing:
            if keys and len(self._owed) + len(keys) <= _MOST_OWED:
                self._owed.update(keys)
                self._in_debt |= hide or store is None or not store.usable

    def wanted(self, keys: Sequence[bytes]) -> None:
        """Blocks have been stored again: they are not to be deleted any more."""
        if self._owed:
            with self._owing:
                self._owed.difference_update(keys)

    def undone_deletions(self) -> list[bytes]:
        """Keys that were deleted, and may still be on its target."""
        store = self.store
        with self._owing:
            owed = list(self._owed)
        return [*owed, *(() if store is None else store.undone_deletions())]

    def _pay(self, store: Store) -> None:
        if (self._owed or self._in_debt) and store.state is State.READY:
            with self._owing:
                owed, self._owed = self._owed, set()
            store.delete(list(owed))
            with self._owing:
                self._in_debt = bool(self._owed)

    # Watching ---------------------------------------------------------------

    def look(
        self, namespace: Namespace, layouts: Callable[[], Sequence[KVLayout]], *, wanted: bool
    ) -> None:
        """See how the target is, and do what follows from it.

        Parameters
        ----------
        namespace, layouts
            What its store serves; gives the layouts that have been described by now.
        wanted
            Whether it is to be used: a fallback is not, as long as others are.
        """
        store = self.store
        if store is None:
            if not self._reason:
                if wanted:
                    self.start(namespace, layouts)
            else:
                self._look_away(namespace, layouts)
            return
        if store.state is State.DISABLED and self.spec.probe is not None:
            self.leave(_reason_of(store) or "its store stands down")
            return
        if store.usable:
            self._late = False
            self._pay(store)
        elif time.monotonic() - self._opened > PATIENCE_S and not self._late:
            self._late = True
            _log.warning("LifeboatCache: target %s is skipped: %s", self.spec.name, self.reason)
        if self.spec.look is not None and store.usable:
            self._look_here(store)

    def _look_away(self, namespace: Namespace, layouts: Callable[[], Sequence[KVLayout]]) -> None:
        """The target is not used: probe it from time to time."""
        probe = self.spec.probe
        if self._prober.busy:
            if self._prober.waiting_s > PATIENCE_S:
                self._reason = (
                    f"{self.spec.location} has not answered for "
                    f"{int(self._prober.waiting_s)} s: check its mount"
                )
            return
        answer = self._prober.take()
        if answer is not None and answer[1] is None:
            _log.warning("LifeboatCache: target %s is used again", self.spec.name)
            self.start(namespace, layouts)
            self._seen = answer[0]
            return
        if answer is not None:
            self._reason = str(answer[1])
            self._pause = min(2 * self._pause, _MOST_PAUSE_S)
            self._probe_at = time.monotonic() + self._pause
        elif time.monotonic() >= self._probe_at:
            if probe is None:
                self.start(namespace, layouts)
            else:
                self._prober.ask(probe)

    def _look_here(self, store: Store) -> None:
        """The target is used: see whether it still is what it was, and takes writes."""
        answer = self._prober.take()
        if answer is not None:
            seen, error = answer
            if error is not None:
                self.leave(str(error))
                return
            if self._seen is not None and seen != self._seen:
                self.leave(f"{self.spec.location} is not the directory any more that it was")
                self._probe_at = 0.0
                return
            self._seen = seen
        now = time.monotonic()
        counters = store.counters()
        failures = sum(
            outcomes.get("failed", 0)
            for outcomes in (counters.store_outcomes, counters.load_outcomes)
        )
        if self._prober.busy:
            if self._prober.waiting_s > PATIENCE_S:
                self.leave(f"{self.spec.location} has not answered for {PATIENCE_S:g} s")
        elif failures != self._failures and now - self._looked >= _SUSPICION_S:
            self._failures = failures
            self._looked = now
            self._prober.ask(self.spec.probe or self.spec.look or (lambda: None))
        elif now - self._looked >= _LOOK_S or self._seen is None:
            self._looked = now
            self._prober.ask(self.spec.look or (lambda: None))


def _reason_of(store: Store) -> str:
    """Why a store is not usable, without what it says for people who have no other."""
    found = store.targets()
    if not found:
        return store.reason
    return (found[0].reason or store.reason).removeprefix(f"{found[0].name}: ")
