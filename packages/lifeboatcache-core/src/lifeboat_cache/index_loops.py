"""Which form of the index's loops runs: compiled or plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lifeboat_cache import kernels
from lifeboat_cache.kernels import index_probe as probe

__all__ = ["PlainLoops", "loops"]


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loop that is not compiled; memoryviews are what plain Python indexes fastest."""

    def call(*arguments: Any) -> Any:
        return function(
            *[memoryview(a) if isinstance(a, np.ndarray) else a for a in arguments]  # type: ignore[arg-type]
        )

    return call


class PlainLoops:
    """What :mod:`lifeboat_cache.kernels.index` offers, not compiled."""

    find = find_brief = staticmethod(_plain(probe.find))
    gather = gather_brief = staticmethod(_plain(probe.gather))
    touch = staticmethod(_plain(probe.touch))
    insert = insert_brief = staticmethod(_plain(probe.insert))
    migrate = staticmethod(_plain(probe.migrate))
    drop = staticmethod(_plain(probe.drop))
    raise_used = staticmethod(_plain(probe.raise_used))
    select = staticmethod(_plain(probe.select))
    bury_all = staticmethod(_plain(probe.bury_all))


_compiled: Any = None


def loops() -> Any:
    """The loops to use now."""
    if not kernels.ready():
        return PlainLoops
    global _compiled
    if _compiled is None:
        from lifeboat_cache.kernels import index

        _compiled = index
    return _compiled
