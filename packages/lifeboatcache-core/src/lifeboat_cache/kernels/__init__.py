"""Compiled kernels: what must run without the GIL.

Nothing here imports numba before :func:`load` finds compiled kernels or
:func:`compile_all` makes them. Engines only ever load; the agent, the command
line and tests compile. Until kernels are there, every caller uses a twin in
Python and numpy with the same results.

Use a kernel so, on every call::

    if kernels.ready():
        from lifeboat_cache.kernels import xxh3
        ...
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING

from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.kernels import cache

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MODULES", "compile_all", "load", "ready", "reason"]

#: Modules of this package that define kernels, in the order in which they are compiled: a
#: kernel may call kernels of its own module and of those before it.
MODULES: tuple[str, ...] = (
    "blake3_short",
    "xxh3",
    "index",
    "journal",
    "collect",
    "coders",
    "io",
)

_NOT_ASKED = "no kernels were asked for yet"

_lock = threading.Lock()
_ready = False
_reason = _NOT_ASKED


def ready() -> bool:
    """Whether the kernels of all modules can be called in this process."""
    return _ready


def reason() -> str:
    """Why the kernels are not ready; empty when they are."""
    return "" if _ready else _reason


def load(home: Path | None = None) -> bool:
    """Load compiled kernels, if there are any for this machine and release; never compile.

    Parameters
    ----------
    home
        The home directory; by default that of this process.

    Returns
    -------
    bool
        What :func:`ready` says from now on; :func:`reason` says why not. It may be
        called again later.
    """
    global _ready, _reason
    with _lock:
        if _ready:
            return True
        try:
            _load_from(cache.directory(_home(home)))
        except Exception as error:
            # Whatever is wrong with compiled code, the twins serve.
            _reason = _said(error)
            return False
        _ready = True
        return True


def compile_all(home: Path | None = None) -> bool:
    """Load the kernels, or compile them for this machine and release (takes a while).

    The set is made in a directory of its own and renamed into place when it is
    complete, so that any number of processes may do this at the same time.

    Returns
    -------
    bool
        As :func:`load`.
    """
    global _ready, _reason
    if load(home) and cache.is_complete(cache.directory(_home(home))):
        return True
    with _lock:
        try:
            place = cache.directory(_home(home))
            with cache.new_set(place) as directory:
                jit = _import_all()
                jit.compile_into(directory)
        except Exception as error:
            if not _ready:
                _reason = f"the kernels could not be compiled: {_said(error)}"
            return _ready
        _ready = True
        return True


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, cache.UnusableError) else repr(error)


def _home(home: Path | None) -> Path:
    try:
        return home_directory(os.environ) if home is None else home
    except ValueError as error:
        raise cache.UnusableError(str(error)) from error


def _import_all() -> cache.Binder:
    """Import numba and the modules; afterwards every kernel is known, and none is compiled."""
    cache.require_jit()
    jit = importlib.import_module("lifeboat_cache.kernels.jit")
    for name in MODULES:
        importlib.import_module(f"lifeboat_cache.kernels.{name}")
    binder: cache.Binder = jit
    return binder


def _load_from(directory: Path) -> None:
    cache.verify(directory)
    _import_all().load_from(directory)
