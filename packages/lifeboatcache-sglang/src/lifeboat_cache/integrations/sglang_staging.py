"""Bounds the accelerator memory through which SGLang gathers pages on their way to the host.

SGLang 0.5.23 stages 64 pages at a time. With pages of 64 tokens that is as much as
4,096 tokens of KV, which are then missing from the KV pool.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from lifeboat_cache.integrations.sglang_schedulers import before_model

__all__ = ["install"]

_NAME = "_WRITE_BACK_STAGING_PAGE_CHUNK"
_log = logging.getLogger("lifeboat_cache")


def install() -> None:
    """Apply what the launch decided before this process allocates. Idempotent."""
    before_model("_lifeboat_staging", _bound)


def _bound(decision: dict[str, Any]) -> None:
    if decision.get("staging_pages"):
        bound(int(decision["staging_pages"]))


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
