"""What the engine calls must not raise: a fault of ours is a miss, not its end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["guarded"]

_log = logging.getLogger("lifeboat_cache")

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def guarded(
    answer: _Answer,
) -> Callable[[Callable[_Arguments, _Answer]], Callable[_Arguments, _Answer]]:
    """Let a method answer ``answer`` where it raises.

    The first fault of a method is logged with its traceback, the others are not:
    the engine may call it thousands of times a second.
    """

    def decorate(method: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
        reported = False

        @functools.wraps(method)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
            nonlocal reported
            try:
                return method(*args, **kwargs)
            except Exception:
                if not reported:
                    reported = True
                    _log.exception(
                        "LifeboatCache: %s failed and is answered without the cache from here on; "
                        "please report this",
                        method.__name__,
                    )
                return answer

        return call

    return decorate
