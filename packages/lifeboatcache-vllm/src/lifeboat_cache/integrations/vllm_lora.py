"""LoRA adapters: which content a request's KV was computed with.

vLLM's block hashes hold an adapter's name and path, not what is in it, and the
tier is not told of the adapter at all. So the adapter is attached to each
request's context when vLLM makes it, and an adapter's content is fingerprinted
in the background; the fingerprint becomes the key space of the request.

That is right only while the files are what the engine loaded. An adapter counts
as *unknown*, and its requests are misses and are not stored, when its files
change after it was first seen (until the process ends: vLLM's own caches may
still hold either), or when it is reloaded in place.

Nothing here waits: files are read on a thread of its own, and a question that
cannot be answered yet is *pending*, for a limited time.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import (
    AdapterIdentity,
    FileStamp,
    adapter_files,
    adapter_identity,
    resolve_model_dir,
    stamps_of,
)
from lifeboat_cache.integrations import vllm_identity_fields as rules
from lifeboat_cache.integrations.vllm_identity_fields import select_fields

__all__ = [
    "AdapterRef",
    "AdapterWatch",
    "EngineAdapters",
    "expire",
    "hook_problem",
    "install",
    "lora_of",
    "settings_digest",
    "watch",
]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_lora"
_SPACE_CONTEXT = "lifeboatcache 2026 vllm adapter key space v1"

#: How long a question may stay pending, in seconds.
WAIT_S = 5.0


@dataclass(frozen=True)
class AdapterRef:
    """An adapter as a request names it.

    Attributes
    ----------
    name, path
        As in vLLM's ``LoRARequest``; both are in the block hashes.
    three_dimensional
        ``is_3d_lora_weight``: how its expert weights are read.
    reloads
        ``load_inplace``: read again from disk whenever a request uses it.
    """

    name: str
    path: str
    three_dimensional: bool = False
    reloads: bool = False

    @classmethod
    def of(cls, lora_request: Any) -> AdapterRef:
        """Take what matters of vLLM's ``LoRARequest``."""
        return cls(
            name=str(lora_request.lora_name),
            path=str(lora_request.lora_path),
            three_dimensional=bool(getattr(lora_request, "is_3d_lora_weight", False)),
            reloads=bool(getattr(lora_request, "load_inplace", False)),
        )


@dataclass
class _OfRequest:
    """What is attached to a request's context; its type is the key there."""

    adapter: AdapterRef | None
    known: bool
    since: float


@dataclass
class _Adapter:
    """What is known of one adapter, by name and path. Guarded by the watch's lock."""

    ref: AdapterRef
    first_seen: float
    digest: bytes | None = None
    directory: Path | None = None
    files: tuple[Path, ...] = ()
    stamps: tuple[FileStamp, ...] = ()
    checked_from: float = -1.0
    unknown: str | None = None
    queued: bool = False
    waiting: deque[tuple[float, Callable[[bool], None]]] = field(default_factory=deque)


class AdapterWatch:
    """Fingerprints adapters in the background and notices when their files change.

    Parameters
    ----------
    wait_s
        How long a question may stay pending.
    identify
        What fingerprints an adapter's directory.
    """

    def __init__(
        self,
        wait_s: float = WAIT_S,
        identify: Callable[..., AdapterIdentity] = adapter_identity,
    ) -> None:
        self._wait_s = wait_s
        self._identify = identify
        self._adapters: dict[tuple[str, str], _Adapter] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Adapter] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # Called by the engine's thread -------------------------------------------

    def seen(self, ref: AdapterRef) -> None:
        """An adapter is about to be loaded or used: look at its files from now on."""
        with self._lock:
            adapter = self._adapters.get((ref.name, ref.path))
            if adapter is None:
                adapter = _Adapter(ref, time.time())
                self._adapters[ref.name, ref.path] = adapter
            if ref.reloads:
                self._taint(adapter, "it is reloaded in place; load it from a new path")
            elif ref.three_dimensional != adapter.ref.three_dimensional:
                self._taint(adapter, "it is read in two ways; load it under another name")
            self._check(adapter)

    def attach(self, context: Any, lora_request: Any) -> None:
        """Attach a request's adapter to its context."""
        now = time.monotonic()
        ref = None if lora_request is None else AdapterRef.of(lora_request)
        context.set_state(_OfRequest(ref, True, now))
        if ref is not None:
            self.seen(ref)

    def key_space(self, context: Any) -> bytes | None:
        """See :meth:`EngineAdapters.key_space`; the digest of the adapter alone."""
        state = context.get_state(_OfRequest)
        if state is None or not state.known:
            return None
        if state.adapter is None:
            return b""
        with self._lock:
            adapter = self._adapters.get((state.adapter.name, state.adapter.path))
            if adapter is None or adapter.unknown or adapter.checked_from < state.since:
                return None
            # The same files mean other weights when their expert weights are read otherwise.
            digest, stacked = adapter.digest, state.adapter.three_dimensional
        return digest + b"3d" if digest is not None and stacked else digest

    def pending(self, context: Any) -> bool:
        """See :meth:`EngineAdapters.pending`."""
        state = context.get_state(_OfRequest)
        if state is None or not state.known or state.adapter is None:
            return False
        if time.monotonic() - state.since >= self._wait_s:
            return False
        with self._lock:
            adapter = self._adapters.get((state.adapter.name, state.adapter.path))
            return (
                adapter is not None
                and not adapter.unknown
                and (adapter.digest is None or adapter.checked_from < state.since)
            )

    def confirm(self, context: Any, then: Callable[[bool], None]) -> None:
        """See :meth:`EngineAdapters.confirm`."""
        state = context.get_state(_OfRequest)
        if state is None or not state.known:
            then(False)
            return
        if state.adapter is None:
            then(True)
            return
        with self._lock:
            adapter = self._adapters.get((state.adapter.name, state.adapter.path))
            if adapter is not None and not adapter.unknown:
                adapter.waiting.append((time.monotonic(), then))
                self._check(adapter)
                return
        then(False)

    def expire(self) -> None:
        """See :func:`expire`."""
        limit = time.monotonic() - self._wait_s
        late = []
        with self._lock:
            for adapter in self._adapters.values():
                while adapter.waiting and adapter.waiting[0][0] < limit:
                    late.append(adapter.waiting.popleft()[1])
        for then in late:
            then(False)

    # Called under the lock ----------------------------------------------------

    def _taint(self, adapter: _Adapter, why: str) -> None:
        if adapter.unknown is None:
            adapter.unknown = why
            _log.warning(
                "LifeboatCache: KV of adapter %r at %s is not kept: %s",
                adapter.ref.name,
                adapter.ref.path,
                why,
            )

    def _check(self, adapter: _Adapter) -> None:
        """Have the thread look at an adapter, unless it is about to anyway."""
        if self._thread is None:
            # A daemon, since it may hang with a mount.
            thread = threading.Thread(target=self._run, name="lifeboat-adapters", daemon=True)
            thread.start()  # may fail; the next question then tries again
            self._thread = thread
        if not adapter.queued:
            adapter.queued = True
            self._queue.put(adapter)

    # On the thread ------------------------------------------------------------

    def _run(self) -> None:
        while True:
            adapter = self._queue.get()
            with self._lock:
                # A check answers what was asked before it began.
                adapter.queued = False
                waiting = list(adapter.waiting)
                adapter.waiting.clear()
                tainted = adapter.unknown is not None
            good = False
            if not tainted:
                good = self._look(adapter)
            for _, then in waiting:
                try:
                    then(good)
                except Exception:
                    _log.exception("LifeboatCache: an adapter's confirmation failed")

    def _look(self, adapter: _Adapter) -> bool:
        began = time.monotonic()
        try:
            directory = _directory(adapter.ref.path)
            if adapter.digest is None:
                config, weights, _ = adapter_files(directory)
                found = self._identify(directory, not_after=adapter.first_seen)
                adapter.directory = directory
                adapter.files, adapter.stamps = (config, weights), found.stamps
                digest = bytes.fromhex(found.digest)
            else:
                # Another directory: a Hub branch that has moved.
                if directory != adapter.directory or stamps_of(adapter.files) != adapter.stamps:
                    raise IdentityError("its files changed; load it from a new path")
                digest = adapter.digest
        except Exception as exc:
            with self._lock:
                self._taint(adapter, str(exc))
            return False
        with self._lock:
            adapter.digest = digest
            adapter.checked_from = began
            return adapter.unknown is None


def _directory(path: str) -> Path:
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true") and not os.path.exists(
        os.path.expanduser(path)
    ):
        raise IdentityError("it is on ModelScope; load it from a local directory")
    return resolve_model_dir(path)


_watch = AdapterWatch()
_hook_problem: str | None = "they are not watched in this process"


def watch() -> AdapterWatch:
    """The watch that vLLM's hooks report to."""
    return _watch


def hook_problem() -> str | None:
    """Why adapters cannot be followed in this process; ``None`` if they are."""
    return _hook_problem


def settings_digest(lora_config: Any) -> bytes:
    """Digest of how an engine applies adapters.

    Raises
    ------
    IdentityError
        If a setting has no spelling of its own.
    """
    kept = select_fields(lora_config, rules.LORA, "lora_config")
    return blake3(json.dumps(kept, sort_keys=True).encode()).digest()


def install() -> None:
    """Watch the adapters of this process's requests. Idempotent; call it in the engine core."""
    global _hook_problem
    try:
        _hook_contexts()
        _hook_loading()
    except Exception as exc:
        # The engine goes on; `EngineAdapters.problem` then keeps its KV out of the cache.
        _hook_problem = str(exc)
        _log.warning(
            "LifeboatCache: adapters of this vLLM cannot be followed (%s); an engine that serves "
            "adapters will not use the cache",
            exc,
        )
        return
    _hook_problem = None


def _hook_contexts() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    original = scheduler._create_req_context
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_req_context(req: Any, *args: Any, **kwargs: Any) -> Any:
        context = original(req, *args, **kwargs)
        try:
            _watch.attach(context, req.lora_request)
        except Exception:
            # Without the mark the request's adapter is unknown: a miss.
            _log.exception("LifeboatCache: a request's adapter could not be found out")
        return context

    setattr(create_req_context, _MARK, True)
    scheduler._create_req_context = create_req_context


def _hook_loading() -> None:
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.add_lora
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # Before it is loaded: a file that changes later is then noticed.
            _watch.seen(AdapterRef.of(lora_request))
        except Exception:
            _log.exception("LifeboatCache: a loaded adapter could not be noted")
        return original(self, lora_request, *args, **kwargs)

    setattr(add_lora, _MARK, True)
    EngineCore.add_lora = add_lora


class EngineAdapters:
    """How one engine of this process applies adapters. Each tier has one of its own.

    Parameters
    ----------
    lora_config
        vLLM's ``LoRAConfig``; ``None`` if the engine serves no adapters.

    Attributes
    ----------
    problem
        Why this engine's adapters cannot be told apart, ending in the remedy;
        ``None`` if they can, or if it serves none.
    """

    def __init__(self, lora_config: Any = None) -> None:
        self._serving = lora_config is not None
        self._settings = b""
        self.problem: str | None = None
        if not self._serving:
            return
        problem = _hook_problem
        try:
            self._settings = settings_digest(lora_config)
        except Exception as exc:
            problem = str(exc)
        if problem is not None:
            reason = (
                f"requests with LoRA adapters cannot be told apart with this vLLM ({problem}): "
                "serve adapters with a tested version, or without LifeboatCache"
            )
            self.problem = reason

    def key_space(self, context: Any) -> bytes | None:
        """The key space of a request's KV.

        Returns
        -------
        bytes or None
            Empty without an adapter; 32 bytes for an adapter whose content is
            known; ``None`` if it is not (yet): the request's lookups are misses
            and its KV is not stored.
        """
        if not self._serving:
            return b""  # none of this engine's requests has one
        if self.problem is not None:
            return None
        found = _watch.key_space(context)
        if not found:
            return found
        return blake3(found + self._settings, derive_key_context=_SPACE_CONTEXT).digest()

    def pending(self, context: Any) -> bool:
        """Whether :meth:`key_space` may soon know more: worth a retry instead of a miss.

        Becomes false after :data:`WAIT_S` at the latest.
        """
        return self._serving and self.problem is None and _watch.pending(context)

    def confirm(self, context: Any, then: Callable[[bool], None]) -> None:
        """Check a request's adapter once more, before KV computed with it is kept.

        The engine may have read the adapter again while the request was served.
        If its files are still the same after the KV was computed, what it read was
        them.

        Parameters
        ----------
        context
            The request's context.
        then
            Called once with whether it is so: at once without an adapter, else on
            another thread, or by :func:`expire`.
        """
        if not self._serving:
            then(True)
        elif self.problem is not None:
            then(False)
        else:
            _watch.confirm(context, then)


def lora_of(context: Any) -> str | None:
    """Path of a request's adapter; ``None`` if it has none, or is not known."""
    state = context.get_state(_OfRequest)
    return None if state is None or state.adapter is None else str(state.adapter.path)


def expire() -> None:
    """Answer confirmations that wait too long with no. Call it now and then."""
    _watch.expire()
