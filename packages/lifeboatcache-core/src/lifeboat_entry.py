"""The way into LifeboatCache for console scripts and engine plugins.

``lifeboat_cache`` is a namespace package that several distributions fill. Any
distribution that ships a regular package of that name hides all of them, and
Python says nothing. So entry points name this module, which lies outside the
namespace, and reach LifeboatCache only through :func:`load`.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

__all__ = ["ForeignPackageError", "load", "main", "register"]

_NAMESPACE = "lifeboat_cache"
_NAMESPACES = (_NAMESPACE, f"{_NAMESPACE}.integrations")
_logger = logging.getLogger(_NAMESPACE)


class ForeignPackageError(ImportError):
    """Another distribution's ``lifeboat_cache`` stands where ours should be."""


def load(module: str, attribute: str, *, root: Path | None = None) -> Any:
    """Import one attribute of LifeboatCache, and only of LifeboatCache.

    Parameters
    ----------
    module
        Full name of a module in the ``lifeboat_cache`` namespace.
    attribute
        Name in that module.
    root
        Directory that must hold the module's ``lifeboat_cache`` directory:
        that of the caller's distribution. Core's own when left out.

    Raises
    ------
    ForeignPackageError
        When ``lifeboat_cache`` or the module is somebody else's.
    ImportError
        When the module or something that it needs is missing.
    """
    here = Path(__file__).resolve().parent
    _check(f"{_NAMESPACE}.version", here)
    _check(module, root or here)
    return getattr(importlib.import_module(module), attribute)


def _check(module: str, root: Path) -> None:
    """Refuse a module that does not come from below ``root``, before importing any of it."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        origin = _origin(name)
        if origin is None:  # a namespace package, or missing: the import will say so
            continue
        if name in _NAMESPACES or not origin.is_relative_to(root.resolve() / _NAMESPACE):
            raise _foreign(origin)
        return


def _origin(name: str) -> Path | None:
    """Return the file that a name would be imported from; None for a namespace."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # put into sys.modules by hand
        return Path(getattr(sys.modules[name], "__file__", None) or "unknown place")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve()


def _foreign(place: Path) -> ForeignPackageError:
    owner = _owner(place)
    if owner is None:
        remedy = f"remove {place} from Python's path"
    else:
        remedy = (
            f"run `{sys.executable} -m pip uninstall {owner}`, then install LifeboatCache's own "
            f"distributions again"
        )
    return ForeignPackageError(
        f"{_NAMESPACE} is hidden by another distribution"
        f"{f' ({owner})' if owner else ''} at {place}, which is not part of LifeboatCache; {remedy}"
    )


def _owner(place: Path) -> str | None:
    """Return the installed distribution that recorded a file, our own excepted."""
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if file.parts[0] == _NAMESPACE and Path(str(file.locate())).resolve() == place:
                return distribution.name
    return None


def register(module: str, *, root: Path) -> None:
    """Call ``register()`` of an engine plugin's module; never fail the engine.

    Whatever goes wrong is logged as one warning, and the engine goes on as if
    LifeboatCache were not installed.

    Parameters
    ----------
    module
        Full name of the module that holds ``register``.
    root
        See :func:`load`.
    """
    try:
        load(module, "register", root=root)()
    except Exception as error:
        _logger.warning("LifeboatCache is off in this process: %s", error)


def main() -> int:
    """Run the ``lifeboat-cache`` command and return its exit code."""
    try:
        run = load(f"{_NAMESPACE}.cli.main", "main")
    except ForeignPackageError as error:
        print(f"lifeboat-cache: error: {error}", file=sys.stderr)
        return 2
    code: int = run()
    return code
