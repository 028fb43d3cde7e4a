"""The prefix-cache backend ``--radix-cache-backend lifeboat`` for SGLang's MLX backend.

Light: what needs MLX or SGLang is imported when SGLang builds its cache. A launch never
fails because of it: where it cannot work, SGLang gets the cache it has without us.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from lifeboat_cache.errors import LifeboatError

__all__ = ["BACKEND", "build_cache", "register", "uses_mlx", "watch_scheduler"]

#: The name of the backend.
BACKEND = "lifeboat"

_MARK = "_lifeboat_mlx"
_log = logging.getLogger("lifeboat_cache")


class _StandDownError(LifeboatError):
    """SGLang's own cache is used, for the reason that the message says."""


def uses_mlx(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether SGLang computes with MLX in this environment."""
    value = environ.get("SGLANG_USE_MLX", "").strip().lower()
    return value in ("1", "true", "yes", "y", "on", "t")


def register() -> None:
    """Offer the backend to SGLang. Idempotent."""
    from sglang.srt.mem_cache import registry

    if BACKEND not in registry.registered_radix_cache_backends():
        registry.register_radix_cache_backend(BACKEND, build_cache)


def watch_scheduler() -> None:
    """Have the scheduler ask our cache about requests that arrive and that wait. Idempotent.

    SGLang asks if a storage backend of its own, or LMCache, is configured; this is how it
    comes to think so.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._prefetch_kvcache
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def prefetch_kvcache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.tree_cache, "reads_from_storage", False):
            self.enable_lmcache = True
        return original(self, *args, **kwargs)

    setattr(prefetch_kvcache, _MARK, True)
    Scheduler._prefetch_kvcache = prefetch_kvcache


def build_cache(ctx: Any) -> Any:
    """Build the prefix cache of a scheduler.

    Parameters
    ----------
    ctx
        SGLang's ``TreeCacheBuildContext``.
    """
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    try:
        return _build(ctx)
    except LifeboatError as error:
        reason = str(error)
    except Exception as error:  # a fault of ours
        _log.debug("LifeboatCache: no cache", exc_info=True)
        reason = f"{type(error).__name__}: {error}; please report this"
    from lifeboat_cache.integrations.sglang_activation import stand_down

    stand_down(reason)
    return default_radix_cache_factory(ctx)


def _build(ctx: Any) -> Any:
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.runtime_context import get_serving

    if not uses_mlx():
        raise _StandDownError(
            f"--radix-cache-backend {BACKEND} is for SGLang's MLX backend: leave it out, or set "
            "SGLANG_USE_MLX=1"
        )
    runner = _runner(ctx)
    cache_class: Any
    hybrid = bool(runner._cache_layout.has_auxiliary_state)
    if hybrid:
        from lifeboat_cache.integrations.sglang_mlx_hybrid import LifeboatHybridMlxCache

        cache_class = LifeboatHybridMlxCache
    else:
        from lifeboat_cache.integrations.sglang_mlx_cache import LifeboatMlxCache

        cache_class = LifeboatMlxCache
    from lifeboat_cache.integrations.sglang_mlx_chunks import CHUNK_TOKENS
    from lifeboat_cache.integrations.sglang_mlx_keeping import Keeping

    name = str(get_serving().served_model_name or ctx.server_args.model_path)
    keeping = Keeping(name)
    try:
        cache = create_unified_radix_cache(ctx, cache_class=cache_class)
        cache.connect(keeping, runner, int(ctx.model_config.vocab_size))
    except BaseException:
        keeping.finish(1.0)
        raise
    _log.info(
        "LifeboatCache is on: prefixes of SGLang's MLX backend in chunks of %d tokens",
        CHUNK_TOKENS,
    )
    if hybrid:
        _log.info(
            "LifeboatCache: this model has recurrent state: prefixes come back where it was "
            "stored, and for one request at a time"
        )
    return cache


def _runner(ctx: Any) -> Any:
    """SGLang's MLX runner, with the pool that prefixes are read from.

    Raises
    ------
    LifeboatError
        If there is no such pool.
    """
    if ctx.disable_radix_cache:
        raise _StandDownError("the prefix cache is switched off in this launch: start without that")
    worker = ctx.tp_worker
    runner = getattr(worker, "_mlx_runner", None)
    if runner is None or not hasattr(worker, "_ensure_mlx_pool_initialized"):
        raise _StandDownError(
            "this SGLang has no MLX runner where it is looked for: use a tested version"
        )
    layout = runner._cache_layout
    if layout.has_sliding_window_layers:
        raise _StandDownError(
            "SGLang's MLX backend keeps no pool for models with sliding windows, so there is "
            "nothing to store: serve this one without LifeboatCache"
        )
    if layout.has_auxiliary_state and not hasattr(
        ctx.params.req_to_token_pool, "auxiliary_state_pool"
    ):
        raise _StandDownError(
            "this SGLang keeps the state of hybrid models elsewhere than where it is looked for: "
            "use a tested version"
        )
    # SGLang does it before its first computation; what is restored comes before that.
    worker._ensure_mlx_pool_initialized()
    if runner._attention_kv_pool is None:
        raise _StandDownError(
            "SGLang's MLX backend keeps no pool for this model, so there is nothing to store: "
            "serve it without LifeboatCache"
        )
    return runner
