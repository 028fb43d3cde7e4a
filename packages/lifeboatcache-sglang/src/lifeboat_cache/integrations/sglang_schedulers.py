"""What is done in a scheduler before it loads its model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lifeboat_cache.integrations.sglang_activation import decision_of

__all__ = ["before_model"]


def before_model(mark: str, step: Callable[[dict[str, Any]], None]) -> None:
    """Have schedulers of this process that use LifeboatCache do something first. Idempotent.

    Parameters
    ----------
    mark
        Names the step: it is installed once.
    step
        Called with what was decided about the launch. It must not raise.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original: Callable[..., Any] = Scheduler.init_model_worker
    if hasattr(original, mark):
        return

    @functools.wraps(original)
    def init_model_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        decision = decision_of(self.server_args)
        if decision is not None:
            step(decision)
        return original(self, *args, **kwargs)

    setattr(init_model_worker, mark, True)
    Scheduler.init_model_worker = init_model_worker
