"""Schedulers load the kernels while they load their model.

It takes a second of Python, on a busy machine several. Begun only when the backend is built,
at the end of a start, it kept the first prompts from being restored: until kernels are there
nothing that is stored in a codec can be loaded.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from lifeboat_cache import kernels
from lifeboat_cache.integrations.sglang_activation import decision_of

__all__ = ["install"]

_MARK = "_lifeboat_kernels"


def install() -> None:
    """Have schedulers of this process that use LifeboatCache do so. Idempotent."""
    from sglang.srt.managers.scheduler import Scheduler

    original: Callable[..., Any] = Scheduler.init_model_worker
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init_model_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        if decision_of(self.server_args) is not None:
            with contextlib.suppress(RuntimeError):  # no threads are left: the store loads them
                threading.Thread(target=kernels.load, name="lifeboat-kernels", daemon=True).start()
        return original(self, *args, **kwargs)

    setattr(init_model_worker, _MARK, True)
    Scheduler.init_model_worker = init_model_worker
