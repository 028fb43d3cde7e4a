"""Lets what is on its way to storage arrive when a server ends.

A page is safe as soon as SGLang has been answered for it. What can be lost are pages that
wait in the controller's queue, and when pages were last used. A server that is told to
end (SIGTERM) tells its schedulers to let go of their host memory and leave, within 15
seconds, without closing its storage backend; that is where this waits a little. Processes
that end otherwise come by the interpreter's and multiprocessing's own exits. SGLang's
signal handlers are left alone.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import weakref
from multiprocessing import util
from typing import Any, Protocol

__all__ = ["Closes", "at_exit", "install"]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_exit"

#: How long the end of a server waits for pages in the queue, in seconds.
QUEUE_S = 5.0


class Closes(Protocol):
    """What is closed in the end."""

    def finish(self, timeout: float) -> None:
        """Let calls under way end and write down what is known, within some seconds."""


_backends: weakref.WeakSet[Any] = weakref.WeakSet()
_registered = False


def at_exit(backend: Closes) -> None:
    """Have ``backend`` finish when this process ends by itself."""
    global _registered
    _backends.add(backend)
    if _registered:
        return
    _registered = True
    atexit.register(_finish_all)
    # Processes of multiprocessing, as SGLang's schedulers are, run these instead.
    util.Finalize(None, _finish_all, exitpriority=100)


def _finish_all() -> None:
    for backend in list(_backends):
        _backends.discard(backend)
        backend.finish(QUEUE_S)


def install() -> None:
    """Wait for pages in the queue before the host pools go. Idempotent."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    original = UnifiedRadixCache.release_host_resources
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def release_host_resources(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _backends:
                _drain(getattr(self, "cache_controller", None), QUEUE_S)
                _finish_all()
        except Exception:
            _log.exception("LifeboatCache: pages that were waiting may not have been kept")
        return original(self, *args, **kwargs)

    setattr(release_host_resources, _MARK, True)
    UnifiedRadixCache.release_host_resources = release_host_resources


def _drain(controller: Any, timeout: float) -> None:
    """Let the backup thread finish what is queued, and end."""
    queue = getattr(controller, "backup_queue", None)
    thread: threading.Thread | None = getattr(controller, "backup_thread", None)
    stop: threading.Event | None = getattr(controller, "storage_stop_event", None)
    if queue is None or thread is None or stop is None:
        return
    deadline = time.monotonic() + timeout
    while not queue.empty() and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    queue.put(None)  # it looks at the event once a second
    thread.join(max(0.0, deadline - time.monotonic()))
