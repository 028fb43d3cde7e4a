"""Bounds the accelerator memory through which SGLang gathers pages on their way to the host.

SGLang 0.5.23 stages 64 pages at a time. With pages of 64 tokens that is as much as
4,096 tokens of KV, which are then missing from the KV pool.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from lifeboat_cache.integrations.sglang_activation import decision_of

__all__ = ["install"]

_NAME = "_WRITE_BACK_STAGING_PAGE_CHUNK"
_MARK = "_lifeboat_staging"
_log = logging.getLogger("lifeboat_cache")


def install() -> None:
    """Apply what the launch decided before this process allocates. Idempotent."""
    from sglang.srt.managers.scheduler import Scheduler

    original: Callable[..., Any] = Scheduler.init_model_worker
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init_model_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        decision = decision_of(self.server_args)
        if decision is not None and decision.get("staging_pages"):
            bound(int(decision["staging_pages"]))
        return original(self, *args, **kwargs)

    setattr(init_model_worker, _MARK, True)
    Scheduler.init_model_worker = init_model_worker


def bound(pages: int) -> None:
    """Let SGLang stage at most ``pages`` pages, where this SGLang says how many it stages."""
    from sglang.srt.mem_cache.pool_host import base

    staged = getattr(base, _NAME, None)
    if staged is None:
        _log.debug("LifeboatCache: this SGLang does not say how many pages it stages")
        return
    for name, module in list(sys.modules.items()):
        # Modules have the number under its own name.
        if name.startswith("sglang.srt.mem_cache.") and getattr(module, _NAME, None) == staged:
            setattr(module, _NAME, min(pages, staged))
