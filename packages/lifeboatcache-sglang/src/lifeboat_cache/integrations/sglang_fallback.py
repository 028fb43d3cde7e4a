"""A scheduler that cannot build the hierarchical cache goes on without it.

SGLang knows only when the model is loaded whether it has host pools for its KV, and
whether their memory is there, and ends when one of them fails. What LifeboatCache has
switched on must not end a launch, so the cache is then built as without it. The ranks of
a launch agree: they hold collective operations on the cache together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lifeboat_cache.integrations.sglang_activation import decision_of, stand_down

__all__ = ["install"]

_MARK = "_lifeboat_fallback"
_log = logging.getLogger("lifeboat_cache")


def install() -> None:
    """Watch how the schedulers of this process build their caches. Idempotent."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache import kv_cache_builder

    build: Callable[..., Any] = kv_cache_builder.build_kv_cache
    if hasattr(build, _MARK):
        return
    begin: Callable[..., Any] = Scheduler.init_model_worker
    schedulers: list[Any] = []

    @functools.wraps(begin)
    def init_model_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        schedulers[:] = [self]  # which builds its cache next
        return begin(self, *args, **kwargs)

    @functools.wraps(build)
    def build_kv_cache(*args: Any, **kwargs: Any) -> Any:
        scheduler = schedulers[0] if schedulers else None
        decision = None if scheduler is None else decision_of(scheduler.server_args)
        if decision is None or "enable_hierarchical_cache" not in decision["fields"]:
            return build(*args, **kwargs)
        return _build(scheduler, build, args, kwargs)

    Scheduler.init_model_worker = init_model_worker
    setattr(build_kv_cache, _MARK, True)
    kv_cache_builder.build_kv_cache = build_kv_cache


def _build(
    scheduler: Any, build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result, reason = None, None
    try:
        result = build(*args, **kwargs)
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        reason = (
            f"SGLang could not build the hierarchical cache ({text}): leave out what excludes it, "
            "give it memory (--hicache-size), or leave LIFEBOAT_CACHE unset"
        )
    if _all_ranks(reason is None):
        return result
    if result is not None:
        result.tree_cache.shutdown()
        result.tree_cache.release_host_resources()
        reason = "another rank could not build the hierarchical cache, and says above why"
    assert reason is not None
    stand_down(reason)
    _switch_off(scheduler)
    return build(*args, **{**kwargs, "enable_hierarchical_cache": False})


def _all_ranks(good: bool) -> bool:
    """Whether all ranks of the launch are in order."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return good
    import torch
    from sglang.srt.runtime_context import get_parallel

    answer = torch.tensor([int(good)], dtype=torch.int32)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=get_parallel().world_group.cpu_group)
    return bool(answer.item())


def _switch_off(scheduler: Any) -> None:
    """Let the scheduler go on as one that was launched without a hierarchical cache."""
    from sglang.srt.runtime_context import get_context

    get_context().override(
        "lifeboat_cache", enable_hierarchical_cache=False, hicache_storage_backend=None
    )
    scheduler.enable_hierarchical_cache = False
    scheduler.enable_hicache_storage = False
    scheduler.enable_decode_hicache = False
