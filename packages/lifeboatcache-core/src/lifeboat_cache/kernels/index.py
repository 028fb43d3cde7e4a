"""The loops of :mod:`lifeboat_cache.kernels.index_probe`, compiled."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from lifeboat_cache.kernels import index_probe
from lifeboat_cache.kernels.jit import brief, inline, kernel

__all__ = [
    "bury_all",
    "drop",
    "find",
    "find_brief",
    "gather",
    "gather_brief",
    "insert",
    "insert_brief",
    "migrate",
    "raise_used",
    "select",
    "touch",
]

_WORDS = "int64[::1]"
_SMALL = "uint32[::1]"
_LINKS = "int32[::1]"
_N = "int64"

_names: dict[str, Any] = dict(vars(index_probe))


def _bound(function: Any, name: str = "") -> FunctionType:
    """The function with compiled ones in the place of those it calls."""
    bound = FunctionType(function.__code__, _names, name or function.__name__)
    bound.__qualname__ = bound.__name__
    return bound


# Each before those that call it.
for _part in ("probe", "locate", "is_buried", "bury", "unlink"):
    _names[_part] = inline(_bound(getattr(index_probe, _part)))


def _declared(function: Any, *arguments: str, returns: str = "void") -> Any:
    return kernel(f"{returns}({', '.join(arguments)})")(_bound(function))


def _both(function: Any, *arguments: str) -> tuple[Any, Any]:
    """A loop that lets go of the GIL, and one for few keys that keeps it."""
    keeping = brief(f"void({', '.join(arguments)})")
    return (
        _declared(function, *arguments),
        keeping(_bound(function, f"{function.__name__}_brief")),
    )


_TABLES = (_WORDS, _WORDS)

find, find_brief = _both(index_probe.find, _WORDS, *_TABLES, _WORDS, _WORDS)
gather, gather_brief = _both(index_probe.gather, _WORDS, *_TABLES, _WORDS, _WORDS, _WORDS)
touch = _declared(index_probe.touch, _WORDS, _N, *_TABLES, _WORDS, _SMALL, _SMALL, returns=_N)
insert, insert_brief = _both(
    index_probe.insert,
    *(_WORDS, _SMALL, _N, _WORDS),
    *_TABLES,
    *(_WORDS, _SMALL, _LINKS, _WORDS),
    *(_SMALL, _SMALL, _WORDS),
)
migrate = _declared(index_probe.migrate, _WORDS, _N, _N, _WORDS, _WORDS)
drop = _declared(
    index_probe.drop,
    *(_WORDS, _SMALL, _SMALL, _SMALL, _N),
    *_TABLES,
    *(_WORDS, _SMALL, _LINKS, _WORDS, _WORDS),
)
raise_used = _declared(index_probe.raise_used, _WORDS, _SMALL, _SMALL, _SMALL, _SMALL, _SMALL)
select = _declared(index_probe.select, _N, _N, _N, _SMALL, _WORDS, returns=_N)
bury_all = _declared(index_probe.bury_all, _SMALL, _SMALL)
