"""Schedulers load the kernels while they load their model.

It takes a second of Python, on a busy machine several. Begun only when the backend is built,
at the end of a start, it kept the first prompts from being restored: until kernels are there
nothing that is stored in a codec can be loaded.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from lifeboat_cache import kernels
from lifeboat_cache.integrations.sglang_schedulers import before_model

__all__ = ["install"]


def install() -> None:
    """Have schedulers of this process that use LifeboatCache do so. Idempotent."""
    before_model("_lifeboat_kernels", _load)


def _load(_: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError):  # no threads are left: the store loads them
        threading.Thread(target=kernels.load, name="lifeboat-kernels", daemon=True).start()
