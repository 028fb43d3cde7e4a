"""From an engine's configuration to the namespace of its KV."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import process_start_time
from lifeboat_cache.integrations.vllm_handover import engine_config
from lifeboat_cache.integrations.vllm_identity import identify_engine, unverified_identity
from lifeboat_cache.interface import Namespace

__all__ = ["find_namespace"]


def find_namespace(
    offloading: Any, salt: str, row_bytes: int, should_stop: Callable[[], bool]
) -> Namespace:
    """Name the namespace of the engine that ``offloading`` belongs to.

    Reads samples of the model's weights: call it on a background thread.

    Parameters
    ----------
    offloading
        vLLM's ``OffloadingConfig``.
    salt
        ``security.namespace_salt``.
    row_bytes
        Bytes of a chunk in the CPU tier.
    should_stop
        Asked now and then; true ends the work with :class:`IdentityError`.

    Raises
    ------
    IdentityError
        If KV of this engine must not be shared; the message says why.
    """
    version = _engine_version()
    handed = engine_config(offloading.engine_id)
    if handed is None:
        if _inside_engine():
            raise IdentityError(
                "the vLLM plugin did not see this engine's configuration, so the model cannot be "
                "identified: allow the plugin `lifeboat_cache` in VLLM_PLUGINS"
            )
        identity = {
            **unverified_identity(offloading, salt, version),
            "row_bytes": row_bytes,
        }
        return Namespace.from_identity(identity, {"model": "unverified-model"})
    identity, display = identify_engine(
        handed.vllm_config,
        handed.kv_cache_config,
        offloading,
        salt=salt,
        engine_version=version,
        row_bytes=row_bytes,
        should_stop=should_stop,
        not_after=process_start_time(),
    )
    return Namespace.from_identity(identity, display)


def _inside_engine() -> bool:
    """Whether vLLM has loaded its plugins here, as every engine process does."""
    plugins = sys.modules.get("vllm.plugins")
    return bool(getattr(plugins, "plugins_loaded", False))


def _engine_version() -> str:
    import vllm

    return str(vllm.__version__)
