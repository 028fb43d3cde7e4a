"""Where the blocks of a store lie: its target, opened for reading and, once needed, writing."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from lifeboat_cache.checksum import Binding
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.format.journal import Entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.notices import Notices
from lifeboat_cache.store.protocol import State
from lifeboat_cache.targets.base import Target, TargetReader, TargetWriter

__all__ = ["Storage"]

_log = logging.getLogger("lifeboat_cache")

#: After a writer could not be started, stores fail for so many seconds.
_WRITER_RETRY_S = 5.0


class Storage:
    """What a store knows of its target, and has open there.

    Parameters
    ----------
    notices
        Says why nothing can be written.

    Attributes
    ----------
    lock, idle
        Guard this, and the jobs, pins and deletions of the store; ``idle`` is notified when one
        of its jobs or deletions is done.
    state, reason
        Where the store is in its life, and why.
    skipped
        Why targets are not used, by their names.
    namespace, binding, target, reader
        Whose blocks, what their checksums are bound to, where they are, and who reads them;
        ``None`` until :meth:`opened`.
    writer
        Who writes them; ``None`` until the first is stored.
    """

    def __init__(self, notices: Notices) -> None:
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.state = State.OPENING
        self.reason = ""
        self.skipped: dict[str, str] = {}
        self.namespace: Namespace | None = None
        self.binding: Binding | None = None
        self.target: Target | None = None
        self.reader: TargetReader | None = None
        self.writer: TargetWriter | None = None
        self._notices = notices
        self._writer_lock = threading.Lock()
        self._writer_retry = 0.0

    @property
    def location(self) -> str:
        """Where it is, for people."""
        return self.target.location if self.target else "?"

    def why_skipped(self) -> str:
        """Which targets are not used, and why."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())

    def opened(self, namespace: Namespace, target: Target, reader: TargetReader) -> None:
        """Blocks can be read from now on. Under the lock."""
        self.reason = self.why_skipped()
        self.namespace, self.target, self.reader = namespace, target, reader
        self.binding = Binding(namespace.digest)
        if self.state is State.OPENING:
            self.state = State.RECOVERING

    # Writing ----------------------------------------------------------------

    def start_writer(self) -> TargetWriter | None:
        """The writer, started at the first store: who only reads leaves no files."""
        with self._writer_lock:
            if self.writer is not None:
                if not self.writer.lost:
                    return self.writer
                self.writer.close()
                self.writer = None
            target, namespace = self.target, self.namespace
            if target is None or namespace is None or time.monotonic() < self._writer_retry:
                return None
            try:
                self.writer = target.writer(namespace)
            except (OSError, LifeboatError) as exc:
                self._writer_retry = time.monotonic() + _WRITER_RETRY_S
                # Not by its text, which may name another file each time.
                if self._notices.news(f"writer {type(exc).__name__} {getattr(exc, 'errno', None)}"):
                    _log.warning("LifeboatCache: cannot write to %s: %s", target.location, exc)
            return self.writer

    def bury(self, entries: Entries) -> bool:
        """Declare records dead for every process, now and after a restart; whether it was done.

        ``entries`` are their tombstones.
        """
        writer = self.start_writer()
        return writer is not None and writer.bury(entries)

    def beat(self) -> None:
        """Show other hosts that the writer lives."""
        writer = self.writer
        if writer is not None:
            writer.beat()

    # End --------------------------------------------------------------------

    def close(self) -> None:
        """Let go of all files."""
        for part in (self.writer, self.reader):
            if part is not None:
                part.close()

    def purge(self) -> None:
        """Remove the namespace from the target. Faults are swallowed."""
        if self.target is not None and self.namespace is not None:
            with contextlib.suppress(OSError, LifeboatError):
                self.target.purge(self.namespace.hex)

    def after_fork(self) -> None:
        """In a forked child: what is open is the parent's, and so are the locks."""
        self.state = State.CLOSED
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
