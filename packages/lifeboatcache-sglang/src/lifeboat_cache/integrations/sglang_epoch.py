"""Notices when the weights of a running server change.

Reinforcement learning replaces weights in place (``update_weights_*``), and released
memory comes back empty. What is computed from then on belongs to other weights than the
checkpoint's; SGLang's own flush does not reach storage. All such changes pass through
``SchedulerWeightUpdaterManager`` in the scheduler's process, whose methods are watched
here, and below it through the model runner's ``WeightUpdater``.

A change is told twice: before, so that nothing more is served, and after, since pages
that were computed before may still have been on their way to storage meanwhile. For the
same reason a flush of SGLang's cache counts once weights have changed: where an update
leaves ``flush_cache`` out, SGLang itself serves what the old weights computed until then.

SGLang binds some of these methods when its scheduler starts, before a backend that is
attached later is there; those below are looked up at each call. What happened before a
backend was attached counts, too: the plugin has the methods watched from the start.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from lifeboat_cache.engines.import_hook import when_imported

__all__ = ["WATCHED", "changed", "forget", "has_changed", "install", "on_change", "watch"]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_epoch"

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"

_listeners: list[Callable[[str], None]] = []
_has_changed = False


def on_change(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with the reason whenever weights have changed or are about to.

    It runs on the scheduler's thread and must not wait. Installs the hooks.
    """
    install()
    if listener not in _listeners:
        _listeners.append(listener)


def forget(listener: Callable[[str], None]) -> None:
    """Stop calling a listener."""
    if listener in _listeners:
        _listeners.remove(listener)


def changed(reason: str) -> None:
    """Say that weights change, by whatever way."""
    global _has_changed
    _has_changed = True
    for listener in tuple(_listeners):  # one may leave meanwhile
        try:
            listener(reason)
        except Exception:
            _log.exception("LifeboatCache: a change of weights (%s) was not followed", reason)


def has_changed() -> bool:
    """Whether weights have changed since this process is watched."""
    return _has_changed


_Reason = Callable[..., "str | None"]


def _watched(original: Callable[..., Any], reason: _Reason) -> Callable[..., Any]:
    """Wrap a method; what goes wrong here never reaches it."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            why = reason(*args, **kwargs)
        except Exception:
            # It may be one that changes weights.
            _log.exception("LifeboatCache: a call to the engine was not understood")
            why = "a call that was not understood"
        if why is not None:
            changed(why)
        try:
            return original(self, *args, **kwargs)
        finally:
            if why is not None:
                changed(why)

    setattr(method, _MARK, True)
    return method


def _always(name: str) -> _Reason:
    return lambda *_args, **_kwargs: name


def _released(recv_req: Any, *_args: Any, **_kwargs: Any) -> str | None:
    """Memory that is released comes back with what it held only if that was saved."""
    from sglang.srt.runtime_context import get_context

    tags = getattr(recv_req, "tags", None)
    if tags and "weights" not in tags:
        return None
    saved = bool(get_context().config_leaf("enable_weights_cpu_backup"))
    return None if saved else "release_memory_occupation"


def _flushed(*_args: Any, **_kwargs: Any) -> str | None:
    return "a flush after a change of weights" if _has_changed else None


#: Module, class and methods that are watched, with what decides whether a call counts.
_METHODS: tuple[tuple[str, str, dict[str, _Reason]], ...] = (
    (
        _UPDATER,
        "SchedulerWeightUpdaterManager",
        {
            **{
                name: _always(name)
                for name in (
                    "update_weights_from_disk",
                    "update_weights_from_distributed",
                    "update_weights_from_tensor",
                    "update_weights_from_ipc",
                    "begin_weight_update",
                    "end_weight_update",
                )
            },
            "release_memory_occupation": _released,
        },
    ),
    (
        _RUNNER,
        "WeightUpdater",
        {
            name: _always(name)
            for name in (
                "update_weights_from_disk",
                "update_weights_from_tensor",
                "update_weights_from_ipc",
                "load_weights_from_distributed",
                "begin_weight_update",
                "end_weight_update",
            )
        },
    ),
    (_CONTROLLER, "HybridCacheController", {"reset": _flushed}),
)

#: What is watched, as ``module``, ``class.method``.
WATCHED = tuple(
    (module, f"{owner}.{name}") for module, owner, methods in _METHODS for name in methods
)


def install() -> None:
    """Watch this process. Idempotent; classes that are not there are left alone."""
    for module, owner, methods in _METHODS:
        _install_in(importlib.import_module(module), owner, methods)


def watch() -> None:
    """Watch this process from when SGLang imports what changes weights; imports nothing."""
    for module, owner, methods in _METHODS:
        when_imported(module, functools.partial(_install_imported, module, owner, methods))


def _install_imported(module: str, owner: str, methods: dict[str, _Reason]) -> None:
    """Runs inside an import of SGLang's, which must not fail."""
    try:
        _install_in(sys.modules[module], owner, methods)
    except Exception as error:  # a backend that needs it finds out, and says so
        _log.debug("LifeboatCache: %s is not watched: %s", module, error)


def _install_in(module: Any, owner: str, methods: dict[str, _Reason]) -> None:
    found = getattr(module, owner, None)
    for name, reason in methods.items():
        original = getattr(found, name, None)
        if found is not None and original is not None and not hasattr(original, _MARK):
            setattr(found, name, _watched(original, reason))
