"""Notices when the weights of a running engine change.

Reinforcement learning and sleep mode replace weights in place. What the engine
computes from then on belongs to other weights than the checkpoint's, and vLLM
does not tell a secondary tier. All such changes pass through a few methods of
vLLM's ``EngineCore`` in the engine's process, which are watched here:

* ``collective_rpc``: the way to any method of the workers. Names known to leave
  weights alone are listed; every other name, and every function, counts.
* ``sleep`` at level 2, which drops the weights.
* ``set_weight_version``, by which a trainer announces new weights.
* ``reset_prefix_cache`` after such a change: KV of requests that ran meanwhile
  was computed with both, and vLLM drops it here.

Not seen is whoever holds the model object itself (an in-process engine's
``driver_worker``): call :func:`changed` then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lifeboat_cache.identity import qualified_name

__all__ = ["SAFE_CALLS", "WATCHED", "changed", "forget", "install", "on_change"]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_epoch"

#: Worker methods that leave the base model's weights as they are, from vLLM 0.32
#: and 0.33. Deliberately absent: ``apply_model`` and ``get_model`` (hand the model
#: to a caller's code), ``update_config``, ``load_model``, ``sleep``, ``wake_up``,
#: ``discard``, everything about weights but their checksums and connections, and
#: ``add_lora``, which by this way is not seen by `vllm_lora`.
SAFE_CALLS = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
    }
)

_listeners: list[Callable[[str], None]] = []
_has_changed = False


def on_change(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with the reason before weights (may) change.

    Runs on the engine's thread, before the call that changes them; it must not
    wait. Installs the hooks.
    """
    install()
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


def _watched(original: Callable[..., Any], reason: Callable[..., str | None]) -> Callable[..., Any]:
    """Wrap a method of the engine core; what goes wrong here never reaches it."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # Before the scheduler exists the engine is starting: that is how it loads.
            why = reason(*args, **kwargs) if hasattr(self, "scheduler") else None
            if why is not None:
                changed(why)
        except Exception:
            # It may have been one that changes weights.
            _log.exception("LifeboatCache: a call to the engine was not understood")
            changed("a call that was not understood")
        return original(self, *args, **kwargs)

    setattr(method, _MARK, True)
    return method


def _rpc_reason(method: Any, *_args: Any, **_kwargs: Any) -> str | None:
    if isinstance(method, str):
        return None if method in SAFE_CALLS else f"collective_rpc {method}"
    return f"collective_rpc {qualified_name(method)}"


def _sleep_reason(level: Any = 1, *_args: Any, **_kwargs: Any) -> str | None:
    return f"sleep level {level}" if int(level) >= 2 else None


def _version_reason(weight_version: Any, *_args: Any, **_kwargs: Any) -> str:
    return f"weight version {weight_version}"


def _reset_reason(*_args: Any, **_kwargs: Any) -> str | None:
    return "prefix cache reset after a change of weights" if _has_changed else None


_REASONS: dict[str, Callable[..., str | None]] = {
    "collective_rpc": _rpc_reason,
    "reset_prefix_cache": _reset_reason,
    "set_weight_version": _version_reason,
    "sleep": _sleep_reason,
}

#: The methods of ``EngineCore`` that are watched.
WATCHED = tuple(_REASONS)


def install() -> None:
    """Watch the engine core of this process. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    for name, reason in _REASONS.items():
        original = getattr(EngineCore, name, None)
        if original is not None and not hasattr(original, _MARK):
            setattr(EngineCore, name, _watched(original, reason))
