"""Zero copy for a launch that names our backend, without a further word.

SGLang hands pages to a dynamic backend through copies, unless its extra configuration
says ``"interface_v1": 1``. Ours can do without; ``LIFEBOAT_SGLANG_ZERO_COPY=0`` keeps the
copies. What a configuration says itself counts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lifeboat_cache.integrations.sglang_settings import SettingsError, read_settings

__all__ = ["BACKEND_CLASS", "BACKEND_MODULE", "backend_config", "install"]

BACKEND_MODULE = "lifeboat_cache.integrations.sglang_backend"
BACKEND_CLASS = "LifeboatHiCacheStorage"

_KEY = "interface_v1"
_MARK = "_lifeboat_zero_copy"
_log = logging.getLogger("lifeboat_cache")


def backend_config(*, zero_copy: bool) -> dict[str, Any]:
    """Return what ``--hicache-storage-backend-extra-config`` says of our backend."""
    return {
        "backend_name": "lifeboat",
        "module_path": BACKEND_MODULE,
        "class_name": BACKEND_CLASS,
        _KEY: int(zero_copy),
    }


def install() -> None:
    """Complete the configurations that SGLang reads in this process. Idempotent."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    original: Callable[..., Any] = HybridCacheController.parse_storage_backend_extra_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def parse(*args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        config = parsed[0]
        if (
            isinstance(config, dict)
            and config.get("module_path") == BACKEND_MODULE
            and config.get("class_name") == BACKEND_CLASS
            and _KEY not in config
        ):
            config[_KEY] = int(_zero_copy())
        return parsed

    setattr(parse, _MARK, True)
    HybridCacheController.parse_storage_backend_extra_config = staticmethod(parse)


def _zero_copy() -> bool:
    try:
        return read_settings().zero_copy
    except SettingsError as error:
        _log.warning("LifeboatCache: pages move without a copy: %s", error)
        return True
